//! Memory windows between two processes, each on any device, through the table of verbs: what is bound by either end can be reached by the other, and what is not,
//! or is not any more, cannot. The ends run the same cases in lockstep, each as the owner of the windows once, and verify every byte of the owner's memory.

mod cases;
mod end;
mod safe;

use std::net::{IpAddr, SocketAddr};
use std::process::ExitCode;

use anyhow::{Context, Result, bail};
use doorbell_softroce_ibverbs::{DeviceConfig, api, configure};
use doorbell_tests::interop::{Channel, Role};
use doorbell_verbs_sys::Api;

use end::End;

const USAGE: &str = "windows --device NAME --address IP (--listen|--connect) IP:PORT";

/// What an end is given.
struct Config {
    /// Its device; one whose name begins with `soft` is made here, any other is the system's.
    device: String,
    /// The address of the GID to use. A soft device is bound to it.
    address: IpAddr,
    role: Role,
}

fn main() -> ExitCode {
    let config = match parse(std::env::args().skip(1)) {
        Ok(config) => config,
        Err(error) => {
            eprintln!("{error:#}\nusage: {USAGE}");
            return ExitCode::from(2);
        }
    };
    match run(&config) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("{}: {error:#}", config.device);
            ExitCode::FAILURE
        }
    }
}

fn parse(mut args: impl Iterator<Item = String>) -> Result<Config> {
    let (mut device, mut address, mut role) = (None, None, None);
    while let Some(name) = args.next() {
        let value = args.next().with_context(|| format!("{name} needs a value"))?;
        let at = || value.parse::<SocketAddr>().with_context(|| format!("{name} {value}"));
        match name.as_str() {
            "--device" => device = Some(value),
            "--address" => address = Some(value.parse().with_context(|| format!("{name} {value}"))?),
            "--listen" => role = Some(Role::Listen(at()?)),
            "--connect" => role = Some(Role::Connect(at()?)),
            _ => bail!("{name}: no such option"),
        }
    }
    Ok(Config {
        device: device.context("--device is missing")?,
        address: address.context("--address is missing")?,
        role: role.context("--listen or --connect is missing")?,
    })
}

fn run(config: &Config) -> Result<()> {
    let api = table(config)?;
    let mut end = End::open(api, &config.device, config.address, Channel::open(config.role)?)?;
    let first = matches!(config.role, Role::Listen(_));
    let soft = config.device.starts_with("soft");
    let peer_soft = end.channel.exchange([u8::from(soft)])? == [1];
    let mut count = 0;
    for owner in [first, !first] {
        count += cases::run(&mut end, owner, if owner { soft } else { peer_soft })?;
    }
    for owner in [first, !first] {
        safe::run(api, &config.device, config.address, &mut end.channel, owner)?;
        count += 2;
    }
    println!(
        "{}: {count} cases of memory windows, every byte verified",
        config.device
    );
    Ok(())
}

/// The verbs that the device is to be reached by.
fn table(config: &Config) -> Result<&'static Api> {
    if !config.device.starts_with("soft") {
        return Ok(Api::load()?);
    }
    configure(vec![DeviceConfig {
        address: Some(config.address),
        ..DeviceConfig::new(&config.device)
    }])?;
    Ok(api())
}
