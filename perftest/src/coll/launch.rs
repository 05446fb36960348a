//! Starts the ranks of this host, a process each.
//!
//! A rank is this program with the same arguments and `--rank`. Its stdin is a pipe, which carries
//! the id of the group, so that no other process can join; the rank ends when it closes. Each rank
//! reports its own failures; rank 0 prints the results.

use std::io::{self, Write};
use std::net::{IpAddr, Ipv4Addr};
use std::process::{Child, ChildStdin, Command, ExitStatus, Stdio};
use std::thread;
use std::time::{Duration, Instant};

use doorbell_collectives::bootstrap::{DEFAULT_TIMEOUT, Rendezvous};

use super::CollArgs;
use crate::device::{self, Reach};
use crate::failure::{Failure, one_line};
use crate::interrupt::Interrupt;

const POLL_INTERVAL: Duration = Duration::from_millis(2);
/// How much longer than the deadline ranks have to end when one has failed.
const GRACE: Duration = Duration::from_secs(10);
/// Time limit for ranks that are requested to stop, to finish a size and print.
const STOP_TIMEOUT: Duration = Duration::from_secs(2);
const EXIT_TIMEOUT: Duration = Duration::from_secs(2);

/// # Errors
/// [`Failure::Usage`] when the device is invalid; [`Failure::Test`] when a rank fails, which it
/// reports itself; [`Failure::Interrupted`].
pub(super) fn run(args: &CollArgs, ranks: u32) -> Result<(), Failure> {
    let interrupt = Interrupt::catch()?;
    // Opens the device here first, so that its errors are reported once and not by every rank.
    let mut soft = args.soft.clone();
    soft.pcap = None;
    drop(device::open_all(&args.device, &soft, args.seed, Reach::Here)?);
    let cannot = |e: String| Failure::test(format!("cannot start {ranks} ranks: {}", one_line(&e)));
    let serving = Rendezvous::open(IpAddr::V4(Ipv4Addr::LOCALHOST), ranks)
        .and_then(|rendezvous| rendezvous.spawn(DEFAULT_TIMEOUT))
        .map_err(|e| cannot(e.to_string()))?;
    let id = serving.id().to_string();
    let mut all = Vec::new();
    for rank in 0..ranks {
        all.push(RankProcess::new(rank, &id).map_err(|e| cannot(e.to_string()))?);
    }
    wait(&mut all, args.deadline, &interrupt)
}

/// A rank's process. Dropping it ends it.
struct RankProcess {
    rank: u32,
    child: Child,
    /// Closing it makes the process end.
    stdin_pipe: Option<ChildStdin>,
    ended: Option<ExitStatus>,
}

impl RankProcess {
    fn new(rank: u32, id: &str) -> io::Result<Self> {
        let mut command = Command::new(std::env::current_exe()?);
        command
            .args(std::env::args_os().skip(1))
            .args(["--rank", &rank.to_string()])
            .stdin(Stdio::piped());
        if rank > 0 {
            // A capture file is for one process.
            command.stdout(Stdio::null()).env_remove("DOORBELL_PCAP");
        }
        let mut child = command.spawn()?;
        let stdin_pipe = child.stdin.take();
        let mut rank_process = Self {
            rank,
            child,
            stdin_pipe,
            ended: None,
        };
        if let Some(stdin_pipe) = &mut rank_process.stdin_pipe {
            writeln!(stdin_pipe, "{id}")?;
        }
        Ok(rank_process)
    }

    fn poll(&mut self) -> Result<Option<ExitStatus>, Failure> {
        if self.ended.is_none() {
            let status = self.child.try_wait();
            self.ended = status.map_err(|e| Failure::test(format!("cannot wait for rank {}: {e}", self.rank)))?;
        }
        Ok(self.ended)
    }
}

impl Drop for RankProcess {
    fn drop(&mut self) {
        drop(self.stdin_pipe.take());
        let deadline = Instant::now() + EXIT_TIMEOUT;
        while matches!(self.poll(), Ok(None)) {
            if Instant::now() > deadline {
                // Fails only if it is gone.
                let _ = self.child.kill();
                let _ = self.child.wait();
                return;
            }
            thread::sleep(POLL_INTERVAL);
        }
    }
}

/// After a failure the others have the deadline, and [`GRACE`], to detect and report it.
fn wait(all: &mut [RankProcess], deadline: Duration, interrupt: &Interrupt) -> Result<(), Failure> {
    let mut until = None;
    let mut stopping: Option<Instant> = None;
    loop {
        let mut running = 0;
        for one in &mut *all {
            match one.poll()? {
                None => running += 1,
                Some(status) if !status.success() => {
                    until.get_or_insert_with(|| Instant::now() + deadline + GRACE);
                }
                Some(_) => {}
            }
        }
        if interrupt.requested() && stopping.is_none() {
            stopping = Some(Instant::now() + STOP_TIMEOUT);
            for stdin_pipe in all.iter_mut().filter_map(|one| one.stdin_pipe.as_mut()) {
                // A rank that has ended needs no request.
                let _ = writeln!(stdin_pipe, "stop");
            }
        }
        if stopping.is_some_and(|until| running == 0 || Instant::now() > until) {
            // All at once, instead of one after another as they are dropped.
            all.iter_mut().for_each(|one| one.stdin_pipe = None);
            return Err(Failure::Interrupted);
        }
        if running == 0 || until.is_some_and(|until| Instant::now() > until) {
            return outcome(all);
        }
        thread::sleep(POLL_INTERVAL);
    }
}

fn outcome(all: &[RankProcess]) -> Result<(), Failure> {
    let failed: Vec<String> = all
        .iter()
        .filter_map(|one| match one.ended {
            Some(status) if status.success() => None,
            Some(status) if status.code().is_some() => Some(format!("rank {}", one.rank)),
            Some(status) => Some(format!("rank {} ({status})", one.rank)),
            None => Some(format!("rank {} (which does not end)", one.rank)),
        })
        .collect();
    match &failed[..] {
        [] => Ok(()),
        failed => Err(Failure::test(format!(
            "{} of {} ranks failed: {}",
            failed.len(),
            all.len(),
            failed.join(", ")
        ))),
    }
}
