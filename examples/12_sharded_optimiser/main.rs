//! A sharded optimiser: each rank keeps Adam's state for its share of the parameters only.
//!
//! ```text
//! cargo run --release -p doorbell-examples --bin 12_sharded_optimiser -- --ranks 4
//! srun -n 4 12_sharded_optimiser
//! ```
//!
//! A reduce-scatter gives each rank the mean gradients of its share; the rank updates those
//! parameters, with moments for no others; an all-gather gives all ranks all parameters. The
//! traffic equals that of an all-reduce, and the optimiser's memory is divided by the ranks.
//!
//! The full-mesh algorithm sums in rank order: rank 0 alone must get bitwise identical parameters.

#![forbid(unsafe_code)]

use std::process::ExitCode;

use doorbell::Context;
use doorbell::collectives::{Algorithm, Communicator, Rank, ReduceOp};
use doorbell_examples::{Error, ranks};

/// Parameters: a prime.
const PARAMETERS: usize = 1009;
const SAMPLES: usize = 24;
const STEPS: i32 = 60;

fn main() -> ExitCode {
    let about = "Fits a linear model with an optimiser whose state is shared out over ranks.";
    ranks::run(about, 3, rank)
}

fn rank(device: &Context) -> Result<(), Error> {
    let comm = Communicator::from_env(device)?;
    let part = PARAMETERS.div_ceil(comm.size() as usize);
    let padded = part * comm.size() as usize;
    let samples = Samples::of(comm.rank());
    let own = comm.rank().index() * part..(comm.rank().index() + 1) * part;

    // Memory of the communicator, zero-initialised: sent without a copy.
    let mut parameters = comm.alloc::<f32>(padded)?;
    let mut gradient = comm.alloc::<f32>(padded)?;
    let mut mean = comm.alloc::<f32>(part)?;
    let mut adam = Adam::new(part);
    let first = loss(&comm, &samples, &parameters)?;
    for _ in 0..STEPS {
        samples.gradient(&parameters[..PARAMETERS], &mut gradient[..PARAMETERS]);
        let share = comm.reduce_scatter_into(&gradient, &mut mean, ReduceOp::Avg);
        share.algorithm(Algorithm::FullMesh).wait()?;
        adam.update(&mut parameters[own.clone()], &mean);
        comm.all_gather(&mut parameters).wait()?;
    }
    let last = loss(&comm, &samples, &parameters)?;
    if last > first / 10.0 {
        return Err(format!("the loss is {last} after {STEPS} steps, and was {first}: nothing was fitted").into());
    }
    if comm.rank() == Rank(0) {
        let reference = unsharded(comm.size());
        let same = |(own, reference): (&f32, &f32)| own.to_bits() == reference.to_bits();
        if !parameters.iter().zip(&reference).all(same) {
            return Err("the parameters are not those of an optimiser that is not sharded".into());
        }
        println!(
            "{PARAMETERS} parameters over {} ranks, {part} in each, {STEPS} steps: the loss fell from {first:.4} to {last:.4}",
            comm.size()
        );
        println!("to the bit as by an optimiser that is not sharded");
    }
    Ok(comm.destroy()?)
}

fn loss(comm: &Communicator, samples: &Samples, parameters: &[f32]) -> Result<f32, Error> {
    let mut loss = [samples
        .errors(&parameters[..PARAMETERS])
        .map(|error| error * error)
        .sum::<f32>()];
    comm.all_reduce(&mut loss, ReduceOp::Avg).wait()?;
    Ok(loss[0] / SAMPLES as f32)
}

/// The same in one process: all ranks' gradients, and all moments.
fn unsharded(ranks: u32) -> Vec<f32> {
    let samples: Vec<_> = (0..ranks).map(|rank| Samples::of(Rank(rank))).collect();
    let mut parameters = vec![0.0; PARAMETERS];
    let mut gradient = vec![0.0; PARAMETERS];
    let mut adam = Adam::new(PARAMETERS);
    for _ in 0..STEPS {
        let mut mean = vec![0.0; PARAMETERS];
        for (rank, samples) in samples.iter().enumerate() {
            samples.gradient(&parameters, &mut gradient);
            for (sum, slope) in mean.iter_mut().zip(&gradient) {
                *sum = if rank == 0 { *slope } else { *sum + slope };
            }
        }
        mean.iter_mut().for_each(|sum| *sum /= ranks as f32);
        adam.update(&mut parameters, &mean);
    }
    parameters
}

/// Adam, with the customary constants.
struct Adam {
    step: i32,
    /// For each parameter: the exponentially decaying means of its slopes, and of their squares.
    moments: Vec<[f32; 2]>,
}

impl Adam {
    fn new(parameters: usize) -> Self {
        Self {
            step: 0,
            moments: vec![[0.0; 2]; parameters],
        }
    }

    fn update(&mut self, parameters: &mut [f32], gradient: &[f32]) {
        const RATE: f32 = 0.01;
        const DECAY: [f32; 2] = [0.9, 0.999];
        self.step += 1;
        let [full, full_square] = DECAY.map(|decay| 1.0 - decay.powi(self.step));
        for ((parameter, slope), [mean, square]) in parameters.iter_mut().zip(gradient).zip(&mut self.moments) {
            *mean = DECAY[0] * *mean + (1.0 - DECAY[0]) * slope;
            *square = DECAY[1] * *square + (1.0 - DECAY[1]) * slope * slope;
            *parameter -= RATE * (*mean / full) / ((*square / full_square).sqrt() + 1e-8);
        }
    }
}

/// Samples of a linear model: each is a row of inputs and its target value.
struct Samples(Vec<(Vec<f32>, f32)>);

impl Samples {
    /// Those of a rank, with a fixed seed.
    fn of(rank: Rank) -> Self {
        // A Lehmer generator: numbers from -1 to 1.
        let mut state = 4000 + u64::from(rank.0);
        let mut number = || {
            state = state * 48271 % 0x7fff_ffff;
            (state as f64 / f64::from(0x3fff_ffff) - 1.0) as f32
        };
        let mut sample = || {
            let inputs: Vec<f32> = (0..PARAMETERS).map(|_| number()).collect();
            let target = inputs.iter().step_by(7).sum();
            (inputs, target)
        };
        Self((0..SAMPLES).map(|_| sample()).collect())
    }

    /// The error of a model for each sample.
    fn errors<'s>(&'s self, parameters: &'s [f32]) -> impl Iterator<Item = f32> + 's {
        self.0.iter().map(move |(inputs, target)| {
            let predicted: f32 = inputs
                .iter()
                .zip(parameters)
                .map(|(value, weight)| value * weight)
                .sum();
            predicted - target
        })
    }

    /// The gradient of half the mean of the squared errors.
    fn gradient(&self, parameters: &[f32], gradient: &mut [f32]) {
        gradient.fill(0.0);
        for ((inputs, _), error) in self.0.iter().zip(self.errors(parameters)) {
            for (sum, value) in gradient.iter_mut().zip(inputs) {
                *sum += error * value / SAMPLES as f32;
            }
        }
    }
}
