//! Devices by one string.

use doorbell_verbs::{Context, DeviceError, Library};

/// The variable that [`open_from_env`] reads.
const VARIABLE: &str = "DOORBELL_DEVICE";

const DEFAULT: &str = "soft0";

/// Why a device could not be opened; each message is one line.
#[derive(Debug, thiserror::Error)]
pub enum OpenError {
    /// The string has an option that the device does not have, or an invalid value.
    #[error("device {device:?}: {problem}")]
    Options {
        /// The string.
        device: String,
        /// What is wrong, and what is valid.
        problem: String,
    },
    /// The userspace device cannot be opened.
    #[cfg(feature = "softroce")]
    #[error(transparent)]
    Userspace(#[from] doorbell_softroce_ibverbs::OpenError),
    /// The library has no such device, or cannot open it.
    #[error("{error}{reason}")]
    Device {
        /// The library's error.
        error: DeviceError,
        /// What the userspace device adds to an errno, after a semicolon; empty otherwise.
        reason: String,
    },
}

impl From<DeviceError> for OpenError {
    fn from(error: DeviceError) -> Self {
        let reason = String::new();
        Self::Device { error, reason }
    }
}

/// Opens a device:
///
/// - `soft0`, `soft1`, …: a userspace device of the process, as the environment or the program
///   configured it (`DOORBELL_SOFT_ADDR`); without a configuration `soft0` is on 127.0.0.1.
/// - `soft`, or with options `soft?drop=0.01&seed=7`: another userspace device, with an address of
///   its own on loopback, which goes with its last context and object. The options are `drop`,
///   `duplicate`, `reorder`, `corrupt` and `mark` (fractions of the packets sent), `delay`, `rate`,
///   `down` and `seed`, as in `DOORBELL_FAULTS`; `address`, an address that processes may share;
///   and `pcap`, a capture file.
/// - any other name, such as `mlx5_0`: a device of the system's libibverbs.
///
/// # Errors
/// When there is no such device or option, or the device cannot be opened.
pub fn open(device: &str) -> Result<Context, OpenError> {
    let (name, options) = match device.split_once('?') {
        Some((name, options)) => (name, Some(options)),
        None => (device, None),
    };
    let refused = |problem: String| OpenError::Options {
        device: device.to_owned(),
        problem,
    };
    match (name.strip_prefix("soft"), options) {
        (Some(""), options) => userspace::open_own(options.unwrap_or_default(), refused),
        (Some(number), None) if is_number(number) => userspace::open_configured(name, refused),
        (Some(number), Some(options)) if is_number(number) => Err(refused(format!(
            "{name} is configured by the environment or the program; options are for a device of its own, soft?{options}"
        ))),
        (_, Some(_)) => Err(refused(format!(
            "options are for the userspace device, soft, and {name} is another"
        ))),
        (_, None) => Ok(Library::system()?.open(name)?),
    }
}

/// Opens the device that the environment variable `DOORBELL_DEVICE` names, or else `soft0`; see
/// [`open`].
///
/// # Errors
/// As [`open`].
pub fn open_from_env() -> Result<Context, OpenError> {
    let named = doorbell_trust::text_variable(VARIABLE).filter(|name| !name.is_empty());
    open(named.as_deref().unwrap_or(DEFAULT))
}

fn is_number(text: &str) -> bool {
    text.bytes().all(|byte| byte.is_ascii_digit())
}

#[cfg(feature = "softroce")]
mod userspace {
    use std::net::IpAddr;

    use doorbell_softroce::links::udp::fault::FaultConfigError;
    use doorbell_softroce_ibverbs::{DeviceConfig, add, api, last_open_error};
    use doorbell_verbs::{Context, DeviceError, Library};

    use super::OpenError;

    pub(super) fn open_own(options: &str, refused: impl Fn(String) -> OpenError) -> Result<Context, OpenError> {
        // Listed until it is open; then the context keeps it.
        let device = add(config(options).map_err(refused)?)?;
        Ok(Library::new(api()).open(device.name())?)
    }

    pub(super) fn open_configured(name: &str, _refused: impl Fn(String) -> OpenError) -> Result<Context, OpenError> {
        Library::new(api()).open(name).map_err(|error| {
            // The errno of the others is explained by the device.
            let explained = matches!(error, DeviceError::Open { .. } | DeviceError::List(_));
            let reason = last_open_error().filter(|_| explained);
            let reason = reason.map_or_else(String::new, |reason| format!("; {reason}"));
            OpenError::Device { error, reason }
        })
    }

    fn config(options: &str) -> Result<DeviceConfig, String> {
        let mut config = DeviceConfig::new("soft");
        let mut faults = Vec::new();
        for option in options.split('&').filter(|option| !option.is_empty()) {
            let twice = |name| format!("'{name}' is given twice");
            match option.split_once('=') {
                Some(("address", _)) if config.address.is_some() => return Err(twice("address")),
                Some(("pcap", _)) if config.pcap.is_some() => return Err(twice("pcap")),
                Some(("address", address)) => {
                    let parsed = address.parse::<IpAddr>();
                    let parsed =
                        parsed.map_err(|_| format!("address={address}: expected an address such as 127.0.0.2"));
                    config.address = Some(parsed?);
                }
                Some(("pcap", "")) => return Err("pcap=: expected a file".to_owned()),
                Some(("pcap", file)) => config.pcap = Some(file.into()),
                _ => faults.push(option),
            }
        }
        config.exclusive = config.address.is_none();
        config.faults = faults.join(",").parse().map_err(|error| match error {
            FaultConfigError::Name { .. } => format!("{error}; other options are address and pcap"),
            error => error.to_string(),
        })?;
        Ok(config)
    }
}

#[cfg(not(feature = "softroce"))]
mod userspace {
    use doorbell_verbs::Context;

    use super::OpenError;

    const LACKING: &str = "the crate doorbell is built without the userspace device: add its feature softroce";

    pub(super) fn open_own(_: &str, refused: impl Fn(String) -> OpenError) -> Result<Context, OpenError> {
        Err(refused(LACKING.to_owned()))
    }

    pub(super) fn open_configured(_: &str, refused: impl Fn(String) -> OpenError) -> Result<Context, OpenError> {
        Err(refused(LACKING.to_owned()))
    }
}
