//! Child processes of tests: each in its own process group, its output in a file, killed with all
//! its children when dropped or after its time limit.

use anyhow::{Context, Result, ensure};
use std::{
    env::{self, Args},
    fs::{self, File},
    iter::Skip,
    os::unix::process::{CommandExt, ExitStatusExt},
    path::{Path, PathBuf},
    process::{Child, Command, ExitCode, ExitStatus, Stdio},
    sync::atomic::{AtomicBool, Ordering},
    thread,
    time::{Duration, Instant},
};

const POLL_INTERVAL: Duration = Duration::from_millis(5);

/// A starting program blocks no longer, unless it waits for a processor.
const IDLE_TIME: Duration = Duration::from_secs(1);

static STOPPED: AtomicBool = AtomicBool::new(false);

extern "C" fn stop(_: libc::c_int) {
    STOPPED.store(true, Ordering::Relaxed);
}

/// Fails once a [supervised](supervise) program has received Ctrl-C or SIGTERM; called by every
/// wait for a [`Process`], so that children are killed.
pub fn check_not_stopped() -> Result<()> {
    ensure!(!STOPPED.load(Ordering::Relaxed), "stopped");
    Ok(())
}

/// The `main` of a program that runs others: `parse` reads its arguments, `run` returns whether all
/// passed. Exit status: 0 passed, 1 failed, 2 bad usage, 130 stopped.
pub fn supervise<O>(
    name: &str,
    usage: &str,
    parse: impl FnOnce(Skip<Args>) -> Result<O>,
    run: impl FnOnce(&O) -> Result<bool>,
) -> ExitCode {
    // A shell that starts this program in the background sets Ctrl-C to be ignored, which children
    // would inherit; they do not inherit a handler.
    let handler: extern "C" fn(libc::c_int) = stop;
    for signal in [libc::SIGINT, libc::SIGTERM] {
        // SAFETY: the handler only stores to an atomic; signal(2) fails for no valid signal.
        unsafe { libc::signal(signal, handler as libc::sighandler_t) };
    }
    // SAFETY: the default action runs no code of ours. signal(2) fails for no valid signal.
    unsafe { libc::signal(libc::SIGQUIT, libc::SIG_DFL) };
    let options = match parse(env::args().skip(1)) {
        Ok(options) => options,
        Err(error) => {
            eprint!("{error:#}\n{usage}");
            return ExitCode::from(2);
        }
    };
    match run(&options) {
        Ok(true) => ExitCode::SUCCESS,
        Ok(false) => ExitCode::FAILURE,
        Err(error) => {
            eprintln!("{name}: {error:#}");
            ExitCode::from(if check_not_stopped().is_ok() { 1 } else { 130 })
        }
    }
}

/// A started program.
pub struct Process {
    child: Child,
    output: PathBuf,
    ended: Option<ExitStatus>,
}

impl Process {
    /// Starts `words` in `folder` with nothing but `variables` and the usual `PATH` in its
    /// environment; stdout and stderr go to one file there.
    pub fn start(words: &[String], variables: &[(&str, String)], folder: &Path, name: &str) -> Result<Self> {
        check_not_stopped()?;
        let output = folder.join(format!("{name}.log"));
        let file = File::create(&output).with_context(|| format!("cannot create {}", output.display()))?;
        let child = Command::new(&words[0])
            .args(&words[1..])
            .current_dir(folder)
            .env_clear()
            .env("PATH", "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin")
            .env("LC_ALL", "C")
            .env("TMPDIR", folder)
            .envs(variables.iter().map(|(name, value)| (name, value)))
            .stdin(Stdio::null())
            .stderr(file.try_clone()?)
            .stdout(file)
            .process_group(0)
            .spawn()
            .with_context(|| format!("cannot start {}", words[0]))?;
        Ok(Self {
            child,
            output,
            ended: None,
        })
    }

    /// Its process id.
    pub fn id(&self) -> u32 {
        self.child.id()
    }

    /// Its exit status as in a shell, 128 plus the number for a signal; `None` while it runs.
    pub fn status(&mut self) -> Result<Option<i32>> {
        check_not_stopped()?;
        if self.ended.is_none() {
            self.ended = self.child.try_wait()?;
        }
        Ok(self
            .ended
            .map(|status| status.code().unwrap_or_else(|| 128 + status.signal().unwrap_or(0))))
    }

    /// Waits for its exit until `deadline`. `None`: the deadline passed.
    pub fn wait(&mut self, deadline: Instant) -> Result<Option<i32>> {
        loop {
            let status = self.status()?;
            if status.is_some() || Instant::now() >= deadline {
                return Ok(status);
            }
            thread::sleep(POLL_INTERVAL);
        }
    }

    /// Waits for a listener in its network namespace; false when it exited, or `deadline` passed.
    pub fn wait_listening(&mut self, port: u16, deadline: Instant) -> Result<bool> {
        while Instant::now() < deadline {
            if self.is_listening_on(port) {
                return Ok(true);
            }
            if self.status()?.is_some() {
                return Ok(false);
            }
            thread::sleep(POLL_INTERVAL);
        }
        Ok(false)
    }

    /// Whether a process of its network namespace listens on a TCP port.
    pub fn is_listening_on(&self, port: u16) -> bool {
        has_listener(&format!("/proc/{}/net", self.child.id()), port)
    }

    /// Waits until it and its children have been idle for `IDLE_TIME`: the only sign that a
    /// connection manager's server listens. False when it exited, or `deadline` passed.
    pub fn wait_idle(&mut self, deadline: Instant) -> Result<bool> {
        let mut last = (String::new(), Instant::now());
        while Instant::now() < deadline {
            if self.status()?.is_some() {
                return Ok(false);
            }
            let now = activity(self.child.id());
            if now != last.0 {
                last = (now, Instant::now());
            } else if last.1.elapsed() > IDLE_TIME {
                return Ok(true);
            }
            thread::sleep(POLL_INTERVAL);
        }
        Ok(false)
    }

    /// Waits for output; false when it exited, or `deadline` passed.
    pub fn wait_shown(&mut self, shown: &str, deadline: Instant) -> Result<bool> {
        while !self.output().contains(shown) {
            if self.status()?.is_some() || Instant::now() > deadline {
                return Ok(false);
            }
            thread::sleep(POLL_INTERVAL);
        }
        Ok(true)
    }

    /// Its output so far.
    pub fn output(&self) -> String {
        fs::read(&self.output).map_or_else(|_| String::new(), |bytes| String::from_utf8_lossy(&bytes).into_owned())
    }

    /// Sends a signal to it and its children.
    pub fn signal(&self, signal: libc::c_int) {
        if self.ended.is_none() {
            // SAFETY: kill(2) touches no memory. The group is the child's own, and its number is
            // not reused while the child is not reaped.
            unsafe { libc::kill(-self.child.id().cast_signed(), signal) };
        }
    }
}

impl Drop for Process {
    fn drop(&mut self) {
        self.signal(libc::SIGKILL);
        let _ = self.child.wait();
    }
}

/// Changes while a process or a child is active: process ids, states, context switch counts.
fn activity(process: u32) -> String {
    let own = fs::read_to_string(format!("/proc/{process}/status")).unwrap_or_default();
    let status = own
        .lines()
        .filter(|line| line.starts_with("State:") || line.contains("ctxt_switches:"));
    let mut all = format!("{process} {}\n", status.collect::<Vec<_>>().join(" "));
    if all.contains("R (running)") {
        // Never the same twice.
        all += &format!("{:?}", Instant::now());
    }
    // A child is listed under the thread that started it.
    for thread in fs::read_dir(format!("/proc/{process}/task"))
        .into_iter()
        .flatten()
        .flatten()
    {
        let children = fs::read_to_string(thread.path().join("children")).unwrap_or_default();
        for child in children.split_whitespace().filter_map(|child| child.parse().ok()) {
            all += &activity(child);
        }
    }
    all
}

/// Whether tables of a network namespace (`/proc/PID/net`) have a listening socket (state 0A).
pub fn has_listener(tables: &str, port: u16) -> bool {
    ["tcp", "tcp6"].iter().any(|table| {
        let text = fs::read_to_string(format!("{tables}/{table}")).unwrap_or_default();
        text.lines().skip(1).any(|line| listener(line) == Some(port))
    })
}

/// The port in a line of `/proc/net/tcp`, if the socket listens.
fn listener(line: &str) -> Option<u16> {
    let mut fields = line.split_whitespace().skip(1);
    let (_, port) = fields.next()?.rsplit_once(':')?;
    let state = fields.nth(1)?;
    (state == "0A").then(|| u16::from_str_radix(port, 16).ok()).flatten()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn listeners_and_connections_are_distinguished() {
        let listening = "   0: 00000000:4853 00000000:0000 0A 00000000:00000000 00:00000000 00000000     0        0 1";
        let connected = "   1: 0100007F:4853 0100007F:C2A0 01 00000000:00000000 00:00000000 00000000     0        0 2";
        assert_eq!(listener(listening), Some(18515));
        assert_eq!(listener(connected), None);
        assert_eq!(listener("  sl  local_address rem_address   st tx_queue"), None);
    }
}
