//! The whole crate on the CPU stand-in: everything but hardware behaviour.

#[path = "../suite/mod.rs"]
mod suite;

mod absent;
mod failures;
mod order;

use doorbell_cuda_standin::{ExecutionMode, Standin};
use suite::{CASES, Verdict};

fn run_suite(manner: ExecutionMode) {
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
fn suite_with_lazy_execution() {
    run_suite(ExecutionMode::Lazy);
}

#[test]
fn suite_with_prompt_execution() {
    run_suite(ExecutionMode::Prompt);
}
