//! The header of a selective ACK, 32 bytes: which packets after the expected one have arrived
//! (decision 111). It is Doorbell's own, of a manufacturer-specific opcode.

/// Bit *i*, from the lowest of the first byte on, is the packet *i* + 1 after the PSN of the BTH,
/// which is the expected one and missing: a selective ACK acknowledges all before it.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct SelectiveEth {
    received: [u8; Self::LEN],
}

impl SelectiveEth {
    /// Its length in bytes.
    pub const LEN: usize = 32;

    /// Packets that it covers.
    pub const PACKETS: usize = 8 * Self::LEN;

    /// Parses it: all bytes are valid.
    pub const fn from_bytes(bytes: &[u8; Self::LEN]) -> Self {
        Self { received: *bytes }
    }

    /// In wire format.
    pub const fn to_bytes(&self) -> [u8; Self::LEN] {
        self.received
    }

    /// Marks packet `index` + 1 after the expected one as received; one beyond
    /// [`PACKETS`](Self::PACKETS) is not marked.
    pub fn set(&mut self, index: usize) {
        if let Some(byte) = self.received.get_mut(index / 8) {
            *byte |= 1 << (index % 8);
        }
    }

    /// Whether packet `index` + 1 after the expected one has been received.
    pub fn has(&self, index: usize) -> bool {
        self.received
            .get(index / 8)
            .is_some_and(|byte| byte & 1 << (index % 8) != 0)
    }
}
