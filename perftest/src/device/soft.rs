//! The userspace device, configured by the command line and the environment.
//!
//! The environment (`DOORBELL_SOFT_ADDR` and others) defines the devices, options override it. With
//! both ends here the first address is the client's and the second the server's; with one address,
//! or with none and the default one, the two processes share it as any two processes of a user may.

use std::ffi::OsString;
use std::net::IpAddr;

use doorbell_softroce::links::udp::fault::FaultConfig;
use doorbell_softroce_ibverbs::{CopyMode, DeviceConfig, api, configure, copy_modes, last_open_error};
use doorbell_verbs::{DeviceError, Library};

use crate::cli::SoftArgs;
use crate::failure::{Failure, one_line};

/// Which of the addresses this process uses.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Side {
    /// All of them: the peer is another command.
    Single,
    /// The first: this process has started another one for the other end.
    First,
    /// All of them, as devices of one process.
    Every,
}

#[derive(Debug)]
pub(crate) struct Soft {
    devices: Vec<DeviceConfig>,
}

/// A variable of the environment, and its value.
pub(crate) type Variable = (&'static str, OsString);

impl SoftArgs {
    /// Whether any option for userspace devices is given.
    pub(crate) fn is_set(&self) -> bool {
        !self.variables(0).is_empty()
    }

    /// The variables that the options stand for; `seed` is that of the faults given one by one.
    pub(crate) fn variables(&self, seed: u64) -> Vec<Variable> {
        let addresses: Vec<String> = self.address.iter().map(ToString::to_string).collect();
        let text = |value: Option<String>| value.map(OsString::from);
        let options = [
            (
                "DOORBELL_SOFT_ADDR",
                text(Some(addresses.join(",")).filter(|all| !all.is_empty())),
            ),
            ("DOORBELL_SOFT_PORT", text(self.udp_port.map(|port| port.to_string()))),
            ("DOORBELL_LINK", text(self.link.clone())),
            (
                "DOORBELL_FAULTS",
                text(self.faults.clone().or_else(|| self.each_fault(seed))),
            ),
            ("DOORBELL_CONGESTION", text(self.congestion.clone())),
            ("DOORBELL_PCAP", self.pcap.clone().map(OsString::from)),
        ];
        let set = options.into_iter().filter_map(|(name, value)| Some((name, value?)));
        set.collect()
    }

    /// The faults that have options of their own, as `--faults` takes them.
    fn each_fault(&self, seed: u64) -> Option<String> {
        let fractions = [self.drop, self.duplicate, self.reorder, self.corrupt, self.mark];
        if fractions.iter().all(Option::is_none) && self.delay.is_none() {
            return None;
        }
        let [drop, duplicate, reorder, corrupt, mark] = fractions.map(Option::unwrap_or_default);
        let faults = FaultConfig {
            drop,
            duplicate,
            reorder,
            corrupt,
            mark,
            delay: self.delay.unwrap_or_default(),
            seed,
            ..FaultConfig::default()
        };
        Some(faults.to_string())
    }
}

/// The devices of the variables in `set`, and of the environment's others.
///
/// # Errors
/// [`Failure::Usage`] when a value is invalid.
pub(crate) fn devices_of(set: &[Variable]) -> Result<Vec<DeviceConfig>, Failure> {
    let value = |name: &str| {
        let given = set.iter().find(|(given, _)| *given == name);
        let value = given
            .map(|(_, value)| value.clone())
            .or_else(|| doorbell_trust::variable(name))?;
        Some(value.to_string_lossy().into_owned())
    };
    DeviceConfig::from_variables(value).map_err(|e| Failure::usage(one_line(&e.to_string())))
}

impl Soft {
    /// # Errors
    /// [`Failure::Usage`] when they are invalid or contradict each other.
    pub(crate) fn configured(args: &SoftArgs, seed: u64, side: Side) -> Result<Soft, Failure> {
        let mut devices = devices_of(&args.variables(seed))?;
        if side == Side::First {
            devices.truncate(1);
        } else if side == Side::Single && args.address.len() > 1 {
            return Err(Failure::usage(
                "--address takes a second address only when both ends run here",
            ));
        }
        Ok(Soft { devices })
    }

    /// The address for the process of the other end; `None` is the default one.
    ///
    /// # Errors
    /// [`Failure::Usage`] when the environment is invalid.
    pub(crate) fn second_address(args: &SoftArgs) -> Result<Option<IpAddr>, Failure> {
        let devices = devices_of(&args.variables(0))?;
        Ok(devices.get(1).or(devices.first()).and_then(|device| device.address))
    }

    pub(crate) fn has(&self, name: &str) -> bool {
        self.devices.iter().any(|device| device.name == name)
    }

    pub(crate) fn names(&self) -> Vec<&str> {
        self.devices.iter().map(|device| device.name.as_str()).collect()
    }

    /// The faults of this device.
    pub(crate) fn faults(&self, name: &str) -> Option<String> {
        let faults = self.devices.iter().find(|device| device.name == name)?.faults;
        faults.is_active().then(|| faults.to_string())
    }

    /// # Errors
    /// [`Failure::Test`] when they are in use already, which is a bug of this program.
    pub(crate) fn library(self) -> Result<Library, Failure> {
        configure(self.devices).map_err(|e| Failure::test(e.to_string()))?;
        Ok(Library::new(api()))
    }
}

/// The copy modes between this open device and other processes of the host, best first; none where
/// everything goes over UDP.
pub(crate) fn copy_mode_names(name: &str) -> Vec<&'static str> {
    let modes = copy_modes(name);
    modes.into_iter().map(CopyMode::name).collect()
}

/// The device's own reason, which is more precise than `errno`.
pub(crate) fn explain(name: &str, error: &DeviceError) -> Failure {
    match last_open_error() {
        Some(reason) => Failure::test(one_line(&reason)),
        None => Failure::test(format!(
            "cannot open {}: {}",
            one_line(name),
            one_line(&error.to_string())
        )),
    }
}

#[cfg(test)]
mod tests {
    use clap::Parser;

    use super::*;
    use crate::cli::{Cli, Command};

    fn arguments(line: &str) -> SoftArgs {
        let Command::Devices(args) = Cli::try_parse_from(format!("doorbell devices {line}").split_whitespace())
            .unwrap()
            .command
        else {
            panic!("devices is devices");
        };
        args.soft
    }

    fn soft(line: &str, side: Side) -> Result<Soft, Failure> {
        Soft::configured(&arguments(line), 9, side)
    }

    #[test]
    fn flags_override_what_there_is() {
        let soft = soft(
            "--address 127.0.0.7 --udp-port 14791 --drop 0.05 --delay 1ms --pcap x.pcap",
            Side::Single,
        )
        .unwrap();
        let device = &soft.devices[0];
        assert_eq!(
            (soft.devices.len(), device.address, device.port),
            (1, Some("127.0.0.7".parse().unwrap()), 14791)
        );
        assert_eq!(
            (device.faults.drop, device.faults.seed, device.faults.delay.as_millis()),
            (0.05, 9, 1)
        );
        assert!(device.pcap.is_some() && soft.faults("soft0").is_some());
    }

    #[test]
    fn nothing_set_is_one_device_without_faults() {
        let soft = soft("", Side::Single).unwrap();
        assert_eq!((soft.names(), soft.faults("soft0")), (vec!["soft0"], None));
    }

    #[test]
    fn a_second_address_is_for_a_second_process() {
        assert_eq!(soft("--address ::1,::2", Side::First).unwrap().devices.len(), 1);
        assert_eq!(soft("--address ::1,::2", Side::Single).unwrap_err().status(), 2);
        for (addresses, second) in [("::1,::2", "::2"), ("::1", "::1")] {
            let args = arguments(&format!("--address {addresses}"));
            assert_eq!(Soft::second_address(&args).unwrap(), Some(second.parse().unwrap()));
        }
    }
}
