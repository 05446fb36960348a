//! The `doorbell` command.
#![forbid(unsafe_code)]

mod cli;
mod exchange;
mod failure;
mod interrupt;
mod orchestrate;
mod plan;
mod report;
mod run;
mod stats;
mod units;

fn main() {}
