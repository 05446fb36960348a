//! The devices of `doorbell run` and `doorbell env`: options become variables for the command.

use std::ffi::OsString;
use std::net::{IpAddr, Ipv4Addr};

use doorbell_softroce::links::udp::fault::FaultConfig;
use doorbell_softroce_ibverbs::DeviceConfig;

use crate::cli::{DropinArgs, SoftArgs};
use crate::device::{Variable, devices_of};
use crate::failure::{Failure, one_line};

/// The variables for the options, and the devices that result together with the environment.
///
/// # Errors
/// [`Failure::Usage`] when they are invalid.
pub(super) fn devices(args: &DropinArgs) -> Result<(Vec<Variable>, Vec<DeviceConfig>), Failure> {
    let soft = SoftArgs {
        address: addresses(args)?,
        ..args.soft.clone()
    };
    let mut variables = soft.variables(FaultConfig::default().seed);
    if let Some(faults) = faults(args, &variables)? {
        variables.retain(|(name, _)| *name != FAULTS);
        variables.push((FAULTS, faults.into()));
    }
    let configs = devices_of(&variables)?;
    Ok((variables, configs))
}

const FAULTS: &str = "DOORBELL_FAULTS";

/// The addresses of the options; none leaves them to the environment.
fn addresses(args: &DropinArgs) -> Result<Vec<IpAddr>, Failure> {
    let mut addresses = args.soft.address.clone();
    let Some(rails) = args.rails.map(usize::from) else {
        return Ok(addresses);
    };
    if addresses.is_empty() {
        // Faults may name devices that --rails is about to make.
        let set = devices_of(&[(FAULTS, OsString::new())])?;
        addresses = set.into_iter().filter_map(|device| device.address).collect();
    }
    match addresses[..] {
        [] => Ok(from(Ipv4Addr::LOCALHOST, rails)),
        _ if addresses.len() == rails => Ok(addresses),
        [IpAddr::V4(first)] if first.is_loopback() => Ok(from(first, rails)),
        _ => Err(Failure::usage(format!(
            "--rails {rails} needs as many addresses, or one in 127.0.0.0/8, but there are {}",
            addresses.len()
        ))),
    }
}

fn from(first: Ipv4Addr, count: usize) -> Vec<IpAddr> {
    let all = (first.to_bits()..).take(count);
    all.map(|address| Ipv4Addr::from_bits(address).into()).collect()
}

/// The faults of `variables` or the environment, and after them `--down` and `--slow`; `None`
/// without these.
fn faults(args: &DropinArgs, variables: &[Variable]) -> Result<Option<String>, Failure> {
    let mut all = sections("--down", &args.down, '@', "down")?;
    all.extend(sections("--slow", &args.slow, '=', "rate")?);
    if all.is_empty() {
        return Ok(None);
    }
    let given = variables.iter().find(|(name, _)| *name == FAULTS);
    let general = given
        .map(|(_, value)| value.clone())
        .or_else(|| doorbell_trust::variable(FAULTS));
    all.splice(..0, general.map(|faults| faults.to_string_lossy().into_owned()));
    Ok(Some(all.join(";")))
}

/// The sections of `DOORBELL_FAULTS` for the values of `flag`, each a device and a value of
/// `fault`.
fn sections(flag: &str, values: &[String], separator: char, fault: &str) -> Result<Vec<String>, Failure> {
    let mut sections = Vec::new();
    let mut named = Vec::new();
    for text in values {
        let refuse = |why: &str| Failure::usage(one_line(&format!("{flag} {text}: {why}")));
        let (device, value) = text
            .split_once(separator)
            .ok_or_else(|| refuse(&format!("expected a device and, after a {separator}, a value")))?;
        let fault = format!("{fault}={value}");
        fault
            .parse::<FaultConfig>()
            .map_err(|error| refuse(&error.to_string()))?;
        if named.contains(&device) {
            return Err(refuse("the device has one already"));
        }
        named.push(device);
        sections.push(format!("{device}:{fault}"));
    }
    Ok(sections)
}

#[cfg(test)]
mod tests {
    use clap::Parser;

    use super::*;
    use crate::cli::{Cli, Command};

    fn variables(line: &str) -> Result<Vec<Variable>, Failure> {
        let Command::Env(args) = Cli::try_parse_from(line.split_whitespace()).unwrap().command else {
            panic!("env is env");
        };
        devices(&args.device).map(|(variables, _)| variables)
    }

    #[test]
    fn flags_become_variables() {
        let set = variables("doorbell env --address 127.0.0.7,::1 --udp-port 14791 --faults drop=0.1").unwrap();
        let expected = [
            ("DOORBELL_SOFT_ADDR", "127.0.0.7,::1"),
            ("DOORBELL_SOFT_PORT", "14791"),
            ("DOORBELL_FAULTS", "drop=0.1"),
        ];
        assert_eq!(set, expected.map(|(name, value)| (name, value.into())));
        let refused = variables("doorbell env --faults lose=1").unwrap_err();
        assert!(
            refused.status() == 2 && refused.to_string().starts_with("DOORBELL_FAULTS"),
            "{refused}"
        );
    }

    #[test]
    fn rails_are_addresses_and_faults_of_their_own() {
        let set = variables(
            "doorbell env --address 127.0.0.7 --rails 3 --down soft1@3s+1s --slow soft0=1Gb --slow soft2=2Gb",
        );
        let expected = [
            ("DOORBELL_SOFT_ADDR", "127.0.0.7,127.0.0.8,127.0.0.9"),
            ("DOORBELL_FAULTS", "soft1:down=3s+1s;soft0:rate=1Gb;soft2:rate=2Gb"),
        ];
        assert_eq!(set.unwrap(), expected.map(|(name, value)| (name, value.into())));
        let both = variables("doorbell env --address ::1,127.0.0.7 --rails 2 --faults seed=1 --down soft1@0").unwrap();
        assert_eq!(both[0].1, "::1,127.0.0.7");
        assert_eq!(both[1].1, "seed=1;soft1:down=0");
        for (options, why) in [
            ("--address ::1 --rails 2", "needs as many addresses"),
            ("--address 127.0.0.7,127.0.0.9 --rails 3", "needs as many addresses"),
            ("--down soft0", "expected a device and, after a @, a value"),
            ("--down soft0@soon", "--down soft0@soon: down=soon: expected when"),
            ("--slow soft0=1", "expected a rate"),
            ("--slow soft0=1Gb --slow soft0=2Gb", "has one already"),
            ("--address 127.0.0.7 --down soft1@0", "there is no device soft1"),
            (
                "--address 127.0.0.7 --link local --slow soft0=1Gb",
                "cannot be combined",
            ),
        ] {
            let refused = variables(&format!("doorbell env {options}")).unwrap_err();
            let line = refused.to_string();
            assert!(
                refused.status() == 2 && line.contains(why) && !line.contains('\n'),
                "{options}: {line}"
            );
        }
    }
}
