//! The payload of a verified test: bytes derived from a seed, the message's number and the offset,
//! so the receiver can compute every expected byte.

use std::fmt;

#[derive(Clone, Copy, Debug)]
pub(crate) struct Pattern {
    base: u64,
}

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct Mismatch {
    pub(crate) bytes: u64,
    /// Queue pair, counted from 0.
    pub(crate) qp_index: usize,
    /// Message, counted from 0 on its queue pair, warm-up included.
    pub(crate) iteration: u64,
    /// Offset of the first wrong byte.
    pub(crate) offset: u64,
    pub(crate) expected: u8,
    pub(crate) found: u8,
}

impl Mismatch {
    pub(crate) fn at(
        bytes: u64,
        qp_index: usize,
        iteration: u64,
        (offset, expected, found): (u64, u8, u8),
    ) -> Mismatch {
        Mismatch {
            bytes,
            qp_index,
            iteration,
            offset,
            expected,
            found,
        }
    }
}

impl fmt::Display for Mismatch {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(
            f,
            "wrong data: size {} B, queue pair {}, iteration {}, offset {}: expected {:#04x}, found {:#04x}",
            self.bytes, self.qp_index, self.iteration, self.offset, self.expected, self.found
        )
    }
}

impl Pattern {
    pub(crate) fn new(seed: u64, qp_index: usize, iteration: u64) -> Pattern {
        Pattern {
            base: mix(mix(mix(seed) ^ qp_index as u64) ^ iteration),
        }
    }

    /// The eight bytes at offset 8·`index`.
    fn word(self, index: u64) -> [u8; 8] {
        mix(self.base ^ index).to_le_bytes()
    }

    pub(crate) fn fill(self, payload: &mut [u8]) {
        for (index, word) in (0..).zip(payload.chunks_mut(8)) {
            word.copy_from_slice(&self.word(index)[..word.len()]);
        }
    }

    /// The last byte of a payload of `bytes` bytes (at least one).
    pub(crate) fn last_byte(self, bytes: u64) -> u8 {
        let last = bytes.saturating_sub(1);
        self.word(last / 8)[(last % 8) as usize]
    }

    /// Writes bytes that all differ from the payload, so that a byte that never arrived is found.
    pub(crate) fn fill_inverse(self, payload: &mut [u8]) {
        self.fill(payload);
        for byte in payload {
            *byte = !*byte;
        }
    }

    /// Finds the first wrong byte: its offset, the expected and the actual value.
    pub(crate) fn check(self, payload: &[u8]) -> Option<(u64, u8, u8)> {
        for (index, found) in (0..).zip(payload.chunks(8)) {
            let expected = self.word(index);
            if *found != expected[..found.len()] {
                let differs = |(_, (found, expected)): &(u64, (&u8, &u8))| found != expected;
                let at = (0..).zip(found.iter().zip(&expected)).find(differs);
                return at.map(|(within, (found, expected))| (index * 8 + within, *expected, *found));
            }
        }
        None
    }
}

/// The finalizer of splitmix64: every input bit affects every output bit.
fn mix(value: u64) -> u64 {
    let value = value.wrapping_add(0x9e37_79b9_7f4a_7c15);
    let value = (value ^ (value >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    let value = (value ^ (value >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    value ^ (value >> 31)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_filled_payload_passes_and_every_flip_is_found() {
        for len in [1, 7, 8, 9, 64, 100] {
            let pattern = Pattern::new(1, 0, 5);
            let mut payload = vec![0; len];
            pattern.fill(&mut payload);
            assert_eq!(pattern.last_byte(len as u64), payload[len - 1]);
            assert_eq!(pattern.check(&payload), None);
            let mut wrong = payload.clone();
            pattern.fill_inverse(&mut wrong);
            assert!(wrong.iter().zip(&payload).all(|(wrong, right)| wrong != right));
            for at in 0..len {
                let right = payload[at];
                payload[at] ^= 0x10;
                assert_eq!(pattern.check(&payload), Some((at as u64, right, right ^ 0x10)));
                payload[at] = right;
            }
        }
    }

    #[test]
    fn messages_differ_by_seed_qp_and_iteration() {
        let mut first = [0; 64];
        Pattern::new(1, 0, 0).fill(&mut first);
        for other in [Pattern::new(2, 0, 0), Pattern::new(1, 1, 0), Pattern::new(1, 0, 1)] {
            assert!(other.check(&first).is_some());
        }
    }

    #[test]
    fn a_mismatch_names_everything() {
        let said = Mismatch {
            bytes: 64,
            qp_index: 2,
            iteration: 7,
            offset: 9,
            expected: 1,
            found: 255,
        }
        .to_string();
        assert_eq!(
            said,
            "wrong data: size 64 B, queue pair 2, iteration 7, offset 9: expected 0x01, found 0xff"
        );
    }
}
