//! A connection whose ends prove a secret to each other: the client's end of the handshake, and the
//! frames behind it.
//!
//! The server may first send the preamble of the protocol and a challenge: a frame of a zero and
//! its nonce. The client sends the preamble and a hello (`hello.rs`). From then on every frame is
//! a message and its MAC, and the first one of the server proves the secret. A server that does not
//! accept a hello has no key to seal with: its refusal is a frame of a one and a text.

use std::io::{self, Write};
use std::net::TcpStream;

use super::auth::{Forged, FrameMac, Nonce, Session, TAG};
use super::deadline::Deadline;
use super::frame::{self, FrameReader};
use super::hello::Hello;
use super::limited::{Limited, describe};
use super::secret::Secret;

pub(crate) const CHALLENGE: u8 = 0;
const REFUSAL: u8 = 1;
const MAX_REASON: usize = 1024;

/// What is particular to the connections of one protocol.
#[derive(Debug, Clone, Copy)]
pub struct Protocol {
    /// What each connection begins with, with the version: eight bytes.
    pub preamble: &'static [u8; 8],
    /// The most bytes that a client's hello says of it.
    pub max_hello: usize,
    /// The most bytes of a message.
    pub max_message: usize,
}

/// Why there is no message.
#[derive(Debug, thiserror::Error)]
pub enum ReceiveError {
    /// The connection ended, or the deadline passed.
    #[error("{}", describe(.0))]
    Io(io::Error),
    /// The bytes are of another protocol, or break its bounds.
    #[error("it is no doorbell of this version")]
    Malformed,
    /// The bytes do not prove the secret.
    #[error(transparent)]
    Forged(#[from] Forged),
    /// The server refused the hello. Its text is not authenticated: any program that holds the port
    /// can send it.
    #[error("it refused this connection: {0}")]
    Refused(String),
}

impl From<io::Error> for ReceiveError {
    fn from(error: io::Error) -> Self {
        match error.kind() {
            io::ErrorKind::InvalidData => Self::Malformed,
            _ => Self::Io(error),
        }
    }
}

/// A connection whose ends have both nonces. Its messages are authenticated, not encrypted.
#[derive(Debug)]
pub struct Connection {
    pub(crate) stream: TcpStream,
    pub(crate) session: Session,
    pub(crate) protocol: Protocol,
}

impl Connection {
    /// The client's end: sends the hello to a server whose nonce is `known`, or is that of its
    /// challenge. The server has proved the secret once a message was [received](Self::receive).
    ///
    /// # Errors
    /// A [`ReceiveError`].
    pub fn greet(
        stream: TcpStream,
        protocol: &Protocol,
        secret: &Secret,
        hello: &Hello,
        known: Option<Nonce>,
        deadline: Deadline,
    ) -> Result<Self, ReceiveError> {
        let mut limited = Limited::new(&stream, deadline);
        let nonce = known.map_or_else(|| receive_challenge(&mut limited, protocol), Ok)?;
        let mut session = Session::client(protocol, secret, hello, &nonce);
        let sealed = seal(&mut session, hello.encode());
        limited.write_all(&first(protocol, &sealed))?;
        Ok(Self {
            stream,
            session,
            protocol: *protocol,
        })
    }

    /// Sends a message.
    ///
    /// # Errors
    /// Those of the socket; `InvalidInput` for a message that is too long. The connection is then
    /// unusable.
    pub fn send(&mut self, message: &[u8], deadline: Deadline) -> io::Result<()> {
        let sealed = seal(&mut self.session, message.to_vec());
        let max = self.protocol.max_message + TAG;
        frame::write(&mut Limited::new(&self.stream, deadline), &sealed, max)
    }

    /// Receives a message.
    ///
    /// # Errors
    /// A [`ReceiveError`]; the connection is then unusable.
    pub fn receive(&mut self, deadline: Deadline) -> Result<Vec<u8>, ReceiveError> {
        let max = self.protocol.max_message + TAG;
        let mut sealed = frame::read(&mut Limited::new(&self.stream, deadline), max)?;
        match open(&mut self.session, &sealed) {
            Ok(message) => {
                let length = message.len();
                sealed.truncate(length);
                Ok(sealed)
            }
            Err(forged) => Err(refusal(&sealed).map_or(forged.into(), ReceiveError::Refused)),
        }
    }

    /// The socket.
    #[must_use]
    pub fn stream(&self) -> &TcpStream {
        &self.stream
    }

    /// The socket, and the MACs of what is sent and of what is received.
    #[must_use]
    pub fn into_parts(self) -> (TcpStream, FrameMac, FrameMac) {
        let Session { send, receive } = self.session;
        (self.stream, send, receive)
    }
}

/// The first frame of a connection, behind the preamble.
pub(crate) fn first(protocol: &Protocol, frame: &[u8]) -> Vec<u8> {
    [&protocol.preamble[..], &(frame.len() as u32).to_be_bytes()[..], frame].concat()
}

fn receive_challenge(stream: &mut Limited<'_>, protocol: &Protocol) -> Result<Nonce, ReceiveError> {
    let frame = FrameReader::behind(protocol.preamble).read(stream, 1 + MAX_REASON)?;
    let frame = frame.ok_or(ReceiveError::Malformed)?;
    match frame.split_first() {
        Some((&CHALLENGE, nonce)) => nonce.try_into().map_err(|_| ReceiveError::Malformed),
        _ => Err(refusal(&frame).map_or(ReceiveError::Malformed, ReceiveError::Refused)),
    }
}

/// Sends a client the reason why its hello is refused, if it reads.
pub(crate) fn refuse(mut stream: &TcpStream, reason: &str) {
    let reason = &reason[..reason.floor_char_boundary(MAX_REASON)];
    let mut bytes = Vec::new();
    if frame::write(&mut bytes, &[&[REFUSAL], reason.as_bytes()].concat(), 1 + MAX_REASON).is_ok() {
        // Best effort: the peer may be gone, or not read.
        let _ = stream.write(&bytes);
    }
}

/// A peer chose the text and it goes into one-line messages: control characters are replaced.
fn refusal(frame: &[u8]) -> Option<String> {
    let text = frame.strip_prefix(&[REFUSAL]).filter(|text| text.len() <= MAX_REASON)?;
    let text = String::from_utf8_lossy(text);
    Some(text.chars().map(|c| if c.is_control() { ' ' } else { c }).collect())
}

pub(crate) fn hello_limit(protocol: &Protocol) -> usize {
    Hello::HEADER + protocol.max_hello + TAG
}

fn seal(session: &mut Session, mut message: Vec<u8>) -> Vec<u8> {
    let tag = session.send.seal(&message);
    message.extend_from_slice(&tag);
    message
}

/// The message of a frame, whose MAC is checked.
pub(crate) fn open<'a>(session: &mut Session, sealed: &'a [u8]) -> Result<&'a [u8], Forged> {
    let (message, tag) = sealed.split_last_chunk::<TAG>().ok_or(Forged)?;
    session.receive.open(message, tag)?;
    Ok(message)
}
