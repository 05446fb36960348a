//! Joining a group, or founding it.
//!
//! Who joins needs the registry from a member, whose progress thread has to run for that: tens of milliseconds where many want the processor. So it is asked for before the door, where nobody has to wait for
//! it, and what is left to do inside takes a tenth of a millisecond. Only when the member is gone by then, or nobody answered, is it asked for inside; and only there a group is founded.

use std::io;
use std::net::{SocketAddr, UdpSocket};
use std::os::fd::{AsFd, OwnedFd};
use std::thread;
use std::time::{Duration, Instant};

use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use nix::unistd::geteuid;

use super::door::{Door, Shut};
use super::fork::{self, Unforked};
use super::names::Names;
use super::peers::{self, Peers, Record};
use super::registry::{Registry, SLOTS};
use super::{Flags, Host, socket};
use crate::sync::Mutex;

/// The longest that joining waits for any one process at the door, and then for an answer.
pub(super) const PATIENCE: Duration = Duration::from_secs(3);

/// How long, and how many of the lowest slots, members are asked before the door: mostly one of them is there, and answers.
const BEFORE: Duration = Duration::from_millis(200);
const LOWEST: u16 = 16;

/// How long one member has to answer before another is asked as well.
const HEAD_START: Duration = Duration::from_millis(20);

/// Why a process cannot be a member of a group.
#[derive(Debug, thiserror::Error)]
pub enum JoinError {
    /// Processes of another user have the address.
    #[error(
        "{address} is in use by soft devices of the user with uid {uid}: processes of different users cannot share an address; choose another"
    )]
    OtherUser {
        /// The address.
        address: SocketAddr,
        /// That user.
        uid: u32,
    },
    /// The processes on the address do not answer, or one of them holds up all that want to join.
    #[error(
        "{address} is in use by soft devices of processes that do not answer ({who}): have them go on, or end them, or choose another address"
    )]
    Silent {
        /// The address.
        address: SocketAddr,
        /// What is known of them.
        who: String,
    },
    /// As many processes as can be are on it.
    #[error("{address} has soft devices of {SLOTS} processes already: no more can share it")]
    Full {
        /// The address.
        address: SocketAddr,
    },
    /// The UDP port cannot be had.
    #[error("{address} cannot be bound")]
    Port {
        /// The address.
        address: SocketAddr,
        /// Why not.
        #[source]
        source: io::Error,
    },
    /// The process cannot have what members need: sockets, a memfd.
    #[error("cannot meet the other processes on {address}: {source}")]
    Io {
        /// The address.
        address: SocketAddr,
        /// Why not.
        source: io::Error,
    },
}

impl JoinError {
    /// Whether it may do better at another address.
    pub(crate) fn is_of_address(&self) -> bool {
        !matches!(self, Self::Io { .. })
    }
}

pub(super) fn join(
    address: SocketAddr,
    flags: Flags,
    patience: Duration,
) -> Result<(Host, Unforked<UdpSocket>), JoinError> {
    let names = Names::new(address);
    let failed = |source| JoinError::Io { address, source };
    let met = find(&names, LOWEST, Instant::now() + BEFORE).ok().flatten();
    let _door = Door::enter(&names.door(), PATIENCE).map_err(|shut| match shut {
        Shut::Busy => JoinError::Silent {
            address,
            who: "one is about to join".to_owned(),
        },
        Shut::OtherUser(uid) => JoinError::OtherUser { address, uid },
        Shut::Io(source) => failed(source),
    })?;
    let met = match met.filter(|met| met.is_there(&names)) {
        None => find(&names, SLOTS as u16, Instant::now() + PATIENCE)?,
        met => met,
    };
    let (registry, founded) = match met {
        Some(met) => (met.registry, false),
        None => (Registry::create().map_err(failed)?, true),
    };
    let bind = |port| UdpSocket::bind(SocketAddr::new(address.ip(), port)).map(Unforked::from);
    let port_failed = |source| JoinError::Port { address, source };
    let mut bound = bind(address.port());
    if founded {
        let until = Instant::now() + patience;
        while in_use(&bound) && Instant::now() < until {
            thread::sleep(Duration::from_millis(1));
            bound = bind(address.port());
        }
    }
    let (udp, holds) = match bound {
        // Somebody is to have it: the holder, or who is about to be.
        Err(_) if !founded && in_use(&bound) => (bind(0).map_err(port_failed)?, false),
        bound => (bound.map_err(port_failed)?, true),
    };
    let port = udp.local_addr().map_err(port_failed)?.port();
    let (slot, listener) = take_slot(&names)?;
    let me = registry.enter(slot, flags, port);
    let peers = Peers::new(listener).map_err(failed)?;
    let host = Host {
        names,
        me,
        epoll: peers.epoll(),
        peers: Mutex::new(peers),
        // The holder has to be watched.
        retry: Mutex::new((!holds).then(Instant::now)),
        line: fork::line(),
        registry,
    };
    if holds {
        host.registry.set_holder(me);
    }
    Ok((host, udp))
}

fn in_use<T>(bound: &io::Result<T>) -> bool {
    bound
        .as_ref()
        .is_err_and(|error| error.kind() == io::ErrorKind::AddrInUse)
}

/// The lowest slot that is free, by its name.
fn take_slot(names: &Names) -> Result<(u16, Unforked<OwnedFd>), JoinError> {
    let address = names.address();
    for slot in 0..SLOTS as u16 {
        match socket::listen(&names.slot(slot)) {
            Ok(listener) => return Ok((slot, listener)),
            Err(error) if error.kind() == io::ErrorKind::AddrInUse => {}
            Err(source) => return Err(JoinError::Io { address, source }),
        }
    }
    Err(JoinError::Full { address })
}

/// A member that was asked for the registry.
struct Asked {
    slot: u16,
    socket: Unforked<OwnedFd>,
    pid: i32,
}

/// A member that has answered, and what.
struct Met {
    member: Asked,
    registry: Registry,
}

impl Met {
    /// Whether the member is still there, and with it the group. To be asked inside the door, where no other group can be founded. False also where that cannot be told.
    ///
    /// Who leaves in good order says so in the registry before it lets go of its name; who is killed lets go of its descriptors in any order, but its process has its number as long as
    /// any is left. So a process of this number at the name, while the connection to the member stands, is the member.
    fn is_there(&self, names: &Names) -> bool {
        let Ok(again) = socket::connect_to(&names.slot(self.member.slot)) else {
            return false;
        };
        let is_same = socket::credentials(&again).is_ok_and(|peer| peer.pid > 0 && peer.pid == self.member.pid);
        // Nothing more is ever said on the connection: only its end makes it readable.
        let mut end = [PollFd::new(self.member.socket.as_fd(), PollFlags::POLLIN)];
        is_same && self.registry.member(self.member.slot).is_some() && poll(&mut end, PollTimeout::ZERO) == Ok(0)
    }
}

/// The registry, from whichever member of the lowest `slots` answers first; `None` when there is no member.
fn find(names: &Names, slots: u16, deadline: Instant) -> Result<Option<Met>, JoinError> {
    let address = names.address();
    let failed = |source| JoinError::Io { address, source };
    let mut asked = Vec::new();
    let mut silent = None;
    for slot in 0..slots {
        let socket = match socket::connect_to(&names.slot(slot)) {
            Ok(socket) => socket,
            Err(error) if error.kind() == io::ErrorKind::ConnectionRefused => continue,
            // It has not accepted thousands of connections.
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => {
                silent = Some(0);
                continue;
            }
            Err(error) => return Err(failed(error)),
        };
        let peer = socket::credentials(&socket).map_err(failed)?;
        if peer.uid != geteuid().as_raw() {
            return Err(JoinError::OtherUser { address, uid: peer.uid });
        }
        // What fails here hangs up as well.
        let _ = peers::send(&socket, Record::Ask, &[]);
        let pid = peer.pid;
        asked.push(Asked { slot, socket, pid });
        let until = deadline.min(Instant::now() + HEAD_START);
        if let Some(met) = await_answer(&mut asked, until) {
            return Ok(Some(met));
        }
    }
    if let Some(met) = await_answer(&mut asked, deadline) {
        return Ok(Some(met));
    }
    match asked.first().map(|member| member.pid).or(silent) {
        None => Ok(None),
        Some(0) => Err(JoinError::Silent {
            address,
            who: "of a process that cannot be seen from here".to_owned(),
        }),
        Some(pid) => Err(JoinError::Silent {
            address,
            who: format!("process {pid}"),
        }),
    }
}

/// Waits until one of those that were asked answers, or all have hung up, which are taken out.
fn await_answer(asked: &mut Vec<Asked>, until: Instant) -> Option<Met> {
    while !asked.is_empty() {
        let left = until.saturating_duration_since(Instant::now());
        let mut ready: Vec<_> = asked
            .iter()
            .map(|member| PollFd::new(member.socket.as_fd(), PollFlags::POLLIN))
            .collect();
        // In whole milliseconds, and never none of them while there is time left.
        let timeout = PollTimeout::try_from(left + Duration::from_micros(999)).unwrap_or(PollTimeout::MAX);
        let _ = poll(&mut ready, timeout);
        let ready: Vec<bool> = ready.iter().map(|fd| fd.any() == Some(true)).collect();
        for index in (0..ready.len()).rev().filter(|&index| ready[index]) {
            let member = asked.remove(index);
            if let Some(registry) = answer(&member) {
                return Some(Met { member, registry });
            }
        }
        if left.is_zero() {
            return None;
        }
    }
    None
}

/// The registry, if that is what the member has said.
fn answer(member: &Asked) -> Option<Registry> {
    let mut buffer = [0; Record::MAX];
    let (len, mut fds) = socket::receive(member.socket.as_fd(), &mut buffer).ok()?;
    if Record::decode(&buffer[..len]) != Some(Record::Registry) {
        return None;
    }
    Registry::attach(fds.pop()?).ok()
}
