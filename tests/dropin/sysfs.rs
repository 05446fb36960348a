//! `/sys/class/infiniband` as programs see it.

use crate::programs::compiled;
use crate::{doorbell, stdout_of, texts};

const FILE: &str = "/sys/class/infiniband/soft0/ports/1/state";

#[test]
fn tools_find_the_device() {
    assert_eq!(stdout_of(&["ls", "/sys/class/infiniband/"]), "soft0\n");
    assert_eq!(stdout_of(&["cat", FILE]), "4: ACTIVE\n");
    let everything = stdout_of(&["ls", "-lR", "/sys/class/infiniband", "/sys/class/infiniband_verbs"]);
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
        "cd /sys/class/infiniband/soft0; cat ports/1/gid_attrs/ndevs/0 ports/1/gid_attrs/types/0 hw_rev; {}",
        program.display()
    );
    let lines = stdout_of(&["sh", "-c", &script]);
    let lines: Vec<_> = lines.lines().collect();
    let same = ["lo", "RoCE v2", "1"];
    // The vendor is an OUI that is locally administered, as no registry assigned it.
    assert_eq!(lines, [&same[..], &same, &["02db00 part"]].concat());
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
        stat -c %F /sys/class/infiniband/soft0
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
        "directory",
        "/sys/class/infiniband/soft0/ports/1",
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

#[test]
fn sysfs_can_be_disabled() {
    let output = doorbell(&["run", "--no-sysfs", "--", "sh", "-c", "echo ${LD_PRELOAD-none}"]).output();
    assert_eq!(texts(&output.expect("doorbell was built")).0, "none\n");
}
