//! The AtomicAckETH (atomic acknowledge header), 8 bytes: the original value (IBTA vol 1, 9.5.3).

/// An atomic acknowledge extended transport header.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct AtomicAckEth {
    /// The remote value before the operation.
    pub original: u64,
}

impl AtomicAckEth {
    /// Its length in bytes.
    pub const LEN: usize = 8;

    /// Parses it; every value is valid.
    pub const fn from_bytes(bytes: &[u8; Self::LEN]) -> Self {
        Self {
            original: u64::from_be_bytes(*bytes),
        }
    }

    /// In wire format.
    pub const fn to_bytes(&self) -> [u8; Self::LEN] {
        self.original.to_be_bytes()
    }
}
