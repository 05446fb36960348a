//! The exporters as scripts use them: JSON that matches its schema, metrics that Prometheus
//! accepts, thresholds that set the exit status, and stalls that are visible.
//!
//! Every test runs the real binary on the userspace device, on loopback. Results are compared with
//! absolute times only where the test controls them.

#![forbid(unsafe_code)]

mod common;

use std::collections::HashSet;
use std::io::{BufRead, BufReader, Read};
use std::process::Output;
use std::thread;
use std::time::{Duration, Instant};

use nix::sys::signal::{Signal, kill};
use serde_json::Value;

use self::common::{children_of, complaint, doorbell, json, run, schema, ticks_of};

/// Longer than anything here takes, also on a busy machine.
const TIME_LIMIT: Duration = Duration::from_secs(60);

fn stdout(output: &Output) -> String {
    String::from_utf8(output.stdout.clone()).expect("text")
}

#[test]
fn every_result_matches_the_schema() {
    let schema = schema();
    assert!(jsonschema::draft202012::meta::is_valid(&schema));
    let validator = jsonschema::draft202012::new(&schema).expect("a schema");
    // One of the object types, whose errors say more than those of all together.
    let of = |name: &str| {
        let mut one = schema.clone();
        one.as_object_mut().unwrap().remove("oneOf");
        one["$ref"] = format!("#/$defs/{name}").into();
        jsonschema::draft202012::new(&one).expect("a schema")
    };
    for (name, lines) in [
        (
            "bw",
            &[
                "bw write -n 200 -q 2 --tx-depth 16 --post-list 4 --mtu 1024 --warmup 7",
                "bw send -s 4K -n 100 --repeat 3",
                "bw read -a -n 2 --events",
                "bw send -n 500 --verify --events",
                "bw atomic -D 0.05 --rate 10k",
            ][..],
        ),
        (
            "lat",
            &[
                "lat write -n 200",
                "lat send -n 100 --repeat 2 --clock system",
                "lat read -n 50 --rate 5k",
                "lat send -n 100 --events",
                "lat atomic -D 0.05",
            ],
        ),
        (
            "coll",
            &[
                "coll allreduce --ranks 2 -b 8 -e 1K -f 4 -n 5 -w 1",
                "coll broadcast --ranks 2 -b 1K -e 1K -n 5 -w 1 -c 0",
            ],
        ),
        (
            "moe",
            &[
                "coll moe-dispatch --ranks 2 --tokens 3,8 --hidden 128 --experts 8 --top-k 2 -n 5 -d fp8",
                "coll moe-combine --ranks 2 --tokens 3 --hidden 64 --experts 8 --mode low-latency -n 5 -c 0",
            ],
        ),
        (
            "limits",
            &["limits --quick -D 0.05 --only memcpy,shm_pingpong,soft_local_write_bw,soft_local_msg_rate,idle_cpu"],
        ),
    ] {
        let one = of(name);
        for line in lines {
            let result = json(line);
            let errors: Vec<_> = one
                .iter_errors(&result)
                .map(|error| format!("{} at {}", error, error.instance_path()))
                .collect();
            assert!(errors.is_empty(), "{line}: {errors:?}\n{result}");
            assert!(validator.is_valid(&result), "{line}: more than one of the types");
            // The schema notices an additional and a missing field.
            let (mut more, mut less) = (result.clone(), result.clone());
            more["results"][0]["bw_max"] = 1.into();
            let row = less["results"][0].as_object_mut().unwrap();
            row.remove("bytes")
                .or_else(|| row.remove("name"))
                .expect("what it is of");
            assert!(!validator.is_valid(&more) && !validator.is_valid(&less), "{line}");
        }
    }
}

#[test]
fn repeats_and_processor_time_have_columns() {
    let output = run("bw write -s 4K -n 300 --repeat 3 --cpu-util");
    let text = stdout(&output);
    let lines: Vec<_> = text.lines().collect();
    let heads: Vec<_> = lines[1].split("  ").filter(|head| !head.is_empty()).collect();
    assert!(lines[0].contains("3 repeats"), "{text}");
    for head in ["±95%[MiB/s]", "CPU user[cores]", "CPU system[cores]"] {
        assert!(heads.iter().any(|one| one.trim() == head), "{heads:?}");
    }
    assert_eq!(lines[1].chars().count(), lines[2].chars().count(), "{text}");
    assert!(!stdout(&run("bw write -s 4K -n 300")).contains('±'));

    let row = &json("bw write -s 4K -n 300 --repeat 3")["results"][0];
    let samples: Vec<f64> = row["bw_samples_bytes_per_s"]
        .as_array()
        .unwrap()
        .iter()
        .map(|sample| sample.as_f64().unwrap())
        .collect();
    let mean = samples.iter().sum::<f64>() / 3.0;
    assert_eq!(
        (samples.len(), &row["iterations"], &row["repeats"]),
        (3, &900.into(), &3.into())
    );
    assert!((row["bw_avg_bytes_per_s"].as_f64().unwrap() / mean - 1.0).abs() < 1e-9);
    // t(0.975, 2) = 4.3027.
    let squares: f64 = samples.iter().map(|sample| (sample - mean).powi(2)).sum();
    let half = 4.3027 * (squares / 2.0).sqrt() / 3f64.sqrt();
    assert!(
        (row["bw_ci95_bytes_per_s"].as_f64().unwrap() / half - 1.0).abs() < 1e-3,
        "{row}"
    );

    let row = &json("lat send -n 200 --repeat 2")["results"][0];
    assert_eq!(row["lat_samples_ns"].as_array().unwrap().len(), 2);
    assert!(
        row["lat_ci95_ns"].as_f64() >= Some(0.0) && row["iterations"] == 400,
        "{row}"
    );
}

#[test]
fn the_requested_clock_is_used() {
    let system = json("lat write -n 100 --clock system");
    assert_eq!(system["clock"]["source"], "clock_gettime");
    let output = run("lat write -n 100 --clock tsc --json");
    if output.status.success() {
        let tsc: Value = serde_json::from_slice(&output.stdout).unwrap();
        assert_eq!(tsc["clock"]["source"], "tsc");
        assert_eq!(json("lat write -n 100")["clock"]["source"], "tsc");
    } else {
        assert_eq!(output.status.code(), Some(2));
        assert!(
            complaint(&output)[0].contains("--clock tsc"),
            "{:?}",
            complaint(&output)
        );
        assert_eq!(json("lat write -n 100")["clock"]["source"], "clock_gettime");
    }
}

/// Runs a latency test whose peer is stopped once for `stall` during the measurement. Returns p99
/// and the maximum, in ns.
fn with_a_stalled_peer(line: &str, stall: Duration) -> (f64, f64) {
    let mut client = doorbell(&format!("{line} --timeout 18 --json -v")).spawn().unwrap();
    let mut stderr = BufReader::new(client.stderr.take().unwrap());
    let mut received = String::new();
    // Warnings are printed when the peer has accepted the test. From there on the client sleeps
    // until both are connected, and uses the CPU only when it measures.
    stderr.read_line(&mut received).unwrap();
    let (before, began) = (ticks_of(client.id()), Instant::now());
    // In an open loop, on a busy machine, it uses little.
    let measures = || {
        let used = ticks_of(client.id()) - before;
        used >= 5 || used >= 1 && began.elapsed() > Duration::from_secs(1)
    };
    while !measures() {
        assert!(began.elapsed() < TIME_LIMIT, "it does not measure");
        thread::sleep(Duration::from_millis(2));
    }
    let peer = *children_of(client.id()).first().expect("the peer");
    kill(peer, Signal::SIGSTOP).unwrap();
    thread::sleep(stall);
    kill(peer, Signal::SIGCONT).unwrap();
    let output = client.wait_with_output().unwrap();
    stderr.read_to_string(&mut received).unwrap();
    assert!(output.status.success(), "{received}");
    let result: Value = serde_json::from_slice(&output.stdout).unwrap();
    let row = &result["results"][0];
    let of = |key: &str| row[key].as_f64().unwrap();
    (of("lat_p99_ns"), of("lat_max_ns"))
}

/// A peer that stalls once for 400 ms of 3 s. In an open loop a seventh of all messages is late,
/// far more than one in a hundred; in a closed loop it is one message.
#[test]
fn a_stall_shows_in_an_open_loop_and_hides_in_a_closed_one() {
    let stall = Duration::from_millis(400);
    let ns = stall.as_nanos() as f64;
    let (hidden, longest) = with_a_stalled_peer("lat write -D 3", stall);
    // Half of the delayed round trip.
    assert!(longest > 0.4 * ns, "{longest}");
    assert!(hidden < 0.25 * ns, "{hidden}");
    let (seen, _) = with_a_stalled_peer("lat write -D 3 --rate 1000", stall);
    assert!(seen > 0.5 * ns, "{seen}");
}

#[test]
fn the_rate_of_an_open_loop_is_kept() {
    for line in ["bw write -s 64 -q 2 -n 100 --rate 1000", "lat read -n 200 --rate 1000"] {
        let began = Instant::now();
        let result = json(line);
        let row = &result["results"][0];
        assert_eq!(
            (&row["paced_rate_per_s"], &row["iterations"]),
            (&1000.0.into(), &200.into()),
            "{line}"
        );
        // The last is due after 199 ms.
        assert!(began.elapsed() >= Duration::from_millis(199), "{line}");
        if let Some(rate) = row["msg_rate_per_s"].as_f64() {
            assert!(rate <= 1010.0, "{row}");
        } else {
            assert_eq!(row["coordinated_omission"], "corrected");
        }
        let text = stdout(&run(line));
        assert!(text.contains("1000 messages/s in an open loop"), "{text}");
    }
    assert_eq!(run("bw write --rate 0.5").status.code(), Some(2));
}

#[test]
fn missed_thresholds_are_one_line_a_size_after_all_results() {
    let output = run("bw write -a -n 2 --min-bw 999Tb");
    assert_eq!(output.status.code(), Some(1));
    let complaints = complaint(&output);
    assert_eq!(complaints.len(), 23, "{complaints:?}");
    assert!(
        complaints
            .iter()
            .all(|line| line.starts_with("doorbell: write_bw ") && line.contains("at least 124875.000 GB/s")),
        "{complaints:?}"
    );
    assert_eq!(stdout(&output).lines().count(), 25);

    let output = run("lat write -n 100 --max-p99 1ns --json");
    assert_eq!(output.status.code(), Some(1));
    assert!(serde_json::from_slice::<Value>(&output.stdout).is_ok());
    let complaints = complaint(&output);
    assert!(
        complaints.len() == 1 && complaints[0].contains("write_lat 2 B missed: p99 is"),
        "{complaints:?}"
    );

    let output = run("bw send -s 64 -n 100 --min-msg-rate 900G --min-bw 999TB");
    let complaints = complaint(&output);
    assert!(
        complaints.len() == 1 && complaints[0].contains("; ") && complaints[0].contains("messages per second"),
        "{complaints:?}"
    );

    for line in [
        "bw write -n 50 --min-bw 1kb --min-msg-rate 1",
        "lat write -n 50 --max-p99 60s",
    ] {
        let output = run(line);
        assert!(output.status.success() && complaint(&output).is_empty(), "{line}");
    }
    for line in [
        "bw write --min-bw 10G",
        "bw write --min-bw 10gb",
        "lat write --max-p99 10",
        "bw write --server --min-bw 1Gb",
    ] {
        let output = run(line);
        assert!(output.status.code() == Some(2) && output.stdout.is_empty(), "{line}");
    }
}

/// Whether it is a valid metric name or, without colons, a label name.
fn is_name(text: &str) -> bool {
    text.starts_with(|c: char| c.is_ascii_alphabetic() || c == '_')
        && text.chars().all(|c| c.is_ascii_alphanumeric() || c == '_')
}

type Labels = Vec<(String, String)>;

/// The labels of a sample, and the rest of the text; or why they are invalid.
fn labels(mut text: &str) -> Result<(Labels, &str), String> {
    let mut labels = Labels::new();
    loop {
        let (name, rest) = text.split_once("=\"").ok_or("a label without a value")?;
        if !is_name(name) || labels.iter().any(|(had, _)| had == name) {
            return Err(format!("label {name:?}"));
        }
        let (mut value, mut chars) = (String::new(), rest.char_indices());
        let end = loop {
            match chars.next().ok_or("a value without an end")? {
                (at, '"') => break at,
                (_, '\\') => match chars.next() {
                    Some((_, c @ ('\\' | '"'))) => value.push(c),
                    Some((_, 'n')) => value.push('\n'),
                    other => return Err(format!("an escape {other:?}")),
                },
                (_, c) => value.push(c),
            }
        };
        labels.push((name.to_owned(), value));
        let rest = &rest[end + 1..];
        match rest.split_at_checked(1) {
            Some((",", more)) => text = more,
            Some(("}", more)) => return Ok((labels, more)),
            _ => return Err(format!("{rest:?} behind a label")),
        }
    }
}

type Sample = (String, Labels, f64);

/// Parses an exposition as strictly as the format allows (and `promtool check metrics` requires):
/// help, type, then all samples of a metric, no duplicates, units in the names.
fn exposition(text: &str) -> Result<Vec<Sample>, String> {
    let mut samples: Vec<Sample> = Vec::new();
    let (mut done, mut current, mut typed) = (HashSet::new(), String::new(), false);
    let lines = text.strip_suffix('\n').ok_or("no line end at the end")?;
    for line in lines.split('\n') {
        let fail = |why: &str| Err(format!("{why}: {line:?}"));
        if let Some(help) = line.strip_prefix("# HELP ") {
            let Some((name, says)) = help.split_once(' ') else {
                return fail("no help");
            };
            if !is_name(name) || says.is_empty() || !done.insert(name.to_owned()) {
                return fail("a metric twice, or one without a name");
            }
            (current, typed) = (name.to_owned(), false);
        } else if let Some(what) = line.strip_prefix("# TYPE ") {
            if what != format!("{current} gauge") || typed {
                return fail("a type that is not that of the metric");
            }
            typed = true;
        } else {
            let Some((name, rest)) = line.split_once('{') else {
                return fail("no labels");
            };
            if name != current || !typed {
                return fail("not of the metric above");
            }
            let (labels, rest) = labels(rest)?;
            let value = rest.strip_prefix(' ').and_then(|value| value.parse::<f64>().ok());
            let Some(value) = value.filter(|value| value.is_finite()) else {
                return fail("no value");
            };
            if samples.iter().any(|(had, with, _)| had == name && *with == labels) {
                return fail("a sample twice");
            }
            let unit = ["_seconds", "_per_second", "_cores", "_messages"]
                .iter()
                .any(|unit| name.ends_with(unit));
            if !unit || ["_ns", "_us", "_ms", "_mib"].iter().any(|unit| name.contains(unit)) {
                return fail("no base unit");
            }
            samples.push((name.to_owned(), labels, value));
        }
    }
    Ok(samples)
}

fn value(samples: &[Sample], metric: &str, label: (&str, &str)) -> f64 {
    let label = (label.0.to_owned(), label.1.to_owned());
    let found = samples
        .iter()
        .find(|(name, labels, _)| name == metric && labels.contains(&label));
    found.unwrap_or_else(|| panic!("no {metric} of {label:?}")).2
}

#[test]
fn the_strict_reader_is_strict() {
    let good = "# HELP a_seconds x\n# TYPE a_seconds gauge\na_seconds{b=\"c\\\"\\\\\\n\",d=\"\"} 1e-5\n";
    assert_eq!(exposition(good).unwrap()[0].1[0].1, "c\"\\\n");
    for (from, to) in [
        ("gauge", "counter"),
        ("# TYPE a_seconds gauge\n", ""),
        ("# HELP a_seconds x\n", ""),
        ("1e-5", "fast"),
        ("1e-5", "NaN"),
        ("d=", "b="),
        ("d=", "1="),
        ("\\n", "\\t"),
        ("\"} 1", "} 1"),
        ("a_seconds", "a_ms"),
        ("1e-5\n", "1e-5"),
        ("1e-5\n", "1e-5\n\n"),
    ] {
        let bad = good.replace(from, to);
        assert!(bad != good && exposition(&bad).is_err(), "{bad}");
    }
    let line = good.lines().last().unwrap();
    assert!(exposition(&format!("{good}{line}\n")).is_err());
    assert!(exposition(&format!("{good}{good}")).is_err());
}

#[test]
fn metrics_are_valid_for_prometheus() {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("bw.prom");
    let output = run(&format!(
        "bw write -a -n 2 -q 2 --repeat 2 --json --prometheus {}",
        file.display()
    ));
    assert!(output.status.success(), "{:?}", complaint(&output));
    let result: Value = serde_json::from_slice(&output.stdout).unwrap();
    let text = std::fs::read_to_string(&file).unwrap();
    let samples = exposition(&text).unwrap_or_else(|why| panic!("{why}\n{text}"));
    for row in result["results"].as_array().unwrap() {
        let bytes = row["bytes"].to_string();
        for (metric, key) in [
            ("doorbell_bandwidth_average_bytes_per_second", "bw_avg_bytes_per_s"),
            ("doorbell_bandwidth_peak_bytes_per_second", "bw_peak_bytes_per_s"),
            ("doorbell_bandwidth_ci95_bytes_per_second", "bw_ci95_bytes_per_s"),
            ("doorbell_messages_per_second", "msg_rate_per_s"),
        ] {
            assert_eq!(
                Some(value(&samples, metric, ("bytes", &bytes))),
                row[key].as_f64(),
                "{metric}"
            );
        }
    }
    let names: Vec<_> = samples[0].1.iter().map(|(name, _)| name.as_str()).collect();
    assert_eq!(names, ["test", "device", "link", "memory", "bytes", "qps"]);
    assert!(value(&samples, "doorbell_finished_timestamp_seconds", ("test", "write_bw")) > 1.7e9);

    let output = run("lat send -n 100 --prometheus -");
    assert!(output.status.success(), "{:?}", complaint(&output));
    let samples = exposition(&stdout(&output)).unwrap();
    let quantiles = ["0.5", "0.9", "0.99", "0.999", "0.9999"]
        .map(|quantile| value(&samples, "doorbell_latency_seconds", ("quantile", quantile)));
    assert!(
        quantiles.is_sorted() && quantiles[0] > 0.0 && quantiles[4] < 60.0,
        "{quantiles:?}"
    );
    assert!(value(&samples, "doorbell_cpu_cores", ("mode", "system")) >= 0.0);
    assert_eq!(run("lat send --json --prometheus -").status.code(), Some(2));
    assert_eq!(
        std::fs::read_dir(folder.path()).unwrap().count(),
        1,
        "nothing is left behind"
    );
}

#[test]
fn metrics_that_cannot_be_written_are_one_line() {
    // A full disk shows at the end, after the table; a missing folder before anything is measured.
    for (file, lines) in [("/dev/full", 3), ("/nonexistent/doorbell.prom", 0)] {
        let output = run(&format!("bw write -s 4K -n 50 --prometheus {file}"));
        assert_eq!(output.status.code(), Some(1), "{file}");
        let complaints = complaint(&output);
        assert!(
            complaints.len() == 1 && complaints[0].starts_with(&format!("doorbell: cannot write {file}: ")),
            "{complaints:?}"
        );
        assert_eq!(stdout(&output).lines().count(), lines, "{file}");
    }
}

#[test]
fn help_explains_the_columns() {
    for (kind, heads) in [
        (
            "bw",
            &["BW peak[MiB/s]", "MsgRate[Mpps]", "±95%[MiB/s]", "CPU system[cores]"][..],
        ),
        ("lat", &["p90[us]", "p99.99[us]", "stddev[us]", "±95%[us]"]),
    ] {
        let text = stdout(&run(&format!("{kind} --help")));
        let columns = text.split_once("Columns:\n").expect("a section").1;
        for head in heads {
            assert!(columns.contains(&format!("\n  {head}")), "{text}");
        }
        assert!(text.contains("Examples:"), "{text}");
    }
}
