//! One end of [`doorbell_tests::interop`]: run two, on two devices.

use std::process::ExitCode;

use anyhow::Result;
use doorbell_tests::interop::{self, Config};
use doorbell_tests::program::{self, EndOptions, Program};

#[derive(Default)]
struct Interop {
    udp_port: Option<u16>,
    mtu: Option<u32>,
    timeout: Option<u8>,
}

impl Program for Interop {
    const USAGE: &str = "interop --device NAME --address IP (--listen|--connect) IP:PORT [--mtu BYTES] [--timeout EXPONENT] [--udp-port PORT]";

    fn option(&mut self, name: &str, value: &str) -> Result<bool> {
        match name {
            "--mtu" => self.mtu = Some(value.parse()?),
            "--timeout" => self.timeout = Some(value.parse()?),
            "--udp-port" => self.udp_port = Some(value.parse()?),
            _ => return Ok(false),
        }
        Ok(true)
    }

    fn run(self, end: &EndOptions) -> Result<()> {
        interop::run(&Config {
            end: end.clone(),
            udp_port: self.udp_port,
            mtu: self.mtu,
            timeout: self.timeout,
        })
    }
}

fn main() -> ExitCode {
    program::main::<Interop>()
}
