//! TCP between the two ends of a test: the client retries while the server may still be starting.

use std::io;
use std::net::{IpAddr, SocketAddr, TcpListener, TcpStream};
use std::os::fd::{AsFd, AsRawFd, BorrowedFd};
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

/// A server's listening socket.
#[derive(Debug)]
pub(crate) struct Acceptor {
    socket: TcpListener,
    address: SocketAddr,
}

impl Acceptor {
    /// Listens; port 0 takes any free one. Advice names the command's `port_option`, or is
    /// `not_ours` for an address of another machine.
    ///
    /// # Errors
    /// [`Failure::Test`] when the address is in use or is not this machine's.
    pub(crate) fn bind(address: SocketAddr, port_option: &str, not_ours: &str) -> Result<Acceptor, Failure> {
        let listen = || {
            let socket = TcpListener::bind(address)?;
            socket.set_nonblocking(true)?;
            let address = socket.local_addr()?;
            Ok(Acceptor { socket, address })
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

    /// Readable when a client has connected.
    pub(crate) fn as_fd(&self) -> BorrowedFd<'_> {
        self.socket.as_fd()
    }

    /// A client that has connected, if any.
    ///
    /// # Errors
    /// [`Failure::Test`] when the socket failed.
    pub(crate) fn try_accept(&self) -> Result<Option<(TcpStream, SocketAddr)>, Failure> {
        loop {
            match self.socket.accept() {
                Ok(accepted) => return Ok(Some(accepted)),
                Err(e) if e.kind() == io::ErrorKind::WouldBlock => return Ok(None),
                Err(e) if matches!(e.kind(), io::ErrorKind::Interrupted | io::ErrorKind::ConnectionAborted) => {}
                Err(e) => {
                    return Err(Failure::test(format!(
                        "cannot accept on {}: {}",
                        self.address,
                        one_line(&e.to_string())
                    )));
                }
            }
        }
    }

    /// Whether a wait for a client may go on.
    ///
    /// # Errors
    /// [`Failure::Interrupted`]; [`Failure::Test`] after the deadline.
    pub(crate) fn check_wait(&self, deadline: Option<Instant>, interrupt: &Interrupt) -> Result<(), Failure> {
        if interrupt.requested() {
            return Err(Failure::Interrupted);
        }
        if deadline.is_some_and(|deadline| Instant::now() >= deadline) {
            return Err(Failure::test(format!(
                "no client connected to {} in time",
                self.address
            )));
        }
        Ok(())
    }

    /// The next client.
    ///
    /// # Errors
    /// [`Failure::Interrupted`]; [`Failure::Test`] when no client connected in time or the socket
    /// failed.
    pub(crate) fn accept(
        &self,
        deadline: Option<Instant>,
        interrupt: &Interrupt,
    ) -> Result<(TcpStream, SocketAddr), Failure> {
        loop {
            if let Some(accepted) = self.try_accept()? {
                return Ok(accepted);
            }
            self.check_wait(deadline, interrupt)?;
            thread::sleep(POLL_INTERVAL);
        }
    }
}
