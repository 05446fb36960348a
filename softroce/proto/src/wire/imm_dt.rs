//! Immediate data, 4 bytes that the receiver finds in its completion (IBTA vol 1, 9.3.6).

/// Immediate data, as the number whose big-endian bytes are on the wire (`ntohl` of what verbs call `imm_data`).
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct ImmDt(pub u32);

impl ImmDt {
    /// Its length in bytes.
    pub const LEN: usize = 4;

    /// Reads it; every value is a header.
    pub const fn from_bytes(bytes: &[u8; Self::LEN]) -> Self {
        Self(u32::from_be_bytes(*bytes))
    }

    /// As it goes on the wire.
    pub const fn to_bytes(&self) -> [u8; Self::LEN] {
        self.0.to_be_bytes()
    }
}
