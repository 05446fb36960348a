//! Where an adapter is: its NUMA node beside the process's, its PCIe link and the links on the way to it, its IOMMU.

use super::cpu;
use super::port::show_gbit;
use super::sources::{Sources, list, show_list};
use crate::report::{Code, Warning};

const NODES: &str = "sys/devices/system/node";

/// What there is to say about the place of the device in this folder of sysfs; of a device on no bus, nothing. `bits_per_s`: its port's rate.
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
    // A machine of one node says -1, or 0.
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
    // A node without cores is as near to all of them as it gets.
    if far.is_empty() || near.is_empty() {
        return None;
    }
    let where_it_runs = if far.len() == allowed.len() {
        "runs on another node's cores".to_owned()
    } else {
        format!("may run on cores {} of other nodes", show_list(&far))
    };
    Some(Warning::new(
        Code::NumaCpus,
        format!(
            "{name} is at NUMA node {node}, and this process {where_it_runs}: numactl --cpunodebind={node} --membind={node}, or taskset -c {}",
            show_list(&near)
        ),
    ))
}

/// Memory comes from the node that its first user runs on, unless that is not allowed, or a policy says otherwise (numa(7)).
fn numa_memory(sources: &Sources, name: &str, node: usize) -> Option<Warning> {
    let allowed = list(&cpu::status(sources, "Mems_allowed_list")?);
    if !allowed.is_empty() && !allowed.contains(&node) {
        return Some(Warning::new(
            Code::NumaMemory,
            format!(
                "{name} is at NUMA node {node}, and this process may have memory of nodes {} only: add it to the container's cpuset.mems",
                show_list(&allowed)
            ),
        ));
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
    Some(Warning::new(
        Code::NumaMemory,
        format!(
            "{name} is at NUMA node {node}, and memory of this process has the policy {bound}: numactl --membind={node}"
        ),
    ))
}

/// A PCIe link.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
struct Link {
    /// Transfers per second of a lane, in units of 0.1 GT/s.
    tenths_gt_per_s: u64,
    lanes: u64,
}

impl Link {
    /// A function's link, by one pair of its attributes: `current` or `max`. A width of 0 or 63 and a speed that is no number are what functions say that have no link of their own.
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

    /// What it carries each way, with the headers of its packets: 8 of 10 bits up to 5 GT/s, 128 of 130 up to 32, 242 of 256 bytes of a flit above.
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
    // The link of a virtual function is that of the physical one.
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
        warnings.push(Warning::new(
            Code::PcieLink,
            format!(
                "the PCIe link of {name} ({address}{slot}) runs at {now} of {best}, {}{enough}: seat it again, or move it to a wider or faster slot",
                show_gbit(now.bits_per_s())
            ),
        ));
    }
    let slowest = way(folder).filter_map(|at| Some((Link::of(sources, at, "current")?, at)));
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
        warnings.push(Warning::new(
            Code::PcieBandwidth,
            format!(
                "the PCIe link{of} on the way to {name} ({address}{slot}) carries {} ({link}), its port {}: no test reaches that; move it to another slot",
                show_gbit(link.bits_per_s()),
                show_gbit(rate)
            ),
        ));
    }
    warnings
}

/// The functions on the way to the one in this folder of sysfs, itself first, each as its folder: `…/0000:00:01.0/0000:01:00.0` is behind the bridge that its folder is in.
fn way(folder: &str) -> impl Iterator<Item = &str> {
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

/// The name of the physical slot of a function, as the machine's labels have it.
fn slot(sources: &Sources, address: &str) -> Option<String> {
    let (device, _) = address.rsplit_once('.')?;
    let is_it = |name: &String| sources.text(&format!("sys/bus/pci/slots/{name}/address")).as_deref() == Some(device);
    sources.names("sys/bus/pci/slots").into_iter().find(is_it)
}

fn iommu(sources: &Sources, name: &str, folder: &str) -> Option<Warning> {
    let kind = sources.text(&format!("{folder}/iommu_group/type"))?;
    matches!(kind.as_str(), "DMA" | "DMA-FQ").then(|| {
        Warning::new(
            Code::Iommu,
            format!("an IOMMU translates each address that {name} uses ({kind}): iommu=pt on the kernel's command line, where this host's devices are trusted"),
        )
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::diagnose::sources::faked::Machine;

    const BRIDGE: &str = "sys/devices/pci0000:16/0000:16:02.0";
    const DEVICE: &str = "sys/devices/pci0000:16/0000:16:02.0/0000:17:00.0";
    const RATE: u64 = 200_000_000_000;

    /// An adapter of 16 lanes at node 1 of two, in a slot as good as itself, and a process beside it.
    fn machine() -> Machine {
        let machine = Machine::with([
            ("sys/devices/system/node/online", "0-1\n"),
            ("sys/devices/system/node/node0/cpulist", "0-3\n"),
            ("sys/devices/system/node/node1/cpulist", "4-7\n"),
            ("proc/self/status", "Cpus_allowed_list:\t4-7\nMems_allowed_list:\t0-1\n"),
            (
                "proc/self/numa_maps",
                "55e4 default anon=1\n7fff default stack anon=3 dirty=3 N0=3\n",
            ),
            ("sys/bus/pci/slots/5/address", "0000:17:00\n"),
            ("sys/bus/pci/slots/6/address", "0000:18:00\n"),
        ]);
        machine.link("sys/class/infiniband/mlx5_0/device", DEVICE);
        machine.put(&format!("{DEVICE}/numa_node"), "1\n");
        link(&machine, DEVICE, "16.0 GT/s PCIe", "16");
        link(&machine, BRIDGE, "16.0 GT/s PCIe", "16");
        for folder in [DEVICE, BRIDGE] {
            machine.put(&format!("{folder}/max_link_speed"), "16.0 GT/s PCIe\n");
            machine.put(&format!("{folder}/max_link_width"), "16\n");
        }
        machine
    }

    fn link(machine: &Machine, folder: &str, speed: &str, width: &str) {
        machine.put(&format!("{folder}/current_link_speed"), speed);
        machine.put(&format!("{folder}/current_link_width"), width);
    }

    fn found(machine: &Machine) -> Vec<(Code, String)> {
        let warnings = of_device(&machine.sources(), "mlx5_0", Some(RATE));
        warnings
            .into_iter()
            .map(|warning| (warning.code, warning.to_string()))
            .collect()
    }

    #[test]
    fn what_is_where_it_should_be_gives_no_cause_for_complaint() {
        assert_eq!(found(&machine()), []);
        // Nor does what is on no bus.
        assert_eq!(of_device(&machine().sources(), "rxe0", Some(RATE)), []);
    }

    #[test]
    fn cores_of_another_node_are_noticed() {
        let machine = machine();
        machine.put("proc/self/status", "Cpus_allowed_list:\t0-3\n");
        assert_eq!(
            found(&machine),
            [(
                Code::NumaCpus,
                "mlx5_0 is at NUMA node 1, and this process runs on another node's cores: numactl --cpunodebind=1 --membind=1, or taskset -c 4-7"
                    .into()
            )]
        );
        machine.put("proc/self/status", "Cpus_allowed_list:\t0,2,4-7\n");
        let [(Code::NumaCpus, text)] = &found(&machine)[..] else {
            panic!()
        };
        assert!(text.contains("may run on cores 0,2 of other nodes"), "{text}");
        // Where there is one node, or the adapter's is not told, there is nothing to choose.
        machine.put(&format!("{DEVICE}/numa_node"), "-1\n");
        assert_eq!(found(&machine), []);
        machine.put(&format!("{DEVICE}/numa_node"), "1\n");
        machine.put("sys/devices/system/node/online", "0\n");
        assert_eq!(found(&machine), []);
    }

    #[test]
    fn memory_of_another_node_is_noticed() {
        let machine = machine();
        machine.put("proc/self/status", "Cpus_allowed_list:\t4-7\nMems_allowed_list:\t0\n");
        let [(Code::NumaMemory, text)] = &found(&machine)[..] else {
            panic!()
        };
        assert!(text.contains("of nodes 0 only"), "{text}");
        machine.put("proc/self/status", "Cpus_allowed_list:\t4-7\nMems_allowed_list:\t0-1\n");
        for (policy, far) in [
            ("bind:0", true),
            ("bind=static:0", true),
            ("prefer:0", true),
            ("interleave:0-1", true),
            ("bind:1", false),
            ("prefer:1", false),
            ("local", false),
        ] {
            machine.put("proc/self/numa_maps", format!("55e4 default\n7ff0 {policy} anon=1\n"));
            let found = found(&machine);
            assert_eq!(found.len(), usize::from(far), "{policy}: {found:?}");
            assert!(
                found
                    .iter()
                    .all(|(code, text)| *code == Code::NumaMemory && text.contains(policy)),
                "{found:?}"
            );
        }
    }

    #[test]
    fn a_link_narrower_than_the_adapter_is_noticed() {
        let machine = machine();
        link(&machine, DEVICE, "16.0 GT/s PCIe", "8");
        let found_now = found(&machine);
        assert_eq!(
            found_now.iter().map(|(code, _)| *code).collect::<Vec<_>>(),
            [Code::PcieLink, Code::PcieBandwidth]
        );
        assert_eq!(
            found_now[0].1,
            "the PCIe link of mlx5_0 (0000:17:00.0, slot 5) runs at 16 GT/s x8 of 16 GT/s x16, 126.0 Gbit/s: seat it again, or move it to a wider or faster slot"
        );
        assert!(
            found_now[1]
                .1
                .contains("carries 126.0 Gbit/s (16 GT/s x8), its port 200.0 Gbit/s"),
            "{found_now:?}"
        );
        // A slower link that is wide enough for the port is told apart.
        machine.put(&format!("{DEVICE}/max_link_speed"), "32.0 GT/s PCIe");
        link(&machine, DEVICE, "16.0 GT/s PCIe", "16");
        let [(Code::PcieLink, text)] = &found(&machine)[..] else {
            panic!()
        };
        assert!(
            text.contains("16 GT/s x16 of 32 GT/s x16, 252.1 Gbit/s, which is still above the port's 200.0 Gbit/s"),
            "{text}"
        );
    }

    #[test]
    fn a_bridge_narrower_than_the_port_is_noticed() {
        let machine = machine();
        link(&machine, BRIDGE, "8.0 GT/s PCIe", "16");
        let [(Code::PcieBandwidth, text)] = &found(&machine)[..] else {
            panic!()
        };
        assert!(
            text.contains("of the bridge 0000:16:02.0 on the way to mlx5_0") && text.contains("126.0 Gbit/s"),
            "{text}"
        );
    }

    #[test]
    fn a_virtual_function_has_its_physical_ones_link() {
        let machine = machine();
        let virtual_one = format!("{BRIDGE}/0000:17:00.2");
        machine.put(&format!("{virtual_one}/current_link_speed"), "Unknown");
        machine.link(&format!("{virtual_one}/physfn"), DEVICE);
        machine.link("sys/class/infiniband/mlx5_2/device", &virtual_one);
        link(&machine, DEVICE, "2.5 GT/s PCIe", "1");
        let text = of_device(&machine.sources(), "mlx5_2", None)[0].to_string();
        assert!(
            text.contains("mlx5_2 (0000:17:00.0, slot 5) runs at 2.5 GT/s x1"),
            "{text}"
        );
    }

    #[test]
    fn nonsense_is_no_link() {
        let machine = machine();
        for (speed, width) in [
            ("Unknown", "16"),
            ("16.0 GT/s", "0"),
            ("16.0 GT/s", "255"),
            ("inf", "1"),
            ("nan", "1"),
            ("-8", "4"),
            ("", ""),
        ] {
            link(&machine, DEVICE, speed, width);
            assert_eq!(found(&machine), [], "{speed} {width}");
        }
    }

    #[test]
    fn links_carry_their_rate_less_the_code() {
        for (tenths_gt_per_s, lanes, gbit) in [
            (25, 1, 2),
            (50, 8, 32),
            (80, 8, 63),
            (160, 16, 252),
            (320, 16, 504),
            (640, 16, 968),
        ] {
            assert_eq!(Link { tenths_gt_per_s, lanes }.bits_per_s() / 1_000_000_000, gbit);
        }
    }

    #[test]
    fn an_iommu_that_translates_is_noticed() {
        let machine = machine();
        machine.put(&format!("{DEVICE}/iommu_group/type"), "identity\n");
        assert_eq!(found(&machine), []);
        machine.put(&format!("{DEVICE}/iommu_group/type"), "DMA-FQ\n");
        let [(Code::Iommu, text)] = &found(&machine)[..] else {
            panic!()
        };
        assert!(text.contains("mlx5_0 uses (DMA-FQ): iommu=pt"), "{text}");
    }
}
