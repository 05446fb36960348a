//! The common part of the programs in `src/bin` that are one end of a test.

use std::net::IpAddr;
use std::process::ExitCode;

use anyhow::{Context, Result, bail};

use crate::interop::Role;

/// Options of every end.
#[derive(Clone, Debug)]
pub struct EndOptions {
    /// Its device; a name that begins with `soft` makes a soft device, any other is the system's.
    pub device: String,
    /// The address of the GID to use. A soft device is bound to it.
    pub address: IpAddr,
    /// Whether it listens or connects.
    pub role: Role,
}

/// A program's own options, beside its [`EndOptions`].
pub trait Program: Default {
    /// The usage line.
    const USAGE: &str;

    /// Takes an option of its own: false for an unknown one, an error for an invalid value.
    fn option(&mut self, name: &str, value: &str) -> Result<bool>;

    /// Fails when its options are inconsistent.
    fn check(&self) -> Result<()> {
        Ok(())
    }

    /// Runs this end of the test.
    fn run(self, end: &EndOptions) -> Result<()>;
}

/// The `main` of a program. Exit status: 0 passed, 1 failed, 2 bad usage.
pub fn main<P: Program>() -> ExitCode {
    let (program, end) = match parse::<P>(std::env::args().skip(1)) {
        Ok(parsed) => parsed,
        Err(error) => {
            eprintln!("{error:#}\nusage: {}", P::USAGE);
            return ExitCode::from(2);
        }
    };
    match program.run(&end) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("{}: {error:#}", end.device);
            ExitCode::FAILURE
        }
    }
}

fn parse<P: Program>(mut args: impl Iterator<Item = String>) -> Result<(P, EndOptions)> {
    let mut program = P::default();
    let (mut device, mut address, mut role) = (None, None, None);
    while let Some(name) = args.next() {
        let value = args.next().with_context(|| format!("{name} needs a value"))?;
        let wrong = || format!("{name} {value}");
        match name.as_str() {
            "--device" => device = Some(value),
            "--address" => address = Some(value.parse().with_context(wrong)?),
            "--listen" => role = Some(Role::Listen(value.parse().with_context(wrong)?)),
            "--connect" => role = Some(Role::Connect(value.parse().with_context(wrong)?)),
            _ if program.option(&name, &value).with_context(wrong)? => {}
            _ => bail!("{name} {value}: no such option"),
        }
    }
    program.check()?;
    let end = EndOptions {
        device: device.context("--device is missing")?,
        address: address.context("--address is missing")?,
        role: role.context("--listen or --connect is missing")?,
    };
    Ok((program, end))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[derive(Default)]
    struct Counting(u32);

    impl Program for Counting {
        const USAGE: &str = "counting";

        fn option(&mut self, name: &str, value: &str) -> Result<bool> {
            if name == "--count" {
                self.0 = value.parse()?;
            }
            Ok(name == "--count")
        }

        fn run(self, _: &EndOptions) -> Result<()> {
            Ok(())
        }
    }

    fn parsed(line: &str) -> Result<(u32, String)> {
        let (Counting(count), end) = parse(line.split_whitespace().map(str::to_owned))?;
        Ok((count, end.device))
    }

    #[test]
    fn end_options_and_program_options_are_separated() {
        const END: &str = "--device rxe0 --address 10.9.0.1 --listen 10.9.0.1:7";
        let (count, device) = parsed(&format!("--count 3 {END}")).unwrap();
        assert_eq!((count, device.as_str()), (3, "rxe0"));
        for (line, message) in [
            (format!("{END} --count x"), "--count x"),
            (format!("{END} --size 3"), "--size 3: no such option"),
            (format!("{END} --count"), "--count needs a value"),
            ("--device rxe0".to_owned(), "--address is missing"),
        ] {
            assert!(parsed(&line).unwrap_err().to_string().starts_with(message), "{line}");
        }
    }
}
