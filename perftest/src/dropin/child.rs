//! Runs a command in place of this program: forwards signals, and ends as it does. No exec, as the
//! folder has to be removed afterwards.

use std::ffi::{OsStr, OsString};
use std::fs;
use std::io::ErrorKind;
use std::os::unix::process::ExitStatusExt;
use std::process::{Command, ExitStatus, exit};
use std::thread;

use doorbell_perftest_sys::orphan::kill_with_parent;
use nix::errno::Errno;
use nix::sys::resource::{Resource, setrlimit};
use nix::sys::signal::{Signal, kill};
use nix::sys::wait::{Id, WaitPidFlag, waitid};
use nix::unistd::Pid;
use signal_hook::consts::{SIGHUP, SIGINT, SIGQUIT, SIGTERM, SIGUSR1, SIGUSR2};
use signal_hook::iterator::SignalsInfo;
use signal_hook::iterator::exfiltrator::raw::WithRawSiginfo;

use super::{OWN_FAILURE, Variable, own};
use crate::failure::{Failure, one_line};

/// The signals that are forwarded. The others cannot be caught, or stop and continue the whole job.
const SIGNALS: [i32; 6] = [SIGHUP, SIGINT, SIGQUIT, SIGTERM, SIGUSR1, SIGUSR2];

#[derive(Debug)]
pub(crate) struct ExitedCommand(ExitStatus);

/// Prepares its environment, and passes the command's process id to `started`. The signals that end
/// this program are caught meanwhile.
///
/// # Errors
/// [`Failure::NotRun`] when it could not be started; [`Failure::Interrupted`] by a signal before.
pub(crate) fn run<V: IntoIterator<Item = Variable>>(
    name: &OsStr,
    arguments: &[OsString],
    prepare: impl FnOnce() -> V,
    started: impl FnOnce(i32),
) -> Result<ExitedCommand, Failure> {
    let cannot = |what: &str, e: &dyn std::fmt::Display| own(format!("cannot {what}: {e}"));
    // Caught before the command starts, so that none ends this program alone. Ignored signals stay
    // ignored: execve(2) keeps that, and resets caught ones to the default.
    let ignored = ignored();
    let caught = SIGNALS.into_iter().filter(|signal| ignored & (1 << (signal - 1)) == 0);
    let mut signals = SignalsInfo::<WithRawSiginfo>::new(caught).map_err(|e| cannot("catch signals", &e))?;
    let mut command = Command::new(name);
    command.args(arguments).envs(prepare());
    if signals.pending().next().is_some() {
        return Err(Failure::Interrupted);
    }
    // Killing this program shall kill the command, which would otherwise keep its device, and a
    // failed test would never end. This thread waits for the command below.
    kill_with_parent(&mut command);
    let mut child = command.spawn().map_err(|e| {
        let status = if e.kind() == ErrorKind::NotFound { 127 } else { 126 };
        let why = e
            .raw_os_error()
            .map_or_else(|| e.to_string(), |code| Errno::from_raw(code).desc().to_owned());
        Failure::NotRun(format!("{}: {why}", one_line(&name.to_string_lossy())), status)
    })?;
    let pid = Pid::from_raw(child.id().cast_signed());
    started(pid.as_raw());
    let handle = signals.handle();
    let passing = thread::Builder::new().name("signals".into()).spawn(move || {
        for info in &mut signals {
            // A signal from the terminal has reached the command already, which is in the same
            // process group; one from a process was sent to this one only.
            let from_a_process = info.si_code <= 0;
            if from_a_process && let Ok(signal) = Signal::try_from(info.si_signo) {
                // It may just have ended; it is not reaped, so no other process has its number.
                let _ = kill(pid, signal);
            }
        }
    });
    let passing = passing.map_err(|e| cannot("pass signals on", &e))?;
    while let Err(e) = waitid(Id::Pid(pid), WaitPidFlag::WEXITED | WaitPidFlag::WNOWAIT) {
        if e != Errno::EINTR {
            return Err(cannot("wait for the command", &e));
        }
    }
    handle.close();
    // The thread ends with the handle; whether it panicked does not matter to the command.
    let _ = passing.join();
    child
        .wait()
        .map(ExitedCommand)
        .map_err(|e| cannot("wait for the command", &e))
}

impl ExitedCommand {
    /// Ends this process as the command ended: with its exit status, or by its signal.
    pub(crate) fn exit_alike(self) -> ! {
        if let Some(signal) = self.0.signal() {
            // The command may have dumped core; this program shall not as well. A failure here
            // leaves the exit status that shells give.
            let _ = setrlimit(Resource::RLIMIT_CORE, 0, 0);
            let _ = signal_hook::low_level::emulate_default_handler(signal);
            exit(128 + signal);
        }
        exit(self.0.code().unwrap_or(i32::from(OWN_FAILURE)))
    }
}

/// As bits: what `nohup` and shells' background jobs leave to their children.
fn ignored() -> u64 {
    let status = fs::read_to_string("/proc/self/status").unwrap_or_default();
    let field = status.lines().find_map(|line| line.strip_prefix("SigIgn:"));
    field
        .and_then(|field| u64::from_str_radix(field.trim(), 16).ok())
        .unwrap_or(0)
}
