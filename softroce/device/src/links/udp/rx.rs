//! A batch of received datagrams, as many as one system call returns.

use super::sys::Incoming;
use super::sys::RECEIVE_MESSAGES;
use std::net::SocketAddr;

/// Bytes for one message: the most that the kernel coalesces into one.
pub(super) const SLOT: usize = 64 << 10;

/// One received datagram.
#[derive(Debug)]
pub struct Datagram<'a> {
    /// The sender's address and UDP port.
    pub src: SocketAddr,
    /// The destination address and UDP port: the link's own.
    pub dst: SocketAddr,
    /// Its index in the coalesced message (GRO): a hint at its IPv4 Identification, right if the
    /// sender uses GSO and the path does not split.
    pub segment: u16,
    /// IPv4 TOS or IPv6 traffic class.
    pub traffic_class: u8,
    /// The UDP payload.
    pub bytes: &'a mut [u8],
}

/// A batch of received datagrams. Allocates nothing after [`RxBatch::new`].
pub struct RxBatch {
    /// The local address of the socket that its content came from.
    pub(super) local: SocketAddr,
    pub(super) arena: Box<[u8]>,
    /// The message in each slot of the arena; `None` for an invalid one.
    pub(super) messages: Vec<Option<Incoming>>,
}

impl RxBatch {
    /// An empty batch for a link bound to `local`.
    pub fn new(local: SocketAddr) -> Self {
        Self {
            local,
            // Not touched before use: slots that are never used have no pages.
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

    /// The datagrams, in the order of arrival.
    pub fn datagrams(&mut self) -> impl Iterator<Item = Datagram<'_>> {
        let dst = self.local;
        let slots = self.arena.chunks_exact_mut(SLOT).zip(&self.messages);
        slots
            .filter_map(|(slot, message)| message.as_ref().map(|message| (slot, message)))
            .flat_map(move |(slot, message)| {
                let (src, traffic_class) = (message.src, message.traffic_class);
                (0..)
                    .zip(slot[..message.len].chunks_mut(message.segment.max(1)))
                    .map(move |(segment, bytes)| Datagram {
                        src,
                        dst,
                        segment,
                        traffic_class,
                        bytes,
                    })
            })
    }
}
