//! The event queue of a simulation: by time, and events of one time in scheduling order.

use std::cmp::{Ordering, Reverse};
use std::collections::BinaryHeap;

use doorbell_roce_proto::Instant;

/// Events in virtual time.
pub struct EventQueue<E> {
    heap: BinaryHeap<Reverse<Scheduled<E>>>,
    scheduled: u64,
}

impl<E> EventQueue<E> {
    /// Adds an event.
    pub fn schedule(&mut self, at: Instant, event: E) {
        self.scheduled += 1;
        self.heap.push(Reverse(Scheduled {
            at,
            order: self.scheduled,
            event,
        }));
    }

    /// The time of the next event.
    pub fn next_at(&self) -> Option<Instant> {
        self.heap.peek().map(|Reverse(next)| next.at)
    }

    /// Removes the next event; returns it with its time.
    pub fn pop(&mut self) -> Option<(Instant, E)> {
        self.heap.pop().map(|Reverse(next)| (next.at, next.event))
    }
}

impl<E> Default for EventQueue<E> {
    fn default() -> Self {
        Self {
            heap: BinaryHeap::new(),
            scheduled: 0,
        }
    }
}

struct Scheduled<E> {
    at: Instant,
    order: u64,
    event: E,
}

impl<E> PartialEq for Scheduled<E> {
    fn eq(&self, other: &Self) -> bool {
        self.order == other.order
    }
}

impl<E> Eq for Scheduled<E> {}

impl<E> PartialOrd for Scheduled<E> {
    fn partial_cmp(&self, other: &Self) -> Option<Ordering> {
        Some(self.cmp(other))
    }
}

impl<E> Ord for Scheduled<E> {
    fn cmp(&self, other: &Self) -> Ordering {
        (self.at, self.order).cmp(&(other.at, other.order))
    }
}
