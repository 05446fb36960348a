//! The sleep of the progress thread, and the wake-ups that end it.
//!
//! A thread that gives the progress thread work publishes it, as a [reason](Reasons) or a
//! [deadline](Deadline), and wakes the sleeper if it would miss it. The progress thread prepares its
//! sleep, polls what other processes write without a system call (the shm rings, which have an
//! announcement of their own), and commits. The protocol is in [`state`], its proof in `model.rs`.
//!
//! Nothing else in this crate makes a thread of the device sleep. Applications sleep on
//! [`EventQueue`](crate::EventQueue)s.

use std::io;
use std::os::fd::{AsFd, BorrowedFd};
use std::time::Duration;

use doorbell_roce_proto::Instant;
use nix::errno::Errno;
use nix::poll::{PollFd, PollFlags, ppoll};
use nix::sys::eventfd::{EfdFlags, EventFd};
use nix::sys::time::TimeSpec;

mod state;

pub(crate) use state::{Deadline, NEVER, Reasons};

use state::{Prepared, SleepState};

/// Shared by the progress thread and those that give it work.
pub(crate) struct Wakeup {
    state: SleepState,
    /// Ends the sleeper's ppoll(2).
    event: EventFd,
}

/// The files whose events end a sleep, beside wake-ups.
pub(crate) struct Sources<'a> {
    /// Readable, or writable while [`Reasons::UDP_BLOCKED`] is published.
    pub(crate) socket: BorrowedFd<'a>,
    pub(crate) taken_over: Option<BorrowedFd<'a>>,
    pub(crate) multicast: Option<BorrowedFd<'a>>,
    pub(crate) port: Option<BorrowedFd<'a>>,
    pub(crate) members: Option<BorrowedFd<'a>>,
}

/// What ended a sleep, beside packets, wake-ups and the deadline.
#[derive(Clone, Copy, PartialEq, Eq, Default, Debug)]
pub(crate) struct Woken {
    /// The port may have changed.
    pub(crate) port: bool,
    /// There are messages of other processes on this address.
    pub(crate) members: bool,
}

/// An announced sleep, which ends when this is dropped.
pub(crate) struct Sleep<'a> {
    wakeup: &'a Wakeup,
    prepared: Prepared,
}

impl Wakeup {
    /// Fails without a file descriptor left: eventfd(2).
    pub(crate) fn new() -> io::Result<Self> {
        Ok(Self {
            state: SleepState::new(),
            event: EventFd::from_flags(EfdFlags::EFD_CLOEXEC | EfdFlags::EFD_NONBLOCK)?,
        })
    }

    pub(crate) fn publish(&self, reason: Reasons) {
        self.state.publish(reason);
        self.wake_before(0);
    }

    /// Publishes or retracts `reason`, without a wake-up. Whether that changed anything.
    #[inline]
    pub(crate) fn set(&self, reason: Reasons, holds: bool) -> bool {
        let changes = self.has(reason) != holds;
        match holds {
            _ if !changes => {}
            true => self.state.publish(reason),
            false => self.state.retract(reason),
        }
        changes
    }

    #[inline]
    pub(crate) fn has(&self, reason: Reasons) -> bool {
        self.state.has(reason)
    }

    /// Changes a deadline, without a wake-up. The callers of one deadline exclude each other.
    pub(crate) fn set_deadline(&self, which: Deadline, at: u64) {
        self.state.set_deadline(which, at);
    }

    pub(crate) fn deadline(&self, which: Deadline) -> u64 {
        self.state.deadline(which)
    }

    /// Wakes the progress thread if it sleeps past `at`, for what the caller has published.
    pub(crate) fn wake_before(&self, at: u64) {
        if self.state.must_wake(at) {
            self.write();
        }
    }

    pub(crate) fn is_asleep(&self) -> bool {
        self.state.is_asleep()
    }

    /// Ends the progress thread's sleep or pause for good.
    pub(crate) fn stop(&self) {
        self.state.publish(Reasons::STOP);
        self.write();
    }

    fn write(&self) {
        // Fails only at 2^64 - 1 pending wake-ups, and then the eventfd is readable anyway.
        let _ = self.event.write(1);
    }

    /// Announces a sleep; `None` when a reason to stay awake is published.
    pub(crate) fn prepare_sleep(&self) -> Option<Sleep<'_>> {
        let prepared = self.state.prepare_sleep()?;
        Some(Sleep { wakeup: self, prepared })
    }

    /// Pauses without announcing a sleep: only [`stop`](Self::stop) ends it early.
    pub(crate) fn pause(&self, time: Duration) {
        // An error makes the pause shorter.
        let _ = self.poll(&mut [PollFd::new(self.event.as_fd(), PollFlags::POLLIN)], Some(time));
    }

    fn poll(&self, files: &mut [PollFd<'_>], timeout: Option<Duration>) -> io::Result<()> {
        let result = ppoll(files, timeout.map(TimeSpec::from_duration), None);
        if files[0].any() == Some(true) {
            // A waker may write after the sleep that it ended: the next one is short then.
            let _ = self.event.read();
        }
        match result {
            Ok(_) | Err(Errno::EINTR) => Ok(()),
            Err(errno) => Err(errno.into()),
        }
    }
}

impl Sleep<'_> {
    pub(crate) fn due(&self) -> Option<Instant> {
        (self.prepared.due != NEVER).then_some(Instant(self.prepared.due))
    }

    /// Sleeps until a wake-up, an event of `sources`, or `timeout`; without one for ever. May
    /// return early.
    ///
    /// # Errors
    /// See ppoll(2): only from a lack of kernel memory.
    pub(crate) fn commit(self, sources: &Sources<'_>, timeout: Option<Duration>) -> io::Result<Woken> {
        let socket_events = match self.prepared.reasons.intersects(Reasons::UDP_BLOCKED) {
            true => PollFlags::POLLIN | PollFlags::POLLOUT,
            false => PollFlags::POLLIN,
        };
        let event = self.wakeup.event.as_fd();
        // Duplicates are harmless.
        let readable = |file: Option<_>| PollFd::new(file.unwrap_or(event), PollFlags::POLLIN);
        let mut files = [
            readable(None),
            PollFd::new(sources.socket, socket_events),
            readable(sources.taken_over),
            readable(sources.port),
            readable(sources.members),
            readable(sources.multicast),
        ];
        self.wakeup.poll(&mut files, timeout)?;
        let is_ready = |index: usize, file: Option<_>| file.is_some() && files[index].any() == Some(true);
        Ok(Woken {
            port: is_ready(3, sources.port),
            members: is_ready(4, sources.members),
        })
    }
}

impl Drop for Sleep<'_> {
    fn drop(&mut self) {
        self.wakeup.state.end_sleep();
    }
}

#[cfg(all(test, not(doorbell_loom)))]
mod tests;
