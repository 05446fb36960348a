//! The protocol of a shm ring: what each end does to the shared words (layout in `layout`).
//!
//! Positions count records and never wrap; a position's slot is its lower bits. A slot is full when
//! its *tag*, stored last, is its position + 1: a waiting consumer reads one cache line. Tags are
//! in slots only, so no byte of a message is taken for one. The consumer returns *credits* (free
//! slots and bulk space) by advancing `head`.
//!
//! Publishing, consuming, revoking and both ends' sleep are proved by the models in
//! `shm_ring/ring/model.rs`. Memory that a record refers to belongs to the sender's application and
//! is treated as registered memory.

use crate::sync::{Ordering, fence};

use super::CorruptRing;

/// A trait because of the models: loom's atomics cannot be in shared memory.
pub(crate) trait SharedWord {
    fn load(&self, ordering: Ordering) -> u64;
    fn store(&self, value: u64, ordering: Ordering);
    fn swap(&self, value: u64, ordering: Ordering) -> u64;
}

macro_rules! word {
    ($atomic:ty) => {
        impl SharedWord for $atomic {
            fn load(&self, ordering: Ordering) -> u64 {
                self.load(ordering)
            }

            #[inline]
            fn store(&self, value: u64, ordering: Ordering) {
                self.store(value, ordering);
            }

            fn swap(&self, value: u64, ordering: Ordering) -> u64 {
                self.swap(value, ordering)
            }
        }
    };
}

word!(std::sync::atomic::AtomicU64);
#[cfg(doorbell_loom)]
word!(crate::sync::AtomicU64);

/// The words of a ring. Slot indices are below the constant [`slots`](RingWords::slots).
pub(crate) trait RingWords {
    type Word: SharedWord;

    /// The number of slots: a power of two.
    fn slots(&self) -> u64;
    /// The position + 1 of the record in a slot.
    fn tag(&self, slot: u64) -> &Self::Word;
    /// Not 0: the record in a slot was revoked.
    fn revoked(&self, slot: u64) -> &Self::Word;
    /// The position up to which the consumer has returned credits.
    fn head(&self) -> &Self::Word;
    /// Not 0: the consumer sleeps, or is about to.
    fn asleep(&self) -> &Self::Word;
    /// Not 0: the producer waits for credits.
    fn credit_wanted(&self) -> &Self::Word;
}

pub(super) fn slot(words: &impl RingWords, position: u64) -> u64 {
    position & (words.slots() - 1)
}

#[derive(Debug, Default)]
pub(crate) struct Producer {
    tail: u64,
    /// The consumer's head, as last read.
    head: u64,
}

impl Producer {
    pub(crate) fn tail(&self) -> u64 {
        self.tail
    }

    pub(crate) fn head(&self) -> u64 {
        self.head
    }

    /// Whether the next slot is known to be free; [`refresh`](Self::refresh) updates that.
    pub(crate) fn has_slot(&self, words: &impl RingWords) -> bool {
        self.tail - self.head < words.slots()
    }

    /// Reads the head: slots before it may be written again. Fails when it is impossible.
    pub(crate) fn refresh(&mut self, words: &impl RingWords) -> Result<(), CorruptRing> {
        let head = words.head().load(Ordering::Acquire);
        if head.wrapping_sub(self.head) > self.tail - self.head {
            return Err(CorruptRing("it consumed records that were never sent"));
        }
        self.head = head;
        Ok(())
    }

    pub(crate) fn publish(&mut self, words: &impl RingWords) {
        let slot = slot(words, self.tail);
        self.tail += 1;
        // Releases the slot's content and the memory that it refers to.
        words.tag(slot).store(self.tail, Ordering::Release);
    }

    /// After publishing: whether the consumer must be woken. Once for each sleep.
    pub(crate) fn must_wake(&self, words: &impl RingWords) -> bool {
        // With the fence in `Consumer::sleep`: either the flag is seen here, or the record there.
        fence(Ordering::SeqCst);
        words.asleep().load(Ordering::Relaxed) != 0 && words.asleep().swap(0, Ordering::AcqRel) != 0
    }

    /// Requests a wake-up when credits are returned, and reads [`head`](Self::head) after that.
    pub(crate) fn request_credit_wakeup(&mut self, words: &impl RingWords) -> Result<(), CorruptRing> {
        words.credit_wanted().store(1, Ordering::Relaxed);
        // With the fence in `Consumer::return_credits`: either the progress is seen here, or the
        // flag there.
        fence(Ordering::SeqCst);
        self.refresh(words)
    }

    /// Revokes a record. A receiver that is copying from its references detects it afterwards.
    /// [`revoke_fence`](Self::revoke_fence) follows the last revocation.
    pub(crate) fn revoke(&self, words: &impl RingWords, position: u64) {
        // Its tag, which no other record ever has: so the next record in the slot needs no reset.
        words
            .revoked(slot(words, position))
            .store(position + 1, Ordering::Relaxed);
    }

    /// Orders revocations before later writes to the memory: a copy that reads those detects them.
    pub(crate) fn revoke_fence(&self) {
        fence(Ordering::Release);
    }
}

/// Records per return of credits: more often the producer's CPU fetches the word again and again.
const BATCH: u64 = 32;

/// The weight of records at which credits are due: their bytes, if a producer counts them against
/// [`IN_FLIGHT`](super::IN_FLIGHT). A record that used the bulk area weighs as much by itself. A
/// producer that waits has several times as many bytes in flight, so that it is woken by them.
pub(crate) const CREDIT: u64 = 1 << 20;

#[derive(Debug, Default)]
pub(crate) struct Consumer {
    next: u64,
    /// Retained records before it: handled, and not released.
    retained: u64,
    published: u64,
    /// The last head published with a fence, so that a waiting producer is woken.
    credited: u64,
    /// What the records consumed since then weigh: see [`CREDIT`].
    weight: u64,
}

impl Consumer {
    pub(crate) fn next(&self) -> u64 {
        self.next
    }

    /// The position up to which all are released.
    pub(crate) fn done(&self) -> u64 {
        self.next - self.retained
    }

    /// Whether the next record is there, and all of it visible.
    pub(crate) fn ready(&self, words: &impl RingWords) -> bool {
        // A retained slot has its own record's tag, which is never the next one's.
        words.tag(slot(words, self.next)).load(Ordering::Acquire) == self.next + 1
    }

    /// Consumes the next record. Whether the producer waits for credits and must be woken.
    pub(crate) fn consumed(&mut self, words: &impl RingWords, weight: u64) -> bool {
        self.next += 1;
        self.weight += weight;
        if self.retained > 0 {
            // In order: released behind the retained ones.
            self.retained += 1;
            return false;
        }
        self.is_due(words) && self.return_credits(words)
    }

    /// Retains the next record until it is [released](Self::release), with all behind it.
    pub(crate) fn retain_next(&mut self, weight: u64) {
        self.next += 1;
        self.retained += 1;
        self.weight += weight;
    }

    /// Releases the oldest retained record. As [`consumed`](Self::consumed).
    pub(crate) fn release(&mut self, words: &impl RingWords) -> bool {
        self.retained = self.retained.saturating_sub(1);
        (self.retained == 0 || self.is_due(words)) && self.return_credits(words)
    }

    fn is_due(&self, words: &impl RingWords) -> bool {
        self.weight >= CREDIT || self.done() - self.credited >= BATCH.min(words.slots())
    }

    /// No record is there, or the consumer sleeps: publishes the head without a fence. A producer
    /// that read an older head does not wait for these credits: they are less than a batch of
    /// slots, weigh less than [`CREDIT`], and it had more of both.
    pub(crate) fn publish_head(&mut self, words: &impl RingWords) {
        if self.published != self.done() {
            self.published = self.done();
            words.head().store(self.published, Ordering::Release);
        }
    }

    /// Returns credits. Whether the producer waits for them and must be woken.
    fn return_credits(&mut self, words: &impl RingWords) -> bool {
        self.published = self.done();
        self.credited = self.published;
        if self.retained == 0 {
            self.weight = 0;
        }
        words.head().store(self.published, Ordering::Release);
        // With the fence in `Producer::request_credit_wakeup`.
        fence(Ordering::SeqCst);
        words.credit_wanted().load(Ordering::Relaxed) != 0 && words.credit_wanted().swap(0, Ordering::AcqRel) != 0
    }

    /// Whether it was revoked: checked after copies from its references, before they count.
    pub(crate) fn was_revoked(words: &impl RingWords, position: u64) -> bool {
        // With the fence in `Producer::revoke_fence`: who read a later byte also reads the flag.
        fence(Ordering::Acquire);
        words.revoked(slot(words, position)).load(Ordering::Relaxed) == position + 1
    }

    /// Before sleeping. `false` when there is a record, so that the caller must not sleep.
    pub(crate) fn sleep(&mut self, words: &impl RingWords) -> bool {
        // The last poll may have ended at its batch's end, with records taken since the head's
        // publication, and no later one comes: a producer would wait for ever for their delivery.
        self.publish_head(words);
        words.asleep().swap(1, Ordering::AcqRel);
        // With the fence in `Producer::must_wake`.
        fence(Ordering::SeqCst);
        if self.ready(words) {
            self.awake(words);
            return false;
        }
        true
    }

    pub(crate) fn awake(&self, words: &impl RingWords) {
        words.asleep().swap(0, Ordering::AcqRel);
    }
}

#[cfg(all(test, doorbell_loom))]
pub(crate) mod model;
