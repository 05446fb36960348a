//! Setting up the control connection over TCP: the client resolves the server's name, the server
//! accepts one client and then stops listening.

use std::io;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr, TcpListener, TcpStream, ToSocketAddrs};
use std::os::fd::AsRawFd;
use std::thread;
use std::time::{Duration, Instant};

use nix::errno::Errno;
use nix::sys::socket::{
    AddressFamily, SockFlag, SockType, SockaddrStorage, bind, connect as connect_to, setsockopt, socket, sockopt,
};
use nix::sys::time::{TimeVal, TimeValLike};

use super::control_connection::{ControlConnection, Role};
use crate::failure::{Failure, one_line};
use crate::interrupt::Interrupt;

/// How long a client retries while the server refuses, as it may still be starting.
const CONNECT_TIMEOUT: Duration = Duration::from_secs(3);
const RETRY_DELAY: Duration = Duration::from_millis(50);
const POLL_INTERVAL: Duration = Duration::from_millis(10);

/// # Errors
/// [`Failure::Test`] when the name does not resolve, or no server answers there;
/// [`Failure::Interrupted`].
pub(crate) fn connect(
    host: &str,
    port: u16,
    source: Option<IpAddr>,
    interrupt: &Interrupt,
) -> Result<ControlConnection, Failure> {
    let addresses = addresses_of(host, port, source)?;
    let deadline = Instant::now() + CONNECT_TIMEOUT;
    loop {
        let mut last = io::Error::from(io::ErrorKind::AddrNotAvailable);
        for &address in &addresses {
            match attempt(address, source, deadline) {
                Ok(stream) => return ControlConnection::new(stream, address, Role::Client, interrupt),
                Err(e) => last = e,
            }
        }
        if interrupt.requested() {
            return Err(Failure::Interrupted);
        }
        if last.kind() != io::ErrorKind::ConnectionRefused || Instant::now() >= deadline {
            return Err(Failure::test(format!(
                "cannot reach the server {} port {port}: {}: is the same tool waiting there, without a host, on this port (-p)?",
                one_line(host),
                one_line(&last.to_string())
            )));
        }
        thread::sleep(RETRY_DELAY);
    }
}

/// # Errors
/// [`Failure::Test`] when the name does not resolve.
pub(super) fn addresses_of(host: &str, port: u16, source: Option<IpAddr>) -> Result<Vec<SocketAddr>, Failure> {
    let found = (host, port).to_socket_addrs().map_err(|e| {
        Failure::test(format!(
            "cannot resolve the server '{}': {}",
            one_line(host),
            one_line(&e.to_string())
        ))
    })?;
    let same_family = |address: &SocketAddr| source.is_none_or(|source| source.is_ipv4() == address.is_ipv4());
    Ok(found.filter(same_family).collect())
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

/// A server's listening socket. As with the C tools, it listens on all addresses of the machine
/// unless one is given, and accepts one client.
#[derive(Debug)]
pub(crate) struct Listener {
    socket: TcpListener,
    address: SocketAddr,
}

impl Listener {
    /// # Errors
    /// [`Failure::Test`] when the port is in use or the address is not this machine's.
    pub(crate) fn bind(source: Option<IpAddr>, port: u16, ipv6: bool) -> Result<Listener, Failure> {
        let any_address = if ipv6 {
            Ipv6Addr::UNSPECIFIED.into()
        } else {
            Ipv4Addr::UNSPECIFIED.into()
        };
        let address = SocketAddr::new(source.unwrap_or(any_address), port);
        let listen = || {
            let socket = TcpListener::bind(address)?;
            socket.set_nonblocking(true)?;
            let address = socket.local_addr()?;
            Ok(Listener { socket, address })
        };
        listen().map_err(|e: io::Error| {
            let advice = match e.kind() {
                io::ErrorKind::AddrInUse => ": another server may be running; choose another port (-p)",
                io::ErrorKind::AddrNotAvailable => ": it is no address of this machine",
                io::ErrorKind::PermissionDenied => ": ports below 1024 need privileges; choose another port (-p)",
                _ => "",
            };
            Failure::test(format!(
                "cannot listen on {address}: {}{advice}",
                one_line(&e.to_string())
            ))
        })
    }

    #[cfg(test)]
    pub(crate) fn address(&self) -> SocketAddr {
        self.address
    }

    /// Accepts the client and closes the listening socket: later clients are refused.
    ///
    /// # Errors
    /// [`Failure::Interrupted`]; [`Failure::Test`] when the socket fails.
    pub(crate) fn accept(self, interrupt: &Interrupt) -> Result<ControlConnection, Failure> {
        loop {
            if interrupt.requested() {
                return Err(Failure::Interrupted);
            }
            match self.socket.accept() {
                Ok((stream, peer)) => {
                    return ControlConnection::new(stream, peer, Role::Server, interrupt);
                }
                Err(e) if e.kind() == io::ErrorKind::WouldBlock => thread::sleep(POLL_INTERVAL),
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
}
