//! Incoming datagrams, as many as one system call brings.

use super::sys::Incoming;
use super::sys::RECEIVE_MESSAGES;
use std::net::SocketAddr;

/// The room for one message: the most bytes that the kernel joins into one.
pub(super) const SLOT: usize = 64 << 10;

/// One received datagram.
#[derive(Debug)]
pub struct Datagram<'a> {
    /// The sender's address and UDP port.
    pub src: SocketAddr,
    /// The address and UDP port it came to: the link's own.
    pub dst: SocketAddr,
    /// Its place in the message that the kernel joined (GRO). From a sender that uses GSO and a path that does not
    /// split, this is its IPv4 Identification: a hint, for the field itself cannot be seen from a UDP socket.
    pub segment: u16,
    /// The UDP payload.
    pub bytes: &'a mut [u8],
}

/// Room for incoming datagrams. Allocates nothing after [`RxBatch::new`].
pub struct RxBatch {
    /// What the socket is bound to that its content came from.
    pub(super) local: SocketAddr,
    pub(super) arena: Box<[u8]>,
    /// What each slot of the arena holds; `None` for a message that cannot be used.
    pub(super) messages: Vec<Option<Incoming>>,
}

impl RxBatch {
    /// An empty batch for a link bound to `local`.
    pub fn new(local: SocketAddr) -> Self {
        Self {
            local,
            // Untouched until a message comes: pages of slots that are never used cost nothing.
            arena: vec![0; RECEIVE_MESSAGES * SLOT].into_boxed_slice(),
            messages: Vec::with_capacity(RECEIVE_MESSAGES),
        }
    }

    /// Whether it holds nothing.
    pub fn is_empty(&self) -> bool {
        self.messages.is_empty()
    }

    /// Empties it.
    pub fn clear(&mut self) {
        self.messages.clear();
    }

    /// The datagrams in it, in the order of arrival.
    pub fn datagrams(&mut self) -> impl Iterator<Item = Datagram<'_>> {
        let dst = self.local;
        let slots = self.arena.chunks_exact_mut(SLOT).zip(&self.messages);
        slots
            .filter_map(|(slot, message)| message.as_ref().map(|message| (slot, message)))
            .flat_map(move |(slot, message)| {
                let src = message.src;
                (0..)
                    .zip(slot[..message.len].chunks_mut(message.segment.max(1)))
                    .map(move |(segment, bytes)| Datagram {
                        src,
                        dst,
                        segment,
                        bytes,
                    })
            })
    }
}
