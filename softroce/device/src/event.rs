//! Queues of events with a file descriptor to wait on: completion channels and asynchronous events are both one.

use std::collections::VecDeque;
use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, RawFd};
use std::sync::Arc;

use nix::errno::Errno;
use nix::sys::eventfd::{EfdFlags, EventFd};
use parking_lot::Mutex;

/// A value of the owner's choosing that names an object in its events.
pub type Token = u64;

/// What happened to a queue pair unasked (ibv_get_async_event(3)).
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub enum QpEvent {
    /// It went into the error state by an error that no completion reports.
    Fatal,
    /// The peer sent a malformed request.
    RequestError,
    /// A request of the peer was refused access.
    AccessError,
    /// The first message came while it was still in RTR.
    CommunicationEstablished,
    /// Its send queue has drained.
    SendQueueDrained,
    /// It is in the error state, and takes no more receives of its shared receive queue.
    LastWqeReached,
}

/// What happened to the device's port (ibv_get_async_event(3)).
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub enum PortEvent {
    /// Its interface came up.
    Active,
    /// Its interface went down.
    Error,
    /// Its interface lost the device's address, or has it again: the GID comes and goes with it.
    GidChange,
}

/// An asynchronous event.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub enum Event {
    /// A completion queue overran: completions were lost, and it gives no more.
    CqOverrun(Token),
    /// Something happened to a queue pair.
    Qp(Token, QpEvent),
    /// Fewer receives are in a shared receive queue than the limit that was armed.
    SrqLimit(Token),
    /// Something happened to the port.
    Port(PortEvent),
    /// The device cannot go on: its socket broke, or its progress thread failed.
    DeviceFatal,
}

/// Where the asynchronous events of an object go, and by what name.
#[derive(Clone, Debug)]
pub struct Owner {
    /// The queue.
    pub queue: Arc<EventQueue<Event>>,
    /// The object's name in it.
    pub token: Token,
}

/// A queue of events whose file descriptor is readable while it holds any.
///
/// The descriptor may be watched with poll(2) and made non-blocking with fcntl(2); it must not be read by others.
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

    /// Appends an event and wakes whoever waits.
    pub fn push(&self, event: T) {
        self.waiting.lock().push_back(event);
        // Fails only beyond 2^64 - 2 events waiting.
        let _ = self.fd.write(1);
    }

    /// The oldest event; waits for one unless the descriptor is non-blocking. `taken` sees it while [`remove`](Self::remove) is still shut out: what
    /// it counts is counted when a later `remove` returns.
    ///
    /// # Errors
    /// `WouldBlock` when there is none and the descriptor is non-blocking; what read(2) says otherwise, but for EINTR, after which it waits on.
    pub fn wait(&self, taken: impl Fn(&T)) -> io::Result<T> {
        loop {
            match self.fd.read() {
                Ok(_) => {
                    // None when the event was removed after it was counted.
                    let mut waiting = self.waiting.lock();
                    if let Some(event) = waiting.pop_front() {
                        taken(&event);
                        return Ok(event);
                    }
                }
                Err(Errno::EINTR) => {}
                Err(errno) => return Err(errno.into()),
            }
        }
    }

    /// Takes out the events that `is_gone` says nobody may see any more. The descriptor does not stay readable for them.
    pub fn remove(&self, is_gone: impl Fn(&T) -> bool) {
        drop(self.take(is_gone));
    }

    /// As [`remove`](Self::remove), and gives them to the caller, in order.
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
        // Fewer when somebody who waits has counted one down already: he finds nothing, and waits on.
        for _ in &taken {
            if !self.count_down() {
                break;
            }
        }
        taken
    }

    /// Takes one off the semaphore's count; false if it is 0. Never blocks, though the descriptor may be a blocking one (preadv2(2)); where the kernel cannot do that to
    /// an eventfd, before Linux 5.8, the count stays, and who waits is woken once for nothing.
    fn count_down(&self) -> bool {
        let mut count = [0_u8; size_of::<u64>()];
        let into = libc::iovec {
            iov_base: count.as_mut_ptr().cast(),
            iov_len: count.len(),
        };
        // SAFETY: the descriptor is open, and the one element is 8 bytes that may be written. An offset of -1 is that of read(2).
        let read = unsafe { libc::preadv2(self.fd.as_fd().as_raw_fd(), &into, 1, -1, libc::RWF_NOWAIT) };
        read == count.len() as isize
    }

    /// How many events wait.
    pub fn len(&self) -> usize {
        self.waiting.lock().len()
    }

    /// Whether none waits.
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
    fn events_come_in_order_and_removed_ones_do_not() {
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
    fn the_descriptor_is_readable_for_what_is_there_alone() {
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
