//! A host as text: the device tree, and distances between devices.

use core::fmt;

use super::{Device, DeviceKind, Distance, Gpu, Host, NvLink};

const MAX_TABLE_DEVICES: usize = 24;

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
        writeln!(f, "  at no known NUMA node")?;
        devices(host, f, |device| !known(device))?;
    }
    if host.devices.is_empty() {
        writeln!(f, "  neither adapters nor GPUs")?;
    }
    distances(host, f)?;
    nvlinks(host, f)?;
    near(host, f)
}

struct GpuSummary<'a>(&'a Device);

impl fmt::Display for GpuSummary<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if let Some(index) = self.0.index {
            write!(f, " {index}")?;
        }
        let links = self.0.gpu.as_ref().and_then(Gpu::all_nvlinks);
        let links = links.map(|all| format!("{} NVLinks", all.links));
        let known: Vec<String> = self.0.model.clone().into_iter().chain(links).collect();
        match known.is_empty() {
            true => Ok(()),
            false => write!(f, " ({})", known.join(", ")),
        }
    }
}

fn or_none(text: &str) -> &str {
    if text.is_empty() { "none" } else { text }
}

/// A bridge is written once for consecutive devices below it.
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
            (DeviceKind::Gpu, _) => write!(f, "{} GPU{}", device.name, GpuSummary(device))?,
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
    if host.devices.len() > MAX_TABLE_DEVICES {
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
        let row: Vec<String> = host.devices.iter().map(|two| cell(host, one, two)).collect();
        line(f, &one.name, &mut row.iter().map(String::as_str))?;
    }
    Ok(())
}

fn cell(host: &Host, one: &Device, two: &Device) -> String {
    match host.nvlink(one, two) {
        Some(link) => format!("{} x{}", Distance::NvLink, link.links),
        None => host.distance(one, two).to_string(),
    }
}

fn nvlinks(host: &Host, f: &mut fmt::Formatter<'_>) -> fmt::Result {
    let pairs = || host.distances().map(|(one, two, _)| (one, two));
    let mut kinds: Vec<NvLink> = Vec::new();
    for link in pairs().filter_map(|(one, two)| host.nvlink(one, two)) {
        if !kinds.contains(&link) {
            kinds.push(link);
        }
    }
    for NvLink { links, bytes_per_s } in kinds {
        let speed = match bytes_per_s {
            0 => "unknown rate".to_owned(),
            _ => format!("{} GB/s each way", bytes_per_s as f64 / 1e9),
        };
        writeln!(f, "{} x{links}: {speed}", Distance::NvLink)?;
    }
    for (one, two) in pairs() {
        let access = one
            .gpu
            .as_ref()
            .zip(two.gpu.as_ref())
            .and_then(|(one, two)| one.access(two));
        if access == Some(false) {
            writeln!(f, "{} and {} do not reach each other's memory", one.name, two.name)?;
        }
    }
    Ok(())
}

fn near(host: &Host, f: &mut fmt::Formatter<'_>) -> fmt::Result {
    for gpu in host.devices.iter().filter(|device| device.kind == DeviceKind::Gpu) {
        let adapters = host.adapters_near(&gpu.place);
        let nearest = adapters.first().map(|(_, distance)| *distance);
        let names: Vec<&str> = adapters
            .iter()
            .take_while(|(_, distance)| Some(*distance) == nearest)
            .map(|(device, _)| device.name.as_str())
            .collect();
        let adapters = match nearest {
            None => None,
            Some(Distance::Cross) => Some("no adapter is near".to_owned()),
            Some(distance) => Some(format!("adapters {} ({distance})", names.join(", "))),
        };
        let cpus = gpu.cpus.as_ref().map(|cpus| format!("processors {cpus}"));
        let known: Vec<String> = adapters.into_iter().chain(cpus).collect();
        if !known.is_empty() {
            writeln!(f, "near {}: {}", gpu.name, known.join(", "))?;
        }
    }
    Ok(())
}
