//! Frames of the control mesh.
//!
//! A frame is a length of four bytes, a kind of one, the group, and the payload, little endian, and
//! behind them their MAC. The peer is authenticated but may be faulty: a frame is never longer than
//! [`MAX_FRAME`], nothing is allocated before it has arrived, and an invalid frame ends the
//! connection.

use doorbell_rendezvous::{FrameMac, TAG};
use serde::{Deserialize, Serialize};

use crate::bootstrap::wire::Reader;
use crate::failure::{Message, ShrinkMessage};

/// Maximum length of a message of an exchange, in bytes: 16 MiB.
pub const MAX_MESSAGE: usize = 16 << 20;
const HEADER: usize = 1 + 8 + 8;
const MAX_FRAME: usize = HEADER + MAX_MESSAGE;

/// Receive buffer that a connection retains, in bytes.
const KEPT: usize = 64 << 10;

/// A group among those of a mesh, unique: its creator's mesh rank, and the creator's counter.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct GroupId {
    pub(crate) creator: u32,
    pub(crate) number: u32,
}

impl GroupId {
    /// The initial group of all processes.
    pub(crate) const ALL: Self = Self {
        creator: u32::MAX,
        number: 0,
    };
}

#[derive(Clone, PartialEq, Eq, Debug)]
pub(crate) enum Frame {
    /// To a member of a group: this member's part of exchange `number`.
    Message {
        group: GroupId,
        number: u64,
        bytes: Vec<u8>,
    },
    Failure {
        group: GroupId,
        message: Message,
    },
    Shrink {
        group: GroupId,
        message: ShrinkMessage,
    },
    Leave {
        group: GroupId,
    },
    /// The sender closes its mesh.
    Goodbye,
}

impl Frame {
    pub(crate) fn seal(&self, mac: &mut FrameMac, to: &mut Vec<u8>) {
        let start = to.len();
        self.encode(to);
        let tag = mac.seal(&to[start..]);
        to.extend_from_slice(&tag);
    }

    pub(crate) fn encode(&self, to: &mut Vec<u8>) {
        let start = to.len();
        to.extend_from_slice(&[0; 4]);
        let mut head = |kind: u8, group: &GroupId| {
            to.push(kind);
            to.extend_from_slice(&group.creator.to_le_bytes());
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
            Self::Failure { group, message } => {
                head(4, group);
                to.extend_from_slice(&message.encode());
            }
            Self::Shrink { group, message } => {
                head(5, group);
                to.extend_from_slice(&message.encode());
            }
        }
        let length = (to.len() - start - 4) as u32;
        to[start..start + 4].copy_from_slice(&length.to_le_bytes());
    }

    pub(crate) fn decode(body: &[u8]) -> Option<Self> {
        let mut from = Reader(body);
        let kind = from.u8()?;
        let group = GroupId {
            creator: from.u32()?,
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
            4 => Self::Failure {
                group,
                message: Message::decode(std::mem::take(&mut from.0))?,
            },
            5 => Self::Shrink {
                group,
                message: ShrinkMessage::decode(std::mem::take(&mut from.0))?,
            },
            _ => return None,
        };
        from.end()?;
        Some(frame)
    }
}

#[derive(Debug)]
pub(crate) struct Inbound {
    mac: FrameMac,
    bytes: Vec<u8>,
    /// Bytes that have been parsed.
    taken: usize,
}

impl Inbound {
    pub(crate) fn new(mac: FrameMac) -> Self {
        Self {
            mac,
            bytes: Vec::new(),
            taken: 0,
        }
    }

    pub(crate) fn extend(&mut self, bytes: &[u8]) {
        if self.taken > 0 {
            self.bytes.drain(..self.taken);
            self.taken = 0;
        }
        self.bytes.extend_from_slice(bytes);
        if self.bytes.len() * 4 < self.bytes.capacity() && self.bytes.capacity() > KEPT {
            self.bytes.shrink_to(KEPT);
        }
    }

    /// The next complete frame.
    ///
    /// # Errors
    /// The bytes are not the peer's next frame.
    pub(crate) fn next(&mut self) -> Result<Option<Frame>, &'static str> {
        let left = &self.bytes[self.taken..];
        let Some(length) = left.first_chunk::<4>().map(|bytes| u32::from_le_bytes(*bytes) as usize) else {
            return Ok(None);
        };
        if length > MAX_FRAME {
            return Err("it sent a frame that is too long");
        }
        let Some(sealed) = left.get(..4 + length + TAG) else {
            return Ok(None);
        };
        let (frame, tag) = sealed.split_at(4 + length);
        self.mac
            .open(frame, tag)
            .map_err(|_| "a frame on its connection does not prove the group's secret")?;
        let frame = Frame::decode(&frame[4..]).ok_or("it sent a frame that makes no sense")?;
        self.taken += sealed.len();
        Ok(Some(frame))
    }
}

#[cfg(test)]
mod tests {
    use proptest::collection::vec;
    use proptest::prelude::*;
    use proptest::sample::Index;

    use super::*;
    use crate::failure::Proposal;
    use crate::types::Rank;

    fn frames() -> Vec<Frame> {
        let group = GroupId { creator: 3, number: 9 };
        let proposal = Proposal {
            epoch: 2,
            group,
            members: vec![Rank(0), Rank(4)],
        };
        vec![
            Frame::Message {
                group,
                number: u64::MAX,
                bytes: vec![7; 1000],
            },
            Frame::Message {
                group: GroupId::ALL,
                number: 0,
                bytes: Vec::new(),
            },
            Frame::Failure {
                group,
                message: Message::Query {
                    number: 1,
                    timeout_ms: 2,
                    test_links: true,
                },
            },
            Frame::Shrink {
                group,
                message: ShrinkMessage::Propose(proposal),
            },
            Frame::Leave { group },
            Frame::Goodbye,
        ]
    }

    fn mac() -> FrameMac {
        FrameMac::new(&[7; 32])
    }

    fn sealed(frames: &[Frame]) -> Vec<u8> {
        let (mut mac, mut bytes) = (mac(), Vec::new());
        frames.iter().for_each(|frame| frame.seal(&mut mac, &mut bytes));
        bytes
    }

    fn read<'a>(pieces: impl Iterator<Item = &'a [u8]>) -> Result<Vec<Frame>, &'static str> {
        let mut inbound = Inbound::new(mac());
        let mut frames = Vec::new();
        for piece in pieces {
            inbound.extend(piece);
            while let Some(frame) = inbound.next()? {
                frames.push(frame);
            }
        }
        Ok(frames)
    }

    #[test]
    fn frames_round_trip_however_they_are_split() {
        let bytes = sealed(&frames());
        for size in [1, 2, 3, 7, 64, 1000, bytes.len()] {
            assert_eq!(read(bytes.chunks(size)), Ok(frames()), "pieces of {size}");
        }
    }

    #[test]
    fn a_length_is_not_allocated() {
        let mut inbound = Inbound::new(mac());
        inbound.extend(&(MAX_FRAME as u32).to_le_bytes());
        assert_eq!(inbound.next(), Ok(None));
        assert!(inbound.bytes.capacity() < 1024);
        assert!(read([&(MAX_FRAME as u32 + 1).to_le_bytes()[..]].into_iter()).is_err());
    }

    #[test]
    fn a_frame_that_was_changed_replayed_or_left_out_ends_the_connection() {
        let frames = [Frame::Goodbye, Frame::Leave { group: GroupId::ALL }];
        let bytes = sealed(&frames);
        let (first, second) = bytes.split_at(bytes.len() / 2);
        for at in 0..first.len() {
            let mut changed = first.to_vec();
            changed[at] ^= 1;
            let rest = [&changed[..], second, second].concat();
            let read = read([&rest[..]].into_iter());
            // A frame that became longer is not complete.
            assert!(read.is_err() || read == Ok(vec![]), "byte {at}: {read:?}");
        }
        assert!(read([first, first].into_iter()).is_err(), "replayed");
        assert!(read([second].into_iter()).is_err(), "left out");
        assert_eq!(read([first, second].into_iter()), Ok(frames.to_vec()));
    }

    #[test]
    fn memory_of_a_long_message_is_released() {
        let long = Frame::Message {
            group: GroupId::ALL,
            number: 1,
            bytes: vec![1; 4 << 20],
        };
        let mut inbound = Inbound::new(mac());
        for piece in sealed(&[long.clone(), Frame::Goodbye]).chunks(64 << 10) {
            inbound.extend(piece);
        }
        assert_eq!(inbound.next(), Ok(Some(long)));
        assert_eq!(inbound.next(), Ok(Some(Frame::Goodbye)));
        inbound.extend(&[]);
        assert!(inbound.bytes.capacity() < 1 << 20, "{}", inbound.bytes.capacity());
    }

    proptest! {
        /// What is decoded is about as long as its bytes, and is encoded to a frame.
        #[test]
        fn any_bytes_are_a_frame_or_none(bytes in frame_bytes()) {
            if let Some(frame) = Frame::decode(&bytes) {
                let mut encoded = Vec::new();
                frame.encode(&mut encoded);
                // Bytes that are no UTF-8 become replacement characters of three bytes.
                prop_assert!(encoded.len() <= 4 + 3 * bytes.len());
                prop_assert!(Frame::decode(&encoded[4..]).is_some());
            }
        }

        #[test]
        fn any_stream_ends_in_frames_or_an_error(bytes in vec(any::<u8>(), 0..200), size in 1..50_usize) {
            let _ = read(bytes.chunks(size));
        }
    }

    /// Any bytes behind a kind that there is, and frames of which some bytes are others.
    fn frame_bytes() -> impl Strategy<Value = Vec<u8>> {
        let random = (0..8_u8, vec(any::<u8>(), 0..200)).prop_map(|(kind, rest)| [&[kind], &rest[..]].concat());
        let near = (0..frames().len(), vec((any::<Index>(), any::<u8>()), 0..4)).prop_map(|(which, changes)| {
            let mut bytes = Vec::new();
            frames()[which].encode(&mut bytes);
            bytes.drain(..4);
            for (at, value) in changes {
                let at = at.index(bytes.len());
                bytes[at] = value;
            }
            bytes
        });
        prop_oneof![random, near]
    }
}
