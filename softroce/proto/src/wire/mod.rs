//! RoCEv2 packets as bytes: one file per header, and [`Packet`] (IBTA vol 1, ch. 9, annex A17).
//!
//! ```text
//! BTH | XRCETH | extension headers of the opcode | payload | 0 … 3 bytes of zero pad | ICRC
//! ```
//!
//! [`Packet::parse`] and [`write()`] are inverse, without the ICRC ([`crate::icrc`]). A packet that
//! does not parse is dropped without a reply: its headers cannot be trusted.

mod aeth;
mod atomic_ack_eth;
mod atomic_eth;
mod bth;
mod cnp;
mod deth;
mod feth;
mod grh;
mod ieth;
mod imm_dt;
mod opcode;
mod reth;
mod selective_eth;
#[cfg(test)]
mod tests;
mod xrc_eth;

pub use aeth::{Aeth, Credits, Nak, RnrTimer, Syndrome};
pub use atomic_ack_eth::AtomicAckEth;
pub use atomic_eth::AtomicEth;
pub use bth::{Bth, DEFAULT_PKEY};
pub use cnp::Cnp;
pub use deth::Deth;
pub use feth::Feth;
pub use grh::{GRH_LEN, HOP_LIMIT, IpFields, ip_header, ip_header_addresses};
pub use ieth::Ieth;
pub use imm_dt::ImmDt;
pub use opcode::{Layout, Opcode, Operation, Position, Transport};
pub use reth::Reth;
pub use selective_eth::SelectiveEth;
pub use xrc_eth::XrcEth;

use crate::icrc;

/// The UDP destination port of RoCEv2 (IBTA annex A17.2).
pub const UDP_PORT: u16 = 4791;

/// Maximum header length: BTH, XRCETH and AtomicETH, in bytes.
pub const MAX_HEADER_LEN: usize = Bth::LEN + XrcEth::LEN + AtomicEth::LEN;

/// Why a packet does not parse.
#[derive(Clone, Copy, PartialEq, Eq, Debug, thiserror::Error)]
pub enum ParseError {
    /// Shorter than its headers and the ICRC.
    #[error("{0} bytes are too few for the packet's headers")]
    Truncated(usize),
    /// The length is not a multiple of 4.
    #[error("{0} bytes are no multiple of 4")]
    Unaligned(usize),
    /// The transport header version is not 0.
    #[error("transport header version {0}")]
    Version(u8),
    /// Reserved, or of an unsupported transport.
    #[error("opcode {0:#04x}")]
    Opcode(u8),
    /// Not the default partition.
    #[error("partition key {0:#06x}")]
    Pkey(u16),
    /// More pad than bytes after the headers.
    #[error("pad count {pad} with {len} bytes of payload and pad")]
    Pad {
        /// The pad count.
        pad: usize,
        /// The bytes between headers and ICRC.
        len: usize,
    },
    /// Payload in a packet whose opcode has none.
    #[error("{len} bytes of payload in a packet of {opcode:?}")]
    Payload {
        /// The opcode.
        opcode: Opcode,
        /// The bytes between headers and ICRC.
        len: usize,
    },
    /// A reserved AETH syndrome.
    #[error("AETH syndrome {0:#04x}")]
    Syndrome(u8),
}

/// Why a packet could not be written: an error of the caller.
#[derive(Clone, Copy, PartialEq, Eq, Debug, thiserror::Error)]
pub enum WriteError {
    /// The buffer is too short.
    #[error("the packet takes {needed} bytes, the buffer has {len}")]
    TooLong {
        /// The packet's length, ICRC included.
        needed: usize,
        /// The buffer's length.
        len: usize,
    },
    /// The extension headers do not match the opcode, or it has no payload.
    #[error("{0:?} has other extension headers or no payload")]
    Layout(Opcode),
}

/// The extension headers of a packet, as given by its opcode's [`Layout`].
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Extension {
    /// None.
    Bare,
    /// First packet of a WRITE, a READ request, or an atomic WRITE.
    Reth(Reth),
    /// WRITE ONLY with immediate.
    RethImm(Reth, ImmDt),
    /// Last packet of a SEND or WRITE with immediate.
    Imm(ImmDt),
    /// Last packet of a SEND with invalidate.
    Ieth(Ieth),
    /// Acknowledge, or first or last packet of a READ response.
    Aeth(Aeth),
    /// ATOMIC acknowledge.
    AethAtomic(Aeth, AtomicAckEth),
    /// An atomic request.
    Atomic(AtomicEth),
    /// A UD SEND.
    Deth(Deth),
    /// A UD SEND with immediate.
    DethImm(Deth, ImmDt),
    /// A FLUSH.
    FethReth(Feth, Reth),
    /// A selective ACK.
    Selective(SelectiveEth),
}

impl Extension {
    /// The layout of these headers.
    pub const fn layout(&self) -> Layout {
        match self {
            Self::Bare => Layout::Bare,
            Self::Reth(_) => Layout::Reth,
            Self::RethImm(..) => Layout::RethImm,
            Self::Imm(_) => Layout::Imm,
            Self::Ieth(_) => Layout::Ieth,
            Self::Aeth(_) => Layout::Aeth,
            Self::AethAtomic(..) => Layout::AethAtomic,
            Self::Atomic(_) => Layout::Atomic,
            Self::Deth(_) => Layout::Deth,
            Self::DethImm(..) => Layout::DethImm,
            Self::FethReth(..) => Layout::FethReth,
            Self::Selective(_) => Layout::Selective,
        }
    }

    /// The RETH, if any.
    pub const fn reth(&self) -> Option<&Reth> {
        match self {
            Self::Reth(reth) | Self::RethImm(reth, _) => Some(reth),
            _ => None,
        }
    }

    /// The AETH, if any.
    pub const fn aeth(&self) -> Option<&Aeth> {
        match self {
            Self::Aeth(aeth) | Self::AethAtomic(aeth, _) => Some(aeth),
            _ => None,
        }
    }

    pub(crate) const fn ieth(&self) -> Option<&Ieth> {
        match self {
            Self::Ieth(ieth) => Some(ieth),
            _ => None,
        }
    }

    /// The immediate data, if any.
    pub const fn imm(&self) -> Option<ImmDt> {
        match self {
            Self::Imm(imm) | Self::RethImm(_, imm) | Self::DethImm(_, imm) => Some(*imm),
            _ => None,
        }
    }

    #[inline]
    fn split_from(layout: Layout, bytes: &[u8]) -> Result<(Self, &[u8]), ParseError> {
        let mut rest = bytes;
        let extension = match layout {
            Layout::Bare => Self::Bare,
            Layout::Reth => Self::Reth(Reth::from_bytes(take(&mut rest)?)),
            Layout::RethImm => Self::RethImm(Reth::from_bytes(take(&mut rest)?), ImmDt::from_bytes(take(&mut rest)?)),
            Layout::Imm => Self::Imm(ImmDt::from_bytes(take(&mut rest)?)),
            Layout::Ieth => Self::Ieth(Ieth::from_bytes(take(&mut rest)?)),
            Layout::Aeth => Self::Aeth(Aeth::from_bytes(take(&mut rest)?)?),
            Layout::AethAtomic => Self::AethAtomic(
                Aeth::from_bytes(take(&mut rest)?)?,
                AtomicAckEth::from_bytes(take(&mut rest)?),
            ),
            Layout::Atomic => Self::Atomic(AtomicEth::from_bytes(take(&mut rest)?)),
            Layout::Deth => Self::Deth(Deth::from_bytes(take(&mut rest)?)),
            Layout::DethImm => Self::DethImm(Deth::from_bytes(take(&mut rest)?), ImmDt::from_bytes(take(&mut rest)?)),
            Layout::FethReth => Self::FethReth(Feth::from_bytes(take(&mut rest)?), Reth::from_bytes(take(&mut rest)?)),
            Layout::Selective => Self::Selective(SelectiveEth::from_bytes(take(&mut rest)?)),
        };
        Ok((extension, rest))
    }

    fn write_to(&self, buf: &mut [u8]) {
        match self {
            Self::Bare => {}
            Self::Reth(reth) => join(buf, 0, reth.to_bytes()),
            Self::RethImm(reth, imm) => {
                join(buf, 0, reth.to_bytes());
                join(buf, Reth::LEN, imm.to_bytes());
            }
            Self::Imm(imm) => join(buf, 0, imm.to_bytes()),
            Self::Ieth(ieth) => join(buf, 0, ieth.to_bytes()),
            Self::Aeth(aeth) => join(buf, 0, aeth.to_bytes()),
            Self::AethAtomic(aeth, atomic) => {
                join(buf, 0, aeth.to_bytes());
                join(buf, Aeth::LEN, atomic.to_bytes());
            }
            Self::Atomic(atomic) => join(buf, 0, atomic.to_bytes()),
            Self::Deth(deth) => join(buf, 0, deth.to_bytes()),
            Self::DethImm(deth, imm) => {
                join(buf, 0, deth.to_bytes());
                join(buf, Deth::LEN, imm.to_bytes());
            }
            Self::FethReth(feth, reth) => {
                join(buf, 0, feth.to_bytes());
                join(buf, Feth::LEN, reth.to_bytes());
            }
            Self::Selective(selective) => join(buf, 0, selective.to_bytes()),
        }
    }
}

/// A packet: a RoCEv2 UDP payload without pad and ICRC.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Packet<'a> {
    /// The base transport header.
    pub bth: Bth,
    /// The extension headers.
    pub extension: Extension,
    /// The payload, without pad.
    pub payload: &'a [u8],
}

impl<'a> Packet<'a> {
    /// Parses a UDP payload, BTH to ICRC, without checking the ICRC, pad and reserved bits.
    ///
    /// # Errors
    /// When a length, version, opcode, partition key, pad count or syndrome is wrong. Never panics,
    /// whatever the bytes.
    pub fn parse(datagram: &'a [u8]) -> Result<Self, ParseError> {
        let truncated = ParseError::Truncated(datagram.len());
        let (packet, _icrc) = datagram.split_last_chunk::<{ icrc::LEN }>().ok_or(truncated)?;
        let (bth, pad, rest) = split_bth(packet)?;
        if !datagram.len().is_multiple_of(4) {
            return Err(ParseError::Unaligned(datagram.len()));
        }
        let (extension, rest) = Extension::split_from(bth.opcode.layout(), rest)?;
        if !rest.is_empty() && !bth.opcode.has_payload() {
            return Err(ParseError::Payload {
                opcode: bth.opcode,
                len: rest.len(),
            });
        }
        let Some(payload) = rest.len().checked_sub(pad).and_then(|len| rest.get(..len)) else {
            return Err(ParseError::Pad { pad, len: rest.len() });
        };
        Ok(Self {
            bth,
            extension,
            payload,
        })
    }
}

/// The BTH with its XRCETH if it has one, the pad count, and what follows.
#[inline]
fn split_bth(bytes: &[u8]) -> Result<(Bth, usize, &[u8]), ParseError> {
    let (bth, mut rest) = bytes.split_first_chunk().ok_or(ParseError::Truncated(bytes.len()))?;
    let (mut bth, pad) = Bth::from_bytes(bth)?;
    if bth.opcode.has_xrc_eth() {
        bth.xrc = Some(XrcEth::from_bytes(take(&mut rest)?));
    }
    Ok((bth, pad, rest))
}

/// Parses the headers of a packet of a link with `len` bytes of payload, without pad and ICRC.
///
/// # Errors
/// When version, opcode, partition key or syndrome is wrong, `bytes` is not exactly as long as the
/// headers, or the opcode has no payload. Never panics, whatever the bytes.
#[inline]
pub fn parse_headers(bytes: &[u8], len: usize) -> Result<(Bth, Extension), ParseError> {
    let (bth, pad, rest) = split_bth(bytes)?;
    let (extension, rest) = Extension::split_from(bth.opcode.layout(), rest)?;
    if pad > 0 || !rest.is_empty() {
        return Err(ParseError::Pad { pad, len: rest.len() });
    }
    if len > 0 && !bth.opcode.has_payload() {
        let opcode = bth.opcode;
        return Err(ParseError::Payload { opcode, len });
    }
    Ok((bth, extension))
}

/// Parses the headers of a WRITE ONLY as [`parse_headers`] does; `None` for any other.
#[inline]
pub(crate) fn parse_write_only(bytes: &[u8; header_len(Opcode::RcWriteOnly)]) -> Option<(Bth, Reth)> {
    if bytes[0] != Opcode::RcWriteOnly.code() {
        return None;
    }
    let (bth, rest) = bytes.split_first_chunk()?;
    match Bth::from_bytes(bth) {
        Ok((bth, 0)) => Some((bth, Reth::from_bytes(rest.first_chunk()?))),
        _ => None,
    }
}

/// Whether these are the headers of its opcode.
fn has_headers(bth: &Bth, extension: &Extension) -> bool {
    extension.layout() == bth.opcode.layout() && bth.xrc.is_some() == bth.opcode.has_xrc_eth()
}

fn write_all(headers: &mut [u8], bth: &Bth, pad: usize, extension: &Extension) {
    let (front, mut extensions) = headers.split_at_mut(Bth::LEN);
    join(front, 0, bth.to_bytes(pad));
    if let Some(xrc) = bth.xrc {
        join(extensions, 0, xrc.to_bytes());
        extensions = &mut extensions[XrcEth::LEN..];
    }
    extension.write_to(extensions);
}

/// Writes the headers of a packet of a link to `buf`; returns their length. The inverse of
/// [`parse_headers`].
///
/// # Errors
/// When `buf` is too short, or the extension headers do not match; `buf` is unchanged then.
#[inline]
pub fn write_headers(buf: &mut [u8], bth: &Bth, extension: &Extension) -> Result<usize, WriteError> {
    if !has_headers(bth, extension) {
        return Err(WriteError::Layout(bth.opcode));
    }
    let (len, needed) = (buf.len(), header_len(bth.opcode));
    let Some(headers) = buf.get_mut(..needed) else {
        return Err(WriteError::TooLong { needed, len });
    };
    write_all(headers, bth, 0, extension);
    Ok(needed)
}

/// The length of the headers of `opcode` in bytes.
pub const fn header_len(opcode: Opcode) -> usize {
    let xrc = if opcode.has_xrc_eth() { XrcEth::LEN } else { 0 };
    Bth::LEN + xrc + opcode.layout().len()
}

/// The length of a packet in bytes: headers, payload, pad and ICRC.
pub const fn packet_len(opcode: Opcode, payload_len: usize) -> usize {
    header_len(opcode) + payload_len + pad_len(payload_len) + icrc::LEN
}

pub(crate) const fn pad_len(payload_len: usize) -> usize {
    payload_len.wrapping_neg() & 3
}

/// Writes headers and pad of a packet with `payload_len` bytes of payload to `buf`, and returns the
/// offset of the payload, which the caller writes; [`icrc`] seals the last 4 of [`packet_len`].
///
/// # Errors
/// When `buf` is too short, or extension headers or payload do not match; it is unchanged then.
pub fn write(buf: &mut [u8], bth: &Bth, extension: &Extension, payload_len: usize) -> Result<usize, WriteError> {
    if !has_headers(bth, extension) || payload_len > 0 && !bth.opcode.has_payload() {
        return Err(WriteError::Layout(bth.opcode));
    }
    let (start, needed, pad) = (
        header_len(bth.opcode),
        packet_len(bth.opcode, payload_len),
        pad_len(payload_len),
    );
    let len = buf.len();
    let Some(packet) = buf.get_mut(..needed) else {
        return Err(WriteError::TooLong { needed, len });
    };
    let (headers, rest) = packet.split_at_mut(start);
    write_all(headers, bth, pad, extension);
    rest[payload_len..payload_len + pad].fill(0);
    Ok(start)
}

fn take<'a, const N: usize>(rest: &mut &'a [u8]) -> Result<&'a [u8; N], ParseError> {
    let (chunk, after) = rest.split_first_chunk().ok_or(ParseError::Truncated(rest.len()))?;
    *rest = after;
    Ok(chunk)
}

/// The big-endian 32 bits at `AT`, which the header's length bounds.
fn be32<const AT: usize>(bytes: &[u8]) -> u32 {
    u32::from_be_bytes([bytes[AT], bytes[AT + 1], bytes[AT + 2], bytes[AT + 3]])
}

fn be64<const AT: usize>(bytes: &[u8]) -> u64 {
    u64::from(be32::<AT>(bytes)) << 32 | u64::from(be32::<AT>(&bytes[4..]))
}

/// Copies `bytes` to `at` in `buf`: offsets are constants of each header.
fn join<const N: usize>(buf: &mut [u8], at: usize, bytes: [u8; N]) {
    buf[at..at + N].copy_from_slice(&bytes);
}
