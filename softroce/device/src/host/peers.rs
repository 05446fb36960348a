//! Connections between members, and their messages.
//!
//! A member connects to another's name to send to it: its identity, messages with descriptors, and
//! wake-ups of the other's progress thread. A connection is one-way: a reply needs one in the other
//! direction. When either end dies, the other sees the connection hang up.

use std::collections::{HashMap, VecDeque};
use std::io::{self, IoSlice};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::Arc;
use std::time::{Duration, Instant};

use nix::sys::epoll::{Epoll, EpollCreateFlags, EpollEvent, EpollFlags, EpollTimeout};
use nix::unistd::geteuid;

use super::fork::Unforked;
use super::names::Names;
use super::registry::{MemberId, Registry};
use super::socket;

/// A message between members.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Message {
    /// The descriptor is the shm ring from the sender to the receiver.
    Lane,
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
        /// The descriptor is the memory's own; otherwise a file with the `cuIpcOpenMemHandle`
        /// handle.
        own: bool,
    },
    /// The sender has withdrawn that segment: it can be unmapped.
    Released {
        /// Its number.
        id: u64,
    },
}

/// A message or event of another member.
#[derive(Debug)]
pub enum Arrival {
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

/// Everything that is sent, handshakes included.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Record {
    /// Wakes the progress thread.
    Wake,
    /// From a joining process: requests the registry.
    Ask,
    /// The reply; the descriptor is the registry.
    Registry,
    /// First on every connection between members: its two ends.
    Hello { from: u64, to: u64 },
    /// A message for the device.
    Message(Message),
}

impl Record {
    /// Bytes of a record.
    pub(super) const MAX: usize = 24;

    pub(super) fn encode(self) -> [u8; Self::MAX] {
        let words = match self {
            Self::Wake => [0, 0, 0],
            Self::Ask => [1, 0, 0],
            Self::Registry => [2, 0, 0],
            Self::Hello { from, to } => [3, from, to],
            Self::Message(Message::Lane) => [4, 0, 0],
            Self::Message(Message::Segment { id }) => [5, id, 0],
            Self::Message(Message::Released { id }) => [6, id, 0],
            Self::Message(Message::Device { id, len, own }) => [if own { 7 } else { 8 }, id, len],
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
            1 => Self::Ask,
            2 => Self::Registry,
            3 => Self::Hello {
                from: word(1),
                to: word(2),
            },
            4 => Self::Message(Message::Lane),
            5 => Self::Message(Message::Segment { id: word(1) }),
            6 => Self::Message(Message::Released { id: word(1) }),
            kind @ (7 | 8) => Self::Message(Message::Device {
                id: word(1),
                len: word(2),
                own: kind == 7,
            }),
            _ => return None,
        };
        Some(record)
    }
}

/// A connection to another member.
#[derive(Debug)]
pub struct Connection {
    socket: Unforked<OwnedFd>,
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

    /// Sends a message with its descriptors, which stay open here. Messages arrive in order, whole
    /// or not at all.
    ///
    /// # Errors
    /// `WouldBlock` when the member does not read; `BrokenPipe` or `ConnectionReset` when it is
    /// gone, which [`Host::poll`](super::Host::poll) reports too.
    pub fn send(&self, message: Message, fds: &[BorrowedFd<'_>]) -> io::Result<()> {
        send(&self.socket, Record::Message(message), fds)
    }

    /// Wakes the peer's progress thread: a system call.
    pub fn wake(&self) {
        // A full socket holds thousands of unread wake-ups; a peer that is gone needs none.
        let _ = send(&self.socket, Record::Wake, &[]);
    }
}

/// Sends a control record with descriptors.
pub(super) fn send(socket: &impl AsFd, record: Record, fds: &[BorrowedFd<'_>]) -> io::Result<()> {
    socket::send(socket.as_fd(), &[IoSlice::new(&record.encode())], fds)
}

enum End {
    /// Accepted here; `from` is `None` until it has identified itself.
    In {
        socket: Unforked<OwnedFd>,
        from: Option<MemberId>,
        pid: i32,
    },
    /// Connected by this process.
    Out(Arc<Connection>),
}

impl End {
    fn socket(&self) -> BorrowedFd<'_> {
        match self {
            Self::In { socket, .. } => socket.as_fd(),
            Self::Out(connection) => connection.socket.as_fd(),
        }
    }

    fn member(&self) -> Option<MemberId> {
        match self {
            Self::In { from, .. } => *from,
            Self::Out(connection) => Some(connection.to),
        }
    }
}

/// The listening socket's epoll token.
const LISTENER: u64 = 0;

/// Records read from one connection before the next one's.
const STRIDE: usize = 64;

/// How long no connection is accepted after the process ran out of descriptors.
const BREAK: Duration = Duration::from_millis(100);

/// All the connections of a member.
pub(super) struct Peers {
    listener: Unforked<OwnedFd>,
    /// Until when no connection is accepted, for want of descriptors.
    paused: Option<Instant>,
    epoll: Arc<Epoll>,
    ends: HashMap<u64, End>,
    outgoing: HashMap<MemberId, u64>,
    last: u64,
    arrivals: VecDeque<Arrival>,
}

impl Peers {
    pub(super) fn new(listener: Unforked<OwnedFd>) -> io::Result<Self> {
        let epoll = Epoll::new(EpollCreateFlags::EPOLL_CLOEXEC)?;
        epoll.add(listener.as_fd(), EpollEvent::new(EpollFlags::EPOLLIN, LISTENER))?;
        Ok(Self {
            listener,
            paused: None,
            epoll: Arc::new(epoll),
            ends: HashMap::new(),
            outgoing: HashMap::new(),
            last: LISTENER,
            arrivals: VecDeque::new(),
        })
    }

    pub(super) fn epoll(&self) -> Arc<Epoll> {
        Arc::clone(&self.epoll)
    }

    pub(super) fn connect(
        &mut self,
        names: &Names,
        registry: &Registry,
        me: MemberId,
        to: MemberId,
    ) -> io::Result<Arc<Connection>> {
        if let Some(End::Out(connection)) = self.outgoing.get(&to).and_then(|token| self.ends.get(token)) {
            return Ok(Arc::clone(connection));
        }
        if !registry.lives(to) {
            return Err(io::ErrorKind::NotConnected.into());
        }
        let socket = socket::connect_to(&names.slot(to.slot())).map_err(|error| {
            if error.kind() != io::ErrorKind::ConnectionRefused {
                return error;
            }
            // The name is free: the member is dead, which was not detected yet.
            registry.bury(to);
            io::ErrorKind::NotConnected.into()
        })?;
        let peer = socket::credentials(&socket)?;
        if peer.uid != geteuid().as_raw() {
            // Its name has a new holder of another user.
            registry.bury(to);
            return Err(io::ErrorKind::NotConnected.into());
        }
        let (from, to_whom) = (me.pack(), to.pack());
        send(&socket, Record::Hello { from, to: to_whom }, &[])?;
        let connection = Arc::new(Connection {
            socket,
            to,
            pid: peer.pid,
        });
        let token = self.add(End::Out(Arc::clone(&connection)))?;
        self.outgoing.insert(to, token);
        Ok(connection)
    }

    fn add(&mut self, end: End) -> io::Result<u64> {
        self.last += 1;
        self.epoll
            .add(end.socket(), EpollEvent::new(EpollFlags::EPOLLIN, self.last))?;
        self.ends.insert(self.last, end);
        Ok(self.last)
    }

    pub(super) fn poll(&mut self, registry: &Registry, me: MemberId) -> Option<Arrival> {
        if let Some(arrival) = self.arrivals.pop_front() {
            return Some(arrival);
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
        self.arrivals.pop_front()
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
            if peer.uid == geteuid().as_raw() {
                let pid = peer.pid;
                let _ = self.add(End::In {
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
            self.paused = Some(Instant::now() + BREAK);
            tracing::warn!("no descriptor is left for other processes on the soft device's address");
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

    /// Reads a connection's records.
    fn read(&mut self, token: u64, registry: &Registry, me: MemberId) {
        if self.take(token, registry, me) == Taken::Ended {
            self.hang_up(token, registry, me);
        }
    }

    /// Reads up to [`STRIDE`] records of a connection.
    fn take(&mut self, token: u64, registry: &Registry, me: MemberId) -> Taken {
        for _ in 0..STRIDE {
            let Some(end) = self.ends.get_mut(&token) else {
                return Taken::All;
            };
            let mut buffer = [0; Record::MAX + 1];
            let (len, fds) = match socket::receive(end.socket(), &mut buffer) {
                Ok((0, _)) => return Taken::Ended,
                Ok(received) => received,
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => return Taken::All,
                Err(_) => return Taken::Ended,
            };
            let End::In { socket, from, pid } = end else {
                // Connections are one-way.
                continue;
            };
            let Some(record) = Record::decode(&buffer[..len]) else {
                continue;
            };
            match (record, *from) {
                (Record::Ask, None) => {
                    let _ = send(socket, Record::Registry, &[registry.fd().as_fd()]);
                }
                (Record::Hello { from: said, to }, None) => {
                    // It may be dead by now: its last messages still count.
                    let said = MemberId::unpack(said).filter(|&member| registry.is_latest(member));
                    if said.is_none() || to != me.pack() {
                        return Taken::Ended;
                    }
                    *from = said;
                }
                (Record::Message(message), Some(from)) => {
                    let pid = Some(*pid).filter(|&pid| pid > 0);
                    self.arrivals.push_back(Arrival::Message {
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
        Taken::Some
    }

    /// A connection hung up: its member is gone, with all its other connections.
    fn hang_up(&mut self, token: u64, registry: &Registry, me: MemberId) {
        let Some(end) = self.ends.remove(&token) else {
            return;
        };
        self.unwatch(&end);
        if let Some(member) = end.member() {
            self.hear_out(member, registry, me);
            let tokens = self.ends.iter().filter(|(_, end)| end.member() == Some(member));
            let tokens: Vec<u64> = tokens.map(|(&token, _)| token).collect();
            for token in tokens {
                if let Some(end) = self.ends.remove(&token) {
                    self.unwatch(&end);
                }
            }
            self.outgoing.remove(&member);
            registry.bury(member);
            self.arrivals.push_back(Arrival::Gone(member));
        }
        // A descriptor is free again.
        if self.paused.is_some() {
            self.resume();
        }
    }

    /// Removes a connection from the epoll set. Closing it is not enough: shm links may share it,
    /// and a socket that has hung up is readable for ever.
    fn unwatch(&self, end: &End) {
        // It fails only for what is not in the set.
        let _ = self.epoll.delete(end.socket());
    }

    /// Reads the last messages of a member that is gone from its other connections, which may not
    /// have been accepted yet: for example a ring with its last datagrams.
    fn hear_out(&mut self, member: MemberId, registry: &Registry, me: MemberId) {
        self.accept();
        let may_be_its = |end: &End| matches!(end, End::In { from, .. } if from.is_none_or(|from| from == member));
        let ends = self.ends.iter().filter(|(_, end)| may_be_its(end));
        let tokens: Vec<u64> = ends.map(|(&token, _)| token).collect();
        for token in tokens {
            // At most what a socket's buffer holds; the next poll detects one that ended, or is
            // another member's.
            let _ = (0..STRIDE).find(|_| self.take(token, registry, me) != Taken::Some);
        }
    }
}

/// Result of reading records from a connection.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Taken {
    /// There may be more.
    Some,
    /// There are no more for now.
    All,
    /// The connection hung up.
    Ended,
}
