//! The XRC extended transport header, 4 bytes, directly after the BTH of XRC requests (IBTA vol 1,
//! annex A14).
//!
//! ```text
//! 0      reserved
//! 1..4   XRC shared receive queue
//! ```

/// An XRC extended transport header (XRCETH).
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct XrcEth {
    /// The number of the responder's shared receive queue, of 24 bits.
    pub srq: u32,
}

impl XrcEth {
    /// Its length in bytes.
    pub const LEN: usize = 4;

    /// Parses a header. The reserved byte is ignored.
    pub const fn from_bytes(bytes: &[u8; Self::LEN]) -> Self {
        let [_, s0, s1, s2] = *bytes;
        Self {
            srq: u32::from_be_bytes([0, s0, s1, s2]),
        }
    }

    /// The header in wire format.
    pub const fn to_bytes(self) -> [u8; Self::LEN] {
        let [_, s0, s1, s2] = self.srq.to_be_bytes();
        [0, s0, s1, s2]
    }
}
