//! The ring between those who ask for puts, a kernel or threads, and the proxy.
//!
//! Who writes takes an index (`head`), waits until its slot is free (`consumed`), and stores the descriptor's words, in any order and without a fence between them. The proxy takes a descriptor when all of its words
//! have the turn's number ([`descriptor`](super::descriptor)), so that it never takes half of one, and publishes how many it has taken (`consumed`) and how many of those are done, without a gap (`completed`).
//!
//! | word | what | written by |
//! |---|---|---|
//! | 0 | `consumed` | the proxy |
//! | 1 | `completed` | the proxy |
//! | 2 | `failed`: [`Cause`](super::Cause) and index of the first failure; 0 | the proxy |
//! | 3 | `stopped`: 1 when nothing more is taken | the proxy |
//! | 16 | `released`: of a ring that is gated, how many may be taken | a stream |
//! | 32 | `head`, where threads write; that of a kernel lies in the memory of its device | who writes |
//! | 48… | the slots, 8 words each | who writes |

use core::sync::atomic::{AtomicBool, Ordering};
use std::sync::Arc;

use doorbell_cuda::Context;
use parking_lot::Mutex;

use super::descriptor::{DESCRIPTOR_WORDS, Descriptor, NoOperation, turn, turn_before, turn_of};
use super::failure::{Cause, Failed};
use crate::words::Words;

pub(crate) const CONSUMED: usize = 0;
pub(crate) const COMPLETED: usize = 1;
pub(crate) const FAILED: usize = 2;
const STOPPED: usize = 3;
pub(crate) const RELEASED: usize = 16;
pub(crate) const HEAD: usize = 32;
pub(crate) const SLOTS: usize = 48;

/// What the two ends of a ring share.
#[derive(Debug)]
pub(crate) struct Ring {
    pub(crate) words: Words,
    pub(crate) slots: u64,
    /// Whether only what a stream has released is taken.
    gated: bool,
    /// Whether nobody writes any more.
    closed: AtomicBool,
    /// The first failure, in words.
    failure: Mutex<Option<Failed>>,
}

impl Ring {
    /// One of `slots`, rounded up to a power of two, for threads.
    pub(crate) fn plain(slots: u32) -> Arc<Self> {
        let slots = rounded(slots);
        Self::over(Words::plain(words(slots)), slots, false)
    }

    /// The same in pinned memory, for kernels or, if it is `gated`, for streams.
    pub(crate) fn pinned(context: &Context, slots: u32, gated: bool) -> Result<Arc<Self>, doorbell_cuda::Error> {
        let slots = rounded(slots);
        Ok(Self::over(Words::pinned(context, words(slots))?, slots, gated))
    }

    fn over(words: Words, slots: u64, gated: bool) -> Arc<Self> {
        Arc::new(Self {
            words,
            slots,
            gated,
            closed: AtomicBool::new(false),
            failure: Mutex::default(),
        })
    }

    /// The first word of the slot of `index`.
    #[inline]
    pub(crate) fn slot(&self, index: u64) -> usize {
        SLOTS + (index & (self.slots - 1)) as usize * DESCRIPTOR_WORDS
    }

    /// How many are done, without a gap.
    #[inline]
    pub(crate) fn completed(&self) -> u64 {
        self.words.at(COMPLETED).load(Ordering::Acquire)
    }

    /// Nobody writes any more: the proxy forgets it when what it has is done.
    pub(crate) fn close(&self) {
        self.closed.store(true, Ordering::Release);
    }

    /// The first failure.
    pub(crate) fn failure(&self) -> Option<Failed> {
        // The word is looked at first: nothing has failed as a rule.
        (self.words.at(FAILED).load(Ordering::Acquire) != 0)
            .then(|| self.failure.lock().clone())
            .flatten()
    }

    /// Notes a failure, if it is the first.
    pub(crate) fn fail(&self, index: u64, failed: Failed) {
        let mut first = self.failure.lock();
        if first.is_none() {
            let word = failed.cause.word(index);
            *first = Some(failed);
            self.words.at(FAILED).store(word, Ordering::Release);
        }
    }

    /// Nothing more is taken: whoever waits for that is let go.
    pub(crate) fn stop(&self) {
        self.words.at(STOPPED).store(1, Ordering::Release);
    }

    /// Writes a descriptor for threads, whose index is not taken yet. `None` while the ring is full.
    pub(crate) fn try_write(&self, descriptor: &Descriptor) -> Option<u64> {
        let head = self.words.at(HEAD);
        let mut index = head.load(Ordering::Relaxed);
        loop {
            let consumed = self.words.at(CONSUMED).load(Ordering::Acquire);
            if index.wrapping_sub(consumed) >= self.slots {
                // By an old head it may only seem full.
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
        // What was written before, to be put by this, is seen by whoever takes it: each of the words says so, as any of them may be looked at first.
        for (at, word) in descriptor.encode(turn(index, self.slots)).into_iter().enumerate() {
            self.words.at(first + at).store(word, Ordering::Release);
        }
        Some(index)
    }
}

fn rounded(slots: u32) -> u64 {
    u64::from(slots.clamp(2, 1 << 20).next_power_of_two())
}

/// The words of a ring of so many slots.
fn words(slots: u64) -> usize {
    SLOTS + slots as usize * DESCRIPTOR_WORDS
}

/// What lies next in a ring.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum Next {
    /// Nothing, or not all of it.
    Nothing,
    /// A descriptor; or words that are none, of which the slot is taken as well.
    Descriptor(Result<Descriptor, NoOperation>),
}

/// The proxy's end of a ring.
#[derive(Debug)]
pub(crate) struct Consumer {
    pub(crate) ring: Arc<Ring>,
    /// The index of what is taken next.
    next: u64,
    /// As published.
    consumed: u64,
    completed: u64,
    /// Whether what is in each slot, once taken, is done.
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

    /// What can be taken now. So many may be under way as there are slots: nothing is taken before the oldest of them is done.
    #[inline]
    pub(crate) fn peek(&mut self) -> Next {
        let ring = &*self.ring;
        if self.torn || self.next - self.completed >= ring.slots {
            return Next::Nothing;
        }
        if ring.gated {
            let released = ring.words.at(RELEASED).load(Ordering::Acquire);
            // Counters that have wrapped, or nonsense, are nothing to take by.
            if released.wrapping_sub(self.next) as i64 <= 0 {
                return Next::Nothing;
            }
        }
        let (expected, before) = (turn(self.next, ring.slots), turn_before(self.next, ring.slots));
        let first = ring.slot(self.next);
        let mut words = [0; DESCRIPTOR_WORDS];
        for (at, word) in words.iter_mut().enumerate() {
            *word = ring.words.at(first + at).load(Ordering::Acquire);
            let turn = turn_of(*word);
            if turn == expected {
                continue;
            }
            if turn != before {
                self.torn = true;
                ring.fail(
                    self.next,
                    Failed::new(Cause::Torn, format_args!("put {} of a queue", self.next)),
                );
                ring.stop();
            }
            return Next::Nothing;
        }
        Next::Descriptor(Descriptor::decode(&words))
    }

    /// The index of what is taken next.
    #[inline]
    pub(crate) fn ring_index(&self) -> u64 {
        self.next
    }

    /// Takes what was peeked at: gives its index. [`publish`](Self::publish) tells the writers.
    #[inline]
    pub(crate) fn take(&mut self) -> u64 {
        let index = self.next;
        self.done[(index & (self.ring.slots - 1)) as usize] = false;
        self.next += 1;
        index
    }

    /// What was taken as `index` is done. [`publish`](Self::publish) tells the writers.
    #[inline]
    pub(crate) fn finish(&mut self, index: u64) {
        self.done[(index & (self.ring.slots - 1)) as usize] = true;
        while self.completed < self.next && self.done[(self.completed & (self.ring.slots - 1)) as usize] {
            self.completed += 1;
        }
    }

    /// Says how many have been taken, and how many of them are done.
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

    /// How many have been taken and are not done.
    pub(crate) fn under_way(&self) -> u64 {
        self.next - self.completed
    }

    /// Whether it can be forgotten: nobody writes any more, and all that threads have written is done, also what a stream has yet to release.
    pub(crate) fn is_over(&self) -> bool {
        self.ring.closed.load(Ordering::Acquire)
            && self.under_way() == 0
            && self.next >= self.ring.words.at(HEAD).load(Ordering::Acquire)
    }

    /// The proxy goes, or the ring: what is under way has failed, and whoever waits is told so and let go.
    pub(crate) fn abandon(&mut self) {
        let what = "a queue of puts";
        self.ring.fail(self.next, Failed::new(Cause::Stopped, what));
        self.ring.stop();
        self.completed = self.next;
        self.publish();
        // Streams wait for counts alone: beyond all that was ever asked for, by the signed difference, they wait for nothing.
        if self.ring.gated {
            let head = self.ring.words.at(HEAD).load(Ordering::Acquire);
            self.ring.words.at(COMPLETED).store(head, Ordering::Release);
        }
    }
}

#[cfg(test)]
mod tests;
