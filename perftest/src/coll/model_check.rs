//! `--simulate --measure`: compares the times predicted from calibrated costs with those measured
//! in the same run, for each algorithm and protocol.
//!
//! Each round of a size calibrates the costs anew and then measures all choices in turn, so that
//! disturbances affect all of them. The medians of the rounds count; the tuner's choice is that of
//! the first round, a round's time that of the slowest rank.

use std::thread;
use std::time::{Duration, Instant};

use doorbell_collectives::communicator::Reduction;
use doorbell_collectives::reference::Number;
use doorbell_collectives::tune::{Choice, TuningRequest, median};
use doorbell_collectives::{CollectiveError, Communicator, Rank, ReduceOp};
use serde::Serialize;

use super::measure::{Buffers, TypedJob, all_values, dispatch};
use super::table::Chosen;
use super::{CollArgs, traffic};
use crate::failure::{Failure, refused};
use crate::report::{print_line, print_result};

const ROUNDS: usize = 5;
/// Duration of a choice in a round, seconds.
const SECONDS: f64 = 0.002;
/// Waits until the buffers freed by the calibration are unmapped at both ends.
const POLL_INTERVAL: Duration = Duration::from_millis(10);
/// Largest relative error of a correct prediction.
const MAX_ERROR: f64 = 0.15;
/// A choice is good if it takes at most this fraction longer than the best.
const GOOD_ENOUGH: f64 = 0.10;

#[derive(Serialize)]
struct ModelCheck {
    test: &'static str,
    ranks: u32,
    results: Vec<ChoiceRow>,
    /// Predictions within 15 %, and all.
    #[serde(rename = "right")]
    within_error: usize,
    predictions: usize,
    /// Sizes whose choice is within 10 % of the best measured one, and all.
    well_chosen: usize,
    sizes: usize,
}

#[derive(Serialize)]
struct ChoiceRow {
    #[serde(flatten)]
    choice: Chosen,
    predicted_us: f64,
    measured_us: f64,
    /// Predicted over measured time, of the same round.
    ratio: f64,
    /// Whether the tuner chooses it by default.
    chosen: bool,
    /// Measured time over the best at this size.
    by_best: f64,
}

impl ChoiceRow {
    fn is_right(&self) -> bool {
        (self.ratio - 1.0).abs() <= MAX_ERROR
    }
}

/// # Errors
/// [`Failure::Test`] when an operation fails, or stdout cannot be written.
pub(super) fn run(args: &CollArgs, comm: &Communicator) -> Result<(), Failure> {
    let table = comm.rank() == Rank(0) && !args.json;
    if table {
        let head = format!(
            "# doorbell coll {}: {} ranks, predicted and measured; * is what is chosen\n{} {:>14} {:>13} {:>6} {:>7}",
            args.collective(),
            comm.size(),
            Chosen::head(),
            "predicted[us]",
            "measured[us]",
            "ratio",
            "of best"
        );
        print_line(&head)?;
    }
    let mut results = Vec::new();
    for bytes in args.sizes() {
        let mut job = Job { args, comm, bytes };
        let rows = dispatch(args.dtypes()[0], &mut job).map_err(refused)?;
        if table {
            rows.iter().try_for_each(print)?;
        }
        results.extend(rows);
    }
    if comm.rank() != Rank(0) {
        return Ok(());
    }
    let chosen = || results.iter().filter(|row| row.chosen);
    let check = ModelCheck {
        test: args.collective().name(),
        ranks: comm.size(),
        within_error: results.iter().filter(|row| row.is_right()).count(),
        predictions: results.len(),
        well_chosen: chosen().filter(|row| row.by_best <= 1.0 + GOOD_ENOUGH).count(),
        sizes: chosen().count(),
        results,
    };
    if args.json {
        return print_result(&check);
    }
    print_line(&format!(
        "# {} of {} predictions within {:.0} % (of what is chosen {} of {}); {} of {} choices within {:.0} % of the best",
        check.within_error,
        check.predictions,
        MAX_ERROR * 100.0,
        check.results.iter().filter(|row| row.chosen && row.is_right()).count(),
        check.sizes,
        check.well_chosen,
        check.sizes,
        GOOD_ENOUGH * 100.0
    ))
}

fn print(row: &ChoiceRow) -> Result<(), Failure> {
    let off = if row.is_right() { "" } else { " off" };
    let worse = if row.chosen && row.by_best > 1.0 + GOOD_ENOUGH {
        " worse"
    } else {
        ""
    };
    print_line(&format!(
        "{} {:>14.2} {:>13.2} {:>6.2} {:>7.2}{}{off}{worse}",
        row.choice.columns(),
        row.predicted_us,
        row.measured_us,
        row.ratio,
        row.by_best,
        if row.chosen { " *" } else { "" },
    ))
}

struct Job<'a> {
    args: &'a CollArgs,
    comm: &'a Communicator,
    bytes: u64,
}

struct CandidateChoice {
    choice: Choice,
    iterations: u32,
    /// Predicted and measured, seconds.
    rounds: Vec<(f64, f64)>,
}

impl TypedJob for Job<'_> {
    type Out = Result<Vec<ChoiceRow>, CollectiveError>;

    fn with<T: Number>(&mut self) -> Self::Out {
        let Self { args, comm, bytes } = *self;
        let root = Rank(args.root().unwrap_or(0));
        let case = traffic::case(args.collective(), comm.size(), root, bytes, T::TYPE);
        if case.count == 0 {
            // An empty operation, where all algorithms are equal.
            return Ok(Vec::new());
        }
        let moved = case.count * T::TYPE.bytes() as u64 * traffic::parts(case.collective, case.ranks);
        comm.calibrate()?;
        let decision = comm.explain(case.collective, root, T::TYPE, moved)?;
        let (hosts, order) = (comm.hosts(), comm.order());
        let question = TuningRequest {
            collective: case.collective,
            bytes: moved,
            data: T::TYPE,
            root,
            deterministic: false,
        };
        let mut candidates: Vec<_> = decision
            .candidates
            .iter()
            .map(|candidate| CandidateChoice {
                choice: candidate.choice,
                iterations: 1,
                rounds: Vec::with_capacity(ROUNDS),
            })
            .collect();
        let mut buffers = Buffers::<T>::apart(comm, &case)?;
        let op = Reduction::from(ReduceOp::Sum);
        let mut time = |candidate: &Choice, iterations: u32| {
            // Warm-up, as the caches hold the data of other choices.
            for _ in 0..=iterations / 4 {
                buffers.run(comm, &case, &op, Some(candidate))?;
            }
            comm.barrier().wait()?;
            let began = Instant::now();
            for _ in 0..iterations {
                buffers.run(comm, &case, &op, Some(candidate))?;
            }
            let mine = began.elapsed().as_secs_f64() / f64::from(iterations);
            Ok::<_, CollectiveError>(all_values(comm, mine)?.into_iter().fold(0.0, f64::max))
        };
        for candidate in &mut candidates {
            let trial = time(&candidate.choice, 3)?;
            candidate.iterations = ((SECONDS / trial.max(1e-9)) as u32).clamp(1, 2000);
        }
        for _ in 0..ROUNDS {
            comm.calibrate()?;
            thread::sleep(POLL_INTERVAL);
            let tuner = comm.tuner();
            for candidate in &mut candidates {
                let measured = time(&candidate.choice, candidate.iterations)?;
                // All candidates have a prediction.
                let predicted = tuner
                    .predict_ns(&question, &hosts, &order, &candidate.choice)
                    .unwrap_or(0.0);
                candidate.rounds.push((predicted / 1e9, measured));
            }
        }
        Ok(rows(bytes, &decision.choice, candidates))
    }
}

fn rows(bytes: u64, chosen: &Choice, candidates: Vec<CandidateChoice>) -> Vec<ChoiceRow> {
    let mut rows: Vec<_> = candidates
        .into_iter()
        .map(|candidate| {
            let of = |what: fn(&(f64, f64)) -> f64| median(candidate.rounds.iter().map(what).collect());
            ChoiceRow {
                choice: Chosen::new(bytes, &candidate.choice),
                predicted_us: of(|round| round.0) * 1e6,
                measured_us: of(|round| round.1) * 1e6,
                ratio: of(|round| round.0 / round.1),
                chosen: candidate.choice == *chosen,
                by_best: 1.0,
            }
        })
        .collect();
    let best = rows.iter().map(|row| row.measured_us).fold(f64::INFINITY, f64::min);
    for row in &mut rows {
        row.by_best = row.measured_us / best;
    }
    rows
}
