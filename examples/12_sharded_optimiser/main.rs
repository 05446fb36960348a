//! A sharded optimiser step: each rank keeps the optimiser's state for its part of the parameters alone.
//!
//! ```text
//! cargo run --release -p doorbell-examples --bin 12_sharded_optimiser
//! srun -n 4 target/release/12_sharded_optimiser
//! ```
//!
//! Adam keeps two numbers for each parameter. Instead of doing so on every rank, the gradients are reduced in such a way that each rank gets the average of its part only (reduce_scatter); it updates the parameters of that part, and
//! all get all of them back (all_gather). Both are in place, in memory of the communicator's, so nothing is copied. The parameters do not divide by the ranks: the memory is longer by what is missing.
//! In the end each rank compares with what one rank with all the state comes to.

#![forbid(unsafe_code)]

use std::process::ExitCode;

use doorbell_collectives::{Communicator, Rank, ReduceOp};
use doorbell_examples::{Error, as_ranks, report};

/// The ranks that are started, if nobody else has started any.
const RANKS: u32 = 3;
const PARAMETERS: usize = 10_007;
const STEPS: u32 = 60;

fn main() -> ExitCode {
    report(as_ranks(RANKS, false, run))
}

fn run(comm: &Communicator) -> Result<(), Error> {
    let (ranks, me) = (comm.size() as usize, comm.rank().index());
    let part = PARAMETERS.div_ceil(ranks);
    let own = me * part..(me + 1) * part;

    let mut parameters = comm.alloc::<f32>(part * ranks)?;
    let mut gradients = comm.alloc::<f32>(part * ranks)?;
    let mut adam = Adam::new(part);
    for step in 1..=STEPS {
        gradient(comm.rank(), &parameters, &mut gradients);
        comm.reduce_scatter(&mut gradients, ReduceOp::Avg).wait()?;
        adam.step(step, &mut parameters[own.clone()], &gradients[own.clone()]);
        comm.all_gather(&mut parameters).wait()?;
    }

    let (wrong, at) = alone(comm.size(), part * ranks)
        .iter()
        .zip(parameters.iter())
        .map(|(wanted, got)| (wanted - got).abs())
        .zip(0..)
        .fold((0.0, 0), |worst, one| if one.0 > worst.0 { one } else { worst });
    // Averages are rounded in another order.
    if wrong.is_nan() || wrong > 1e-4 {
        return Err(format!("parameter {at} differs by {wrong} from what one rank alone comes to").into());
    }
    if comm.rank() == Rank(0) {
        println!(
            "{STEPS} steps of {PARAMETERS} parameters: each of {ranks} ranks kept the state of {part}, and all have what one alone comes to"
        );
    }
    Ok(())
}

/// How the loss of a rank's data changes with the parameters: it would have each somewhere else.
fn gradient(rank: Rank, parameters: &[f32], into: &mut [f32]) {
    for (at, (slope, parameter)) in into.iter_mut().zip(parameters).enumerate() {
        let goal = ((at * 31 + rank.index() * 17) % 100) as f32 / 50.0 - 1.0;
        *slope = parameter - goal;
    }
}

/// Adam (Kingma and Ba, 2015), for a part of the parameters.
struct Adam {
    mean: Vec<f32>,
    square: Vec<f32>,
}

impl Adam {
    fn new(parameters: usize) -> Self {
        Self {
            mean: vec![0.0; parameters],
            square: vec![0.0; parameters],
        }
    }

    fn step(&mut self, step: u32, parameters: &mut [f32], gradients: &[f32]) {
        const RATE: f32 = 0.05;
        const MEAN: f32 = 0.9;
        const SQUARE: f32 = 0.999;
        let (mean_bias, square_bias) = (1.0 - MEAN.powi(step as i32), 1.0 - SQUARE.powi(step as i32));
        let state = self.mean.iter_mut().zip(&mut self.square);
        for ((parameter, slope), (mean, square)) in parameters.iter_mut().zip(gradients).zip(state) {
            *mean = MEAN * *mean + (1.0 - MEAN) * slope;
            *square = SQUARE * *square + (1.0 - SQUARE) * slope * slope;
            *parameter -= RATE * (*mean / mean_bias) / ((*square / square_bias).sqrt() + 1e-4);
        }
    }
}

/// What one rank that has all data and all state comes to.
fn alone(ranks: u32, len: usize) -> Vec<f32> {
    let mut parameters = vec![0.0; len];
    let mut adam = Adam::new(len);
    let mut one = vec![0.0; len];
    for step in 1..=STEPS {
        let mut sum = vec![0.0; len];
        for rank in (0..ranks).map(Rank) {
            gradient(rank, &parameters, &mut one);
            sum.iter_mut().zip(&one).for_each(|(sum, slope)| *sum += slope);
        }
        sum.iter_mut().for_each(|sum| *sum /= ranks as f32);
        adam.step(step, &mut parameters, &sum);
    }
    parameters
}
