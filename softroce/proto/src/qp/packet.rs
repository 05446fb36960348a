//! Packets of a queue pair: payload in the datagram (UDP), or by reference (lossless link).
//!
//! On a lossless link a packet has no pad and no ICRC, as nothing can corrupt it. A short payload
//! follows the headers in the buffer; the receiver copies a long one from the sender's memory,
//! through [`Memory`](crate::memory::Memory) only.

use core::ops::Range;

use crate::qp::Connection;
use crate::wire::{self, Bth, Extension, Packet};

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum PayloadSource<'a> {
    Bytes(&'a [u8]),
    /// `len` bytes at `offset` of the payload of the current packet.
    ByRef {
        offset: usize,
        len: usize,
    },
}

impl PayloadSource<'_> {
    pub(crate) const fn len(&self) -> usize {
        match self {
            Self::Bytes(bytes) => bytes.len(),
            Self::ByRef { len, .. } => *len,
        }
    }

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

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum PayloadLocation {
    /// In the queue pair (inline data): always copied into the packet.
    Inline,
    /// In registered memory: on a lossless link, passed by reference unless short.
    HostMemory,
    /// In memory that the CPU does not address: on a lossless link, always passed by reference.
    DeviceMemory,
}

impl PayloadLocation {
    pub(crate) const fn registered(device_memory: bool) -> Self {
        if device_memory {
            Self::DeviceMemory
        } else {
            Self::HostMemory
        }
    }
}

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct PacketLens {
    /// Bytes in the buffer: with space for the ICRC (UDP), without payload by reference (link).
    pub(crate) len: usize,
    pub(crate) header_len: usize,
    pub(crate) by_ref: u32,
}

impl Connection {
    /// Leaves space for payload not passed by reference. `None` when the buffer is too short.
    pub(crate) fn write_packet_headers(
        &self,
        buf: &mut [u8],
        bth: &Bth,
        extension: &Extension,
        len: usize,
        location: PayloadLocation,
    ) -> Option<PacketLens> {
        if self.link.is_none() {
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
            PayloadLocation::HostMemory => len > self.inline_limit,
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
