//! The userspace device, configured by the command line and the environment.
//!
//! The environment (`DOORBELL_SOFT_ADDR` and others) defines the devices, options override it. With
//! both ends here the first address is the client's and the second the server's; with one address,
//! or with none and the default one, the two processes share it as any two processes of a user may.

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

impl SoftArgs {
    /// Whether any option for userspace devices is given.
    pub(crate) fn is_set(&self) -> bool {
        !self.soft_address.is_empty() || self.soft_port.is_some() || self.pcap.is_some() || self.has_faults()
    }

    fn has_faults(&self) -> bool {
        [self.drop, self.duplicate, self.reorder, self.corrupt]
            .iter()
            .any(Option::is_some)
            || self.delay.is_some()
    }
}

impl Soft {
    /// # Errors
    /// [`Failure::Usage`] when they are invalid or contradict each other.
    pub(crate) fn configured(args: &SoftArgs, seed: u64, side: Side) -> Result<Soft, Failure> {
        let devices = DeviceConfig::from_env().map_err(|e| Failure::usage(one_line(&e.to_string())))?;
        Soft::over(devices, args, seed, side)
    }

    fn over(mut devices: Vec<DeviceConfig>, args: &SoftArgs, seed: u64, side: Side) -> Result<Soft, Failure> {
        if !args.soft_address.is_empty()
            && let Some(pattern) = devices.first().cloned()
        {
            let device = |(index, address): (usize, &IpAddr)| DeviceConfig {
                name: format!("soft{index}"),
                address: Some(*address),
                ..pattern.clone()
            };
            devices = args.soft_address.iter().enumerate().map(device).collect();
        }
        if side == Side::First {
            devices.truncate(1);
        } else if side == Side::Single && args.soft_address.len() > 1 {
            return Err(Failure::usage(
                "--soft-address takes a second address only when both ends run here",
            ));
        }
        for device in &mut devices {
            if let Some(port) = args.soft_port {
                device.port = port;
            }
            if args.has_faults() {
                device.faults = FaultConfig {
                    drop: args.drop.unwrap_or(0.0),
                    duplicate: args.duplicate.unwrap_or(0.0),
                    reorder: args.reorder.unwrap_or(0.0),
                    corrupt: args.corrupt.unwrap_or(0.0),
                    delay: args.delay.unwrap_or_default(),
                    seed,
                    ..FaultConfig::default()
                };
            }
            if let Some(file) = &args.pcap {
                device.pcap = Some(file.clone());
            }
        }
        Ok(Soft { devices })
    }

    /// The address for the process of the other end; `None` is the default one.
    ///
    /// # Errors
    /// [`Failure::Usage`] when the environment is invalid.
    pub(crate) fn second_address(args: &SoftArgs) -> Result<Option<IpAddr>, Failure> {
        let devices = DeviceConfig::from_env().map_err(|e| Failure::usage(one_line(&e.to_string())))?;
        let from_env: Vec<_> = devices.iter().filter_map(|device| device.address).collect();
        let addresses = if args.soft_address.is_empty() {
            &from_env
        } else {
            &args.soft_address
        };
        Ok(addresses.get(1).or(addresses.first()).copied())
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
        Soft::over(vec![DeviceConfig::new("soft0")], &arguments(line), 9, side)
    }

    #[test]
    fn flags_override_what_there_is() {
        let soft = soft(
            "--soft-address 127.0.0.7 --soft-port 14791 --drop 0.05 --delay 1ms --pcap x.pcap",
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
        assert_eq!(soft("--soft-address ::1,::2", Side::First).unwrap().devices.len(), 1);
        assert_eq!(soft("--soft-address ::1,::2", Side::Single).unwrap_err().status(), 2);
        for (addresses, second) in [("::1,::2", "::2"), ("::1", "::1")] {
            let args = arguments(&format!("--soft-address {addresses}"));
            assert_eq!(Soft::second_address(&args).unwrap(), Some(second.parse().unwrap()));
        }
    }
}
