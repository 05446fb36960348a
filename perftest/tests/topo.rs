//! `doorbell topo` as scripts run it, on folders in the form of sysfs.

#![forbid(unsafe_code)]

use std::fs;
use std::os::unix::fs::symlink;
use std::path::{Path, PathBuf};
use std::process::{self, Command, Output, Stdio};
use std::sync::OnceLock;

use serde_json::Value;

fn command(arguments: &[&str]) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_doorbell"));
    command.arg("topo").args(arguments).stdin(Stdio::null());
    command.env_remove("DOORBELL_NVML_LIBRARY");
    command
}

fn topo(arguments: &[&str]) -> Output {
    command(arguments).output().expect("the binary runs")
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
fn a_tree_is_printed_as_text_and_json() {
    let tree = tree();
    let sysfs = tree.path().to_str().unwrap();
    let drawn = topo(&["--sysfs", sysfs]);
    assert!(drawn.status.success() && drawn.stderr.is_empty(), "{drawn:?}");
    let text = String::from_utf8(drawn.stdout).unwrap();
    assert!(
        text.contains("      0000:00:01.0\n        0000:02:00.0 GPU\n        0000:03:00.0 mlx5_0 (ACTIVE)\n"),
        "{text}"
    );
    let reported = topo(&["--json", "--sysfs", sysfs]);
    let value: Value = serde_json::from_slice(&reported.stdout).unwrap();
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
    let reported = topo(&["--json"]);
    assert!(reported.status.success(), "{reported:?}");
    let value: Value = serde_json::from_slice(&reported.stdout).unwrap();
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

/// A fake NVML, which reports what the file of `FAKE_NVML` describes.
fn nvml() -> &'static Path {
    static COMPILED: OnceLock<PathBuf> = OnceLock::new();
    COMPILED.get_or_init(|| {
        let library = Path::new(env!("CARGO_TARGET_TMPDIR")).join(format!("topo-nvml-{}.so", process::id()));
        let source = concat!(env!("CARGO_MANIFEST_DIR"), "/../gpudirect/nvml/tests/fake/nvml.c");
        let mut cc = Command::new("cc");
        cc.args(["-std=gnu11", "-Wall", "-Werror", "-shared", "-fPIC", "-o"]);
        let status = cc.arg(&library).arg(source).status().expect("a C compiler, cc");
        assert!(status.success());
        library
    })
}

/// The same tree with `gpus` more GPUs, each below a root port of its own, from bus 10 on.
fn tree_of(gpus: usize) -> tempfile::TempDir {
    let root = tree();
    let at = root.path();
    for gpu in 0..gpus {
        let address = format!("0000:{:02x}:00.0", 16 + gpu);
        let folder = format!(
            "devices/pci0000:{:02x}/0000:{:02x}:01.0/{address}",
            gpu / 2 + 1,
            gpu / 2 + 1
        );
        for (file, text) in [("class", "0x030200"), ("vendor", "0x10de"), ("numa_node", "0")] {
            write(at, &format!("{folder}/{file}"), text);
        }
        symlink(at.join(folder), at.join("bus/pci/devices").join(address)).unwrap();
    }
    root
}

/// `gpus` GPUs from bus 10 on, and further answers of NVML.
fn nvml_answers(gpus: usize, more: &str) -> String {
    let each: String = (0..gpus)
        .map(|gpu| format!("gpu 0:{:x}:0 GPU-{gpu} H200\n", 16 + gpu))
        .collect();
    each + more
}

/// `doorbell topo` on such a machine.
fn topo_of(root: &Path, answers: &str, arguments: &[&str]) -> Output {
    let file = root.join("nvml.txt");
    fs::write(&file, answers).unwrap();
    let mut command = command(arguments);
    command.arg("--sysfs").arg(root);
    command.env("DOORBELL_NVML_LIBRARY", nvml()).env("FAKE_NVML", file);
    command.output().expect("the binary runs")
}

fn text(output: &Output) -> &str {
    assert!(output.status.success(), "{output:?}");
    std::str::from_utf8(&output.stdout).unwrap()
}

fn json(output: &Output) -> Value {
    assert!(output.stderr.is_empty(), "{output:?}");
    serde_json::from_str(text(output)).unwrap()
}

/// The entry of two GPUs, by the numbers of their buses.
fn pair(value: &Value, one: u32, two: u32) -> &Value {
    let names = [one, two].map(|bus| format!("0000:{:02x}:00.0", 16 + bus));
    let all = value["distances"].as_array().unwrap();
    all.iter()
        .find(|pair| pair["devices"] == serde_json::json!(names))
        .unwrap()
}

/// The note about GPUs of the tree that NVML does not report.
const HIDDEN: &str =
    "1 of the GPUs that sysfs shows are not NVML's: they are hidden from this process, or have no driver";

#[test]
fn nvlink_is_reported_before_pcie() {
    let tree = tree_of(2);
    let answers = nvml_answers(2, "links 0 4 25781 3 1\nlinks 1 4 25781 3 0\ncpus 0 0 3\n");
    let reported = json(&topo_of(tree.path(), &answers, &["--json"]));
    let expected = serde_json::json!({
        "devices": ["0000:10:00.0", "0000:11:00.0"],
        "distance": "nvlink",
        "pcie_distance": "switch",
        "nvlinks": 4,
        "nvlink_bytes_per_s": 100_000_000_000u64,
        "peer_access": true,
    });
    assert_eq!(pair(&reported, 0, 1), &expected);
    assert_eq!(reported["notes"], serde_json::json!([HIDDEN]));
    let gpu = &reported["devices"][2];
    assert_eq!(
        (&gpu["index"], &gpu["model"], &gpu["cpus"]),
        (&0.into(), &"H200".into(), &"0-3".into())
    );
    assert_eq!(gpu["gpu"]["uuid"], "GPU-0");
    let to = serde_json::json!([{"to": {"gpu": "0000:11:00.0"}, "links": 4, "bytes_per_s": 100_000_000_000u64}]);
    assert_eq!(gpu["gpu"]["nvlinks"], to);
    let near = serde_json::json!({"gpu": "0000:02:00.0", "adapters": [{"name": "mlx5_0", "distance": "switch"}]});
    assert_eq!(reported["affinity"][0], near);
    assert_eq!(reported["affinity"][1]["adapters"][0]["distance"], "node");
}

#[test]
fn behind_switches_all_pairs_are_linked_by_the_lesser_count() {
    for gpus in [4, 8] {
        let tree = tree_of(gpus);
        let links: String = (0..gpus)
            .map(|gpu| format!("links {gpu} {} 26562 6 switch\n", 18 - gpu / 3))
            .collect();
        let reported = json(&topo_of(tree.path(), &nvml_answers(gpus, &links), &["--json"]));
        for two in 1..gpus as u32 {
            for one in 0..two {
                let links = 18 - two / 3;
                let found = pair(&reported, one, two);
                assert_eq!(found["nvlinks"], links, "{found}");
                assert_eq!(found["nvlink_bytes_per_s"], u64::from(links) * 25_000_000_000);
            }
        }
    }
    let tree = tree_of(2);
    let drawn = topo_of(
        tree.path(),
        &nvml_answers(2, "links 0 18 26562 6 switch\nlinks 1 18 26562 6 switch\ncpus 1 2 3"),
        &[],
    );
    let tail = "\
              mlx5_0        0000:02:00.0  0000:10:00.0  0000:11:00.0
mlx5_0        same          switch        node          node
0000:02:00.0  switch        same          node          node
0000:10:00.0  node          node          same          nvlink x18
0000:11:00.0  node          node          nvlink x18    same
nvlink x18: 450 GB/s each way
near 0000:02:00.0: adapters mlx5_0 (switch)
near 0000:10:00.0: adapters mlx5_0 (node)
near 0000:11:00.0: adapters mlx5_0 (node), processors 2-3
";
    assert!(text(&drawn).ends_with(tail), "{}", text(&drawn));
    assert!(
        text(&drawn).contains("0000:10:00.0 GPU 0 (H200, 18 NVLinks)\n"),
        "{}",
        text(&drawn)
    );
    assert_eq!(
        String::from_utf8_lossy(&drawn.stderr),
        format!("doorbell: note: {HIDDEN}\n")
    );
}

#[test]
fn gpus_on_pcie_alone_are_as_near_as_sysfs_says() {
    let tree = tree_of(4);
    let drawn = topo_of(tree.path(), &nvml_answers(4, ""), &["--json"]);
    let reported = json(&drawn);
    let expected =
        serde_json::json!({"devices": ["0000:10:00.0", "0000:12:00.0"], "distance": "node", "peer_access": false});
    assert_eq!(pair(&reported, 0, 2), &expected);
    assert_eq!(pair(&reported, 0, 1)["distance"], "switch");
    let drawn = topo_of(tree.path(), &nvml_answers(4, ""), &[]);
    assert!(
        text(&drawn).contains("\n0000:10:00.0 and 0000:11:00.0 do not reach each other's memory\n"),
        "{}",
        text(&drawn)
    );
}

#[test]
fn a_mesh_has_links_between_some() {
    let direct = [
        (0, 1, 1),
        (0, 2, 1),
        (0, 3, 2),
        (0, 4, 2),
        (1, 2, 2),
        (1, 3, 1),
        (1, 5, 2),
        (2, 3, 2),
        (2, 6, 1),
        (3, 7, 1),
        (4, 5, 1),
        (4, 6, 1),
        (4, 7, 2),
        (5, 6, 2),
        (5, 7, 1),
        (6, 7, 2),
    ];
    let both = |(one, two, links)| format!("links {one} {links} 25781 3 {two}\nlinks {two} {links} 25781 3 {one}\n");
    let links: String = direct.into_iter().map(both).collect();
    let tree = tree_of(8);
    let reported = json(&topo_of(tree.path(), &nvml_answers(8, &links), &["--json"]));
    for two in 1..8 {
        for one in 0..two {
            let links = direct
                .iter()
                .find(|(a, b, _)| (*a, *b) == (one, two))
                .map(|(_, _, links)| *links);
            assert_eq!(
                pair(&reported, one, two)["nvlinks"],
                links.map_or(Value::Null, Value::from),
                "{one} {two}"
            );
        }
    }
}

#[test]
fn errors_of_nvml_are_a_line_and_the_rest_is_shown() {
    let tree = tree_of(2);
    let links = "links 0 2 26562 6 1\nlinks 1 2 26562 6 0\n";
    let all = [
        "SystemGetDriverVersion",
        "DeviceGetCount_v2",
        "DeviceGetHandleByIndex_v2",
        "DeviceGetPciInfo_v3",
        "DeviceGetUUID",
        "DeviceGetName",
        "DeviceGetNvLinkState",
        "DeviceGetNvLinkRemoteDeviceType",
        "DeviceGetNvLinkRemotePciInfo_v2",
        "DeviceGetTopologyCommonAncestor",
        "DeviceGetP2PStatus",
        "DeviceGetCpuAffinity",
        "DeviceGetMemoryAffinity",
        "DeviceGetFieldValues",
        "Init_v2",
        "*",
    ];
    for function in all {
        let failed = topo_of(
            tree.path(),
            &nvml_answers(2, &format!("{links}fail {function} 3\n")),
            &[],
        );
        assert!(text(&failed).contains("0000:10:00.0 GPU"), "{failed:?}");
        let output = String::from_utf8_lossy(&failed.stderr);
        assert!(
            output.lines().all(|line| line.starts_with("doorbell: note: ")),
            "{output}"
        );
        let named = if function == "*" { "DeviceGetCount_v2" } else { function };
        let is_reported = output.contains(&format!("nvml{named} answers 3 (Not Supported)"));
        // A GPU without NVLink answers this for the state of its links.
        assert_eq!(is_reported, function != "DeviceGetNvLinkState", "{output}");
    }
    // The links exist, with unknown attributes.
    let slow = topo_of(
        tree.path(),
        &nvml_answers(
            2,
            &format!("{links}fail DeviceGetFieldValues 3\nfail DeviceGetNvLinkVersion 3"),
        ),
        &[],
    );
    assert!(text(&slow).contains("\nnvlink x2: unknown rate\n"), "{}", text(&slow));
}

#[test]
fn without_nvml_there_is_a_note_if_there_are_gpus() {
    let tree = tree();
    let none = |at: &Path| {
        let mut command = command(&["--sysfs"]);
        command
            .arg(at)
            .env("DOORBELL_NVML_LIBRARY", "/nowhere/libnvidia-ml.so.1");
        let output = command.output().unwrap();
        assert!(output.status.success());
        String::from_utf8(output.stderr).unwrap()
    };
    let output = none(tree.path());
    assert!(
        output.starts_with("doorbell: note: NVLink is not known: no NVML: cannot load /nowhere/libnvidia-ml.so.1: "),
        "{output}"
    );
    assert_eq!(output.lines().count(), 1);
    fs::remove_file(tree.path().join("bus/pci/devices/0000:02:00.0")).unwrap();
    assert_eq!(none(tree.path()), "");
}
