//! The server's end of the handshake: clients whose hello proves the secret.

use std::io::{self, Write};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::os::fd::BorrowedFd;
use std::time::Duration;

use super::acceptor::{Acceptor, Arrival, Limits};
use super::auth::{NONCE, Nonce, Session};
use super::connection::{CHALLENGE, Connection, Protocol, first, hello_limit, open, refuse};
use super::deadline::Deadline;
use super::frame::FrameReader;
use super::limited::describe;
use super::secret::{Secret, random};

const HELLO_TIMEOUT: Duration = Duration::from_secs(10);
/// Pending connections beyond the expected ones.
const MAX_PENDING: usize = 256;

/// The first message of a client.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Hello {
    /// The client's role, a number of the protocol.
    pub client: u32,
    /// The role of the server that it means.
    pub server: u32,
    /// The client's nonce.
    pub nonce: Nonce,
    /// What else it says.
    pub payload: Vec<u8>,
}

impl Hello {
    pub(crate) const HEADER: usize = 4 + 4 + NONCE;

    pub(crate) fn encode(&self) -> Vec<u8> {
        let (client, server) = (self.client.to_le_bytes(), self.server.to_le_bytes());
        [&client[..], &server, &self.nonce, &self.payload].concat()
    }

    fn decode(bytes: &[u8]) -> Option<Self> {
        let (client, rest) = bytes.split_first_chunk()?;
        let (server, rest) = rest.split_first_chunk()?;
        let (nonce, payload) = rest.split_first_chunk()?;
        Some(Self {
            client: u32::from_le_bytes(*client),
            server: u32::from_le_bytes(*server),
            nonce: *nonce,
            payload: payload.to_vec(),
        })
    }
}

/// The handshake of one connection.
#[derive(Debug, Default)]
struct Pending {
    nonce: Option<Nonce>,
    reader: FrameReader,
}

/// Listens for clients that prove a secret. All of them are read at once, so one that is silent
/// blocks no other: each has ten seconds for its hello, and at most 256 beyond the expected ones
/// are kept.
#[derive(Debug)]
pub struct HelloListener {
    acceptor: Acceptor<Pending>,
    protocol: Protocol,
    secret: Secret,
    known: Option<Nonce>,
}

impl HelloListener {
    /// Accepts on `listener`, where `expected` clients may arrive at once. A nonce that clients
    /// know is of an authenticated message, and each of them connects once; otherwise each
    /// connection is sent one of its own.
    ///
    /// # Errors
    /// Those of the system.
    pub fn new(
        listener: TcpListener,
        expected: u32,
        protocol: &Protocol,
        secret: Secret,
        known: Option<Nonce>,
    ) -> io::Result<Self> {
        let limits = Limits {
            pending: MAX_PENDING + expected as usize,
            handshake: HELLO_TIMEOUT,
        };
        Ok(Self {
            acceptor: Acceptor::new(listener, limits)?,
            protocol: *protocol,
            secret,
            known,
        })
    }

    /// The address it listens on.
    #[must_use]
    pub fn address(&self) -> SocketAddr {
        self.acceptor.address()
    }

    /// Waits for the next client, authenticated or refused; `None` at the deadline, or once
    /// `wakeup` is readable. A refused client was sent the reason.
    ///
    /// # Errors
    /// When the listening socket fails.
    pub fn next(
        &mut self,
        deadline: Deadline,
        wakeup: Option<BorrowedFd<'_>>,
    ) -> io::Result<Option<Arrival<(Hello, Connection)>>> {
        let Self {
            acceptor,
            protocol,
            secret,
            known,
        } = self;
        let advance = |stream: &TcpStream, pending: &mut Pending| {
            let hello = pending.advance(stream, protocol, secret, *known);
            hello.inspect_err(|reason| refuse(stream, reason))
        };
        let arrival = acceptor.next(deadline, wakeup, advance)?;
        Ok(arrival.map(|(peer, result)| {
            let connection = result.map(|(stream, (hello, session))| {
                let protocol = *protocol;
                (
                    hello,
                    Connection {
                        stream,
                        session,
                        protocol,
                    },
                )
            });
            (peer, connection)
        }))
    }
}

impl Pending {
    fn advance(
        &mut self,
        mut stream: &TcpStream,
        protocol: &Protocol,
        secret: &Secret,
        known: Option<Nonce>,
    ) -> Result<Option<(Hello, Session)>, String> {
        let server_nonce = match self.nonce {
            Some(nonce) => nonce,
            None => {
                self.reader = FrameReader::behind(protocol.preamble);
                let nonce = known.map_or_else(|| challenge(stream, protocol), Ok);
                *self.nonce.insert(nonce.map_err(|e| e.to_string())?)
            }
        };
        let frame = self
            .reader
            .read(&mut stream, hello_limit(protocol))
            .map_err(|e| match e.kind() {
                io::ErrorKind::InvalidData => "it is no doorbell of this version".to_owned(),
                _ => describe(&e),
            })?;
        let Some(frame) = frame else { return Ok(None) };
        let no_hello = "its first message is no hello";
        let unproved = Hello::decode(&frame).ok_or(no_hello)?;
        let mut session = Session::server(protocol, secret, &unproved, &server_nonce);
        let message = open(&mut session, &frame).map_err(|forged| forged.to_string())?;
        Ok(Some((Hello::decode(message).ok_or(no_hello)?, session)))
    }
}

/// Sends a new connection its nonce, which the buffer of its socket has room for.
fn challenge(mut stream: &TcpStream, protocol: &Protocol) -> io::Result<Nonce> {
    let nonce = random()?;
    stream.write_all(&first(protocol, &[&[CHALLENGE], &nonce[..]].concat()))?;
    Ok(nonce)
}

#[cfg(test)]
mod tests {
    use std::io::Read;
    use std::thread;

    use super::*;

    const PROTOCOL: Protocol = Protocol {
        preamble: b"TEST   1",
        max_hello: 5,
        max_message: 100,
    };

    fn soon() -> Deadline {
        Deadline::after(Duration::from_secs(30))
    }

    fn listener(known: Option<Nonce>) -> HelloListener {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        HelloListener::new(listener, 2, &PROTOCOL, Secret::derived(&["ours"]), known).unwrap()
    }

    fn hello() -> Hello {
        Hello {
            client: 3,
            server: 4,
            nonce: [1; NONCE],
            payload: b"hello".to_vec(),
        }
    }

    #[test]
    fn ends_that_have_the_secret_exchange_messages() {
        for known in [None, Some([7; NONCE])] {
            let mut listener = listener(known);
            let stream = TcpStream::connect(listener.address()).unwrap();
            let client = thread::spawn(move || {
                let secret = Secret::derived(&["ours"]);
                let mut to = Connection::greet(stream, &PROTOCOL, &secret, &hello(), known, soon()).unwrap();
                to.send(b"a message", soon()).unwrap();
                assert!(to.send(&[0; 101], soon()).is_err(), "too long");
                to.receive(soon()).unwrap()
            });
            let (_, result) = listener.next(soon(), None).unwrap().unwrap();
            let (said, mut from) = result.unwrap();
            assert_eq!(said, hello());
            assert_eq!(from.receive(soon()).unwrap(), b"a message");
            from.send(b"", soon()).unwrap();
            assert_eq!(client.join().unwrap(), b"");
        }
    }

    #[test]
    fn hellos_out_of_bounds_are_refused_beside_silent_connections() {
        let mut listener = listener(Some([7; NONCE]));
        let _silent = TcpStream::connect(listener.address()).unwrap();
        for bytes in [
            &b"GET / HTTP/1.1"[..],
            b"TEST   2\0\0\0\0",
            b"TEST   1\xff\xff\xff\xff",
            b"TEST   1\0\0\0\0",
            &[b"TEST   1", &40_u32.to_be_bytes()[..], &[0; 40]].concat(),
        ] {
            let mut peer = TcpStream::connect(listener.address()).unwrap();
            peer.write_all(bytes).unwrap();
            let (address, result) = listener.next(soon(), None).unwrap().unwrap();
            let reason = result.unwrap_err();
            assert_eq!(address, peer.local_addr().unwrap(), "{bytes:?}");
            let mut sent = Vec::new();
            let _ = peer.read_to_end(&mut sent);
            assert!(sent.ends_with(reason.as_bytes()), "{bytes:?}: {sent:?}");
        }
    }
}
