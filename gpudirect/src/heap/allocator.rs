//! Which bytes of the heap are whose: the same calls give the same offsets on every rank.

use std::collections::BTreeMap;

/// What every allocation begins at a multiple of.
pub(super) const ALIGN: u64 = 256;

/// First fit, by offsets: nothing of it depends on anything but the calls.
#[derive(Debug)]
pub(super) struct Allocator {
    /// Lengths of what is free, by offset; neighbours are one.
    free: BTreeMap<u64, u64>,
    /// Lengths of what is not.
    taken: BTreeMap<u64, u64>,
}

impl Allocator {
    pub(super) fn new(len: u64) -> Self {
        Self {
            free: BTreeMap::from([(0, len)]),
            taken: BTreeMap::new(),
        }
    }

    /// The offset of `len` bytes, rounded up.
    pub(super) fn take(&mut self, len: u64) -> Option<u64> {
        let len = len.max(1).checked_next_multiple_of(ALIGN)?;
        let (at, whole) = self
            .free
            .iter()
            .find(|(_, whole)| **whole >= len)
            .map(|(at, whole)| (*at, *whole))?;
        self.free.remove(&at);
        if whole > len {
            self.free.insert(at + len, whole - len);
        }
        self.taken.insert(at, len);
        Some(at)
    }

    /// Gives back what was taken at `at`; `false` if nothing was.
    pub(super) fn give_back(&mut self, at: u64) -> bool {
        let Some(mut len) = self.taken.remove(&at) else {
            return false;
        };
        if let Some(next) = self.free.remove(&(at + len)) {
            len += next;
        }
        match self.free.range_mut(..at).next_back() {
            Some((before, whole)) if before + *whole == at => *whole += len,
            _ => {
                self.free.insert(at, len);
            }
        }
        true
    }

    /// The longest that can be had now.
    pub(super) fn longest(&self) -> u64 {
        self.free.values().copied().max().unwrap_or(0)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn neighbours_are_put_together() {
        let mut heap = Allocator::new(4 * ALIGN);
        let all: Vec<_> = (0..4).map(|_| heap.take(ALIGN).unwrap()).collect();
        assert_eq!(heap.take(1), None);
        for at in [1, 3, 2, 0] {
            assert!(heap.give_back(all[at]));
        }
        assert!(!heap.give_back(0));
        assert_eq!(heap.take(4 * ALIGN), Some(0));
        assert_eq!(heap.take(u64::MAX), None);
    }

    proptest! {
        /// Nothing overlaps, two heaps agree, and all is one again in the end.
        #[test]
        fn calls_decide_alone(calls in prop::collection::vec((any::<bool>(), 0u64..5000), 1..200)) {
            const LEN: u64 = 64 << 10;
            let (mut one, mut other) = (Allocator::new(LEN), Allocator::new(LEN));
            let mut taken: Vec<(u64, u64)> = Vec::new();
            for (takes, number) in calls {
                if takes || taken.is_empty() {
                    let at = one.take(number);
                    prop_assert_eq!(at, other.take(number));
                    let Some(at) = at else {
                        prop_assert!(one.longest() < number.max(1).next_multiple_of(ALIGN));
                        continue;
                    };
                    prop_assert!(at % ALIGN == 0 && at + number <= LEN);
                    prop_assert!(taken.iter().all(|(start, len)| at + number.max(1) <= *start || start + len <= at));
                    taken.push((at, number.max(1)));
                } else {
                    let (at, _) = taken.swap_remove(number as usize % taken.len());
                    prop_assert!(one.give_back(at) && other.give_back(at));
                }
            }
            for (at, _) in taken {
                prop_assert!(one.give_back(at));
            }
            prop_assert_eq!(one.longest(), LEN);
        }
    }
}
