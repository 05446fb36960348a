//! The `doorbell` program; the library beside it has everything.
#![forbid(unsafe_code)]

use std::process::ExitCode;

fn main() -> ExitCode {
    doorbell_perftest::main()
}
