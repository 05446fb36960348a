//! `doorbell devices`: every device a test could use, of the system and of this program.

use doorbell_verbs::{Context, DeviceError, GidType, Library, PortState};
use serde::Serialize;

use crate::cli::DevicesArgs;
use crate::device::{self, PORT, Side, Soft};
use crate::failure::{Failure, one_line};
use crate::report::{self, LinkKind};

#[derive(Debug, Serialize)]
struct Listing {
    tool: &'static str,
    version: &'static str,
    devices: Vec<Entry>,
    /// What could not be listed, and why.
    notes: Vec<String>,
}

#[derive(Debug, Serialize)]
struct Entry {
    name: String,
    link: LinkKind,
    /// State of the first port, or why it cannot be asked.
    state: String,
    active: bool,
    mtu_bytes: Option<u32>,
    bits_per_s: Option<u64>,
    /// The address of the preferred GID.
    address: Option<String>,
    gids: Vec<GidLine>,
    limits: Option<Limits>,
    /// Of a userspace device that reaches processes of this host without UDP: how payloads get there, the best first.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    movers: Vec<&'static str>,
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

/// Lists the devices. A library that is not there is a note, not an error.
///
/// # Errors
/// [`Failure::Usage`] when the userspace devices are asked for in a way that makes no sense; [`Failure::Test`] when stdout does not take it.
pub(crate) fn run(args: &DevicesArgs) -> Result<(), Failure> {
    let mut listing = Listing {
        tool: "doorbell",
        version: env!("CARGO_PKG_VERSION"),
        devices: Vec::new(),
        notes: Vec::new(),
    };
    match Library::system().and_then(|library| library.devices().map(|devices| (library, devices))) {
        Ok((library, devices)) => {
            if devices.is_empty() {
                listing
                    .notes
                    .push("the system's RDMA library has no device (rdma link shows what the kernel has)".into());
            }
            for found in devices {
                let link = device::of_system_device(&found.name);
                let context = library.open(&found.name).map_err(|e| e.to_string());
                listing.devices.push(entry(found.name, link, context));
            }
        }
        Err(e) => listing
            .notes
            .push(format!("no system devices: {}", one_line(&e.to_string()))),
    }
    let soft = Soft::configured(&args.soft, 0, Side::Alone)?;
    let names: Vec<String> = soft.names().into_iter().map(str::to_owned).collect();
    let library = soft.library()?;
    for name in names {
        let context = library.open(&name).map_err(|e| device::explain(&name, &e).to_string());
        let movers = context.as_ref().map_or_else(|_| Vec::new(), |_| device::movers(&name));
        let entry = entry(name, LinkKind::SoftUdp, context);
        listing.devices.push(Entry { movers, ..entry });
    }
    if args.json {
        return report::print_json(&listing);
    }
    report::print_line(&text(&listing, args.verbose))?;
    for note in &listing.notes {
        eprintln!("doorbell: note: {note}");
    }
    Ok(())
}

fn entry(name: String, link: LinkKind, context: Result<Context, String>) -> Entry {
    let ask = |context: Context| Ok((context.port(PORT)?, context.gids(PORT)?, *context.attr()));
    let asked = context.and_then(|context| ask(context).map_err(|e: DeviceError| e.to_string()));
    let (port, gids, attr) = match asked {
        Ok(answers) => answers,
        Err(e) => {
            return Entry {
                name,
                link,
                state: one_line(&e),
                active: false,
                mtu_bytes: None,
                bits_per_s: None,
                address: None,
                gids: Vec::new(),
                limits: None,
                movers: Vec::new(),
            };
        }
    };
    let preferred = gids.iter().find(|entry| entry.kind == GidType::RoceV2).or(gids.first());
    Entry {
        name,
        link,
        state: port.state.to_string(),
        active: matches!(port.state, PortState::Active | PortState::ActiveDefer),
        mtu_bytes: Some(port.active_mtu.bytes()),
        bits_per_s: port.bits_per_s,
        address: preferred.map(|entry| entry.gid.to_ip().to_string()),
        gids: gids
            .iter()
            .map(|entry| GidLine {
                index: entry.index,
                gid: entry.gid.to_string(),
                kind: gid_kind(entry.kind),
            })
            .collect(),
        limits: Some(Limits {
            ports: attr.ports,
            max_queue_depth: attr.max_queue_depth,
            max_sge: attr.max_sge,
            max_cqe: attr.max_cqe,
            max_rd_atomic: attr.max_rd_atomic,
            atomics: attr.atomics,
        }),
        movers: Vec::new(),
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

fn text(listing: &Listing, verbose: bool) -> String {
    let mut lines = vec![format!(
        "{:<12} {:<12} {:>8} {:>13}  {:<24} state",
        "#device", "link", "MTU[B]", "speed[Gbit/s]", "address"
    )];
    for entry in &listing.devices {
        let dash = || "-".to_owned();
        lines.push(format!(
            "{:<12} {:<12} {:>8} {:>13}  {:<24} {}",
            entry.name,
            entry.link.name(),
            entry.mtu_bytes.map_or_else(dash, |mtu| mtu.to_string()),
            entry
                .bits_per_s
                .map_or_else(dash, |speed| format!("{:.0}", speed as f64 / 1e9)),
            entry.address.clone().unwrap_or_else(dash),
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
        if !entry.movers.is_empty() {
            lines.push(format!(
                "    processes of this host: link {}, payloads by {}",
                LinkKind::SoftLocal.name(),
                entry.movers.join(", ")
            ));
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
    use super::*;

    #[test]
    fn a_device_that_does_not_open_is_listed_with_the_reason() {
        let entry = entry("x0".into(), LinkKind::Hardware, Err("no node under\n/dev".into()));
        assert!(!entry.active && entry.state == "no node under /dev", "{}", entry.state);
        let listing = Listing {
            tool: "doorbell",
            version: "0",
            devices: vec![entry],
            notes: Vec::new(),
        };
        let text = text(&listing, true);
        assert_eq!(text.lines().count(), 2, "{text}");
    }
}
