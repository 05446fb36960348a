//! The heap's first-fit allocator: the same calls give the same offsets on every rank.

use std::collections::BTreeMap;

pub(super) const ALIGN: u64 = 256;

#[derive(Debug)]
pub(super) struct Allocator {
    /// Lengths of free ranges by offset; adjacent ones are merged.
    free: BTreeMap<u64, u64>,
    allocated: BTreeMap<u64, u64>,
}

impl Allocator {
    pub(super) fn new(len: u64) -> Self {
        Self {
            free: BTreeMap::from([(0, len)]),
            allocated: BTreeMap::new(),
        }
    }

    pub(super) fn alloc(&mut self, len: u64) -> Option<u64> {
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
        self.allocated.insert(at, len);
        Some(at)
    }

    /// Frees the allocation at `at`; `false` if there is none.
    pub(super) fn free(&mut self, at: u64) -> bool {
        let Some(mut len) = self.allocated.remove(&at) else {
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

    pub(super) fn longest_free(&self) -> u64 {
        self.free.values().copied().max().unwrap_or(0)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn adjacent_free_ranges_merge() {
        let mut heap = Allocator::new(4 * ALIGN);
        let all: Vec<_> = (0..4).map(|_| heap.alloc(ALIGN).unwrap()).collect();
        assert_eq!(heap.alloc(1), None);
        for at in [1, 3, 2, 0] {
            assert!(heap.free(all[at]));
        }
        assert!(!heap.free(0));
        assert_eq!(heap.alloc(4 * ALIGN), Some(0));
        assert_eq!(heap.alloc(u64::MAX), None);
    }

    proptest! {
        /// No overlap; two heaps agree; the free ranges merge into one in the end.
        #[test]
        fn allocation_is_deterministic(calls in prop::collection::vec((any::<bool>(), 0u64..5000), 1..200)) {
            const LEN: u64 = 64 << 10;
            let (mut one, mut other) = (Allocator::new(LEN), Allocator::new(LEN));
            let mut allocated: Vec<(u64, u64)> = Vec::new();
            for (takes, number) in calls {
                if takes || allocated.is_empty() {
                    let at = one.alloc(number);
                    prop_assert_eq!(at, other.alloc(number));
                    let Some(at) = at else {
                        prop_assert!(one.longest_free() < number.max(1).next_multiple_of(ALIGN));
                        continue;
                    };
                    prop_assert!(at % ALIGN == 0 && at + number <= LEN);
                    prop_assert!(allocated.iter().all(|(start, len)| at + number.max(1) <= *start || start + len <= at));
                    allocated.push((at, number.max(1)));
                } else {
                    let (at, _) = allocated.swap_remove(number as usize % allocated.len());
                    prop_assert!(one.free(at) && other.free(at));
                }
            }
            for (at, _) in allocated {
                prop_assert!(one.free(at));
            }
            prop_assert_eq!(one.longest_free(), LEN);
        }
    }
}
