//! `doorbell coll`: collective tests in the style of nccl-tests.
//!
//! `launch` starts ranks of this host as processes; `rank` is one of them, or of a launcher's;
//! `measure` and `gpu` time and check on all ranks; `traffic` has the formulas, `table` prints;
//! `moe` measures dispatch and combine; `explain` shows the choice of the algorithm, `simulate`
//! predicts times, `model_check` compares them with measurements.

mod args;
mod bind;
mod explain;
mod gpu;
mod launch;
mod measure;
mod model_check;
mod moe;
mod rank;
mod simulate;
mod table;
mod traffic;

use doorbell_collectives::plan::Collective;

pub(crate) use args::{CollArgs, NOTES};

use crate::failure::Failure;

/// The most ranks that are started here.
const MAX_RANKS: u32 = 64;

/// # Errors
/// The test's, with its exit status.
pub(crate) fn run(args: &CollArgs) -> Result<(), Failure> {
    check_options(args)?;
    match (args.ranks, args.rank) {
        (Some(ranks), _) if args.simulate && !args.measure => simulate::run(args, ranks),
        (Some(ranks), None) => {
            if ranks > MAX_RANKS {
                return Err(Failure::usage(format!(
                    "--ranks {ranks}: at most {MAX_RANKS} are started here; more can be simulated, with --simulate"
                )));
            }
            launch::run(args, ranks)
        }
        (Some(ranks), Some(rank)) => rank::child(args, rank, ranks),
        (None, _) => rank::launched(args),
    }
}

fn check_options(args: &CollArgs) -> Result<(), Failure> {
    moe::check_options(args)?;
    gpu::check_options(args)?;
    let operation = args.collective();
    if args.last_size() < args.min_bytes {
        return Err(Failure::usage(format!(
            "the largest size, {}, is less than the smallest, {}: give -e at least -b",
            args.last_size(),
            args.min_bytes
        )));
    }
    if args.step_factor.is_none() && args.step_bytes == 0 {
        return Err(Failure::usage(
            "-i 0 never reaches the largest size: give 1 at least, or a factor with -f",
        ));
    }
    if args.deadline.is_zero() {
        return Err(Failure::usage("--deadline 0: give operations some time, as 3s"));
    }
    if let (Some(root), Some(ranks)) = (args.root(), args.ranks)
        && root >= ranks
    {
        return Err(Failure::usage(format!(
            "rank {root} cannot be the root of {ranks} ranks: they are 0 to {}",
            ranks - 1
        )));
    }
    if let Some(algorithm) = args.algorithm.0 {
        if !algorithm.supports(operation) {
            return Err(Failure::usage(format!(
                "{algorithm} does not do {operation}: one of {}",
                names(operation, false)
            )));
        }
        if args.deterministic && !algorithm.deterministic(operation) {
            return Err(Failure::usage(format!(
                "{algorithm} does {operation} in an order that depends on how it is cut: one of {}, or without --deterministic",
                names(operation, true)
            )));
        }
    }
    if args.svg.is_some() && !args.explain && !args.simulate {
        return Err(Failure::usage(
            "--svg is what --explain or --simulate draws: give one of them",
        ));
    }
    Ok(())
}

fn names(operation: Collective, deterministic: bool) -> String {
    let all = doorbell_collectives::Algorithm::of(operation);
    let those = all.filter(|algorithm| !deterministic || algorithm.deterministic(operation));
    those.map(|algorithm| algorithm.name()).collect::<Vec<_>>().join(", ")
}
