//! The hello listener: a listening socket and the connections without a complete hello (first
//! message).
//!
//! It polls all pending connections at once, so a peer that sends nothing blocks no other. A
//! connection has [`HELLO_TIMEOUT`] to send at most [`MAX_HELLO`](super::wire::MAX_HELLO) bytes; of
//! more than [`MAX_PENDING`] the oldest is dropped.

use std::collections::VecDeque;
use std::io::{self, Read, Write};
use std::net::{IpAddr, SocketAddr, TcpListener, TcpStream};
use std::os::fd::{AsFd, BorrowedFd};
use std::time::{Duration, Instant};

use nix::errno::Errno;
use nix::poll::{PollFd, PollFlags, PollTimeout, poll};

use super::wire::{BootstrapMessage, HEADER, MAX_BODY, MAX_HELLO, body_length};

const HELLO_TIMEOUT: Duration = Duration::from_secs(10);
/// Pending connections beyond the expected ranks.
const MAX_PENDING: usize = 256;
const WRITE_TIMEOUT: Duration = Duration::from_secs(10);
/// Pause after accept(2) failed for want of a descriptor or memory.
const ACCEPT_BACKOFF: Duration = Duration::from_millis(20);

#[derive(Debug)]
struct PendingConnection {
    stream: TcpStream,
    peer_addr: SocketAddr,
    accepted_at: Instant,
    received: Vec<u8>,
}

#[derive(Debug)]
pub(super) struct HelloListener {
    listener: TcpListener,
    address: SocketAddr,
    pending: VecDeque<PendingConnection>,
    accept_paused_until: Option<Instant>,
    max_pending: usize,
}

#[derive(Debug)]
pub(super) struct Accepted {
    pub(super) stream: TcpStream,
    pub(super) peer_addr: SocketAddr,
    pub(super) hello: Result<BootstrapMessage, &'static str>,
}

impl HelloListener {
    /// Listens at `address`; port 0 selects a free one. `expected` connections may arrive at once.
    pub(super) fn bind(address: SocketAddr, expected: u32) -> io::Result<Self> {
        let listener = TcpListener::bind(address)?;
        listener.set_nonblocking(true)?;
        let address = listener.local_addr()?;
        Ok(Self {
            listener,
            address,
            pending: VecDeque::new(),
            accept_paused_until: None,
            max_pending: MAX_PENDING + expected as usize,
        })
    }

    pub(super) fn address(&self) -> SocketAddr {
        self.address
    }

    /// Waits for the next complete or invalid hello. Returns `None` at `deadline`, or once `wakeup`
    /// is readable.
    pub(super) fn next_hello(
        &mut self,
        deadline: Instant,
        wakeup: Option<BorrowedFd<'_>>,
    ) -> io::Result<Option<Accepted>> {
        loop {
            let now = Instant::now();
            let Some(left) = deadline.checked_duration_since(now).filter(|left| !left.is_zero()) else {
                return Ok(None);
            };
            self.pending
                .retain(|connection| now < connection.accepted_at + HELLO_TIMEOUT);
            let oldest_expires = self
                .pending
                .front()
                .map(|connection| connection.accepted_at + HELLO_TIMEOUT);
            self.accept_paused_until = self.accept_paused_until.filter(|until| now < *until);
            let until = [oldest_expires, self.accept_paused_until].into_iter().flatten().min();
            let left = until.map_or(left, |until| left.min(until.saturating_duration_since(now)));

            let events = if self.accept_paused_until.is_some() {
                PollFlags::empty()
            } else {
                PollFlags::POLLIN
            };
            let mut fds = vec![PollFd::new(self.listener.as_fd(), events)];
            fds.extend(
                self.pending
                    .iter()
                    .map(|c| PollFd::new(c.stream.as_fd(), PollFlags::POLLIN)),
            );
            fds.extend(wakeup.map(|wakeup| PollFd::new(wakeup, PollFlags::POLLIN)));
            match poll(&mut fds, poll_timeout(left)) {
                Ok(_) => {}
                Err(Errno::EINTR) => continue,
                Err(e) => return Err(e.into()),
            }
            let ready: Vec<bool> = fds
                .iter()
                .map(|fd| fd.revents().is_some_and(|events| !events.is_empty()))
                .collect();
            if wakeup.is_some() && ready.last() == Some(&true) {
                return Ok(None);
            }
            for i in (0..self.pending.len()).filter(|i| ready[i + 1]) {
                if let Some(hello) = self.pending[i].read_hello()
                    && let Some(connection) = self.pending.remove(i)
                    && connection.stream.set_nonblocking(false).is_ok()
                {
                    return Ok(Some(Accepted {
                        stream: connection.stream,
                        peer_addr: connection.peer_addr,
                        hello,
                    }));
                }
            }
            if ready[0] {
                self.accept()?;
            }
        }
    }

    fn accept(&mut self) -> io::Result<()> {
        match self.listener.accept() {
            Ok((stream, peer_addr)) => {
                stream.set_nonblocking(true)?;
                stream.set_nodelay(true)?;
                if self.pending.len() == self.max_pending {
                    self.pending.pop_front();
                }
                self.pending.push_back(PendingConnection {
                    stream,
                    peer_addr,
                    accepted_at: Instant::now(),
                    received: Vec::new(),
                });
                Ok(())
            }
            Err(e) => match Errno::from_raw(e.raw_os_error().unwrap_or(0)) {
                Errno::EMFILE | Errno::ENFILE | Errno::ENOBUFS | Errno::ENOMEM => {
                    self.accept_paused_until = Some(Instant::now() + ACCEPT_BACKOFF);
                    Ok(())
                }
                Errno::EBADF | Errno::EINVAL | Errno::ENOTSOCK | Errno::EOPNOTSUPP | Errno::EFAULT => Err(e),
                // accept(2): the connection is gone, or the error is of this connection only.
                _ => Ok(()),
            },
        }
    }
}

impl PendingConnection {
    /// Reads available bytes. Returns `None` while the hello is incomplete.
    fn read_hello(&mut self) -> Option<Result<BootstrapMessage, &'static str>> {
        loop {
            let missing_bytes = match self.missing_bytes() {
                Ok(0) => return Some(BootstrapMessage::decode(&self.received[HEADER..]).ok_or("it makes no sense")),
                Ok(missing_bytes) => missing_bytes,
                Err(reason) => return Some(Err(reason)),
            };
            let mut some = [0; MAX_HELLO];
            let missing_bytes = missing_bytes.min(some.len());
            match self.stream.read(&mut some[..missing_bytes]) {
                Ok(0) => return Some(Err("it hung up")),
                Ok(n) => self.received.extend_from_slice(&some[..n]),
                Err(e) if e.kind() == io::ErrorKind::WouldBlock => return None,
                Err(e) if e.kind() == io::ErrorKind::Interrupted => {}
                Err(_) => return Some(Err("its connection broke")),
            }
        }
    }

    fn missing_bytes(&self) -> Result<usize, &'static str> {
        let Some(header) = self.received.first_chunk::<HEADER>() else {
            return Ok(HEADER - self.received.len());
        };
        let body = body_length(*header, MAX_HELLO).ok_or("it is no doorbell of this version")?;
        Ok(HEADER + body - self.received.len())
    }
}

/// A poll(2) timeout: whole milliseconds, rounded up.
pub(crate) fn poll_timeout(left: Duration) -> PollTimeout {
    let ms = left.as_nanos().div_ceil(1_000_000);
    PollTimeout::try_from(i32::try_from(ms).unwrap_or(i32::MAX)).unwrap_or(PollTimeout::MAX)
}

pub(super) fn send_message(mut stream: &TcpStream, message: &BootstrapMessage) -> io::Result<()> {
    stream.set_write_timeout(Some(WRITE_TIMEOUT))?;
    stream.write_all(&message.encode())
}

/// Reads a message; an authenticated peer may send a long one.
pub(super) fn receive_message(mut stream: &TcpStream, deadline: Instant) -> io::Result<BootstrapMessage> {
    let mut read = |buffer: &mut [u8]| -> io::Result<()> {
        let mut done = 0;
        while done < buffer.len() {
            let left = deadline.saturating_duration_since(Instant::now());
            if left.is_zero() {
                return Err(io::ErrorKind::TimedOut.into());
            }
            stream.set_read_timeout(Some(left.max(Duration::from_millis(1))))?;
            match stream.read(&mut buffer[done..]) {
                Ok(0) => return Err(io::ErrorKind::UnexpectedEof.into()),
                Ok(n) => done += n,
                Err(e) if matches!(e.kind(), io::ErrorKind::Interrupted | io::ErrorKind::WouldBlock) => {}
                Err(e) => return Err(e),
            }
        }
        Ok(())
    };
    let nonsense = || io::Error::new(io::ErrorKind::InvalidData, "it is no doorbell of this version");
    let mut header = [0; HEADER];
    read(&mut header)?;
    let mut body = vec![0; body_length(header, MAX_BODY).ok_or_else(nonsense)?];
    read(&mut body)?;
    BootstrapMessage::decode(&body).ok_or_else(nonsense)
}

pub(super) fn describe_io_error(e: &io::Error) -> String {
    match e.kind() {
        io::ErrorKind::UnexpectedEof => "it hung up".to_owned(),
        io::ErrorKind::TimedOut => "it did not answer in time".to_owned(),
        _ => e.to_string(),
    }
}

/// Whether other ranks can connect to `ip`: the wildcard address is not for the table.
pub(super) fn is_connectable(ip: IpAddr) -> bool {
    !ip.is_unspecified() && !ip.is_multicast()
}
