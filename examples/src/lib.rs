//! Numbered examples of the toolkit, and their common part: [ranks], exit status.

#![forbid(unsafe_code)]

pub mod ranks;

use std::process::ExitCode;

use doorbell::{Context, OpenError};

/// The error of an example.
pub type Error = Box<dyn std::error::Error + Send + Sync>;

/// The exit status of an example: 0, or 1 with one line about the error on stderr.
pub fn report(result: Result<(), Error>) -> ExitCode {
    match result {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("{error}");
            ExitCode::FAILURE
        }
    }
}

/// Two soft devices, each on a loopback address of its own.
///
/// # Errors
/// When they cannot be opened.
pub fn soft_pair() -> Result<(Context, Context), OpenError> {
    Ok((doorbell::open("soft")?, doorbell::open("soft")?))
}
