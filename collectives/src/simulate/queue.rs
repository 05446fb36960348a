//! The event queue, ordered by time and then by insertion. Events of one time share an entry of the
//! heap: the few times used last are compared first.

use core::cmp::Reverse;
use std::collections::BinaryHeap;

/// Recent times that are compared before a new entry is pushed.
const RECENT: usize = 4;

pub(super) struct Queue {
    /// Time, insertion order, bucket.
    heap: BinaryHeap<Reverse<(u64, u64, u32)>>,
    buckets: Vec<Vec<u32>>,
    spare: Vec<u32>,
    /// Times and buckets used last; a bucket is removed when it is popped.
    recent: [Option<(u64, u32)>; RECENT],
    next: usize,
    made: u64,
}

impl Queue {
    pub(super) fn new() -> Self {
        Self {
            heap: BinaryHeap::new(),
            buckets: Vec::new(),
            spare: Vec::new(),
            recent: [None; RECENT],
            next: 0,
            made: 0,
        }
    }

    #[inline]
    pub(super) fn push(&mut self, time: u64, thread: u32) {
        for &(at, bucket) in self.recent.iter().flatten() {
            if at == time {
                self.buckets[bucket as usize].push(thread);
                return;
            }
        }
        let bucket = self.spare.pop().unwrap_or_else(|| {
            self.buckets.push(Vec::new());
            (self.buckets.len() - 1) as u32
        });
        self.buckets[bucket as usize].push(thread);
        self.heap.push(Reverse((time, self.made, bucket)));
        self.made += 1;
        self.recent[self.next] = Some((time, bucket));
        self.next = (self.next + 1) % RECENT;
    }

    /// Moves the earliest entry's threads into `into`, emptied first, and returns its time.
    pub(super) fn pop(&mut self, into: &mut Vec<u32>) -> Option<u64> {
        into.clear();
        let Reverse((time, _, bucket)) = self.heap.pop()?;
        for entry in &mut self.recent {
            if matches!(entry, Some((_, known)) if *known == bucket) {
                *entry = None;
            }
        }
        core::mem::swap(into, &mut self.buckets[bucket as usize]);
        self.spare.push(bucket);
        Some(time)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn events_come_in_the_order_of_their_times_and_then_of_their_making() {
        let mut queue = Queue::new();
        for (time, thread) in [(5, 0), (3, 1), (5, 2), (9, 3), (1, 4), (7, 5), (8, 6), (5, 7), (3, 8)] {
            queue.push(time, thread);
        }
        let (mut found, mut batch) = (Vec::new(), Vec::new());
        while let Some(time) = queue.pop(&mut batch) {
            found.extend(batch.iter().map(|&thread| (time, thread)));
            if found.ends_with(&[(3, 8)]) {
                queue.push(3, 9);
            }
        }
        let wanted = [
            (1, 4),
            (3, 1),
            (3, 8),
            (3, 9),
            (5, 0),
            (5, 2),
            (5, 7),
            (7, 5),
            (8, 6),
            (9, 3),
        ];
        assert_eq!(found, wanted);
    }
}
