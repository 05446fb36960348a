//! Aborts, and ranks that do not begin an operation. Ranks that are killed, stopped and cut off are
//! in `tests/sweep`.

use std::thread;
use std::time::{Duration, Instant};

use doorbell_collectives::{Options, Rank, ReduceOp};

use crate::world;

/// Scheduling delay of a thread on a busy machine.
const LATE: Duration = Duration::from_secs(2);
/// For operations without a time limit.
const TIMEOUT: Duration = Duration::from_secs(60);

#[test]
fn an_abort_reaches_all_waiting_ranks() {
    let options = world::options();
    let errors = world::ranks(3, &options, |comm| {
        thread::scope(|scope| {
            if comm.rank() == Rank(1) {
                scope.spawn(|| {
                    thread::sleep(Duration::from_millis(50));
                    comm.abort("the loss is not a number");
                });
                let began = Instant::now();
                while !comm.has_failed() {
                    assert!(began.elapsed() < TIMEOUT);
                    thread::yield_now();
                }
            }
            comm.all_reduce(&mut [0.0f32; 10], ReduceOp::Sum).wait().unwrap_err()
        })
    });
    for error in errors {
        assert_eq!(error.culprit(), Some(Rank(1)));
        assert!(
            error.to_string().contains("aborted: the loss is not a number"),
            "{error}"
        );
    }
}

#[test]
fn a_rank_that_does_not_begin_is_named_within_the_deadline() {
    let options = Options {
        deadline: Duration::from_secs(2),
        ..world::options()
    };
    let errors = world::ranks(3, &options, |comm| {
        comm.barrier().wait().unwrap();
        let began = Instant::now();
        if comm.rank() == Rank(2) {
            while !comm.has_failed() {
                assert!(began.elapsed() < TIMEOUT);
                thread::sleep(Duration::from_millis(1));
            }
        }
        let error = comm.all_reduce(&mut [0.0f32; 10], ReduceOp::Sum).wait().unwrap_err();
        assert!(began.elapsed() < Duration::from_secs(2) + LATE);
        error
    });
    for error in errors {
        assert_eq!(error.culprit(), Some(Rank(2)), "{error}");
        assert!(error.to_string().contains("has not begun operation 2"), "{error}");
    }
}
