//! The invalidate extended transport header (IETH), 4 bytes (IBTA vol 1, 9.3.7).

use crate::RKey;

/// An invalidate extended transport header.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Ieth {
    /// The receiver's key to invalidate.
    pub rkey: RKey,
}

impl Ieth {
    /// Its length in bytes.
    pub const LEN: usize = 4;

    /// Parses it; every value is valid.
    pub const fn from_bytes(bytes: &[u8; Self::LEN]) -> Self {
        Self {
            rkey: RKey(u32::from_be_bytes(*bytes)),
        }
    }

    /// In wire format.
    pub const fn to_bytes(&self) -> [u8; Self::LEN] {
        self.rkey.0.to_be_bytes()
    }
}
