//! Numbers that peers see but cannot predict (decision 070): SipHash, whose key they do not reveal.

use std::fmt;
use std::hash::{BuildHasher, Hasher, RandomState};

/// The secret from which the numbers of an endpoint and its connection manager follow.
#[derive(Clone, Copy, PartialEq, Eq)]
pub struct NumberKey([u64; 2]);

/// What numbers are for: those of different purposes are unrelated.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Purpose {
    QpnBlock,
    /// The order of the numbers of the block with this index.
    QpnOrder(u16),
    CommunicationId,
    Transaction,
    Psn,
}

impl NumberKey {
    /// From the operating system.
    pub fn random() -> Self {
        let random = RandomState::new();
        Self([0, 1].map(|half: u8| random.hash_one(half)))
    }

    /// The number of a purpose with this index.
    pub(crate) fn draw(self, purpose: Purpose, index: u64) -> u64 {
        let (purpose, block) = match purpose {
            Purpose::QpnBlock => (0, 0),
            Purpose::QpnOrder(block) => (1, block),
            Purpose::CommunicationId => (2, 0),
            Purpose::Transaction => (3, 0),
            Purpose::Psn => (4, 0),
        };
        #[expect(
            deprecated,
            reason = "the only keyed hash of the standard library whose key can be given"
        )]
        let mut hasher = std::hash::SipHasher::new_with_keys(self.0[0], self.0[1]);
        hasher.write_u64(purpose << 32 | u64::from(block));
        hasher.write_u64(index);
        hasher.finish()
    }

    /// A permutation of the numbers of `bits` bits, which are even: a Feistel network, each round
    /// of which can be undone.
    pub(crate) fn permute(self, purpose: Purpose, bits: u32, number: u32) -> u32 {
        const ROUNDS: u64 = 8;
        let half = bits / 2;
        let mask = (1 << half) - 1;
        let (mut left, mut right) = (number >> half & mask, number & mask);
        for round in 0..ROUNDS {
            let mixed = self.draw(purpose, round << 32 | u64::from(right)) as u32;
            (left, right) = (right, left ^ mixed & mask);
        }
        left << half | right
    }
}

/// A known key, for tests.
impl From<u64> for NumberKey {
    fn from(seed: u64) -> Self {
        Self([seed, 0])
    }
}

impl fmt::Debug for NumberKey {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("NumberKey")
    }
}
