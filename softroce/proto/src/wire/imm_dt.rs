//! Immediate data (ImmDt), 4 bytes for the receiver's completion (IBTA vol 1, 9.3.6).

/// Immediate data in host order (`ntohl` of the verbs' `imm_data`).
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct ImmDt(pub u32);

impl ImmDt {
    /// Its length in bytes.
    pub const LEN: usize = 4;

    /// Parses it; every value is valid.
    pub const fn from_bytes(bytes: &[u8; Self::LEN]) -> Self {
        Self(u32::from_be_bytes(*bytes))
    }

    /// In wire format.
    pub const fn to_bytes(&self) -> [u8; Self::LEN] {
        self.0.to_be_bytes()
    }
}
