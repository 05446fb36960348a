//! The modes of `doorbell bw` and `lat`: transports, both directions, connection by rdma_cm,
//! intervals.
//!
//! Every test runs the real binary on the userspace device, on loopback.

#![forbid(unsafe_code)]

mod common;

use std::fs;

use serde_json::Value;

use self::common::{complaint, json, run, schema};

/// The result of a command, which has to match its schema.
fn result(line: &str) -> Value {
    let report = json(line);
    let validator = jsonschema::draft202012::new(&schema()).expect("a schema");
    assert!(validator.is_valid(&report), "{line}: {report}");
    report
}

fn number(row: &Value, key: &str) -> u64 {
    row[key].as_u64().unwrap_or_else(|| panic!("{key}: {row}"))
}

#[test]
fn unreliable_transports_carry_verified_messages() {
    for (operation, transport) in [("write", "uc"), ("send", "uc"), ("send", "ud")] {
        // Never more messages than receives.
        let bw = "-s 1000 -q 2 --tx-depth 8 --post-list 3 -n 100";
        for (kind, more) in [("bw", bw), ("lat", "-s 500 -n 50")] {
            let line = format!("{kind} {operation} --transport {transport} --verify {more}");
            let report = result(&line);
            assert_eq!(report["settings"]["transport"], transport, "{line}");
            let row = &report["results"][0];
            if (kind, operation) == ("bw", "send") {
                assert_eq!(row["lost_messages"], 0, "{line}: {row}");
                assert!((1..=200).contains(&number(row, "iterations")), "{line}: {row}");
            } else {
                let messages = if kind == "bw" { 200 } else { 50 };
                assert_eq!(row["iterations"], messages, "{line}: {row}");
                assert_eq!(row.get("lost_messages"), None, "{line}: {row}");
            }
        }
    }
}

#[test]
fn lost_messages_are_counted_and_the_others_verified() {
    for line in [
        "bw send --transport ud -s 4096 -n 400 --tx-depth 16 --verify --drop 0.1 --seed 7",
        "bw send --transport uc -s 9001 -n 400 --tx-depth 16 --verify --drop 0.05 --seed 7 --bidirectional",
    ] {
        let row = &result(line)["results"][0];
        let (arrived, lost) = (number(row, "iterations"), number(row, "lost_messages"));
        let sent = if line.contains("bidirectional") { 2 * 440 } else { 440 };
        assert!(arrived > 0 && lost > 0 && arrived + lost <= sent, "{line}: {row}");
    }
    let table = String::from_utf8(run("bw send --transport ud -n 100").stdout).expect("text");
    assert!(
        table.starts_with("# send_bw | ud | ") && table.contains("#lost"),
        "{table}"
    );
}

#[test]
fn a_lost_answer_ends_a_latency_test() {
    let output = run("lat send --transport ud -n 10 --drop 1");
    assert_eq!(output.status.code(), Some(1));
    let complaint = complaint(&output).join("\n");
    assert!(complaint.contains("message 0 or its answer was lost"), "{complaint}");
}

#[test]
fn both_directions_count() {
    for operation in ["write", "read", "send", "atomic"] {
        for more in ["", " --verify"] {
            let line = format!("bw {operation} -b -n 200 -q 2 --tx-depth 16 --post-list 4{more}");
            let report = result(&line);
            assert_eq!(report["settings"]["bidirectional"], true, "{line}");
            let row = &report["results"][0];
            assert_eq!(row["iterations"], 800, "{line}: {row}");
        }
    }
    let faults = "--drop 0.05 --duplicate 0.02 --reorder 0.02 --seed 7";
    for operation in ["write", "send"] {
        json(&format!(
            "bw {operation} -b -s 9001 --verify -n 60 --tx-depth 8 --post-list 3 {faults}"
        ));
    }
    let table = String::from_utf8(run("bw write -b -D 0.05").stdout).expect("text");
    assert!(table.starts_with("# write_bw | bidirectional | "), "{table}");
}

#[test]
fn the_connection_manager_connects_every_queue_pair() {
    for line in [
        "bw write --rdma-cm -q 3 -n 100 --verify",
        "bw send --rdma-cm -q 2 -b -n 100 --repeat 2",
        "bw send --rdma-cm --transport ud -q 2 -s 64 -n 100",
        "lat read --rdma-cm -n 50",
        "lat send --rdma-cm --transport ud -n 50 --verify",
    ] {
        let report = result(line);
        assert_eq!(report["settings"]["rdma_cm"], true, "{line}");
        assert_eq!(report["results"].as_array().map(Vec::len), Some(1), "{line}: {report}");
    }
}

#[test]
fn intervals_are_reported_as_they_end() {
    for (kind, figure) in [("bw", "bw_avg_bytes_per_s"), ("lat", "lat_p50_ns")] {
        let line = format!("{kind} write -D 1 --interval 0.1");
        let report = result(&line);
        let row = &report["results"][0];
        let intervals = row["intervals"].as_array().expect("a list");
        let ends: Vec<f64> = intervals.iter().filter_map(|of| of["end_s"].as_f64()).collect();
        assert!(ends.len() >= 2 && ends.is_sorted() && ends[0] >= 0.1, "{line}: {row}");
        assert!(
            intervals.iter().all(|of| of[figure].as_f64() > Some(0.0)),
            "{line}: {row}"
        );
        let messages: u64 = intervals.iter().map(|of| number(of, "iterations")).sum();
        assert!(messages <= number(row, "iterations"), "{line}: {row}");
        let table = String::from_utf8(run(&line).stdout).expect("text");
        let lines = table.lines().filter(|line| line.starts_with("#  ")).count();
        assert!(lines >= 2, "{table}");
    }
}

#[test]
fn what_a_transport_does_not_have_is_one_line() {
    for (line, says) in [
        ("bw read --transport uc", "UC has no RDMA READ"),
        ("lat atomic --transport uc", "UC has no atomics"),
        ("bw write --transport ud", "UD has no RDMA WRITE"),
        ("lat read --transport ud", "UD has no RDMA READ"),
        ("bw atomic --transport ud", "UD has no atomics"),
        (
            "bw send --transport uc --rdma-cm",
            "the connection manager connects no UC",
        ),
        ("bw send --transport ud -s 8K", "a datagram of 8192 bytes"),
        (
            "bw send --transport ud --mtu 1024 -s 2K",
            "it carries at most the MTU, here 1024",
        ),
        ("bw write --interval 1 --repeat 2", "leave --repeat out"),
        ("sweep lat write --bidirectional", "--bidirectional is for bw"),
    ] {
        let output = run(line);
        assert_eq!(output.status.code(), Some(2), "{line}: {output:?}");
        let complaint = complaint(&output);
        assert_eq!(complaint.len(), 1, "{line}: {complaint:?}");
        assert!(complaint[0].contains(says), "{line}: {complaint:?}");
    }
}

#[test]
fn sweeps_have_modes_and_other_modes_are_not_compared() {
    let folder = tempfile::tempdir().expect("a folder");
    let file = |name: &str| folder.path().join(name).display().to_string();
    let (one_way, both, datagrams) = (file("one.json"), file("both.json"), file("ud.json"));
    for (line, into) in [("bw write -n 50", &one_way), ("bw write -n 50 -b", &both)] {
        fs::write(into, result(line).to_string()).expect("a file");
    }
    let swept = run(&format!(
        "sweep bw send --transport ud -n 20 --no-limits --sizes 64,4K,8K -o {datagrams}"
    ));
    assert!(swept.status.success(), "{swept:?}");
    let text = fs::read_to_string(&datagrams).expect("a file");
    let report: Value = serde_json::from_str(&text).expect("JSON");
    assert_eq!(report["sweep"]["transport"], "ud");
    assert_eq!(report["results"].as_array().map(Vec::len), Some(2), "{report}");
    assert_eq!(report["skipped"][0]["bytes"], 8192, "{report}");
    let compared = run(&format!("compare {one_way} {both}"));
    assert_eq!(compared.status.code(), Some(2), "{compared:?}");
    let complaint = complaint(&compared).join("\n");
    assert!(
        complaint.contains("one.json is one way, rc and that of both.json is bidirectional"),
        "{complaint}"
    );
    let forced = run(&format!("compare --force {one_way} {both}"));
    assert!(forced.status.success(), "{forced:?}");
    let table = String::from_utf8(forced.stdout).expect("text");
    assert!(
        table.contains("both.json | write_bw | bidirectional | device soft0"),
        "{table}"
    );
    let page = file("page.html");
    assert!(run(&format!("report {one_way} {both} -o {page}")).status.success());
    let page = fs::read_to_string(page).expect("a file");
    for shown in [
        "<dt>Mode</dt><dd>bidirectional</dd>",
        "write_bw, bidirectional on soft0",
    ] {
        assert!(page.contains(shown), "{shown}: {page}");
    }
}
