//! The location of an adapter: its NUMA node and the process's, its PCIe path, its IOMMU.

use super::cpu;
use super::port::show_gbit;
use super::sources::{Sources, list, show_list};
use crate::report::{Code, Warning};

const NODES: &str = "sys/devices/system/node";

/// None for a device on no bus. `bits_per_s`: its port's rate.
pub(super) fn of_device(sources: &Sources, name: &str, bits_per_s: Option<u64>) -> Vec<Warning> {
    let Some(folder) = sources.resolved(&format!("sys/class/infiniband/{name}/device")) else {
        return Vec::new();
    };
    let mut warnings = numa(sources, name, &folder);
    warnings.extend(pcie(sources, name, &folder, bits_per_s));
    warnings.extend(iommu(sources, name, &folder));
    warnings
}

fn numa(sources: &Sources, name: &str, folder: &str) -> Vec<Warning> {
    // A machine with a single node reports -1, or 0.
    let Some(node) = sources.number::<usize>(&format!("{folder}/numa_node")) else {
        return Vec::new();
    };
    let nodes = list(&sources.text(&format!("{NODES}/online")).unwrap_or_default());
    if nodes.len() < 2 {
        return Vec::new();
    }
    let mut warnings = Vec::new();
    warnings.extend(numa_cpus(sources, name, node));
    warnings.extend(numa_memory(sources, name, node));
    warnings
}

fn numa_cpus(sources: &Sources, name: &str, node: usize) -> Option<Warning> {
    let near = list(&sources.text(&format!("{NODES}/node{node}/cpulist"))?);
    let allowed = cpu::allowed(sources);
    let far: Vec<usize> = allowed.iter().copied().filter(|core| !near.contains(core)).collect();
    // A node without cores is equally far from all of them.
    if far.is_empty() || near.is_empty() {
        return None;
    }
    let where_it_runs = if far.len() == allowed.len() {
        "runs on another node's cores".to_owned()
    } else {
        format!("may run on cores {} of other nodes", show_list(&far))
    };
    Some(Code::NumaCpus.warning(format!(
            "{name} is at NUMA node {node}, and this process {where_it_runs}: numactl --cpunodebind={node} --membind={node}, or taskset -c {}",
            show_list(&near)
        )))
}

/// Memory is allocated on the node of the thread that first touches it, unless that is not allowed,
/// or a policy says otherwise (numa(7)).
fn numa_memory(sources: &Sources, name: &str, node: usize) -> Option<Warning> {
    let allowed = list(&cpu::status(sources, "Mems_allowed_list")?);
    if !allowed.is_empty() && !allowed.contains(&node) {
        return Some(Code::NumaMemory.warning(format!(
                "{name} is at NUMA node {node}, and this process may have memory of nodes {} only: add it to the container's cpuset.mems",
                show_list(&allowed)
            )));
    }
    let bound = sources.lines("proc/self/numa_maps").into_iter().find_map(|line| {
        let policy = line.split_whitespace().nth(1)?;
        let nodes = ["bind", "prefer", "interleave"].iter().find_map(|kind| {
            let rest = policy.strip_prefix(kind)?;
            // bind:0, prefer=static:0 and the like.
            rest.rsplit_once(':').map(|(_, nodes)| list(nodes))
        })?;
        let elsewhere = nodes.iter().any(|other| *other != node);
        (elsewhere || nodes.is_empty()).then(|| policy.to_owned())
    })?;
    Some(Code::NumaMemory.warning(format!(
        "{name} is at NUMA node {node}, and memory of this process has the policy {bound}: numactl --membind={node}"
    )))
}

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
struct Link {
    /// Transfers per second of a PCIe lane, in units of 0.1 GT/s.
    tenths_gt_per_s: u64,
    lanes: u64,
}

impl Link {
    /// A function's link, by its `current` or `max` attributes. Functions without a link of their
    /// own report a width of 0 or 63 or a speed that is no number.
    fn of(sources: &Sources, folder: &str, which: &str) -> Option<Link> {
        let speed = sources.text(&format!("{folder}/{which}_link_speed"))?;
        let gt_per_s: f64 = speed.split(' ').next()?.parse().ok()?;
        let lanes = sources.number(&format!("{folder}/{which}_link_width"))?;
        let plausible = (2.5..=128.0).contains(&gt_per_s) && (1..=32).contains(&lanes);
        plausible.then_some(Link {
            tenths_gt_per_s: (gt_per_s * 10.0).round() as u64,
            lanes,
        })
    }

    /// Bandwidth each way after the line code: 8b/10b up to 5 GT/s, 128b/130b up to 32, 242 of 256
    /// bytes of a flit above.
    fn bits_per_s(self) -> u64 {
        let lane = self.tenths_gt_per_s * 100_000_000;
        let lane = match self.tenths_gt_per_s {
            0..=50 => lane / 10 * 8,
            51..=320 => lane / 130 * 128,
            _ => lane / 256 * 242,
        };
        lane * self.lanes
    }
}

impl std::fmt::Display for Link {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let (whole, tenths) = (self.tenths_gt_per_s / 10, self.tenths_gt_per_s % 10);
        match tenths {
            0 => write!(f, "{whole} GT/s x{}", self.lanes),
            _ => write!(f, "{whole}.{tenths} GT/s x{}", self.lanes),
        }
    }
}

fn pcie(sources: &Sources, name: &str, folder: &str, bits_per_s: Option<u64>) -> Vec<Warning> {
    // A virtual function has the link of its physical function.
    let physical = sources.resolved(&format!("{folder}/physfn"));
    let folder = physical.as_deref().unwrap_or(folder);
    let Some(now) = Link::of(sources, folder, "current") else {
        return Vec::new();
    };
    let address = folder.rsplit('/').next().unwrap_or_default();
    let slot = slot(sources, address).map_or_else(String::new, |slot| format!(", slot {slot}"));
    let mut warnings = Vec::new();
    if let Some(best) = Link::of(sources, folder, "max")
        && (now.tenths_gt_per_s < best.tenths_gt_per_s || now.lanes < best.lanes)
    {
        let enough = match bits_per_s {
            Some(rate) if now.bits_per_s() >= rate => {
                format!(", which is still above the port's {}", show_gbit(rate))
            }
            _ => String::new(),
        };
        warnings.push(Code::PcieLink.warning(format!(
                "the PCIe link of {name} ({address}{slot}) runs at {now} of {best}, {}{enough}: seat it again, or move it to a wider or faster slot",
                show_gbit(now.bits_per_s())
            )));
    }
    let slowest = upstream(folder).filter_map(|at| Some((Link::of(sources, at, "current")?, at)));
    let slowest = slowest.min_by_key(|(link, _)| link.bits_per_s());
    if let (Some((link, at)), Some(rate)) = (slowest, bits_per_s)
        && link.bits_per_s() < rate
    {
        let at = at.rsplit('/').next().unwrap_or_default();
        let of = if at == address {
            String::new()
        } else {
            format!(" of the bridge {at}")
        };
        warnings.push(Code::PcieBandwidth.warning(format!(
                "the PCIe link{of} on the way to {name} ({address}{slot}) carries {} ({link}), its port {}: no test reaches that; move it to another slot",
                show_gbit(link.bits_per_s()),
                show_gbit(rate)
            )));
    }
    warnings
}

/// The functions on the path to the one in this folder of sysfs, itself first, as folders:
/// `…/0000:00:01.0/0000:01:00.0` is behind the bridge of its parent folder.
fn upstream(folder: &str) -> impl Iterator<Item = &str> {
    let is_function = |folder: &&str| {
        let name = folder.rsplit('/').next().unwrap_or_default();
        name.len() >= 12
            && name
                .bytes()
                .all(|byte| byte.is_ascii_hexdigit() || matches!(byte, b':' | b'.'))
    };
    std::iter::successors(Some(folder), |folder| folder.rsplit_once('/').map(|(parent, _)| parent))
        .take_while(is_function)
        .take(32)
}

fn slot(sources: &Sources, address: &str) -> Option<String> {
    let (device, _) = address.rsplit_once('.')?;
    let is_it = |name: &String| sources.text(&format!("sys/bus/pci/slots/{name}/address")).as_deref() == Some(device);
    sources.names("sys/bus/pci/slots").into_iter().find(is_it)
}

fn iommu(sources: &Sources, name: &str, folder: &str) -> Option<Warning> {
    let kind = sources.text(&format!("{folder}/iommu_group/type"))?;
    matches!(kind.as_str(), "DMA" | "DMA-FQ").then(|| {
        Code::Iommu.warning(format!("an IOMMU translates each address that {name} uses ({kind}): iommu=pt on the kernel's command line, where this host's devices are trusted"))
    })
}

#[cfg(test)]
#[path = "location_tests.rs"]
mod tests;
