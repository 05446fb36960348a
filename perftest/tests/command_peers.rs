//! `doorbell bw` and `lat` between two processes: servers and clients that are killed, interrupted
//! or misbehave.

#![forbid(unsafe_code)]

mod common;

use std::fs;
use std::io::{BufRead, BufReader, Read, Write};
use std::net::TcpStream;
use std::process::{Child, ChildStderr, Command, Output, Stdio};
use std::thread;
use std::time::{Duration, Instant};

use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use serde_json::Value;

use self::common::{children_of, complaint, doorbell, is_running, json, run, stderr, ticks_of};

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

    /// Its exit status and stderr, without warnings.
    fn end(mut self) -> (Option<i32>, String) {
        let status = wait(&mut self.child);
        let mut output = String::new();
        self.child
            .stderr
            .take()
            .expect("a pipe")
            .read_to_string(&mut output)
            .expect("text");
        output = output
            .lines()
            .filter(|line| !line.starts_with("doorbell: warning:"))
            .map(|line| format!("{line}\n"))
            .collect();
        (status, output)
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

struct Client {
    child: Child,
    stderr: BufReader<ChildStderr>,
    received: String,
}

impl Client {
    /// Returns while it measures, judged by its CPU time: until both ends are connected it sleeps.
    fn start(line: &str) -> Client {
        // The first warning is printed once the test is accepted.
        let mut child = doorbell(&format!("{line} -v")).spawn().expect("the binary runs");
        let mut stderr = BufReader::new(child.stderr.take().expect("a pipe"));
        let mut received = String::new();
        stderr.read_line(&mut received).expect("a line");
        assert!(received.contains("warning"), "{received}");
        let (before, deadline) = (ticks_of(child.id()), Instant::now() + Duration::from_secs(60));
        // In ticks of 10 ms.
        while ticks_of(child.id()) < before + 20 {
            if let Some(status) = child.try_wait().expect("it can be waited for") {
                stderr.read_to_string(&mut received).expect("text");
                panic!("it ended by itself, {status}: {received}");
            }
            assert!(Instant::now() < deadline, "it does not measure");
            thread::sleep(Duration::from_millis(5));
        }
        Client {
            child,
            stderr,
            received,
        }
    }

    fn end(mut self) -> Output {
        self.stderr.read_to_string(&mut self.received).expect("text");
        let mut output = self.child.wait_with_output().expect("it ends");
        output.stderr = self.received.into_bytes();
        output
    }
}

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
fn two_commands_connect() {
    let server = Server::start("bw send");
    let report = json(&format!(
        "bw send 127.0.0.1 --port {} -n 100 --verify -d soft0",
        server.port
    ));
    assert_eq!(report["results"][0]["iterations"], 100);
    assert_eq!(server.end().0, Some(0));
}

#[test]
fn ends_with_different_tests_both_report_it() {
    let server = Server::start("lat write");
    let output = run(&format!("bw write localhost --port {} -d soft0", server.port));
    // It continues to wait for its client.
    signal(&server.child, Signal::SIGINT);
    let (status, server_output) = server.end();
    assert_eq!((output.status.code(), status), (Some(1), Some(130)));
    for text in [complaint(&output).join(""), server_output] {
        assert!(
            text.contains("'doorbell lat write'") && text.contains("'doorbell bw write'"),
            "{text}"
        );
    }
}

/// With these timeouts, eight of 134 ms, a peer without a CPU on a busy machine does not exceed the
/// retry count.
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
        let (status, output) = server.end();
        assert_eq!(status, Some(1), "{output}");
        assert!(
            output.contains("peer 127.0.0.") && output.contains("queue pair 0x"),
            "{output}"
        );
        assert!(!output.contains("panicked"), "{output}");
    }
}

#[test]
fn a_killed_child_ends_the_test() {
    let client = Client::start("bw write -D 60 --timeout 15");
    let children = children_of(client.child.id());
    assert_eq!(children.len(), 1);
    kill(children[0], Signal::SIGKILL).unwrap();
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
    while is_running(children[0]) {
        assert!(Instant::now() < deadline, "the child lives on");
        thread::sleep(Duration::from_millis(10));
    }
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

/// A connection that has sent the preamble and these messages.
fn connect(port: u16, messages: &[&str]) -> TcpStream {
    let mut stream = TcpStream::connect(("127.0.0.1", port)).unwrap();
    stream.set_read_timeout(Some(Duration::from_secs(20))).unwrap();
    let mut bytes = b"DOORBELL".to_vec();
    for message in messages {
        bytes.extend((message.len() as u32).to_be_bytes());
        bytes.extend(message.as_bytes());
    }
    // A server may refuse the first part, and close.
    let _ = stream.write_all(&bytes);
    stream
}

fn send(port: u16, messages: &[&str]) -> String {
    let mut stream = connect(port, messages);
    let mut received = Vec::new();
    // What was received before a reset counts as well.
    let _ = stream.read_to_end(&mut received);
    String::from_utf8_lossy(&received).into_owned()
}

const HELLO: &str = r#"{"hello":{"protocol":2,"version":"0"}}"#;

#[test]
fn a_child_serves_only_its_parent() {
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
    let received = send(u16::try_from(port).unwrap(), &[HELLO]);
    assert!(received.contains("not the process that started this one"), "{received}");
    assert_eq!(child.try_wait().unwrap(), None);
    drop(stdin);
    assert_eq!(wait(&mut child), Some(1));
}

fn plan(sizes: &str, extent: &str, qps: u32) -> String {
    format!(
        r#"{{"plan":{{"kind":"bw","verb":"write","sizes":{sizes},"extent":{extent},"warmup":0,"qps":{qps},"tx_depth":1,"rx_depth":2,"post_list":1,"cq_mod":1,"inline":0,"inline_required":false,"mtu":null,"verify":false,"seed":1,"timeout":14,"retry":7}}}}"#
    )
}

const ONCE: &str = r#"{"iterations":1}"#;

#[test]
fn refused_clients_are_a_line_each_and_the_next_is_served() {
    let refused = [
        (plan("[1152921504606846976]", ONCE, 1), "sizes go from"),
        (plan("[]", ONCE, 1), "1 to 64"),
        (plan(r#"[64],"extra":1"#, ONCE, 1), "not a message"),
        (r#""bye""#.to_owned(), "'plan' belongs"),
        (
            format!(r#"{{"failed":"{}"}}"#, "x".repeat(1 << 16)),
            "over the limit of 16384",
        ),
        // Beyond what this server allows.
        (plan("[1073741824]", ONCE, 4), "--client-memory"),
        (plan("[64]", r#"{"seconds":86400}"#, 1), "--client-time"),
        (plan("[64,64,64]", r#"{"seconds":1800}"#, 1), "--client-time"),
        (plan("[64]", ONCE, 1024), "--client-qps"),
    ];
    let server = Server::start("bw write -d soft0");
    for (message, hint) in &refused {
        let received = send(server.port, &[HELLO, message]);
        assert!(
            received.contains(hint) && received.lines().count() == 1,
            "{hint}: {received}"
        );
    }
    let client = run(&format!("bw write -d soft0 -n 10 127.0.0.1 --port {}", server.port));
    assert!(client.status.success(), "{}", stderr(&client));
    let (status, output) = server.end();
    assert_eq!(status, Some(0), "{output}");
    let lines: Vec<_> = output.lines().collect();
    assert_eq!(lines.len(), refused.len(), "{output}");
    for (line, (_, hint)) in lines.iter().zip(&refused) {
        assert!(
            line.starts_with("doorbell: refused 127.0.0.1:") && line.contains(hint),
            "{line}"
        );
    }
}

/// Of another process (prlimit(1)).
fn limit_descriptors(process: u32, limit: usize) {
    let line = [format!("--pid={process}"), format!("--nofile={limit}:")];
    assert!(Command::new("prlimit").args(line).status().unwrap().success());
}

#[test]
fn a_server_without_descriptors_drops_the_oldest_connection() {
    let server = Server::start("bw write -d soft0");
    let process = server.child.id();
    let open = fs::read_dir(format!("/proc/{process}/fd")).unwrap().count();
    limit_descriptors(process, open + 4);
    let mut silent: Vec<_> = (0..20).map(|_| connect(server.port, &[])).collect();
    // What the server has sent before.
    silent[0].read_to_end(&mut Vec::new()).unwrap();
    drop(silent);
    limit_descriptors(process, 1024);
    let client = run(&format!("bw write -d soft0 -n 10 127.0.0.1 --port {}", server.port));
    assert!(client.status.success(), "{}", stderr(&client));
    let (status, output) = server.end();
    assert_eq!(status, Some(0), "{output}");
}

#[test]
fn a_client_that_sends_no_plan_holds_no_server() {
    let server = Server::start("bw write -d soft0");
    let mut silent = connect(server.port, &[HELLO]);
    // The preamble and the first byte of the server's hello, which the next client comes after.
    silent.read_exact(&mut [0; 9]).unwrap();
    let client = run(&format!("bw write -d soft0 -n 10 127.0.0.1 --port {}", server.port));
    assert!(client.status.success(), "{}", stderr(&client));
    assert_eq!(server.end(), (Some(0), String::new()));
}

#[test]
fn nonsense_after_the_plan_ends_the_server_with_one_line() {
    let server = Server::start("bw write -d soft0");
    let setup = r#"{"setup":{"bytes":64,"qps":[{"endpoint":"zz","slots":1}]}}"#;
    send(server.port, &[HELLO, &plan("[64]", ONCE, 1), setup]);
    let (status, output) = server.end();
    assert_eq!(status, Some(1), "{output}");
    assert!(
        output.contains("makes no sense") && output.lines().count() == 1,
        "{output}"
    );
}

#[test]
fn a_server_serves_what_its_options_allow() {
    let server = Server::start("bw write -d soft0 --client-qps 130 --client-memory 2G --client-time 86400");
    let line = format!("bw write -d soft0 -q 130 -n 10 127.0.0.1 --port {}", server.port);
    let client = run(&line);
    assert!(client.status.success(), "{}", stderr(&client));
    assert_eq!(server.end().0, Some(0));
}
