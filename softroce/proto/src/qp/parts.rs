//! What a queue pair takes and gives: packets with their payload in the datagram, as on the wire, or somewhere else, as on a lane.
//!
//! On a lane a packet is its headers alone, without pad and ICRC: nothing can damage it. A short payload follows them in the same buffer; a long one is referred to, and whoever
//! receives the packet copies it from where it lies. On the receiving side the payload of a lane's packet is never here: [`Memory`](crate::memory::Memory) knows where it is.

use core::ops::Range;

use crate::qp::Connection;
use crate::wire::{self, Bth, Extension, Packet};

/// The payload of a packet that arrived, or a part of it.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Source<'a> {
    /// Here.
    Bytes(&'a [u8]),
    /// So many bytes from `offset` on of the payload of the lane's packet at hand.
    Referred { offset: usize, len: usize },
}

impl Source<'_> {
    pub(crate) const fn len(&self) -> usize {
        match self {
            Self::Bytes(bytes) => bytes.len(),
            Self::Referred { len, .. } => *len,
        }
    }

    /// The bytes in `range`, which lies inside.
    pub(crate) fn part(&self, range: Range<usize>) -> Self {
        match self {
            Self::Bytes(bytes) => Source::Bytes(&bytes[range]),
            Self::Referred { offset, .. } => Self::Referred {
                offset: offset + range.start,
                len: range.len(),
            },
        }
    }
}

/// A packet that arrived, by the wire or by a lane.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Arrival<'a> {
    pub(crate) bth: Bth,
    pub(crate) extension: Extension,
    pub(crate) payload: Source<'a>,
}

impl<'a> From<Packet<'a>> for Arrival<'a> {
    fn from(packet: Packet<'a>) -> Self {
        Self {
            bth: packet.bth,
            extension: packet.extension,
            payload: Source::Bytes(packet.payload),
        }
    }
}

/// Where the payload of a packet to be written is.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Place {
    /// The queue pair's own: it goes along.
    Here,
    /// In memory: on a lane it goes along when it is short.
    Anywhere,
    /// In memory that the processor does not reach: a lane's packet refers to it.
    Distant,
}

impl Place {
    /// Of registered memory.
    pub(crate) const fn registered(distant: bool) -> Self {
        if distant { Self::Distant } else { Self::Anywhere }
    }
}

/// A packet that was written.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct Written {
    /// Bytes in the buffer: on the wire with room for the ICRC, on a lane with a payload that is not referred to.
    pub(crate) len: usize,
    /// Bytes of them before the payload.
    pub(crate) headers: usize,
    /// Bytes of payload that are referred to.
    pub(crate) referred: u32,
}

impl Connection {
    /// Writes the headers of a packet with `len` bytes of payload, for which there is room behind them unless the packet is to refer to them, by their `place`. `None` when the buffer is too short.
    pub(crate) fn draft(
        &self,
        buf: &mut [u8],
        bth: &Bth,
        extension: &Extension,
        len: usize,
        place: Place,
    ) -> Option<Written> {
        if self.lane.is_none() {
            let headers = wire::write(buf, bth, extension, len).ok()?;
            return Some(Written {
                len: wire::packet_len(bth.opcode, len),
                headers,
                referred: 0,
            });
        }
        let headers = wire::write_headers(buf, bth, extension).ok()?;
        let referred = match place {
            Place::Here => false,
            Place::Anywhere => len > self.lane_inline,
            Place::Distant => len > 0,
        };
        let end = headers + if referred { 0 } else { len };
        (end <= buf.len()).then_some(Written {
            len: end,
            headers,
            referred: if referred { len as u32 } else { 0 },
        })
    }
}
