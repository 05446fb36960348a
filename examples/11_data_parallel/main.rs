//! Data-parallel training: each rank has some of the data, and gradients are averaged while the backward pass still computes others.
//!
//! ```text
//! cargo run --release -p doorbell-examples --bin 11_data_parallel
//! torchrun --no-python --nproc-per-node 2 target/release/11_data_parallel
//! ```
//!
//! A network of three layers learns a curve. Its gradients are in buckets, one for each layer, in memory of the communicator's. The backward pass goes from the last layer to the first; as soon as a bucket is full its average
//! over all ranks is started, and gets on in the background while the layers before are computed. Before the step each bucket is waited for and given back. In the end the ranks compare their weights: the bits are the same.

#![forbid(unsafe_code)]

use std::process::ExitCode;

use doorbell_collectives::{CommBuffer, Communicator, Rank, ReduceOp};
use doorbell_examples::{Error, as_ranks, report};

/// The ranks that are started, if nobody else has started any.
const RANKS: u32 = 3;
const STEPS: usize = 400;
/// Points of the curve that each rank has.
const POINTS: usize = 24;
const RATE: f32 = 0.1;
/// Neurons before the first layer, between the layers and after the last.
const WIDTHS: [usize; 4] = [1, 24, 24, 1];
const LAYERS: usize = WIDTHS.len() - 1;

fn main() -> ExitCode {
    report(as_ranks(RANKS, true, run))
}

/// Weights of a layer: for each neuron those of its inputs, and its bias.
type Layer = Vec<f32>;

fn run(comm: &Communicator) -> Result<(), Error> {
    let mut layers: Vec<Layer> = (0..LAYERS).map(initial).collect();
    let mut buckets = (0..LAYERS)
        .map(|layer| comm.alloc::<f32>(layers[layer].len()))
        .collect::<Result<Vec<_>, _>>()?;
    let data = data(comm.rank(), comm.size());
    let mut first = None;
    let mut last = 0.0;
    for _ in 0..STEPS {
        let (loss, averaged) = step(comm, &layers, buckets, &data)?;
        buckets = averaged;
        for (layer, gradient) in layers.iter_mut().zip(&buckets) {
            for (weight, slope) in layer.iter_mut().zip(gradient.iter()) {
                *weight -= RATE * slope;
            }
        }
        let mut all = [loss];
        comm.all_reduce(&mut all, ReduceOp::Avg).wait()?;
        first.get_or_insert(all[0]);
        last = all[0];
    }
    let first = first.unwrap_or(f32::INFINITY);
    if last.is_nan() || last > first / 10.0 {
        return Err(format!("the loss has come from {first} to {last} only").into());
    }
    same_everywhere(comm, &layers)?;
    if comm.rank() == Rank(0) {
        println!(
            "{} ranks, {STEPS} steps: the loss is a tenth or less, the weights are the same bits",
            comm.size()
        );
    }
    Ok(())
}

/// One pass forward and back. Gives the loss on this rank's data, and the gradients, averaged over all ranks, in the buckets.
fn step(
    comm: &Communicator,
    layers: &[Layer],
    buckets: Vec<CommBuffer<f32>>,
    data: &[(f32, f32)],
) -> Result<(f32, Vec<CommBuffer<f32>>), Error> {
    // By layer and point: what goes into the layer, and what comes out of the last.
    let mut values = vec![data.iter().map(|(x, _)| vec![*x]).collect::<Vec<_>>()];
    for layer in 0..LAYERS {
        let outputs = values[layer]
            .iter()
            .map(|inputs| forward(layer, &layers[layer], inputs));
        values.push(outputs.collect());
    }
    let errors = values[LAYERS].iter().zip(data).map(|(output, (_, y))| output[0] - y);
    // By point: how the loss changes with what comes out of the layer.
    let mut slopes: Vec<Vec<f32>> = errors
        .clone()
        .map(|error| vec![2.0 * error / data.len() as f32])
        .collect();
    let loss = errors.map(|error| error * error).sum::<f32>() / data.len() as f32;

    let mut requests = Vec::new();
    for (layer, mut bucket) in buckets.into_iter().enumerate().rev() {
        bucket.fill(0.0);
        for point in 0..data.len() {
            let (inputs, outputs) = (&values[layer][point], &values[layer + 1][point]);
            slopes[point] = backward(layer, &layers[layer], inputs, outputs, &slopes[point], &mut bucket);
        }
        // The layers before are computed while this one is averaged.
        requests.push(comm.all_reduce(bucket, ReduceOp::Avg).start()?);
    }
    let averaged = requests.into_iter().rev().map(|request| request.wait());
    Ok((loss, averaged.collect::<Result<_, _>>()?))
}

/// What comes out of a layer: a hyperbolic tangent of it, but for the last.
fn forward(layer: usize, weights: &Layer, inputs: &[f32]) -> Vec<f32> {
    let neuron = |weights: &[f32]| {
        let sum = inputs
            .iter()
            .zip(weights)
            .map(|(input, weight)| input * weight)
            .sum::<f32>()
            + weights[inputs.len()];
        if layer + 1 == LAYERS { sum } else { sum.tanh() }
    };
    weights.chunks(inputs.len() + 1).map(neuron).collect()
}

/// Adds what a point says about a layer to its gradient, and gives how the loss changes with what went into the layer.
fn backward(
    layer: usize,
    weights: &Layer,
    inputs: &[f32],
    outputs: &[f32],
    slopes: &[f32],
    gradient: &mut [f32],
) -> Vec<f32> {
    let mut before = vec![0.0; inputs.len()];
    let width = inputs.len() + 1;
    let neurons = weights.chunks(width).zip(gradient.chunks_mut(width));
    for ((weights, gradient), (output, slope)) in neurons.zip(outputs.iter().zip(slopes)) {
        let slope = if layer + 1 == LAYERS {
            *slope
        } else {
            slope * (1.0 - output * output)
        };
        for (at, input) in inputs.iter().enumerate() {
            gradient[at] += slope * input;
            before[at] += slope * weights[at];
        }
        gradient[inputs.len()] += slope;
    }
    before
}

/// The weights that training begins with, the same on all ranks.
fn initial(layer: usize) -> Layer {
    let (inputs, neurons) = (WIDTHS[layer], WIDTHS[layer + 1]);
    let spread = 1.0 / (inputs as f32).sqrt();
    let draw = |at: usize| ((at * 7919 + layer * 104_729) % 2003) as f32 / 1001.0 - 1.0;
    (0..neurons * (inputs + 1)).map(|at| draw(at) * spread).collect()
}

/// This rank's points of the curve: every so many-th.
fn data(rank: Rank, ranks: u32) -> Vec<(f32, f32)> {
    let all = POINTS * ranks as usize;
    let point = |at: usize| {
        let x = at as f32 / all as f32 * 2.0 - 1.0;
        (x, (3.0 * x).sin())
    };
    (rank.index()..all).step_by(ranks as usize).map(point).collect()
}

/// Compares the weights of all ranks, bit by bit.
fn same_everywhere(comm: &Communicator, layers: &[Layer]) -> Result<(), Error> {
    let mine: Vec<u32> = layers.iter().flatten().map(|weight| weight.to_bits()).collect();
    let mut all = vec![0; mine.len() * comm.size() as usize];
    comm.all_gather_into(&mine, &mut all).wait()?;
    match all.chunks(mine.len()).position(|weights| weights != mine) {
        Some(other) => Err(format!("ranks {} and {other} have come to different weights", comm.rank()).into()),
        None => Ok(()),
    }
}
