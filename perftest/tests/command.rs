//! The `doorbell` command as scripts run it: its output and exit status.
//!
//! Every test runs the real binary on the userspace device, on loopback. They share an address
//! without affecting each other.

#![forbid(unsafe_code)]

mod common;

use std::fs::File;
use std::net::{TcpListener, UdpSocket};
use std::time::{Duration, Instant};

use serde_json::Value;

use self::common::{complaint, doorbell, json, run, stderr};

fn keys(value: &Value) -> Vec<&str> {
    let mut keys: Vec<_> = value
        .as_object()
        .expect("an object")
        .keys()
        .map(String::as_str)
        .collect();
    keys.sort_unstable();
    keys
}

#[test]
fn every_bandwidth_test_prints_one_object_with_the_documented_keys() {
    for operation in ["write", "read", "send", "atomic"] {
        let report = json(&format!("bw {operation} -n 200 -q 2 --tx-depth 16 --post-list 4"));
        let of = |value: &Value, wanted: &[&str]| {
            let keys = keys(value);
            wanted.iter().all(|key| keys.contains(key))
        };
        assert!(
            of(
                &report,
                &[
                    "device", "link", "memory", "results", "test", "tool", "version", "peer", "settings", "clock",
                    "warnings"
                ]
            ),
            "{report}"
        );
        assert_eq!(report["tool"], "doorbell");
        assert_eq!(report["test"], format!("{operation}_bw"));
        assert_eq!(
            (&report["device"], &report["link"], &report["memory"]),
            (&"soft0".into(), &"soft-local".into(), &"host".into())
        );
        let row = &report["results"][0];
        let wanted = [
            "bw_avg_bytes_per_s",
            "bw_peak_bytes_per_s",
            "bytes",
            "iterations",
            "msg_rate_per_s",
        ];
        assert!(of(row, &wanted), "{row}");
        assert_eq!(
            (&row["qps"], &row["tx_depth"], &row["post_list"]),
            (&2.into(), &16.into(), &4.into())
        );
        assert_eq!(row["iterations"], 400, "{operation}");
        assert_eq!(row["bytes"], if operation == "atomic" { 8 } else { 65536 });
        let figure = |key: &str| row[key].as_f64().expect("a number");
        assert!(
            figure("bw_peak_bytes_per_s") >= figure("bw_avg_bytes_per_s") && figure("msg_rate_per_s") > 0.0,
            "{row}"
        );
    }
}

#[test]
fn every_latency_test_prints_one_object_with_the_documented_keys() {
    for operation in ["write", "read", "send", "atomic"] {
        let report = json(&format!("lat {operation} -n 100"));
        assert_eq!(report["test"], format!("{operation}_lat"));
        let row = &report["results"][0];
        let keys = keys(row);
        for key in [
            "bytes",
            "iterations",
            "lat_avg_ns",
            "lat_max_ns",
            "lat_stddev_ns",
            "lat_cdf",
        ] {
            assert!(keys.contains(&key), "{row}");
        }
        assert_eq!(row["coordinated_omission"], "closed-loop");
        assert_eq!(
            (&row["iterations"], &row["bytes"]),
            (&100.into(), &if operation == "atomic" { 8 } else { 2 }.into())
        );
        let figures: Vec<f64> = "lat_min_ns lat_p50_ns lat_p90_ns lat_p99_ns lat_p999_ns lat_p9999_ns lat_max_ns"
            .split(' ')
            .map(|key| row[key].as_f64().expect("a number"))
            .collect();
        assert!(figures.is_sorted() && figures[0] > 0.0, "{row}");
    }
}

#[test]
fn every_byte_is_verified_with_faults_injected() {
    let faults = "--drop 0.05 --duplicate 0.02 --reorder 0.02 --corrupt 0.02 --seed 7 --timeout 14";
    for operation in ["write", "read", "send", "atomic"] {
        let size = if operation == "atomic" { 8 } else { 9001 };
        for (kind, more) in [("bw", "-q 2 --tx-depth 8 --post-list 3 -n 60"), ("lat", "-n 30")] {
            let report = json(&format!("{kind} {operation} -s {size} --verify {more} {faults}"));
            assert_eq!(report["results"][0]["bytes"], size, "{kind} {operation}");
        }
    }
}

/// Both ends react to the marks of the other one, and slow down.
#[test]
fn every_byte_is_verified_under_congestion_control() {
    for operation in ["write", "read", "send"] {
        for algorithm in ["dcqcn,min=1Gb", "delay,min=1Gb"] {
            let line = format!("bw {operation} -s 100K --verify -n 40 -q 2 --mark 0.2 --congestion {algorithm}");
            assert_eq!(json(&line)["results"][0]["bytes"], 100 << 10, "{line}");
        }
    }
}

#[test]
fn inline_messages_are_verified_too() {
    json("bw write -s 48 --inline 48 --verify -n 300 --tx-depth 16 --post-list 5 --cq-mod 3");
    json("bw send -s 48 --inline 48 --verify -n 300 --tx-depth 16 --rx-depth 4");
    json("lat write -s 64 --verify -n 50");
    json("lat write -s 64 --inline 0 --verify -n 50");
    json("bw atomic --atomic-op compare-swap --verify -n 100");
}

#[test]
fn a_timed_test_runs_for_its_time() {
    let began = Instant::now();
    let report = json("bw write -s 4K -D 0.3");
    assert!(began.elapsed() >= Duration::from_millis(300));
    assert!(report["results"][0]["iterations"].as_u64() > Some(0));
    assert!(json("lat send -D 0.1")["results"][0]["iterations"].as_u64() > Some(0));
}

#[test]
fn all_sizes_are_rows_of_one_table() {
    let output = run("bw write --all -n 2");
    assert!(output.status.success(), "{}", stderr(&output));
    let text = String::from_utf8_lossy(&output.stdout);
    let rows: Vec<u64> = text
        .lines()
        .filter(|line| !line.trim_start().starts_with('#'))
        .map(|line| line.split_whitespace().next().unwrap().parse().unwrap())
        .collect();
    assert_eq!(rows, (1..=23).map(|power| 1 << power).collect::<Vec<u64>>());
    assert!(
        text.contains("BW average[MiB/s]") && text.contains("soft-local"),
        "{text}"
    );
    assert!(stderr(&output).contains("not-hardware"), "{}", stderr(&output));
}

#[test]
fn bad_usage_is_one_line_and_exit_2() {
    let none: &[&str] = &[];
    for (line, hints) in [
        ("bw write -s 0", &["sizes go from"][..]),
        ("bw write --tx-depth 4 --post-list 8", &["--tx-depth"]),
        ("bw atomic -s 64", &["8 bytes"]),
        ("bw write -d nosuch9", &["no device 'nosuch9'", "soft0"]),
        ("lat read --inline 8", &["--inline"]),
        (
            "bw write --congestion cubic",
            &["DOORBELL_CONGESTION", "none, dcqcn, delay"],
        ),
        ("bw write no.such.host.invalid -d soft0", &["no.such.host.invalid"]),
        ("run --port 0 -- true", &["there is no option '--port'"]),
        ("bw write -s 4X", none),
        ("bw teleport", none),
        ("tpoo", none),
    ] {
        let output = run(line);
        assert_eq!(output.status.code(), Some(2), "{line}: {}", stderr(&output));
        assert!(output.stdout.is_empty(), "{line}");
        let complaints = complaint(&output);
        if !hints.is_empty() {
            assert_eq!(complaints.len(), 1, "{line}: {complaints:?}");
        }
        for hint in hints {
            assert!(complaints[0].contains(hint), "{line}: {complaints:?}");
        }
        assert!(!stderr(&output).contains("panicked"), "{line}");
    }
}

#[test]
fn obstacles_are_one_line_and_exit_1() {
    let tcp = TcpListener::bind("127.0.0.1:0").unwrap();
    let tcp_port = tcp.local_addr().unwrap().port();
    let udp = UdpSocket::bind("127.0.0.1:0").unwrap();
    let udp_port = udp.local_addr().unwrap().port();
    for (line, hint) in [
        (
            format!("bw write --server -d soft0 --port {tcp_port}"),
            "--port".to_owned(),
        ),
        (
            format!("bw write --address 127.0.0.1 --udp-port {udp_port}"),
            udp_port.to_string(),
        ),
        (
            "bw write --address 192.0.2.1,192.0.2.2".to_owned(),
            "192.0.2.1".to_owned(),
        ),
        (
            "bw write 127.0.0.1 --port 1 -d soft0".to_owned(),
            "cannot reach peer 127.0.0.1 port 1".to_owned(),
        ),
    ] {
        let output = run(&line);
        assert_eq!(output.status.code(), Some(1), "{line}: {}", stderr(&output));
        let complaints = complaint(&output);
        assert!(
            complaints.len() == 1 && complaints[0].contains(&hint),
            "{line}: {complaints:?}"
        );
    }
}

#[test]
fn results_that_cannot_be_written_are_a_failure() {
    for line in ["bw write -n 20", "bw write -n 20 --json", "devices", "devices --json"] {
        let full = File::options().write(true).open("/dev/full").unwrap();
        let output = doorbell(line).stdout(full).output().unwrap();
        assert_eq!(output.status.code(), Some(1), "{line}: {}", stderr(&output));
        assert!(
            stderr(&output).contains("cannot write to stdout: No space left on device"),
            "{line}"
        );
    }
}

#[test]
fn the_environment_is_read() {
    let output = doorbell("devices --json")
        .env("DOORBELL_SOFT_ADDR", "127.0.9.1,127.0.9.2")
        .output()
        .unwrap();
    let listing: Value = serde_json::from_slice(&output.stdout).unwrap();
    let soft: Vec<_> = listing["devices"]
        .as_array()
        .unwrap()
        .iter()
        .filter(|device| device["link"] == "soft-udp")
        .collect();
    let addresses: Vec<_> = soft.iter().map(|device| device["address"].as_str().unwrap()).collect();
    assert_eq!(addresses, ["127.0.9.1", "127.0.9.2"]);
    let output = doorbell("devices")
        .env("DOORBELL_SOFT_ADDR", "nonsense")
        .output()
        .unwrap();
    assert_eq!(output.status.code(), Some(2));
    assert!(complaint(&output)[0].contains("DOORBELL_SOFT_ADDR"));
}

#[test]
fn devices_lists_the_userspace_device_wherever_it_runs() {
    let output = run("devices -v");
    assert!(output.status.success(), "{}", stderr(&output));
    let text = String::from_utf8(output.stdout).unwrap();
    let soft = text.lines().find(|line| line.starts_with("soft0")).expect("soft0");
    assert!(
        soft.contains("soft-udp") && soft.contains("active") && soft.contains("127.0.0."),
        "{soft}"
    );
}

fn limits(line: &str) -> Vec<Value> {
    let output = run(&format!("limits --json --quick {line}"));
    assert!(output.status.success(), "{}", stderr(&output));
    let report: Value = serde_json::from_slice(&output.stdout).unwrap();
    report["results"].as_array().unwrap().clone()
}

#[test]
fn limits_are_measured_under_their_names() {
    let results = limits("-D 0.05 --only memcpy,udp_gso,shm_pingpong,process_vm_writev");
    for limit in &results {
        let unit = if limit["name"] == "shm_pingpong" {
            "ns"
        } else {
            "bytes_per_s"
        };
        assert!(limit[unit].as_f64() > Some(0.0), "{limit}");
        assert_eq!(limit.as_object().unwrap().len(), 2, "{limit}");
    }
    let names: Vec<_> = results.iter().map(|limit| limit["name"].as_str().unwrap()).collect();
    assert!(names.contains(&"memcpy") && names.contains(&"udp_gso"), "{names:?}");
}

#[test]
fn messages_may_be_in_private_memory() {
    for line in ["bw write", "bw read", "bw send", "lat read -s 8K"] {
        let size = if line.contains("-s") { "" } else { " -s 64K" };
        json(&format!("{line}{size} -n 50 --verify --private-memory"));
        json(&format!("{line}{size} -n 50 --verify"));
    }
    // With so many queue pairs, messages are not in shared memory, for lack of descriptors.
    json("bw write -s 4K -n 2 --qps 65");
}

#[test]
fn the_device_is_compared_with_the_limits() {
    let results = limits("-D 0.1 --only soft_udp_write_bw,idle_cpu");
    let names: Vec<_> = results.iter().map(|limit| limit["name"].as_str().unwrap()).collect();
    assert_eq!(names, ["udp_gso", "soft_udp_write_bw", "idle_cpu"]);
    let (limit, device) = (&results[0], &results[1]);
    let ratio = device["bytes_per_s"].as_f64().unwrap() / limit["bytes_per_s"].as_f64().unwrap();
    assert!(
        (device["ratio"].as_f64().unwrap() / ratio - 1.0).abs() < 1e-6,
        "{device}"
    );
    assert_eq!(device["against"], "udp_gso");
    assert_eq!(results[2]["against"], "elapsed_time");

    let unknown = run("limits --only speed");
    assert_eq!(unknown.status.code(), Some(2));
    assert!(stderr(&unknown).contains("udp_gso"), "{}", stderr(&unknown));
}

#[test]
fn help_has_examples_and_only_existing_options() {
    let output = run("--help");
    let text = String::from_utf8(output.stdout).unwrap();
    assert!(
        output.status.success() && text.contains("Examples:") && text.contains("Exit status"),
        "{text}"
    );
    let lat = String::from_utf8(run("lat --help").stdout).unwrap();
    assert!(!lat.contains("--child") && !lat.contains("--qps"), "{lat}");
}

#[test]
fn a_capture_is_written() {
    let file = std::env::temp_dir().join(format!("doorbell-capture-{}.pcap", std::process::id()));
    json(&format!("bw write -n 20 -s 4K --pcap {}", file.display()));
    assert!(std::fs::metadata(&file).unwrap().len() > 20 * 4096);
    std::fs::remove_file(&file).unwrap();
}
