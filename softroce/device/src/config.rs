//! Device configuration: by the program, or by environment variables.

use std::net::{IpAddr, Ipv4Addr};
use std::path::{Path, PathBuf};
use std::time::Duration;

use doorbell_roce_proto::congestion::CongestionConfig;

use crate::congestion_text;
use crate::links::shm::CopyMode;
use crate::links::udp::ROCE_PORT;
use crate::links::udp::fault::FaultConfig;

/// The configuration of a soft device.
// fields: one per independent setting of a device
#[derive(Clone, Debug)]
// fields: one per independent setting
pub struct DeviceConfig {
    /// Its name, such as `soft0`.
    pub name: String,
    /// The address. Any number of processes of one user share one, as they would share a NIC.
    /// `None` takes 127.0.0.1, or the first available of 127.0.0.2, 127.0.0.3, … where another user
    /// or the kernel's rxe has that; or ::1, where there is no IPv4.
    pub address: Option<IpAddr>,
    /// No other device has the address: opening fails where one has it, and so does opening another
    /// one there. Without an [`address`](Self::address) it is a free one of 127.0.0.0/8, at random.
    pub exclusive: bool,
    /// The UDP port, here and at every peer: 4791 except in tests. Not 0, as peers must know it.
    pub port: u16,
    /// The path to other processes of this host.
    pub link: LinkChoice,
    /// Fault injection on sent packets, and an outage.
    pub faults: FaultConfig,
    /// Congestion control, of packets over UDP.
    pub congestion: CongestionConfig,
    /// When the time of an outage starts, in [`ticks`](crate::clock::ticks): the same in every
    /// process of a test; `None` for when the device opens.
    pub start: Option<u64>,
    /// The capture file of sent and received packets. An existing one is kept: then the name gets
    /// this process's id.
    pub pcap: Option<PathBuf>,
    /// A folder that stands for `/`, in which the files of the port's counters are kept up to date.
    pub view: Option<PathBuf>,
    /// The copy mode for payloads to other processes of this host; `None` for the best available.
    pub copy_mode: Option<CopyMode>,
    /// Copies of GPU memory that `cuMemMap` mapped are made in a CUDA context of their own, by all
    /// devices of the process (decision 087).
    pub separate_gpu_context: bool,
    /// How long the progress thread busy-polls after the last traffic before it sleeps.
    pub spin: Duration,
    /// See [`EndpointConfig::tail_loss_probes`](doorbell_roce_proto::EndpointConfig).
    pub tail_loss_probes: bool,
    /// See [`EndpointConfig::selective_repeat`](doorbell_roce_proto::EndpointConfig).
    pub selective_repeat: bool,
}

/// The path of packets between processes of one host.
#[derive(Clone, Copy, PartialEq, Eq, Default, Debug)]
pub enum LinkChoice {
    /// The fastest one.
    #[default]
    Automatic,
    /// UDP, as to other hosts. Implied by fault injection and capture, which work on datagrams.
    Udp,
    /// Shm links only: a queue pair that is not on this address cannot be connected.
    Local,
}

/// Several times the cost of a wake-up (some 20 µs), so that a device with sporadic use sleeps.
const SPIN: Duration = Duration::from_micros(200);

impl DeviceConfig {
    /// The defaults: on loopback, without faults or capture.
    pub fn new(name: impl Into<String>) -> Self {
        Self {
            name: name.into(),
            address: None,
            exclusive: false,
            port: ROCE_PORT,
            link: LinkChoice::Automatic,
            faults: FaultConfig::default(),
            congestion: CongestionConfig::default(),
            start: None,
            pcap: None,
            view: None,
            copy_mode: None,
            separate_gpu_context: false,
            spin: SPIN,
            tail_loss_probes: true,
            selective_repeat: false,
        }
    }

    /// The node GUID (IBTA vol 1, 4.1.1), in host order: locally administered, and the same in
    /// every process with this address (or the default one) and port: programs see one device.
    #[must_use]
    pub fn guid(&self) -> u64 {
        const LOCALLY_ADMINISTERED: u64 = 0x02db << 48;
        let low = match self.address.unwrap_or(IpAddr::V4(Ipv4Addr::LOCALHOST)) {
            IpAddr::V4(address) => (u64::from(self.port) << 32) | u64::from(address.to_bits()),
            // FNV-1a, folded to 48 bits.
            IpAddr::V6(address) => {
                let bytes = address.octets().into_iter().chain(self.port.to_be_bytes());
                let hash = bytes.fold(0xcbf2_9ce4_8422_2325_u64, |hash, byte| {
                    (hash ^ u64::from(byte)).wrapping_mul(0x0100_0000_01b3)
                });
                (hash >> 48 ^ hash) & 0xffff_ffff_ffff
            }
        };
        LOCALLY_ADMINISTERED | low
    }

    pub(crate) fn is_udp_only(&self) -> bool {
        self.link == LinkChoice::Udp || self.faults.is_active() || self.pcap.is_some()
    }

    /// The devices of the environment (none of it with
    /// [elevated rights](doorbell_trust::has_elevated_rights)), `soft0`, `soft1` and so on; without any, a default one.
    ///
    /// - `DOORBELL_SOFT_ADDR`: addresses, separated by commas, one device each;
    /// - `DOORBELL_SOFT_PORT`: the UDP port;
    /// - `DOORBELL_LINK`: `udp` or `local`, to use that link alone;
    /// - `DOORBELL_COPY`: `shared` or `ring`, to use that copy mode alone;
    /// - `DOORBELL_GPU_CONTEXT`: `program` or `separate`, the CUDA context of copies;
    /// - `DOORBELL_FAULTS`: the faults, such as `drop=0.05,seed=7` ([`FaultConfig`]); those after a
    ///   semicolon and a device's name are of this device alone, as in `drop=0.05;soft1:rate=1Gb`;
    /// - `DOORBELL_CONGESTION`: `none`, `dcqcn` or `delay`, with options as in `dcqcn,line=25Gb`;
    /// - `DOORBELL_START`: [`start`](Self::start);
    /// - `DOORBELL_TAIL_LOSS_PROBES`: `0` for none, as an adapter;
    /// - `DOORBELL_SELECTIVE_REPEAT`: `1` for selective repeat with ends that have it, too;
    /// - `DOORBELL_VIEW`: [`view`](Self::view);
    /// - `DOORBELL_PCAP`: the capture file; each of several devices adds its name, as in
    ///   `file-soft1.pcap`.
    ///
    /// # Errors
    /// When a variable has an invalid value.
    pub fn from_env() -> Result<Vec<Self>, ConfigError> {
        Self::from_variables(|name| doorbell_trust::variable(name).map(|value| value.to_string_lossy().into_owned()))
    }

    /// As [`from_env`](Self::from_env), with the variables from `get`.
    ///
    /// # Errors
    /// When a variable has an invalid value.
    pub fn from_variables(get: impl Fn(&str) -> Option<String>) -> Result<Vec<Self>, ConfigError> {
        let set = |name| get(name).filter(|value| !value.is_empty());
        let mut pattern = Self::new("soft0");
        if let Some(value) = set("DOORBELL_SOFT_PORT") {
            pattern.port = value
                .parse()
                .ok()
                .filter(|&port| port != 0)
                .ok_or_else(|| ConfigError::new("DOORBELL_SOFT_PORT", &value, "is not a UDP port (1 to 65535)"))?;
        }
        if let Some(value) = set("DOORBELL_LINK") {
            pattern.link = match value.as_str() {
                "udp" => LinkChoice::Udp,
                "local" => LinkChoice::Local,
                _ => {
                    return Err(ConfigError::new(
                        "DOORBELL_LINK",
                        &value,
                        "is not a link; valid values: udp, local",
                    ));
                }
            };
        }
        if let Some(value) = set("DOORBELL_COPY") {
            let mode = CopyMode::ALL.into_iter().find(|mode| mode.name() == value);
            let reason = "is not a copy mode; valid values: shared, ring";
            let unknown = || ConfigError::new("DOORBELL_COPY", &value, reason);
            pattern.copy_mode = Some(mode.ok_or_else(unknown)?);
        }
        if let Some(value) = set("DOORBELL_GPU_CONTEXT") {
            pattern.separate_gpu_context = match value.as_str() {
                "program" => false,
                "separate" => true,
                _ => {
                    let reason = "is not a context; valid values: program, separate";
                    return Err(ConfigError::new("DOORBELL_GPU_CONTEXT", &value, reason));
                }
            };
        }
        if let Some(value) = set("DOORBELL_CONGESTION") {
            pattern.congestion = congestion_text::parse(&value)
                .map_err(|problem| ConfigError::new("DOORBELL_CONGESTION", &value, problem))?;
        }
        if let Some(value) = set("DOORBELL_TAIL_LOSS_PROBES") {
            pattern.tail_loss_probes = switch("DOORBELL_TAIL_LOSS_PROBES", &value)?;
        }
        if let Some(value) = set("DOORBELL_SELECTIVE_REPEAT") {
            pattern.selective_repeat = switch("DOORBELL_SELECTIVE_REPEAT", &value)?;
        }
        if let Some(value) = set("DOORBELL_START") {
            let invalid = |_| ConfigError::new("DOORBELL_START", &value, "is not a time in nanoseconds");
            pattern.start = Some(value.parse().map_err(invalid)?);
        }
        pattern.view = set("DOORBELL_VIEW").map(PathBuf::from);
        pattern.pcap = set("DOORBELL_PCAP").map(PathBuf::from);
        let mut devices = match set("DOORBELL_SOFT_ADDR") {
            Some(addresses) => pattern.at_each(&addresses)?,
            None => vec![pattern],
        };
        if let Some(faults) = set("DOORBELL_FAULTS") {
            add_faults(&mut devices, &faults)
                .map_err(|problem| ConfigError::new("DOORBELL_FAULTS", &faults, problem))?;
        }
        if devices
            .iter()
            .any(|device| device.link == LinkChoice::Local && device.is_udp_only())
        {
            let problem = "cannot be combined with faults or a capture, which need UDP";
            return Err(ConfigError::new("DOORBELL_LINK", "local", problem));
        }
        Ok(devices)
    }

    /// Such a device at each of the addresses, which commas separate.
    fn at_each(&self, addresses: &str) -> Result<Vec<Self>, ConfigError> {
        let several = addresses.contains(',');
        let device = |(index, address): (usize, &str)| {
            let address = address.trim().parse().map_err(|_| {
                ConfigError::new(
                    "DOORBELL_SOFT_ADDR",
                    address,
                    "is not an IP address such as 127.0.0.1 or ::1",
                )
            })?;
            let name = format!("soft{index}");
            let pcap = self
                .pcap
                .as_ref()
                .map(|file| if several { with_name(file, &name) } else { file.clone() });
            Ok(Self {
                name,
                address: Some(address),
                pcap,
                ..self.clone()
            })
        };
        addresses.split(',').enumerate().map(device).collect()
    }
}

fn switch(variable: &'static str, value: &str) -> Result<bool, ConfigError> {
    match value {
        "0" => Ok(false),
        "1" => Ok(true),
        _ => Err(ConfigError::new(variable, value, "is neither 0 nor 1")),
    }
}

/// Adds faults to devices: sections that semicolons separate, each for all devices or, after a name
/// and a colon, for one.
fn add_faults(devices: &mut [DeviceConfig], faults: &str) -> Result<(), String> {
    for section in faults.split(';') {
        let (name, faults) = match section.split_once(':') {
            Some((name, faults)) => (Some(name.trim()), faults),
            None => (None, section),
        };
        if let Some(unknown) = name.filter(|name| devices.iter().all(|device| device.name != *name)) {
            return Err(format!("is refused: there is no device {unknown}"));
        }
        for device in devices
            .iter_mut()
            .filter(|device| name.is_none_or(|name| name == device.name))
        {
            device
                .faults
                .extend(faults)
                .map_err(|error| format!("is refused: {error}"))?;
        }
    }
    Ok(())
}

/// The file's name, with another one before its extension.
pub(crate) fn with_name(file: &Path, name: &str) -> PathBuf {
    let mut own = file.file_stem().unwrap_or_default().to_owned();
    own.push("-");
    own.push(name);
    if let Some(extension) = file.extension() {
        own.push(".");
        own.push(extension);
    }
    file.with_file_name(own)
}

/// An environment variable with an invalid value.
#[derive(Clone, PartialEq, Eq, Debug, thiserror::Error)]
#[error("{variable}: {value:?} {problem}")]
pub struct ConfigError {
    variable: &'static str,
    value: String,
    problem: String,
}

impl ConfigError {
    fn new(variable: &'static str, value: &str, problem: impl Into<String>) -> Self {
        Self {
            variable,
            value: value.to_owned(),
            problem: problem.into(),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn devices(variables: &[(&str, &str)]) -> Result<Vec<DeviceConfig>, String> {
        let get = |name: &str| {
            variables
                .iter()
                .find(|(key, _)| *key == name)
                .map(|(_, value)| (*value).to_owned())
        };
        DeviceConfig::from_variables(get).map_err(|error| error.to_string())
    }

    #[test]
    fn nothing_set_is_one_device_with_the_defaults() {
        let devices = devices(&[("DOORBELL_SOFT_ADDR", ""), ("DOORBELL_LINK", "")]).unwrap();
        assert_eq!(devices.len(), 1);
        assert_eq!(
            (devices[0].name.as_str(), devices[0].address, devices[0].port),
            ("soft0", None, 4791)
        );
    }

    #[test]
    fn the_guid_is_derived_from_the_address() {
        let guid = |address: &str, port: &str| {
            devices(&[("DOORBELL_SOFT_ADDR", address), ("DOORBELL_SOFT_PORT", port)]).unwrap()[0].guid()
        };
        assert_eq!(guid("127.0.0.1", ""), 0x02db_12b7_7f00_0001);
        assert_eq!(guid("", ""), guid("127.0.0.1", ""));
        let others = [
            ("127.0.0.2", ""),
            ("127.0.0.1", "14791"),
            ("::1", ""),
            ("fe80::1", ""),
            ("::1", "14791"),
        ];
        let all = others.map(|(address, port)| guid(address, port));
        for (index, guid) in all.iter().enumerate() {
            assert_eq!(guid >> 48, 0x02db);
            assert!(!all[..index].contains(guid));
        }
    }

    #[test]
    fn each_address_is_a_device() {
        let devices = devices(&[
            ("DOORBELL_SOFT_ADDR", "127.0.0.1, ::1"),
            ("DOORBELL_SOFT_PORT", "14791"),
        ])
        .unwrap();
        let names: Vec<_> = devices.iter().map(|device| device.name.as_str()).collect();
        assert_eq!(names, ["soft0", "soft1"]);
        assert_eq!(devices[1].address, Some("::1".parse().unwrap()));
        assert!(devices.iter().all(|device| device.port == 14791));
    }

    #[test]
    fn faults_and_captures() {
        let set = [
            ("DOORBELL_FAULTS", "drop=0.05,seed=7"),
            ("DOORBELL_PCAP", "/tmp/a.b/run.pcap"),
        ];
        let one = devices(&set).unwrap();
        assert_eq!((one[0].faults.drop, one[0].faults.seed), (0.05, 7));
        assert_eq!(one[0].pcap.as_deref(), Some(Path::new("/tmp/a.b/run.pcap")));
        let two = devices(&[set[1], ("DOORBELL_SOFT_ADDR", "127.0.0.1,127.0.0.2")]).unwrap();
        assert_eq!(two[1].pcap.as_deref(), Some(Path::new("/tmp/a.b/run-soft1.pcap")));
    }

    #[test]
    fn a_device_can_have_faults_of_its_own() {
        let three = ("DOORBELL_SOFT_ADDR", "127.0.0.1,127.0.0.2,127.0.0.3");
        let faults = "drop=0.05,delay=1ms; soft1: drop=0.5,rate=1Gb ;soft2:down=3s+500ms";
        let devices = devices(&[three, ("DOORBELL_FAULTS", faults), ("DOORBELL_START", "7")]).unwrap();
        let texts: Vec<_> = devices.iter().map(|device| device.faults.to_string()).collect();
        assert_eq!(
            texts,
            [
                "drop=0.05,delay=1ms,seed=0",
                "drop=0.5,delay=1ms,rate=1Gb,seed=0",
                "drop=0.05,delay=1ms,down=3s+500ms,seed=0"
            ]
        );
        assert!(devices.iter().all(|device| device.start == Some(7)));
    }

    #[test]
    fn links_and_copy_modes() {
        let of = |variables: &[(&str, &str)]| devices(variables).map(|devices| (devices[0].link, devices[0].copy_mode));
        assert_eq!(of(&[]), Ok((LinkChoice::Automatic, None)));
        let set = [("DOORBELL_LINK", "local"), ("DOORBELL_COPY", "ring")];
        assert_eq!(of(&set), Ok((LinkChoice::Local, Some(CopyMode::Ring))));
        let error = of(&[set[0], ("DOORBELL_FAULTS", "drop=0.05")]).unwrap_err();
        assert!(error.contains("cannot be combined with faults"), "{error}");
    }

    #[test]
    fn invalid_values_are_explained_in_one_line() {
        for (name, value, hint) in [
            ("DOORBELL_SOFT_ADDR", "127.0.0.1,localhost", "is not an IP address"),
            ("DOORBELL_SOFT_ADDR", "127.0.0.1,", "is not an IP address"),
            ("DOORBELL_SOFT_PORT", "0", "is not a UDP port"),
            ("DOORBELL_SOFT_PORT", "65536", "is not a UDP port"),
            ("DOORBELL_FAULTS", "lose=1", "no fault is called"),
            ("DOORBELL_FAULTS", "drop=0.1;soft1:drop=0.2", "there is no device soft1"),
            ("DOORBELL_FAULTS", "soft0:down=soon", "expected when it begins"),
            ("DOORBELL_CONGESTION", "cubic", "valid values: none, dcqcn, delay"),
            ("DOORBELL_CONGESTION", "dcqcn,line", "is not NAME=VALUE"),
            ("DOORBELL_CONGESTION", "dcqcn,line=25", "expected a rate"),
            ("DOORBELL_CONGESTION", "dcqcn,cnp=2s", "at most 1 s"),
            ("DOORBELL_CONGESTION", "none,gain=3", "no option 'gain'"),
            ("DOORBELL_CONGESTION", "delay,line=1Gb,min=2Gb", "above the line rate"),
            ("DOORBELL_START", "now", "is not a time"),
            ("DOORBELL_TAIL_LOSS_PROBES", "off", "is neither 0 nor 1"),
            ("DOORBELL_SELECTIVE_REPEAT", "yes", "is neither 0 nor 1"),
            ("DOORBELL_LINK", "shm", "is not a link"),
            ("DOORBELL_COPY", "vm", "is not a copy mode"),
            ("DOORBELL_GPU_CONTEXT", "own", "is not a context"),
        ] {
            let error = devices(&[(name, value)]).unwrap_err();
            assert!(
                error.starts_with(name) && error.contains(hint) && !error.contains('\n'),
                "{error}"
            );
        }
    }
}
