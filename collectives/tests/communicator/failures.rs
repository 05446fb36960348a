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

#[test]
fn a_waiting_rank_can_abort_between_its_polls() {
    let errors = world::ranks(2, &world::options(), |comm| {
        let mut waits = 0;
        if comm.rank() == Rank(1) {
            let began = Instant::now();
            while !comm.has_failed() {
                assert!(began.elapsed() < TIMEOUT);
                thread::sleep(Duration::from_millis(1));
            }
        }
        let between = || {
            waits += 1;
            comm.abort("interrupted");
        };
        let waited = comm.barrier().wait_detached(|rest| rest(), between);
        (comm.rank(), waits, waited.unwrap_err())
    });
    for (rank, waits, error) in errors {
        assert_eq!(waits > 0, rank == Rank(0));
        assert_eq!(error.culprit(), Some(Rank(0)));
        assert!(error.to_string().contains("aborted: interrupted"), "{error}");
    }
}

#[test]
fn a_panic_between_the_polls_of_a_waiting_rank_ends_its_operation() {
    world::ranks(2, &world::options(), |comm| {
        if comm.rank() == Rank(1) {
            return;
        }
        let mut data = vec![0u8; 100_000];
        let waits = || {
            comm.all_reduce(&mut data, ReduceOp::Sum)
                .wait_detached(|rest| rest(), || panic!("of the test"))
        };
        std::panic::catch_unwind(std::panic::AssertUnwindSafe(waits)).unwrap_err();
        let error = comm.barrier().wait().unwrap_err();
        assert!(error.to_string().contains("panicked while it waited"), "{error}");
    });
}

/// Its data is borrowed until then, and its program is cached, so that it begins before the panic.
#[test]
fn a_panic_of_what_calls_the_rest_ends_the_operation_that_has_begun() {
    world::ranks(2, &world::options(), |comm| {
        let mut data = [1u8; 8];
        comm.all_reduce(&mut data, ReduceOp::Sum).wait().unwrap();
        if comm.rank() == Rank(1) {
            return;
        }
        let waits = || {
            comm.all_reduce(&mut data, ReduceOp::Sum)
                .wait_detached(|_| panic!("of the test"), || ())
        };
        std::panic::catch_unwind(std::panic::AssertUnwindSafe(waits)).unwrap_err();
        let error = comm.barrier().wait().unwrap_err();
        assert!(error.to_string().contains("panicked while it waited"), "{error}");
    });
}
