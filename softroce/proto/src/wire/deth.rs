//! The datagram extended transport header (DETH), 8 bytes (IBTA vol 1, 9.3.2).
//!
//! ```text
//! 0..4  Q_Key
//! 4     reserved
//! 5..8  source QP
//! ```

use crate::Qpn;

/// A datagram extended transport header.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Deth {
    /// The receiving queue pair's Q_Key.
    pub qkey: u32,
    /// The sending queue pair.
    pub src_qp: Qpn,
}

impl Deth {
    /// Its length in bytes.
    pub const LEN: usize = 8;

    /// Parses it; every value is valid, the reserved byte is ignored.
    pub const fn from_bytes(bytes: &[u8; Self::LEN]) -> Self {
        let [k0, k1, k2, k3, _, q0, q1, q2] = *bytes;
        Self {
            qkey: u32::from_be_bytes([k0, k1, k2, k3]),
            src_qp: Qpn::new(u32::from_be_bytes([0, q0, q1, q2])),
        }
    }

    /// In wire format.
    pub const fn to_bytes(&self) -> [u8; Self::LEN] {
        let [k0, k1, k2, k3] = self.qkey.to_be_bytes();
        let [_, q0, q1, q2] = self.src_qp.get().to_be_bytes();
        [k0, k1, k2, k3, 0, q0, q1, q2]
    }
}
