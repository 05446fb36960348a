//! The files of a UDP link on which its progress thread sleeps.

use std::io;
use std::net::UdpSocket;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::Arc;

use super::multicast::MulticastSockets;
use super::socket::{Socket, TakenOver};
use crate::host::CloseOnFork;
use crate::wakeup::Sources;

/// Shares the sockets with the halves, and takes none of their locks.
pub struct LinkFiles {
    pub(super) socket: Arc<Socket>,
    pub(super) taken_over: TakenOver,
    pub(super) multicast: MulticastSockets,
    /// Readable when the interface may have changed.
    pub(super) port: Option<Arc<OwnedFd>>,
}

impl LinkFiles {
    /// Adds the socket of the address's own port, taken over from a process that is gone.
    ///
    /// # Errors
    /// When there is such a socket already, or the kernel refuses its options.
    pub fn take_over(&self, port: CloseOnFork<UdpSocket>) -> io::Result<()> {
        self.taken_over.set(port)
    }

    /// With `members`, which is readable when other processes of the group have sent messages.
    pub(crate) fn sources<'a>(&'a self, members: BorrowedFd<'a>) -> Sources<'a> {
        Sources {
            socket: self.socket.as_fd(),
            taken_over: self.taken_over.get().map(AsFd::as_fd),
            multicast: Some(self.multicast.as_fd()),
            port: self.port.as_deref().map(AsFd::as_fd),
            members: Some(members),
        }
    }
}

impl AsFd for LinkFiles {
    /// The socket.
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.socket.as_fd()
    }
}
