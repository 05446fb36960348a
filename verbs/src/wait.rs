//! Deadlines, and waiting with one.

use std::io;
use std::os::fd::AsFd;
use std::time::{Duration, Instant};

pub(crate) use doorbell_rendezvous::{Deadline, readable};
use nix::fcntl::{FcntlArg, OFlag, fcntl};

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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_deadline_beyond_the_clock_is_never() {
        assert_eq!(deadline_of(Some(Duration::MAX)), None);
        assert_eq!(deadline_of(None), None);
    }
}
