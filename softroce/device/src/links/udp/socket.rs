//! The sockets of a link, which forks of the process do not keep.

use std::io;
use std::net::{SocketAddr, UdpSocket};
use std::ops::Deref;
use std::os::fd::{AsFd, BorrowedFd};
use std::sync::{Arc, OnceLock};

use super::halves::set_options;
use crate::host::CloseOnFork;

pub(super) struct Socket {
    socket: CloseOnFork<UdpSocket>,
    local: SocketAddr,
}

impl Socket {
    pub(super) fn new(socket: CloseOnFork<UdpSocket>) -> io::Result<Self> {
        let local = socket.local_addr()?;
        socket.set_nonblocking(true)?;
        set_options(socket.as_fd(), local.is_ipv4())?;
        Ok(Self { socket, local })
    }

    pub(super) fn local(&self) -> SocketAddr {
        self.local
    }
}

impl Deref for Socket {
    type Target = UdpSocket;

    fn deref(&self) -> &UdpSocket {
        &self.socket
    }
}

impl AsFd for Socket {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.socket.as_fd()
    }
}

/// The address's own port, if taken over from a process that is gone: it is received from as well.
#[derive(Clone, Default)]
pub(super) struct TakenOver(Arc<OnceLock<Socket>>);

impl TakenOver {
    pub(super) fn get(&self) -> Option<&Socket> {
        self.0.get()
    }

    /// Fills the slot; fails if it is full.
    pub(super) fn set(&self, socket: CloseOnFork<UdpSocket>) -> io::Result<()> {
        self.0
            .set(Socket::new(socket)?)
            .map_err(|_| io::ErrorKind::AlreadyExists.into())
    }
}
