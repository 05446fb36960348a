//! Connections between members, and their messages.
//!
//! A member connects to another's name to send its identity, messages with descriptors, and
//! wake-ups. A connection is one-way; when either end dies, the other sees it hang up.

use std::collections::{HashMap, VecDeque};
use std::io::{self, IoSlice};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::Arc;
use std::time::{Duration, Instant};

use doorbell_trust::{is_definite, is_own_user};
use nix::sys::epoll::{Epoll, EpollCreateFlags, EpollEvent, EpollFlags, EpollTimeout};

use super::fork::CloseOnFork;
use super::names::GroupNames;
use super::registry::{MemberId, Registry};
use super::socket;

/// A message between members.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Message {
    /// The descriptor is the shm ring from the sender to the receiver.
    Ring,
    /// The descriptor is a segment of the sender's memory.
    Segment {
        /// Its number.
        id: u64,
    },
    /// The descriptor is for GPU memory of the sender, numbered among its segments.
    Device {
        /// Its number.
        id: u64,
        /// Bytes.
        len: u64,
        /// The descriptor is the memory's own, not a file with the `cuIpcOpenMemHandle` handle.
        own: bool,
    },
    /// The descriptor is the sender's tables of directly accessible objects.
    Tables,
    /// The descriptor is a segment that the receiver may access directly.
    Exposed {
        /// Its number.
        id: u64,
        /// It can be mapped to write.
        writable: bool,
    },
    /// The sender has withdrawn that segment: it can be unmapped.
    Released {
        /// Its number.
        id: u64,
    },
}

/// A message or event of another member.
#[derive(Debug)]
pub enum HostEvent {
    /// A message.
    Message {
        /// The sender.
        from: MemberId,
        /// Its PID in this process's namespace, if it has one there.
        pid: Option<i32>,
        /// The message.
        message: Message,
        /// Its descriptors; any number, of any kind.
        fds: Vec<OwnedFd>,
    },
    /// The member is gone. Once for each member with a connection.
    Gone(MemberId),
}

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum ControlRecord {
    Wake,
    /// From a joining process: requests the registry.
    QueryRegistry,
    /// The reply; the descriptor is the registry.
    Registry,
    /// First on every connection between members: its two ends.
    Hello {
        from: u64,
        to: u64,
    },
    Message(Message),
}

impl ControlRecord {
    pub(super) const MAX: usize = 24;

    pub(super) fn encode(self) -> [u8; Self::MAX] {
        let words = match self {
            Self::Wake => [0, 0, 0],
            Self::QueryRegistry => [1, 0, 0],
            Self::Registry => [2, 0, 0],
            Self::Hello { from, to } => [3, from, to],
            Self::Message(Message::Ring) => [4, 0, 0],
            Self::Message(Message::Segment { id }) => [5, id, 0],
            Self::Message(Message::Released { id }) => [6, id, 0],
            Self::Message(Message::Device { id, len, own }) => [if own { 7 } else { 8 }, id, len],
            Self::Message(Message::Tables) => [9, 0, 0],
            Self::Message(Message::Exposed { id, writable }) => [10, id, u64::from(writable)],
        };
        let mut bytes = [0; Self::MAX];
        for (to, word) in bytes.chunks_exact_mut(8).zip(words) {
            to.copy_from_slice(&word.to_ne_bytes());
        }
        bytes
    }

    /// `None` for another length or an unknown record.
    pub(super) fn decode(bytes: &[u8]) -> Option<Self> {
        let bytes: &[u8; Self::MAX] = bytes.try_into().ok()?;
        let word = |index: usize| {
            let mut word = [0; 8];
            word.copy_from_slice(&bytes[8 * index..][..8]);
            u64::from_ne_bytes(word)
        };
        let record = match word(0) {
            0 => Self::Wake,
            1 => Self::QueryRegistry,
            2 => Self::Registry,
            3 => Self::Hello {
                from: word(1),
                to: word(2),
            },
            4 => Self::Message(Message::Ring),
            5 => Self::Message(Message::Segment { id: word(1) }),
            6 => Self::Message(Message::Released { id: word(1) }),
            kind @ (7 | 8) => Self::Message(Message::Device {
                id: word(1),
                len: word(2),
                own: kind == 7,
            }),
            9 => Self::Message(Message::Tables),
            10 => Self::Message(Message::Exposed {
                id: word(1),
                writable: word(2) != 0,
            }),
            _ => return None,
        };
        Some(record)
    }
}

/// A connection to another member.
#[derive(Debug)]
pub struct Connection {
    socket: CloseOnFork<OwnedFd>,
    to: MemberId,
    pid: i32,
}

impl Connection {
    /// The member at the other end.
    pub fn to(&self) -> MemberId {
        self.to
    }

    /// Its PID in this process's namespace, if it has one there.
    pub fn pid(&self) -> Option<i32> {
        Some(self.pid).filter(|&pid| pid > 0)
    }

    /// Sends a message with its descriptors, which stay open here: in order, whole or not at all.
    ///
    /// # Errors
    /// `WouldBlock` when the member does not read; `BrokenPipe` or `ConnectionReset` when it is
    /// gone, which [`Host::poll`](super::Host::poll) reports too.
    pub fn send(&self, message: Message, fds: &[BorrowedFd<'_>]) -> io::Result<()> {
        send(&self.socket, ControlRecord::Message(message), fds)
    }

    /// Wakes the peer's progress thread: a system call.
    pub fn wake(&self) {
        // A full socket holds thousands of unread wake-ups; a peer that is gone needs none.
        let _ = send(&self.socket, ControlRecord::Wake, &[]);
    }
}

pub(super) fn send(socket: &impl AsFd, record: ControlRecord, fds: &[BorrowedFd<'_>]) -> io::Result<()> {
    socket::send(socket.as_fd(), &[IoSlice::new(&record.encode())], fds)
}

enum PeerSocket {
    /// Accepted here; `from` is `None` until it has identified itself.
    Accepted {
        socket: CloseOnFork<OwnedFd>,
        from: Option<MemberId>,
        pid: i32,
    },
    Connected(Arc<Connection>),
}

impl PeerSocket {
    fn socket(&self) -> BorrowedFd<'_> {
        match self {
            Self::Accepted { socket, .. } => socket.as_fd(),
            Self::Connected(connection) => connection.socket.as_fd(),
        }
    }

    fn member(&self) -> Option<MemberId> {
        match self {
            Self::Accepted { from, .. } => *from,
            Self::Connected(connection) => Some(connection.to),
        }
    }
}

const LISTENER: u64 = 0;

/// Records read from one connection before the next one's.
const STRIDE: usize = 64;

/// How long no connection is accepted after the process ran out of descriptors.
const ACCEPT_PAUSE: Duration = Duration::from_millis(100);

pub(super) struct Peers {
    listener: CloseOnFork<OwnedFd>,
    /// Until when no connection is accepted, for want of descriptors.
    paused: Option<Instant>,
    epoll: Arc<Epoll>,
    sockets: HashMap<u64, PeerSocket>,
    outgoing: HashMap<MemberId, u64>,
    last: u64,
    events: VecDeque<HostEvent>,
}

impl Peers {
    pub(super) fn new(listener: CloseOnFork<OwnedFd>) -> io::Result<Self> {
        let epoll = Epoll::new(EpollCreateFlags::EPOLL_CLOEXEC)?;
        epoll.add(listener.as_fd(), EpollEvent::new(EpollFlags::EPOLLIN, LISTENER))?;
        Ok(Self {
            listener,
            paused: None,
            epoll: Arc::new(epoll),
            sockets: HashMap::new(),
            outgoing: HashMap::new(),
            last: LISTENER,
            events: VecDeque::new(),
        })
    }

    pub(super) fn epoll(&self) -> Arc<Epoll> {
        Arc::clone(&self.epoll)
    }

    pub(super) fn connect(
        &mut self,
        names: &GroupNames,
        registry: &Registry,
        me: MemberId,
        to: MemberId,
    ) -> io::Result<Arc<Connection>> {
        if let Some(PeerSocket::Connected(connection)) =
            self.outgoing.get(&to).and_then(|token| self.sockets.get(token))
        {
            return Ok(Arc::clone(connection));
        }
        if !registry.is_alive(to) {
            return Err(io::ErrorKind::NotConnected.into());
        }
        let socket = socket::connect_to(&names.slot(to.slot())).map_err(|error| {
            if error.kind() != io::ErrorKind::ConnectionRefused {
                return error;
            }
            // The name is free: the member is dead, which was not detected yet.
            registry.mark_gone(to);
            io::ErrorKind::NotConnected.into()
        })?;
        let peer = socket::credentials(&socket)?;
        if !is_own_user(peer.uid) {
            // Its name has a new holder of another user, unless this process has since entered a
            // user namespace that does not map its own.
            if is_definite(peer.uid) {
                registry.mark_gone(to);
            }
            return Err(io::ErrorKind::NotConnected.into());
        }
        let (from, to_packed) = (me.pack(), to.pack());
        send(&socket, ControlRecord::Hello { from, to: to_packed }, &[])?;
        let connection = Arc::new(Connection {
            socket,
            to,
            pid: peer.pid,
        });
        let token = self.add(PeerSocket::Connected(Arc::clone(&connection)))?;
        self.outgoing.insert(to, token);
        Ok(connection)
    }

    fn add(&mut self, peer: PeerSocket) -> io::Result<u64> {
        self.last += 1;
        self.epoll
            .add(peer.socket(), EpollEvent::new(EpollFlags::EPOLLIN, self.last))?;
        self.sockets.insert(self.last, peer);
        Ok(self.last)
    }

    pub(super) fn poll(&mut self, registry: &Registry, me: MemberId) -> Option<HostEvent> {
        if let Some(event) = self.events.pop_front() {
            return Some(event);
        }
        if self.paused.is_some_and(|until| until <= Instant::now()) {
            self.resume();
        }
        let mut events = [EpollEvent::empty(); 32];
        let count = self.epoll.wait(&mut events, EpollTimeout::ZERO).unwrap_or(0);
        for event in &events[..count] {
            match event.data() {
                LISTENER => self.accept(),
                token => self.read(token, registry, me),
            }
        }
        self.events.pop_front()
    }

    fn accept(&mut self) {
        for _ in 0..STRIDE {
            let socket = match socket::accept(self.listener.as_fd()) {
                Ok(socket) => socket,
                Err(error) => match error.raw_os_error() {
                    Some(libc::EMFILE | libc::ENFILE | libc::ENOBUFS | libc::ENOMEM) => return self.pause(),
                    _ => return,
                },
            };
            let Ok(peer) = socket::credentials(&socket) else {
                continue;
            };
            // Another user's connection is closed.
            if is_own_user(peer.uid) {
                let pid = peer.pid;
                let _ = self.add(PeerSocket::Accepted {
                    socket,
                    from: None,
                    pid,
                });
            }
        }
    }

    /// Stops polling the listening socket: pending connections would wake the thread for ever.
    pub(super) fn pause(&mut self) {
        if self.epoll.delete(self.listener.as_fd()).is_ok() {
            self.paused = Some(Instant::now() + ACCEPT_PAUSE);
            tracing::warn!("no descriptor is left to accept other processes on the soft device's address");
        }
    }

    /// When accepting resumes, if it is paused.
    pub(super) fn paused_until(&self) -> Option<Instant> {
        self.paused
    }

    fn resume(&mut self) {
        let event = EpollEvent::new(EpollFlags::EPOLLIN, LISTENER);
        if self.epoll.add(self.listener.as_fd(), event).is_ok() {
            self.paused = None;
        }
    }

    fn read(&mut self, token: u64, registry: &Registry, me: MemberId) {
        if self.read_batch(token, registry, me) == ReadStatus::Ended {
            self.close(token, registry, me);
        }
    }

    /// Reads up to [`STRIDE`] records of a connection.
    fn read_batch(&mut self, token: u64, registry: &Registry, me: MemberId) -> ReadStatus {
        for _ in 0..STRIDE {
            let Some(peer) = self.sockets.get_mut(&token) else {
                return ReadStatus::Drained;
            };
            let mut buffer = [0; ControlRecord::MAX + 1];
            let (len, fds) = match socket::receive(peer.socket(), &mut buffer) {
                Ok((0, _)) => return ReadStatus::Ended,
                Ok(received) => received,
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => return ReadStatus::Drained,
                Err(_) => return ReadStatus::Ended,
            };
            let PeerSocket::Accepted { socket, from, pid } = peer else {
                // Connections are one-way.
                continue;
            };
            let Some(record) = ControlRecord::decode(&buffer[..len]) else {
                continue;
            };
            match (record, *from) {
                (ControlRecord::QueryRegistry, None) => {
                    let _ = send(socket, ControlRecord::Registry, &[registry.fd().as_fd()]);
                }
                (ControlRecord::Hello { from: claimed, to }, None) => {
                    // It may be dead by now: its last messages still count.
                    let claimed = MemberId::unpack(claimed).filter(|&member| registry.is_latest(member));
                    if claimed.is_none() || to != me.pack() {
                        return ReadStatus::Ended;
                    }
                    *from = claimed;
                }
                (ControlRecord::Message(message), Some(from)) => {
                    let pid = Some(*pid).filter(|&pid| pid > 0);
                    self.events.push_back(HostEvent::Message {
                        from,
                        pid,
                        message,
                        fds,
                    });
                }
                // A wake-up needs no handling; invalid records are ignored.
                _ => {}
            }
        }
        ReadStatus::More
    }

    /// A connection hung up: its member is gone, with all its other connections.
    fn close(&mut self, token: u64, registry: &Registry, me: MemberId) {
        let Some(peer) = self.sockets.remove(&token) else {
            return;
        };
        self.unwatch(&peer);
        if let Some(member) = peer.member() {
            self.drain_member(member, registry, me);
            let tokens = self.sockets.iter().filter(|(_, peer)| peer.member() == Some(member));
            let tokens: Vec<u64> = tokens.map(|(&token, _)| token).collect();
            for token in tokens {
                if let Some(peer) = self.sockets.remove(&token) {
                    self.unwatch(&peer);
                }
            }
            self.outgoing.remove(&member);
            registry.mark_gone(member);
            self.events.push_back(HostEvent::Gone(member));
        }
        // A descriptor is free again.
        if self.paused.is_some() {
            self.resume();
        }
    }

    /// Removes a connection from the epoll set. Closing it is not enough: shm links may share it,
    /// and a socket that has hung up is readable for ever.
    fn unwatch(&self, peer: &PeerSocket) {
        // It fails only for what is not in the set.
        let _ = self.epoll.delete(peer.socket());
    }

    /// Reads the last messages of a member that is gone from its other connections, which may not
    /// have been accepted yet: for example a ring with its last datagrams.
    fn drain_member(&mut self, member: MemberId, registry: &Registry, me: MemberId) {
        self.accept();
        let is_its = |peer: &PeerSocket| match peer {
            PeerSocket::Accepted { from, .. } => from.is_none_or(|from| from == member),
            PeerSocket::Connected(_) => false,
        };
        let sockets = self.sockets.iter().filter(|(_, peer)| is_its(peer));
        let tokens: Vec<u64> = sockets.map(|(&token, _)| token).collect();
        for token in tokens {
            // At most what a socket's buffer holds; the next poll detects one that ended, or is
            // another member's.
            let _ = (0..STRIDE).find(|_| self.read_batch(token, registry, me) != ReadStatus::More);
        }
    }
}

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum ReadStatus {
    /// There may be more.
    More,
    /// There are no more for now.
    Drained,
    /// The connection hung up.
    Ended,
}
