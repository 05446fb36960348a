//! Numbered examples of the toolkit, and their common part: soft devices, [ranks], exit status.

#![forbid(unsafe_code)]

pub mod ranks;

use std::net::{IpAddr, Ipv4Addr};
use std::process::ExitCode;

use doorbell_softroce_ibverbs::{DeviceConfig, api, configure, last_open_error};
use doorbell_verbs::{Context, Library};

/// The error of an example.
pub type Error = Box<dyn std::error::Error + Send + Sync>;

/// The exit status of an example: 0, or 1 with one line about the error on stderr.
pub fn report(result: Result<(), Error>) -> ExitCode {
    match result {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("{error}");
            ExitCode::FAILURE
        }
    }
}

/// Two soft devices, `soft0` and `soft1`, on loopback addresses derived from the process id.
///
/// # Errors
/// When soft devices are in use in this process already, or cannot be opened.
pub fn soft_pair() -> Result<(Context, Context), Error> {
    let [_, _, high, low] = std::process::id().to_be_bytes();
    let device = |n: u8| DeviceConfig {
        address: Some(IpAddr::V4(Ipv4Addr::new(127, 32 + high % 128, low, 1 + n))),
        ..DeviceConfig::new(format!("soft{n}"))
    };
    configure(vec![device(0), device(1)])?;
    let open = |name| {
        let opened = Library::new(api()).open(name);
        // The library's error has only an errno; the soft device has the reason.
        opened.map_err(|error| format!("{error} {}", last_open_error().unwrap_or_default()))
    };
    Ok((open("soft0")?, open("soft1")?))
}
