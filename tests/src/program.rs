//! What the programs of `src/bin` that are one end of a conversation have in common: where they run, their options, how they fail.

use std::net::IpAddr;
use std::process::ExitCode;

use anyhow::{Context, Result, bail};

use crate::interop::Role;

/// Where an end runs.
#[derive(Clone, Debug)]
pub struct Place {
    /// Its device; one whose name begins with `soft` is made here, any other is the system's.
    pub device: String,
    /// The address of the GID to use. A soft device is bound to it.
    pub address: IpAddr,
    /// Whether it waits for the other end or looks for it.
    pub role: Role,
}

/// A program, by its own options; those of a [`Place`] are every program's.
pub trait Program: Default {
    /// The line that says how to call it.
    const USAGE: &str;

    /// Takes an option of its own. False when it has none like that.
    ///
    /// # Errors
    /// When the value makes no sense.
    fn option(&mut self, name: &str, value: &str) -> Result<bool>;

    /// Whether its options go together.
    ///
    /// # Errors
    /// When they don't.
    fn check(&self) -> Result<()> {
        Ok(())
    }

    /// Holds the conversation.
    ///
    /// # Errors
    /// When anything of it fails.
    fn run(self, place: &Place) -> Result<()>;
}

/// The `main` of a program. Exit status: 0 done, 1 failed, 2 bad usage.
pub fn main<P: Program>() -> ExitCode {
    let (program, place) = match parse::<P>(std::env::args().skip(1)) {
        Ok(parsed) => parsed,
        Err(error) => {
            eprintln!("{error:#}\nusage: {}", P::USAGE);
            return ExitCode::from(2);
        }
    };
    match program.run(&place) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("{}: {error:#}", place.device);
            ExitCode::FAILURE
        }
    }
}

fn parse<P: Program>(mut args: impl Iterator<Item = String>) -> Result<(P, Place)> {
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
    let place = Place {
        device: device.context("--device is missing")?,
        address: address.context("--address is missing")?,
        role: role.context("--listen or --connect is missing")?,
    };
    Ok((program, place))
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

        fn run(self, _: &Place) -> Result<()> {
            Ok(())
        }
    }

    fn parsed(line: &str) -> Result<(u32, String)> {
        let (Counting(count), place) = parse(line.split_whitespace().map(str::to_owned))?;
        Ok((count, place.device))
    }

    #[test]
    fn a_place_and_a_programs_own_options_are_told_apart() {
        const PLACE: &str = "--device rxe0 --address 10.9.0.1 --listen 10.9.0.1:7";
        let (count, device) = parsed(&format!("--count 3 {PLACE}")).unwrap();
        assert_eq!((count, device.as_str()), (3, "rxe0"));
        for (line, said) in [
            (format!("{PLACE} --count x"), "--count x"),
            (format!("{PLACE} --size 3"), "--size 3: no such option"),
            (format!("{PLACE} --count"), "--count needs a value"),
            ("--device rxe0".to_owned(), "--address is missing"),
        ] {
            assert!(parsed(&line).unwrap_err().to_string().starts_with(said), "{line}");
        }
    }
}
