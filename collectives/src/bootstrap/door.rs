//! A door: a listening socket, and those who have connected and not yet said who they are.
//!
//! Anybody can connect to a TCP port. So a door waits for all of them at once: one who says nothing, or drips bytes, holds up nobody. A caller has [`MANNERS`] to say its first letter, of at most
//! [`MAX_HELLO`](super::wire::MAX_HELLO) bytes, and at most [`CROWD`] callers stand at a door; the one who has stood there longest makes room.

use std::collections::VecDeque;
use std::io::{self, Read, Write};
use std::net::{IpAddr, SocketAddr, TcpListener, TcpStream};
use std::os::fd::{AsFd, BorrowedFd};
use std::time::{Duration, Instant};

use nix::errno::Errno;
use nix::poll::{PollFd, PollFlags, PollTimeout, poll};

use super::wire::{HEADER, Letter, MAX_HELLO, MAX_LETTER, body_length};

/// How long a caller may take to say its first letter.
const MANNERS: Duration = Duration::from_secs(10);
/// How many callers may stand at a door beside those who are expected.
const CROWD: usize = 256;
/// How long a letter may take to be written; it fits in a socket's buffer, but for large tables.
const WRITE: Duration = Duration::from_secs(10);
/// How long the door stays shut after the kernel had no descriptor for a caller.
const BREATH: Duration = Duration::from_millis(20);

/// Somebody who has connected.
#[derive(Debug)]
struct Caller {
    stream: TcpStream,
    from: SocketAddr,
    since: Instant,
    said: Vec<u8>,
}

/// A listening socket and who stands before it.
#[derive(Debug)]
pub(super) struct Door {
    listener: TcpListener,
    address: SocketAddr,
    callers: VecDeque<Caller>,
    /// Until when nobody is let in, as there was no descriptor for them.
    shut: Option<Instant>,
    room: usize,
}

/// Somebody who has said something.
#[derive(Debug)]
pub(super) struct Guest {
    /// The connection, which blocks.
    pub(super) stream: TcpStream,
    /// Its other end.
    pub(super) from: SocketAddr,
    /// What was said: a letter, or why it is none.
    pub(super) said: Result<Letter, &'static str>,
}

impl Door {
    /// Listens at `address`; port 0 is any free one. `expected` callers may come at once.
    pub(super) fn open(address: SocketAddr, expected: u32) -> io::Result<Self> {
        let listener = TcpListener::bind(address)?;
        listener.set_nonblocking(true)?;
        let address = listener.local_addr()?;
        Ok(Self {
            listener,
            address,
            callers: VecDeque::new(),
            shut: None,
            room: CROWD + expected as usize,
        })
    }

    /// Where it is.
    pub(super) fn address(&self) -> SocketAddr {
        self.address
    }

    /// Waits for the next who has something to say; none if nobody had until `deadline`, or `bell` could be read first.
    pub(super) fn next(&mut self, deadline: Instant, bell: Option<BorrowedFd<'_>>) -> io::Result<Option<Guest>> {
        loop {
            let now = Instant::now();
            let Some(left) = deadline.checked_duration_since(now).filter(|left| !left.is_zero()) else {
                return Ok(None);
            };
            self.callers.retain(|caller| now < caller.since + MANNERS);
            let impatient = self.callers.front().map(|caller| caller.since + MANNERS);
            self.shut = self.shut.filter(|until| now < *until);
            let until = [impatient, self.shut].into_iter().flatten().min();
            let left = until.map_or(left, |until| left.min(until.saturating_duration_since(now)));

            let open = if self.shut.is_some() {
                PollFlags::empty()
            } else {
                PollFlags::POLLIN
            };
            let mut fds = vec![PollFd::new(self.listener.as_fd(), open)];
            fds.extend(
                self.callers
                    .iter()
                    .map(|c| PollFd::new(c.stream.as_fd(), PollFlags::POLLIN)),
            );
            fds.extend(bell.map(|bell| PollFd::new(bell, PollFlags::POLLIN)));
            match poll(&mut fds, timeout(left)) {
                Ok(_) => {}
                Err(Errno::EINTR) => continue,
                Err(e) => return Err(e.into()),
            }
            let ready: Vec<bool> = fds
                .iter()
                .map(|fd| fd.revents().is_some_and(|events| !events.is_empty()))
                .collect();
            if bell.is_some() && ready.last() == Some(&true) {
                return Ok(None);
            }
            for i in (0..self.callers.len()).filter(|i| ready[i + 1]) {
                if let Some(said) = self.callers[i].listen()
                    && let Some(caller) = self.callers.remove(i)
                    && caller.stream.set_nonblocking(false).is_ok()
                {
                    return Ok(Some(Guest {
                        stream: caller.stream,
                        from: caller.from,
                        said,
                    }));
                }
            }
            if ready[0] {
                self.let_in()?;
            }
        }
    }

    fn let_in(&mut self) -> io::Result<()> {
        match self.listener.accept() {
            Ok((stream, from)) => {
                stream.set_nonblocking(true)?;
                stream.set_nodelay(true)?;
                if self.callers.len() == self.room {
                    self.callers.pop_front();
                }
                self.callers.push_back(Caller {
                    stream,
                    from,
                    since: Instant::now(),
                    said: Vec::new(),
                });
                Ok(())
            }
            Err(e) => match Errno::from_raw(e.raw_os_error().unwrap_or(0)) {
                Errno::EMFILE | Errno::ENFILE | Errno::ENOBUFS | Errno::ENOMEM => {
                    self.shut = Some(Instant::now() + BREATH);
                    Ok(())
                }
                Errno::EBADF | Errno::EINVAL | Errno::ENOTSOCK | Errno::EOPNOTSUPP | Errno::EFAULT => Err(e),
                // accept(2): the caller is gone again, or the network had something to say that concerns only it.
                _ => Ok(()),
            },
        }
    }
}

impl Caller {
    /// Hears what has come: none if there is more to be said.
    fn listen(&mut self) -> Option<Result<Letter, &'static str>> {
        loop {
            let wanted = match self.wanted() {
                Ok(0) => return Some(Letter::decode(&self.said[HEADER..]).ok_or("it makes no sense")),
                Ok(wanted) => wanted,
                Err(said) => return Some(Err(said)),
            };
            let mut some = [0; MAX_HELLO];
            let wanted = wanted.min(some.len());
            match self.stream.read(&mut some[..wanted]) {
                Ok(0) => return Some(Err("it hung up")),
                Ok(n) => self.said.extend_from_slice(&some[..n]),
                Err(e) if e.kind() == io::ErrorKind::WouldBlock => return None,
                Err(e) if e.kind() == io::ErrorKind::Interrupted => {}
                Err(_) => return Some(Err("its connection broke")),
            }
        }
    }

    /// How many bytes the letter lacks.
    fn wanted(&self) -> Result<usize, &'static str> {
        let Some(header) = self.said.first_chunk::<HEADER>() else {
            return Ok(HEADER - self.said.len());
        };
        let body = body_length(*header, MAX_HELLO).ok_or("it is no doorbell of this version")?;
        Ok(HEADER + body - self.said.len())
    }
}

/// As poll(2) wants it: whole milliseconds, never less than asked for.
pub(crate) fn timeout(left: Duration) -> PollTimeout {
    let ms = left.as_nanos().div_ceil(1_000_000);
    PollTimeout::try_from(i32::try_from(ms).unwrap_or(i32::MAX)).unwrap_or(PollTimeout::MAX)
}

/// Writes a letter.
pub(super) fn say(mut stream: &TcpStream, letter: &Letter) -> io::Result<()> {
    stream.set_write_timeout(Some(WRITE))?;
    stream.write_all(&letter.encode())
}

/// Reads a letter; a peer that has been found to belong here may send a long one.
pub(super) fn hear(mut stream: &TcpStream, deadline: Instant) -> io::Result<Letter> {
    let mut read = |buffer: &mut [u8]| -> io::Result<()> {
        let mut done = 0;
        while done < buffer.len() {
            let left = deadline.saturating_duration_since(Instant::now());
            if left.is_zero() {
                return Err(io::ErrorKind::TimedOut.into());
            }
            stream.set_read_timeout(Some(left.max(Duration::from_millis(1))))?;
            match stream.read(&mut buffer[done..]) {
                Ok(0) => return Err(io::ErrorKind::UnexpectedEof.into()),
                Ok(n) => done += n,
                Err(e) if matches!(e.kind(), io::ErrorKind::Interrupted | io::ErrorKind::WouldBlock) => {}
                Err(e) => return Err(e),
            }
        }
        Ok(())
    };
    let nonsense = || io::Error::new(io::ErrorKind::InvalidData, "it is no doorbell of this version");
    let mut header = [0; HEADER];
    read(&mut header)?;
    let mut body = vec![0; body_length(header, MAX_LETTER).ok_or_else(nonsense)?];
    read(&mut body)?;
    Letter::decode(&body).ok_or_else(nonsense)
}

/// The error as it is told: in the words of this protocol where there are some.
pub(super) fn told(e: &io::Error) -> String {
    match e.kind() {
        io::ErrorKind::UnexpectedEof => "it hung up".to_owned(),
        io::ErrorKind::TimedOut => "it did not answer in time".to_owned(),
        _ => e.to_string(),
    }
}

/// The wildcard of an address's family has no place in a table that others connect by.
pub(super) fn reachable(ip: IpAddr) -> bool {
    !ip.is_unspecified() && !ip.is_multicast()
}
