//! Connections that have not completed their handshake: read beside one another, so that a silent
//! one delays no client. Their number, bytes and time are bounded.

use std::io::{self, Read, Write};
use std::net::{IpAddr, SocketAddr, TcpStream};
use std::os::fd::{AsFd, BorrowedFd};
use std::time::{Duration, Instant};

use super::{Message, frame};
use crate::failure::one_line;

/// Time limit for the preamble and the first message.
const TIMEOUT: Duration = Duration::from_secs(5);
/// Connections at a time. When there are more, the oldest one of the host with most is dropped.
const MOST: usize = 64;
/// The most bytes of JSON in a first message.
const FIRST_MESSAGE: usize = 4096;
const HEADER: usize = frame::PREAMBLE.len() + 4;

#[derive(Debug)]
struct Pending {
    stream: TcpStream,
    peer: SocketAddr,
    deadline: Instant,
    received: Vec<u8>,
}

/// A client that has sent its first message.
#[derive(Debug)]
pub(super) struct Greeted {
    pub(super) stream: TcpStream,
    pub(super) first: Message,
}

impl Pending {
    /// Bytes of the handshake, as far as they are known.
    fn expected(&self) -> Result<usize, &'static str> {
        let (preamble, length) = self.received.split_at(self.received.len().min(frame::PREAMBLE.len()));
        if !frame::PREAMBLE.starts_with(preamble) {
            return Err("does not speak the doorbell protocol");
        }
        let Ok(length) = <[u8; 4]>::try_from(&length[..length.len().min(4)]) else {
            return Ok(HEADER);
        };
        match u32::from_be_bytes(length) as usize {
            length if length <= FIRST_MESSAGE => Ok(HEADER + length),
            _ => Err("sends a first message that is too long"),
        }
    }

    /// Reads what has arrived, and nothing behind the first message. `None` when there is more.
    fn advance(&mut self) -> Option<Result<Message, String>> {
        loop {
            let wanted = match self.expected() {
                Ok(expected) => expected - self.received.len(),
                Err(reason) => return Some(Err(reason.to_owned())),
            };
            if wanted == 0 && self.received.len() > HEADER {
                let message = frame::read(&mut &self.received[frame::PREAMBLE.len()..]);
                return Some(match message {
                    Ok(Some(message)) => Ok(message),
                    Ok(None) => Err("sends no message".to_owned()),
                    Err(error) => Err(format!("sends {}", one_line(&error.to_string()))),
                });
            }
            let mut buffer = [0; HEADER + FIRST_MESSAGE];
            match self.stream.read(&mut buffer[..wanted.max(1)]) {
                Ok(0) => return Some(Err("closed the connection".to_owned())),
                Ok(count) => self.received.extend_from_slice(&buffer[..count]),
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => return None,
                Err(error) => return Some(Err(one_line(&error.to_string()))),
            }
        }
    }
}

#[derive(Debug, Default)]
pub(super) struct Handshakes(Vec<Pending>);

impl Handshakes {
    /// Adds an accepted connection, and sends the preamble to it.
    pub(super) fn add(&mut self, stream: TcpStream, peer: SocketAddr) {
        // A new connection's buffer has space for eight bytes.
        let sent = stream
            .set_nonblocking(true)
            .and_then(|()| (&stream).write_all(&frame::PREAMBLE));
        if let Err(error) = sent {
            return refuse(peer, &one_line(&error.to_string()));
        }
        if self.0.len() == MOST {
            let busiest_host = self.busiest_host();
            let oldest = self
                .0
                .iter()
                .position(|pending| Some(pending.peer.ip()) == busiest_host);
            if let Some(oldest) = oldest {
                self.0.remove(oldest);
            }
        }
        self.0.push(Pending {
            stream,
            peer,
            deadline: Instant::now() + TIMEOUT,
            received: Vec::new(),
        });
    }

    /// The host with most connections.
    fn busiest_host(&self) -> Option<IpAddr> {
        let hosts = self.0.iter().map(|pending| pending.peer.ip());
        hosts.max_by_key(|host| self.0.iter().filter(|pending| pending.peer.ip() == *host).count())
    }

    /// The sockets to wait for.
    pub(super) fn sockets(&self) -> impl Iterator<Item = BorrowedFd<'_>> {
        self.0.iter().map(|pending| pending.stream.as_fd())
    }

    /// The first client that has completed its handshake. Those that fail or are late are refused
    /// with a line on stderr.
    pub(super) fn advance(&mut self) -> Option<Greeted> {
        let now = Instant::now();
        let mut at = 0;
        while let Some(pending) = self.0.get_mut(at) {
            match pending.advance() {
                Some(Ok(first)) => {
                    let stream = self.0.remove(at).stream;
                    return Some(Greeted { stream, first });
                }
                Some(Err(reason)) => refuse(self.0.remove(at).peer, &reason),
                None if now >= pending.deadline => refuse(self.0.remove(at).peer, "does not answer"),
                None => at += 1,
            }
        }
        None
    }
}

fn refuse(peer: SocketAddr, reason: &str) {
    eprintln!(
        "doorbell: refused {peer}: it {reason}: is it a doorbell of the same version, with the server's address?"
    );
}
