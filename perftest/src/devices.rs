//! `doorbell devices`: every device that a test could use, the system's and the userspace ones.

use doorbell_collectives::topology::{Device, DeviceKind, Distance, Host};
use doorbell_verbs::{Context, DeviceError, GidType, PortState};
use serde::Serialize;

use std::collections::BTreeMap;
use std::fs;
use std::path::Path;

use crate::cli::DevicesArgs;
use crate::device::{self, PORT, Side, Soft};
use crate::failure::{Failure, one_line};
use crate::report::{self, LinkKind};
use crate::topo;

#[derive(Debug, Serialize)]
struct Listing {
    devices: Vec<Entry>,
    notes: Vec<String>,
}

#[derive(Debug, Serialize)]
struct Entry {
    name: String,
    link: LinkKind,
    /// State of the first port, or why it cannot be queried.
    state: String,
    active: bool,
    mtu_bytes: Option<u32>,
    bits_per_s: Option<u64>,
    /// The address of the preferred GID.
    address: Option<String>,
    gids: Vec<GidLine>,
    limits: Option<Limits>,
    /// Copy modes to other processes of this host by the shared-memory link, best first.
    #[serde(rename = "movers", skip_serializing_if = "Vec::is_empty")]
    copy_modes: Vec<&'static str>,
    /// The port's counters in sysfs, of congestion and loss; none where it is not there.
    #[serde(skip_serializing_if = "BTreeMap::is_empty")]
    counters: BTreeMap<&'static str, u64>,
    /// The GPUs, nearest first; none where not requested, or where the device is software.
    #[serde(skip_serializing_if = "Option::is_none")]
    gpus: Option<Vec<NearGpu>>,
}

/// Those of `hw_counters` that say what congestion and loss have cost, by the adapters' names.
const COUNTERS: [&str; 10] = [
    "np_cnp_sent",
    "np_ecn_marked_roce_packets",
    "rp_cnp_handled",
    "rp_cnp_ignored",
    "out_of_sequence",
    "duplicate_request",
    "packet_seq_err",
    "local_ack_timeout_err",
    "rnr_nak_retry_err",
    "retransmitted_pkts",
];

#[derive(Debug, Serialize)]
struct NearGpu {
    name: String,
    #[serde(skip_serializing_if = "Option::is_none")]
    index: Option<u32>,
    distance: Distance,
}

#[derive(Debug, Serialize)]
struct GidLine {
    index: u32,
    gid: String,
    kind: &'static str,
}

#[derive(Debug, Serialize)]
struct Limits {
    ports: u8,
    max_queue_depth: u32,
    max_sge: u32,
    max_cqe: u32,
    max_rd_atomic: u8,
    atomics: bool,
}

/// Lists the devices. A missing library is a note, not an error.
///
/// # Errors
/// [`Failure::Usage`] when the options of the userspace devices are invalid; [`Failure::Test`] when
/// stdout cannot be written.
pub(crate) fn run(args: &DevicesArgs) -> Result<(), Failure> {
    let mut listing = Listing {
        devices: Vec::new(),
        notes: Vec::new(),
    };
    let soft = Soft::configured(&args.soft, 0, Side::Single)?;
    let found = device::open_each(soft, &mut listing.notes)?;
    if listing.notes.is_empty() && found.iter().all(|(_, link, _)| *link == LinkKind::SoftUdp) {
        let note = "the system's RDMA library has no device (rdma link shows what the kernel has)";
        listing.notes.push(note.into());
    }
    for (name, link, context) in found {
        let copy_modes = match (link, &context) {
            (LinkKind::SoftUdp, Ok(_)) => device::copy_mode_names(&name),
            _ => Vec::new(),
        };
        let entry = entry(name, link, context);
        listing.devices.push(Entry { copy_modes, ..entry });
    }
    for entry in &mut listing.devices {
        entry.counters = counters(Path::new("/sys/class/infiniband"), &entry.name);
    }
    if args.gpu {
        match topo::this_host() {
            Ok(host) => {
                for entry in &mut listing.devices {
                    entry.gpus = gpus(&host, &entry.name);
                }
                listing.notes.extend(host.notes);
            }
            Err(e) => listing.notes.push(format!("no GPUs: {e}")),
        }
    }
    if args.json {
        return report::print_result(&listing);
    }
    report::print_line(&text(&listing, args.verbose, args.gpu))?;
    for note in &listing.notes {
        eprintln!("doorbell: note: {note}");
    }
    Ok(())
}

/// The counters of a device's port, of those that it has. Under `doorbell run` the userspace
/// devices have them, too: the sums over the job.
fn counters(infiniband: &Path, device: &str) -> BTreeMap<&'static str, u64> {
    let folder = infiniband.join(device).join(format!("ports/{PORT}/hw_counters"));
    let read = |name| Some((name, fs::read_to_string(folder.join(name)).ok()?.trim().parse().ok()?));
    COUNTERS.into_iter().filter_map(read).collect()
}

/// The GPUs near an adapter of this name; none for a device on no bus.
fn gpus(host: &Host, name: &str) -> Option<Vec<NearGpu>> {
    let is_it = |device: &&Device| device.kind == DeviceKind::Adapter && device.name == name;
    let adapter = host
        .devices
        .iter()
        .find(is_it)
        .filter(|adapter| !adapter.place.pcie_path.is_empty())?;
    let near = host
        .gpus_near(&adapter.place)
        .into_iter()
        .map(|(gpu, distance)| NearGpu {
            name: gpu.name.clone(),
            index: gpu.index,
            distance,
        });
    Some(near.collect())
}

fn nearest(gpus: &[NearGpu]) -> Option<String> {
    let distance = gpus.first()?.distance;
    let nearest = gpus.iter().take_while(|gpu| gpu.distance == distance);
    let names: Vec<String> = nearest
        .map(|gpu| gpu.index.map_or_else(|| gpu.name.clone(), |index| index.to_string()))
        .collect();
    Some(format!("{} ({distance})", names.join(",")))
}

fn entry(name: String, link: LinkKind, context: Result<Context, String>) -> Entry {
    let query = |context: Context| {
        let default = context.default_gid(PORT).ok();
        Ok((context.port(PORT)?, context.gids(PORT)?, default, *context.attr()))
    };
    let queried = context.and_then(|context| query(context).map_err(|e: DeviceError| e.to_string()));
    let (port, gids, default, attr) = match queried {
        Ok(answers) => answers,
        Err(e) => return unknown(name, link, one_line(&e)),
    };
    let gids = gids.iter().map(|entry| GidLine {
        index: entry.index,
        gid: entry.gid.to_string(),
        kind: gid_kind(entry.kind),
    });
    Entry {
        active: matches!(port.state, PortState::Active | PortState::ActiveDefer),
        mtu_bytes: Some(port.active_mtu.bytes()),
        bits_per_s: port.bits_per_s,
        address: default.map(|entry| entry.gid.to_ip().to_string()),
        gids: gids.collect(),
        limits: Some(Limits {
            ports: attr.ports,
            max_queue_depth: attr.max_qp_wr,
            max_sge: attr.max_sge,
            max_cqe: attr.max_cqe,
            max_rd_atomic: attr.max_rd_atomic,
            atomics: attr.atomics,
        }),
        ..unknown(name, link, port.state.to_string())
    }
}

/// The entry of a device of which only the state is known, or why it cannot be queried.
fn unknown(name: String, link: LinkKind, state: String) -> Entry {
    Entry {
        name,
        link,
        state,
        active: false,
        mtu_bytes: None,
        bits_per_s: None,
        address: None,
        gids: Vec::new(),
        limits: None,
        copy_modes: Vec::new(),
        counters: BTreeMap::new(),
        gpus: None,
    }
}

fn gid_kind(kind: GidType) -> &'static str {
    match kind {
        GidType::InfiniBand => "InfiniBand",
        GidType::RoceV1 => "RoCEv1",
        GidType::RoceV2 => "RoCEv2",
        _ => "unknown",
    }
}

fn text(listing: &Listing, verbose: bool, gpu: bool) -> String {
    let column = |text: &str| match gpu {
        true => format!(" {text:<24}"),
        false => String::new(),
    };
    let mut lines = vec![format!(
        "{:<12} {:<12} {:>8} {:>13}  {:<24}{} state",
        "#device",
        "link",
        "MTU[B]",
        "speed[Gbit/s]",
        "address",
        column("nearest GPUs")
    )];
    for entry in &listing.devices {
        let dash = || "-".to_owned();
        lines.push(format!(
            "{:<12} {:<12} {:>8} {:>13}  {:<24}{} {}",
            entry.name,
            entry.link.name(),
            entry.mtu_bytes.map_or_else(dash, |mtu| mtu.to_string()),
            entry
                .bits_per_s
                .map_or_else(dash, |speed| format!("{:.0}", speed as f64 / 1e9)),
            entry.address.clone().unwrap_or_else(dash),
            column(&entry.gpus.as_deref().and_then(nearest).unwrap_or_else(dash)),
            entry.state
        ));
        if !verbose {
            continue;
        }
        lines.extend(
            entry
                .gids
                .iter()
                .map(|gid| format!("    GID {:<4} {:<40} {}", gid.index, gid.gid, gid.kind)),
        );
        if !entry.copy_modes.is_empty() {
            lines.push(format!(
                "    processes of this host: link {}, payloads by {}",
                LinkKind::SoftLocal.name(),
                entry.copy_modes.join(", ")
            ));
        }
        if !entry.counters.is_empty() {
            let counters: Vec<_> = entry
                .counters
                .iter()
                .map(|(name, value)| format!("{name} {value}"))
                .collect();
            lines.push(format!("    counters: {}", counters.join(", ")));
        }
        if let Some(limits) = &entry.limits {
            lines.push(format!(
                "    ports {}, queue depth {}, scatter-gather {}, CQ entries {}, reads and atomics outstanding {}, atomics {}",
                limits.ports,
                limits.max_queue_depth,
                limits.max_sge,
                limits.max_cqe,
                limits.max_rd_atomic,
                if limits.atomics { "yes" } else { "no" }
            ));
        }
    }
    lines.join("\n")
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::symlink;

    use super::*;

    fn listing(entry: Entry) -> Listing {
        Listing {
            devices: vec![entry],
            notes: Vec::new(),
        }
    }

    #[test]
    fn a_device_that_does_not_open_is_listed_with_the_reason() {
        let entry = entry("x0".into(), LinkKind::Hardware, Err("no node under\n/dev".into()));
        assert!(!entry.active && entry.state == "no node under /dev", "{}", entry.state);
        let text = text(&listing(entry), true, false);
        assert_eq!(text.lines().count(), 2, "{text}");
    }

    /// A counter that a device does not have is left out, as is one that is no number.
    #[test]
    fn counters_are_those_of_the_port() {
        let root = tempfile::tempdir().unwrap();
        let folder = root.path().join("mlx5_0/ports/1/hw_counters");
        fs::create_dir_all(&folder).unwrap();
        for (name, text) in [
            ("np_cnp_sent", "7\n"),
            ("out_of_sequence", "0\n"),
            ("rp_cnp_handled", "N/A\n"),
            ("lifespan", "10\n"),
        ] {
            fs::write(folder.join(name), text).unwrap();
        }
        let expected = BTreeMap::from([("np_cnp_sent", 7), ("out_of_sequence", 0)]);
        assert_eq!(counters(root.path(), "mlx5_0"), expected);
        let mut entry = entry("mlx5_0".into(), LinkKind::Hardware, Err("down".into()));
        entry.counters = expected;
        let text = text(&listing(entry), true, false);
        assert!(text.ends_with("counters: np_cnp_sent 7, out_of_sequence 0"), "{text}");
    }

    /// An adapter with two GPUs below its switch and one elsewhere.
    #[test]
    fn the_nearest_gpus_are_named() {
        let root = tempfile::tempdir().unwrap();
        let at = root.path();
        fs::create_dir_all(at.join("bus/pci/devices")).unwrap();
        fs::create_dir_all(at.join("class/infiniband/mlx5_0")).unwrap();
        fs::create_dir_all(at.join("class/infiniband/rxe0")).unwrap();
        let switch = "devices/pci0000:00/0000:00:01.0";
        for folder in ["0000:02:00.0", "0000:03:00.0", "0000:04:00.0"]
            .map(|of| format!("{switch}/{of}"))
            .iter()
        {
            fs::create_dir_all(at.join(folder)).unwrap();
        }
        fs::create_dir_all(at.join("devices/pci0000:80/0000:81:00.0")).unwrap();
        symlink(
            at.join(switch).join("0000:04:00.0"),
            at.join("class/infiniband/mlx5_0/device"),
        )
        .unwrap();
        for gpu in [
            "pci0000:80/0000:81:00.0",
            "pci0000:00/0000:00:01.0/0000:02:00.0",
            "pci0000:00/0000:00:01.0/0000:03:00.0",
        ] {
            let folder = at.join("devices").join(gpu);
            fs::write(folder.join("class"), "0x030200").unwrap();
            fs::write(folder.join("vendor"), "0x10de").unwrap();
            symlink(&folder, at.join("bus/pci/devices").join(folder.file_name().unwrap())).unwrap();
        }
        let mut host = Host::read(at, "h").unwrap();
        let near = |host: &Host| gpus(host, "mlx5_0").as_deref().and_then(nearest).unwrap();
        assert_eq!(near(&host), "0000:02:00.0,0000:03:00.0 (switch)");
        host.devices
            .iter_mut()
            .zip(0..)
            .for_each(|(device, index)| device.index = Some(index));
        assert_eq!(near(&host), "2,3 (switch)");
        assert_eq!(gpus(&host, "mlx5_0").unwrap().len(), 3);
        // Software devices, and devices unknown to sysfs, are near no GPU.
        assert!(gpus(&host, "rxe0").is_none() && gpus(&host, "soft0").is_none());

        let mut listed = entry("mlx5_0".into(), LinkKind::Hardware, Err("no".into()));
        listed.gpus = gpus(&host, "mlx5_0");
        let soft = entry("soft0".into(), LinkKind::SoftUdp, Err("no".into()));
        let listing = Listing {
            devices: vec![listed, soft],
            notes: Vec::new(),
        };
        let text = text(&listing, false, true);
        let lines: Vec<&str> = text.lines().collect();
        assert!(lines[0].contains(" nearest GPUs "), "{text}");
        assert!(lines[1].ends_with(" 2,3 (switch)             no"), "{text}");
        assert!(lines[2].ends_with(" -                        no"), "{text}");
    }
}
