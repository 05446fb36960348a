//! A process of `doorbell` that serves on a port, which its first line on stderr names.

use std::io::{BufRead, BufReader};
use std::process::{Child, ChildStderr, Command, Output, Stdio};
use std::thread;
use std::time::Duration;

use super::{doorbell, ticks_of};

/// Killed when dropped.
pub(crate) struct Server {
    child: Child,
    lines: BufReader<ChildStderr>,
    pub(crate) first_line: String,
    pub(crate) port: String,
}

impl Server {
    /// Serves files of the device soft0 on a free port of loopback.
    pub(crate) fn of_files(what: &str) -> Self {
        Self::start(doorbell(&format!("bw file --serve --port 0 --device soft0 {what}")))
    }

    pub(crate) fn start(mut command: Command) -> Self {
        let mut child = command.stderr(Stdio::piped()).spawn().expect("started");
        let lines = BufReader::new(child.stderr.take().expect("a pipe"));
        let mut server = Self {
            child,
            lines,
            first_line: String::new(),
            port: String::new(),
        };
        server.first_line = server.line();
        let (_, port) = server.first_line.rsplit_once(':').expect("an address");
        assert!(port.parse::<u16>().is_ok(), "{}", server.first_line);
        server.port = port.to_owned();
        server
    }

    pub(crate) fn line(&mut self) -> String {
        let mut line = String::new();
        self.lines.read_line(&mut line).expect("a line");
        line.trim_end().to_owned()
    }

    /// Waits until it has worked for a while, as it does for clients alone: for longer than it
    /// takes to accept one and to answer how long a file is.
    pub(crate) fn is_sending(&self) {
        let before = ticks_of(self.child.id());
        while ticks_of(self.child.id()) < before + 20 {
            thread::sleep(Duration::from_millis(5));
        }
    }

    /// The outcome of a client during whose transfer `act` was carried out.
    pub(crate) fn interrupted(&mut self, client: &mut Command, act: impl FnOnce(&mut Self)) -> Output {
        let client = client.stderr(Stdio::piped()).spawn().expect("started");
        self.is_sending();
        act(self);
        client.wait_with_output().expect("it has ended")
    }

    pub(crate) fn kill(&mut self) {
        self.child.kill().expect("killed");
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        // One that has ended is dead already.
        let _ = self.child.kill();
        self.child.wait().expect("it has ended");
    }
}
