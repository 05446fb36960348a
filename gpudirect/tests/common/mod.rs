//! Cases of a test without libtest's harness, which sets variables before it runs.

use std::error::Error;
use std::process::ExitCode;

pub(crate) type Outcome = Result<(), Box<dyn Error>>;
pub(crate) type Case = (&'static str, fn() -> Outcome);

/// Runs all, and prints each with its result.
pub(crate) fn run(cases: &[Case]) -> ExitCode {
    let mut failed = 0;
    for (name, case) in cases {
        match case() {
            Ok(()) => println!("{name} ... ok"),
            Err(error) => {
                println!("{name} ... FAILED: {error}");
                failed += 1;
            }
        }
    }
    ExitCode::from(failed)
}
