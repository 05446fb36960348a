//! `doorbell topo` as scripts see it, on trees that look like sysfs.

#![forbid(unsafe_code)]

use std::fs;
use std::os::unix::fs::symlink;
use std::path::Path;
use std::process::{Command, Output, Stdio};

use serde_json::Value;

fn topo(arguments: &[&str]) -> Output {
    let mut command = Command::new(env!("CARGO_BIN_EXE_doorbell"));
    command.arg("topo").args(arguments).stdin(Stdio::null());
    command.output().expect("the binary runs")
}

fn write(root: &Path, path: &str, text: &str) {
    let path = root.join(path);
    fs::create_dir_all(path.parent().unwrap()).unwrap();
    fs::write(path, text).unwrap();
}

/// An adapter and a GPU below one switch.
fn tree() -> tempfile::TempDir {
    let root = tempfile::tempdir().unwrap();
    let at = root.path();
    write(at, "devices/system/node/node0/cpulist", "0-3\n");
    write(at, "devices/system/node/node0/distance", "10\n");
    let switch = "devices/pci0000:00/0000:00:01.0";
    for (address, class, vendor) in [
        ("0000:02:00.0", "0x030200", "0x10de"),
        ("0000:03:00.0", "0x020000", "0x15b3"),
    ] {
        write(at, &format!("{switch}/{address}/class"), class);
        write(at, &format!("{switch}/{address}/vendor"), vendor);
        write(at, &format!("{switch}/{address}/numa_node"), "0\n");
    }
    fs::create_dir_all(at.join("bus/pci/devices")).unwrap();
    symlink(
        at.join(switch).join("0000:02:00.0"),
        at.join("bus/pci/devices/0000:02:00.0"),
    )
    .unwrap();
    write(at, "class/infiniband/mlx5_0/ports/1/state", "4: ACTIVE\n");
    symlink(
        at.join(switch).join("0000:03:00.0"),
        at.join("class/infiniband/mlx5_0/device"),
    )
    .unwrap();
    root
}

#[test]
fn a_tree_is_drawn_and_told_as_json() {
    let tree = tree();
    let sysfs = tree.path().to_str().unwrap();
    let drawn = topo(&["--sysfs", sysfs]);
    assert!(drawn.status.success() && drawn.stderr.is_empty(), "{drawn:?}");
    let text = String::from_utf8(drawn.stdout).unwrap();
    assert!(
        text.contains("      0000:00:01.0\n        0000:02:00.0 GPU\n        0000:03:00.0 mlx5_0 (ACTIVE)\n"),
        "{text}"
    );
    let told = topo(&["--json", "--sysfs", sysfs]);
    let value: Value = serde_json::from_slice(&told.stdout).unwrap();
    assert_eq!(
        (&value["tool"], &value["devices"][0]["name"]),
        (&"doorbell".into(), &"mlx5_0".into())
    );
    assert_eq!(value["devices"][0]["kind"], "adapter");
    assert_eq!(value["devices"][0]["numa_node"], 0);
    assert_eq!(value["devices"][1]["pcie_path"].as_array().unwrap().len(), 3);
    assert_eq!(
        value["distances"],
        serde_json::json!([{"devices": ["mlx5_0", "0000:02:00.0"], "distance": "switch"}])
    );
    assert_eq!(value["notes"], serde_json::json!([]));
}

#[test]
fn this_host_has_a_topology() {
    let told = topo(&["--json"]);
    assert!(told.status.success(), "{told:?}");
    let value: Value = serde_json::from_slice(&told.stdout).unwrap();
    assert!(value["name"].as_str().is_some_and(|name| !name.is_empty()));
}

#[test]
fn no_sysfs_is_bad_usage_in_one_line() {
    let failed = topo(&["--sysfs", "/nowhere/at/all"]);
    assert_eq!(failed.status.code(), Some(2));
    let text = String::from_utf8(failed.stderr).unwrap();
    assert!(
        text.starts_with("doorbell: /nowhere/at/all is no sysfs: ") && text.lines().count() == 1,
        "{text}"
    );
    assert!(failed.stdout.is_empty());
}
