//! `doorbell topo`: adapters, GPUs and NUMA nodes of this host, and how near they are to one another.

use std::path::Path;

use doorbell_collectives::topology::{Distance, Host};
use nix::unistd::gethostname;
use serde::Serialize;

use crate::cli::TopoArgs;
use crate::failure::Failure;
use crate::report;

#[derive(Serialize)]
struct Listing<'a> {
    tool: &'static str,
    version: &'static str,
    #[serde(flatten)]
    host: &'a Host,
    /// Of each two devices.
    distances: Vec<Pair<'a>>,
}

#[derive(Serialize)]
struct Pair<'a> {
    devices: [&'a str; 2],
    distance: Distance,
}

/// Shows the topology. What could not be read is a note, not an error.
///
/// # Errors
/// [`Failure::Usage`] when the folder is no sysfs; [`Failure::Test`] when stdout does not take it.
pub(crate) fn run(args: &TopoArgs) -> Result<(), Failure> {
    let name = gethostname().ok().and_then(|name| name.into_string().ok());
    let host = read(&args.sysfs, name.unwrap_or_else(|| "localhost".into()))?;
    if args.json {
        let distances = host.distances().map(|(one, two, distance)| Pair {
            devices: [&one.name, &two.name],
            distance,
        });
        return report::print_json(&Listing {
            tool: "doorbell",
            version: env!("CARGO_PKG_VERSION"),
            host: &host,
            distances: distances.collect(),
        });
    }
    report::print_line(host.to_string().trim_end())?;
    for note in &host.notes {
        eprintln!("doorbell: note: {note}");
    }
    Ok(())
}

fn read(sysfs: &Path, name: String) -> Result<Host, Failure> {
    Host::read(sysfs, name).map_err(|e| Failure::usage(format!("{e}; --sysfs names another folder")))
}
