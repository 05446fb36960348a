//! Who is on this host: the processes that share one device address, as they would share a NIC.
//!
//! A *group* is the processes of one user that have opened one `address:port` in one network namespace. There is no daemon and no file: abstract Unix sockets, which are scoped by
//! network namespace as UDP ports are, and a memfd that members hand one another. The kernel cleans up after whatever dies.
//!
//! - Each member has a *slot*, by holding the slot's abstract name and listening there. Who joins goes through the `door` (one at a time), connects to the names until a member answers with
//!   the `registry`, and takes the lowest name that is free. When nobody is there it founds the group.
//! - The registry says who owns which block of queue pair numbers, which UDP port each member has, and who listens for which service.
//! - One member, the *holder*, has the well-known UDP port. All others have a port of their own on the same address, as source ports are free in RoCEv2. They are connected to the holder,
//!   so they see it die, and one of them takes the port over ([`Host::take_over`]).
//! - A member connects to another when it needs it (`peers`): to send it descriptors, to wake it, and to hear of its end.
//!
//! A process that was forked and has not called exec is no member: see `fork`.

use std::fmt;
use std::io;
use std::net::{SocketAddr, UdpSocket};
use std::os::fd::{AsFd, BorrowedFd};
use std::sync::Arc;
use std::time::{Duration, Instant};

use doorbell_roce_proto::{Block, Qpn};
use nix::sys::epoll::Epoll;

use crate::sync::Mutex;

mod door;
mod fork;
mod join;
mod names;
mod peers;
mod registry;
mod socket;

use door::Door;
use names::Names;
use peers::Peers;
use registry::Registry;

pub use fork::Unforked;
pub use join::JoinError;
pub use peers::{Arrival, Connection, Message};
pub use registry::{MemberId, SLOTS};

/// What the others of the group have to know of a member.
#[derive(Clone, Copy, PartialEq, Eq, Default, Debug)]
pub struct Flags(u32);

impl Flags {
    /// All that goes to the member or comes from it goes over UDP.
    pub const UDP_ONLY: Self = Self(1);

    /// Whether all of `others` are set.
    pub fn contains(self, others: Self) -> bool {
        self.0 & others.0 == others.0
    }
}

/// Why a service cannot be listened for.
#[derive(Debug, thiserror::Error)]
pub enum ServiceError {
    /// Another process of the group does already (`EADDRINUSE`).
    #[error("service {id:#x} is listened for already, by another process on this address")]
    InUse {
        /// The service.
        id: u64,
    },
    /// The group has no room for more (`ENOMEM`).
    #[error("no more services can be listened for on this address")]
    Full,
    /// A process that stopped in the middle of joining or listening keeps the others out (`EAGAIN`).
    #[error(
        "service {id:#x} cannot be listened for now: another process on this address holds its door and does not go on"
    )]
    Busy {
        /// The service.
        id: u64,
    },
}

/// This process's membership. Dropping it leaves the group.
pub struct Host {
    names: Names,
    registry: Registry,
    me: MemberId,
    peers: Mutex<Peers>,
    epoll: Arc<Epoll>,
    /// When the port can be tried for again.
    retry: Mutex<Option<Instant>>,
    /// Which process joined, among its forks.
    line: u32,
}

/// How long after another member got hold of the port, or somebody else did, it is tried for again.
const RETRY: Duration = Duration::from_millis(5);

impl Host {
    /// Joins the processes on `address`, or founds their group, and gives the socket to receive from: at the address's own port for the one that holds it, at another of the same address for the rest.
    ///
    /// Waits for others that are joining, and for members to answer: a millisecond, and three seconds at most where processes are stopped. Where nobody is there but the port is taken it is tried for
    /// again during `patience`: a process that ends may let go of its names first.
    ///
    /// # Errors
    /// When the address belongs to somebody else, or cannot be had.
    pub fn join(
        address: SocketAddr,
        flags: Flags,
        patience: Duration,
    ) -> Result<(Self, Unforked<UdpSocket>), JoinError> {
        join::join(address, flags, patience)
    }

    /// The address that the group shares, with its own port.
    pub fn address(&self) -> SocketAddr {
        self.names.address()
    }

    /// This process.
    pub fn me(&self) -> MemberId {
        self.me
    }

    /// What this group is called, and no other on any host, but by chance.
    pub fn group(&self) -> u64 {
        self.registry.name()
    }

    /// Whether this is still the process that joined, not its fork.
    pub(crate) fn is_ours(&self) -> bool {
        self.line == fork::line()
    }

    // What the others are

    /// The process that a queue pair number belongs to, whether or not it has such a queue pair; `None` when it is nobody's.
    pub fn owner_of(&self, qpn: Qpn) -> Option<MemberId> {
        self.registry.owner_of(qpn)
    }

    /// Whether a member is there, as far as anybody knows yet.
    pub fn lives(&self, member: MemberId) -> bool {
        self.registry.lives(member)
    }

    /// The member that has a slot now.
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

    // Numbers

    /// Another block of queue pair numbers for this process, until it leaves; `None` when others have them all. Where there are blocks that nobody has had yet, it is the first of these
    /// from number `start` on, modulo how many there are.
    pub fn claim(&self, start: u16) -> Option<Block> {
        self.registry.claim(self.me, start)
    }

    // Services

    /// Listens for a service of the connection manager, in the name of this process.
    ///
    /// # Errors
    /// When somebody does already, or there is no room.
    pub fn add_service(&self, id: u64) -> Result<(), ServiceError> {
        let door = self.names.services_door();
        let _door = Door::enter(&door, join::PATIENCE).map_err(|_| ServiceError::Busy { id })?;
        if self.find_service(id).is_some() {
            return Err(ServiceError::InUse { id });
        }
        if !self.registry.add_service(id, self.me) {
            return Err(ServiceError::Full);
        }
        Ok(())
    }

    /// Ends what [`add_service`](Self::add_service) began.
    pub fn remove_service(&self, id: u64) {
        self.registry.remove_service(id, self.me);
    }

    /// Who listens for a service. A process that has died without a word, and was not missed by anybody, is found no more.
    pub fn find_service(&self, id: u64) -> Option<MemberId> {
        let is_gone = |error: io::Error| error.kind() == io::ErrorKind::NotConnected;
        // Each that is gone is buried by the attempt to connect, so that there is another next time, or none. No more than all members can be.
        (0..SLOTS).find_map(|_| match self.registry.find_service(id) {
            Some(member) if member != self.me && self.connect(member).is_err_and(is_gone) => None,
            found => Some(found),
        })?
    }

    /// Changes whenever a member has begun to listen for a service.
    pub(crate) fn services_added(&self) -> u64 {
        self.registry.services_added()
    }

    // Connections

    /// A connection to another member, made at the first call; nothing waits for it to answer.
    ///
    /// # Errors
    /// `NotConnected` when the member is gone; `WouldBlock` when too many others wait for it; or what keeps this process from having another descriptor.
    pub fn connect(&self, to: MemberId) -> io::Result<Arc<Connection>> {
        self.peers.lock().connect(&self.names, &self.registry, self.me, to)
    }

    /// What has come of other members, one at a time; `None` when there is nothing more for now: to be called until then whenever [`pollfd`](Self::pollfd) is readable. For one thread.
    pub fn poll(&self) -> Option<Arrival> {
        let (arrival, paused) = {
            let mut peers = self.peers.lock();
            (peers.poll(&self.registry, self.me), peers.paused_until())
        };
        if let Some(until) = paused {
            // Nothing else would have the thread come back.
            self.retry.lock().get_or_insert(until);
        }
        let arrival = arrival?;
        if let Arrival::Gone(_) = arrival {
            // It may have had the port. Then somebody has to take it; and whoever has done so by now has to be watched.
            *self.retry.lock() = Some(Instant::now());
        }
        Some(arrival)
    }

    /// Readable when [`poll`](Self::poll) wants to be called.
    pub fn pollfd(&self) -> BorrowedFd<'_> {
        self.epoll.0.as_fd()
    }

    // The port

    /// Who has the address's own port, as far as anybody knows yet.
    pub fn holder(&self) -> Option<MemberId> {
        self.registry.holder()
    }

    /// When [`poll`](Self::poll) and then [`take_over`](Self::take_over) want to be called, whether or not anything is readable; `None` while the port is in good hands.
    pub fn take_over_at(&self) -> Option<Instant> {
        *self.retry.lock()
    }

    /// Takes the address's own port over, if nobody has it: a socket more to receive from. Of the members that try, one is lucky; the others watch that one from here on.
    pub fn take_over(&self) -> Option<Unforked<UdpSocket>> {
        let mut retry = self.retry.lock();
        *retry = None;
        if let Some(holder) = self.holder() {
            if holder == self.me {
                return None;
            }
            match self.connect(holder) {
                Ok(_) => return None,
                // Gone since: it is on nobody else to try.
                Err(error) if error.kind() == io::ErrorKind::NotConnected => {}
                Err(_) => {
                    *retry = Some(Instant::now() + RETRY);
                    return None;
                }
            }
        }
        match UdpSocket::bind(self.names.address()) {
            Ok(socket) => {
                self.registry.set_holder(self.me);
                Some(socket.into())
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
        // A fork has the mapping too, but is nobody that could leave.
        if self.is_ours() {
            self.registry.leave(self.me);
        }
    }
}

#[cfg(all(test, not(doorbell_loom)))]
mod tests;
