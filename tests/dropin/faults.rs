//! Faults of one device among several: `doorbell run --rails`, `--down` and `--slow`.

use std::os::unix::fs::symlink;
use std::path::{Path, PathBuf};
use std::process::{Command, Output};

use tempfile::TempDir;

use crate::layout::{await_listener, free_port};
use crate::{address, built, doorbell, texts};

const TOOL: &str = "ib_write_bw";

/// Our tool of the classic name, as a client of several devices.
struct Rails {
    _folder: TempDir,
    tool: PathBuf,
    first: String,
}

impl Rails {
    fn new() -> Self {
        let folder = tempfile::tempdir().expect("a temporary folder");
        let tool = folder.path().join(TOOL);
        symlink(built().join("doorbell"), &tool).expect("a link");
        // Two addresses that no other test has: even numbers above those of `address`.
        let address = address();
        let (network, last) = address.rsplit_once('.').expect("four numbers");
        let last: u8 = last.parse().expect("a number");
        let first = format!("{network}.{}", 128 + 2 * (last % 60));
        Self {
            _folder: folder,
            tool,
            first,
        }
    }

    fn command(&self, options: &[&str], device: &str, port: &str) -> Command {
        let words = [&["run", "--address", &self.first, "--rails", "2"], options, &["--"]].concat();
        let mut command = doorbell(&words);
        command.env_remove("DOORBELL_SOFT_ADDR");
        command.arg(&self.tool).args(["-F", "-d", device, "-p", port]);
        // The queue pair's timeout outlasts what a slow port has taken.
        command.args(["-n", "20", "-u", "20"]);
        command
    }

    /// The client of a pair on a device; its server's has no faults, as on another host.
    fn client(&self, options: &[&str], device: &str) -> Output {
        let port = free_port().to_string();
        let mut server = self.command(&[], device, &port).spawn().expect("doorbell was built");
        await_listener(&mut server, &port);
        let client = self.command(options, device, &port).arg("127.0.0.1").output();
        let client = client.expect("doorbell was built");
        if !client.status.success() {
            // It waits for another client.
            server.kill().expect("it runs");
        }
        let server = server.wait_with_output().expect("it can be waited for");
        assert_eq!(server.status.success(), client.status.success(), "{:?}", texts(&server));
        client
    }

    /// In MB/s, of which the tool's have 2^20 bytes.
    fn speed(&self, options: &[&str], device: &str) -> f64 {
        let (stdout, stderr) = texts(&self.client(options, device));
        let values = stdout.lines().find(|line| line.trim_start().starts_with("65536"));
        let average = values.and_then(|line| line.split_whitespace().nth(3));
        average
            .and_then(|text| text.parse().ok())
            .unwrap_or_else(|| panic!("{stdout}{stderr}"))
    }
}

#[test]
fn one_rail_goes_on_while_another_is_down() {
    let rails = Rails::new();
    let down = ["--down", "soft0@0"];
    let works = rails.client(&down, "soft1");
    assert!(works.status.success(), "{:?}", texts(&works));
    let fails = rails.client(&down, "soft0");
    let (stdout, stderr) = texts(&fails);
    assert_eq!(fails.status.code(), Some(1), "{stdout}{stderr}");
    assert!(stderr.contains("soft0 port 1 is not active"), "{stdout}{stderr}");
}

/// Slow enough that a starved machine is faster.
#[test]
fn a_slowed_rail_is_slower_by_turns() {
    let rails = Rails::new();
    let slow = ["--slow", "soft1=20Mb"];
    for turn in 0..2 {
        let [full, slowed] = ["soft0", "soft1"].map(|device| rails.speed(&slow, device));
        assert!(
            slowed < 2.5 && full > 1.5 * slowed,
            "turn {turn}: {full} and {slowed} MB/s"
        );
    }
}

/// Each a line of its own, and nothing is started.
#[test]
fn faults_that_cannot_be_are_refused() {
    let started = tempfile::tempdir().expect("a temporary folder");
    let file = started.path().join("started");
    let touch = ["--", "touch", file.to_str().expect("a plain path")];
    for options in [
        ["--down", "soft0@soon"],
        ["--down", "soft7@1s"],
        ["--slow", "soft0=0Gb"],
    ] {
        let output = doorbell(&[&["run"], &options[..], &touch].concat()).output();
        let output = output.expect("doorbell was built");
        let (stdout, stderr) = texts(&output);
        assert_eq!(output.status.code(), Some(2), "{options:?}: {stderr}");
        assert!(
            stdout.is_empty() && stderr.starts_with("doorbell: "),
            "{options:?}: {stderr}"
        );
        assert!(!Path::new(&file).exists(), "{options:?}");
    }
}
