//! The listening end: many connections go through their handshakes at once.

use std::cmp::Reverse;
use std::collections::HashMap;
use std::io;
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::os::fd::{AsFd, BorrowedFd};
use std::time::Duration;

use nix::errno::Errno;
use nix::poll::{PollFd, PollFlags, poll};

use super::deadline::{Deadline, readable};

/// Pause after accept(2) failed for want of a descriptor or memory.
const ACCEPT_BACKOFF: Duration = Duration::from_millis(20);

/// Bounds of an [`Acceptor`].
#[derive(Debug, Clone, Copy)]
pub struct Limits {
    /// Connections in their handshakes. When there are more, or no descriptor is left, the oldest
    /// one of the host with most is dropped.
    pub pending: usize,
    /// How long a handshake may take.
    pub handshake: Duration,
}

/// A listening socket, and the connections whose handshake is not complete, each with its state
/// `H`. Their sockets are non-blocking.
#[derive(Debug)]
pub struct Acceptor<H> {
    listener: TcpListener,
    address: SocketAddr,
    pending: Vec<Pending<H>>,
    /// Its bounds.
    pub limits: Limits,
    paused_until: Option<Deadline>,
}

#[derive(Debug)]
struct Pending<H> {
    stream: TcpStream,
    peer: SocketAddr,
    deadline: Deadline,
    handshake: H,
    /// Whether there may be something to do.
    ready: bool,
}

/// A peer's address, and the result of its handshake, or why it was refused: peers may have chosen
/// the text.
pub type Arrival<T> = (SocketAddr, Result<T, String>);

impl<H: Default> Acceptor<H> {
    /// Accepts on `listener`.
    ///
    /// # Errors
    /// Those of the system.
    pub fn new(listener: TcpListener, limits: Limits) -> io::Result<Self> {
        listener.set_nonblocking(true)?;
        Ok(Self {
            address: listener.local_addr()?,
            listener,
            pending: Vec::new(),
            limits,
            paused_until: None,
        })
    }

    /// The address it listens on.
    #[must_use]
    pub fn address(&self) -> SocketAddr {
        self.address
    }

    /// The next connection that completes its handshake, or is refused; `None` at the deadline, or
    /// once `wakeup` is readable. `advance` takes a handshake as far as the bytes go that have
    /// arrived, without blocking, or fails with the reason to refuse the connection; it is first
    /// called before any have. The others stay for the next call.
    ///
    /// # Errors
    /// When the listening socket fails.
    pub fn next<T>(
        &mut self,
        deadline: Deadline,
        wakeup: Option<BorrowedFd<'_>>,
        mut advance: impl FnMut(&TcpStream, &mut H) -> Result<Option<T>, String>,
    ) -> io::Result<Option<Arrival<(TcpStream, T)>>> {
        let (mut can_accept, mut is_over) = (false, false);
        loop {
            if let Some(arrival) = self.advance(&mut advance) {
                return Ok(Some(arrival));
            }
            // One at a time and last, so that none with a complete handshake is dropped for
            // another.
            if can_accept {
                self.accept()?;
                can_accept = false;
                continue;
            }
            if is_over {
                return Ok(None);
            }
            is_over = deadline.has_passed();
            let woken;
            (can_accept, woken) = self.wait(deadline, wakeup)?;
            if woken {
                return Ok(None);
            }
        }
    }

    /// Advances the handshakes of which something has come, or whose time is over.
    fn advance<T>(
        &mut self,
        advance: &mut impl FnMut(&TcpStream, &mut H) -> Result<Option<T>, String>,
    ) -> Option<Arrival<(TcpStream, T)>> {
        for at in 0..self.pending.len() {
            let pending = &mut self.pending[at];
            let advanced = match pending.ready {
                true => advance(&pending.stream, &mut pending.handshake),
                false => Ok(None),
            };
            pending.ready = false;
            let done = match advanced {
                Ok(None) if !pending.deadline.has_passed() => continue,
                Ok(None) => Err("it does not answer".to_owned()),
                Ok(Some(result)) => Ok(result),
                Err(reason) => Err(reason),
            };
            let Pending { stream, peer, .. } = self.pending.remove(at);
            return Some((peer, done.map(|result| (stream, result))));
        }
        None
    }

    /// Sleeps until there is something to do. Returns whether there may be a connection to accept,
    /// and whether `wakeup` ended the wait.
    fn wait(&mut self, deadline: Deadline, wakeup: Option<BorrowedFd<'_>>) -> io::Result<(bool, bool)> {
        self.paused_until = self.paused_until.filter(|until| !until.has_passed());
        let listens = if self.paused_until.is_some() {
            PollFlags::empty()
        } else {
            PollFlags::POLLIN
        };
        let dues = self.pending.iter().map(|pending| pending.deadline);
        let until = dues.chain(self.paused_until).fold(deadline, Deadline::min);
        let of = |fd| PollFd::new(fd, PollFlags::POLLIN);
        let mut fds = vec![PollFd::new(self.listener.as_fd(), listens)];
        fds.extend(self.pending.iter().map(|pending| of(pending.stream.as_fd())));
        fds.extend(wakeup.map(of));
        match poll(&mut fds, until.poll_timeout()) {
            Ok(_) => {}
            Err(Errno::EINTR) => return Ok((false, false)),
            Err(e) => return Err(e.into()),
        }
        let ready: Vec<bool> = fds.iter().map(|fd| fd.any().unwrap_or(true)).collect();
        for (pending, ready) in self.pending.iter_mut().zip(&ready[1..]) {
            pending.ready = *ready;
        }
        Ok((ready[0], wakeup.is_some() && ready.last() == Some(&true)))
    }

    fn accept(&mut self) -> io::Result<()> {
        match try_accept(&self.listener) {
            Ok(Some((stream, peer))) => {
                if self.pending.len() >= self.limits.pending {
                    self.drop_one();
                }
                // A connection whose mode cannot be set has failed.
                if stream.set_nonblocking(true).is_ok() {
                    self.pending.push(Pending {
                        stream,
                        peer,
                        deadline: Deadline::after(self.limits.handshake),
                        handshake: H::default(),
                        ready: true,
                    });
                }
                Ok(())
            }
            Ok(None) => Ok(()),
            Err(e) if is_shortage(&e) => {
                if self.pending.is_empty() {
                    self.paused_until = Some(Deadline::after(ACCEPT_BACKOFF));
                }
                self.drop_one();
                Ok(())
            }
            Err(e) => Err(e),
        }
    }

    /// Drops the oldest connection of the host with most: a host with one is the last to lose it.
    fn drop_one(&mut self) {
        let mut of_host = HashMap::<_, usize>::new();
        for pending in &self.pending {
            *of_host.entry(pending.peer.ip()).or_default() += 1;
        }
        let oldest = (0..self.pending.len()).min_by_key(|&at| Reverse(of_host[&self.pending[at].peer.ip()]));
        oldest.map(|oldest| self.pending.remove(oldest));
    }
}

/// Waits for a connection on a non-blocking listener; `None` at the deadline.
///
/// # Errors
/// When the listening socket fails, or the system is short of descriptors or memory.
pub fn accept(listener: &TcpListener, deadline: Deadline) -> io::Result<Option<(TcpStream, SocketAddr)>> {
    loop {
        if let Some(accepted) = try_accept(listener)? {
            return Ok(Some(accepted));
        }
        if !readable(listener.as_fd(), deadline)? {
            return Ok(None);
        }
    }
}

/// `None` when there is none, or it failed before it was accepted.
fn try_accept(listener: &TcpListener) -> io::Result<Option<(TcpStream, SocketAddr)>> {
    match listener.accept() {
        Ok((stream, peer)) => Ok(stream.set_nodelay(true).ok().map(|()| (stream, peer))),
        Err(e) if is_shortage(&e) => Err(e),
        Err(e) => match Errno::from_raw(e.raw_os_error().unwrap_or(0)) {
            Errno::EBADF | Errno::EINVAL | Errno::ENOTSOCK | Errno::EOPNOTSUPP | Errno::EFAULT => Err(e),
            // accept(2): the connection is gone, or the error is of this connection only.
            _ => Ok(None),
        },
    }
}

fn is_shortage(error: &io::Error) -> bool {
    matches!(
        error.raw_os_error().map(Errno::from_raw),
        Some(Errno::EMFILE | Errno::ENFILE | Errno::ENOBUFS | Errno::ENOMEM)
    )
}

#[cfg(test)]
mod tests {
    use std::io::Write;
    use std::net::IpAddr;

    use super::*;
    use crate::connect::connect;

    const MAX_PENDING: usize = 64;

    fn soon() -> Deadline {
        Deadline::after(Duration::from_secs(30))
    }

    fn from(source: [u8; 4], to: SocketAddr) -> TcpStream {
        connect(&[to], Some(IpAddr::from(source)), soon(), || true).unwrap().0
    }

    /// The address of the first client that sends a byte.
    fn next_client(acceptor: &mut Acceptor<()>) -> SocketAddr {
        let sends = |stream: &TcpStream, (): &mut ()| Ok(stream.peek(&mut [0]).is_ok().then_some(()));
        acceptor.next(soon(), None, sends).unwrap().unwrap().0
    }

    fn acceptor() -> Acceptor<()> {
        let limits = Limits {
            pending: MAX_PENDING,
            handshake: Duration::MAX,
        };
        Acceptor::new(TcpListener::bind("127.0.0.1:0").unwrap(), limits).unwrap()
    }

    #[test]
    fn connections_of_one_host_do_not_displace_those_of_another() {
        let mut acceptor = acceptor();
        let to = acceptor.address();
        let mut client = from([127, 0, 0, 2], to);
        // They fit in the backlog of the listening socket.
        let mut flood: Vec<_> = (0..MAX_PENDING + 20).map(|_| from([127, 0, 0, 3], to)).collect();
        // Connections are accepted in their order: all, when the last one is served.
        let last = flood.last_mut().unwrap();
        last.write_all(b"x").unwrap();
        assert_eq!(next_client(&mut acceptor), last.local_addr().unwrap());
        client.write_all(b"x").unwrap();
        assert_eq!(next_client(&mut acceptor), client.local_addr().unwrap());
    }

    #[test]
    fn of_too_many_hosts_the_oldest_connections_are_dropped() {
        let mut acceptor = acceptor();
        let to = acceptor.address();
        let hosts = MAX_PENDING as u8 + 6;
        let mut all: Vec<_> = (0..hosts).map(|host| from([127, 0, 1, host + 1], to)).collect();
        all.last_mut().unwrap().write_all(b"x").unwrap();
        next_client(&mut acceptor);
        assert_eq!(acceptor.pending.len(), MAX_PENDING - 1);
        assert_eq!(acceptor.pending[0].peer, all[6].local_addr().unwrap());
    }

    #[test]
    fn a_silent_connection_is_refused_when_its_time_is_over() {
        let mut acceptor = acceptor();
        acceptor.limits.handshake = Duration::from_millis(20);
        let silent = from([127, 0, 0, 1], acceptor.address());
        let never = |_: &TcpStream, (): &mut ()| Ok(None::<()>);
        let (peer, result) = acceptor.next(soon(), None, never).unwrap().unwrap();
        assert!(peer == silent.local_addr().unwrap() && result.is_err());
        let short = Deadline::after(Duration::from_millis(10));
        assert!(acceptor.next(short, None, never).unwrap().is_none());
    }
}
