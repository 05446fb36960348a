//! `doorbell diagnose`, and the warnings of tests, on made-up machines: a folder with the files of
//! /sys and /proc.

#![forbid(unsafe_code)]

use std::fs;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::symlink;
use std::path::Path;
use std::process::{Command, Output, Stdio};

use serde_json::Value;
use tempfile::TempDir;

/// Warnings of the real machine, whatever the folder has, and of the folder itself.
const OWN: &str = "debug-build,faked-machine,jitter,preempted";

fn run(root: Option<&Path>, line: &str) -> Output {
    let mut command = Command::new(env!("CARGO_BIN_EXE_doorbell"));
    command.args(line.split_whitespace()).stdin(Stdio::null());
    for name in ["SOFT_ADDR", "SOFT_PORT", "FAULTS", "PCAP", "LINK", "DIAGNOSE_ROOT"] {
        command.env_remove(format!("DOORBELL_{name}"));
    }
    if let Some(root) = root {
        command.env("DOORBELL_DIAGNOSE_ROOT", root);
    }
    command.output().expect("the binary runs")
}

fn text(bytes: &[u8]) -> String {
    String::from_utf8_lossy(bytes).into_owned()
}

fn put(root: &Path, path: &str, content: impl AsRef<[u8]>) {
    let path = root.join(path);
    fs::create_dir_all(path.parent().unwrap()).unwrap();
    fs::write(path, content).unwrap();
}

const DEVICE: &str = "sys/devices/pci0000:16/0000:16:02.0/0000:17:00.0";
const PORT: &str = "sys/class/infiniband/mlx5_0/ports/1";

/// A machine with an adapter and no warning.
fn good() -> TempDir {
    let folder = tempfile::tempdir().unwrap();
    let root = folder.path();
    let cpu = "sys/devices/system/cpu";
    let files = [
        (
            "proc/self/status",
            "CapEff:\t0000000000000000\nCpus_allowed_list:\t4-7\nMems_allowed_list:\t0-1\n",
        ),
        (
            "proc/self/limits",
            "Max locked memory         unlimited            unlimited            bytes\n",
        ),
        ("proc/self/numa_maps", "55e4 default anon=1\n"),
        ("proc/loadavg", "0.50 0.40 0.30 1/200 99\n"),
        ("proc/stat", "cpu  1 1 1 1 1 1 1 1\ncpu4 1 1 1 1 1 1 1 1 1 1\n"),
        (&format!("{cpu}/online"), "0-7\n"),
        (&format!("{cpu}/cpu4/cpufreq/scaling_governor"), "performance\n"),
        (&format!("{cpu}/cpu4/cpufreq/scaling_max_freq"), "3700000\n"),
        (&format!("{cpu}/cpu4/cpufreq/cpuinfo_max_freq"), "3700000\n"),
        (&format!("{cpu}/cpu4/cpufreq/scaling_cur_freq"), "3690000\n"),
        ("proc/self/stat", &format!("7 (doorbell) S {}4 0 0", "0 ".repeat(35))),
        ("sys/devices/system/node/online", "0-1\n"),
        ("sys/devices/system/node/node0/cpulist", "0-3\n"),
        ("sys/devices/system/node/node1/cpulist", "4-7\n"),
        (&format!("{DEVICE}/numa_node"), "1\n"),
        (&format!("{DEVICE}/iommu_group/type"), "identity\n"),
        (&format!("{DEVICE}/current_link_speed"), "16.0 GT/s PCIe\n"),
        (&format!("{DEVICE}/current_link_width"), "16\n"),
        (&format!("{DEVICE}/max_link_speed"), "16.0 GT/s PCIe\n"),
        (&format!("{DEVICE}/max_link_width"), "16\n"),
        (&format!("{PORT}/state"), "4: ACTIVE\n"),
        (&format!("{PORT}/rate"), "200 Gb/sec (4X HDR)\n"),
        (&format!("{PORT}/link_layer"), "Ethernet\n"),
        (&format!("{PORT}/gids/0"), "0000:0000:0000:0000:0000:ffff:0a00:0001\n"),
        (&format!("{PORT}/gid_attrs/types/0"), "RoCE v2\n"),
        (&format!("{PORT}/gid_attrs/ndevs/0"), "ens1f0\n"),
        ("sys/class/net/ens1f0/mtu", "9000\n"),
    ];
    for (path, content) in files {
        put(root, path, content);
    }
    symlink(root.join(DEVICE), root.join("sys/class/infiniband/mlx5_0/device")).unwrap();
    folder
}

fn codes(diagnosis: &Value) -> Vec<&str> {
    let warnings = diagnosis["warnings"].as_array().expect("an array");
    warnings
        .iter()
        .map(|warning| warning["code"].as_str().expect("text"))
        .collect()
}

fn diagnosis(root: &Path, line: &str) -> Value {
    let output = run(Some(root), &format!("diagnose --json --ignore {OWN} {line}"));
    assert_eq!(output.status.code(), Some(0), "{}", text(&output.stderr));
    serde_json::from_slice(&output.stdout).expect("one object")
}

#[test]
fn a_good_machine_passes() {
    let machine = good();
    let output = run(Some(machine.path()), &format!("diagnose --strict --ignore {OWN}"));
    assert_eq!(output.status.code(), Some(0), "{output:?}");
    assert!(
        text(&output.stdout).ends_with("# no warnings; checked machine, mlx5_0\n"),
        "{output:?}"
    );
    assert_eq!(diagnosis(machine.path(), "")["devices"], serde_json::json!(["mlx5_0"]));
}

#[test]
fn each_problem_of_a_machine_is_found_alone() {
    let governor = "sys/devices/system/cpu/cpu4/cpufreq/scaling_governor";
    let now = "sys/devices/system/cpu/cpu4/cpufreq/scaling_cur_freq";
    let limit = "sys/devices/system/cpu/cpu4/cpufreq/scaling_max_freq";
    let (speed, width) = (
        format!("{DEVICE}/current_link_speed"),
        format!("{DEVICE}/current_link_width"),
    );
    let (state, kind) = (format!("{PORT}/state"), format!("{PORT}/gid_attrs/types/0"));
    let (gid, iommu) = (format!("{PORT}/gids/0"), format!("{DEVICE}/iommu_group/type"));
    for (path, content, found) in [
        (governor, "powersave", &["cpu-governor"][..]),
        (now, "1200000", &["cpu-frequency"]),
        (limit, "2000000", &["cpu-frequency-capped"]),
        ("proc/loadavg", "8.5 1 1 1/1 1", &["load"]),
        (&format!("{DEVICE}/numa_node"), "0", &["numa-cpus"]),
        ("proc/self/numa_maps", "7f00 bind:0 anon=1", &["numa-memory"]),
        (&speed, "8.0 GT/s PCIe", &["pcie-link", "pcie-bandwidth"]),
        (&width, "8", &["pcie-link", "pcie-bandwidth"]),
        (&format!("{DEVICE}/max_link_speed"), "32.0 GT/s PCIe", &["pcie-link"]),
        (&format!("{PORT}/rate"), "400 Gb/sec (4X NDR)", &["pcie-bandwidth"]),
        (&iommu, "DMA-FQ", &["iommu"]),
        (&state, "1: DOWN", &["port-not-active"]),
        (&kind, "IB/RoCE v1", &["gid-roce-v1"]),
        (&gid, "0000:0000:0000:0000:0000:ffff:7f00:0001", &["gid-loopback"]),
        ("sys/class/net/ens1f0/mtu", "1500", &["mtu"]),
        (
            "proc/self/limits",
            "Max locked memory 8388608 8388608 bytes",
            &["memlock"],
        ),
    ] {
        let machine = good();
        put(machine.path(), path, content);
        let report = diagnosis(machine.path(), "");
        assert_eq!(codes(&report), found, "{path}: {report}");
        let about = if path.contains("cpu/cpu4") || path.contains("loadavg") {
            "machine"
        } else {
            "mlx5_0"
        };
        assert_eq!(report["warnings"][0]["about"], about, "{report}");
    }
}

#[test]
fn strict_fails_unless_all_warnings_are_ignored() {
    let machine = good();
    put(machine.path(), &format!("{DEVICE}/iommu_group/type"), "DMA");
    let output = run(
        Some(machine.path()),
        &format!("diagnose -d mlx5_0 --strict --ignore {OWN}"),
    );
    assert_eq!(output.status.code(), Some(1));
    assert_eq!(
        text(&output.stderr),
        "doorbell: 1 warning (--ignore CODE leaves it out)\n"
    );
    assert!(
        text(&output.stdout)
            .lines()
            .any(|line| line.starts_with("mlx5_0 ") && line.contains(" iommu ")),
        "{output:?}"
    );
    let output = run(Some(machine.path()), &format!("diagnose --strict --ignore {OWN},iommu"));
    assert_eq!(output.status.code(), Some(0), "{output:?}");
    // A made-up machine is always reported as such.
    let output = run(Some(machine.path()), "diagnose --json");
    assert!(text(&output.stdout).contains(r#""code":"faked-machine""#), "{output:?}");
}

#[test]
fn a_test_reports_warnings_on_stderr_and_in_json() {
    let machine = good();
    put(
        machine.path(),
        "sys/devices/system/cpu/cpu4/cpufreq/scaling_governor",
        "schedutil\n",
    );
    let output = run(Some(machine.path()), "lat write -n 50 --json -v");
    assert_eq!(output.status.code(), Some(0), "{output:?}");
    let report: Value = serde_json::from_slice(&output.stdout).expect("one object");
    let found = codes(&report);
    for code in ["not-hardware", "cpu-governor", "faked-machine", "few-samples"] {
        assert!(found.contains(&code), "{code}: {report}");
    }
    // The userspace device is on no bus.
    assert!(!found.contains(&"numa-cpus") && !found.contains(&"memlock"), "{report}");
    let reported: Vec<String> = text(&output.stderr)
        .lines()
        .map(|line| line.strip_prefix("doorbell: warning: ").expect("a warning").to_owned())
        .collect();
    let messages: Vec<&str> = report["warnings"]
        .as_array()
        .unwrap()
        .iter()
        .map(|warning| warning["message"].as_str().unwrap())
        .collect();
    assert_eq!(reported, messages);
    // Without -v one line names all.
    let output = run(Some(machine.path()), "lat write -n 50 --json");
    let line = text(&output.stderr);
    assert!(
        line.lines().count() == 1 && line.contains(" caveats: ") && line.contains("cpu-governor"),
        "{line}"
    );
    // No warning about percentiles with enough samples.
    let output = run(None, "lat write -n 10000 --json");
    let report: Value = serde_json::from_slice(&output.stdout).expect("one object");
    assert!(!codes(&report).contains(&"faked-machine"), "{report}");
}

#[test]
fn hostile_files_are_a_line_each_and_no_panic() {
    let machine = good();
    let root = machine.path();
    let nonsense: [&[u8]; 6] = [
        b"",
        b"\xff\xfe\x00",
        b"\x1b[2J\nx\ny",
        b"-1",
        b"99999999999999999999999999",
        &[b'7'; 1 << 21],
    ];
    let mut files = Vec::new();
    let mut folders = vec![root.to_path_buf()];
    while let Some(folder) = folders.pop() {
        for entry in fs::read_dir(folder).unwrap().flatten() {
            let kind = entry.file_type().unwrap();
            if kind.is_dir() {
                folders.push(entry.path());
            } else if kind.is_file() {
                files.push(entry.path());
            }
        }
    }
    assert!(files.len() > 20);
    for content in nonsense {
        for file in &files {
            fs::write(file, content).unwrap();
        }
        let output = run(Some(root), "diagnose");
        assert_eq!(output.status.code(), Some(0), "{output:?}");
        let lines = text(&output.stdout);
        assert!(
            !lines.chars().any(|c| c.is_control() && c != '\n') && lines.len() < 100_000,
            "{lines}"
        );
        assert!(lines.lines().all(|line| line.starts_with(['#', 'm'])), "{lines}");
    }
    // Special files, dangling links and loops.
    for file in &files {
        fs::remove_file(file).unwrap();
        symlink(file, file).unwrap();
    }
    assert_eq!(run(Some(root), "diagnose").status.code(), Some(0));
    assert_eq!(run(Some(&root.join("none")), "diagnose").status.code(), Some(0));
}

#[test]
fn hostile_names_are_a_line_each() {
    let machine = good();
    let name = std::ffi::OsStr::from_bytes(b"mlx\n\x1b[31m0");
    let folder = machine.path().join("sys/class/infiniband").join(name);
    fs::create_dir_all(folder.join("ports/1")).unwrap();
    fs::write(folder.join("ports/1/state"), "1: DOWN\n").unwrap();
    let output = run(Some(machine.path()), "diagnose");
    let lines = text(&output.stdout);
    assert!(lines.contains("port 1 of mlx  [31m0 is down"), "{lines}");
    assert!(!lines.contains('\u{1b}'), "{lines}");
    for device in ["nope", "../infiniband/mlx5_0", "/etc", "..", "\u{1b}[2J"] {
        let output = run(Some(machine.path()), &format!("diagnose -d {device}"));
        assert_eq!(output.status.code(), Some(2), "{device}: {output:?}");
        let output = text(&output.stderr);
        assert!(
            output.lines().count() == 1 && output.contains("no device") && !output.contains('\u{1b}'),
            "{output}"
        );
    }
    let output = run(Some(machine.path()), "diagnose --ignore nonsense");
    assert_eq!(
        (output.status.code(), text(&output.stderr).lines().count()),
        (Some(2), 1),
        "{output:?}"
    );
}

#[test]
fn the_codes_are_the_documents() {
    let output = run(None, "diagnose --codes");
    assert_eq!(output.status.code(), Some(0));
    let document =
        fs::read_to_string(Path::new(env!("CARGO_MANIFEST_DIR")).join("../docs/book/src/diagnosis.md")).unwrap();
    assert!(document.contains(&text(&output.stdout)), "{}", text(&output.stdout));
    // A userspace device is checked by name.
    assert_eq!(run(None, "diagnose -d soft0").status.code(), Some(0));
}
