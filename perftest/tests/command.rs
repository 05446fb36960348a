//! The `doorbell` command as scripts see it: what it prints where, and how it exits.
//!
//! Every test runs the real binary on the userspace device, on loopback. They share an address, which does not make
//! them disturb each other.

#![forbid(unsafe_code)]

mod common;

use std::fs::File;
use std::io::{BufRead, BufReader, Read, Write};
use std::net::{TcpListener, TcpStream, UdpSocket};
use std::process::{Child, ChildStderr, Output, Stdio};
use std::thread;
use std::time::{Duration, Instant};

use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use serde_json::Value;

use self::common::{complaint, doorbell, json_of, stderr};

fn run(line: &str) -> Output {
    doorbell(line).output().expect("the binary runs")
}

/// Runs a test that has to succeed, and gives its JSON object.
fn json(line: &str) -> Value {
    json_of(doorbell(line))
}

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

/// A server that waits for a peer, and the port where it does.
struct Server {
    child: Child,
    port: u16,
}

impl Server {
    fn start(line: &str) -> Server {
        let mut child = doorbell(&format!("{line} --server --port 0"))
            .spawn()
            .expect("the binary runs");
        let mut stderr = BufReader::new(child.stderr.take().expect("a pipe"));
        let mut line = String::new();
        stderr.read_line(&mut line).expect("a line");
        let port = line.trim().rsplit(':').next().and_then(|port| port.parse().ok());
        child.stderr = Some(stderr.into_inner());
        Server {
            child,
            port: port.unwrap_or_else(|| panic!("no port in {line:?}")),
        }
    }

    /// How it ended, and what it said, warnings left out.
    fn end(mut self) -> (Option<i32>, String) {
        let status = wait(&mut self.child);
        let mut said = String::new();
        self.child
            .stderr
            .take()
            .expect("a pipe")
            .read_to_string(&mut said)
            .expect("text");
        said = said
            .lines()
            .filter(|line| !line.starts_with("doorbell: warning:"))
            .map(|line| format!("{line}\n"))
            .collect();
        (status, said)
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// A client that runs until something stops it.
struct Client {
    child: Child,
    stderr: BufReader<ChildStderr>,
    heard: String,
}

impl Client {
    /// Starts one, and lets it measure for a moment. Its warnings come when the peer has accepted the test; after that it waits in the kernel until both are connected, and has the
    /// processor when it measures. So that moment is of its processor time: by the clock it may be over, on a busy machine, before anything is connected.
    fn start(line: &str) -> Client {
        let mut child = doorbell(line).spawn().expect("the binary runs");
        let mut stderr = BufReader::new(child.stderr.take().expect("a pipe"));
        let mut heard = String::new();
        stderr.read_line(&mut heard).expect("a line");
        assert!(heard.contains("warning"), "{heard}");
        let (before, deadline) = (ticks_of(child.id()), Instant::now() + Duration::from_secs(60));
        // In hundredths of a second.
        while ticks_of(child.id()) < before + 20 {
            if let Some(status) = child.try_wait().expect("it can be waited for") {
                stderr.read_to_string(&mut heard).expect("text");
                panic!("it ended by itself, {status}: {heard}");
            }
            assert!(Instant::now() < deadline, "it does not measure");
            thread::sleep(Duration::from_millis(5));
        }
        Client { child, stderr, heard }
    }

    fn end(mut self) -> Output {
        self.stderr.read_to_string(&mut self.heard).expect("text");
        let mut output = self.child.wait_with_output().expect("it ends");
        output.stderr = self.heard.into_bytes();
        output
    }
}

/// The processor time that a process has had, in clock ticks (proc_pid_stat(5)); no more when it has ended.
fn ticks_of(pid: u32) -> u64 {
    let stat = std::fs::read_to_string(format!("/proc/{pid}/stat")).expect("it is not collected yet");
    // pid (name) state ppid …; the name may hold anything. What it had itself is fields 14 and 15.
    let fields = stat.rsplit(')').next().unwrap_or_default().split_whitespace();
    fields
        .skip(11)
        .take(2)
        .filter_map(|field| field.parse::<u64>().ok())
        .sum()
}

/// Waits for a process, not for ever.
fn wait(child: &mut Child) -> Option<i32> {
    let deadline = Instant::now() + Duration::from_secs(60);
    loop {
        if let Some(status) = child.try_wait().expect("it can be waited for") {
            return status.code();
        }
        assert!(Instant::now() < deadline, "the process does not end");
        thread::sleep(Duration::from_millis(5));
    }
}

fn signal(child: &Child, signal: Signal) {
    kill(Pid::from_raw(i32::try_from(child.id()).expect("a process id")), signal).expect("the process is there");
}

#[test]
fn every_bandwidth_test_prints_one_object_with_the_contracts_keys() {
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
fn every_latency_test_prints_one_object_with_the_contracts_keys() {
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
fn every_byte_is_verified_while_packets_are_lost_and_spoilt() {
    let faults = "--drop 0.05 --duplicate 0.02 --reorder 0.02 --corrupt 0.02 --seed 7 --timeout 14";
    for operation in ["write", "read", "send", "atomic"] {
        let size = if operation == "atomic" { 8 } else { 9001 };
        for (kind, more) in [("bw", "-q 2 --tx-depth 8 --post-list 3 -n 60"), ("lat", "-n 30")] {
            let report = json(&format!("{kind} {operation} -s {size} --verify {more} {faults}"));
            assert_eq!(report["results"][0]["bytes"], size, "{kind} {operation}");
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
    assert!(stderr(&output).contains("not hardware"), "{}", stderr(&output));
}

#[test]
fn two_commands_find_each_other() {
    let server = Server::start("bw send");
    let report = json(&format!(
        "bw send 127.0.0.1 --port {} -n 100 --verify -d soft0",
        server.port
    ));
    assert_eq!(report["results"][0]["iterations"], 100);
    assert_eq!(server.end().0, Some(0));
}

#[test]
fn ends_that_run_different_tests_both_say_so() {
    let server = Server::start("lat write");
    let output = run(&format!("bw write localhost --port {} -d soft0", server.port));
    let (status, said) = server.end();
    assert_eq!((output.status.code(), status), (Some(1), Some(1)));
    for said in [complaint(&output).join(""), said] {
        assert!(
            said.contains("'doorbell lat write'") && said.contains("'doorbell bw write'"),
            "{said}"
        );
    }
}

/// With these timeouts, eight of 134 ms, a peer that waits for a processor on a busy machine is not given up.
#[test]
fn a_killed_server_is_named_and_ends_the_test() {
    for line in ["bw write -D 60", "lat send -D 60"] {
        let mut server = Server::start(line.split(" -").next().unwrap());
        let client = Client::start(&format!(
            "{line} 127.0.0.1 --port {} -d soft0 --timeout 15",
            server.port
        ));
        server.child.kill().unwrap();
        let killed = Instant::now();
        let output = client.end();
        assert_eq!(output.status.code(), Some(1), "{}", stderr(&output));
        assert!(killed.elapsed() < Duration::from_secs(20));
        let complaint = complaint(&output);
        assert_eq!(complaint.len(), 1, "{complaint:?}");
        assert!(
            complaint[0].contains("peer 127.0.0.") && complaint[0].contains("queue pair 0x"),
            "{complaint:?}"
        );
    }
}

#[test]
fn a_killed_client_is_named_and_ends_the_server() {
    for line in ["bw write", "bw send"] {
        let server = Server::start(line);
        let mut client = Client::start(&format!("{line} 127.0.0.1 --port {} -d soft0 -D 60", server.port));
        client.child.kill().unwrap();
        client.child.wait().unwrap();
        let (status, said) = server.end();
        assert_eq!(status, Some(1), "{said}");
        assert!(
            said.contains("peer 127.0.0.") && said.contains("queue pair 0x"),
            "{said}"
        );
        assert!(!said.contains("panicked"), "{said}");
    }
}

/// The processes whose parent is this one.
fn children_of(parent: u32) -> Vec<i32> {
    let stat = |entry: std::fs::DirEntry| {
        let text = std::fs::read_to_string(entry.path().join("stat")).ok()?;
        // pid (name) state ppid …; the name may hold anything.
        let ppid: u32 = text.rsplit(')').next()?.split_whitespace().nth(1)?.parse().ok()?;
        (ppid == parent)
            .then(|| entry.file_name().to_string_lossy().parse().ok())
            .flatten()
    };
    std::fs::read_dir("/proc")
        .unwrap()
        .filter_map(|entry| stat(entry.ok()?))
        .collect()
}

#[test]
fn a_killed_child_ends_the_test() {
    let client = Client::start("bw write -D 60 --timeout 15");
    let children = children_of(client.child.id());
    assert_eq!(children.len(), 1);
    kill(Pid::from_raw(children[0]), Signal::SIGKILL).unwrap();
    let output = client.end();
    assert_eq!(output.status.code(), Some(1));
    let complaint = complaint(&output);
    assert!(
        complaint.len() == 1 && complaint[0].contains("peer 127.0.0."),
        "{complaint:?}"
    );
}

#[test]
fn the_child_does_not_outlive_a_killed_parent() {
    let mut client = Client::start("bw send -D 60");
    let children = children_of(client.child.id());
    assert_eq!(children.len(), 1);
    client.child.kill().unwrap();
    client.child.wait().unwrap();
    let deadline = Instant::now() + Duration::from_secs(20);
    // Signal 0 asks whether it is there.
    while kill(Pid::from_raw(children[0]), None).is_ok() && !is_zombie(children[0]) {
        assert!(Instant::now() < deadline, "the child lives on");
        thread::sleep(Duration::from_millis(10));
    }
}

/// Ended, and only not yet collected by whoever inherited it.
fn is_zombie(pid: i32) -> bool {
    std::fs::read_to_string(format!("/proc/{pid}/stat")).is_ok_and(|stat| {
        stat.rsplit(')')
            .next()
            .is_some_and(|rest| rest.trim_start().starts_with('Z'))
    })
}

#[test]
fn an_interrupted_test_prints_what_it_has_and_exits_130() {
    let client = Client::start("bw write -s 64 -D 60 --json");
    signal(&client.child, Signal::SIGINT);
    let output = client.end();
    assert_eq!(output.status.code(), Some(130), "{}", stderr(&output));
    let report: Value = serde_json::from_slice(&output.stdout).expect("one object");
    assert!(report["results"][0]["iterations"].as_u64() > Some(0), "{report}");
}

/// Says these messages to whoever waits on a port, and gives what comes back until the other side closes.
fn say(port: u16, messages: &[&str]) -> String {
    let mut stream = TcpStream::connect(("127.0.0.1", port)).unwrap();
    stream.set_read_timeout(Some(Duration::from_secs(20))).unwrap();
    stream.write_all(b"DOORBELL").unwrap();
    for message in messages {
        stream.write_all(&(message.len() as u32).to_be_bytes()).unwrap();
        stream.write_all(message.as_bytes()).unwrap();
    }
    let mut heard = Vec::new();
    // What was heard before a reset counts as well.
    let _ = stream.read_to_end(&mut heard);
    String::from_utf8_lossy(&heard).into_owned()
}

const HELLO: &str = r#"{"hello":{"protocol":1,"version":"0"}}"#;

#[test]
fn a_child_serves_nobody_but_its_parent() {
    let mut child = doorbell("bw write --port 0 --server --child")
        .stdin(Stdio::piped())
        .spawn()
        .unwrap();
    let mut stdin = child.stdin.take().unwrap();
    stdin.write_all(b"secret\n").unwrap();
    let mut line = String::new();
    BufReader::new(child.stdout.take().unwrap())
        .read_line(&mut line)
        .unwrap();
    let port = serde_json::from_str::<Value>(&line).unwrap()["port"].as_u64().unwrap();
    let heard = say(u16::try_from(port).unwrap(), &[HELLO]);
    assert!(heard.contains("not the process that started this one"), "{heard}");
    assert_eq!(child.try_wait().unwrap(), None);
    drop(stdin);
    assert_eq!(wait(&mut child), Some(1));
}

#[test]
fn nonsense_from_a_peer_is_one_line_and_no_panic() {
    let plan = |sizes: &str, more: &str| {
        format!(
            r#"{{"plan":{{"kind":"bw","verb":"write","sizes":{sizes},"extent":{{"iterations":1}},"warmup":0,"qps":1,"tx_depth":1,"rx_depth":2,"post_list":1,"cq_mod":1,"inline":0,"inline_required":false,"mtu":null,"verify":false,"seed":1,"timeout":14,"retry":7{more}}}}}"#
        )
    };
    let setup = r#"{"setup":{"bytes":64,"lanes":[{"endpoint":"zz","slots":1}]}}"#;
    for (messages, hint) in [
        (
            vec![HELLO.to_owned(), plan("[1152921504606846976]", "")],
            "sizes go from",
        ),
        (vec![HELLO.to_owned(), plan("[]", "")], "1 to 64"),
        (vec![HELLO.to_owned(), plan("[64]", r#","extra":1"#)], "not a message"),
        (
            vec![HELLO.to_owned(), plan("[64]", ""), setup.to_owned()],
            "makes no sense",
        ),
        (vec![HELLO.to_owned(), r#""bye""#.to_owned()], "'plan' belongs"),
    ] {
        let server = Server::start("bw write -d soft0");
        let messages: Vec<_> = messages.iter().map(String::as_str).collect();
        say(server.port, &messages);
        let (status, said) = server.end();
        assert_eq!(status, Some(1), "{said}");
        assert!(
            said.contains(hint) && said.lines().count() == 1 && !said.contains("panicked"),
            "{said}"
        );
    }
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
        ("bw write no.such.host.invalid -d soft0", &["no.such.host.invalid"]),
        ("bw write -s 4X", none),
        ("bw teleport", none),
        ("tpoo", none),
    ] {
        let output = run(line);
        assert_eq!(output.status.code(), Some(2), "{line}: {}", stderr(&output));
        assert!(output.stdout.is_empty(), "{line}");
        let said = complaint(&output);
        if !hints.is_empty() {
            assert_eq!(said.len(), 1, "{line}: {said:?}");
        }
        for hint in hints {
            assert!(said[0].contains(hint), "{line}: {said:?}");
        }
        assert!(!stderr(&output).contains("panicked"), "{line}");
    }
}

#[test]
fn what_stands_in_the_way_is_one_line_and_exit_1() {
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
            format!("bw write --soft-address 127.0.0.1 --soft-port {udp_port}"),
            udp_port.to_string(),
        ),
        (
            "bw write --soft-address 192.0.2.1,192.0.2.2".to_owned(),
            "192.0.2.1".to_owned(),
        ),
        (
            "bw write 127.0.0.1 --port 1 -d soft0".to_owned(),
            "cannot reach peer 127.0.0.1 port 1".to_owned(),
        ),
    ] {
        let output = run(&line);
        assert_eq!(output.status.code(), Some(1), "{line}: {}", stderr(&output));
        let said = complaint(&output);
        assert!(said.len() == 1 && said[0].contains(&hint), "{line}: {said:?}");
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
fn the_environment_is_heard() {
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
fn messages_may_lie_in_private_memory() {
    for line in ["bw write", "bw read", "bw send", "lat read -s 8K"] {
        let size = if line.contains("-s") { "" } else { " -s 64K" };
        json(&format!("{line}{size} -n 50 --verify --private-memory"));
        json(&format!("{line}{size} -n 50 --verify"));
    }
    // So many queue pairs have no descriptors for shared memory.
    json("bw write -s 4K -n 2 --qps 65");
}

#[test]
fn the_device_is_held_against_the_limits() {
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
    assert_eq!(device["goal"]["ratio_at_least"], 0.8);
    assert_eq!(device["met"], ratio >= 0.8);
    assert_eq!(results[2]["against"], "elapsed_time");

    let unknown = run("limits --only speed");
    assert_eq!(unknown.status.code(), Some(2));
    assert!(stderr(&unknown).contains("udp_gso"), "{}", stderr(&unknown));
}

#[test]
fn help_has_examples_and_only_what_there_is() {
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
