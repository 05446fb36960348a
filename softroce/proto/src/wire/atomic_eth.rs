//! The atomic extended transport header (AtomicETH), 28 bytes: operands of compare-and-swap and
//! fetch-and-add (IBTA vol 1, 9.3.4).
//!
//! ```text
//! 0..8    virtual address
//! 8..12   R_Key
//! 12..20  swap or add operand
//! 20..28  compare operand
//! ```

use super::{be32, be64, join};
use crate::RKey;

/// An atomic extended transport header.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct AtomicEth {
    /// The remote virtual address, a multiple of 8 in a valid request.
    pub va: u64,
    /// The key of the remote region.
    pub rkey: RKey,
    /// The swap (compare-and-swap) or add (fetch-and-add) operand.
    pub swap_add: u64,
    /// The compare operand; unused by fetch-and-add.
    pub compare: u64,
}

impl AtomicEth {
    /// Its length in bytes.
    pub const LEN: usize = 28;

    /// Parses it; every value is valid.
    pub fn from_bytes(bytes: &[u8; Self::LEN]) -> Self {
        Self {
            va: be64::<0>(bytes),
            rkey: RKey(be32::<8>(bytes)),
            swap_add: be64::<12>(bytes),
            compare: be64::<20>(bytes),
        }
    }

    /// In wire format.
    pub fn to_bytes(&self) -> [u8; Self::LEN] {
        let mut bytes = [0; Self::LEN];
        join(&mut bytes, 0, self.va.to_be_bytes());
        join(&mut bytes, 8, self.rkey.0.to_be_bytes());
        join(&mut bytes, 12, self.swap_add.to_be_bytes());
        join(&mut bytes, 20, self.compare.to_be_bytes());
        bytes
    }
}
