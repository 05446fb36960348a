//! An MPS daemon for a command whose ranks share GPUs (`--ranks-per-gpu`).
//!
//! A GPU time-slices contexts of different processes, unless they are clients of NVIDIA's MPS
//! daemon. The daemon has folders of its own, so it serves this command alone, changes no setting
//! of a GPU, and ends with the command.

use std::fs::{self, DirBuilder, File};
use std::io::Write as _;
use std::os::unix::fs::DirBuilderExt as _;
use std::os::unix::process::CommandExt as _;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::thread;
use std::time::{Duration, Instant};
use std::{env, io};

use super::Variable;
use crate::failure::one_line;

/// The program that starts the daemon, and passes it commands.
const CONTROL: &str = "nvidia-cuda-mps-control";
const PIPE_FOLDER: &str = "CUDA_MPS_PIPE_DIRECTORY";
const LOG_FOLDER: &str = "CUDA_MPS_LOG_DIRECTORY";
/// The ranks on each GPU, which the collectives read.
const RANKS: &str = "DOORBELL_RANKS_PER_GPU";
/// Servers whose clients have not ended are killed after 5 s.
const QUIT: &[u8] = b"quit -t 5\n";
const QUIT_TIMEOUT: Duration = Duration::from_secs(20);
const POLL_INTERVAL: Duration = Duration::from_millis(10);

/// A running daemon, which is ended when dropped.
#[derive(Debug)]
pub(super) struct Daemon {
    folder: PathBuf,
}

/// The variables of a command with so many ranks on each GPU, and the daemon that was started for
/// it. Says on stderr what the ranks have.
pub(super) fn provide(parent: &Path, ranks: u8) -> (Option<Daemon>, Vec<Variable>) {
    let mut variables = vec![(RANKS, ranks.to_string().into())];
    if env::var_os(PIPE_FOLDER).is_some_and(|folder| Path::new(&folder).join("control").exists()) {
        eprintln!("doorbell: {ranks} ranks share each GPU by the MPS daemon of {PIPE_FOLDER}");
        return (None, variables);
    }
    let daemon = match Daemon::start(parent.join("mps")) {
        Ok(daemon) => {
            eprintln!("doorbell: {ranks} ranks share each GPU by an MPS daemon, which ends with the command");
            variables.extend(self::variables(&daemon.folder));
            Some(daemon)
        }
        Err(reason) => {
            let reason = one_line(&reason);
            eprintln!(
                "doorbell: warning: no MPS daemon, so the ranks of a GPU are time-sliced, milliseconds each: {CONTROL}: {reason}"
            );
            None
        }
    };
    (daemon, variables)
}

impl Daemon {
    fn start(folder: PathBuf) -> Result<Self, String> {
        let text = |e: io::Error| e.to_string();
        // Any process that can write to its pipes is a client.
        DirBuilder::new().mode(0o700).create(&folder).map_err(text)?;
        // A file, as the daemon may keep it open.
        let said = folder.join("start.log");
        let mut start = control(&folder);
        start
            .arg("-d")
            .stdin(Stdio::null())
            .stderr(File::create(&said).map_err(text)?);
        let status = start.status().map_err(text)?;
        if status.success() {
            return Ok(Self { folder });
        }
        let said = fs::read_to_string(&said).unwrap_or_default();
        Err(said.lines().next().map_or_else(|| status.to_string(), str::to_owned))
    }
}

impl Drop for Daemon {
    fn drop(&mut self) {
        if let Err(e) = quit(&self.folder) {
            let folder = one_line(&self.folder.to_string_lossy());
            eprintln!("doorbell: warning: the MPS daemon of {folder} may not have ended: {CONTROL}: {e}");
        }
    }
}

fn variables(folder: &Path) -> [Variable; 2] {
    [PIPE_FOLDER, LOG_FOLDER].map(|name| (name, folder.into()))
}

fn control(folder: &Path) -> Command {
    let mut control = Command::new(CONTROL);
    // The clients' choice of GPUs is among all, and Ctrl-C is for the command.
    control
        .envs(variables(folder))
        .env_remove("CUDA_VISIBLE_DEVICES")
        .stdout(Stdio::null())
        .stderr(Stdio::null())
        .process_group(0);
    control
}

/// Waits for the daemon's end.
fn quit(folder: &Path) -> io::Result<()> {
    let mut quit = control(folder).stdin(Stdio::piped()).spawn()?;
    if let Some(mut input) = quit.stdin.take() {
        input.write_all(QUIT)?;
    }
    let until = Instant::now() + QUIT_TIMEOUT;
    while Instant::now() < until {
        match quit.try_wait()? {
            Some(status) if status.success() => return Ok(()),
            Some(status) => return Err(io::Error::other(status.to_string())),
            None => thread::sleep(POLL_INTERVAL),
        }
    }
    quit.kill()?;
    quit.wait()?;
    Err(io::ErrorKind::TimedOut.into())
}
