//! Deadlines, and waiting for a file descriptor with one (poll(2)).

use std::io;
use std::os::fd::{AsFd, BorrowedFd};
use std::time::{Duration, Instant};

use nix::errno::Errno;
use nix::fcntl::{FcntlArg, OFlag, fcntl};
use nix::poll::{PollFd, PollFlags, PollTimeout, poll};

/// A point in time, or never.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Deadline(Option<Instant>);

impl Deadline {
    /// `timeout` from now; never, if the clock does not reach that far.
    pub(crate) fn after(timeout: Duration) -> Self {
        Self(Instant::now().checked_add(timeout))
    }

    pub(crate) fn remaining(self) -> Duration {
        self.0
            .map_or(Duration::MAX, |at| at.saturating_duration_since(Instant::now()))
    }

    /// The time remaining in whole milliseconds, rounded up, so that no wait ends early.
    pub(crate) fn remaining_ms(self) -> i32 {
        let ms = self.remaining().as_nanos().div_ceil(1_000_000);
        i32::try_from(ms).unwrap_or(i32::MAX)
    }
}

/// Waits until `fd` is readable or has failed; `false` when the deadline passed first (poll(2)).
pub(crate) fn readable(fd: BorrowedFd<'_>, deadline: Deadline) -> io::Result<bool> {
    wait_readable(fd, deadline.0)
}

/// The deadline of a wait that begins now; `None` for never.
pub(crate) fn deadline_of(timeout: Option<Duration>) -> Option<Instant> {
    // A deadline beyond the range of the clock is never reached.
    Instant::now().checked_add(timeout?)
}

pub(crate) fn remaining_until(deadline: Option<Instant>) -> Option<Duration> {
    deadline.map(|deadline| deadline.saturating_duration_since(Instant::now()))
}

pub(crate) fn set_nonblocking(fd: impl AsFd) -> io::Result<()> {
    let flags = OFlag::from_bits_retain(fcntl(&fd, FcntlArg::F_GETFL)?);
    fcntl(&fd, FcntlArg::F_SETFL(flags | OFlag::O_NONBLOCK))?;
    Ok(())
}

/// Sleeps until `fd` is readable or has failed (the next read reports it); false at the deadline.
pub(crate) fn wait_readable(fd: BorrowedFd<'_>, deadline: Option<Instant>) -> io::Result<bool> {
    loop {
        let left = remaining_until(deadline);
        match poll(
            &mut [PollFd::new(fd, PollFlags::POLLIN)],
            left.map_or(PollTimeout::NONE, milliseconds),
        ) {
            // The longest timeout of poll(2) may be shorter than the time remaining.
            Ok(0) if remaining_until(deadline).is_none_or(|left| !left.is_zero()) => {}
            Ok(0) => return Ok(false),
            Ok(_) => return Ok(true),
            Err(Errno::EINTR) => {}
            Err(errno) => return Err(errno.into()),
        }
    }
}

/// A timeout for poll(2), rounded up so that no wait is shorter than requested.
fn milliseconds(timeout: Duration) -> PollTimeout {
    let rounded = timeout.as_nanos().div_ceil(1_000_000);
    i32::try_from(rounded)
        .ok()
        .and_then(|rounded| PollTimeout::try_from(rounded).ok())
        .unwrap_or(PollTimeout::MAX)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn timeouts_are_rounded_up() {
        let as_millis = |timeout| milliseconds(timeout).as_millis();
        assert_eq!(as_millis(Duration::ZERO), Some(0));
        assert_eq!(as_millis(Duration::from_nanos(1)), Some(1));
        assert_eq!(as_millis(Duration::from_micros(1001)), Some(2));
        assert_eq!(milliseconds(Duration::MAX), PollTimeout::MAX);
    }

    #[test]
    fn a_deadline_beyond_the_clock_is_never() {
        assert_eq!(deadline_of(Some(Duration::MAX)), None);
        assert_eq!(deadline_of(None), None);
    }
}
