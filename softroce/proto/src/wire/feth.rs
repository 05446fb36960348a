//! The FLUSH extended transport header (FETH), 4 bytes; a RETH follows it (IBTA vol 1, annex A19).
//!
//! ```text
//! bits 0..4   placement type (PLT): 1 global visibility, 2 persistence
//! bits 4..6   selectivity level (SEL): 0 the range of the RETH, 1 the whole region
//! bits 6..32  reserved
//! ```

use super::Reth;
use crate::memory::{Flush, Placement};

const GLOBAL: u8 = 1;
const PERSISTENT: u8 = 2;
const RANGE: u8 = 0;
const REGION: u8 = 1;

/// A FLUSH extended transport header.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Feth {
    /// The placement type, 4 bits.
    pub plt: u8,
    /// The selectivity level, 2 bits.
    pub sel: u8,
}

impl Feth {
    /// Its length in bytes.
    pub const LEN: usize = 4;

    /// Parses it; every value is valid, and the reserved bits are ignored.
    pub fn from_bytes(bytes: &[u8; Self::LEN]) -> Self {
        Self {
            plt: bytes[3] & 0xf,
            sel: bytes[3] >> 4 & 3,
        }
    }

    /// In wire format.
    pub fn to_bytes(&self) -> [u8; Self::LEN] {
        [0, 0, 0, self.plt & 0xf | (self.sel & 3) << 4]
    }

    /// The headers of a FLUSH.
    pub(crate) fn of(flush: &Flush) -> (Self, Reth) {
        let bit = |set, bit| if set { bit } else { 0 };
        let feth = Self {
            plt: bit(flush.placement.global, GLOBAL) | bit(flush.placement.persistent, PERSISTENT),
            sel: if flush.whole_region { REGION } else { RANGE },
        };
        let reth = Reth {
            va: flush.addr,
            rkey: flush.rkey,
            len: flush.len,
        };
        (feth, reth)
    }

    /// What it requests; `None` with a reserved placement type or selectivity level.
    pub fn flush(self, reth: &Reth) -> Option<Flush> {
        let known = self.plt & !(GLOBAL | PERSISTENT) == 0 && self.sel <= REGION;
        known.then_some(Flush {
            addr: reth.va,
            rkey: reth.rkey,
            len: reth.len,
            whole_region: self.sel == REGION,
            placement: Placement {
                global: self.plt & GLOBAL != 0,
                persistent: self.plt & PERSISTENT != 0,
            },
        })
    }
}
