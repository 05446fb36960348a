//! `cargo xtask fabric`: the experiments of the fabric simulator.

use crate::{
    ci::{command, succeed},
    target_folder,
};
use anyhow::Result;
use std::{ffi::OsString, process::Command};

/// Passes its arguments on: the simulator knows its scenarios. Returns the exit status.
pub(crate) fn main(mut arguments: lexopt::Parser) -> Result<u8> {
    let arguments: Vec<OsString> = arguments.raw_args()?.collect();
    succeed(&mut command(&["build", "--locked", "--package", "doorbell-fabric"]))?;
    let status = Command::new(target_folder()?.join("debug/doorbell-fabric"))
        .args(arguments)
        .status()?;
    Ok(status.code().map_or(1, |code| code as u8))
}
