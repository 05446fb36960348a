//! Event queues with a file descriptor: completion channels and asynchronous events.

use std::collections::VecDeque;
use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, RawFd};
use std::sync::Arc;

use nix::sys::eventfd::{EfdFlags, EventFd};
use parking_lot::Mutex;

/// A value of the owner's choice that names an object in its events.
pub type Token = u64;

/// An asynchronous event of a queue pair (ibv_get_async_event(3)).
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub enum QpEvent {
    /// It went to the error state because of an error that no completion reports.
    Fatal,
    /// The peer sent a malformed request.
    RequestError,
    /// A request of the peer was refused access.
    AccessError,
    /// The first message came while it was still in RTR.
    CommunicationEstablished,
    /// Its send queue has drained.
    SendQueueDrained,
    /// It is in the error state, and takes no more receives from its shared receive queue.
    LastWqeReached,
}

/// An asynchronous event of the device's port (ibv_get_async_event(3)).
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub enum PortEvent {
    /// Its interface came up.
    Active,
    /// Its interface went down.
    Error,
    /// Its interface lost the device's address, or has it again: the GID changes with it.
    GidChange,
}

/// An asynchronous event.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub enum Event {
    /// A completion queue overran: completions were lost, and it is unusable.
    CqOverrun(Token),
    /// Something happened to a queue pair.
    Qp(Token, QpEvent),
    /// A shared receive queue has fewer receives than the armed limit.
    SrqLimit(Token),
    /// Something happened to the port.
    Port(PortEvent),
    /// The device failed: its socket broke, or its progress thread panicked.
    DeviceFatal,
}

/// The event queue for the asynchronous events of an object, and its name there.
#[derive(Clone, Debug)]
pub struct EventOwner {
    /// The queue.
    pub queue: Arc<EventQueue<Event>>,
    /// The object's name in it.
    pub token: Token,
}

/// A queue of events with a file descriptor, readable while it holds any. poll(2) and fcntl(2) may
/// be used on the descriptor; only this type may read it.
#[derive(Debug)]
pub struct EventQueue<T> {
    /// A semaphore: its count is at least the number of `waiting`.
    fd: EventFd,
    waiting: Mutex<VecDeque<T>>,
}

impl<T> EventQueue<T> {
    /// An empty queue, blocking.
    ///
    /// # Errors
    /// When the process has no file descriptor left: eventfd(2).
    pub fn new() -> io::Result<Self> {
        let fd = EventFd::from_flags(EfdFlags::EFD_CLOEXEC | EfdFlags::EFD_SEMAPHORE)?;
        Ok(Self {
            fd,
            waiting: Mutex::new(VecDeque::new()),
        })
    }

    /// Appends an event and wakes a waiting thread.
    pub fn push(&self, event: T) {
        self.waiting.lock().push_back(event);
        // Fails only beyond 2^64 - 2 events waiting.
        let _ = self.fd.write(1);
    }

    /// The oldest event; waits for one unless the descriptor is non-blocking. `taken` is called
    /// under the lock that [`remove`](Self::remove) takes: what it counts is counted when a later
    /// `remove` returns.
    ///
    /// # Errors
    /// Those of read(2): `WouldBlock` when there is none and the descriptor is non-blocking, and
    /// `Interrupted` by a signal handler without `SA_RESTART` (signal(7)).
    pub fn wait(&self, taken: impl Fn(&T)) -> io::Result<T> {
        loop {
            self.fd.read()?;
            // None when the event was removed after it was counted.
            let mut waiting = self.waiting.lock();
            if let Some(event) = waiting.pop_front() {
                taken(&event);
                return Ok(event);
            }
        }
    }

    /// Removes the events of which `is_gone` is true; the descriptor is not readable for them.
    pub fn remove(&self, is_gone: impl Fn(&T) -> bool) {
        drop(self.take(is_gone));
    }

    /// As [`remove`](Self::remove), and returns them in order.
    pub fn take(&self, is_wanted: impl Fn(&T) -> bool) -> Vec<T> {
        let mut waiting = self.waiting.lock();
        let (mut taken, mut kept) = (Vec::new(), VecDeque::new());
        for event in waiting.drain(..) {
            if is_wanted(&event) {
                taken.push(event);
            } else {
                kept.push_back(event);
            }
        }
        *waiting = kept;
        // Fewer when a waiting thread has decremented the count: it finds no event and waits on.
        for _ in &taken {
            if !self.count_down() {
                break;
            }
        }
        taken
    }

    /// Decrements the semaphore; false if it is 0. Never blocks (preadv2(2)). Where eventfd has no
    /// RWF_NOWAIT, before Linux 5.8, the count stays: one spurious wake-up.
    fn count_down(&self) -> bool {
        let mut count = [0_u8; size_of::<u64>()];
        let into = libc::iovec {
            iov_base: count.as_mut_ptr().cast(),
            iov_len: count.len(),
        };
        // SAFETY: the descriptor is open, and the one element is 8 bytes that may be written. An
        // offset of -1 is that of read(2).
        let read = unsafe { libc::preadv2(self.fd.as_fd().as_raw_fd(), &into, 1, -1, libc::RWF_NOWAIT) };
        read == count.len() as isize
    }

    /// The number of queued events.
    pub fn len(&self) -> usize {
        self.waiting.lock().len()
    }

    /// Whether there are none.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }
}

impl<T> AsFd for EventQueue<T> {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.fd.as_fd()
    }
}

impl<T> AsRawFd for EventQueue<T> {
    fn as_raw_fd(&self) -> RawFd {
        self.fd.as_fd().as_raw_fd()
    }
}

#[cfg(test)]
mod tests {
    use nix::poll::{PollFd, PollFlags, PollTimeout, poll};

    use super::*;

    #[test]
    fn events_are_in_order_without_removed_ones() {
        let queue = EventQueue::new().unwrap();
        for event in [1, 2, 3, 4] {
            queue.push(event);
        }
        queue.remove(|&event| event == 2);
        assert_eq!(queue.wait(|_| {}).unwrap(), 1);
        assert_eq!(queue.wait(|_| {}).unwrap(), 3);
        assert_eq!(queue.wait(|_| {}).unwrap(), 4);
        assert!(queue.is_empty());
    }

    #[test]
    fn the_descriptor_is_readable_only_while_events_are_queued() {
        let queue = EventQueue::new().unwrap();
        let readable = || {
            let mut fds = [PollFd::new(queue.as_fd(), PollFlags::POLLIN)];
            poll(&mut fds, PollTimeout::ZERO).unwrap() == 1
        };
        queue.push(1);
        queue.push(2);
        queue.push(1);
        queue.remove(|&event| event == 1);
        assert!(readable());
        assert_eq!(queue.wait(|_| {}).unwrap(), 2);
        assert!(!readable(), "nothing waits");
        queue.push(3);
        queue.remove(|_| true);
        assert!(!readable());
        queue.push(4);
        assert_eq!(queue.wait(|_| {}).unwrap(), 4);
    }

    #[test]
    fn a_waiting_thread_wakes() {
        let queue = Arc::new(EventQueue::new().unwrap());
        let waiter = std::thread::spawn({
            let queue = Arc::clone(&queue);
            move || queue.wait(|_| {}).unwrap()
        });
        queue.push(7);
        assert_eq!(waiter.join().unwrap(), 7);
    }
}
