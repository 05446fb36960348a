//! The hello listener: a listening socket and the connections without a complete hello (first
//! message).
//!
//! It polls all pending connections at once, so a peer that sends nothing blocks no other. A
//! connection has [`HELLO_TIMEOUT`] to send at most [`MAX_HELLO`](super::wire::MAX_HELLO) bytes
//! that prove the group's secret; of more than [`MAX_PENDING`] the oldest is dropped.

use std::collections::VecDeque;
use std::io::{self, Read, Write};
use std::net::{IpAddr, SocketAddr, TcpListener, TcpStream};
use std::os::fd::{AsFd, BorrowedFd};
use std::time::{Duration, Instant};

use nix::errno::Errno;
use nix::poll::{PollFd, PollFlags, PollTimeout, poll};

use super::auth::{Nonce, Session, TAG};
use super::connection::Connection;
use super::secret::{Secret, random};
use super::wire::{BootstrapMessage, HEADER, MAX_HELLO, body_length};

const HELLO_TIMEOUT: Duration = Duration::from_secs(10);
/// Pending connections beyond the expected ranks.
const MAX_PENDING: usize = 256;
/// Pause after accept(2) failed for want of a descriptor or memory.
const ACCEPT_BACKOFF: Duration = Duration::from_millis(20);

#[derive(Debug)]
struct PendingConnection {
    stream: TcpStream,
    peer_addr: SocketAddr,
    accepted_at: Instant,
    nonce: Nonce,
    received: Vec<u8>,
}

/// Where clients get the nonce of the server's end.
#[derive(Clone, Copy, Debug)]
pub(super) enum ServerNonce {
    /// From an authenticated message: one nonce for all, of whom each connects once.
    Known(Nonce),
    /// From the server: each connection has one of its own.
    Challenge,
}

impl ServerNonce {
    /// `None` for a connection that fails at once.
    fn for_connection(self, mut stream: &TcpStream) -> Option<Nonce> {
        match self {
            Self::Known(nonce) => Some(nonce),
            Self::Challenge => {
                let nonce = random().ok()?;
                // A new socket's buffer has room for it.
                stream.write_all(&BootstrapMessage::Challenge(nonce).encode()).ok()?;
                Some(nonce)
            }
        }
    }
}

#[derive(Debug)]
pub(super) struct HelloListener {
    listener: TcpListener,
    address: SocketAddr,
    secret: Secret,
    nonce: ServerNonce,
    pending: VecDeque<PendingConnection>,
    accept_paused_until: Option<Instant>,
    max_pending: usize,
}

#[derive(Debug)]
pub(super) struct Accepted {
    pub(super) peer_addr: SocketAddr,
    pub(super) hello: BootstrapMessage,
    pub(super) connection: Connection,
}

/// A connection that did not prove the group's secret.
#[derive(Debug)]
pub(super) struct Unproved {
    pub(super) peer_addr: SocketAddr,
    pub(super) reason: &'static str,
}

impl HelloListener {
    /// Listens at `address`; port 0 selects a free one. `expected` connections may arrive at once.
    pub(super) fn bind(address: SocketAddr, expected: u32, secret: Secret, nonce: ServerNonce) -> io::Result<Self> {
        let listener = TcpListener::bind(address)?;
        listener.set_nonblocking(true)?;
        let address = listener.local_addr()?;
        Ok(Self {
            listener,
            address,
            secret,
            nonce,
            pending: VecDeque::new(),
            accept_paused_until: None,
            max_pending: MAX_PENDING + expected as usize,
        })
    }

    pub(super) fn address(&self) -> SocketAddr {
        self.address
    }

    /// Waits for the next complete hello, authenticated or refused. Returns `None` at `deadline`,
    /// or once `wakeup` is readable.
    pub(super) fn next_hello(
        &mut self,
        deadline: Instant,
        wakeup: Option<BorrowedFd<'_>>,
    ) -> io::Result<Option<Result<Accepted, Unproved>>> {
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
                if let Some(hello) = self.pending[i].read_hello(&self.secret)
                    && let Some(pending) = self.pending.remove(i)
                {
                    return Ok(Some(pending.authenticated(hello)));
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
                let Some(nonce) = self.nonce.for_connection(&stream) else {
                    return Ok(());
                };
                if self.pending.len() == self.max_pending {
                    self.pending.pop_front();
                }
                self.pending.push_back(PendingConnection {
                    stream,
                    peer_addr,
                    accepted_at: Instant::now(),
                    nonce,
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
    fn read_hello(&mut self, secret: &Secret) -> Option<Result<(BootstrapMessage, Session), &'static str>> {
        loop {
            let missing_bytes = match self.missing_bytes() {
                Ok(0) => return Some(authenticate(&self.received, self.nonce, secret)),
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
        Ok(HEADER + body + TAG - self.received.len())
    }

    fn authenticated(self, hello: Result<(BootstrapMessage, Session), &'static str>) -> Result<Accepted, Unproved> {
        let Self { stream, peer_addr, .. } = self;
        let hello = hello.and_then(|hello| match stream.set_nonblocking(false) {
            Ok(()) => Ok(hello),
            Err(_) => Err("its connection broke"),
        });
        match hello {
            Ok((hello, session)) => Ok(Accepted {
                peer_addr,
                hello,
                connection: Connection { stream, session },
            }),
            Err(reason) => {
                // Best effort: the peer may be gone, or not read.
                let _ = (&stream).write(&BootstrapMessage::Refuse(reason.to_owned()).encode());
                Err(Unproved { peer_addr, reason })
            }
        }
    }
}

/// A hello, if its MAC proves the secret.
fn authenticate(received: &[u8], nonce: Nonce, secret: &Secret) -> Result<(BootstrapMessage, Session), &'static str> {
    let (frame, tag) = received.split_last_chunk::<TAG>().ok_or("it is cut off")?;
    let hello = BootstrapMessage::decode(&frame[HEADER..]).ok_or("it makes no sense")?;
    let handshake = hello.handshake(nonce).ok_or("its first message is no hello")?;
    let mut session = Session::server(secret, &handshake);
    match session.receive.open(frame, tag) {
        Ok(()) => Ok((hello, session)),
        Err(_) => Err("it does not prove the group's secret"),
    }
}

/// A poll(2) timeout: whole milliseconds, rounded up.
pub(crate) fn poll_timeout(left: Duration) -> PollTimeout {
    let ms = left.as_nanos().div_ceil(1_000_000);
    PollTimeout::try_from(i32::try_from(ms).unwrap_or(i32::MAX)).unwrap_or(PollTimeout::MAX)
}

/// Whether other ranks can connect to `ip`: the wildcard address is not for the table.
pub(super) fn is_connectable(ip: IpAddr) -> bool {
    !ip.is_unspecified() && !ip.is_multicast()
}
