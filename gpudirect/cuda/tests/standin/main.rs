//! The whole crate on the CPU stand-in for a GPU: everything but what the hardware does.

#[path = "../suite/mod.rs"]
mod suite;

mod absent;
mod failures;

use doorbell_cuda_standin::{Manner, Standin};
use suite::{CASES, Verdict};

fn run_suite(manner: Manner) {
    for case in CASES {
        let standin = Standin::load(manner);
        println!("{}", case.name);
        match (case.run)(standin.driver().unwrap()) {
            Ok(Verdict::Passed) => {}
            Ok(Verdict::Skipped(why)) => panic!("{} was skipped: {why}", case.name),
            Err(error) => panic!("{}: {error}", case.name),
        }
        standin.assert_nothing_left(case.name);
    }
}

#[test]
fn the_suite_when_work_is_as_late_as_may_be() {
    run_suite(Manner::Lazy);
}

#[test]
fn the_suite_when_work_is_done_at_once() {
    run_suite(Manner::Prompt);
}
