//! TCP between the two ends of a test: the client retries while the server may still be starting,
//! and the server accepts many connections of which one becomes its client.

use std::cmp::Reverse;
use std::io;
use std::net::{IpAddr, SocketAddr, TcpListener, TcpStream};
use std::os::fd::{AsFd, AsRawFd};
use std::thread;
use std::time::{Duration, Instant};

use nix::errno::Errno;
use nix::poll::{PollFd, PollFlags, poll};
use nix::sys::socket::{
    AddressFamily, SockFlag, SockType, SockaddrStorage, bind, connect as connect_to, setsockopt, socket, sockopt,
};
use nix::sys::time::{TimeVal, TimeValLike};

use crate::failure::{Failure, one_line};
use crate::interrupt::Interrupt;

/// How long a client retries while the server refuses.
const CONNECT_TIMEOUT: Duration = Duration::from_secs(3);
const RETRY_DELAY: Duration = Duration::from_millis(50);
/// How often a wait checks for Ctrl-C and deadlines.
const POLL_INTERVAL_MS: u8 = 50;
/// How long an accepted connection may take to become the client.
const HANDSHAKE_TIMEOUT: Duration = Duration::from_secs(5);
/// Connections in their handshake. When there are more, or no descriptor is left, the oldest one of
/// the host with most is dropped.
const MAX_PENDING: usize = 64;
/// Lines on stderr about refused connections in one second.
const MAX_LINES: u32 = 10;

/// Connects to the first address that answers, from `source` if given.
///
/// # Errors
/// [`Failure::Test`] with `explain` of the last error; [`Failure::Interrupted`].
pub(crate) fn connect(
    addresses: &[SocketAddr],
    source: Option<IpAddr>,
    interrupt: &Interrupt,
    explain: impl FnOnce(&io::Error) -> String,
) -> Result<(TcpStream, SocketAddr), Failure> {
    let deadline = Instant::now() + CONNECT_TIMEOUT;
    loop {
        let mut last = io::Error::from(io::ErrorKind::AddrNotAvailable);
        for &address in addresses {
            match attempt(address, source, deadline) {
                Ok(stream) => return Ok((stream, address)),
                Err(e) => last = e,
            }
        }
        if interrupt.requested() {
            return Err(Failure::Interrupted);
        }
        if last.kind() != io::ErrorKind::ConnectionRefused || Instant::now() >= deadline {
            return Err(Failure::test(explain(&last)));
        }
        thread::sleep(RETRY_DELAY);
    }
}

fn attempt(address: SocketAddr, source: Option<IpAddr>, deadline: Instant) -> io::Result<TcpStream> {
    let left = deadline
        .saturating_duration_since(Instant::now())
        .max(Duration::from_millis(1));
    let Some(source) = source else {
        return TcpStream::connect_timeout(&address, left);
    };
    let family = match address {
        SocketAddr::V4(_) => AddressFamily::Inet,
        SocketAddr::V6(_) => AddressFamily::Inet6,
    };
    let socket = socket(family, SockType::Stream, SockFlag::SOCK_CLOEXEC, None)?;
    bind(socket.as_raw_fd(), &SockaddrStorage::from(SocketAddr::new(source, 0)))?;
    // It limits connect(2), too, which then fails with EINPROGRESS: socket(7).
    setsockopt(
        &socket,
        sockopt::SendTimeout,
        &TimeVal::milliseconds(left.as_millis() as i64),
    )?;
    match connect_to(socket.as_raw_fd(), &SockaddrStorage::from(address)) {
        Err(Errno::EINPROGRESS) => Err(io::ErrorKind::TimedOut.into()),
        connected => Ok(connected.map(|()| socket.into())?),
    }
}

/// Detects within some ten seconds that the peer's host is gone: tcp(7).
pub(crate) fn set_keepalive(stream: &TcpStream) -> io::Result<()> {
    setsockopt(stream, sockopt::TcpKeepIdle, &5)?;
    setsockopt(stream, sockopt::TcpKeepInterval, &2)?;
    setsockopt(stream, sockopt::TcpKeepCount, &3)?;
    Ok(setsockopt(stream, sockopt::KeepAlive, &true)?)
}

/// A server's listening socket, and the connections that are not its client yet, each with its
/// handshake's state `H`.
#[derive(Debug)]
pub(crate) struct Acceptor<H> {
    socket: TcpListener,
    address: SocketAddr,
    pending: Vec<Pending<H>>,
    refusals: Refusals,
    pub(super) handshake_timeout: Duration,
}

#[derive(Debug)]
struct Pending<H> {
    stream: TcpStream,
    peer: SocketAddr,
    accepted_at: Instant,
    handshake: H,
}

impl<H: Default> Acceptor<H> {
    /// Listens; port 0 takes any free one. Advice names the command's `port_option`, or is
    /// `not_ours` for an address of another machine.
    ///
    /// # Errors
    /// [`Failure::Test`] when the address is in use or is not this machine's.
    pub(crate) fn bind(address: SocketAddr, port_option: &str, not_ours: &str) -> Result<Self, Failure> {
        let listen = || {
            let socket = TcpListener::bind(address)?;
            socket.set_nonblocking(true)?;
            Ok(Acceptor {
                address: socket.local_addr()?,
                socket,
                pending: Vec::new(),
                refusals: Refusals::default(),
                handshake_timeout: HANDSHAKE_TIMEOUT,
            })
        };
        listen().map_err(|e: io::Error| {
            let advice = match e.kind() {
                io::ErrorKind::AddrInUse => format!(": another server may be running; choose another {port_option}"),
                io::ErrorKind::AddrNotAvailable => format!(": {not_ours}"),
                io::ErrorKind::PermissionDenied => {
                    format!(": ports below 1024 need privileges; choose another {port_option}")
                }
                _ => String::new(),
            };
            Failure::test(format!(
                "cannot listen on {address}: {}{advice}",
                one_line(&e.to_string())
            ))
        })
    }

    pub(crate) fn address(&self) -> SocketAddr {
        self.address
    }

    /// The first connection that completes its handshake, with its result. `advance` takes a
    /// handshake as far as the bytes go that have arrived, without blocking, or fails with the
    /// reason to refuse the connection, which is a line on stderr. The others stay for the next
    /// call.
    ///
    /// # Errors
    /// [`Failure::Interrupted`]; [`Failure::Test`] when no client connected in time or the socket
    /// failed.
    pub(crate) fn accept<T>(
        &mut self,
        deadline: Option<Instant>,
        interrupt: &Interrupt,
        mut advance: impl FnMut(&TcpStream, &mut H) -> Result<Option<T>, String>,
    ) -> Result<(TcpStream, SocketAddr, T), Failure> {
        loop {
            if interrupt.requested() {
                return Err(Failure::Interrupted);
            }
            // One at a time, so that none with a complete handshake is dropped for another.
            let accepted = self.accept_one()?;
            if let Some(client) = self.advance_all(&mut advance) {
                return Ok(client);
            }
            if deadline.is_some_and(|deadline| Instant::now() >= deadline) {
                return Err(Failure::test(format!(
                    "no client connected to {} in time",
                    self.address
                )));
            }
            if !accepted {
                let sockets = self.pending.iter().map(|pending| pending.stream.as_fd());
                let sockets = sockets.chain([self.socket.as_fd()]);
                let mut sockets: Vec<_> = sockets.map(|fd| PollFd::new(fd, PollFlags::POLLIN)).collect();
                // A signal ends it early.
                let _ = poll(&mut sockets, POLL_INTERVAL_MS);
            }
        }
    }

    /// Returns whether there may be more to accept.
    fn accept_one(&mut self) -> Result<bool, Failure> {
        match self.socket.accept() {
            Ok((stream, peer)) => {
                if self.pending.len() == MAX_PENDING {
                    self.drop_one();
                }
                // A connection whose mode cannot be set has failed.
                if stream.set_nonblocking(true).is_ok() {
                    self.pending.push(Pending {
                        stream,
                        peer,
                        accepted_at: Instant::now(),
                        handshake: H::default(),
                    });
                }
            }
            Err(e) if e.kind() == io::ErrorKind::WouldBlock => return Ok(false),
            Err(e) if matches!(e.kind(), io::ErrorKind::Interrupted | io::ErrorKind::ConnectionAborted) => {}
            Err(e) if is_descriptor_limit(&e) && !self.pending.is_empty() => self.drop_one(),
            Err(e) => {
                return Err(Failure::test(format!(
                    "cannot accept on {}: {}",
                    self.address,
                    one_line(&e.to_string())
                )));
            }
        }
        Ok(true)
    }

    /// Drops the oldest connection of the host with most: a host with one is the last to lose it.
    fn drop_one(&mut self) {
        let of_host = |host| self.pending.iter().filter(|pending| pending.peer.ip() == host).count();
        let oldest = (0..self.pending.len()).min_by_key(|&at| Reverse(of_host(self.pending[at].peer.ip())));
        oldest.map(|oldest| self.pending.remove(oldest));
    }

    fn advance_all<T>(
        &mut self,
        advance: &mut impl FnMut(&TcpStream, &mut H) -> Result<Option<T>, String>,
    ) -> Option<(TcpStream, SocketAddr, T)> {
        let mut at = 0;
        while let Some(pending) = self.pending.get_mut(at) {
            let reason = match advance(&pending.stream, &mut pending.handshake) {
                Ok(Some(result)) => {
                    let Pending { stream, peer, .. } = self.pending.remove(at);
                    return Some((stream, peer, result));
                }
                Ok(None) if pending.accepted_at.elapsed() < self.handshake_timeout => {
                    at += 1;
                    continue;
                }
                Ok(None) => "it does not answer".to_owned(),
                Err(reason) => reason,
            };
            let line = format!("doorbell: refused {}: {}", pending.peer, one_line(&reason));
            self.pending.remove(at);
            for line in self.refusals.lines(Instant::now(), line) {
                eprintln!("{line}");
            }
        }
        None
    }
}

fn is_descriptor_limit(error: &io::Error) -> bool {
    matches!(
        error.raw_os_error().map(Errno::from_raw),
        Some(Errno::EMFILE | Errno::ENFILE)
    )
}

/// Limits the lines that refused clients cause.
#[derive(Debug, Default)]
struct Refusals {
    second_began: Option<Instant>,
    in_second: u32,
}

impl Refusals {
    /// What to print of a refusal whose line is `line`.
    fn lines(&mut self, now: Instant, line: String) -> Vec<String> {
        let is_new = |began: Instant| now.duration_since(began) >= Duration::from_secs(1);
        let mut lines = Vec::new();
        if self.second_began.is_none_or(is_new) {
            let unprinted = self.in_second.saturating_sub(MAX_LINES);
            lines.extend((unprinted != 0).then(|| format!("doorbell: refused {unprinted} more connections")));
            (self.second_began, self.in_second) = (Some(now), 0);
        }
        self.in_second += 1;
        lines.extend((self.in_second <= MAX_LINES).then_some(line));
        lines
    }
}

#[cfg(test)]
mod tests {
    use std::io::Write;

    use super::*;

    fn from(source: [u8; 4], to: SocketAddr) -> TcpStream {
        attempt(to, Some(source.into()), Instant::now() + CONNECT_TIMEOUT).unwrap()
    }

    /// The address of the first client that sends a byte.
    fn next_client(acceptor: &mut Acceptor<()>) -> SocketAddr {
        let sends = |stream: &TcpStream, (): &mut ()| Ok(stream.peek(&mut [0]).is_ok().then_some(()));
        let deadline = Some(Instant::now() + Duration::from_secs(30));
        acceptor.accept(deadline, &Interrupt::default(), sends).unwrap().1
    }

    fn acceptor() -> Acceptor<()> {
        let mut acceptor = Acceptor::bind(([127, 0, 0, 1], 0).into(), "", "").unwrap();
        acceptor.handshake_timeout = Duration::MAX;
        acceptor
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
    fn a_flood_of_refusals_is_a_few_lines_a_second() {
        let mut refusals = Refusals::default();
        let begin = Instant::now();
        let mut at = |milliseconds| refusals.lines(begin + Duration::from_millis(milliseconds), "refused".to_owned());
        let printed: usize = (0..999).map(|time| at(time).len()).sum();
        assert_eq!(printed, MAX_LINES as usize);
        assert_eq!(at(1000), ["doorbell: refused 989 more connections", "refused"]);
        assert_eq!(at(2000), ["refused"]);
    }
}
