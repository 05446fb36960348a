//! Management datagrams: 256 bytes, of which the first 24 are the same for every class (IBTA vol 1, 13.4.3).
//!
//! ```text
//!  0      base version        4..6   status               16..18  attribute
//!  1      management class    6..8   of the class         18..20  reserved
//!  2      class version       8..16  transaction          20..24  attribute modifier
//!  3      method                                          24..256 the message
//! ```

/// The bytes of a management datagram.
pub const MAD_LEN: usize = 256;

/// The bytes of a message, after the common header.
pub const MESSAGE_LEN: usize = MAD_LEN - HEADER_LEN;

/// A whole management datagram.
pub type Mad = [u8; MAD_LEN];

const HEADER_LEN: usize = 24;
const BASE_VERSION: u8 = 1;
/// The class of communication management (IBTA vol 1, 13.4.4).
const CLASS: u8 = 0x07;
const CLASS_VERSION: u8 = 2;
/// Communication management has no other method than Send() (IBTA vol 1, 16.7.2).
const SEND: u8 = 0x03;

/// What of the common header tells one message of the class from another.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) struct Header {
    /// Which exchange it belongs to: an answer has the number of what it answers.
    pub(super) transaction: u64,
    /// Which message it is.
    pub(super) attribute: u16,
}

impl Header {
    /// Splits a datagram of communication management; `None` for every other class, version and method.
    pub(super) fn split(mad: &Mad) -> Option<(Self, &[u8; MESSAGE_LEN])> {
        let (header, message) = mad.split_first_chunk::<HEADER_LEN>()?;
        if header[..4] != [BASE_VERSION, CLASS, CLASS_VERSION, SEND] {
            return None;
        }
        let header = Self {
            transaction: u64::from_be_bytes(*header[8..].first_chunk()?),
            attribute: u16::from_be_bytes(*header[16..].first_chunk()?),
        };
        Some((header, message.first_chunk()?))
    }

    /// A datagram with this header, and the message that `write` writes into zeros.
    pub(super) fn datagram(self, write: impl FnOnce(&mut [u8; MESSAGE_LEN])) -> Mad {
        let mut message = [0; MESSAGE_LEN];
        write(&mut message);
        let mut mad = [0; MAD_LEN];
        mad[..4].copy_from_slice(&[BASE_VERSION, CLASS, CLASS_VERSION, SEND]);
        mad[8..16].copy_from_slice(&self.transaction.to_be_bytes());
        mad[16..18].copy_from_slice(&self.attribute.to_be_bytes());
        mad[HEADER_LEN..].copy_from_slice(&message);
        mad
    }
}
