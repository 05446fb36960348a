//! Parking: a progress thread sleeps until a datagram, a deadline or another thread's wake-up.

use nix::errno::Errno;
use nix::poll::{PollFd, PollFlags, ppoll};
use nix::sys::eventfd::{EfdFlags, EventFd};
use nix::sys::time::TimeSpec;
use std::io;
use std::net::UdpSocket;
use std::os::fd::{AsFd, OwnedFd};
use std::sync::Arc;
use std::time::Duration;

use super::socket::{Socket, TakenOver};
use crate::host::{CloseOnFork, Host};
use wake_state::WakeState;

mod wake_state;

struct Shared {
    wake_state: WakeState,
    /// Wakes the thread in ppoll(2).
    event: EventFd,
}

/// What [`Parker::park`] waits for besides wake-ups and the timeout.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Interest {
    /// A datagram to receive.
    Receive,
    /// A datagram to receive, or socket space for the rest of a batch.
    ReceiveOrSend,
}

/// The sleeping side, owned by one thread. Takes no lock of the halves, whose socket it shares.
pub struct Parker {
    socket: Arc<Socket>,
    taken_over: TakenOver,
    watched: Option<Arc<OwnedFd>>,
    /// The process group, whose messages wake the thread.
    host: Option<Arc<Host>>,
    shared: Arc<Shared>,
}

/// What ended a sleep, besides packets, wake-ups and the timeout.
#[derive(Clone, Copy, PartialEq, Eq, Default, Debug)]
pub struct Woken {
    /// The port may have changed.
    pub port: bool,
    /// There are messages of other processes on this address.
    pub members: bool,
}

/// Wakes the [`Parker`]'s thread: one atomic exchange while that is awake.
#[derive(Clone)]
pub struct Waker {
    shared: Arc<Shared>,
}

impl Parker {
    /// Also wakes when `watched` is readable. Fails without a file descriptor left: eventfd(2).
    pub(super) fn new(socket: Arc<Socket>, taken_over: TakenOver, watched: Option<Arc<OwnedFd>>) -> io::Result<Self> {
        let event = EventFd::from_flags(EfdFlags::EFD_CLOEXEC | EfdFlags::EFD_NONBLOCK)?;
        let shared = Arc::new(Shared {
            wake_state: WakeState::new(),
            event,
        });
        Ok(Self {
            socket,
            taken_over,
            watched,
            host: None,
            shared,
        })
    }

    /// From now on messages of other processes on this address wake the thread.
    pub(crate) fn watch_host(&mut self, host: Arc<Host>) {
        self.host = Some(host);
    }

    /// Adds the socket of the address's own port, taken over from a process that is gone.
    ///
    /// # Errors
    /// When there is such a socket already, or the kernel refuses its options.
    pub fn take_over(&mut self, port: CloseOnFork<UdpSocket>) -> io::Result<()> {
        self.taken_over.set(port)
    }

    pub(crate) fn waker(&self) -> Waker {
        Waker {
            shared: Arc::clone(&self.shared),
        }
    }

    /// Sleeps until an event of `interest`, a [`Waker::wake`] since the last return, or `timeout`;
    /// without one for ever. May return early. Returns what else woke it.
    ///
    /// # Errors
    /// See ppoll(2): only from a lack of kernel memory.
    pub fn park(&mut self, interest: Interest, timeout: Option<Duration>) -> io::Result<Woken> {
        let shared = &*self.shared;
        if !shared.wake_state.begin_sleep() {
            return Ok(Woken::default());
        }
        let socket_events = match interest {
            Interest::Receive => PollFlags::POLLIN,
            Interest::ReceiveOrSend => PollFlags::POLLIN | PollFlags::POLLOUT,
        };
        let port = self.watched.as_deref().map(AsFd::as_fd);
        let members = self.host.as_deref().map(Host::pollfd);
        let taken_over = self.taken_over.get().map(AsFd::as_fd);
        // Duplicates are harmless.
        let none = shared.event.as_fd();
        let mut watched = [
            PollFd::new(self.socket.as_fd(), socket_events),
            PollFd::new(shared.event.as_fd(), PollFlags::POLLIN),
            PollFd::new(port.unwrap_or(none), PollFlags::POLLIN),
            PollFd::new(members.unwrap_or(none), PollFlags::POLLIN),
            PollFd::new(taken_over.unwrap_or(none), PollFlags::POLLIN),
        ];
        let result = ppoll(&mut watched, timeout.map(TimeSpec::from_duration), None);
        shared.wake_state.end_sleep();
        if watched[1].any() == Some(true) {
            // Already empty when an earlier round read what the waker wrote: harmless.
            let _ = shared.event.read();
        }
        match result {
            Ok(_) => Ok(Woken {
                port: port.is_some() && watched[2].any() == Some(true),
                members: members.is_some() && watched[3].any() == Some(true),
            }),
            Err(Errno::EINTR) => Ok(Woken::default()),
            Err(errno) => Err(errno.into()),
        }
    }
}

impl Waker {
    /// Wakes the parked thread, or keeps it from parking the next time.
    pub fn wake(&self) {
        if self.shared.wake_state.notify() {
            // Fails only at 2^64 - 1 pending wake-ups, and then the eventfd is readable anyway.
            let _ = self.shared.event.write(1);
        }
    }
}
