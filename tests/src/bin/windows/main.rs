//! Memory windows between two processes, each on any device, through the table of verbs: what is bound by either end can be reached by the other, and what is not,
//! or is not any more, cannot. The ends run the same cases in lockstep, each as the owner of the windows once, and verify every byte of the owner's memory.

mod cases;
mod end;
mod safe;

use std::process::ExitCode;

use anyhow::Result;
use doorbell_tests::interop::{Channel, Role};
use doorbell_tests::program::{self, Place, Program};
use doorbell_tests::raw::table;

use end::End;

#[derive(Default)]
struct Windows;

impl Program for Windows {
    const USAGE: &str = "windows --device NAME --address IP (--listen|--connect) IP:PORT";

    fn option(&mut self, _: &str, _: &str) -> Result<bool> {
        Ok(false)
    }

    fn run(self, place: &Place) -> Result<()> {
        run(place)
    }
}

fn main() -> ExitCode {
    program::main::<Windows>()
}

fn run(place: &Place) -> Result<()> {
    let api = table(&place.device, place.address)?;
    let mut end = End::open(api, &place.device, place.address, Channel::open(place.role)?)?;
    let first = matches!(place.role, Role::Listen(_));
    let soft = place.device.starts_with("soft");
    let peer_soft = end.channel.exchange([u8::from(soft)])? == [1];
    let mut count = 0;
    for owner in [first, !first] {
        count += cases::run(&mut end, owner, if owner { soft } else { peer_soft })?;
    }
    for owner in [first, !first] {
        safe::run(api, &place.device, place.address, &mut end.channel, owner)?;
        count += 2;
    }
    println!("{}: {count} cases of memory windows, every byte verified", place.device);
    Ok(())
}
