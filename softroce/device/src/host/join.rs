//! Joining a process group, or founding it.
//!
//! A member's reply with the registry takes tens of milliseconds on an oversubscribed machine. So a
//! joining process queries before it takes the join lock, and under it only if the member is gone
//! or none replied; only there a group is founded.

use std::hash::{BuildHasher, RandomState};
use std::io;
use std::net::{IpAddr, SocketAddr, UdpSocket};
use std::os::fd::{AsFd, OwnedFd};
use std::thread;
use std::time::{Duration, Instant};

use doorbell_roce_proto::qp::FIRST_ENTROPY_PORT;
use doorbell_trust::{is_definite, is_own_user};
use nix::poll::{PollFd, PollFlags, PollTimeout, poll};

use super::fork::{self, CloseOnFork};
use super::named_lock::{LockError, NamedLock};
use super::names::GroupNames;
use super::peers::{self, ControlRecord, Peers};
use super::registry::{Registry, SLOTS};
use super::{Flags, Host, socket};
use crate::sync::Mutex;

/// The longest that joining waits for any one holder of the lock, and then for a reply.
pub(super) const JOIN_TIMEOUT: Duration = Duration::from_secs(3);

/// How long, and how many of the lowest slots, are queried before the lock.
const QUERY_TIMEOUT: Duration = Duration::from_millis(200);
const QUERY_SLOTS: u16 = 16;

/// How long one member has to reply before the next is queried as well.
const QUERY_STAGGER: Duration = Duration::from_millis(20);

/// The first of the ports that members without the group's port may take.
const FIRST_OWN_PORT: u16 = 0x8000;

fn describe_user(uid: u32) -> String {
    let overflow = if is_definite(uid) {
        ""
    } else {
        " (the overflow uid: one outside this user namespace)"
    };
    format!("the user with uid {uid}{overflow}")
}

/// Why a process cannot join a group.
#[derive(Debug, thiserror::Error)]
pub enum JoinError {
    /// Processes of another user have the address, or of a user that is not known.
    #[error(
        "{address} is in use by soft devices of {}: processes of different users cannot share an address; choose another",
        describe_user(*uid)
    )]
    OtherUser {
        /// The address.
        address: SocketAddr,
        /// That user.
        uid: u32,
    },
    /// The members do not reply, or one of them holds the join lock.
    #[error(
        "{address} is in use by soft devices of processes that do not answer ({process}): resume or end them, or choose another address"
    )]
    Unresponsive {
        /// The address.
        address: SocketAddr,
        /// The process, if known.
        process: String,
    },
    /// The group has the most members that it can.
    #[error("{address} has soft devices of {SLOTS} processes already: no more can share it")]
    Full {
        /// The address.
        address: SocketAddr,
    },
    /// Soft devices have the address, and these or this one do not share it.
    #[error("{address} is in use by soft devices, and cannot be shared: choose another address")]
    Exclusive {
        /// The address.
        address: SocketAddr,
    },
    /// The UDP port cannot be bound.
    #[error("{address} cannot be bound: {error}")]
    Port {
        /// The address.
        address: SocketAddr,
        /// The cause.
        error: io::Error,
    },
    /// The process cannot create sockets or a memfd.
    #[error("cannot join the other processes on {address}: {error}")]
    Io {
        /// The address.
        address: SocketAddr,
        /// The cause.
        error: io::Error,
    },
}

impl JoinError {
    pub(crate) fn is_of_address(&self) -> bool {
        !matches!(self, Self::Io { .. })
    }
}

pub(super) fn join(
    address: SocketAddr,
    flags: Flags,
    patience: Duration,
) -> Result<(Host, CloseOnFork<UdpSocket>), JoinError> {
    let names = GroupNames::new(address);
    let failed = |error| JoinError::Io { address, error };
    let introduction = query_registry(&names, QUERY_SLOTS, Instant::now() + QUERY_TIMEOUT)
        .ok()
        .flatten();
    let _lock = NamedLock::acquire(&names.join_lock(), JOIN_TIMEOUT).map_err(|error| match error {
        LockError::Busy => JoinError::Unresponsive {
            address,
            process: "one is joining".to_owned(),
        },
        LockError::OtherUser(uid) => JoinError::OtherUser { address, uid },
        LockError::Io(error) => failed(error),
    })?;
    let introduction = match introduction.filter(|introduction| introduction.is_alive(&names)) {
        None => query_registry(&names, SLOTS as u16, Instant::now() + JOIN_TIMEOUT)?,
        introduction => introduction,
    };
    if let Some(introduction) = &introduction
        && (flags.contains(Flags::EXCLUSIVE) || introduction.is_exclusive())
    {
        return Err(JoinError::Exclusive { address });
    }
    let (registry, founded) = match introduction {
        Some(introduction) => (introduction.registry, false),
        None => (Registry::create().map_err(failed)?, true),
    };
    let bind = |port| CloseOnFork::create(|| UdpSocket::bind(SocketAddr::new(address.ip(), port)));
    let port_failed = |error| JoinError::Port { address, error };
    let mut bound = bind(address.port());
    if founded {
        let until = Instant::now() + patience;
        while in_use(&bound) && Instant::now() < until {
            thread::sleep(Duration::from_millis(1));
            bound = bind(address.port());
        }
    }
    let (udp, holds) = match bound {
        // A group has a port holder, or is about to.
        Err(_) if !founded && in_use(&bound) => {
            let own = CloseOnFork::create(|| bind_own_port(address.ip()));
            (own.map_err(port_failed)?, false)
        }
        bound => (bound.map_err(port_failed)?, true),
    };
    let port = udp.local_addr().map_err(port_failed)?.port();
    let (slot, listener) = take_slot(&names)?;
    let me = registry.add_member(slot, flags, port);
    let peers = Peers::new(listener).map_err(failed)?;
    let host = Host {
        names,
        me,
        epoll: peers.epoll(),
        peers: Mutex::new(peers),
        // The port holder has to be watched.
        retry: Mutex::new((!holds).then(Instant::now)),
        fork_generation: fork::fork_generation(),
        registry,
    };
    if holds {
        host.registry.set_port_holder(me);
    }
    Ok((host, udp))
}

/// A socket of this process's own port: one of those that peers pin, if one of some is free.
fn bind_own_port(ip: IpAddr) -> io::Result<UdpSocket> {
    let random = RandomState::new();
    let count = FIRST_ENTROPY_PORT - FIRST_OWN_PORT;
    for attempt in 0..64 {
        let port = FIRST_OWN_PORT + random.hash_one(attempt) as u16 % count;
        let bound = UdpSocket::bind(SocketAddr::new(ip, port));
        if !in_use(&bound) {
            return bound;
        }
    }
    UdpSocket::bind(SocketAddr::new(ip, 0))
}

fn in_use<T>(bound: &io::Result<T>) -> bool {
    bound
        .as_ref()
        .is_err_and(|error| error.kind() == io::ErrorKind::AddrInUse)
}

fn take_slot(names: &GroupNames) -> Result<(u16, CloseOnFork<OwnedFd>), JoinError> {
    let address = names.address();
    for slot in 0..SLOTS as u16 {
        match socket::listen(&names.slot(slot)) {
            Ok(listener) => return Ok((slot, listener)),
            Err(error) if error.kind() == io::ErrorKind::AddrInUse => {}
            Err(error) => return Err(JoinError::Io { address, error }),
        }
    }
    Err(JoinError::Full { address })
}

struct QueriedMember {
    slot: u16,
    socket: CloseOnFork<OwnedFd>,
    pid: i32,
}

struct Introduction {
    member: QueriedMember,
    registry: Registry,
}

impl Introduction {
    fn is_exclusive(&self) -> bool {
        let member = self.registry.member(self.member.slot);
        let flags = member.and_then(|member| self.registry.flags(member));
        flags.is_some_and(|flags| flags.contains(Flags::EXCLUSIVE))
    }

    /// Whether the member, and with it the group, is alive; false also where unknown. Under the
    /// lock no other group can be founded.
    ///
    /// A killed member loses its descriptors in any order, but keeps its PID until all are closed:
    /// a process of this PID at the name, with the connection standing, is the member.
    fn is_alive(&self, names: &GroupNames) -> bool {
        let Ok(again) = socket::connect_to(&names.slot(self.member.slot)) else {
            return false;
        };
        let is_same = socket::credentials(&again).is_ok_and(|peer| peer.pid > 0 && peer.pid == self.member.pid);
        // No second reply comes: only a hang-up makes it readable.
        let mut end = [PollFd::new(self.member.socket.as_fd(), PollFlags::POLLIN)];
        is_same && self.registry.member(self.member.slot).is_some() && poll(&mut end, PollTimeout::ZERO) == Ok(0)
    }
}

/// The first reply of the members in the lowest `slots`; `None` when there is no member.
fn query_registry(names: &GroupNames, slots: u16, deadline: Instant) -> Result<Option<Introduction>, JoinError> {
    let address = names.address();
    let failed = |error| JoinError::Io { address, error };
    let mut queried = Vec::new();
    let mut unresponsive = None;
    // Any user can hold a free name of a group: that does not hide its members.
    let mut stranger = None;
    for slot in 0..slots {
        let socket = match socket::connect_to(&names.slot(slot)) {
            Ok(socket) => socket,
            Err(error) => match error.raw_os_error() {
                Some(libc::ECONNREFUSED) => continue,
                // Its backlog of thousands of connections is full, or it is no soft device's.
                Some(libc::EAGAIN | libc::EPROTOTYPE) => {
                    unresponsive = Some(0);
                    continue;
                }
                _ => return Err(failed(error)),
            },
        };
        let peer = socket::credentials(&socket).map_err(failed)?;
        if !is_own_user(peer.uid) {
            stranger = Some(peer.uid);
            continue;
        }
        // If it fails the connection hangs up as well.
        let _ = peers::send(&socket, ControlRecord::QueryRegistry, &[]);
        let pid = peer.pid;
        queried.push(QueriedMember { slot, socket, pid });
        let until = deadline.min(Instant::now() + QUERY_STAGGER);
        if let Some(introduction) = await_reply(&mut queried, until) {
            return Ok(Some(introduction));
        }
    }
    if let Some(introduction) = await_reply(&mut queried, deadline) {
        return Ok(Some(introduction));
    }
    match queried.first().map(|member| member.pid).or(unresponsive) {
        None => stranger.map_or(Ok(None), |uid| Err(JoinError::OtherUser { address, uid })),
        Some(0) => Err(JoinError::Unresponsive {
            address,
            process: "one outside this PID namespace, or of no soft device".to_owned(),
        }),
        Some(pid) => Err(JoinError::Unresponsive {
            address,
            process: format!("process {pid}"),
        }),
    }
}

/// Waits until a queried member replies, or all have hung up. Removes those that did.
fn await_reply(queried: &mut Vec<QueriedMember>, until: Instant) -> Option<Introduction> {
    while !queried.is_empty() {
        let left = until.saturating_duration_since(Instant::now());
        let mut ready: Vec<_> = queried
            .iter()
            .map(|member| PollFd::new(member.socket.as_fd(), PollFlags::POLLIN))
            .collect();
        // In whole milliseconds, at least one while there is time left.
        let timeout = PollTimeout::try_from(left + Duration::from_micros(999)).unwrap_or(PollTimeout::MAX);
        let _ = poll(&mut ready, timeout);
        let ready: Vec<bool> = ready.iter().map(|fd| fd.any() == Some(true)).collect();
        for index in (0..ready.len()).rev().filter(|&index| ready[index]) {
            let member = queried.remove(index);
            if let Some(registry) = receive_reply(&member) {
                return Some(Introduction { member, registry });
            }
        }
        if left.is_zero() {
            return None;
        }
    }
    None
}

fn receive_reply(member: &QueriedMember) -> Option<Registry> {
    let mut buffer = [0; ControlRecord::MAX];
    let (len, mut fds) = socket::receive(member.socket.as_fd(), &mut buffer).ok()?;
    if ControlRecord::decode(&buffer[..len]) != Some(ControlRecord::Registry) {
        return None;
    }
    Registry::attach(fds.pop()?).ok()
}
