//! The conformance suite as a program: see [`doorbell_tests::conformance`].

use std::process::ExitCode;

fn main() -> ExitCode {
    doorbell_tests::conformance::command(std::env::args().skip(1))
}
