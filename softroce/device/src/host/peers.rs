//! Connections between members, and what they say over them.
//!
//! A member connects to another's name to have a way to it: it says who it is, sends messages with descriptors, and what wakes the other's progress thread.
//! Nothing is ever said in return: who wants to answer connects as well. When either end dies, the other sees the connection hang up.

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

/// What one member tells another.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Message {
    /// The descriptor sent along is the lane from the sender to the receiver.
    Lane,
    /// The descriptor sent along is a segment of the sender's memory, which it calls by this number.
    Segment {
        /// Its number.
        id: u64,
    },
    /// The descriptor sent along is for memory of a GPU that the sender calls by this number, among its segments.
    Device {
        /// Its number.
        id: u64,
        /// How many bytes.
        len: u64,
        /// The descriptor is the memory's own; otherwise it is of a file with what `cuIpcOpenMemHandle` takes.
        own: bool,
    },
    /// The sender has given that segment up: what is mapped of it can be unmapped.
    Released {
        /// Its number.
        id: u64,
    },
}

/// What has come of another member.
#[derive(Debug)]
pub enum Arrival {
    /// It says something.
    Message {
        /// Who.
        from: MemberId,
        /// Its process, in this process's PID namespace; `None` where that has no number for it.
        pid: Option<i32>,
        /// What.
        message: Message,
        /// The descriptors it sent along; any number, of any kind.
        fds: Vec<OwnedFd>,
    },
    /// It is gone. Said once for each member that there was a connection with.
    Gone(MemberId),
}

/// All that is sent, hand-shakes included.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Record {
    /// Look whether there is something for you.
    Wake,
    /// From who wants to join: send me the registry.
    Ask,
    /// The answer; the registry goes along.
    Registry,
    /// First on every connection: who is at either end.
    Hello { from: u64, to: u64 },
    /// What is for the device.
    Message(Message),
}

impl Record {
    /// Bytes of the longest one.
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

    /// Reads one, of exactly its length.
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

/// A way to another member.
#[derive(Debug)]
pub struct Connection {
    socket: Unforked<OwnedFd>,
    to: MemberId,
    pid: i32,
}

impl Connection {
    /// Who is at the other end.
    pub fn to(&self) -> MemberId {
        self.to
    }

    /// Its process, in this process's PID namespace; `None` where that has no number for it.
    pub fn pid(&self) -> Option<i32> {
        Some(self.pid).filter(|&pid| pid > 0)
    }

    /// Sends a message with its descriptors, which stay open here. Messages arrive in their order, whole or not at all.
    ///
    /// # Errors
    /// `WouldBlock` when the member does not read what it was sent; `BrokenPipe` or `ConnectionReset` when it is gone, which [`Host::poll`](super::Host::poll) tells too.
    pub fn send(&self, message: Message, fds: &[BorrowedFd<'_>]) -> io::Result<()> {
        send(&self.socket, Record::Message(message), fds)
    }

    /// Wakes the other's progress thread: a system call.
    pub fn wake(&self) {
        // Where there is no room it has been woken thousands of times and has not run since; where it is gone nobody sleeps.
        let _ = send(&self.socket, Record::Wake, &[]);
    }
}

/// Sends a record that nothing follows.
pub(super) fn send(socket: &impl AsFd, record: Record, fds: &[BorrowedFd<'_>]) -> io::Result<()> {
    socket::send(socket.as_fd(), &[IoSlice::new(&record.encode())], fds)
}

enum End {
    /// Another connected; `None` until it has said who it is.
    In {
        socket: Unforked<OwnedFd>,
        from: Option<MemberId>,
        pid: i32,
    },
    /// We did.
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

/// What the listening socket is called among the events.
const LISTENER: u64 = 0;

/// Records taken from one connection before the others have their turn.
const STRIDE: usize = 64;

/// How long nobody is let in after the process had no descriptor left.
const BREAK: Duration = Duration::from_millis(100);

/// All the connections of a member.
pub(super) struct Peers {
    listener: Unforked<OwnedFd>,
    /// Until when it is not listened to, for want of descriptors.
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
            // Nobody has the name: the member is dead, and nobody had noticed.
            registry.bury(to);
            io::ErrorKind::NotConnected.into()
        })?;
        let peer = socket::credentials(&socket)?;
        if peer.uid != geteuid().as_raw() {
            // Its name is another user's now, as it had let go of it.
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
            // Another user's is hung up on.
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

    /// Who waits to be let in would wake us for ever.
    pub(super) fn pause(&mut self) {
        if self.epoll.delete(self.listener.as_fd()).is_ok() {
            self.paused = Some(Instant::now() + BREAK);
            tracing::warn!("no descriptor is left for other processes on the soft device's address");
        }
    }

    /// When it will be listened to again, where it is not now.
    pub(super) fn paused_until(&self) -> Option<Instant> {
        self.paused
    }

    fn resume(&mut self) {
        let event = EpollEvent::new(EpollFlags::EPOLLIN, LISTENER);
        if self.epoll.add(self.listener.as_fd(), event).is_ok() {
            self.paused = None;
        }
    }

    /// Takes what has come on a connection.
    fn read(&mut self, token: u64, registry: &Registry, me: MemberId) {
        if self.take(token, registry, me) == Taken::Ended {
            self.hang_up(token, registry, me);
        }
    }

    /// Takes so many records of a connection.
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
                // Nothing is ever said in return.
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
                    // It may be dead by now: what it has said before is still to be heard.
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
                // For a wake it is enough to have come here; and what a neighbour says that makes no sense is nothing.
                _ => {}
            }
        }
        Taken::Some
    }

    /// A connection is at its end: whoever it was with is gone, with all other connections.
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

    /// Is no longer woken by a connection. To close it is not enough: lanes may have a share in it, and one that is at its end is readable for ever.
    fn unwatch(&self, end: &End) {
        // It fails only for what is not watched.
        let _ = self.epoll.delete(end.socket());
    }

    /// Takes what a member that is gone said on other connections, which may not have been looked at, or let in, yet: a lane with its last datagrams, for one.
    fn hear_out(&mut self, member: MemberId, registry: &Registry, me: MemberId) {
        self.accept();
        let may_be_its = |end: &End| matches!(end, End::In { from, .. } if from.is_none_or(|from| from == member));
        let ends = self.ends.iter().filter(|(_, end)| may_be_its(end));
        let tokens: Vec<u64> = ends.map(|(&token, _)| token).collect();
        for token in tokens {
            // As much as a socket's buffer holds of these records, at most; of one that ends, or is another's, the next poll tells.
            let _ = (0..STRIDE).find(|_| self.take(token, registry, me) != Taken::Some);
        }
    }
}

/// What taking records from a connection came to.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Taken {
    /// There may be more.
    Some,
    /// There are no more now.
    All,
    /// There will never be any more.
    Ended,
}
