//! Both ends of a test on this machine: a child process of this program is the server.
//!
//! The child's stdin carries a token that a client must present, so no other process can connect;
//! the child ends when it closes. On stdout the child announces, as one line of JSON, the TCP port
//! where it listens, or why it cannot.

use std::fs::File;
use std::io::{self, BufRead, BufReader, Read, Write};
use std::process::{Child, ChildStdin, Command, Stdio};
use std::sync::mpsc::{RecvTimeoutError, sync_channel};
use std::thread;
use std::time::{Duration, Instant};

use serde::{Deserialize, Serialize};

use crate::device::Variable;
use crate::failure::{Failure, one_line};
use crate::interrupt::Interrupt;

const START_TIMEOUT: Duration = Duration::from_secs(30);
/// Time limit for the child to exit by itself after the test.
const EXIT_TIMEOUT: Duration = Duration::from_secs(2);
/// Length limit of a line between the two.
const MAX_LINE: u64 = 4096;

#[derive(Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub(crate) enum Announcement {
    /// It listens on this TCP port.
    Port(u16),
    /// It cannot serve: the reason, and the exit status.
    Failed(String, u8),
}

/// The server's process. Dropping it ends it.
#[derive(Debug)]
pub(crate) struct Server {
    child: Child,
    /// Closing it makes the child end.
    stdin_pipe: Option<ChildStdin>,
    pub(crate) port: u16,
    pub(crate) token: String,
}

impl Server {
    /// # Errors
    /// The child's own failure when it announced one; [`Failure::Test`] when it could not be
    /// started or announced nothing in time; [`Failure::Interrupted`].
    pub(crate) fn start(
        arguments: &[String],
        variables: Vec<Variable>,
        interrupt: &Interrupt,
    ) -> Result<Server, Failure> {
        let cannot = |e: io::Error| Failure::test(format!("cannot start a second process for the other end: {e}"));
        let token = token().map_err(cannot)?;
        let program = std::env::current_exe().map_err(cannot)?;
        let mut child = Command::new(program)
            .args(arguments)
            // An address and a capture file are for one process.
            .env_remove("DOORBELL_SOFT_ADDR")
            .env_remove("DOORBELL_PCAP")
            .envs(variables)
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .map_err(cannot)?;
        let (stdin_pipe, stdout) = (child.stdin.take(), child.stdout.take());
        let mut server = Server {
            child,
            stdin_pipe,
            port: 0,
            token,
        };
        if let Some(stdin_pipe) = &mut server.stdin_pipe {
            writeln!(stdin_pipe, "{}", server.token).map_err(cannot)?;
        }
        let (sender, receiver) = sync_channel(1);
        thread::Builder::new()
            .name("announcement".into())
            .spawn(move || {
                let mut line = String::new();
                let got = stdout.map_or(Ok(0), |stdout| {
                    BufReader::new(stdout.take(MAX_LINE)).read_line(&mut line)
                });
                // Fails if the receiver has timed out: then the announcement is not needed.
                let _ = sender.send(got.map(|_| line));
            })
            .map_err(cannot)?;
        let deadline = Instant::now() + START_TIMEOUT;
        let line = loop {
            match receiver.recv_timeout(Duration::from_millis(50)) {
                Ok(got) => break got.map_err(cannot)?,
                Err(_) if interrupt.requested() => return Err(Failure::Interrupted),
                Err(RecvTimeoutError::Timeout) if Instant::now() < deadline => {}
                Err(_) => return Err(Failure::test("the process for the other end did not get ready in time")),
            }
        };
        match serde_json::from_str(&line) {
            Ok(Announcement::Port(port)) => {
                server.port = port;
                Ok(server)
            }
            Ok(Announcement::Failed(reason, 2)) => Err(Failure::usage(one_line(&reason))),
            Ok(Announcement::Failed(reason, _)) => Err(Failure::test(format!("the other end: {}", one_line(&reason)))),
            Err(_) => Err(Failure::test("the process for the other end ended before it was ready")),
        }
    }

    pub(crate) fn process(&self) -> u32 {
        self.child.id()
    }

    fn end(&mut self) -> io::Result<()> {
        drop(self.stdin_pipe.take());
        let deadline = Instant::now() + EXIT_TIMEOUT;
        while Instant::now() < deadline {
            if self.child.try_wait()?.is_some() {
                return Ok(());
            }
            thread::sleep(Duration::from_millis(1));
        }
        self.child.kill()?;
        self.child.wait().map(drop)
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        if let Err(e) = self.end() {
            tracing::warn!(error = %e, "the process of the other end could not be ended; it ends when this one has");
        }
    }
}

/// 128 random bits, in hexadecimal.
fn token() -> io::Result<String> {
    let mut bytes = [0; 16];
    File::open("/dev/urandom")?.read_exact(&mut bytes)?;
    Ok(bytes.iter().map(|byte| format!("{byte:02x}")).collect())
}

/// The child's side: reads the token, then watches stdin and exits when the parent is gone.
///
/// # Errors
/// [`Failure::Test`] when there is no parent at the other end of stdin.
pub(crate) fn adopt() -> Result<String, Failure> {
    adopt_until(Interrupt::default())
}

/// As [`adopt`], for a child that its parent may request to stop, by writing to stdin.
pub(crate) fn adopt_until(stop: Interrupt) -> Result<String, Failure> {
    let orphan = || Failure::usage("--child is for doorbell itself: use --server");
    let mut line = String::new();
    let mut stdin = BufReader::new(io::stdin());
    (&mut stdin).take(MAX_LINE).read_line(&mut line).map_err(|_| orphan())?;
    let token = line.trim_end();
    if token.is_empty() {
        return Err(orphan());
    }
    thread::Builder::new()
        .name("life line".into())
        .spawn(move || {
            // Ends with the pipe, or with an error.
            while matches!(stdin.fill_buf(), Ok(said) if !said.is_empty()) {
                stop.request();
                let said = stdin.buffer().len();
                stdin.consume(said);
            }
            std::process::exit(1);
        })
        .map_err(|e| Failure::test(format!("cannot watch the parent process: {e}")))?;
    Ok(token.to_owned())
}

/// # Errors
/// [`Failure::Test`] when the parent is gone.
pub(crate) fn announce(announcement: &Announcement) -> Result<(), Failure> {
    let gone = |e: io::Error| Failure::test(format!("cannot write to the parent process: {e}"));
    let text = serde_json::to_string(announcement).map_err(|e| gone(e.into()))?;
    let mut stdout = io::stdout().lock();
    writeln!(stdout, "{text}").and_then(|()| stdout.flush()).map_err(gone)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tokens_differ() {
        let (first, second) = (token().unwrap(), token().unwrap());
        assert_eq!(first.len(), 32);
        assert_ne!(first, second);
    }

    #[test]
    fn announcements_survive() {
        for announcement in [Announcement::Port(9), Announcement::Failed("no".into(), 2)] {
            let text = serde_json::to_string(&announcement).unwrap();
            assert_eq!(serde_json::from_str::<Announcement>(&text).unwrap(), announcement);
        }
    }
}
