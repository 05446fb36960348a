//! The congestion notification packet (CNP) of RoCEv2 (IBTA annex A17.9.3): a BTH with BECN, of an
//! opcode of its own, and 16 reserved bytes. It has no PSN and no acknowledgement.

use super::{Bth, DEFAULT_PKEY};
use crate::{Qpn, icrc};

/// A CNP.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Cnp {
    /// The queue pair that is to slow down: the sender of the marked packet.
    pub dest_qp: Qpn,
}

impl Cnp {
    pub(crate) const OPCODE: u8 = 0x81;
    /// The length of the packet in bytes, ICRC included.
    pub const LEN: usize = Bth::LEN + Self::RESERVED + icrc::LEN;

    const RESERVED: usize = 16;
    const MIGRATED: u8 = 0x40;
    const BECN: u8 = 0x40;

    /// Parses a UDP payload, BTH to ICRC, without checking the ICRC; reserved bytes are ignored.
    /// `None` for any other packet, or in another partition.
    pub fn parse(datagram: &[u8]) -> Option<Self> {
        let datagram: &[u8; Self::LEN] = datagram.try_into().ok()?;
        let [code, flags, p0, p1, ecn, q0, q1, q2, ..] = *datagram;
        let (version, pad) = (flags & 0x0f, flags & 0x30);
        // A limited member of the default partition has no membership bit (IBTA vol 1, 10.9.3).
        let in_partition = u16::from_be_bytes([p0, p1]) | 0x8000 == DEFAULT_PKEY;
        let valid = code == Self::OPCODE && version == 0 && pad == 0 && in_partition && ecn & Self::BECN != 0;
        valid.then(|| Self {
            dest_qp: Qpn::new(u32::from_be_bytes([0, q0, q1, q2])),
        })
    }

    /// Writes it to `buf`, up to the ICRC; `None`, with nothing written, if that is shorter than
    /// [`LEN`](Self::LEN).
    pub fn write(self, buf: &mut [u8]) -> Option<usize> {
        let packet = buf.get_mut(..Self::LEN)?;
        packet.fill(0);
        (packet[0], packet[1]) = (Self::OPCODE, Self::MIGRATED);
        packet[2..4].copy_from_slice(&DEFAULT_PKEY.to_be_bytes());
        packet[4..8].copy_from_slice(&self.dest_qp.get().to_be_bytes());
        packet[4] = Self::BECN;
        Some(Self::LEN)
    }
}
