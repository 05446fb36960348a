//! A connection of the bootstrap: messages, and behind each its MAC.

use std::io::{self, Read, Write};
use std::net::TcpStream;
use std::time::{Duration, Instant};

use super::auth::{Forged, Nonce, Session, TAG};
use super::wire::{BootstrapMessage, HEADER, MAX_BODY, MAX_PLAIN, body_length};

const WRITE_TIMEOUT: Duration = Duration::from_secs(10);

/// Why there is no message.
#[derive(Debug, thiserror::Error)]
pub(super) enum ReceiveError {
    #[error("{}", describe_io_error(.0))]
    Io(#[from] io::Error),
    #[error("it is no doorbell of this version")]
    Malformed,
    #[error(transparent)]
    Forged(#[from] Forged),
    /// Its text is not authenticated: any program that holds the port can send it.
    #[error("it refused this connection: {0}")]
    Refused(String),
}

/// A connection whose ends have both nonces.
#[derive(Debug)]
pub(super) struct Connection {
    pub(super) stream: TcpStream,
    pub(super) session: Session,
}

impl Connection {
    pub(super) fn send(&mut self, message: &BootstrapMessage) -> io::Result<()> {
        self.stream.set_write_timeout(Some(WRITE_TIMEOUT))?;
        self.stream.write_all(&message.sealed(&mut self.session.send))
    }

    pub(super) fn receive(&mut self, deadline: Instant) -> Result<BootstrapMessage, ReceiveError> {
        let mut frame = read_frame(&self.stream, MAX_BODY, deadline)?;
        // A peer that takes this end for an unauthenticated one has no key to seal with.
        if let Some(BootstrapMessage::Refuse(why)) = BootstrapMessage::decode(&frame[HEADER..]) {
            return Err(ReceiveError::Refused(why));
        }
        let length = frame.len();
        frame.resize(length + TAG, 0);
        read_exact(&self.stream, &mut frame[length..], deadline)?;
        let (frame, tag) = frame.split_at(length);
        self.session.receive.open(frame, tag)?;
        BootstrapMessage::decode(&frame[HEADER..]).ok_or(ReceiveError::Malformed)
    }
}

/// The nonce that a rendezvous sends first.
pub(super) fn receive_challenge(stream: &TcpStream, deadline: Instant) -> Result<Nonce, ReceiveError> {
    let frame = read_frame(stream, MAX_PLAIN, deadline)?;
    match BootstrapMessage::decode(&frame[HEADER..]) {
        Some(BootstrapMessage::Challenge(nonce)) => Ok(nonce),
        Some(BootstrapMessage::Refuse(why)) => Err(ReceiveError::Refused(why)),
        _ => Err(ReceiveError::Malformed),
    }
}

/// Header and body, without MAC.
fn read_frame(stream: &TcpStream, max: usize, deadline: Instant) -> Result<Vec<u8>, ReceiveError> {
    let mut header = [0; HEADER];
    read_exact(stream, &mut header, deadline)?;
    let body = body_length(header, max).ok_or(ReceiveError::Malformed)?;
    let mut frame = vec![0; HEADER + body];
    frame[..HEADER].copy_from_slice(&header);
    read_exact(stream, &mut frame[HEADER..], deadline)?;
    Ok(frame)
}

fn read_exact(mut stream: &TcpStream, buffer: &mut [u8], deadline: Instant) -> io::Result<()> {
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
}

pub(super) fn describe_io_error(e: &io::Error) -> String {
    match e.kind() {
        io::ErrorKind::UnexpectedEof => "it hung up".to_owned(),
        io::ErrorKind::TimedOut => "it did not answer in time".to_owned(),
        _ => e.to_string(),
    }
}
