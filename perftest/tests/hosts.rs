//! Two hosts: network namespaces joined by a veth pair, whose userspace devices have UDP alone.

#![forbid(unsafe_code)]

mod common;
#[path = "../../softroce/device/tests/common/namespace.rs"]
mod namespace;

use std::fs;
use std::path::Path;
use std::process::{Child, Command, Output, Stdio};
use std::thread;
use std::time::Duration;

use self::common::server::Server;
use self::common::{complaint, doorbell, json_of, run};

const HERE: &str = "10.77.0.1";
const THERE: &str = "10.77.0.2";
const HERE_MAC: &str = "02:00:00:00:00:01";
const THERE_MAC: &str = "02:00:00:00:00:02";

/// The other host: the network namespace of a process that ends with this one.
struct Host(Child);

impl Host {
    /// `None` where ip(8) is not installed.
    fn joined() -> Option<Self> {
        let mut process = Command::new("unshare");
        process
            .args(["--net", "cat"])
            .stdin(Stdio::piped())
            .stdout(Stdio::null());
        let host = Self(process.spawn().expect("a namespace is permitted here"));
        let id = host.0.id().to_string();
        let namespace = |process: &str| fs::read_link(format!("/proc/{process}/ns/net")).expect("a process");
        eventually("a namespace of its own", || namespace(&id) != namespace("self"));
        let configured = namespace::configure(&[
            "link set lo up",
            &format!("link add v0 address {HERE_MAC} type veth peer name v1 address {THERE_MAC} netns {id}"),
            &format!("address add {HERE}/24 dev v0"),
            "link set v0 up",
            // A full queue drops ARP too.
            &format!("neigh add {THERE} lladdr {THERE_MAC} dev v0 nud permanent"),
        ]);
        if !configured {
            return None;
        }
        host.ip("link set lo up");
        host.ip(&format!("address add {THERE}/24 dev v1"));
        host.ip("link set v1 up");
        host.ip(&format!("neigh add {HERE} lladdr {HERE_MAC} dev v1 nud permanent"));
        // The kernel's link watcher runs up to a second later.
        let is_up = |mut ip: Command| printed(ip.args(["-o", "link"])).matches("state UP").count() == 1;
        eventually("a link that is up", || {
            is_up(Command::new("ip")) && is_up(host.command("ip"))
        });
        Some(host)
    }

    fn command(&self, program: impl AsRef<std::ffi::OsStr>) -> Command {
        let mut command = Command::new("nsenter");
        command
            .arg("--net")
            .arg(format!("--target={}", self.0.id()))
            .arg("--")
            .arg(program);
        command
    }

    fn ip(&self, line: &str) {
        let status = self.command("ip").args(line.split(' ')).status().expect("started");
        assert!(status.success(), "ip {line}");
    }

    /// A server there, which has printed its port.
    fn server(&self, line: &str) -> Server {
        let outside = doorbell(&format!(
            "{line} --port 0 --bind {THERE} --device soft0 --address {THERE}"
        ));
        let mut inside = self.command(outside.get_program());
        inside.args(outside.get_args()).stdin(Stdio::null());
        for (name, _) in outside.get_envs() {
            inside.env_remove(name);
        }
        Server::start(inside)
    }
}

impl Drop for Host {
    fn drop(&mut self) {
        // It reads its stdin to the end.
        drop(self.0.stdin.take());
        self.0.wait().expect("it has ended");
    }
}

fn eventually(what: &str, is_so: impl Fn() -> bool) {
    let came = (0..1000).any(|_| {
        thread::sleep(Duration::from_millis(10));
        is_so()
    });
    assert!(came, "{what}: not within 10 s");
}

fn printed(command: &mut Command) -> String {
    let output = command.output().expect("started");
    assert!(output.status.success(), "{command:?}: {output:?}");
    String::from_utf8(output.stdout).expect("text")
}

/// Bytes that have arrived by the link.
fn received() -> u64 {
    let devices = fs::read_to_string("/proc/net/dev").expect("a list");
    let link = devices.lines().find_map(|line| line.trim().strip_prefix("v0:"));
    let first = link.and_then(|counters| counters.split_whitespace().next());
    first.expect("the link").parse().expect("a number")
}

fn is_one_line(output: &Output, part: &str) {
    let complaint = complaint(output);
    assert_eq!(output.status.code(), Some(1), "{complaint:?}");
    assert!(complaint.len() == 1 && complaint[0].contains(part), "{complaint:?}");
}

fn from(server: &Server) -> String {
    format!(
        "bw file --from {THERE} --port {} --device soft0 --address {HERE} data",
        server.port
    )
}

#[test]
fn a_served_file_arrives_whole_also_over_a_link_that_loses_packets() {
    namespace::run_inside("a_file_of_another_host");
}

#[test]
#[ignore = "started by a_served_file_arrives_whole_also_over_a_link_that_loses_packets"]
fn a_file_of_another_host() {
    /// Of no whole block, and no whole packet.
    const LEN: usize = (4 << 20) + 4321;
    let Some(host) = Host::joined() else { return };
    let folder = tempfile::tempdir().expect("a folder");
    let [file, other] = ["data", "other"].map(|name| folder.path().join(name).display().to_string());
    let mut bytes: Vec<u8> = (0..LEN).map(|at| (at * 7 + at / 300) as u8).collect();
    fs::write(&file, &bytes).expect("a file");
    bytes[LEN - 1] ^= 1;
    fs::write(&other, &bytes).expect("a file");

    let arrived = ["", "--drop 0.01"].map(|loss| {
        let mut server = host.server(&format!("bw file --serve {file} {loss}"));
        let client = format!("{} {loss} --block 64K --beside", from(&server));
        let before = received();
        let report = json_of(doorbell(&format!("{client} {file} -n 2")));
        assert_eq!((&report["link"], &report["bytes"]), (&"soft-udp".into(), &LEN.into()));
        // The first read and the last are compared, each of the whole file.
        let line = server.line();
        assert!(
            line.ends_with(&format!(" has left: {} bytes were sent", 3 * LEN)),
            "{line}"
        );
        let arrived = received() - before;
        is_one_line(
            &run(&format!("{client} {other}")),
            &format!("wrong data at offset {}", LEN - 1),
        );
        arrived
    });
    assert!(arrived[0] > 3 * LEN as u64, "{arrived:?}");
    assert!(arrived[1] > arrived[0], "what is lost is sent again: {arrived:?}");
}

#[test]
fn a_server_or_host_that_is_gone_is_one_line_of_the_reader() {
    namespace::run_inside("an_end_of_another_host");
}

#[test]
#[ignore = "started by a_server_or_host_that_is_gone_is_one_line_of_the_reader"]
fn an_end_of_another_host() {
    let Some(host) = Host::joined() else { return };
    let [served, own] = [(); 2].map(|()| tempfile::tempdir().expect("a folder"));
    let file = served.path().join("data");
    let created = fs::File::create(&file).and_then(|file| file.set_len(64 << 20));
    created.expect("a file");
    let interrupted = |act: &dyn Fn(&mut Server)| {
        let mut server = host.server(&format!("bw file --serve {}", file.display()));
        let mut client = doorbell(&format!("{} -n 1000", from(&server)));
        let output = server.interrupted(client.current_dir(own.path()), act);
        is_one_line(&output, "data: 67108864 bytes at offset 0: ");
        assert!(is_empty(own.path()) && output.stdout.is_empty(), "{output:?}");
        output
    };
    interrupted(&Server::kill);
    // It is silent: no end of the TCP connection arrives. Well before the time for an answer.
    let output = interrupted(&|_| host.ip(&format!("address del {THERE}/24 dev v1")));
    is_one_line(&output, " has left, and sends nothing more");
}

fn is_empty(folder: &Path) -> bool {
    fs::read_dir(folder).expect("a folder").next().is_none()
}

#[test]
fn a_bounded_queue_drops_less_under_delay_control_with_no_less_goodput() {
    namespace::run_inside("by_turns_over_a_bounded_queue");
}

/// The queue is the kernel's (tbf with a limit), drops at its tail and marks nothing.
#[test]
#[ignore = "started by a_bounded_queue_drops_less_under_delay_control_with_no_less_goodput"]
fn by_turns_over_a_bounded_queue() {
    let Some(host) = Host::joined() else { return };
    // So that the queue takes packets, not GSO runs.
    assert!(namespace::configure(&["link set v0 gso_max_segs 1"]));
    let queue = "qdisc replace dev v0 root tbf rate 100mbit burst 20000 limit 100000";
    let tc = |line: &str| Command::new("tc").args(line.split(' ')).output();
    if !tc(queue).is_ok_and(|output| output.status.success()) {
        return println!("skipped: tc(8) is not installed, or the kernel has no tbf");
    }
    let (mut goodput, mut drops) = ([0.0_f64; 2], [0; 2]);
    for turn in 0..6 {
        let which = turn % 2;
        // An ACK timeout of 1 s, as a busy machine may not run the other end for half a second.
        let options = format!(
            "--link udp --timeout 18 --congestion {}",
            ["none", "delay,line=1Gb,min=5Mb"][which]
        );
        let before = dropped();
        let server = host.server(&format!("bw write --server {options}"));
        let client = format!(
            "bw write {THERE} --port {} --device soft0 --address {HERE} {options} -s 64K -n 50 --qps 4",
            server.port
        );
        let report = json_of(doorbell(&client));
        let rate = report["results"][0]["bw_avg_bytes_per_s"].as_f64().expect("a rate");
        // The best turn, as other work on the machine only slows.
        goodput[which] = rate.max(goodput[which]);
        drops[which] += dropped() - before;
    }
    println!("none, delay: {goodput:.0?} bytes/s, {drops:?} packets dropped");
    assert!(drops[0] > 0 && drops[1] < drops[0] / 10, "{drops:?}");
    assert!(goodput[1] >= goodput[0], "{goodput:?}");
}

/// Packets that the queue has dropped.
fn dropped() -> u64 {
    let text = printed(Command::new("tc").args(["-s", "qdisc", "show", "dev", "v0"]));
    let (_, count) = text.split_once("(dropped ").expect("a counter");
    count.split(',').next().expect("a number").parse().expect("a number")
}
