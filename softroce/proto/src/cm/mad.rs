//! Management datagrams (MADs): 256 bytes, with a common header of 24 (IBTA vol 1, 13.4.3).
//!
//! ```text
//!  0      base version        4..6   status               16..18  attribute
//!  1      management class    6..8   class-specific       18..20  reserved
//!  2      class version       8..16  transaction          20..24  attribute modifier
//!  3      method                                          24..256 the message
//! ```

/// Length of a management datagram in bytes.
pub const MAD_LEN: usize = 256;

pub(crate) const MESSAGE_LEN: usize = MAD_LEN - HEADER_LEN;

/// A management datagram.
pub type Mad = [u8; MAD_LEN];

const HEADER_LEN: usize = 24;
const BASE_VERSION: u8 = 1;
/// The communication management class (IBTA vol 1, 13.4.4).
const CLASS: u8 = 0x07;
const CLASS_VERSION: u8 = 2;
/// The only method of communication management, Send() (IBTA vol 1, 16.7.2).
const SEND: u8 = 0x03;

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) struct Header {
    /// Transaction id: a reply carries that of its request.
    pub(super) transaction: u64,
    /// Attribute id: the message type.
    pub(super) attribute: u16,
    /// Attribute modifier: [`Ece::options`](super::Ece::options) in a REQ or REP, 0 otherwise.
    pub(super) modifier: u32,
}

impl Header {
    /// Splits a communication management datagram; `None` for any other class, version and method.
    pub(super) fn split(mad: &Mad) -> Option<(Self, &[u8; MESSAGE_LEN])> {
        let (header, message) = mad.split_first_chunk::<HEADER_LEN>()?;
        if header[..4] != [BASE_VERSION, CLASS, CLASS_VERSION, SEND] {
            return None;
        }
        let header = Self {
            transaction: u64::from_be_bytes(*header[8..].first_chunk()?),
            attribute: u16::from_be_bytes(*header[16..].first_chunk()?),
            modifier: u32::from_be_bytes(*header[20..].first_chunk()?),
        };
        Some((header, message.first_chunk()?))
    }

    pub(super) fn datagram(self, write: impl FnOnce(&mut [u8; MESSAGE_LEN])) -> Mad {
        let mut message = [0; MESSAGE_LEN];
        write(&mut message);
        let mut mad = [0; MAD_LEN];
        mad[..4].copy_from_slice(&[BASE_VERSION, CLASS, CLASS_VERSION, SEND]);
        mad[8..16].copy_from_slice(&self.transaction.to_be_bytes());
        mad[16..18].copy_from_slice(&self.attribute.to_be_bytes());
        mad[20..24].copy_from_slice(&self.modifier.to_be_bytes());
        mad[HEADER_LEN..].copy_from_slice(&message);
        mad
    }
}
