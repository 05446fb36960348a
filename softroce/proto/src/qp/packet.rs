//! What a queue pair takes and gives: packets with their payload in the datagram, as on the wire, or somewhere else, as on a lane.
//!
//! On a lane a packet is its headers alone, without pad and ICRC: nothing can damage it. A short payload follows them in the same buffer; a long one is referred to, and whoever
//! receives the packet copies it from where it lies. On the receiving side the payload of a lane's packet is never here: [`Memory`](crate::memory::Memory) knows where it is.

use core::ops::Range;

use crate::qp::Connection;
use crate::wire::{self, Bth, Extension, Packet};

/// The payload of a packet that arrived, or a part of it.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum PayloadSource<'a> {
    /// Here.
    Bytes(&'a [u8]),
    /// So many bytes from `offset` on of the payload of the lane's packet at hand.
    ByRef { offset: usize, len: usize },
}

impl PayloadSource<'_> {
    pub(crate) const fn len(&self) -> usize {
        match self {
            Self::Bytes(bytes) => bytes.len(),
            Self::ByRef { len, .. } => *len,
        }
    }

    /// The bytes in `range`, which lies inside.
    pub(crate) fn slice(&self, range: Range<usize>) -> Self {
        match self {
            Self::Bytes(bytes) => PayloadSource::Bytes(&bytes[range]),
            Self::ByRef { offset, .. } => Self::ByRef {
                offset: offset + range.start,
                len: range.len(),
            },
        }
    }
}

/// A packet that arrived, by the wire or by a lane.
#[derive(Clone, Copy, Debug)]
pub(crate) struct InboundPacket<'a> {
    pub(crate) bth: Bth,
    pub(crate) extension: Extension,
    pub(crate) payload: PayloadSource<'a>,
}

impl<'a> From<Packet<'a>> for InboundPacket<'a> {
    fn from(packet: Packet<'a>) -> Self {
        Self {
            bth: packet.bth,
            extension: packet.extension,
            payload: PayloadSource::Bytes(packet.payload),
        }
    }
}

/// Where the payload of a packet to be written is.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum PayloadLocation {
    /// The queue pair's own: it goes along.
    Inline,
    /// In memory: on a lane it goes along when it is short.
    HostMemory,
    /// In memory that the processor does not reach: a lane's packet refers to it.
    DeviceMemory,
}

impl PayloadLocation {
    /// Of registered memory.
    pub(crate) const fn registered(device_memory: bool) -> Self {
        if device_memory {
            Self::DeviceMemory
        } else {
            Self::HostMemory
        }
    }
}

/// A packet that was written.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct PacketLens {
    /// Bytes in the buffer: on the wire with room for the ICRC, on a lane with a payload that is not referred to.
    pub(crate) len: usize,
    /// Bytes of them before the payload.
    pub(crate) header_len: usize,
    /// Bytes of payload that are referred to.
    pub(crate) by_ref: u32,
}

impl Connection {
    /// Writes the headers of a packet with `len` bytes of payload, for which there is room behind them unless the packet is to refer to them, by their `place`. `None` when the buffer is too short.
    pub(crate) fn write_packet_headers(
        &self,
        buf: &mut [u8],
        bth: &Bth,
        extension: &Extension,
        len: usize,
        location: PayloadLocation,
    ) -> Option<PacketLens> {
        if self.shm_link.is_none() {
            let headers = wire::write(buf, bth, extension, len).ok()?;
            return Some(PacketLens {
                len: wire::packet_len(bth.opcode, len),
                header_len: headers,
                by_ref: 0,
            });
        }
        let headers = wire::write_headers(buf, bth, extension).ok()?;
        let by_ref = match location {
            PayloadLocation::Inline => false,
            PayloadLocation::HostMemory => len > self.shm_inline_threshold,
            PayloadLocation::DeviceMemory => len > 0,
        };
        let end = headers + if by_ref { 0 } else { len };
        (end <= buf.len()).then_some(PacketLens {
            len: end,
            header_len: headers,
            by_ref: if by_ref { len as u32 } else { 0 },
        })
    }
}
