//! Memory windows between two processes, each on any device, through the verbs table: only bound
//! memory can be accessed by the peer. The ends run the cases in lockstep, each as the owner once.

mod cases;
mod end;
mod safe;

use std::process::ExitCode;

use anyhow::Result;
use doorbell_tests::interop::{Channel, Role};
use doorbell_tests::program::{self, EndOptions, Program};
use doorbell_tests::raw::api_for;

use end::End;

#[derive(Default)]
struct Windows;

impl Program for Windows {
    const USAGE: &str = "windows --device NAME --address IP (--listen|--connect) IP:PORT";

    fn option(&mut self, _: &str, _: &str) -> Result<bool> {
        Ok(false)
    }

    fn run(self, options: &EndOptions) -> Result<()> {
        run(options)
    }
}

fn main() -> ExitCode {
    program::main::<Windows>()
}

fn run(options: &EndOptions) -> Result<()> {
    let api = api_for(&options.device, Some(options.address))?;
    let mut end = End::open(api, &options.device, options.address, Channel::open(options.role)?)?;
    let first = matches!(options.role, Role::Listen(_));
    let soft = options.device.starts_with("soft");
    let peer_soft = end.channel.exchange([u8::from(soft)])? == [1];
    let mut count = 0;
    for owner in [first, !first] {
        count += cases::run(&mut end, owner, if owner { soft } else { peer_soft })?;
    }
    for owner in [first, !first] {
        safe::run(api, &options.device, options.address, &mut end.channel, owner)?;
        count += 1;
    }
    println!(
        "{}: {count} cases of memory windows, every byte verified",
        options.device
    );
    Ok(())
}
