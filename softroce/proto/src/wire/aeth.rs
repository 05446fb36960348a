//! The ACK extended transport header (AETH), 4 bytes: ACK with credits, RNR NAK or NAK, and MSN
//! (IBTA vol 1, 9.5.2 and table 44 on).
//!
//! ```text
//! 0     syndrome: reserved:1 kind:2 value:5
//! 1..4  MSN, the number of messages completed
//! ```

use core::time::Duration;

use super::ParseError;

/// End-to-end credits granted by an ACK, as their 5-bit code (IBTA vol 1, 9.7.7.2, table 47).
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub struct Credits(u8);

impl Credits {
    /// No end-to-end flow control by credits.
    pub const UNLIMITED: Self = Self(31);

    /// From the low five bits of a code.
    pub const fn from_code(code: u8) -> Self {
        Self(code & 31)
    }

    /// The code, below 32.
    pub const fn code(self) -> u8 {
        self.0
    }

    /// The number of messages granted: 0, 1, 2, 3, 4, 6, 8, 12, 16, … 32768; `None`: unlimited.
    pub const fn count(self) -> Option<u32> {
        match self.0 {
            31 => None,
            0 => Some(0),
            1 => Some(1),
            code if code.is_multiple_of(2) => Some(1 << (code / 2)),
            code => Some(3 << (code / 2 - 1)),
        }
    }
}

/// RNR timer: the 5-bit code of the wait (IBTA vol 1, 9.7.5.2.8, table 46). Code 0 is the longest.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub struct RnrTimer(u8);

impl RnrTimer {
    /// The time per code, in units of 10 µs.
    const TENS_OF_MICROS: [u32; 32] = [
        65536, 1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512, 768, 1024, 1536, 2048, 3072,
        4096, 6144, 8192, 12288, 16384, 24576, 32768, 49152,
    ];

    /// From the low five bits of a code.
    pub const fn from_code(code: u8) -> Self {
        Self(code & 31)
    }

    /// The shortest timer of at least `time`; the longest, 655.36 ms, if there is none.
    pub fn at_least(time: Duration) -> Self {
        (1..32)
            .map(Self::from_code)
            .find(|timer| timer.duration() >= time)
            .unwrap_or(Self(0))
    }

    /// The code, below 32.
    pub const fn code(self) -> u8 {
        self.0
    }

    /// The time to wait: 10 µs to 655.36 ms.
    pub const fn duration(self) -> Duration {
        Duration::from_micros(Self::TENS_OF_MICROS[(self.0 & 31) as usize] as u64 * 10)
    }
}

/// NAK codes (IBTA vol 1, 9.7.5.2, table 45).
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub enum Nak {
    /// PSN sequence error: a gap. The NAK carries the expected PSN.
    PsnSequence,
    /// Invalid request: malformed, out of order, or not supported.
    InvalidRequest,
    /// Remote access error: wrong key, range or right.
    RemoteAccess,
    /// Remote operational error: the responder could not execute it.
    RemoteOperational,
    /// Invalid RD request (not used by RC).
    InvalidRd,
}

/// The syndrome of an acknowledgement (IBTA vol 1, table 44).
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub enum Syndrome {
    /// ACK: everything up to the PSN is done.
    Ack(Credits),
    /// RNR NAK: no receive was posted, retry after the timer.
    RnrNak(RnrTimer),
    /// NAK.
    Nak(Nak),
}

impl Syndrome {
    /// Parses the syndrome byte.
    ///
    /// # Errors
    /// A reserved code.
    pub const fn from_code(code: u8) -> Result<Self, ParseError> {
        Ok(match code {
            0x00..=0x1f => Self::Ack(Credits(code)),
            0x20..=0x3f => Self::RnrNak(RnrTimer(code & 31)),
            0x60 => Self::Nak(Nak::PsnSequence),
            0x61 => Self::Nak(Nak::InvalidRequest),
            0x62 => Self::Nak(Nak::RemoteAccess),
            0x63 => Self::Nak(Nak::RemoteOperational),
            0x64 => Self::Nak(Nak::InvalidRd),
            _ => return Err(ParseError::Syndrome(code)),
        })
    }

    /// The syndrome byte.
    pub const fn code(self) -> u8 {
        match self {
            Self::Ack(credits) => credits.code(),
            Self::RnrNak(timer) => 0x20 | timer.code(),
            Self::Nak(Nak::PsnSequence) => 0x60,
            Self::Nak(Nak::InvalidRequest) => 0x61,
            Self::Nak(Nak::RemoteAccess) => 0x62,
            Self::Nak(Nak::RemoteOperational) => 0x63,
            Self::Nak(Nak::InvalidRd) => 0x64,
        }
    }
}

/// An ACK extended transport header.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Aeth {
    /// The syndrome.
    pub syndrome: Syndrome,
    /// The message sequence number: messages completed by the responder, modulo 2^24.
    pub msn: u32,
}

impl Aeth {
    /// Its length in bytes.
    pub const LEN: usize = 4;

    /// Reads it.
    ///
    /// # Errors
    /// A reserved syndrome.
    pub const fn from_bytes(bytes: &[u8; Self::LEN]) -> Result<Self, ParseError> {
        let [code, m0, m1, m2] = *bytes;
        match Syndrome::from_code(code) {
            Ok(syndrome) => Ok(Self {
                syndrome,
                msn: u32::from_be_bytes([0, m0, m1, m2]),
            }),
            Err(error) => Err(error),
        }
    }

    /// As it goes on the wire.
    pub const fn to_bytes(&self) -> [u8; Self::LEN] {
        let [_, m0, m1, m2] = self.msn.to_be_bytes();
        [self.syndrome.code(), m0, m1, m2]
    }
}
