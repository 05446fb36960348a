//! `doorbell topo`: adapters, GPUs and NUMA nodes of this host, their distances, and the NVLinks
//! between GPUs.

use std::env;
use std::path::Path;

use doorbell_collectives::topology::{DeviceKind, Distance, Host, NVML_LIBRARY_VARIABLE, TopologyError};
use nix::unistd::gethostname;
use serde::Serialize;

use crate::cli::TopoArgs;
use crate::failure::Failure;
use crate::report;

const SYSFS: &str = "/sys";

#[derive(Serialize)]
struct Listing<'a> {
    #[serde(flatten)]
    host: &'a Host,
    distances: Vec<Pair<'a>>,
    affinity: Vec<Affinity<'a>>,
}

#[derive(Serialize)]
struct Pair<'a> {
    devices: [&'a str; 2],
    distance: Distance,
    /// PCIe distance of two GPUs that NVLink joins.
    #[serde(skip_serializing_if = "Option::is_none")]
    pcie_distance: Option<Distance>,
    #[serde(skip_serializing_if = "Option::is_none")]
    nvlinks: Option<u32>,
    /// Total of all these links, each way.
    #[serde(skip_serializing_if = "Option::is_none")]
    nvlink_bytes_per_s: Option<u64>,
    /// Whether two GPUs have peer access, where the driver reports it.
    #[serde(skip_serializing_if = "Option::is_none")]
    peer_access: Option<bool>,
}

/// A GPU's adapters, nearest first.
#[derive(Serialize)]
struct Affinity<'a> {
    gpu: &'a str,
    adapters: Vec<NearGpu<'a>>,
}

#[derive(Serialize)]
struct NearGpu<'a> {
    name: &'a str,
    distance: Distance,
}

/// Shows the topology. What could not be read is a note, not an error.
///
/// # Errors
/// [`Failure::Usage`] when the folder is no sysfs; [`Failure::Test`] when stdout cannot be written.
pub(crate) fn run(args: &TopoArgs) -> Result<(), Failure> {
    let host = read(&args.sysfs).map_err(|e| Failure::usage(format!("{e}; --sysfs names another folder")))?;
    if args.json {
        return report::print_result(&listing(&host));
    }
    report::print_line(host.to_string().trim_end())?;
    for note in &host.notes {
        eprintln!("doorbell: note: {note}");
    }
    Ok(())
}

/// # Errors
/// [`TopologyError`] when it has no sysfs.
pub(crate) fn this_host() -> Result<Host, TopologyError> {
    read(Path::new(SYSFS))
}

fn listing(host: &Host) -> Listing<'_> {
    let distances = host.distances().map(|(one, two, distance)| {
        let link = host.nvlink(one, two);
        let gpus = one.gpu.as_ref().zip(two.gpu.as_ref());
        Pair {
            devices: [&one.name, &two.name],
            distance,
            pcie_distance: link.map(|_| host.pcie_distance(one, two)),
            nvlinks: link.map(|link| link.links),
            nvlink_bytes_per_s: link.map(|link| link.bytes_per_s).filter(|speed| *speed > 0),
            peer_access: gpus.and_then(|(one, two)| one.access(two)),
        }
    });
    let gpus = host.devices.iter().filter(|device| device.kind == DeviceKind::Gpu);
    let affinity = gpus.map(|gpu| Affinity {
        gpu: &gpu.name,
        adapters: host
            .adapters_near(&gpu.place)
            .into_iter()
            .map(|(device, distance)| NearGpu {
                name: &device.name,
                distance,
            })
            .collect(),
    });
    Listing {
        host,
        distances: distances.collect(),
        affinity: affinity.collect(),
    }
}

/// The topology from sysfs, and from NVIDIA's driver for the GPUs of this host. For a copy of
/// another machine's sysfs, the driver is used only if it is named explicitly.
fn read(sysfs: &Path) -> Result<Host, TopologyError> {
    let name = gethostname().ok().and_then(|name| name.into_string().ok());
    let name = name.unwrap_or_else(|| "localhost".into());
    let mut host = Host::read(sysfs, name)?;
    if sysfs == Path::new(SYSFS) || env::var_os(NVML_LIBRARY_VARIABLE).is_some() {
        host.query_driver();
    }
    Ok(host)
}
