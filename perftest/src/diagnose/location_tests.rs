//! An adapter in a made-up machine, well and badly placed.

use super::*;
use crate::diagnose::sources::fake::FakeMachine;

const BRIDGE: &str = "sys/devices/pci0000:16/0000:16:02.0";
const DEVICE: &str = "sys/devices/pci0000:16/0000:16:02.0/0000:17:00.0";
const RATE: u64 = 200_000_000_000;

/// An adapter with 16 PCIe lanes at node 1 of two, in an adequate slot, and a process on the same
/// node.
fn machine() -> FakeMachine {
    let machine = FakeMachine::with([
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

fn link(machine: &FakeMachine, folder: &str, speed: &str, width: &str) {
    machine.put(&format!("{folder}/current_link_speed"), speed);
    machine.put(&format!("{folder}/current_link_width"), width);
}

fn found(machine: &FakeMachine) -> Vec<(Code, String)> {
    let warnings = of_device(&machine.sources(), "mlx5_0", Some(RATE));
    warnings
        .into_iter()
        .map(|warning| (warning.code, warning.to_string()))
        .collect()
}

#[test]
fn a_well_placed_adapter_has_no_warning() {
    assert_eq!(found(&machine()), []);
    // Nor does a device on no bus.
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
    // With a single node, or an unknown one of the adapter, there is no choice.
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
    // A slower link with enough bandwidth for the port is a different warning.
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
