//! A lock between processes: an abstract socket name, which the kernel releases when its holder
//! dies.
//!
//! A joining process holds one for a millisecond or twenty; a process that adds a service holds
//! another for microseconds: its peer may connect as fast.

use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::thread;
use std::time::{Duration, Instant};

use doorbell_trust::is_own_user;
use nix::poll::{PollFd, PollFlags, PollTimeout, poll};

use super::fork::CloseOnFork;
use super::socket;

#[derive(Debug)]
pub(super) struct NamedLock {
    _name: CloseOnFork<OwnedFd>,
}

#[derive(Debug)]
pub(super) enum LockError {
    Busy,
    /// A process of another user holds it.
    OtherUser(u32),
    Io(io::Error),
}

/// How long to wait before the next attempt, where no event reports a change.
const RETRY_INTERVAL: Duration = Duration::from_micros(200);

impl NamedLock {
    /// Waits for at most `timeout` per holder: many may wait on a busy machine.
    pub(super) fn acquire(name: &str, timeout: Duration) -> Result<Self, LockError> {
        let mut deadline = Instant::now() + timeout;
        loop {
            match socket::listen(name) {
                Ok(name) => return Ok(Self { _name: name }),
                Err(error) if error.kind() == io::ErrorKind::AddrInUse => {}
                Err(error) => return Err(LockError::Io(error)),
            }
            let left = deadline.saturating_duration_since(Instant::now());
            if left.is_zero() {
                return Err(LockError::Busy);
            }
            match socket::connect_to(name) {
                Ok(inside) => {
                    let uid = socket::credentials(&inside).map_err(LockError::Io)?.uid;
                    if !is_own_user(uid) {
                        return Err(LockError::OtherUser(uid));
                    }
                    // Never accepted: the connection hangs up when the holder releases the name.
                    let mut hangup = [PollFd::new(inside.as_fd(), PollFlags::POLLIN)];
                    if poll(&mut hangup, PollTimeout::try_from(left).unwrap_or(PollTimeout::MAX))
                        .is_ok_and(|hung| hung > 0)
                    {
                        deadline = Instant::now() + timeout;
                    }
                }
                // Free by now, or not listening yet; or the backlog is full.
                Err(_) => thread::sleep(RETRY_INTERVAL),
            }
        }
    }
}
