//! Events: what wakes a thread or task that sleeps.
//!
//! A [`CompletionChannel`] reports completions of the queues created on it; [`Events`] reports
//! asynchronous events of the device and its objects. Both are file descriptors, always
//! non-blocking: threads sleep in poll(2), which has timeouts, tasks in their runtime (feature
//! `tokio`).

pub(crate) mod channel;
mod leader;
mod reader;
#[cfg(feature = "tokio")]
mod tokio;

use std::io;
use std::os::fd::{AsFd, BorrowedFd};
use std::time::{Duration, Instant};

use nix::errno::Errno;
use nix::fcntl::{FcntlArg, OFlag, fcntl};
use nix::poll::{PollFd, PollFlags, PollTimeout, poll};

pub use channel::CompletionChannel;
pub use reader::{AsyncEvent, Events, PortEvent, QueuePairEvent, SharedReceiveEvent};
#[cfg(feature = "tokio")]
pub use tokio::{TokioChannel, TokioEvents};

/// The deadline of a wait that begins now; `None` for never.
pub(crate) fn deadline_of(timeout: Option<Duration>) -> Option<Instant> {
    // A deadline beyond the range of the clock is never reached.
    Instant::now().checked_add(timeout?)
}

/// The time remaining until `deadline`; `None` for ever.
fn left_until(deadline: Option<Instant>) -> Option<Duration> {
    deadline.map(|deadline| deadline.saturating_duration_since(Instant::now()))
}

/// Sets O_NONBLOCK on `fd`.
fn set_nonblocking(fd: impl AsFd) -> io::Result<()> {
    let flags = OFlag::from_bits_retain(fcntl(&fd, FcntlArg::F_GETFL)?);
    fcntl(&fd, FcntlArg::F_SETFL(flags | OFlag::O_NONBLOCK))?;
    Ok(())
}

/// Sleeps until `fd` is readable or has failed, which the next read reports; false when the
/// deadline passed first.
fn wait_readable(fd: BorrowedFd<'_>, deadline: Option<Instant>) -> io::Result<bool> {
    loop {
        let left = left_until(deadline);
        match poll(
            &mut [PollFd::new(fd, PollFlags::POLLIN)],
            left.map_or(PollTimeout::NONE, milliseconds),
        ) {
            // The longest timeout of poll(2) may be shorter than the time remaining.
            Ok(0) if left_until(deadline).is_none_or(|left| !left.is_zero()) => {}
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
