//! Numbered examples of the toolkit, from the first message on; each is a binary that runs on the soft device with one command.
//!
//! This library is what several of them begin and end with: two soft devices, on which both ends run in one process; [ranks] as processes, for collectives; and the exit status.

#![forbid(unsafe_code)]

pub mod ranks;

use std::net::{IpAddr, Ipv4Addr};
use std::process::ExitCode;

use doorbell_softroce_ibverbs::{DeviceConfig, api, configure, last_open_error};
use doorbell_verbs::{Context, Library};

/// What examples fail with.
pub type Error = Box<dyn std::error::Error + Send + Sync>;

/// The exit status of an example that ended so: 0, or 1 with one line of what went wrong on stderr.
pub fn report(result: Result<(), Error>) -> ExitCode {
    match result {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("{error}");
            ExitCode::FAILURE
        }
    }
}

/// Two soft devices, `soft0` and `soft1`, on loopback addresses of this process's own.
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
        // The library's error has an errno, the soft device knows the reason.
        opened.map_err(|error| format!("{error} {}", last_open_error().unwrap_or_default()))
    };
    Ok((open("soft0")?, open("soft1")?))
}
