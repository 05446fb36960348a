//! The request ring between producers (a kernel, or host threads) and the proxy.
//!
//! A producer takes an index (`head`), waits until its slot is free (`consumed`), and stores the
//! descriptor's words in any order, without fences. The proxy consumes a descriptor when all of its
//! words have the expected lap ([`descriptor`](super::descriptor)), and publishes how many it has
//! consumed and how many of those are complete without gaps (`completed`).
//!
//! | word | meaning | written by |
//! |---|---|---|
//! | 0 | `consumed` | the proxy |
//! | 1 | `completed` | the proxy |
//! | 2 | `failed`: [`FailureCause`](super::FailureCause) and index of the first, or 0 | the proxy |
//! | 3 | `stopped`: 1 when nothing more is consumed | the proxy |
//! | 16 | `released`: for a gated ring, how many may be consumed | a stream |
//! | 32 | `head` for host threads; that of a kernel is in its device's memory | the producers |
//! | 48… | the slots, 8 words each | the producers |
//!
//! A property test checks the orders of a writer's stores; loom cannot model memory of devices.

use core::sync::atomic::{AtomicBool, Ordering};
use std::sync::Arc;

use doorbell_cuda::Context;
use parking_lot::Mutex;

use super::descriptor::{DESCRIPTOR_WORDS, Descriptor, InvalidDescriptor, lap, lap_of, previous_lap};
use super::failure::{FailureCause, RequestFailure};
use crate::words::SharedWords;

pub(crate) const CONSUMED: usize = 0;
pub(crate) const COMPLETED: usize = 1;
pub(crate) const FAILED: usize = 2;
const STOPPED: usize = 3;
pub(crate) const RELEASED: usize = 16;
pub(crate) const HEAD: usize = 32;
pub(crate) const SLOTS: usize = 48;

#[derive(Debug)]
pub(crate) struct Ring {
    pub(crate) words: SharedWords,
    pub(crate) slots: u64,
    /// Whether only descriptors released by a stream are consumed.
    gated: bool,
    closed: AtomicBool,
    failure: Mutex<Option<RequestFailure>>,
}

impl Ring {
    /// A ring of `slots` slots, rounded up to a power of two, for host threads.
    pub(crate) fn plain(slots: u32) -> Arc<Self> {
        let slots = rounded(slots);
        Self::over(SharedWords::plain(words(slots)), slots, false)
    }

    /// The same in pinned memory, for kernels or, if `gated`, for streams.
    pub(crate) fn pinned(context: &Context, slots: u32, gated: bool) -> Result<Arc<Self>, doorbell_cuda::Error> {
        let slots = rounded(slots);
        Ok(Self::over(SharedWords::pinned(context, words(slots))?, slots, gated))
    }

    fn over(words: SharedWords, slots: u64, gated: bool) -> Arc<Self> {
        Arc::new(Self {
            words,
            slots,
            gated,
            closed: AtomicBool::new(false),
            failure: Mutex::default(),
        })
    }

    #[inline]
    pub(crate) fn slot(&self, index: u64) -> usize {
        SLOTS + (index & (self.slots - 1)) as usize * DESCRIPTOR_WORDS
    }

    #[inline]
    pub(crate) fn completed(&self) -> u64 {
        self.words.at(COMPLETED).load(Ordering::Acquire)
    }

    /// Marks all producers as gone: the proxy drops it once its requests are complete.
    pub(crate) fn close(&self) {
        self.closed.store(true, Ordering::Release);
    }

    pub(crate) fn failure(&self) -> Option<RequestFailure> {
        // Fast path: usually nothing has failed, and the word says so without the lock.
        (self.words.at(FAILED).load(Ordering::Acquire) != 0)
            .then(|| self.failure.lock().clone())
            .flatten()
    }

    pub(crate) fn fail(&self, index: u64, failed: RequestFailure) {
        let mut first = self.failure.lock();
        if first.is_none() {
            let word = failed.cause.word(index);
            *first = Some(failed);
            self.words.at(FAILED).store(word, Ordering::Release);
        }
    }

    /// Nothing more is consumed: waiting producers are released.
    pub(crate) fn stop(&self) {
        self.words.at(STOPPED).store(1, Ordering::Release);
    }

    /// Submits a descriptor for a host thread. `None` if the ring is full.
    pub(crate) fn try_write(&self, descriptor: &Descriptor) -> Option<u64> {
        let head = self.words.at(HEAD);
        let mut index = head.load(Ordering::Relaxed);
        loop {
            let consumed = self.words.at(CONSUMED).load(Ordering::Acquire);
            if index.wrapping_sub(consumed) >= self.slots {
                // A stale head can make the ring seem full.
                let now = head.load(Ordering::Relaxed);
                if now == index {
                    return None;
                }
                index = now;
                continue;
            }
            match head.compare_exchange_weak(index, index + 1, Ordering::Relaxed, Ordering::Relaxed) {
                Ok(_) => break,
                Err(now) => index = now,
            }
        }
        let first = self.slot(index);
        // Release on every word: the proxy may acquire the caller's writes by any of them.
        for (at, word) in descriptor.encode(lap(index, self.slots)).into_iter().enumerate() {
            self.words.at(first + at).store(word, Ordering::Release);
        }
        Some(index)
    }
}

fn rounded(slots: u32) -> u64 {
    u64::from(slots.clamp(2, 1 << 20).next_power_of_two())
}

fn words(slots: u64) -> usize {
    SLOTS + slots as usize * DESCRIPTOR_WORDS
}

#[derive(Debug, PartialEq, Eq)]
pub(crate) enum Peeked {
    /// None, or an incomplete one.
    Empty,
    /// A complete entry; an invalid one consumes its slot too.
    Descriptor(Result<Descriptor, InvalidDescriptor>),
}

#[derive(Debug)]
pub(crate) struct Consumer {
    pub(crate) ring: Arc<Ring>,
    next: u64,
    /// As last published.
    consumed: u64,
    completed: u64,
    /// Per slot: whether its consumed descriptor is complete.
    done: Box<[bool]>,
    torn: bool,
}

impl Consumer {
    pub(crate) fn new(ring: Arc<Ring>) -> Self {
        Self {
            next: 0,
            consumed: 0,
            completed: 0,
            done: vec![false; ring.slots as usize].into(),
            torn: false,
            ring,
        }
    }

    /// Reads the next entry, unless as many descriptors as there are slots are in flight.
    #[inline]
    pub(crate) fn peek(&mut self) -> Peeked {
        let ring = &*self.ring;
        if self.torn || self.next - self.completed >= ring.slots {
            return Peeked::Empty;
        }
        if ring.gated {
            let released = ring.words.at(RELEASED).load(Ordering::Acquire);
            // A wrapped or invalid count releases nothing.
            if released.wrapping_sub(self.next) as i64 <= 0 {
                return Peeked::Empty;
            }
        }
        let (expected, before) = (lap(self.next, ring.slots), previous_lap(self.next, ring.slots));
        let first = ring.slot(self.next);
        let mut words = [0; DESCRIPTOR_WORDS];
        for (at, word) in words.iter_mut().enumerate() {
            *word = ring.words.at(first + at).load(Ordering::Acquire);
            let lap = lap_of(*word);
            if lap == expected {
                continue;
            }
            if lap != before {
                self.torn = true;
                ring.fail(
                    self.next,
                    RequestFailure::new(FailureCause::Torn, format_args!("put {} of a queue", self.next)),
                );
                ring.stop();
            }
            return Peeked::Empty;
        }
        Peeked::Descriptor(Descriptor::decode(&words))
    }

    #[inline]
    pub(crate) fn ring_index(&self) -> u64 {
        self.next
    }

    /// Consumes the peeked entry; producers see it after [`publish`](Self::publish).
    #[inline]
    pub(crate) fn take(&mut self) -> u64 {
        let index = self.next;
        self.done[(index & (self.ring.slots - 1)) as usize] = false;
        self.next += 1;
        index
    }

    /// Completes the descriptor `index`. Producers see it after [`publish`](Self::publish).
    #[inline]
    pub(crate) fn finish(&mut self, index: u64) {
        self.done[(index & (self.ring.slots - 1)) as usize] = true;
        while self.completed < self.next && self.done[(self.completed & (self.ring.slots - 1)) as usize] {
            self.completed += 1;
        }
    }

    #[inline]
    pub(crate) fn publish(&mut self) {
        let words = &self.ring.words;
        if self.consumed != self.next {
            self.consumed = self.next;
            words.at(CONSUMED).store(self.next, Ordering::Release);
        }
        if words.at(COMPLETED).load(Ordering::Relaxed) != self.completed {
            words.at(COMPLETED).store(self.completed, Ordering::Release);
        }
    }

    pub(crate) fn in_flight(&self) -> u64 {
        self.next - self.completed
    }

    /// Whether all producers are gone and all they wrote is complete, released by a stream or not.
    pub(crate) fn is_finished(&self) -> bool {
        self.ring.closed.load(Ordering::Acquire)
            && self.in_flight() == 0
            && self.next >= self.ring.words.at(HEAD).load(Ordering::Acquire)
    }

    /// The proxy or the ring stops: requests in flight fail, and waiting producers are released.
    pub(crate) fn abandon(&mut self) {
        let what = "a queue of puts";
        self.ring
            .fail(self.next, RequestFailure::new(FailureCause::Stopped, what));
        self.ring.stop();
        self.completed = self.next;
        self.publish();
        // Streams wait for counts only, by the signed difference: advance them past all submitted.
        if self.ring.gated {
            let head = self.ring.words.at(HEAD).load(Ordering::Acquire);
            self.ring.words.at(COMPLETED).store(head, Ordering::Release);
        }
    }
}

#[cfg(test)]
mod tests;
