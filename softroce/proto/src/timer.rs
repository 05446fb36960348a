//! Timers: one deadline per queue pair, in a heap with lazy entries.
//!
//! An ACK moves its queue pair's deadline. One that moves later leaves its heap entry in place, to
//! be corrected when popped: [`Timers::next`] may be early, never late.

use core::cmp::Reverse;
use std::collections::BinaryHeap;

use crate::Instant;

#[derive(Debug, Default)]
pub(crate) struct Timers {
    slots: Vec<Slot>,
    /// At least one entry at or before each deadline; the others are stale.
    heap: BinaryHeap<Reverse<(Instant, u32)>>,
}

#[derive(Clone, Copy, Debug, Default)]
struct Slot {
    deadline: Option<Instant>,
    /// The earliest entry in the heap for this slot.
    entry: Option<Instant>,
}

impl Timers {
    pub(crate) fn grow(&mut self, count: usize) {
        if self.slots.len() < count {
            self.slots.resize(count, Slot::default());
        }
    }

    pub(crate) fn set(&mut self, index: u32, deadline: Option<Instant>) {
        let Some(slot) = self.slots.get_mut(index as usize) else {
            return;
        };
        if slot.deadline == deadline {
            return;
        }
        slot.deadline = deadline;
        match deadline {
            Some(at) if slot.entry.is_none_or(|entry| at < entry) => {
                slot.entry = Some(at);
                self.heap.push(Reverse((at, index)));
            }
            Some(_) => {}
            // No wake-up for an idle queue pair.
            None => self.drop_stale(),
        }
    }

    /// When [`expired`](Self::expired) may have a slot: not after the first deadline.
    pub(crate) fn next(&self) -> Option<Instant> {
        self.heap.peek().map(|Reverse((at, _))| *at)
    }

    pub(crate) fn expired(&mut self, now: Instant) -> Option<u32> {
        while let Some(&Reverse((at, index))) = self.heap.peek()
            && at <= now
        {
            let due = self.slots[index as usize]
                .deadline
                .is_some_and(|deadline| deadline <= now);
            self.drop_first(at, index);
            if due {
                self.slots[index as usize].deadline = None;
                return Some(index);
            }
            self.requeue(index);
        }
        None
    }

    /// Drops entries at the front whose slots have no deadline.
    fn drop_stale(&mut self) {
        while let Some(&Reverse((at, index))) = self.heap.peek()
            && self.slots[index as usize].deadline.is_none()
        {
            self.drop_first(at, index);
        }
    }

    fn drop_first(&mut self, at: Instant, index: u32) {
        self.heap.pop();
        let slot = &mut self.slots[index as usize];
        if slot.entry == Some(at) {
            slot.entry = None;
        }
    }

    fn requeue(&mut self, index: u32) {
        let slot = &mut self.slots[index as usize];
        if slot.entry.is_none()
            && let Some(at) = slot.deadline
        {
            slot.entry = Some(at);
            self.heap.push(Reverse((at, index)));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn timers() -> Timers {
        let mut timers = Timers::default();
        timers.grow(3);
        timers
    }

    #[test]
    fn earliest_first() {
        let mut timers = timers();
        timers.set(0, Some(Instant(30)));
        timers.set(1, Some(Instant(10)));
        timers.set(2, Some(Instant(20)));
        assert_eq!(timers.next(), Some(Instant(10)));
        assert_eq!(timers.expired(Instant(9)), None);
        assert_eq!(timers.expired(Instant(20)), Some(1));
        assert_eq!(timers.expired(Instant(20)), Some(2));
        assert_eq!(timers.expired(Instant(20)), None);
        assert_eq!(timers.next(), Some(Instant(30)));
    }

    #[test]
    fn later_and_earlier() {
        let mut timers = timers();
        timers.set(0, Some(Instant(10)));
        timers.set(0, Some(Instant(40)));
        assert_eq!(timers.expired(Instant(39)), None);
        assert_eq!(timers.next(), Some(Instant(40)));
        timers.set(0, Some(Instant(5)));
        assert_eq!(timers.next(), Some(Instant(5)));
        assert_eq!(timers.expired(Instant(5)), Some(0));
        assert_eq!(timers.expired(Instant(100)), None);
        assert_eq!(timers.next(), None);
    }

    #[test]
    fn cleared_deadlines_cause_no_wakeup() {
        let mut timers = timers();
        timers.set(0, Some(Instant(10)));
        timers.set(1, Some(Instant(20)));
        timers.set(0, None);
        assert_eq!(timers.next(), Some(Instant(20)));
        timers.set(1, None);
        assert_eq!(timers.next(), None);
        timers.set(0, Some(Instant(15)));
        assert_eq!(timers.expired(Instant(15)), Some(0));
    }

    #[test]
    fn moving_deadlines_do_not_pile_up() {
        let mut timers = timers();
        timers.set(0, Some(Instant(5)));
        for now in 0..10_000 {
            timers.set(1, Some(Instant(now + 100)));
            timers.set(2, (now % 2 == 0).then_some(Instant(now + 50)));
            if timers.expired(Instant(now)) == Some(0) {
                timers.set(0, Some(Instant(now + 7)));
            }
            assert!(timers.heap.len() <= 6, "{timers:?}");
        }
    }
}
