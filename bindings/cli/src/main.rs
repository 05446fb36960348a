//! The `doorbell` program of `cargo install`, which installs one file: the libraries that
//! `doorbell run` gives to other programs are in it.
#![forbid(unsafe_code)]

use std::process::ExitCode;

use doorbell_perftest::EmbeddedLibrary;

static LIBRARIES: [EmbeddedLibrary; 2] = include!(concat!(env!("OUT_DIR"), "/libraries.rs"));

fn main() -> ExitCode {
    doorbell_perftest::main_with(&LIBRARIES)
}
