//! A peer's process, with a time limit.

use anyhow::{Context, Result, bail};
use std::{
    process::{Child, Command, ExitStatus, Stdio},
    thread,
    time::{Duration, Instant},
};

const POLL_INTERVAL: Duration = Duration::from_millis(5);

/// A process that ends with this value: killed when it has not exited after `grace`.
pub(super) struct KillOnDrop {
    pub(super) child: Child,
    grace: Duration,
}

impl KillOnDrop {
    pub(super) fn spawn(command: &mut Command, grace: Duration) -> Result<Self> {
        let child = command
            .stdin(Stdio::null())
            .stdout(Stdio::piped())
            .spawn()
            .with_context(|| format!("cannot run {}", command.get_program().to_string_lossy()))?;
        Ok(Self { child, grace })
    }

    /// Waits for its exit, at most until `limit` after `since`.
    pub(super) fn wait(&mut self, since: Instant, limit: Duration) -> Result<ExitStatus> {
        loop {
            if let Some(status) = self.child.try_wait()? {
                return Ok(status);
            }
            if since.elapsed() >= limit {
                bail!("took more than {} s", limit.as_secs());
            }
            thread::sleep(POLL_INTERVAL);
        }
    }
}

impl Drop for KillOnDrop {
    fn drop(&mut self) {
        if self.wait(Instant::now(), self.grace).is_err() {
            let _ = self.child.kill();
            let _ = self.child.wait();
        }
    }
}
