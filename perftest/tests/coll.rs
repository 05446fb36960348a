//! `doorbell coll` as scripts run it: ranks are processes of this host on the userspace device, on
//! loopback.

#![forbid(unsafe_code)]

mod common;

use std::net::TcpListener;
use std::process::{Child, Command};
use std::thread;
use std::time::{Duration, Instant};

use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use serde_json::Value;

use self::common::{children_of, complaint, doorbell, is_running, json_of, stderr};

/// Longer than anything here takes, also on a busy machine.
const TIME_LIMIT: Duration = Duration::from_secs(60);

/// Without measuring the costs of the links, which takes ten times as long as most of these tests.
fn coll(line: &str) -> Command {
    let mut command = doorbell(&format!("coll {line}"));
    command.env("DOORBELL_CALIBRATE", "no");
    command
}

fn right(report: &Value, rows: usize) {
    let results = report["results"].as_array().expect("rows");
    assert_eq!(results.len(), rows, "{report}");
    for row in results {
        assert_eq!(row["wrong"], 0, "{row}");
        assert!(row["in_place"].is_null() || row["in_place"]["wrong"] == 0, "{row}");
        assert!(row["time_us"].as_f64() > Some(0.0), "{row}");
    }
}

#[test]
fn every_operation_is_correct_and_has_the_documented_keys() {
    for operation in [
        "allreduce",
        "allgather",
        "reduce-scatter",
        "broadcast",
        "reduce",
        "gather",
        "scatter",
        "alltoall",
        "alltoallv",
        "sendrecv",
        "barrier",
    ] {
        let report = json_of(coll(&format!("{operation} --ranks 3 -b 40 -e 10000 -f 50 -n 3 -w 1")));
        right(&report, if operation == "barrier" { 1 } else { 2 });
        let about = ["tool", "test", "device", "link", "memory"].map(|key| report[key].as_str());
        assert_eq!(
            about,
            ["doorbell", operation, "soft0", "soft-local", "host"].map(Some),
            "{report}"
        );
        let row = &report["results"][0];
        for key in ["bytes", "count", "algbw_bytes_per_s", "busbw_bytes_per_s"] {
            assert!(row[key].is_number(), "{key}: {row}");
        }
        for key in ["dtype", "op", "algorithm", "protocol"] {
            assert!(row[key].is_string(), "{key}: {row}");
        }
        assert_eq!((&row["ranks"], &row["iterations"]), (&Value::from(3), &Value::from(3)));
        let in_place = !matches!(operation, "alltoall" | "alltoallv" | "sendrecv" | "barrier");
        assert_eq!(row["in_place"].is_object(), in_place, "{row}");
    }
}

#[test]
fn dispatch_and_combine_are_correct_in_both_modes_with_any_skew() {
    let skews = ["uniform", "zipf", "one-expert"];
    let cases = ["low-latency", "high-throughput"].into_iter().flat_map(|mode| {
        let parts = ["moe-dispatch", "moe-combine"].into_iter();
        parts.flat_map(move |part| ["bf16", "fp8"].into_iter().map(move |dtype| (mode, part, dtype)))
    });
    for (number, (mode, part, dtype)) in cases.enumerate() {
        let (ranks, skew) = ([3, 1, 2, 4][number % 4], skews[number % 3]);
        let report = json_of(coll(&format!(
            "{part} --ranks {ranks} --mode {mode} -d {dtype} --skew {skew} --tokens 1,33 --hidden 256 --experts 12 --top-k 3 -n 3"
        )));
        right(&report, 2);
        assert_eq!(report["test"], part);
        let row = &report["results"][1];
        let of = ["mode", "dtype", "skew"].map(|key| row[key].as_str());
        assert_eq!(of, [mode, dtype, skew].map(Some), "{row}");
        let row_bytes = if (part, dtype) == ("moe-dispatch", "fp8") {
            256 + 16
        } else {
            512
        };
        assert_eq!(row["bytes"], 33 * 3 * row_bytes, "{row}");
        let number = |key: &str| row[key].as_f64().unwrap();
        let ratio = number("bytes_per_s") / number("alltoallv_bytes_per_s");
        assert!((number("of_alltoallv") / ratio - 1.0).abs() < 1e-6, "{row}");
        let times = number("time_us") / number("put_time_us");
        assert!((number("times_put") / times - 1.0).abs() < 1e-6, "{row}");
    }
}

#[test]
fn the_requested_algorithm_is_used() {
    let line = "reduce --ranks 3 -b 1000 -e 1000 -n 2 -r 2 -o premulsum -d half --algorithm tree --protocol ll128 --channels 2";
    let report = json_of(coll(line));
    right(&report, 1);
    let row = &report["results"][0];
    let done = ["op", "dtype", "algorithm", "protocol"].map(|key| row[key].as_str());
    assert_eq!(done, ["premulsum", "f16", "tree", "ll128"].map(Some), "{row}");
    assert_eq!((&row["root"], &row["count"]), (&Value::from(2), &Value::from(500)));

    let all = json_of(coll(
        "allreduce --ranks 2 -b 100 -e 100 -n 1 -w 0 -o all -d bf16 --deterministic -c 2",
    ));
    right(&all, 6);
}

#[test]
fn the_table_is_nccl_tests() {
    let output = coll("allreduce --ranks 2 -b 8 -e 32 -i 8 -n 2 --check 0")
        .output()
        .unwrap();
    assert!(output.status.success(), "{}", stderr(&output));
    let text = String::from_utf8(output.stdout).unwrap();
    let rows: Vec<Vec<&str>> = text
        .lines()
        .filter(|line| !line.starts_with('#'))
        .map(|line| line.split_whitespace().collect())
        .collect();
    assert_eq!(rows.len(), 4, "{text}");
    for (row, bytes) in rows.iter().zip(["8", "16", "24", "32"]) {
        assert_eq!((row.len(), row[0]), (13, bytes), "{text}");
        assert_eq!((row[2], row[3], row[4], row[8]), ("f32", "sum", "-1", "N/A"), "{text}");
        assert!(row[5].parse::<f64>().is_ok_and(|time| time > 0.0), "{text}");
    }
    assert!(
        text.contains("not checked") && text.contains("# Avg bus bandwidth"),
        "{text}"
    );
}

#[test]
fn over_udp_and_while_packets_are_lost() {
    let mut udp = coll("allreduce --ranks 3 -b 8 -e 20000 -f 2500 -n 3");
    let report = json_of({
        udp.env("DOORBELL_LINK", "udp");
        udp
    });
    right(&report, 2);
    assert_eq!(report["link"], "soft-udp");
    for operation in ["allreduce", "alltoall"] {
        let lossy = json_of(coll(&format!(
            "{operation} --ranks 3 -b 100 -e 30000 -f 300 -n 3 -w 1 --drop 0.02"
        )));
        right(&lossy, 2);
        assert_eq!(lossy["link"], "soft-udp");
    }
    let lossy = json_of(coll(
        "moe-combine --ranks 3 --mode low-latency --tokens 9,20 --hidden 512 --experts 12 -n 3 --drop 0.02",
    ));
    right(&lossy, 2);
    assert_eq!(lossy["link"], "soft-udp");
}

#[test]
fn connections_are_spread_over_devices() {
    let report = json_of(coll(
        "allgather --ranks 2 -b 50000 -e 50000 -n 2 --address 127.0.0.1,127.0.0.2 --device soft0,soft1",
    ));
    right(&report, 1);
    assert_eq!(report["device"], "soft0,soft1");
}

#[test]
fn bad_usage_is_one_line() {
    for (line, word) in [
        ("allreduce", "--ranks"),
        ("allreduce --ranks 65", "64"),
        ("broadcast --ranks 2 -r 2", "root"),
        ("allreduce --ranks 2 --device nosuch", "nosuch"),
        ("allgather --ranks 2 --algorithm tree", "ring"),
        ("allreduce --ranks 2 --algorithm ring --deterministic", "full-mesh"),
        ("allreduce --ranks 2 -b 8 -e 4", "-b"),
        ("allreduce --ranks 2 -i 0", "-f"),
        ("allreduce --ranks 2 --svg x.svg", "--explain"),
        ("allreduce --ranks 2 --rank 0", "--ranks"),
        ("allreduce --ranks 20000 --simulate", "16384"),
        ("allreduce --ranks 2 --tokens 4", "--tokens"),
        ("moe-dispatch --ranks 2 --gpu --graph", "--graph"),
        ("moe-combine --ranks 2 --explain", "--explain"),
        ("moe-dispatch --ranks 3", "256 experts on 3 ranks"),
        ("moe-dispatch --ranks 2 --top-k 300", "top-300"),
        ("moe-dispatch --ranks 2 --hidden 200 -d fp8", "128"),
        ("moe-dispatch --ranks 2 -d f64", "bf16 or fp8"),
        (
            "moe-dispatch --ranks 64 --tokens 1000000 --hidden 8192 --experts 64 --top-k 1",
            "MiB",
        ),
    ] {
        let output = coll(line).output().unwrap();
        let complaint = complaint(&output);
        assert_eq!(output.status.code(), Some(2), "{line}: {complaint:?}");
        assert!(
            complaint.len() == 1 && complaint[0].contains(word),
            "{line}: {complaint:?}"
        );
        assert!(output.stdout.is_empty(), "{line}");
    }
    for line in [
        "dance --ranks 2",
        "allreduce -d f31",
        "allreduce -o mean",
        "allreduce --ranks 0",
        "allreduce -f 1",
    ] {
        let output = coll(line).output().unwrap();
        assert_eq!(output.status.code(), Some(2), "{line}: {}", stderr(&output));
    }
}

#[test]
fn a_plan_is_explained_and_drawn() {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("plan.svg");
    let mut command = coll("allreduce --ranks 3 -b 64K --algorithm ring --explain");
    let output = command.arg("--svg").arg(&file).output().unwrap();
    assert!(output.status.success(), "{}", stderr(&output));
    let text = String::from_utf8(output.stdout).unwrap();
    for word in ["formula[us]", "ring allreduce of 3 ranks in 3 blocks", "rank 2", "hops"] {
        assert!(text.contains(word), "{word}: {text}");
    }
    assert!(std::fs::read_to_string(&file).unwrap().starts_with("<svg"));
    let explained = json_of(coll("allreduce --ranks 2 -b 8 -e 8 --explain"));
    assert!(
        explained["results"][0]["predicted_us"].as_f64() > Some(0.0),
        "{explained}"
    );
}

#[test]
fn predictions_are_printed_beside_measurements() {
    let report = json_of(doorbell(
        "coll allreduce --ranks 2 -b 8 -e 4K -f 512 --simulate --measure",
    ));
    let lines = report["results"].as_array().unwrap();
    for bytes in [8, 4096] {
        let of_size: Vec<_> = lines.iter().filter(|line| line["bytes"] == bytes).collect();
        let named = |name| of_size.iter().any(|line| line["algorithm"] == name);
        assert!(named("ring") && named("tree") && named("one-shot"), "{report}");
        assert_eq!(
            of_size.iter().filter(|line| line["chosen"] == true).count(),
            1,
            "{report}"
        );
        let best = of_size.iter().map(|line| line["by_best"].as_f64().unwrap());
        assert_eq!(best.fold(f64::INFINITY, f64::min), 1.0);
    }
    for line in lines {
        for number in ["predicted_us", "measured_us", "ratio"] {
            assert!(line[number].as_f64().unwrap() > 0.0, "{line}");
        }
    }
    assert_eq!(
        (report["predictions"].as_u64(), report["sizes"].as_u64()),
        (Some(lines.len() as u64), Some(2))
    );
}

#[test]
fn larger_systems_are_simulated() {
    let report = json_of(coll(
        "allreduce --ranks 128 -b 1K -e 1M -f 1024 --simulate --leaf 4 --oversubscription 2",
    ));
    assert_eq!(report["link"], "simulated");
    let rows = report["results"].as_array().unwrap();
    let quickest: Vec<_> = rows.iter().filter(|row| row["quickest"] == true).collect();
    assert_eq!(quickest.len(), 2, "one of each size: {report}");
    assert!(
        rows.len() > 8 && rows.iter().all(|row| row["time_us"].as_f64() > Some(0.0)),
        "{report}"
    );
}

#[test]
fn ranks_of_a_launcher_find_each_other() {
    // If another process takes the port in between, the next of eight is tried.
    let port = TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port();
    let rank = |rank: u32| {
        let mut command = coll("allreduce -b 1000 -e 1000 -n 2 --device soft0 --json");
        command
            .env("RANK", rank.to_string())
            .env("WORLD_SIZE", "2")
            .env("LOCAL_RANK", rank.to_string())
            .env("MASTER_ADDR", "127.0.0.1")
            .env("MASTER_PORT", port.saturating_sub(1).to_string());
        command.spawn().unwrap()
    };
    let [first, second] = [rank(0), rank(1)].map(|child| child.wait_with_output().unwrap());
    assert!(
        first.status.success() && second.status.success(),
        "{} {}",
        stderr(&first),
        stderr(&second)
    );
    right(&serde_json::from_slice(&first.stdout).unwrap(), 1);
    assert!(second.stdout.is_empty(), "only rank 0 prints");
}

/// The ranks of a command, in order, once all show their rank in their command line.
fn ranks_of(parent: &Child, ranks: u32) -> Vec<Pid> {
    let deadline = Instant::now() + TIME_LIMIT;
    loop {
        let all: Vec<Option<Pid>> = (0..ranks).map(|rank| rank_of(parent.id(), rank)).collect();
        if let Some(all) = all.into_iter().collect() {
            return all;
        }
        assert!(Instant::now() < deadline, "the ranks do not start");
        thread::sleep(Duration::from_millis(5));
    }
}

fn rank_of(parent: u32, rank: u32) -> Option<Pid> {
    let wanted = format!("\0--rank\0{rank}\0");
    children_of(parent).into_iter().find(|pid| {
        let line = std::fs::read_to_string(format!("/proc/{pid}/cmdline"));
        line.is_ok_and(|line| line.ends_with(&wanted))
    })
}

fn gone(ranks: &[Pid]) {
    let deadline = Instant::now() + TIME_LIMIT;
    while ranks.iter().any(|&rank| is_running(rank)) {
        assert!(Instant::now() < deadline, "ranks are left");
        thread::sleep(Duration::from_millis(10));
    }
}

/// Starts a long test, and waits for its first row.
fn started(line: &str) -> (Child, Vec<Pid>) {
    let mut child = coll(line).spawn().unwrap();
    let ranks = ranks_of(&child, 3);
    let mut read = std::io::BufReader::new(child.stdout.take().unwrap());
    let mut text = String::new();
    while text.lines().last().is_none_or(|line| line.starts_with('#')) {
        let got = std::io::BufRead::read_line(&mut read, &mut text).unwrap();
        assert!(got > 0, "it ended: {text}");
    }
    // Further output is discarded, so that the pipe never blocks.
    thread::spawn(move || std::io::copy(&mut read, &mut std::io::sink()));
    (child, ranks)
}

const LONG: &str = "allreduce --ranks 3 -b 64 -e 64M -i 64 -n 200 -c 0 --deadline 20s";

#[test]
fn a_killed_rank_is_reported_by_all_others() {
    let (child, ranks) = started(LONG);
    kill(ranks[1], Signal::SIGKILL).unwrap();
    let output = child.wait_with_output().unwrap();
    let complaint = complaint(&output);
    assert_eq!(output.status.code(), Some(1), "{complaint:?}");
    for rank in [0, 2] {
        let own = format!("rank {rank}: ");
        let named = |line: &&String| line.contains(&own) && line.contains("rank 1");
        assert!(complaint.iter().any(|line| named(&line)), "{complaint:?}");
    }
    gone(&ranks);
}

#[test]
fn ranks_do_not_outlive_their_parent() {
    let (mut child, ranks) = started(LONG);
    child.kill().unwrap();
    child.wait().unwrap();
    gone(&ranks);
}

#[test]
fn an_interrupted_test_leaves_no_process() {
    let (child, ranks) = started(LONG);
    kill(Pid::from_raw(child.id() as i32), Signal::SIGINT).unwrap();
    let output = child.wait_with_output().unwrap();
    assert_eq!(output.status.code(), Some(130), "{}", stderr(&output));
    gone(&ranks);
}

#[test]
fn an_interrupted_test_prints_what_it_has() {
    let mut child = coll(LONG).arg("--json").spawn().unwrap();
    let ranks = ranks_of(&child, 3);
    // Time for the ranks to watch their stdin.
    thread::sleep(Duration::from_millis(500));
    kill(Pid::from_raw(child.id() as i32), Signal::SIGINT).unwrap();
    let mut printed = String::new();
    std::io::Read::read_to_string(&mut child.stdout.take().unwrap(), &mut printed).unwrap();
    let output = child.wait_with_output().unwrap();
    assert_eq!(output.status.code(), Some(130), "{}", stderr(&output));
    // A rank that had not started when its time was up prints nothing; output is never partial.
    if !printed.is_empty() {
        let report: Value = serde_json::from_str(&printed).unwrap();
        let results = report["results"].as_array().unwrap();
        assert!(
            results.iter().all(|row| row["time_us"].as_f64().unwrap() > 0.0),
            "{printed}"
        );
    }
    gone(&ranks);
}

fn with_gpus(line: &str) -> Command {
    let mut command = coll(line);
    command.arg("--gpu");
    command.envs(doorbell_cuda_standin::environment(
        doorbell_cuda_standin::ExecutionMode::Prompt,
        3,
    ));
    command
}

#[test]
fn operations_on_gpus_are_right_by_each_executor() {
    for executor in ["kernel", "copies", "staged"] {
        for operation in ["allreduce", "allgather", "reduce-scatter", "broadcast"] {
            let mut command = with_gpus(&format!("{operation} --ranks 2 -b 8 -e 64K -f 128 -n 2"));
            command.env("DOORBELL_GPU", format!("executor={executor}"));
            let report = json_of(command);
            right(&report, 2);
            assert_eq!(report["results"][0]["protocol"], executor);
            assert_eq!(report["memory"], if executor == "staged" { "staged" } else { "peer" });
        }
    }
    for (operation, by) in [("allreduce", "split"), ("broadcast", "split"), ("allgather", "kernel")] {
        let mut command = with_gpus(&format!("{operation} --ranks 2 -b 256K -e 256K -n 2 --graph"));
        command.env("DOORBELL_GPU", "executor=split");
        let report = json_of(command);
        right(&report, 1);
        assert_eq!(report["results"][0]["protocol"], by);
    }
    for executor in ["kernel", "staged"] {
        for operation in ["alltoallv", "sendrecv --group", "alltoall --group"] {
            let mut command = with_gpus(&format!("{operation} --ranks 2 -b 8 -e 64K -f 128 -n 2"));
            command.env("DOORBELL_GPU", format!("executor={executor},blocks=8"));
            let report = json_of(command);
            right(&report, 2);
            assert_eq!(report["results"][0]["protocol"], executor);
        }
    }
    right(
        &json_of(with_gpus("allreduce --ranks 2 -b 4K -e 4K -n 2 --graph -d bf16 -o all")),
        6,
    );
}

#[test]
fn dispatch_and_combine_on_gpus_are_correct_in_both_modes() {
    for (number, mode) in ["low-latency", "high-throughput"].into_iter().enumerate() {
        for (part, dtype) in [("moe-dispatch", "fp8"), ("moe-combine", "bf16")] {
            let skew = ["one-expert", "zipf"][number];
            let mut command = with_gpus(&format!(
                "{part} --ranks 3 --mode {mode} -d {dtype} --skew {skew} --tokens 1,33 --hidden 256 --experts 12 --top-k 3 -n 3"
            ));
            command.env("DOORBELL_GPU", "blocks=3");
            let report = json_of(command);
            right(&report, 2);
            assert_eq!((&report["test"], &report["memory"]), (&part.into(), &"peer".into()));
            let row = &report["results"][1];
            assert!(row["of_alltoallv"].as_f64().unwrap() > 0.0, "{row}");
            assert!(row["put_time_us"].is_null() && row["times_put"].is_null(), "{row}");
        }
    }
    let mut staged = with_gpus("moe-dispatch --ranks 2 --tokens 1 --hidden 256 --experts 4 --top-k 1");
    let output = staged.env("DOORBELL_GPU", "executor=staged").output().unwrap();
    assert_eq!(output.status.code(), Some(1), "{output:?}");
    assert!(
        complaint(&output)
            .iter()
            .any(|line| line.contains("expert parallelism on GPUs: the options")),
        "{output:?}"
    );
}

#[test]
fn ranks_share_gpus_where_there_are_fewer() {
    for (standin, executor, caveat) in [
        ("prompt,devices=1", "copies", "3 ranks share a GPU, time-sliced"),
        ("prompt,devices=2", "copies", "2 ranks share a GPU, time-sliced"),
    ] {
        let mut command = with_gpus("allreduce --ranks 3 -b 8 -e 64K -f 128 -n 2");
        command.env("DOORBELL_STANDIN", standin);
        let output = command.arg("--json").output().unwrap();
        let (stdout, stderr) = (
            String::from_utf8_lossy(&output.stdout),
            String::from_utf8_lossy(&output.stderr),
        );
        let report: Value = serde_json::from_str(&stdout).unwrap_or_else(|_| panic!("{stdout}{stderr}"));
        right(&report, 2);
        assert_eq!(report["results"][0]["protocol"], executor);
        assert_eq!(stderr.matches(caveat).count(), 1, "{stderr}");
    }
}

#[test]
fn a_killed_rank_releases_the_other_ranks_gpus() {
    let mut child = with_gpus("allreduce --ranks 3 -b 8K -e 8K -n 1000000 -c 0 --deadline 20s")
        .spawn()
        .unwrap();
    let ranks = ranks_of(&child, 3);
    // During an operation or before it: the others end in either case.
    thread::sleep(Duration::from_millis(500));
    kill(ranks[1], Signal::SIGKILL).unwrap();
    drop(child.stdout.take());
    let output = child.wait_with_output().unwrap();
    assert_eq!(output.status.code(), Some(1), "{output:?}");
    assert!(
        complaint(&output).iter().any(|line| line.contains("rank 1")),
        "{output:?}"
    );
    gone(&ranks);
}

#[test]
fn unsupported_gpu_options_are_refused() {
    for line in [
        "allreduce --ranks 2 --gpu --explain",
        "allreduce --ranks 2 --gpu --group",
        "allreduce --ranks 2 --graph",
    ] {
        let output = coll(line).output().unwrap();
        assert_eq!(output.status.code(), Some(2), "{output:?}");
    }
}
