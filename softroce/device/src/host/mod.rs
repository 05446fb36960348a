//! The process group: the processes of one user that share one `address:port` in one network
//! namespace, as they would share a NIC (decision 024).
//!
//! There is no daemon and no file: abstract Unix sockets, and a memfd that members send each other.
//!
//! - Each *member* has a *slot*: it holds the slot's abstract name and listens there. A joining
//!   process takes the join lock (`named_lock`), gets the `registry` from a member or founds the
//!   group, and takes the lowest free name.
//! - The registry maps queue pair numbers and CM services to members, and members to UDP ports.
//! - The *port holder* has the well-known UDP port, the others have ports of their own: RoCEv2 does
//!   not fix source ports. They are connected to it, and one takes the port over when it dies
//!   ([`Host::take_over`]).
//! - A member connects to another on demand (`peers`), to send descriptors, to wake it, and to
//!   detect its end.
//!
//! A process that was forked and has not called exec is no member: see `fork`.

use std::fmt;
use std::io;
use std::net::{SocketAddr, UdpSocket};
use std::os::fd::{AsFd, BorrowedFd};
use std::sync::Arc;
use std::time::{Duration, Instant};

use doorbell_roce_proto::{Qpn, QpnBlock};
use nix::sys::epoll::Epoll;

use crate::sync::Mutex;

mod fork;
#[doc(hidden)]
pub mod fuzzing;
mod join;
mod named_lock;
mod names;
mod peers;
mod registry;
mod socket;

use named_lock::NamedLock;
use names::GroupNames;
use peers::Peers;
use registry::Registry;

pub use fork::CloseOnFork;
pub(crate) use fork::fork_generation;
pub use join::JoinError;
pub use peers::{Connection, HostEvent, Message};
pub use registry::{MemberId, SLOTS};

/// Properties of a member that the others need.
#[derive(Clone, Copy, PartialEq, Eq, Default, Debug)]
pub struct Flags(u32);

impl Flags {
    /// All of the member's traffic uses UDP.
    pub(crate) const UDP_ONLY: Self = Self(1);
    /// The member shares the address with no other.
    pub(crate) const EXCLUSIVE: Self = Self(2);

    /// These where `set`, else none.
    pub(crate) fn only_if(self, set: bool) -> Self {
        if set { self } else { Self::default() }
    }

    /// Both.
    pub(crate) fn and(self, others: Self) -> Self {
        Self(self.0 | others.0)
    }

    /// Whether all of `others` are set.
    pub fn contains(self, others: Self) -> bool {
        self.0 & others.0 == others.0
    }
}

/// Why a service cannot be listened for.
#[derive(Debug, thiserror::Error)]
pub enum ServiceError {
    /// Another process of the group listens (`EADDRINUSE`).
    #[error("service {id:#x} is in use by another process on this address")]
    InUse {
        /// The service.
        id: u64,
    },
    /// The group has no space for more services (`ENOMEM`).
    #[error("this address has no space for more services")]
    Full,
    /// A process that stopped while it joined or listened holds the lock (`EAGAIN`).
    #[error("service {id:#x} cannot be added now: another process on this address holds the lock and is stopped")]
    Busy {
        /// The service.
        id: u64,
    },
}

/// This process's membership. Dropping it leaves the group.
pub struct Host {
    names: GroupNames,
    registry: Registry,
    me: MemberId,
    peers: Mutex<Peers>,
    epoll: Arc<Epoll>,
    retry: Mutex<Option<Instant>>,
    fork_generation: u32,
}

/// How long to wait before the next attempt to take the port over.
const RETRY: Duration = Duration::from_millis(5);

impl Host {
    /// Joins the group on `address`, or founds it, and returns the socket to receive from: the port
    /// holder's is at the address's own port.
    ///
    /// Waits a millisecond, or up to three seconds where processes are stopped. A taken port
    /// without a member is retried for `patience`: an ending process may lose its names first.
    ///
    /// # Errors
    /// When the address belongs to another user or program, or cannot be bound.
    pub fn join(
        address: SocketAddr,
        flags: Flags,
        patience: Duration,
    ) -> Result<(Self, CloseOnFork<UdpSocket>), JoinError> {
        join::join(address, flags, patience)
    }

    /// The address of the group, with the well-known port.
    pub fn address(&self) -> SocketAddr {
        self.names.address()
    }

    /// This process.
    pub fn me(&self) -> MemberId {
        self.me
    }

    /// The group's random identifier.
    pub fn group(&self) -> u64 {
        self.registry.name()
    }

    /// Whether this process has joined, and is no child of fork(2) of the one that did.
    pub fn is_ours(&self) -> bool {
        self.fork_generation == fork_generation()
    }

    // Members

    /// The member that owns a queue pair number, whether or not it has such a queue pair.
    pub(crate) fn owner_of(&self, qpn: Qpn) -> Option<MemberId> {
        self.registry.owner_of(qpn)
    }

    #[cfg(test)]
    fn is_alive(&self, member: MemberId) -> bool {
        self.registry.is_alive(member)
    }

    /// The current member of a slot.
    pub fn member(&self, slot: u16) -> Option<MemberId> {
        self.registry.member(slot)
    }

    /// Its flags; `None` when it is gone.
    pub fn flags(&self, member: MemberId) -> Option<Flags> {
        self.registry.flags(member)
    }

    /// The UDP port at which it receives directly; `None` when it is gone.
    pub fn udp_port(&self, member: MemberId) -> Option<u16> {
        self.registry.udp_port(member)
    }

    // Queue pair numbers

    /// Claims another block of queue pair numbers until this process leaves; `None` when all are
    /// taken. Prefers the first unused block from `start` on, modulo their count.
    pub fn claim(&self, start: QpnBlock) -> Option<QpnBlock> {
        self.registry.claim(self.me, start.index() as u16)
    }

    // Services

    /// Adds a connection manager service of this process.
    ///
    /// # Errors
    /// When a member listens already, or there is no space.
    pub(crate) fn add_service(&self, id: u64) -> Result<(), ServiceError> {
        let lock = self.names.services_lock();
        let _lock = NamedLock::acquire(&lock, join::JOIN_TIMEOUT).map_err(|_| ServiceError::Busy { id })?;
        if self.find_service(id).is_some() {
            return Err(ServiceError::InUse { id });
        }
        if !self.registry.add_service(id, self.me) {
            return Err(ServiceError::Full);
        }
        Ok(())
    }

    /// Removes a service.
    pub(crate) fn remove_service(&self, id: u64) {
        self.registry.remove_service(id, self.me);
    }

    /// The member that listens for a service. A dead one that was not detected yet is skipped.
    pub(crate) fn find_service(&self, id: u64) -> Option<MemberId> {
        let is_gone = |error: io::Error| error.kind() == io::ErrorKind::NotConnected;
        // Connecting marks a dead member gone, so that the next search finds another one or none.
        (0..SLOTS).find_map(|_| match self.registry.find_service(id) {
            Some(member) if member != self.me && self.connect(member).is_err_and(is_gone) => None,
            found => Some(found),
        })?
    }

    /// Changes whenever a service was added.
    pub(crate) fn services_added(&self) -> u64 {
        self.registry.services_added()
    }

    // Connections

    /// The connection to another member, made at the first call, without waiting for it.
    ///
    /// # Errors
    /// `NotConnected` when the member is gone; `WouldBlock` when its backlog is full; or a lack of
    /// descriptors.
    pub fn connect(&self, to: MemberId) -> io::Result<Arc<Connection>> {
        self.peers.lock().connect(&self.names, &self.registry, self.me, to)
    }

    /// The next message or event of other members; `None` when there is no more for now. To be
    /// called until then whenever [`pollfd`](Self::pollfd) is readable. For one thread.
    pub fn poll(&self) -> Option<HostEvent> {
        let (event, paused) = {
            let mut peers = self.peers.lock();
            (peers.poll(&self.registry, self.me), peers.paused_until())
        };
        if let Some(until) = paused {
            // No other event would end the pause.
            self.retry.lock().get_or_insert(until);
        }
        let event = event?;
        if let HostEvent::Gone(_) = event {
            // It may have held the port: take it over, or watch its next holder.
            *self.retry.lock() = Some(Instant::now());
        }
        Some(event)
    }

    /// Readable when [`poll`](Self::poll) is to be called.
    pub fn pollfd(&self) -> BorrowedFd<'_> {
        self.epoll.0.as_fd()
    }

    // The UDP port

    /// The port holder, unless it is known to be gone.
    pub fn port_holder(&self) -> Option<MemberId> {
        self.registry.port_holder()
    }

    /// When to call [`poll`](Self::poll) and then [`take_over`](Self::take_over), whether or not
    /// anything is readable; `None` while the port has a holder.
    pub(crate) fn take_over_at(&self) -> Option<Instant> {
        *self.retry.lock()
    }

    /// Takes the address's own port over if it has no holder: a second socket to receive from. One
    /// of the trying members gets it; the others watch that one from then on.
    pub fn take_over(&self) -> Option<CloseOnFork<UdpSocket>> {
        let mut retry = self.retry.lock();
        *retry = None;
        if let Some(holder) = self.port_holder() {
            if holder == self.me {
                return None;
            }
            match self.connect(holder) {
                Ok(_) => return None,
                // The holder is gone: this member tries.
                Err(error) if error.kind() == io::ErrorKind::NotConnected => {}
                Err(_) => {
                    *retry = Some(Instant::now() + RETRY);
                    return None;
                }
            }
        }
        match CloseOnFork::create(|| UdpSocket::bind(self.names.address())) {
            Ok(socket) => {
                self.registry.set_port_holder(self.me);
                Some(socket)
            }
            Err(_) => {
                *retry = Some(Instant::now() + RETRY);
                None
            }
        }
    }
}

impl fmt::Debug for Host {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Host")
            .field("address", &self.names.address())
            .field("me", &self.me)
            .finish_non_exhaustive()
    }
}

impl Drop for Host {
    fn drop(&mut self) {
        // A fork has the mapping too, but is no member.
        if self.is_ours() {
            self.registry.leave(self.me);
        }
    }
}

#[cfg(all(test, not(doorbell_loom)))]
mod tests;
