//! Taking turns over a connection: the client writes, the server answers with its own.

use std::cell::RefCell;
use std::io::{ErrorKind, Read, Write};
use std::net::{Shutdown, SocketAddr, TcpStream};
use std::os::fd::AsRawFd;
use std::time::{Duration, Instant};

use doorbell_verbs::cm::Connection;
use nix::errno::Errno;
use nix::sys::socket::{MsgFlags, recv};
use socket2::{SockRef, TcpKeepalive};

use super::key::Key;
use super::line::{Broken, Line};
use super::message::{
    DONE, Figures, Greeting, LARGEST_CACHE_LINE, LARGEST_PAGE, MTU, Malformed, VERSION, check_version, format_mtu,
    our_version, parse_mtu, parse_power,
};
use crate::failure::{Failure, one_line};
use crate::interrupt::Interrupt;

/// How long the other end may take over an answer that it has at hand: long enough for a C tool to register much memory, or to find a peak.
pub(crate) const ANSWER: Duration = Duration::from_secs(30);
/// How often a wait looks for Ctrl-C.
const LOOK: Duration = Duration::from_millis(50);
/// How long the other end's goodbye is waited for, or that it closes the connection; little depends on it.
const GOODBYE: Duration = Duration::from_secs(1);
/// What is said of a connection that ended.
const CLOSED: &str = "it closed the connection, or its process ended";

/// Which end this is: the client writes first.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Role {
    /// It has connected.
    Client,
    /// It was waiting.
    Server,
}

/// A connection to the other end, on which the two take turns.
///
/// Every message has a deadline, [`ANSWER`], except where the other end may be measuring for as long as it likes: there the wait ends with the peer, which a keepalive notices too when it is the
/// peer's machine that is gone. Ctrl-C ends any wait.
#[derive(Debug)]
pub(crate) struct Conversation {
    way: Way,
    peer: SocketAddr,
    role: Role,
    interrupt: Interrupt,
    /// What keeps the test's queue pairs connected, with `-R`.
    kept: Vec<Connection>,
}

/// What messages go over.
#[derive(Debug)]
enum Way {
    /// TCP.
    Stream(TcpStream),
    /// A queue pair of the connection manager. In a cell, as a [`Watch`] takes what comes while others hold the conversation.
    Queue(Box<RefCell<Line>>),
}

impl Conversation {
    /// Over a connection.
    ///
    /// # Errors
    /// [`Failure::Lost`] when it is gone already.
    pub(crate) fn new(
        stream: TcpStream,
        peer: SocketAddr,
        role: Role,
        interrupt: &Interrupt,
    ) -> Result<Conversation, Failure> {
        let keepalive = TcpKeepalive::new()
            .with_time(Duration::from_secs(5))
            .with_interval(Duration::from_secs(2))
            .with_retries(3);
        let prepared = stream
            .set_nonblocking(false)
            .and_then(|()| stream.set_nodelay(true))
            .and_then(|()| stream.set_read_timeout(Some(LOOK)))
            .and_then(|()| stream.set_write_timeout(Some(ANSWER)))
            .and_then(|()| SockRef::from(&stream).set_tcp_keepalive(&keepalive));
        let conversation = Conversation {
            way: Way::Stream(stream),
            peer,
            role,
            interrupt: interrupt.clone(),
            kept: Vec::new(),
        };
        match prepared {
            Ok(()) => Ok(conversation),
            Err(e) => Err(conversation.lost(one_line(&e.to_string()))),
        }
    }

    /// Over a queue pair.
    pub(crate) fn over(line: Line, peer: SocketAddr, role: Role, interrupt: &Interrupt) -> Conversation {
        Conversation {
            way: Way::Queue(Box::new(RefCell::new(line))),
            peer,
            role,
            interrupt: interrupt.clone(),
            kept: Vec::new(),
        }
    }

    /// Keeps a queue pair of the test connected as long as the ends talk.
    pub(crate) fn keep(&mut self, connection: Connection) {
        self.kept.push(connection);
    }

    /// Where the other end is.
    pub(crate) fn peer(&self) -> SocketAddr {
        self.peer
    }

    /// Tells versions, pages, cache lines and MTUs. Returns what both ends go by.
    ///
    /// # Errors
    /// [`Failure::Test`] when the other end is of another version, or no perftest; as [`Conversation::barrier`] otherwise.
    pub(crate) fn greet(&mut self, ours: Greeting) -> Result<Greeting, Failure> {
        let version: [u8; VERSION] = self.exchange(our_version(), "its version")?;
        check_version(&version)
            .map_err(|reason| Failure::test(format!("peer {}: {}", self.peer, one_line(&reason))))?;
        let page = self.exchange(ours.page.to_be_bytes(), "its page size")?;
        let page =
            parse_power(page, LARGEST_PAGE, Malformed("its page size is none")).map_err(|e| self.malformed(e))?;
        let line = self.exchange(ours.cache_line.to_be_bytes(), "its cache line")?;
        let cache_line = parse_power(line, LARGEST_CACHE_LINE, Malformed("its cache line is none"))
            .map_err(|e| self.malformed(e))?;
        let mtu: [u8; MTU] = self.exchange(format_mtu(ours.mtu), "its MTU")?;
        let mtu = parse_mtu(mtu).map_err(|e| self.malformed(e))?;
        Ok(ours.with(Greeting { page, cache_line, mtu }))
    }

    /// Tells the keys of all queue pairs, one by one. Returns the other end's.
    ///
    /// # Errors
    /// As [`Conversation::barrier`].
    pub(crate) fn keys(&mut self, ours: &[Key]) -> Result<Vec<Key>, Failure> {
        ours.iter().map(|key| self.key(key, Some(ANSWER), "its key")).collect()
    }

    /// Waits until the other end is ready to connect, or has connected, what the connection manager connects (`-R`): both send a message as long as a key, of no meaning.
    ///
    /// # Errors
    /// As [`Conversation::barrier`].
    pub(crate) fn rendezvous(&mut self) -> Result<(), Failure> {
        self.exchange([0; Key::STRUCT], "that it is ready to connect").map(drop)
    }

    /// Waits until the other end has come as far as this one has: both tell a key that they have told before.
    ///
    /// # Errors
    /// [`Failure::Lost`] when the other end is gone or silent; [`Failure::Test`] when it says something else; [`Failure::Interrupted`].
    pub(crate) fn barrier(&mut self, ours: &Key) -> Result<(), Failure> {
        self.key(ours, Some(ANSWER), "that it is ready").map(drop)
    }

    /// As [`Conversation::barrier`], but the other end may be measuring: it may take as long as it lives.
    ///
    /// # Errors
    /// As [`Conversation::barrier`].
    pub(crate) fn barrier_after_test(&mut self, ours: &Key) -> Result<(), Failure> {
        self.key(ours, None, "that it is done").map(drop)
    }

    /// Tells results. The other end may not have any: what it says then means nothing.
    ///
    /// # Errors
    /// As [`Conversation::barrier_after_test`].
    pub(crate) fn figures(&mut self, ours: &Figures) -> Result<Figures, Failure> {
        let mut theirs = [[0; 8]; 5];
        for (ours, theirs) in ours.to_words().into_iter().zip(&mut theirs) {
            *theirs = self.exchange_within(ours, None, "its results")?;
        }
        Ok(Figures::from_words(theirs))
    }

    /// Says goodbye. The other end may be gone without one: by then all is said.
    ///
    /// Over a queue pair nothing is said: whoever is done disconnects.
    pub(crate) fn goodbye(mut self) {
        if matches!(self.way, Way::Stream(_)) && self.write(&DONE).is_ok() {
            let mut theirs = [0; DONE.len()];
            // What it says, and whether it does, makes no difference any more.
            let _ = self.read(&mut theirs, Some(GOODBYE), "goodbye");
        }
    }

    /// Waits a moment for the other end, which may still be measuring and does not say when it is done: until it closes the connection, of which this end closes its own half.
    ///
    /// A queue pair has no halves: a byte tells there what Doorbell at the other end would take from a half that is closed.
    pub(crate) fn linger(&mut self) {
        // The wait ends by the other end's closing, by the time, or by Ctrl-C: no difference any more.
        let _ = match &mut self.way {
            Way::Stream(stream) => stream.shutdown(Shutdown::Write).map_err(drop),
            Way::Queue(line) => line.get_mut().say(&[0], GOODBYE, &self.interrupt).map_err(drop),
        };
        let _ = self.read(&mut [0], Some(GOODBYE), "goodbye");
    }

    /// What a loop looks at while it measures.
    pub(crate) fn watch(&self) -> Watch<'_> {
        Watch {
            conversation: self,
            turns: 0,
            next: Instant::now() + LOOK,
        }
    }

    fn key(&mut self, ours: &Key, within: Option<Duration>, awaited: &str) -> Result<Key, Failure> {
        if matches!(self.way, Way::Queue(_)) {
            let mut theirs = [0; Key::STRUCT];
            self.take_turns(&ours.to_struct(), &mut theirs, within, awaited)?;
            return Key::of_struct(&theirs).map_err(|e| self.malformed(e));
        }
        let mut theirs = vec![0; Key::len(ours.gid.is_some())];
        self.take_turns(&ours.format(), &mut theirs, within, awaited)?;
        Key::parse(&theirs).map_err(|e| self.malformed(e))
    }

    fn exchange<const N: usize>(&mut self, ours: [u8; N], awaited: &str) -> Result<[u8; N], Failure> {
        self.exchange_within(ours, Some(ANSWER), awaited)
    }

    fn exchange_within<const N: usize>(
        &mut self,
        ours: [u8; N],
        within: Option<Duration>,
        awaited: &str,
    ) -> Result<[u8; N], Failure> {
        let mut theirs = [0; N];
        self.take_turns(&ours, &mut theirs, within, awaited)?;
        Ok(theirs)
    }

    fn take_turns(
        &mut self,
        ours: &[u8],
        theirs: &mut [u8],
        within: Option<Duration>,
        awaited: &str,
    ) -> Result<(), Failure> {
        match self.role {
            Role::Client => {
                self.write(ours)?;
                self.read(theirs, within, awaited)
            }
            Role::Server => {
                self.read(theirs, within, awaited)?;
                self.write(ours)
            }
        }
    }

    fn write(&mut self, bytes: &[u8]) -> Result<(), Failure> {
        match &mut self.way {
            Way::Stream(stream) => stream.write_all(bytes).map_err(|e| self.lost(reason(&e))),
            Way::Queue(line) => line
                .get_mut()
                .say(bytes, ANSWER, &self.interrupt)
                .map_err(|broken| self.broken(broken, "it does not take what it is sent")),
        }
    }

    fn read(&mut self, into: &mut [u8], within: Option<Duration>, awaited: &str) -> Result<(), Failure> {
        let stream = match &mut self.way {
            Way::Stream(stream) => stream,
            Way::Queue(line) => {
                return line
                    .get_mut()
                    .hear(into, within, &self.interrupt)
                    .map_err(|broken| self.broken(broken, &format!("it did not send {awaited} in time")));
            }
        };
        let deadline = within.map(|within| Instant::now() + within);
        let mut filled = 0;
        while filled < into.len() {
            if self.interrupt.requested() {
                return Err(Failure::Interrupted);
            }
            match stream.read(&mut into[filled..]) {
                Ok(0) => return Err(self.lost(CLOSED)),
                Ok(read) => filled += read,
                Err(e)
                    if matches!(
                        e.kind(),
                        ErrorKind::WouldBlock | ErrorKind::TimedOut | ErrorKind::Interrupted
                    ) =>
                {
                    if deadline.is_some_and(|deadline| Instant::now() >= deadline) {
                        return Err(self.lost(format!("it did not send {awaited} in time")));
                    }
                }
                Err(e) => return Err(self.lost(reason(&e))),
            }
        }
        Ok(())
    }

    #[cold]
    fn broken(&self, broken: Broken, late: &str) -> Failure {
        match broken {
            Broken::Lost(reason) => self.lost(reason),
            Broken::Late => self.lost(late),
            Broken::Interrupted => Failure::Interrupted,
        }
    }

    #[cold]
    fn malformed(&self, malformed: Malformed) -> Failure {
        Failure::test(format!(
            "peer {}: {malformed}: is it the same tool with the same options?",
            self.peer
        ))
    }

    /// The failure of a peer that is no longer there.
    #[cold]
    pub(crate) fn lost(&self, reason: impl Into<String>) -> Failure {
        Failure::Lost {
            control: self.peer,
            reason: reason.into(),
        }
    }
}

impl Drop for Conversation {
    fn drop(&mut self) {
        // Fails only where the connection is gone already.
        // Before what the ends talk over, so that the other one is not told first that this one is gone.
        self.kept.clear();
        if let Way::Stream(stream) = &self.way {
            let _ = stream.shutdown(Shutdown::Both);
        }
    }
}

fn reason(error: &std::io::Error) -> String {
    match error.kind() {
        ErrorKind::ConnectionReset | ErrorKind::BrokenPipe | ErrorKind::ConnectionAborted => CLOSED.to_owned(),
        ErrorKind::WouldBlock => "it does not take what it is sent".to_owned(),
        _ => one_line(&error.to_string()),
    }
}

/// A loop looks at the clock once in so many turns, and at the connection when it is time.
const TURNS: u32 = 512;

/// What has become of the other end, and of the user, while a loop measures.
#[derive(Debug)]
pub(crate) struct Watch<'a> {
    conversation: &'a Conversation,
    turns: u32,
    next: Instant,
}

impl Watch<'_> {
    /// One turn of a loop. Returns whether the other end has said something: it has come to the next message before this one, which is to say that it is done.
    ///
    /// # Errors
    /// [`Failure::Lost`] when the other end is gone; [`Failure::Interrupted`].
    #[inline]
    pub(crate) fn turn(&mut self) -> Result<bool, Failure> {
        self.turns = self.turns.wrapping_add(1);
        if self.turns.is_multiple_of(TURNS) {
            self.look()
        } else {
            Ok(false)
        }
    }

    #[cold]
    fn look(&mut self) -> Result<bool, Failure> {
        if self.conversation.interrupt.requested() {
            return Err(Failure::Interrupted);
        }
        let now = Instant::now();
        if now < self.next {
            return Ok(false);
        }
        self.next = now + LOOK;
        self.ask()
    }

    /// Looks at once.
    ///
    /// # Errors
    /// As [`Watch::turn`].
    pub(crate) fn ask(&self) -> Result<bool, Failure> {
        let conversation = self.conversation;
        if conversation.interrupt.requested() {
            return Err(Failure::Interrupted);
        }
        let stream = match &conversation.way {
            Way::Stream(stream) => stream,
            Way::Queue(line) => {
                return line
                    .borrow_mut()
                    .has_heard()
                    .map_err(|broken| conversation.broken(broken, CLOSED));
            }
        };
        let flags = MsgFlags::MSG_PEEK | MsgFlags::MSG_DONTWAIT;
        match recv(stream.as_raw_fd(), &mut [0], flags) {
            Ok(0) => Err(conversation.lost(CLOSED)),
            Ok(_) => Ok(true),
            Err(Errno::EAGAIN | Errno::EINTR) => Ok(false),
            Err(errno) => Err(conversation.lost(reason(&errno.into()))),
        }
    }
}

#[cfg(test)]
#[path = "conversation_tests.rs"]
mod tests;
