//! Waiting for a file descriptor with a deadline (poll(2)), for what blocks outside the data path.

use std::io;
use std::os::fd::BorrowedFd;
use std::time::{Duration, Instant};

use nix::errno::Errno;
use nix::poll::{PollFd, PollFlags, PollTimeout, poll};

/// A point in time, or never.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Deadline(Option<Instant>);

impl Deadline {
    /// `timeout` from now; never, if the clock does not reach that far.
    pub(crate) fn after(timeout: Duration) -> Self {
        Self(Instant::now().checked_add(timeout))
    }

    /// The time remaining; zero once the deadline has passed.
    pub(crate) fn left(self) -> Duration {
        self.0
            .map_or(Duration::MAX, |at| at.saturating_duration_since(Instant::now()))
    }

    /// The time remaining in whole milliseconds, rounded up, so that no wait ends early.
    pub(crate) fn left_ms(self) -> i32 {
        let ms = self.left().as_nanos().div_ceil(1_000_000);
        i32::try_from(ms).unwrap_or(i32::MAX)
    }
}

/// Waits until `fd` is readable or has failed; `false` when the deadline passed first (poll(2)).
pub(crate) fn readable(fd: BorrowedFd<'_>, deadline: Deadline) -> io::Result<bool> {
    loop {
        let timeout = PollTimeout::try_from(deadline.left_ms()).unwrap_or(PollTimeout::MAX);
        match poll(&mut [PollFd::new(fd, PollFlags::POLLIN)], timeout) {
            Ok(0) if deadline.left().is_zero() => return Ok(false),
            // Interrupted, or a deadline beyond the longest timeout of poll(2).
            Ok(0) | Err(Errno::EINTR) => {}
            Ok(_) => return Ok(true),
            Err(error) => return Err(error.into()),
        }
    }
}
