//! The invalidate extended transport header, 4 bytes: the key that SEND with invalidate takes away (IBTA vol 1, 9.3.7).

use crate::RKey;

/// An invalidate extended transport header.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Ieth {
    /// The key, of the receiver's own, to invalidate.
    pub rkey: RKey,
}

impl Ieth {
    /// Its length in bytes.
    pub const LEN: usize = 4;

    /// Reads it; every value is a header.
    pub const fn from_bytes(bytes: &[u8; Self::LEN]) -> Self {
        Self {
            rkey: RKey(u32::from_be_bytes(*bytes)),
        }
    }

    /// As it goes on the wire.
    pub const fn to_bytes(&self) -> [u8; Self::LEN] {
        self.rkey.0.to_be_bytes()
    }
}
