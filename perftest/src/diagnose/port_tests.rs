//! Made-up ports, and the warnings about each.

use super::*;
use crate::diagnose::sources::fake::FakeMachine;

const PORT_USE: PortUse<'static> = PortUse {
    device: "mlx5_0",
    is_system: true,
    gid_index: None,
    mtu_bytes: None,
};
const V1: bool = true;
const V2: bool = false;

fn port(gids: &[(&str, bool)]) -> Port {
    let gid = |(index, (address, is_v1)): (u32, &(&str, bool))| PortGid {
        index,
        address: address.parse().unwrap(),
        is_v1: *is_v1,
    };
    Port {
        is_ethernet: true,
        mtus_bytes: Some((4096, 4096)),
        bits_per_s: Some(100_000_000_000),
        gids: (0..).zip(gids).map(gid).collect(),
        ..Port::default()
    }
}

fn warnings_of(machine: &FakeMachine, port: &Port, wanted: &PortUse<'_>) -> Vec<(Code, String)> {
    let warnings = of_port(&machine.sources(), port, wanted);
    warnings
        .into_iter()
        .map(|warning| (warning.code, warning.to_string()))
        .collect()
}

#[test]
fn a_good_port_has_no_warning() {
    let good = port(&[("fe80::1", V1), ("fe80::1", V2), ("10.0.0.1", V1), ("10.0.0.1", V2)]);
    assert_eq!(warnings_of(&FakeMachine::with([]), &good, &PORT_USE), []);
    assert_eq!(
        warnings_of(
            &FakeMachine::with([]),
            &good,
            &PortUse {
                gid_index: Some(3),
                ..PORT_USE
            }
        ),
        []
    );
    // Without a GID table there is nothing to warn of; a missing index is left to the device to
    // refuse.
    assert_eq!(warnings_of(&FakeMachine::with([]), &port(&[]), &PORT_USE), []);
    assert_eq!(
        warnings_of(
            &FakeMachine::with([]),
            &good,
            &PortUse {
                gid_index: Some(9),
                ..PORT_USE
            }
        ),
        []
    );
}

#[test]
fn a_port_that_is_down_is_noticed() {
    let down = Port {
        inactive: Some("down".into()),
        ..port(&[])
    };
    let [(Code::PortNotActive, text)] = &warnings_of(&FakeMachine::with([]), &down, &PORT_USE)[..] else {
        panic!()
    };
    assert!(text.starts_with("port 1 of mlx5_0 is down: "), "{text}");
}

#[test]
fn gids_worse_than_others_are_noticed() {
    let all = port(&[
        ("fe80::1", V1),
        ("fe80::1", V2),
        ("10.0.0.1", V1),
        ("10.0.0.1", V2),
        ("2001:db8::1", V2),
    ]);
    for (index, code, advice) in [
        (
            0,
            Code::GidRoceV1,
            "GID 0 of mlx5_0 (RoCE v1, fe80::1) is not routable: --gid-index 3 (-x 3) is RoCE v2, 10.0.0.1",
        ),
        (
            1,
            Code::GidLinkLocal,
            "GID 1 of mlx5_0 (RoCE v2, fe80::1) reaches its own segment only: --gid-index 3 (-x 3) is RoCE v2, 10.0.0.1",
        ),
        (
            2,
            Code::GidRoceV1,
            "GID 2 of mlx5_0 (RoCE v1, 10.0.0.1) is not routable: --gid-index 3 (-x 3) is RoCE v2, 10.0.0.1",
        ),
    ] {
        let wanted = PortUse {
            gid_index: Some(index),
            ..PORT_USE
        };
        assert_eq!(
            warnings_of(&FakeMachine::with([]), &all, &wanted),
            [(code, advice.to_owned())]
        );
    }
    let old = port(&[("fe80::1", V1)]);
    let [(Code::GidRoceV1, text)] = &warnings_of(&FakeMachine::with([]), &old, &PORT_USE)[..] else {
        panic!()
    };
    assert!(text.ends_with("give its network interface an IP address"), "{text}");
    // A link-local one is fine where there is nothing better, and so is any on InfiniBand.
    assert_eq!(
        warnings_of(&FakeMachine::with([]), &port(&[("fe80::1", V2)]), &PORT_USE),
        []
    );
    let infiniband = Port {
        is_ethernet: false,
        ..all
    };
    assert_eq!(
        warnings_of(
            &FakeMachine::with([]),
            &infiniband,
            &PortUse {
                gid_index: Some(0),
                ..PORT_USE
            }
        ),
        []
    );
}

#[test]
fn a_loopback_gid_of_a_system_device_is_noticed() {
    let loopback = port(&[("127.0.0.1", V2)]);
    let [(Code::GidLoopback, text)] = &warnings_of(&FakeMachine::with([]), &loopback, &PORT_USE)[..] else {
        panic!()
    };
    assert!(text.contains("(RoCE v2, 127.0.0.1) never leaves this host"), "{text}");
    // The userspace device is on loopback by default.
    let soft = PortUse {
        device: "soft0",
        is_system: false,
        ..PORT_USE
    };
    assert_eq!(warnings_of(&FakeMachine::with([]), &loopback, &soft), []);
}

#[test]
fn an_mtu_below_the_ports_is_noticed_with_its_interface() {
    let small = Port {
        mtus_bytes: Some((1024, 4096)),
        ..port(&[("10.0.0.1", V2)])
    };
    let machine = FakeMachine::with([
        ("sys/class/infiniband/mlx5_0/ports/1/gid_attrs/ndevs/0", "ens1f0\n"),
        ("sys/class/net/ens1f0/mtu", "1500\n"),
    ]);
    assert_eq!(
        warnings_of(&machine, &small, &PORT_USE),
        [(
            Code::Mtu,
            "the MTU of mlx5_0's port is 1024 B of 4096 B, as interface ens1f0 has 1500 B: ip link set dev ens1f0 mtu 4200 on both hosts, and let the switches pass that".into()
        )]
    );
    // sysfs has no port MTU, but the interface's is as good.
    let unknown = Port {
        mtus_bytes: None,
        ..small.clone()
    };
    assert_eq!(
        warnings_of(&machine, &unknown, &PORT_USE),
        warnings_of(&machine, &small, &PORT_USE)
    );
    machine.put("sys/class/net/ens1f0/mtu", "4200");
    assert_eq!(warnings_of(&machine, &unknown, &PORT_USE), []);
    assert_eq!(warnings_of(&FakeMachine::with([]), &unknown, &PORT_USE), []);
    // An interface with a large enough MTU is not the cause.
    let text = &warnings_of(&machine, &small, &PORT_USE)[0].1;
    assert!(text.contains("raise that of its network interface"), "{text}");
    let infiniband = Port {
        is_ethernet: false,
        ..small
    };
    assert!(
        warnings_of(&machine, &infiniband, &PORT_USE)[0]
            .1
            .ends_with("at the subnet manager")
    );
}

#[test]
fn a_path_mtu_below_the_ports_is_noticed() {
    let wanted = |mtu| PortUse {
        mtu_bytes: Some(mtu),
        ..PORT_USE
    };
    let [(Code::PathMtu, text)] = &warnings_of(&FakeMachine::with([]), &port(&[]), &wanted(1024))[..] else {
        panic!()
    };
    assert!(
        text.starts_with("the path MTU is 1024 B, below the 4096 B of mlx5_0's port"),
        "{text}"
    );
    assert_eq!(warnings_of(&FakeMachine::with([]), &port(&[]), &wanted(4096)), []);
}

#[test]
fn an_interface_name_cannot_be_a_path() {
    let small = Port {
        mtus_bytes: None,
        ..port(&[])
    };
    let machine = FakeMachine::with([
        ("sys/class/infiniband/mlx5_0/parent", "../../mtu1500\n"),
        ("mtu1500/mtu", "1500"),
    ]);
    assert_eq!(warnings_of(&machine, &small, &PORT_USE), []);
    machine.put("sys/class/infiniband/mlx5_0/parent", "eth\u{1b}[0m");
    machine.put("sys/class/net/eth [0m/mtu", "1500");
    let text = &warnings_of(&machine, &small, &PORT_USE)[0].1;
    assert!(text.contains("eth [0m") && !text.contains(char::is_control), "{text}");
}

#[test]
fn the_largest_path_mtu_leaves_room_for_headers() {
    for (interface, path) in [
        (9000, Some(4096)),
        (4192, Some(4096)),
        (4191, Some(2048)),
        (1500, Some(1024)),
        (351, None),
    ] {
        assert_eq!(fitting(interface), path, "{interface}");
    }
}

#[test]
fn sysfs_gives_what_it_has() {
    let ports = "sys/class/infiniband/mlx5_0/ports/1";
    let machine = FakeMachine::with([]);
    assert_eq!(Port::of_sysfs(&machine.sources(), "mlx5_0"), None);
    for (file, content) in [
        ("state", "4: ACTIVE\n"),
        ("rate", "2.5 Gb/sec (1X SDR)\n"),
        ("link_layer", "Ethernet\n"),
        ("gids/0", "fe80:0000:0000:0000:0000:0000:0000:0001\n"),
        ("gid_attrs/types/0", "IB/RoCE v1\n"),
        ("gids/2", "0000:0000:0000:0000:0000:ffff:0a00:0001\n"),
        ("gid_attrs/types/2", "RoCE v2\n"),
        ("gids/3", "0000:0000:0000:0000:0000:0000:0000:0000\n"),
        ("gids/4", "x\n"),
    ] {
        machine.put(&format!("{ports}/{file}"), content);
    }
    let port = Port::of_sysfs(&machine.sources(), "mlx5_0").unwrap();
    assert_eq!((port.inactive.clone(), port.bits_per_s), (None, Some(2_500_000_000)));
    let gids: Vec<String> = port.gids.iter().map(|gid| format!("{} {gid}", gid.index)).collect();
    assert_eq!(gids, ["0 RoCE v1, fe80::1", "2 RoCE v2, 10.0.0.1"]);
    machine.put(&format!("{ports}/state"), "1: DOWN\n");
    machine.put(&format!("{ports}/rate"), "-1 inf");
    let port = Port::of_sysfs(&machine.sources(), "mlx5_0").unwrap();
    assert_eq!((port.inactive.as_deref(), port.bits_per_s), (Some("down"), None));
}
