//! TCP between the two ends of a test: the client retries while the server may still be starting,
//! and the server accepts many connections of which one becomes its client.

use std::collections::VecDeque;
use std::io;
use std::net::{IpAddr, SocketAddr, TcpListener, TcpStream};
use std::os::fd::AsRawFd;
use std::thread;
use std::time::{Duration, Instant};

use nix::errno::Errno;
use nix::sys::socket::{
    AddressFamily, SockFlag, SockType, SockaddrStorage, bind, connect as connect_to, setsockopt, socket, sockopt,
};
use nix::sys::time::{TimeVal, TimeValLike};

use crate::failure::{Failure, one_line};
use crate::interrupt::Interrupt;

/// How long a client retries while the server refuses.
const CONNECT_TIMEOUT: Duration = Duration::from_secs(3);
const RETRY_DELAY: Duration = Duration::from_millis(50);
const POLL_INTERVAL: Duration = Duration::from_millis(10);
/// How long an accepted connection may take to become the client.
const HANDSHAKE_TIMEOUT: Duration = Duration::from_secs(5);
/// Connections in their handshake, of all addresses and of one; of more the oldest is dropped.
const MAX_PENDING: usize = 64;
const MAX_PENDING_OF_SOURCE: usize = 8;

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

/// A server's listening socket, and the connections that are not its client yet; `H` is what each
/// has got to.
#[derive(Debug)]
pub(crate) struct Acceptor<H> {
    socket: TcpListener,
    address: SocketAddr,
    pending: VecDeque<Pending<H>>,
}

#[derive(Debug)]
struct Pending<H> {
    stream: TcpStream,
    peer: SocketAddr,
    accepted_at: Instant,
    handshake: H,
}

/// A client: its connection, and what its handshake gave.
#[derive(Debug)]
pub(crate) struct Admitted<T> {
    pub(crate) stream: TcpStream,
    pub(crate) peer: SocketAddr,
    pub(crate) handshake: T,
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
            let address = socket.local_addr()?;
            let pending = VecDeque::new();
            Ok(Acceptor {
                socket,
                address,
                pending,
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

    /// The first connection whose handshake is complete: `advance` takes each a step further, and
    /// returns its result, or why it is refused. A silent connection keeps no other waiting.
    ///
    /// # Errors
    /// [`Failure::Interrupted`]; [`Failure::Test`] when no client connected in time or the socket
    /// failed.
    pub(crate) fn accept<T>(
        &mut self,
        deadline: Option<Instant>,
        interrupt: &Interrupt,
        mut advance: impl FnMut(&TcpStream, SocketAddr, &mut H) -> Result<Option<T>, String>,
    ) -> Result<Admitted<T>, Failure> {
        loop {
            if interrupt.requested() {
                return Err(Failure::Interrupted);
            }
            self.accept_pending()?;
            if let Some(admitted) = self.advance_all(&mut advance) {
                return Ok(admitted);
            }
            if deadline.is_some_and(|deadline| Instant::now() >= deadline) {
                return Err(Failure::test(format!(
                    "no client connected to {} in time",
                    self.address
                )));
            }
            thread::sleep(POLL_INTERVAL);
        }
    }

    fn accept_pending(&mut self) -> Result<(), Failure> {
        for _ in 0..MAX_PENDING {
            match self.socket.accept() {
                Ok((stream, peer)) => self.insert(stream, peer),
                Err(e) if e.kind() == io::ErrorKind::WouldBlock => return Ok(()),
                Err(e) if matches!(e.kind(), io::ErrorKind::Interrupted | io::ErrorKind::ConnectionAborted) => {}
                // Those of silent connections come back.
                Err(e) if is_exhausted(&e) && !self.pending.is_empty() => {
                    self.pending.pop_front();
                }
                Err(e) => {
                    return Err(Failure::test(format!(
                        "cannot accept on {}: {}",
                        self.address,
                        one_line(&e.to_string())
                    )));
                }
            }
        }
        Ok(())
    }

    fn insert(&mut self, stream: TcpStream, peer: SocketAddr) {
        let is_of_source = |one: &Pending<H>| one.peer.ip() == peer.ip();
        let of_source = self.pending.iter().filter(|one| is_of_source(one)).count();
        if of_source >= MAX_PENDING_OF_SOURCE {
            let oldest = self.pending.iter().position(is_of_source);
            oldest.and_then(|oldest| self.pending.remove(oldest));
        } else if self.pending.len() >= MAX_PENDING {
            self.pending.pop_front();
        }
        // A connection whose mode cannot be set has failed.
        if stream.set_nonblocking(true).is_ok() {
            self.pending.push_back(Pending {
                stream,
                peer,
                accepted_at: Instant::now(),
                handshake: H::default(),
            });
        }
    }

    fn advance_all<T>(
        &mut self,
        advance: &mut impl FnMut(&TcpStream, SocketAddr, &mut H) -> Result<Option<T>, String>,
    ) -> Option<Admitted<T>> {
        let mut at = 0;
        while let Some(one) = self.pending.get_mut(at) {
            let reason = match advance(&one.stream, one.peer, &mut one.handshake) {
                Ok(Some(handshake)) => {
                    let Pending { stream, peer, .. } = self.pending.remove(at)?;
                    return Some(Admitted {
                        stream,
                        peer,
                        handshake,
                    });
                }
                Ok(None) if one.accepted_at.elapsed() < HANDSHAKE_TIMEOUT => {
                    at += 1;
                    continue;
                }
                Ok(None) => "it does not answer".to_owned(),
                Err(reason) => reason,
            };
            eprintln!("doorbell: refused {}: {}", one.peer, one_line(&reason));
            self.pending.remove(at);
        }
        None
    }
}

fn is_exhausted(e: &io::Error) -> bool {
    let errno = Errno::from_raw(e.raw_os_error().unwrap_or(0));
    matches!(errno, Errno::EMFILE | Errno::ENFILE | Errno::ENOBUFS | Errno::ENOMEM)
}

#[cfg(test)]
mod tests {
    use std::io::Write;

    use super::*;

    fn from(source: [u8; 4], to: SocketAddr) -> TcpStream {
        let deadline = Instant::now() + CONNECT_TIMEOUT;
        attempt(to, Some(source.into()), deadline).unwrap()
    }

    fn accept(acceptor: &mut Acceptor<()>, within: Duration) -> Result<Admitted<()>, Failure> {
        let deadline = Some(Instant::now() + within);
        let sends = |stream: &TcpStream, _, (): &mut ()| Ok(stream.peek(&mut [0]).is_ok().then_some(()));
        acceptor.accept(deadline, &Interrupt::default(), sends)
    }

    #[test]
    fn connections_of_one_address_do_not_displace_those_of_another() {
        let mut acceptor = Acceptor::bind(([127, 0, 0, 1], 0).into(), "", "").unwrap();
        let to = acceptor.address();
        let mut client = from([127, 0, 0, 2], to);
        let first: Vec<_> = (0..MAX_PENDING).map(|_| from([127, 0, 0, 3], to)).collect();
        // Those that were accepted stay from one call to the next.
        accept(&mut acceptor, Duration::ZERO).unwrap_err();
        let second: Vec<_> = (0..MAX_PENDING).map(|_| from([127, 0, 0, 3], to)).collect();
        accept(&mut acceptor, Duration::ZERO).unwrap_err();
        assert!(acceptor.pending.len() <= 1 + MAX_PENDING_OF_SOURCE);
        client.write_all(b"x").unwrap();
        let admitted = accept(&mut acceptor, CONNECT_TIMEOUT).unwrap();
        assert_eq!(admitted.peer, client.local_addr().unwrap());
        drop((first, second));
    }

    #[test]
    fn of_too_many_addresses_the_oldest_connection_is_dropped() {
        let mut acceptor = Acceptor::bind(([127, 0, 0, 1], 0).into(), "", "").unwrap();
        let to = acceptor.address();
        let all: Vec<_> = (0..MAX_PENDING as u8 + 6)
            .map(|number| from([127, 0, 1, number + 1], to))
            .collect();
        accept(&mut acceptor, Duration::ZERO).unwrap_err();
        accept(&mut acceptor, Duration::ZERO).unwrap_err();
        assert_eq!(acceptor.pending.len(), MAX_PENDING);
        assert_eq!(acceptor.pending[0].peer, all[6].local_addr().unwrap());
    }
}
