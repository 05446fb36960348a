//! Data-parallel training: gradients are summed over all ranks while they are being computed.
//!
//! ```text
//! cargo run --release -p doorbell-examples --bin 11_data_parallel -- --ranks 4
//! torchrun --nproc-per-node 4 --no-python 11_data_parallel
//! ```
//!
//! Backwards, a layer's gradient is a bucket: its all-reduce is *started* as soon as it is
//! computed, and the communicator's progress thread drives it while earlier layers are computed. A
//! started operation owns its bucket, which cannot be written meanwhile.
//!
//! All ranks end with identical weights; rank 0 then trains alone: only rounding differs.

#![forbid(unsafe_code)]

mod network;

use std::process::ExitCode;
use std::slice;

use doorbell::Context;
use doorbell::collectives::bootstrap::Group;
use doorbell::collectives::{CommBuffer, Communicator, Options, Rank, ReduceOp};
use doorbell_examples::{Error, ranks};
use network::{Network, Pass, Sample};

/// Samples of all ranks together; not divisible by most numbers of ranks.
const SAMPLES: usize = 251;
const STEPS: usize = 120;
const RATE: f32 = 0.2;
/// Another order of 251 sums differs by 10⁻⁷ per step; tenfold, for amplification by later steps.
const BOUND: f32 = 1e-5;

fn main() -> ExitCode {
    let about = "Trains a small network, with the gradients summed over ranks while they are computed.";
    ranks::run(about, 3, rank)
}

fn rank(device: &Context) -> Result<(), Error> {
    let options = Options {
        progress_thread: true,
        ..Options::from_env()?
    };
    let comm = Communicator::new(slice::from_ref(device), Group::from_env()?, options)?;
    let samples = network::samples(SAMPLES);
    let own = &samples[ranks::share(SAMPLES, comm.size(), comm.rank())];

    // Each rank starts with its own weights; those of rank 0 are broadcast.
    let mut network = Network::random(comm.rank().0 + 1);
    for layer in &mut network.layers {
        comm.broadcast(&mut layer.weights, Rank(0)).wait()?;
    }
    let untrained = network.clone();
    let (first, last) = train(&comm, &mut network, own)?;
    if last > first / 5.0 {
        return Err(format!("the loss is {last} after {STEPS} steps, and was {first}: nothing was learned").into());
    }
    same_everywhere(&comm, &network)?;

    let colour = (comm.rank() == Rank(0)).then_some(0);
    if let Some(alone) = comm.split(colour, 0)? {
        let mut reference = untrained;
        train(&alone, &mut reference, &samples)?;
        let difference = network.furthest(&reference);
        if difference > BOUND {
            return Err(format!("a weight is {difference} off the one that was trained by a single rank").into());
        }
        println!(
            "{SAMPLES} samples over {} ranks, {STEPS} steps: the loss fell from {first:.4} to {last:.4}",
            comm.size()
        );
        println!("the same weights on all ranks, and within {BOUND} of those of a single rank");
        alone.destroy()?;
    }
    Ok(comm.destroy()?)
}

/// Returns the loss before and after, over all samples.
fn train(comm: &Communicator, network: &mut Network, samples: &[Sample]) -> Result<(f32, f32), Error> {
    let buckets = network.layers.iter().map(|layer| comm.alloc(layer.weights.len()));
    let mut buckets: Vec<CommBuffer<f32>> = buckets.collect::<Result<_, _>>()?;
    let mut pass = Pass::new(network, samples.len());
    let first = loss(comm, &pass.forward(network, samples))?;
    for _ in 0..STEPS {
        let mut slope = pass.forward(network, samples);
        let mut in_flight = Vec::new();
        for (layer, mut bucket) in buckets.drain(..).enumerate().rev() {
            slope = pass.backward(network, layer, &slope, &mut bucket);
            in_flight.push(comm.all_reduce(bucket, ReduceOp::Sum).start()?);
        }
        for (layer, request) in network.layers.iter_mut().rev().zip(in_flight) {
            let gradient = request.wait()?;
            for (weight, slope) in layer.weights.iter_mut().zip(gradient.iter()) {
                *weight -= RATE / SAMPLES as f32 * slope;
            }
            buckets.push(gradient);
        }
        buckets.reverse();
    }
    let last = loss(comm, &pass.forward(network, samples))?;
    Ok((first, last))
}

/// The mean of the squares of all ranks' errors.
fn loss(comm: &Communicator, errors: &[f32]) -> Result<f32, Error> {
    let mut sum = [errors.iter().map(|error| error * error).sum::<f32>()];
    comm.all_reduce(&mut sum, ReduceOp::Sum).wait()?;
    Ok(sum[0] / SAMPLES as f32)
}

/// Whether the weights of all ranks are bitwise identical.
fn same_everywhere(comm: &Communicator, network: &Network) -> Result<(), Error> {
    let weights = network.layers.iter().flat_map(|layer| &layer.weights);
    let bits: Vec<u32> = weights.map(|weight| weight.to_bits()).collect();
    let (mut least, mut most) = (vec![0; bits.len()], vec![0; bits.len()]);
    comm.group(|group| {
        group.add(comm.all_reduce_into(&bits, &mut least, ReduceOp::Min))?;
        group.add(comm.all_reduce_into(&bits, &mut most, ReduceOp::Max))
    })?;
    if least == most {
        Ok(())
    } else {
        Err("the ranks have come to different weights".into())
    }
}
