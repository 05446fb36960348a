//! Connecting to a peer that may not listen yet.

use std::io;
use std::net::{IpAddr, SocketAddr, TcpStream};
use std::os::fd::{AsFd, AsRawFd};
use std::thread;
use std::time::Duration;

use nix::errno::Errno;
use nix::poll::PollFlags;
use nix::sys::socket::{
    AddressFamily, SockFlag, SockType, SockaddrStorage, bind, connect as connect_to, getsockopt, setsockopt, socket,
    sockopt,
};

use super::deadline::{Deadline, ready};

/// Pause before the next attempt.
const RETRY_INTERVAL: Duration = Duration::from_millis(20);

/// Connects to the first address that accepts, from `source` if given. While none listens it
/// retries, up to the deadline, and as long as `go_on` says so.
///
/// # Errors
/// That of the last attempt.
pub fn connect(
    addresses: &[SocketAddr],
    source: Option<IpAddr>,
    deadline: Deadline,
    mut go_on: impl FnMut() -> bool,
) -> io::Result<(TcpStream, SocketAddr)> {
    loop {
        let mut last = io::Error::new(io::ErrorKind::NotFound, "the name has no address");
        for &address in addresses {
            match attempt(address, source, deadline) {
                Ok(stream) => return Ok((stream, address)),
                Err(e) => last = e,
            }
        }
        let may_come = matches!(
            last.kind(),
            io::ErrorKind::ConnectionRefused | io::ErrorKind::ConnectionReset | io::ErrorKind::ConnectionAborted
        );
        if !may_come || deadline.remaining() < RETRY_INTERVAL || !go_on() {
            return Err(last);
        }
        thread::sleep(RETRY_INTERVAL);
    }
}

fn attempt(address: SocketAddr, source: Option<IpAddr>, deadline: Deadline) -> io::Result<TcpStream> {
    let family = match address {
        SocketAddr::V4(_) => AddressFamily::Inet,
        SocketAddr::V6(_) => AddressFamily::Inet6,
    };
    let flags = SockFlag::SOCK_CLOEXEC | SockFlag::SOCK_NONBLOCK;
    let socket = socket(family, SockType::Stream, flags, None)?;
    if let Some(source) = source {
        bind(socket.as_raw_fd(), &SockaddrStorage::from(SocketAddr::new(source, 0)))?;
    }
    match connect_to(socket.as_raw_fd(), &SockaddrStorage::from(address)) {
        Ok(()) => {}
        // It goes on; connect(2) says where its result is.
        Err(Errno::EINPROGRESS | Errno::EINTR) => {
            if !ready(socket.as_fd(), PollFlags::POLLOUT, deadline)? {
                return Err(io::ErrorKind::TimedOut.into());
            }
            match getsockopt(&socket, sockopt::SocketError)? {
                0 => {}
                errno => return Err(io::Error::from_raw_os_error(errno)),
            }
        }
        Err(errno) => return Err(errno.into()),
    }
    let stream = TcpStream::from(socket);
    // The kernel may assign the very port connected to (simultaneous open with itself).
    if stream.local_addr()? == address {
        return Err(io::ErrorKind::ConnectionRefused.into());
    }
    stream.set_nodelay(true)?;
    Ok(stream)
}

/// Has the kernel end a connection whose peer's host is gone, after `idle_s` seconds without
/// traffic and as many `probes`, every `interval_s` seconds, without answer (tcp(7)).
///
/// # Errors
/// Those of setsockopt(2).
pub fn set_keepalive(stream: &TcpStream, idle_s: u32, interval_s: u32, probes: u32) -> io::Result<()> {
    setsockopt(stream, sockopt::TcpKeepIdle, &idle_s)?;
    setsockopt(stream, sockopt::TcpKeepInterval, &interval_s)?;
    setsockopt(stream, sockopt::TcpKeepCount, &probes)?;
    Ok(setsockopt(stream, sockopt::KeepAlive, &true)?)
}
