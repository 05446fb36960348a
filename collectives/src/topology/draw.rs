//! A host in lines of text: what is below what, and how near devices are to one another.

use core::fmt;

use super::{Device, DeviceKind, Distance, Host};

/// Devices beyond which the table of distances would be too wide to read.
const TABLE: usize = 24;

pub(super) fn host(host: &Host, f: &mut fmt::Formatter<'_>) -> fmt::Result {
    writeln!(f, "host {}", host.name)?;
    for node in &host.numa_nodes {
        let distances: Vec<String> = node.distances.iter().map(ToString::to_string).collect();
        writeln!(
            f,
            "  NUMA node {}: processors {}, distances {}",
            node.node,
            or_none(&node.cpus),
            or_none(&distances.join(" "))
        )?;
        devices(host, f, |device| device.place.numa_node == Some(node.node))?;
    }
    let known = |device: &Device| {
        device
            .place
            .numa_node
            .is_some_and(|of| host.numa_nodes.iter().any(|node| node.node == of))
    };
    if host.devices.iter().any(|device| !known(device)) {
        writeln!(f, "  at no NUMA node that is told")?;
        devices(host, f, |device| !known(device))?;
    }
    if host.devices.is_empty() {
        writeln!(f, "  neither adapters nor GPUs")?;
    }
    distances(host, f)
}

fn or_none(text: &str) -> &str {
    if text.is_empty() { "none" } else { text }
}

/// Devices below the bridges that lead to them; a bridge is written once for all that follow one another below it.
fn devices(host: &Host, f: &mut fmt::Formatter<'_>, shown: impl Fn(&Device) -> bool) -> fmt::Result {
    let mut shown: Vec<&Device> = host.devices.iter().filter(|device| shown(device)).collect();
    shown.sort_by(|a, b| a.place.pcie_path.cmp(&b.place.pcie_path));
    let mut above: &[String] = &[];
    for device in shown {
        let path = &device.place.pcie_path;
        let (address, bridges) = path
            .split_last()
            .map_or((None, &path[..]), |(last, bridges)| (Some(last), bridges));
        let common = above.iter().zip(bridges).take_while(|(one, two)| one == two).count();
        for (depth, bridge) in bridges.iter().enumerate().skip(common) {
            writeln!(f, "    {:1$}{bridge}", "", 2 * depth)?;
        }
        above = bridges;
        write!(f, "    {:1$}", "", 2 * bridges.len())?;
        match (device.kind, address) {
            (DeviceKind::Adapter, Some(address)) => write!(f, "{address} {}", device.name)?,
            (DeviceKind::Adapter, None) => write!(f, "{}", device.name)?,
            (DeviceKind::Gpu, _) => write!(f, "{} GPU", device.name)?,
        }
        match &device.port {
            Some(port) => writeln!(f, " ({port})")?,
            None => writeln!(f)?,
        }
    }
    Ok(())
}

fn distances(host: &Host, f: &mut fmt::Formatter<'_>) -> fmt::Result {
    if host.devices.len() < 2 {
        return Ok(());
    }
    if host.devices.len() > TABLE {
        return writeln!(f, "distances of {} devices: with --json", host.devices.len());
    }
    let width = host
        .devices
        .iter()
        .map(|device| device.name.chars().count())
        .max()
        .unwrap_or(0)
        .max(6);
    let line = |f: &mut fmt::Formatter<'_>, first: &str, cells: &mut dyn Iterator<Item = &str>| {
        let cells: String = cells.map(|cell| format!("  {cell:width$}")).collect();
        writeln!(f, "{}", format!("{first:width$}{cells}").trim_end())
    };
    line(f, "", &mut host.devices.iter().map(|device| device.name.as_str()))?;
    for one in &host.devices {
        let mut row = host.devices.iter().map(|two| match core::ptr::eq(one, two) {
            true => Distance::Same.name(),
            false => one.place.distance(&two.place).name(),
        });
        line(f, &one.name, &mut row)?;
    }
    Ok(())
}
