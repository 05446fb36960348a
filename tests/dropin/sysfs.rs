//! `/sys/class/infiniband` as programs see it.

use std::collections::HashMap;

use crate::programs::compiled;
use crate::{doorbell, missing, stdout_of, texts};

const FILE: &str = "/sys/class/infiniband/soft0/ports/1/state";

#[test]
fn tools_find_the_device() {
    assert_eq!(stdout_of(&["ls", "/sys/class/infiniband/"]), "soft0\n");
    assert_eq!(stdout_of(&["cat", FILE]), "4: ACTIVE\n");
    // The device is a link, as those of the kernel are.
    let everything = stdout_of(&[
        "ls",
        "-lR",
        "/sys/class/infiniband/soft0/",
        "/sys/class/infiniband_verbs",
    ]);
    for name in ["node_guid", "link_layer", "pkeys", "gid_attrs", "uverbs0", "ibdev"] {
        assert!(everything.contains(name), "{name}: {everything}");
    }
    let kinds = stdout_of(&[
        "sh",
        "-c",
        "cat /sys/class/infiniband/*/ports/1/gid_attrs/types/[0-9]*; cat /sys/class/infiniband_verbs/uverbs0/ibdev",
    ]);
    assert_eq!(kinds, "IB/RoCE v1\nRoCE v2\nIB/RoCE v1\nRoCE v2\nsoft0\n");
}

/// The interface and type of the GID, and the hardware's version.
#[test]
fn the_library_says_what_sysfs_shows() {
    let Some((_folder, program)) = compiled("device.c", &["-libverbs"]) else {
        return;
    };
    let script = format!(
        "cd /sys/class/infiniband/soft0; cat ports/1/gid_attrs/ndevs/3 ports/1/gid_attrs/types/3 hw_rev; {}",
        program.display()
    );
    let lines = stdout_of(&["sh", "-c", &script]);
    let lines: Vec<_> = lines.lines().collect();
    let same = ["lo", "RoCE v2", "1"];
    // The vendor is an OUI that is locally administered, as no registry assigned it.
    assert_eq!(lines, [&same[..], &same, &["02db00 part"]].concat());
}

/// Of a process that runs: it ends when the counter has grown.
#[test]
fn counters_grow_while_a_program_runs() {
    let Some((_folder, program)) = compiled("placement.c", &["-libverbs"]) else {
        return;
    };
    let script = format!(
        "cd /sys/class/infiniband/soft0/ports/1; cat counters/port_xmit_packets hw_counters/rcvd_pkts
        for try in $(seq 100); do
            if [ $(cat counters/port_xmit_packets) -gt 0 -a $(cat hw_counters/rcvd_pkts) -gt 0 ]; then
                echo live
                break
            fi
            sleep 0.1
        done | {} | tail -n 1",
        program.display()
    );
    assert_eq!(stdout_of(&["sh", "-c", &script]), "0\n0\nlive\n");
}

#[test]
fn the_address_is_the_devices() {
    let output = doorbell(&[
        "run",
        "--address",
        "127.0.0.77",
        "--",
        "sh",
        "-c",
        "cd /sys/class/infiniband/soft0/ports/1 && cat gids/? gid_attrs/ndevs/*",
    ])
    .output();
    let (stdout, stderr) = texts(&output.expect("doorbell was built"));
    let link_local = "fe80:0000:0000:0000:00db:7fff:fe00:004d\n";
    let address = "0000:0000:0000:0000:0000:ffff:7f00:004d\n";
    let empty = "0000:0000:0000:0000:0000:0000:0000:0000\n";
    let gids = [link_local, link_local, address, address].concat() + &empty.repeat(6);
    assert_eq!((&*stdout, &*stderr), (&*(gids + &"lo\n".repeat(4)), ""));
}

/// Without a configured address a job gets a free one, and no other.
#[test]
fn an_unconfigured_device_has_the_address_that_it_shows() {
    let script = "cat /sys/class/infiniband/soft0/ports/1/gids/3; echo $DOORBELL_SOFT_ADDR";
    let mut command = doorbell(&["run", "--", "sh", "-c", script]);
    let output = command
        .env_remove("DOORBELL_SOFT_ADDR")
        .output()
        .expect("doorbell was built");
    let (stdout, stderr) = texts(&output);
    let (gid, address) = stdout.split_once('\n').expect("two lines");
    let address: std::net::Ipv4Addr = address.trim().parse().expect("an address");
    let groups = address.to_ipv6_mapped().segments().map(|group| format!("{group:04x}"));
    assert_eq!((gid, &*stderr), (&*groups.join(":"), ""));
}

/// Each kind of path lookup, by the system calls of a shell and coreutils.
#[test]
fn every_path_lookup_sees_the_same() {
    let script = r#"
        cd /sys/class/infiniband/soft0 && cat node_type
        test -d /sys/class/infiniband -a -r /sys//class/infiniband/soft0/fw_ver -a ! -e /sys/class/infiniband/soft1 && echo tested
        stat -c %F /sys/class/infiniband/soft0; stat -L -c %F /sys/class/infiniband/soft0
        realpath /sys/class/infiniband/soft0/ports/1
        readlink -f /sys/class/infiniband/../infiniband/soft0 || true
        find /sys/class/infiniband_verbs -name ibdev
        wc -l < /sys/class/infiniband/soft0/node_guid
        test -e /sys/class/net/lo -a -c /dev/zero && echo others stay
        test -c /dev/infiniband/uverbs0 -a -w /dev/infiniband/uverbs0 && ls /dev/infiniband
    "#;
    let lines = stdout_of(&["sh", "-c", script]);
    let expected = [
        "1: CA",
        "tested",
        "symbolic link",
        "directory",
        "/sys/devices/pcid00b:00/d00b:00:00.0/infiniband/soft0/ports/1",
        "/sys/devices/pcid00b:00/d00b:00:00.0/infiniband/soft0",
        "/sys/class/infiniband_verbs/uverbs0/ibdev",
        "1",
        "others stay",
        "uverbs0",
    ];
    let lines: Vec<_> = lines.lines().collect();
    for line in expected {
        assert!(lines.contains(&line), "{line}: {lines:?}");
    }
}

/// The lines that `topology.c` prints for a device.
fn walked(program: &std::path::Path, options: &[&str], device: &str) -> HashMap<String, String> {
    let words = [
        &["run"],
        options,
        &["--", program.to_str().expect("a plain path"), device],
    ]
    .concat();
    let output = doorbell(&words).output().expect("doorbell was built");
    let (stdout, stderr) = texts(&output);
    assert!(output.status.success() && stderr.is_empty(), "{stdout}{stderr}");
    let entry = |line: &str| {
        line.split_once(": ")
            .map(|(name, found)| (name.to_owned(), found.to_owned()))
    };
    stdout
        .lines()
        .map(|line| entry(line).expect("a line of the program"))
        .collect()
}

/// NCCL, UCX and hwloc place a device by its path among the PCI devices.
#[test]
fn topology_code_can_walk_the_devices_path() {
    let Some((_folder, program)) = compiled("topology.c", &["-D_GNU_SOURCE"]) else {
        return;
    };
    for (number, device) in ["soft0", "soft1"].into_iter().enumerate() {
        let found = walked(&program, &["--address", "127.0.0.91,127.0.0.92"], device);
        let path = format!("/sys/devices/pcid00b:00/d00b:0{number}:00.0");
        for way in ["path", "by bus", "by address"] {
            assert_eq!(found[way], path, "{way}");
        }
        assert_eq!(found["itself"], format!("{path}/infiniband/{device}"));
        assert_eq!(
            found["link"],
            format!("../..{}/infiniband/{device}", &path["/sys".len()..])
        );
        assert_eq!(found["subsystem"], "/sys/bus/pci");
        let files = ["class", "vendor", "device", "speed", "width", "current"].map(|name| &*found[name]);
        assert_eq!(files, ["0x020000", "0x02db", "0x0001", "16.0 GT/s PCIe", "16", "16"]);
        assert!(
            ["0", "-1"].contains(&&*found["numa node"]) && found["cpus"] != "none",
            "{found:?}"
        );
    }
}

/// Beside a PCI device of this machine, such as a GPU.
#[test]
fn a_device_can_lie_near_another_one() {
    let Some((_folder, program)) = compiled("topology.c", &["-D_GNU_SOURCE"]) else {
        return;
    };
    let Some(other) = std::fs::read_dir("/sys/bus/pci/devices")
        .ok()
        .and_then(|mut entries| entries.next())
    else {
        return missing("a PCI device");
    };
    let other = other.expect("an entry");
    let address = other.file_name().into_string().expect("hexadecimal digits");
    let place = other.path().canonicalize().expect("a link");
    let beside = place.parent().expect("a bus").join("d00b:00:00.0");
    let line = |name: &str| std::fs::read_to_string(place.join(name)).expect(name);
    // As nvidia-smi(1) prints addresses, too.
    for written in [address.clone(), format!("0000{}", address.to_uppercase())] {
        let found = walked(&program, &["--near", &written], "soft0");
        for way in ["path", "by bus", "by address"] {
            assert_eq!(found[way], beside.to_str().expect("a plain path"), "{way}");
        }
        assert_eq!(found["numa node"], line("numa_node").trim());
        assert_eq!(found["cpus"], line("local_cpulist").trim());
    }
    for (wrong, why) in [
        ("gpu0", "is not a PCI address, such as 0000:18:00.0"),
        ("beef:00:00.0", "no PCI device beef:00:00.0 here"),
        ("beef:00:00.0,beef:00:01.0", "2 PCI devices for 1 soft devices"),
    ] {
        let output = doorbell(&["run", "--near", wrong, "--", "true"])
            .output()
            .expect("doorbell was built");
        let (stdout, stderr) = texts(&output);
        assert_eq!((output.status.code(), stdout.as_str()), (Some(2), ""));
        assert!(stderr.contains(why) && stderr.contains("--near"), "{stderr}");
    }
}

/// The interface of the device's GIDs, where scripts such as ibdev2netdev read it.
#[test]
fn the_devices_network_interface_is_that_of_its_gids() {
    let script = "cd /sys/class/infiniband/soft0; ls device/net; cat device/net/*/ifindex ports/1/gid_attrs/ndevs/0";
    let index = std::fs::read_to_string("/sys/class/net/lo/ifindex").expect("loopback");
    assert_eq!(stdout_of(&["sh", "-c", script]), format!("lo\n{index}lo\n"));
}

#[test]
fn sysfs_can_be_disabled() {
    let output = doorbell(&["run", "--no-sysfs", "--", "sh", "-c", "echo ${LD_PRELOAD-none}"]).output();
    assert_eq!(texts(&output.expect("doorbell was built")).0, "none\n");
}
