//! What a stream takes of memory and time.

use std::time::Duration;

use crate::credits::RESERVE;

const MAX_CHUNK: u32 = 1 << 30;
const MAX_CHUNKS: u16 = 16 << 10;

/// The settings of a stream; both ends may differ.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct StreamConfig {
    /// The longest message received, in bytes: 16 KiB by default, 1 GiB at most.
    pub chunk: u32,
    /// Chunks for receiving, and as many for sending: 32 by default, 4 to 16,384. A stream takes
    /// `2 * chunks * chunk` bytes of registered memory.
    pub chunks: u16,
    /// How many turns of the runtime a task polls before it sleeps: 200 by default. A turn costs
    /// about 0.1 µs, a sleep and its end 5 µs and more.
    pub spins: u32,
    /// How long connecting may take, from the TCP connection on: 10 s by default.
    pub timeout: Duration,
    /// How long a dropped stream is kept until the peer has its last bytes: 10 s by default.
    pub linger: Duration,
}

/// A setting is out of range.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("{what} is {value}, which is not within {least} to {most}")]
pub struct ConfigError {
    what: &'static str,
    value: u32,
    least: u32,
    most: u32,
}

impl Default for StreamConfig {
    fn default() -> Self {
        Self {
            chunk: 16 << 10,
            chunks: 32,
            spins: 200,
            timeout: Duration::from_secs(10),
            linger: Duration::from_secs(10),
        }
    }
}

impl StreamConfig {
    /// Sets [`chunk`](Self::chunk).
    #[must_use]
    pub fn chunk(mut self, bytes: u32) -> Self {
        self.chunk = bytes;
        self
    }

    /// Sets [`chunks`](Self::chunks).
    #[must_use]
    pub fn chunks(mut self, chunks: u16) -> Self {
        self.chunks = chunks;
        self
    }

    /// Sets [`spins`](Self::spins).
    #[must_use]
    pub fn spins(mut self, turns: u32) -> Self {
        self.spins = turns;
        self
    }

    pub(crate) fn check(&self) -> Result<Sizes, ConfigError> {
        Sizes {
            chunk: self.chunk,
            chunks: self.chunks,
        }
        .check()
    }
}

/// What each end says of itself to the other.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Sizes {
    pub(crate) chunk: u32,
    pub(crate) chunks: u16,
}

impl Sizes {
    const VERSION: u16 = 1;
    pub(crate) const LEN: usize = 8;

    fn check(self) -> Result<Self, ConfigError> {
        let within = |what, value, least, most| match (least..=most).contains(&value) {
            true => Ok(()),
            false => Err(ConfigError {
                what,
                value,
                least,
                most,
            }),
        };
        within("the length of a chunk", self.chunk, 1, MAX_CHUNK)?;
        within(
            "the number of chunks",
            self.chunks.into(),
            u32::from(RESERVE) + 2,
            MAX_CHUNKS.into(),
        )?;
        Ok(self)
    }

    pub(crate) fn to_bytes(self) -> [u8; Self::LEN] {
        let mut bytes = [0; Self::LEN];
        bytes[..2].copy_from_slice(&Self::VERSION.to_be_bytes());
        bytes[2..4].copy_from_slice(&self.chunks.to_be_bytes());
        bytes[4..].copy_from_slice(&self.chunk.to_be_bytes());
        bytes
    }

    /// The peer's. `None` if it is no stream of this version, or says what it may not.
    pub(crate) fn from_bytes(bytes: &[u8]) -> Option<Self> {
        let [v0, v1, n0, n1, rest @ ..] = <[u8; Self::LEN]>::try_from(bytes).ok()?;
        let sizes = Self {
            chunk: u32::from_be_bytes(rest),
            chunks: u16::from_be_bytes([n0, n1]),
        };
        (u16::from_be_bytes([v0, v1]) == Self::VERSION)
            .then_some(sizes)?
            .check()
            .ok()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_a_peer_says_is_checked() {
        let sizes = StreamConfig::default().check().unwrap();
        let bytes = sizes.to_bytes();
        assert_eq!(Sizes::from_bytes(&bytes), Some(sizes));
        assert_eq!(Sizes::from_bytes(&bytes[..7]), None);
        let changed = |at: usize, to: u8| {
            let mut bytes = bytes;
            bytes[at] = to;
            Sizes::from_bytes(&bytes)
        };
        assert_eq!(changed(1, 2), None, "another version");
        assert_eq!(changed(3, 3), None, "no chunk is left beside the reserve");
        assert_eq!(changed(2, 0xff), None, "too many chunks");
        assert_eq!(changed(4, 0x80), None, "chunks too long");
    }

    #[test]
    fn settings_out_of_range_are_named() {
        let error = StreamConfig::default().chunks(3).check().unwrap_err();
        assert_eq!(
            error.to_string(),
            "the number of chunks is 3, which is not within 4 to 16384"
        );
    }
}
