//! The RDMA extended transport header (RETH), 16 bytes: remote memory (IBTA vol 1, 9.3.3).
//!
//! ```text
//! 0..8    virtual address
//! 8..12   R_Key
//! 12..16  DMA length
//! ```

use super::{be32, be64, join};
use crate::RKey;

/// An RDMA extended transport header.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Reth {
    /// The remote virtual address.
    pub va: u64,
    /// The key of the remote region.
    pub rkey: RKey,
    /// The length of the whole message in bytes (not of this packet).
    pub len: u32,
}

impl Reth {
    /// Its length in bytes.
    pub const LEN: usize = 16;

    /// Parses it; every value is valid.
    pub fn from_bytes(bytes: &[u8; Self::LEN]) -> Self {
        Self {
            va: be64::<0>(bytes),
            rkey: RKey(be32::<8>(bytes)),
            len: be32::<12>(bytes),
        }
    }

    /// In wire format.
    pub fn to_bytes(&self) -> [u8; Self::LEN] {
        let mut bytes = [0; Self::LEN];
        join(&mut bytes, 0, self.va.to_be_bytes());
        join(&mut bytes, 8, self.rkey.0.to_be_bytes());
        join(&mut bytes, 12, self.len.to_be_bytes());
        bytes
    }
}
