//! The base transport header, 12 bytes, in every packet (IBTA vol 1, 9.2).
//!
//! ```text
//! 0      opcode
//! 1      SE:1 M:1 pad count:2 TVer:4
//! 2..4   partition key
//! 4      FECN:1 BECN:1 reserved:6        (all ones in the ICRC)
//! 5..8   destination QP
//! 8      AckReq:1 reserved:7             (0x2b: the requester takes selective ACKs, decision 111)
//! 9..12  PSN
//! ```

use super::{Opcode, ParseError, XrcEth};
use crate::{Psn, Qpn};

/// The P_Key of the default partition with full membership (IBTA vol 1, 10.9.1.2).
pub const DEFAULT_PKEY: u16 = 0xffff;

const MEMBERSHIP: u16 = 0x8000;

/// In the reserved bits behind AckReq: a pattern, so that one bit of another's extension is none.
const SELECTIVE: u8 = 0x2b;

/// A base transport header. The pad count is not a field: it follows from the payload length.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Bth {
    /// The opcode.
    pub opcode: Opcode,
    /// Solicited event: the completion notifies receivers armed for solicited events.
    pub solicited: bool,
    /// Path migration state: true is "migrated", the initial state of queue pairs.
    pub migrated: bool,
    /// Partition key.
    pub pkey: u16,
    /// Forward explicit congestion notification.
    pub fecn: bool,
    /// Backward explicit congestion notification.
    pub becn: bool,
    /// Destination queue pair.
    pub dest_qp: Qpn,
    /// AckReq: the requester requests an acknowledgement of this packet.
    pub ack_req: bool,
    /// Of a request: the requester takes selective ACKs. Others ignore these reserved bits.
    pub selective: bool,
    /// Packet sequence number.
    pub psn: Psn,
    /// The XRCETH, which follows in requests of XRC: not part of the 12 bytes.
    pub xrc: Option<XrcEth>,
}

impl Bth {
    /// Its length in bytes.
    pub const LEN: usize = 12;

    /// A header in the default partition, with no flag but "migrated" set.
    pub const fn new(opcode: Opcode, dest_qp: Qpn, psn: Psn) -> Self {
        Self {
            opcode,
            solicited: false,
            migrated: true,
            pkey: DEFAULT_PKEY,
            fecn: false,
            becn: false,
            dest_qp,
            ack_req: false,
            selective: false,
            psn,
            xrc: None,
        }
    }

    /// The destination QPN of a packet, without parsing the rest; `None` if too short.
    pub fn dest_qp_of(packet: &[u8]) -> Option<Qpn> {
        let header = packet.first_chunk::<{ Self::LEN }>()?;
        Some(Qpn::new(u32::from_be_bytes([0, header[5], header[6], header[7]])))
    }

    pub(crate) fn set_ack_req(packet: &mut [u8]) {
        if let Some(header) = packet.first_chunk_mut::<{ Self::LEN }>() {
            header[8] |= 0x80;
        }
    }

    /// Parses a header and its pad count (0 … 3 bytes). Other reserved bits are ignored.
    ///
    /// # Errors
    /// An unknown opcode, a transport version other than 0, or another partition's P_Key (limited
    /// members of the default partition are accepted: IBTA vol 1, 10.9.3).
    #[inline]
    pub const fn from_bytes(bytes: &[u8; Self::LEN]) -> Result<(Self, usize), ParseError> {
        let [code, flags, p0, p1, ecn, q0, q1, q2, ack, s0, s1, s2] = *bytes;
        let version = flags & 0x0f;
        if version != 0 {
            return Err(ParseError::Version(version));
        }
        let Some(opcode) = Opcode::from_code(code) else {
            return Err(ParseError::Opcode(code));
        };
        let pkey = u16::from_be_bytes([p0, p1]);
        if pkey | MEMBERSHIP != DEFAULT_PKEY {
            return Err(ParseError::Pkey(pkey));
        }
        let header = Self {
            opcode,
            solicited: flags & 0x80 != 0,
            migrated: flags & 0x40 != 0,
            pkey,
            fecn: ecn & 0x80 != 0,
            becn: ecn & 0x40 != 0,
            dest_qp: Qpn::new(u32::from_be_bytes([0, q0, q1, q2])),
            ack_req: ack & 0x80 != 0,
            selective: ack & 0x7f == SELECTIVE,
            psn: Psn::new(u32::from_be_bytes([0, s0, s1, s2])),
            xrc: None,
        };
        Ok((header, (flags >> 4 & 3) as usize))
    }

    /// The header with a pad count (its low two bits) in wire format.
    pub const fn to_bytes(&self, pad: usize) -> [u8; Self::LEN] {
        let [p0, p1] = self.pkey.to_be_bytes();
        let [_, q0, q1, q2] = self.dest_qp.get().to_be_bytes();
        let [_, s0, s1, s2] = self.psn.get().to_be_bytes();
        [
            self.opcode.code(),
            (self.solicited as u8) << 7 | (self.migrated as u8) << 6 | ((pad & 3) as u8) << 4,
            p0,
            p1,
            (self.fecn as u8) << 7 | (self.becn as u8) << 6,
            q0,
            q1,
            q2,
            (self.ack_req as u8) << 7 | if self.selective { SELECTIVE } else { 0 },
            s0,
            s1,
            s2,
        ]
    }
}
