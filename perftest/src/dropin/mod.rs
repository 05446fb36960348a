//! `doorbell run` and `doorbell env`: unmodified libibverbs programs on the userspace device.
//!
//! The loader finds links to the drop-in library by `LD_LIBRARY_PATH`
//! (docs/decisions/031-doorbell-run.md). `options` has the devices, `library` finds the drop-in
//! libraries, `embedded` unpacks those that are in the program, `folder` has the links, `owner`
//! records the owners, `sysfs` has the files that the preloaded library presents and `pci` the
//! place of the devices in them, `program` checks the program, `brought` finds libraries that would
//! bypass the drop-in, in the packages of the interpreter that `python` finds, `mps` starts a
//! daemon for ranks that share GPUs, and `child` runs the command.

mod brought;
mod child;
mod embedded;
mod folder;
mod library;
mod mps;
mod options;
mod owner;
mod pci;
mod program;
mod python;
mod sysfs;

use std::env;
use std::ffi::{OsStr, OsString};
use std::os::unix::ffi::OsStrExt;
use std::path::Path;

use doorbell_softroce::clock::ticks;
use doorbell_softroce_ibverbs::DeviceConfig;

use crate::cli::{DropinArgs, EnvArgs, RunArgs};
use crate::device::Variable;
use crate::failure::{Failure, one_line};
use crate::report;
pub use embedded::EmbeddedLibrary;
pub(crate) use embedded::set as embed;
pub(crate) use pci::PciAddress;
use pci::Place;
use sysfs::ShownDevice;

/// The exit status of env(1) for its own failures.
const OWN_FAILURE: u8 = 125;

/// # Errors
/// [`Failure::Usage`] when the device options are invalid; [`Failure::NotRun`] when the command was
/// not started.
pub(crate) fn run(args: &RunArgs) -> Result<(), Failure> {
    let (device, configs) = options::devices(&args.device)?;
    let (name, arguments) = args
        .command
        .split_first()
        .ok_or_else(|| Failure::usage("which command?"))?;
    if name.as_bytes().starts_with(b"-") {
        let option = one_line(&name.to_string_lossy());
        return Err(Failure::usage(format!(
            "there is no option '{option}': doorbell run --help lists them"
        )));
    }
    if let Some(warning) = program::find(name).and_then(|path| program::why_not_usable(&path)) {
        eprintln!("doorbell: warning: {}: {warning}", one_line(&name.to_string_lossy()));
    }
    let libraries = library::find(&library::preloaded(&args.device))?;
    let (folder, libraries) = folder::temporary(&libraries).map_err(own)?;
    let brought = brought::by(name, arguments);
    let mut variables = environment(folder.path(), &libraries, &args.device, &configs, &brought.copies)?;
    if !args.device.nccl {
        variables.extend(brought.variables());
    }
    // Outages begin in all of its processes at once.
    let start = ("DOORBELL_START", ticks().to_string().into());
    let mut daemon = None;
    let ended = child::run(
        name,
        arguments,
        // With signals caught, so that none ends this program without the daemon.
        || {
            let shared = args.ranks_per_gpu.map(|ranks| mps::provide(folder.path(), ranks));
            let (started, shared) = shared.unwrap_or_default();
            daemon = started;
            variables.into_iter().chain(device).chain([start]).chain(shared)
        },
        |pid| {
            // Without this record, the folder may be removed when this program is killed and the
            // command is not.
            let _ = owner::add(folder.path(), pid);
        },
    )?;
    // Before this process ends, which may be by a signal.
    drop(daemon);
    folder.close().map_err(|e| own(format!("cannot clean up: {e}")))?;
    ended.exit_alike()
}

/// # Errors
/// [`Failure::Usage`] as for [`run`]; [`Failure::NotRun`] when the folder cannot be created;
/// [`Failure::Test`] when stdout cannot be written.
pub(crate) fn env(args: &EnvArgs) -> Result<(), Failure> {
    let (device, configs) = options::devices(&args.device)?;
    let libraries = library::find(&library::preloaded(&args.device))?;
    let (folder, libraries) = folder::permanent(&libraries).map_err(own)?;
    let variables = environment(&folder, &libraries, &args.device, &configs, &[])?;
    let lines: Result<Vec<String>, Failure> = variables
        .into_iter()
        .chain(device)
        .map(|(name, value)| line(name, &value, args.plain))
        .collect();
    report::print_line(&lines?.join("\n"))
}

fn own(message: impl Into<String>) -> Failure {
    Failure::NotRun(message.into(), OWN_FAILURE)
}

/// `copies` are the names of other copies of the libraries, to which the drop-in answers too.
fn environment(
    folder: &Path,
    libraries: &Path,
    args: &DropinArgs,
    configs: &[DeviceConfig],
    copies: &[String],
) -> Result<Vec<Variable>, Failure> {
    let fill = |files: Option<&[sysfs::File]>| {
        let mut variables = folder::fill(folder, libraries, files, (&library::preloaded(args), copies))
            .map_err(|e| own(format!("cannot set up {}: {e}", folder.display())))?;
        // The program's kernels may wait for messages while its launches wait for the kernels.
        const CONTEXT: &str = "DOORBELL_GPU_CONTEXT";
        if env::var_os(CONTEXT).is_none_or(|value| value.is_empty()) {
            variables.push((CONTEXT, "separate".into()));
        }
        Ok(variables)
    };
    if args.no_sysfs {
        if !copies.is_empty() {
            eprintln!(
                "doorbell: warning: libraries with an RPATH to {} bypass the device: leave --no-sysfs out",
                copies.join(", ")
            );
        }
        return fill(None);
    }
    let places = places(args, configs.len()).map_err(Failure::usage)?;
    let (shown, warnings) = sysfs::query(configs, places).map_err(own)?;
    for warning in warnings {
        eprintln!("doorbell: warning: {warning}");
    }
    let mut variables = fill(Some(&sysfs::files(&shown)))?;
    // A device with several possible addresses gets the same one in every process.
    if let ([DeviceConfig { address: None, .. }], Some(address)) =
        (configs, shown.first().and_then(ShownDevice::address))
    {
        variables.push(("DOORBELL_SOFT_ADDR", address.to_string().into()));
    }
    Ok(variables)
}

fn places(args: &DropinArgs, devices: usize) -> Result<Vec<Place>, String> {
    if args.near.len() > devices {
        return Err(format!(
            "--near: {} PCI devices for {devices} soft devices (--address)",
            args.near.len()
        ));
    }
    let place = |number| Place::new(number, args.near.get(number));
    (0..devices).map(place).collect()
}

/// `folder` before the present value of a variable such as `LD_LIBRARY_PATH`; an empty entry would
/// mean the working directory.
fn before(folder: &Path, name: &str) -> OsString {
    let mut value = folder.as_os_str().to_owned();
    if let Some(others) = env::var_os(name).filter(|others| !others.is_empty()) {
        let others = env::split_paths(&others).filter(|other| other != folder);
        for other in others {
            value.push(":");
            value.push(other);
        }
    }
    value
}

/// `libraries` after the present value of a variable such as `LD_PRELOAD`: some libraries there
/// must come first.
fn after(name: &str, libraries: &[&OsStr]) -> OsString {
    let mut all: Vec<OsString> = Vec::new();
    if let Some(others) = env::var_os(name).filter(|others| !others.is_empty()) {
        let is_ours = |other: &&[u8]| libraries.iter().any(|library| *other == library.as_bytes());
        let separates = |byte: &u8| b" :".contains(byte);
        for other in others
            .as_bytes()
            .split(separates)
            .filter(|other| !other.is_empty() && !is_ours(other))
        {
            all.push(OsStr::from_bytes(other).to_owned());
        }
    }
    all.extend(libraries.iter().map(|&library| library.to_owned()));
    all.join(OsStr::new(":"))
}

fn line(name: &str, value: &OsStr, plain: bool) -> Result<String, Failure> {
    let value = value.to_str().filter(|value| !value.contains('\n')).ok_or_else(|| {
        own(format!(
            "{name} would be {value:?}, which no shell takes: set TMPDIR to a plain path"
        ))
    })?;
    Ok(if plain {
        format!("{name}={value}")
    } else {
        format!("export {name}='{}'", value.replace('\'', r"'\''"))
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn values_survive_the_shell() {
        let line = |value: &str, plain| line("X", OsStr::new(value), plain).map_err(|e| e.status());
        assert_eq!(line("it's $HOME", false).unwrap(), r"export X='it'\''s $HOME'");
        assert_eq!(line("it's $HOME", true).unwrap(), "X=it's $HOME");
        assert_eq!(line("two\nlines", true), Err(OWN_FAILURE));
    }
}
