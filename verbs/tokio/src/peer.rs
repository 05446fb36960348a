//! What a connection knows of its peer beside the queue pair: that it is gone, and over TCP a byte.

use std::io;
use std::task::{Context, Poll, ready};

use doorbell_verbs::cm::{ConnectionEvent, TokioConnection};
use tokio::net::TcpStream;

use crate::events::Event;

/// By what the queue pair was connected, and stays open with it.
#[derive(Debug)]
pub(crate) enum Peer {
    /// The TCP connection of an exchange.
    Exchange(TcpStream),
    /// The connection of the connection manager (rdma_cm(7)).
    Managed(TokioConnection),
}

impl Peer {
    /// The next byte, or the end.
    pub(crate) fn poll(&mut self, cx: &mut Context<'_>) -> Poll<Event> {
        match self {
            Self::Exchange(tcp) => poll_tcp(tcp, cx),
            Self::Managed(connection) => poll_managed(connection, cx),
        }
    }

    /// Sends `byte` over TCP, which carries few, so that one always fits; a peer that is gone needs
    /// none. The connection manager carries none.
    pub(crate) fn send(&self, byte: u8) {
        if let Self::Exchange(tcp) = self {
            let _ = tcp.try_write(&[byte]);
        }
    }
}

fn poll_tcp(tcp: &TcpStream, cx: &mut Context<'_>) -> Poll<Event> {
    loop {
        if let Err(error) = ready!(tcp.poll_read_ready(cx)) {
            return Poll::Ready(Event::PeerGone(error));
        }
        let mut byte = [0];
        return Poll::Ready(match tcp.try_read(&mut byte) {
            Ok(0) => Event::PeerGone(io::ErrorKind::UnexpectedEof.into()),
            Ok(_) => Event::Byte(byte[0]),
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => continue,
            Err(error) => Event::PeerGone(error),
        });
    }
}

fn poll_managed(connection: &mut TokioConnection, cx: &mut Context<'_>) -> Poll<Event> {
    loop {
        return Poll::Ready(Event::PeerGone(match ready!(connection.poll_event(cx)) {
            Ok(ConnectionEvent::Disconnected) => io::ErrorKind::UnexpectedEof.into(),
            Ok(ConnectionEvent::DeviceRemoved) => io::Error::other("the device is being removed"),
            // That the address has moved, say: the queue pair fails by itself if it has to.
            Ok(_) => continue,
            Err(error) => io::Error::other(error),
        }));
    }
}
