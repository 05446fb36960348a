//! A sharded optimiser: each rank keeps the state of Adam for its share of the parameters only, and updates only that.
//!
//! ```text
//! cargo run --release -p doorbell-examples --bin 12_sharded_optimiser -- --ranks 4
//! srun -n 4 12_sharded_optimiser
//! ```
//!
//! Three operations are a step. A reduce-scatter gives each rank the mean of all ranks' gradients, for its own share. The rank updates those parameters, with two moments for each of them and for no others. An all-gather gives all ranks
//! all parameters. So much is sent as by an all-reduce of the gradients, and the optimiser's memory is a share of what it would be.
//!
//! The parameters do not divide by the ranks: what all have is a little longer, so that shares are of one length. Full mesh sums in the order of the ranks, as its documentation says; rank 0 does the same in a loop, with an optimiser that
//! is not sharded, and has to come to the same parameters to the bit.

#![forbid(unsafe_code)]

use std::process::ExitCode;

use doorbell_collectives::{Algorithm, Communicator, Rank, ReduceOp};
use doorbell_examples::{Error, ranks};
use doorbell_verbs::Context;

/// Parameters: a prime.
const PARAMETERS: usize = 1009;
/// Samples of each rank.
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

    // Memory of the communicator's, zeros at first: nothing of it is copied on its way.
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

/// The mean of all ranks' losses.
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
    /// For each parameter: the mean of its slopes, and of their squares, the later ones weighing more.
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
        const KEPT: [f32; 2] = [0.9, 0.999];
        self.step += 1;
        let [full, full_square] = KEPT.map(|kept| 1.0 - kept.powi(self.step));
        for ((parameter, slope), [mean, square]) in parameters.iter_mut().zip(gradient).zip(&mut self.moments) {
            *mean = KEPT[0] * *mean + (1.0 - KEPT[0]) * slope;
            *square = KEPT[1] * *square + (1.0 - KEPT[1]) * slope * slope;
            *parameter -= RATE * (*mean / full) / ((*square / full_square).sqrt() + 1e-8);
        }
    }
}

/// Samples of a linear model: each is a row of known values, and the value that is wanted.
struct Samples(Vec<(Vec<f32>, f32)>);

impl Samples {
    /// Those of a rank, which are always the same.
    fn of(rank: Rank) -> Self {
        // A generator of Lehmer's: numbers from -1 to 1.
        let mut state = 4000 + u64::from(rank.0);
        let mut number = || {
            state = state * 48271 % 0x7fff_ffff;
            (state as f64 / f64::from(0x3fff_ffff) - 1.0) as f32
        };
        let mut sample = || {
            let known: Vec<f32> = (0..PARAMETERS).map(|_| number()).collect();
            // By every seventh value alone.
            let wanted = known.iter().step_by(7).sum();
            (known, wanted)
        };
        Self((0..SAMPLES).map(|_| sample()).collect())
    }

    /// By how much a model is wrong about each.
    fn errors<'s>(&'s self, parameters: &'s [f32]) -> impl Iterator<Item = f32> + 's {
        self.0.iter().map(move |(known, wanted)| {
            let said: f32 = known.iter().zip(parameters).map(|(value, weight)| value * weight).sum();
            said - wanted
        })
    }

    /// The slope of half the mean of the errors' squares.
    fn gradient(&self, parameters: &[f32], gradient: &mut [f32]) {
        gradient.fill(0.0);
        for ((known, _), error) in self.0.iter().zip(self.errors(parameters)) {
            for (sum, value) in gradient.iter_mut().zip(known) {
                *sum += error * value / SAMPLES as f32;
            }
        }
    }
}
