//! Deadlines, and waiting for a file descriptor with one (poll(2)).

use std::io;
use std::os::fd::BorrowedFd;
use std::time::{Duration, Instant};

use nix::errno::Errno;
use nix::poll::{PollFd, PollFlags, PollTimeout, poll};

/// A point in time, or never.
#[derive(Debug, Clone, Copy)]
pub struct Deadline(Option<Instant>);

impl From<Option<Instant>> for Deadline {
    /// `None` is never.
    fn from(at: Option<Instant>) -> Self {
        Self(at)
    }
}

impl Deadline {
    /// A deadline that does not pass.
    pub const NEVER: Self = Self(None);

    /// `timeout` from now; never, if there is none, or the clock does not reach that far.
    #[must_use]
    pub fn after(timeout: impl Into<Option<Duration>>) -> Self {
        let at = timeout.into().map(|timeout| Instant::now().checked_add(timeout));
        Self(at.flatten())
    }

    /// The time that is left; [`Duration::MAX`] if it never passes.
    #[must_use]
    pub fn remaining(self) -> Duration {
        self.0
            .map_or(Duration::MAX, |at| at.saturating_duration_since(Instant::now()))
    }

    /// Whether no time is left.
    #[must_use]
    pub fn has_passed(self) -> bool {
        self.remaining().is_zero()
    }

    /// The earlier one.
    #[must_use]
    pub fn min(self, other: Self) -> Self {
        Self([self.0, other.0].into_iter().flatten().min())
    }

    /// The time that is left in whole milliseconds, rounded up so that no wait ends early.
    #[must_use]
    pub fn remaining_ms(self) -> i32 {
        let ms = self.remaining().as_nanos().div_ceil(1_000_000);
        i32::try_from(ms).unwrap_or(i32::MAX)
    }

    /// The time that is left for poll(2).
    #[must_use]
    pub fn poll_timeout(self) -> PollTimeout {
        match self.0 {
            Some(_) => PollTimeout::try_from(self.remaining_ms()).unwrap_or(PollTimeout::MAX),
            None => PollTimeout::NONE,
        }
    }
}

/// Waits until `fd` is readable or has failed (the next read reports it); `false` when the deadline
/// passed first.
///
/// # Errors
/// Those of poll(2).
pub fn readable(fd: BorrowedFd<'_>, deadline: Deadline) -> io::Result<bool> {
    ready(fd, PollFlags::POLLIN, deadline)
}

pub(crate) fn ready(fd: BorrowedFd<'_>, events: PollFlags, deadline: Deadline) -> io::Result<bool> {
    loop {
        match poll(&mut [PollFd::new(fd, events)], deadline.poll_timeout()) {
            // The longest timeout of poll(2) may be shorter than the time remaining.
            Ok(0) if !deadline.has_passed() => {}
            Ok(ready) => return Ok(ready != 0),
            Err(Errno::EINTR) => {}
            Err(errno) => return Err(errno.into()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn timeouts_are_rounded_up() {
        let now = Deadline::after(Duration::ZERO);
        assert_eq!(now.poll_timeout(), PollTimeout::ZERO);
        let ms = Deadline::after(Duration::from_secs(1000)).poll_timeout().as_millis();
        assert!(ms.is_some_and(|ms| (999_000..=1_000_000).contains(&ms)), "{ms:?}");
        let soon = Deadline::after(Duration::from_micros(900));
        assert!(soon.has_passed() || soon.poll_timeout().as_millis() == Some(1));
    }

    #[test]
    fn a_deadline_beyond_the_clock_is_never() {
        let never = Deadline::after(Duration::MAX);
        assert!(never.poll_timeout().is_none() && !never.has_passed());
        assert!(Deadline::after(None).poll_timeout().is_none());
        let soon = Deadline::after(Duration::from_secs(60));
        assert!(never.min(soon).remaining() <= Duration::from_secs(60));
    }
}
