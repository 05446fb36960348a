//! `doorbell sweep`, `report` and `compare` as scripts run them: from a measurement to a page, and
//! to an exit status.
//!
//! Every test runs the real binary; measurements run on the userspace device, on loopback.

#![forbid(unsafe_code)]

mod common;

use std::fs;
use std::io::{BufRead, BufReader};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Output};

use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use serde_json::{Value, json};
use tempfile::TempDir;

use self::common::{schema, stderr};

fn doorbell(folder: &Path, line: &str) -> Command {
    let mut command = common::doorbell(line);
    command.current_dir(folder);
    command
}

fn run(folder: &Path, line: &str) -> Output {
    doorbell(folder, line).output().expect("the binary runs")
}

fn check_schema(result: &Value) {
    let validator = jsonschema::draft202012::new(&schema()).expect("a schema");
    let errors: Vec<_> = validator.iter_errors(result).map(|error| error.to_string()).collect();
    assert!(errors.is_empty(), "{errors:?}: {result}");
}

fn run_ok(folder: &Path, line: &str) -> Output {
    let output = run(folder, line);
    assert!(output.status.success(), "{line}: {}", stderr(&output));
    output
}

/// Runs a command that has to fail with this status, and one line that contains `says`.
fn fails(folder: &Path, line: &str, status: i32, says: &str) {
    let output = run(folder, line);
    let complaints = stderr(&output);
    assert_eq!(output.status.code(), Some(status), "{line}: {complaints}");
    assert!(complaints.contains(says), "{line}: {complaints}");
    assert_eq!(complaints.lines().count(), 1, "{line}: {complaints}");
}

fn folder() -> TempDir {
    tempfile::tempdir().expect("a folder")
}

fn read(file: PathBuf) -> Value {
    serde_json::from_slice(&fs::read(&file).expect("a file")).expect("JSON")
}

/// A result as a sweep writes it, of one row with these samples.
fn result(folder: &Path, file: &str, link: &str, samples: &[f64]) {
    let mean = samples.iter().sum::<f64>() / samples.len() as f64;
    let row = |bytes: u64| {
        json!({"bytes": bytes, "qps": 1, "tx_depth": 16, "inline_bytes": 0, "post_list": 1, "iterations": 100, "bw_peak_bytes_per_s": mean,
            "bw_avg_bytes_per_s": mean, "msg_rate_per_s": mean / 64.0, "repeats": samples.len(), "bw_samples_bytes_per_s": samples})
    };
    let result = json!({"tool": "doorbell", "version": "0.1.0", "test": "write_bw", "device": "d0", "link": link, "memory": "host",
        "line_rate_bytes_per_s": 12.5e9, "results": [row(64), row(128)]});
    fs::write(folder.join(file), result.to_string()).expect("a file");
}

#[test]
fn a_sweep_is_one_result_of_all_points() {
    let folder = folder();
    run_ok(
        folder.path(),
        "sweep bw write --sizes 64,4K --qps 1,2 --tx-depth 1,8 -n 50 --repeat 2 -o x.json",
    );
    let result = read(folder.path().join("x.json"));
    assert_eq!(
        (&result["test"], &result["link"]),
        (&"write_bw".into(), &"soft-local".into())
    );
    let points: Vec<_> = result["results"]
        .as_array()
        .expect("rows")
        .iter()
        .map(|row| {
            let of = |key: &str| row[key].as_u64().expect("a number");
            assert_eq!(row["bw_samples_bytes_per_s"].as_array().expect("samples").len(), 2);
            (of("qps"), of("tx_depth"), of("bytes"))
        })
        .collect();
    assert_eq!(
        points,
        [
            (1, 1, 64),
            (1, 1, 4096),
            (1, 8, 64),
            (1, 8, 4096),
            (2, 1, 64),
            (2, 1, 4096),
            (2, 8, 64),
            (2, 8, 4096)
        ]
    );
    let names: Vec<_> = result["limits"]
        .as_array()
        .expect("limits")
        .iter()
        .map(|l| l["name"].as_str())
        .collect();
    assert!(names.contains(&Some("memcpy")), "{names:?}");
    // A software device has no line rate.
    assert!(result.get("line_rate_bytes_per_s").is_none() && result.get("skipped").is_none());
    assert_eq!(result["sweep"]["qps"], json!([1, 2]));
}

#[test]
fn impossible_points_are_reported_and_the_others_measured() {
    let folder = folder();
    let output = run_ok(
        folder.path(),
        "sweep bw write --sizes 64 --tx-depth 1,8 --post-list 1,4 -n 50 --no-limits",
    );
    let result: Value = serde_json::from_slice(&output.stdout).expect("one object");
    assert_eq!(result["results"].as_array().map(Vec::len), Some(3));
    check_schema(&result);
    let skipped = &result["skipped"];
    assert_eq!(skipped.as_array().map(Vec::len), Some(1));
    assert_eq!(
        (&skipped[0]["tx_depth"], &skipped[0]["post_list"]),
        (&1.into(), &4.into())
    );
    assert!(
        skipped[0]["reason"]
            .as_str()
            .is_some_and(|reason| reason.contains("--post-list 4"))
    );
    // An inline size that the device does not support.
    let output = run_ok(
        folder.path(),
        "sweep lat send --sizes 2 --inline 0,4096 -n 50 --no-limits",
    );
    let result: Value = serde_json::from_slice(&output.stdout).expect("one object");
    check_schema(&result);
    let rows = result["results"].as_array().map_or(0, Vec::len);
    let skipped = result["skipped"].as_array().map_or(0, Vec::len);
    assert!(rows >= 1 && rows + skipped == 2, "{result}");

    fails(folder.path(), "sweep bw read --sizes 64 --inline 64", 2, "--inline");
    fails(folder.path(), "sweep lat write --qps 1,2", 2, "--qps is for bw");
    fails(
        folder.path(),
        "sweep bw write --sizes 64 -n 5 -o no/x.json",
        1,
        "cannot write no/x.json",
    );
}

/// A process that ends with the test.
struct Running(Child);

impl Drop for Running {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

#[test]
fn an_interrupted_sweep_keeps_its_results() {
    let folder = folder();
    let mut sweep = doorbell(
        folder.path(),
        "sweep bw write --sizes 64,128,256 -D 0.05 --tx-depth 1..8192 --no-limits -o x.json",
    )
    .spawn()
    .map(Running)
    .expect("the binary runs");
    let mut lines = BufReader::new(sweep.0.stderr.take().expect("a pipe")).lines();
    let line = lines.find(|line| line.as_ref().is_ok_and(|line| line.starts_with("doorbell: 2/42:")));
    assert!(line.is_some(), "it reports its progress");
    kill(
        Pid::from_raw(i32::try_from(sweep.0.id()).expect("an id")),
        Signal::SIGINT,
    )
    .expect("it is there");
    for line in lines {
        line.expect("text");
    }
    assert_eq!(sweep.0.wait().expect("it ends").code(), Some(130));
    let rows = read(folder.path().join("x.json"))["results"]
        .as_array()
        .map_or(0, Vec::len);
    assert!((2..42).contains(&rows), "{rows}");
}

#[test]
fn one_server_serves_sweep_after_sweep() {
    let folder = folder();
    let mut server = doorbell(
        folder.path(),
        "bw write --server --forever --port 0 --address 127.0.0.1",
    )
    .spawn()
    .map(Running)
    .expect("the binary runs");
    let mut output = BufReader::new(server.0.stderr.take().expect("a pipe"));
    let mut line = String::new();
    output.read_line(&mut line).expect("a line");
    let port = line.trim().rsplit(':').next().expect("a port").to_owned();
    for _ in 0..2 {
        let line =
            format!("sweep bw write 127.0.0.1 --port {port} --device soft0 --sizes 64,4K --qps 1,2 -n 50 --no-limits");
        let output = run_ok(folder.path(), &line);
        let result: Value = serde_json::from_slice(&output.stdout).expect("one object");
        assert_eq!(result["results"].as_array().map(Vec::len), Some(4));
    }
    // A client of another test is refused, and the server continues.
    let line =
        format!("sweep bw read 127.0.0.1 --port {port} --device soft0 --sizes 64 -n 50 --no-limits --no-progress");
    let output = run(folder.path(), &line);
    assert_eq!(output.status.code(), Some(1), "{}", stderr(&output));
    assert!(
        stderr(&output).contains("start the same on both ends"),
        "{}",
        stderr(&output)
    );
    assert!(server.0.try_wait().expect("it can be polled").is_none());
    kill(
        Pid::from_raw(i32::try_from(server.0.id()).expect("an id")),
        Signal::SIGINT,
    )
    .expect("it is there");
    assert_eq!(server.0.wait().expect("it ends").code(), Some(130));
}

#[test]
fn a_report_is_a_page_or_a_picture() {
    let folder = folder();
    result(folder.path(), "a.json", "hardware", &[1e9, 1.01e9]);
    result(folder.path(), "b.json", "soft-udp", &[9e8, 9.1e8]);
    run_ok(folder.path(), "report a.json b.json -o both.html");
    let page = fs::read_to_string(folder.path().join("both.html")).expect("a page");
    for wanted in [
        "data-y=\"1005000000.0\"",
        "line rate",
        "Software device (soft-udp)",
        "a.json",
        "b.json",
    ] {
        assert!(page.contains(wanted), "{wanted}");
    }
    run_ok(folder.path(), "report a.json -o a.svg --chart rate");
    assert!(
        fs::read_to_string(folder.path().join("a.svg")).is_ok_and(|svg| svg.contains("data-metric=\"msg_rate_per_s\""))
    );
    if cfg!(feature = "png") {
        run_ok(folder.path(), "report a.json -o a.png");
        assert!(fs::read(folder.path().join("a.png")).is_ok_and(|png| png.starts_with(b"\x89PNG")));
    } else {
        fails(folder.path(), "report a.json -o a.png", 2, "--features png");
    }

    for (line, status, says) in [
        ("report a.json -o a.pdf", 2, ".html, .svg or .png"),
        ("report a.json -o a.html --chart rate", 2, "--chart"),
        ("report a.json -o a.svg --chart cdf", 2, "there is bandwidth, rate"),
        ("report a.json -o a.svg --chart speed", 2, "no chart 'speed'"),
        ("report nowhere.json -o a.html", 1, "cannot read nowhere.json"),
        ("report a.json -o no/a.html", 1, "cannot write no/a.html"),
        ("report a.svg -o a.html", 2, "no result of doorbell"),
    ] {
        fails(folder.path(), line, status, says);
    }
}

#[test]
fn all_results_can_be_shown() {
    let folder = folder();
    for (file, line) in [
        ("bw.json", "bw write -s 64 -n 50 --json"),
        ("lat.json", "lat read -s 64 -n 50 --json"),
        ("coll.json", "coll allreduce --ranks 2 -b 8 -e 64 -f 8 -n 2 -w 1 --json"),
    ] {
        let output = run_ok(folder.path(), line);
        fs::write(folder.path().join(file), output.stdout).expect("a file");
        run_ok(folder.path(), &format!("report {file} -o page.html"));
        assert!(fs::read_to_string(folder.path().join("page.html")).is_ok_and(|page| page.contains("<svg")));
    }
    run_ok(folder.path(), "compare coll.json coll.json --fail-over 0%");
}

#[test]
fn hostile_files_are_refused_in_one_line() {
    let folder = folder();
    let head = r#""tool":"doorbell","version":"1","test":"write_bw","device":"d","link":"hardware","memory":"host""#;
    for (name, text, says) in [
        ("empty", String::new(), "EOF"),
        ("deep", "[".repeat(100_000), "recursion"),
        (
            "nan",
            format!(r#"{{{head},"results":[{{"bytes":1,"bw_avg_bytes_per_s":NaN}}]}}"#),
            "expected",
        ),
        (
            "huge",
            format!(r#"{{{head},"results":[{{"bytes":1,"bw_avg_bytes_per_s":1e400}}]}}"#),
            "out of range",
        ),
        (
            "negative",
            format!(r#"{{{head},"results":[{{"bytes":1,"bw_avg_bytes_per_s":-1}}]}}"#),
            "row 1",
        ),
        (
            "text",
            format!(r#"{{{head},"results":[{{"bytes":"1","bw_avg_bytes_per_s":1}}]}}"#),
            "bytes",
        ),
        ("rows", format!(r#"{{{head},"results":{{}}}}"#), "results"),
        ("none", format!(r#"{{{head},"results":[]}}"#), "no rows"),
        ("binary", "\u{0}\u{1}\n\n\u{7f}".to_owned(), "expected"),
    ] {
        fs::write(folder.path().join(name), text).expect("a file");
        fails(folder.path(), &format!("report {name} -o x.html"), 2, says);
        fails(
            folder.path(),
            &format!("compare {name} {name}"),
            2,
            "no result of doorbell",
        );
        assert!(!folder.path().join("x.html").exists());
    }
}

#[test]
fn a_comparison_reports_changes_and_sets_the_exit_status() {
    let folder = folder();
    let at = folder.path();
    result(at, "a.json", "soft-udp", &[1.00e9, 1.01e9, 0.99e9]);
    result(at, "slow.json", "soft-udp", &[0.90e9, 0.91e9, 0.89e9]);
    result(at, "noisy.json", "soft-udp", &[0.60e9, 0.90e9, 1.20e9]);
    result(at, "hard.json", "hardware", &[1.00e9, 1.01e9, 0.99e9]);
    run_ok(at, "compare a.json a.json --fail-over 1%");
    run_ok(at, "compare a.json noisy.json --fail-over 5%");
    run_ok(at, "compare a.json slow.json");
    run_ok(at, "compare slow.json a.json --fail-over 5%");
    run_ok(at, "compare a.json slow.json --fail-over 15%");
    let failed = run(at, "compare a.json slow.json --fail-over 5% --json");
    assert_eq!(failed.status.code(), Some(1));
    assert!(
        stderr(&failed).contains("2 of 2 points are worse by more than 5 %"),
        "{}",
        stderr(&failed)
    );
    let output: Value = serde_json::from_slice(&failed.stdout).expect("one object");
    check_schema(&output);
    let row = &output["results"][0];
    assert_eq!(
        (&row["verdict"], &row["noise"], &row["failed"]),
        (&"worse".into(), &"measured".into(), &true.into())
    );
    assert!(row["change"].as_f64().is_some_and(|change| (change + 0.1).abs() < 1e-9));
    fails(at, "compare a.json hard.json", 2, "--force");
    run_ok(at, "compare a.json hard.json --force");
    let table = String::from_utf8(run_ok(at, "compare a.json slow.json").stdout).expect("text");
    assert!(table.contains("worse") && table.contains("2 worse"), "{table}");
}

#[test]
fn latencies_are_compared_by_the_given_metric() {
    let folder = folder();
    let at = folder.path();
    run_ok(at, "sweep lat send --sizes 8 -n 200 --repeat 3 -o real.json");
    let mut was = read(at.join("real.json"));
    let row = &mut was["results"][0];
    assert_eq!(row["lat_p99_samples_ns"].as_array().expect("one each").len(), 3);
    for (key, values) in [
        ("lat_samples_ns", json!([1000.0, 1001.0, 999.0])),
        ("lat_p99_samples_ns", json!([2000.0, 2002.0, 1998.0])),
        ("lat_p50_ns", json!(1000.0)),
        ("lat_p99_ns", json!(2000.0)),
        ("lat_max_ns", json!(9000.0)),
    ] {
        row[key] = values;
    }
    let mut tail = was.clone();
    let row = &mut tail["results"][0];
    row["lat_p99_samples_ns"] = json!([3000.0, 3002.0, 2998.0]);
    row["lat_p99_ns"] = json!(3000.0);
    row["lat_max_ns"] = json!(9500.0);
    for (file, result) in [("was.json", &was), ("tail.json", &tail)] {
        fs::write(at.join(file), result.to_string()).expect("a file");
    }
    run_ok(at, "compare was.json tail.json --fail-over 5%");
    run_ok(at, "compare was.json tail.json --fail-over 5% --figure p50");
    let worse = run(at, "compare was.json tail.json --fail-over 5% --figure p99 --json");
    assert_eq!(worse.status.code(), Some(1), "{}", stderr(&worse));
    let output: Value = serde_json::from_slice(&worse.stdout).expect("one object");
    check_schema(&output);
    let row = &output["results"][0];
    assert_eq!(
        (&row["metric"], &row["noise"], &row["verdict"]),
        (&"lat_p99_ns".into(), &"measured".into(), &"worse".into())
    );
    // The maximum is not recorded for each repeat.
    let longest = run(at, "compare was.json tail.json --fail-over 5% --figure max --json");
    let output: Value = serde_json::from_slice(&longest.stdout).expect("one object");
    check_schema(&output);
    assert_eq!(
        (longest.status.code(), &output["results"][0]["noise"]),
        (Some(1), &"unknown".into())
    );
    let unknown = run(at, "compare was.json tail.json --figure p98");
    assert!(
        unknown.status.code() == Some(2) && stderr(&unknown).contains("p99.99"),
        "{}",
        stderr(&unknown)
    );
    result(at, "bw.json", "soft-udp", &[1e9]);
    fails(at, "compare bw.json bw.json --figure p99", 2, "latencies");
}
