//! Frames: what goes over the connections of a mesh.
//!
//! A length of four bytes, a kind of one, the group it is for, and what the kind says. Numbers are little endian. A peer has proved that it belongs here, but may be broken: a frame is never longer than [`MAX_FRAME`],
//! nothing is allocated before it has arrived, and one that makes no sense ends the connection.

use crate::bootstrap::wire::Reader;
use crate::failure::{Message, Word};

/// How long a message of an exchange may be, in bytes: 16 MiB.
pub const MAX_MESSAGE: usize = 16 << 20;
/// What a frame takes beside the length: the kind, the group, a number.
const HEADER: usize = 1 + 8 + 8;
/// What a frame takes at most, beside its length.
const MAX_FRAME: usize = HEADER + MAX_MESSAGE;

/// A group among those that share a mesh: which process made it, by its place in the mesh, and which number it gave it. No process gives a number twice, so no two groups have one id.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub(crate) struct GroupId {
    pub(crate) maker: u32,
    pub(crate) number: u32,
}

impl GroupId {
    /// The group of all, which came with the mesh.
    pub(crate) const ALL: Self = Self {
        maker: u32::MAX,
        number: 0,
    };
}

/// What is said.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(crate) enum Frame {
    /// To a member of a group: this member's part of exchange `number`.
    Message {
        group: GroupId,
        number: u64,
        bytes: Vec<u8>,
    },
    /// To a member of a group: about its failure.
    Trial { group: GroupId, message: Message },
    /// To a member of a group: about the group that comes after it.
    Shrink { group: GroupId, word: Word },
    /// To a member of a group: this one has left it.
    Leave { group: GroupId },
    /// This process ends its mesh.
    Goodbye,
}

impl Frame {
    /// Appends the frame to what is to be sent.
    pub(crate) fn encode(&self, to: &mut Vec<u8>) {
        let start = to.len();
        to.extend_from_slice(&[0; 4]);
        let mut head = |kind: u8, group: &GroupId| {
            to.push(kind);
            to.extend_from_slice(&group.maker.to_le_bytes());
            to.extend_from_slice(&group.number.to_le_bytes());
        };
        match self {
            Self::Message { group, number, bytes } => {
                head(1, group);
                to.extend_from_slice(&number.to_le_bytes());
                to.extend_from_slice(bytes);
            }
            Self::Leave { group } => head(2, group),
            Self::Goodbye => head(3, &GroupId::ALL),
            Self::Trial { group, message } => {
                head(4, group);
                message.encode(to);
            }
            Self::Shrink { group, word } => {
                head(5, group);
                word.encode(to);
            }
        }
        let length = (to.len() - start - 4) as u32;
        to[start..start + 4].copy_from_slice(&length.to_le_bytes());
    }

    fn decode(body: &[u8]) -> Option<Self> {
        let mut from = Reader(body);
        let kind = from.u8()?;
        let group = GroupId {
            maker: from.u32()?,
            number: from.u32()?,
        };
        let frame = match kind {
            1 => Self::Message {
                group,
                number: from.u64()?,
                bytes: std::mem::take(&mut from.0).to_vec(),
            },
            2 => Self::Leave { group },
            3 => Self::Goodbye,
            4 => Self::Trial {
                group,
                message: Message::decode(std::mem::take(&mut from.0))?,
            },
            5 => Self::Shrink {
                group,
                word: Word::decode(std::mem::take(&mut from.0))?,
            },
            _ => return None,
        };
        from.end()?;
        Some(frame)
    }
}

/// Bytes that have come, and the frames in them.
#[derive(Debug, Default)]
pub(crate) struct Inbound {
    bytes: Vec<u8>,
    /// How many of them have been read.
    taken: usize,
}

impl Inbound {
    /// Adds what has come.
    pub(crate) fn extend(&mut self, bytes: &[u8]) {
        if self.taken > 0 {
            self.bytes.drain(..self.taken);
            self.taken = 0;
        }
        self.bytes.extend_from_slice(bytes);
        if bytes.len() * 4 < self.bytes.capacity() && self.bytes.len() * 4 < self.bytes.capacity() {
            self.bytes.shrink_to(self.bytes.len() * 2);
        }
    }

    /// The next frame, if it has come whole.
    ///
    /// # Errors
    /// What has come is no frame.
    pub(crate) fn next(&mut self) -> Result<Option<Frame>, &'static str> {
        let left = &self.bytes[self.taken..];
        let Some(length) = left.first_chunk::<4>().map(|bytes| u32::from_le_bytes(*bytes) as usize) else {
            return Ok(None);
        };
        if length > MAX_FRAME {
            return Err("it sent a frame that is too long");
        }
        let Some(body) = left.get(4..4 + length) else {
            return Ok(None);
        };
        let frame = Frame::decode(body).ok_or("it sent a frame that makes no sense")?;
        self.taken += 4 + length;
        Ok(Some(frame))
    }
}
