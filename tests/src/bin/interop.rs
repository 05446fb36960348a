//! One end of [`doorbell_tests::interop`]: run two, on two devices.

use std::net::SocketAddr;
use std::process::ExitCode;

use anyhow::{Context, Result, bail};
use doorbell_tests::interop::{Config, Role, run};

const USAGE: &str = "interop --device NAME --address IP (--listen|--connect) IP:PORT [--mtu BYTES] [--timeout EXPONENT] [--udp-port PORT]";

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
    let (mut mtu, mut timeout, mut udp_port) = (None, None, None);
    while let Some(name) = args.next() {
        let value = args.next().with_context(|| format!("{name} needs a value"))?;
        let wrong = || format!("{name} {value}");
        match name.as_str() {
            "--device" => device = Some(value),
            "--address" => address = Some(value.parse().with_context(wrong)?),
            "--listen" => role = Some(Role::Listen(value.parse::<SocketAddr>().with_context(wrong)?)),
            "--connect" => role = Some(Role::Connect(value.parse::<SocketAddr>().with_context(wrong)?)),
            "--mtu" => mtu = Some(value.parse().with_context(wrong)?),
            "--timeout" => timeout = Some(value.parse().with_context(wrong)?),
            "--udp-port" => udp_port = Some(value.parse().with_context(wrong)?),
            _ => bail!("{name}: no such option"),
        }
    }
    Ok(Config {
        device: device.context("--device is missing")?,
        address: address.context("--address is missing")?,
        role: role.context("--listen or --connect is missing")?,
        udp_port,
        mtu,
        timeout,
    })
}
