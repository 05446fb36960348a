//! The classic tools as processes.

#![allow(dead_code, reason = "each test program that has this module uses a part of it")]

mod ports;
mod variables;

use std::ffi::OsString;
use std::io::{BufRead, BufReader, Read};
use std::os::unix::fs::symlink;
use std::path::PathBuf;
use std::process::{Child, ChildStderr, ChildStdout, Command, Stdio};
use std::thread;
use std::time::{Duration, Instant};

use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use serde_json::Value;
use tempfile::TempDir;

pub(crate) use self::ports::free_port;
use self::variables::VARIABLES;

pub(crate) const TOOLS: [&str; 8] = [
    "ib_write_bw",
    "ib_write_lat",
    "ib_read_bw",
    "ib_read_lat",
    "ib_send_bw",
    "ib_send_lat",
    "ib_atomic_bw",
    "ib_atomic_lat",
];

/// Longer than any deadline of the tools: a process that takes longer hangs.
pub(crate) const TIME_LIMIT: Duration = Duration::from_secs(50);

/// A folder with a link by each name, where the tools run.
pub(crate) struct Tools {
    folder: TempDir,
    /// Their environment variables.
    environment: Vec<(String, OsString)>,
}

impl Tools {
    pub(crate) fn new() -> Tools {
        let folder = tempfile::tempdir().expect("a folder");
        for name in TOOLS {
            symlink(env!("CARGO_BIN_EXE_doorbell"), folder.path().join(name)).expect("a link");
        }
        Tools {
            folder,
            environment: Vec::new(),
        }
    }

    pub(crate) fn with(mut self, name: &str, value: impl Into<OsString>) -> Tools {
        self.environment.push((name.to_owned(), value.into()));
        self
    }

    pub(crate) fn path(&self, name: &str) -> PathBuf {
        self.folder.path().join(name)
    }

    pub(crate) fn start(&self, line: &str) -> Running {
        self.start_with(line, [])
    }

    pub(crate) fn start_with<const N: usize>(&self, line: &str, variables: [(&str, OsString); N]) -> Running {
        let mut words = line.split_whitespace();
        let mut command = Command::new(self.path(words.next().expect("a name")));
        for name in VARIABLES {
            command.env_remove(name);
        }
        let mut child = command
            .args(words)
            .envs(self.environment.iter().cloned())
            .envs(variables)
            .current_dir(self.folder.path())
            .stdin(Stdio::null())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .spawn()
            .expect("the binary runs");
        Running {
            line: line.to_owned(),
            stdout: BufReader::new(child.stdout.take().expect("a pipe")),
            stderr: child.stderr.take().expect("a pipe"),
            received: String::new(),
            child,
        }
    }

    /// Starts a server on a free port, and waits until it listens.
    pub(crate) fn serve(&self, line: &str) -> (Running, u16) {
        let port = free_port();
        let mut server = self.start(&format!("{line} -p {port}"));
        server.read_until("Waiting for client");
        (server, port)
    }

    /// Runs both ends, each with a report in JSON; both have to succeed.
    pub(crate) fn pair(&self, line: &str) -> (ToolOutput, Value, Value) {
        let file = |end: &str| self.path(&format!("{}-{end}.json", line.replace([' ', '/'], "_")));
        let json = |end: &str| format!("--out_json --out_json_file={}", file(end).display());
        let (server, port) = self.serve(&format!("{line} {}", json("server")));
        let client = self
            .start(&format!("{line} -p {port} {} 127.0.0.1", json("client")))
            .end();
        let server = server.end();
        for (end, ended) in [("client", &client), ("server", &server)] {
            assert_eq!(ended.status, Some(0), "{line}: {end}: {ended:?}");
            assert_eq!(ended.complaints(), Vec::<&str>::new(), "{line}: {end}");
        }
        let read = |end| {
            let text = std::fs::read_to_string(file(end)).unwrap_or_else(|e| panic!("{line}: {end}: {e}"));
            serde_json::from_str(&text).unwrap_or_else(|e| panic!("{line}: {end}: {e}: {text}"))
        };
        (client, read("client"), read("server"))
    }
}

/// A running tool, killed when dropped.
pub(crate) struct Running {
    line: String,
    child: Child,
    stdout: BufReader<ChildStdout>,
    stderr: ChildStderr,
    received: String,
}

#[derive(Debug)]
pub(crate) struct ToolOutput {
    /// Exit status; none where a signal ended it.
    pub(crate) status: Option<i32>,
    pub(crate) stdout: String,
    pub(crate) stderr: String,
}

impl Running {
    /// Reads its output up to a line that contains `text`.
    pub(crate) fn read_until(&mut self, text: &str) {
        if !self.says(text) {
            let mut stderr = String::new();
            self.stderr.read_to_string(&mut stderr).expect("text");
            panic!("{} ended without '{text}': {}{stderr}", self.line, self.received);
        }
    }

    /// The same, or up to its end. Returns whether there is such a line.
    pub(crate) fn says(&mut self, text: &str) -> bool {
        loop {
            let mut line = String::new();
            if self.stdout.read_line(&mut line).expect("text") == 0 {
                return false;
            }
            self.received += &line;
            if line.contains(text) {
                return true;
            }
        }
    }

    pub(crate) fn signal(&self, signal: Signal) {
        kill(Pid::from_raw(self.child.id().cast_signed()), signal).expect("it runs");
    }

    pub(crate) fn end(mut self) -> ToolOutput {
        let deadline = Instant::now() + TIME_LIMIT;
        // Its output fits in the pipes.
        let status = loop {
            if let Some(status) = self.child.try_wait().expect("it can be waited for") {
                break status.code();
            }
            assert!(Instant::now() < deadline, "{} hangs", self.line);
            thread::sleep(Duration::from_millis(5));
        };
        let mut stderr = String::new();
        self.stdout.read_to_string(&mut self.received).expect("text");
        self.stderr.read_to_string(&mut stderr).expect("text");
        ToolOutput {
            status,
            stdout: std::mem::take(&mut self.received),
            stderr,
        }
    }
}

impl Drop for Running {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

impl ToolOutput {
    /// The lines on stderr that are no warnings.
    pub(crate) fn complaints(&self) -> Vec<&str> {
        self.stderr.lines().filter(|line| !line.contains("warning:")).collect()
    }

    /// Checks that it failed with this status, and one line on stderr that contains all of `says`.
    #[track_caller]
    pub(crate) fn failed(&self, status: i32, says: &[&str]) {
        assert_eq!(self.status, Some(status), "{self:?}");
        let complaints = self.complaints();
        assert_eq!(complaints.len(), 1, "{self:?}");
        for word in says {
            assert!(complaints[0].contains(word), "no '{word}': {self:?}");
        }
    }

    pub(crate) fn rows(&self) -> Vec<Vec<&str>> {
        self.stdout
            .lines()
            .skip_while(|line| !line.starts_with(" #bytes"))
            .filter(|line| line.starts_with(' ') && !line.starts_with(" #"))
            .map(|line| line.split_whitespace().collect())
            .collect()
    }

    /// The value after `name :` in the header.
    pub(crate) fn fact(&self, name: &str) -> &str {
        let at = self.stdout.find(name).unwrap_or_else(|| panic!("no {name}: {self:?}"));
        let rest = &self.stdout[at + name.len()..];
        let rest = rest.trim_start().strip_prefix(':').expect("a colon");
        rest.split_whitespace().next().expect("a value")
    }

    pub(crate) fn row(&self) -> Vec<f64> {
        let rows = self.rows();
        let row = rows.last().unwrap_or_else(|| panic!("no figures: {self:?}"));
        row.iter().map(|word| word.parse().expect("a number")).collect()
    }
}
