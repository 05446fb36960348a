//! The order of things in a lane: what each end does to the words that both see. Where those lie is `layout`'s business.
//!
//! Positions count records and never wrap (64 bits); the slot of one is its lower bits. A slot is full when its *tag* is its position + 1, which is stored last: a consumer
//! that waits reads the first cache line of the next record and nothing else. Tags lie in slots only, so that no byte of a message is ever taken for one.

use crate::sync::{Ordering, fence};

use super::Broken;

/// A word that both ends see. A trait for the sake of the models: loom's atomics cannot lie in shared memory.
pub(super) trait Word {
    fn load(&self, ordering: Ordering) -> u64;
    fn store(&self, value: u64, ordering: Ordering);
    fn swap(&self, value: u64, ordering: Ordering) -> u64;
}

macro_rules! word {
    ($atomic:ty) => {
        impl Word for $atomic {
            fn load(&self, ordering: Ordering) -> u64 {
                self.load(ordering)
            }

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

/// The words of a lane. Indices of slots are below [`slots`](Words::slots), which never changes.
pub(super) trait Words {
    type Word: Word;

    /// How many slots there are: a power of two.
    fn slots(&self) -> u64;
    /// The position + 1 of the record in a slot.
    fn tag(&self, slot: u64) -> &Self::Word;
    /// Not 0: the record in a slot was taken back.
    fn revoked(&self, slot: u64) -> &Self::Word;
    /// The position that the consumer has come to.
    fn head(&self) -> &Self::Word;
    /// Not 0: the consumer sleeps, or is about to.
    fn asleep(&self) -> &Self::Word;
    /// Not 0: the producer waits for room.
    fn starved(&self) -> &Self::Word;
}

/// The slot of a position.
pub(super) fn slot(words: &impl Words, position: u64) -> u64 {
    position & (words.slots() - 1)
}

/// The sender's side.
#[derive(Debug, Default)]
pub(super) struct Producer {
    /// The position of the next record.
    tail: u64,
    /// The consumer's, as last seen.
    head: u64,
}

impl Producer {
    pub(super) fn tail(&self) -> u64 {
        self.tail
    }

    pub(super) fn head(&self) -> u64 {
        self.head
    }

    /// Whether the next slot is free, as far as is known here: [`refresh`](Self::refresh) looks.
    pub(super) fn has_slot(&self, words: &impl Words) -> bool {
        self.tail - self.head < words.slots()
    }

    /// Looks how far the consumer has come; all that it has given back may be written again.
    ///
    /// # Errors
    /// When it has come to where it cannot be.
    pub(super) fn refresh(&mut self, words: &impl Words) -> Result<(), Broken> {
        let head = words.head().load(Ordering::Acquire);
        if head.wrapping_sub(self.head) > self.tail - self.head {
            return Err(Broken("it consumed what was never sent"));
        }
        self.head = head;
        Ok(())
    }

    /// Gives the consumer the record that has been written to the slot of [`tail`](Self::tail), which was free.
    pub(super) fn publish(&mut self, words: &impl Words) {
        let slot = slot(words, self.tail);
        self.tail += 1;
        // Carries the slot's content and whatever memory it refers to.
        words.tag(slot).store(self.tail, Ordering::Release);
    }

    /// After publishing: whether the consumer sleeps and has to be rung, which is said once for each time that it sleeps.
    pub(super) fn must_ring(&self, words: &impl Words) -> bool {
        // With the fence in `Consumer::sleep`: either the flag is seen here, or the record there.
        fence(Ordering::SeqCst);
        words.asleep().load(Ordering::Relaxed) != 0 && words.asleep().swap(0, Ordering::AcqRel) != 0
    }

    /// Asks to be called when there is room. What [`head`](Self::head) is afterwards was read after asking.
    pub(super) fn starve(&mut self, words: &impl Words) -> Result<(), Broken> {
        words.starved().store(1, Ordering::Relaxed);
        // With the fence in `Consumer::give_back`: either the progress is seen here, or the flag there.
        fence(Ordering::SeqCst);
        self.refresh(words)
    }

    /// Takes a record back. Whoever copies what it refers to learns of it afterwards. `settle` follows the last of them.
    pub(super) fn revoke(&self, words: &impl Words, position: u64) {
        // Its tag, which no other record ever has: so nothing is to be set back for the next in the slot.
        words
            .revoked(slot(words, position))
            .store(position + 1, Ordering::Relaxed);
    }

    /// What this thread, and those it tells, write from now on is seen by no copy that counts.
    pub(super) fn settle(&self) {
        fence(Ordering::Release);
    }
}

/// After so many records the producer is told: more often makes its processor fetch the word again and again.
const BATCH: u64 = 32;

/// The receiver's side.
#[derive(Debug, Default)]
pub(super) struct Consumer {
    /// The position of the next record.
    next: u64,
    /// How many before it are kept: read, and not done with.
    kept: u64,
    /// What the producer was told last.
    told: u64,
    /// What it was told last with a fence, so that a producer that waits knows.
    given_back: u64,
    /// A record consumed since then took room of the bulk area.
    bulky: bool,
}

impl Consumer {
    pub(super) fn next(&self) -> u64 {
        self.next
    }

    /// Up to where all are done with.
    pub(super) fn done(&self) -> u64 {
        self.next - self.kept
    }

    /// Whether the next record is there. All of it is visible then.
    pub(super) fn ready(&self, words: &impl Words) -> bool {
        // A slot that is kept has its own record's tag, which is never the next one's.
        words.tag(slot(words, self.next)).load(Ordering::Acquire) == self.next + 1
    }

    /// The next record is done with. `bulky`: it took room of the bulk area. Whether the producer waits for room and has to be called.
    pub(super) fn consumed(&mut self, words: &impl Words, bulky: bool) -> bool {
        self.next += 1;
        self.bulky |= bulky;
        if self.kept > 0 {
            // In order: it is given back behind those.
            self.kept += 1;
            return false;
        }
        self.is_due(words) && self.give_back(words)
    }

    /// The next record has been read, and is to be kept until it is [released](Self::release), with all behind it.
    pub(super) fn keep(&mut self, bulky: bool) {
        self.next += 1;
        self.kept += 1;
        self.bulky |= bulky;
    }

    /// The oldest record that is kept is done with. As [`consumed`](Self::consumed).
    pub(super) fn release(&mut self, words: &impl Words) -> bool {
        self.kept = self.kept.saturating_sub(1);
        (self.kept == 0 || self.is_due(words)) && self.give_back(words)
    }

    fn is_due(&self, words: &impl Words) -> bool {
        self.bulky || self.done() - self.given_back >= BATCH.min(words.slots())
    }

    /// There is nothing more for now. A producer that has told us nothing since may not wait for what is told here without a fence: it is less than a
    /// batch of slots and nothing of the bulk area, and of slots it had more than that.
    pub(super) fn idle(&mut self, words: &impl Words) {
        if self.told != self.done() {
            self.told = self.done();
            words.head().store(self.told, Ordering::Release);
        }
    }

    /// Gives back what was consumed. Whether the producer waits for room and has to be called.
    fn give_back(&mut self, words: &impl Words) -> bool {
        self.told = self.done();
        self.given_back = self.told;
        self.bulky = self.bulky && self.kept > 0;
        words.head().store(self.told, Ordering::Release);
        // With the fence in `Producer::starve`.
        fence(Ordering::SeqCst);
        words.starved().load(Ordering::Relaxed) != 0 && words.starved().swap(0, Ordering::AcqRel) != 0
    }

    /// After the copies from a record's references, before they count: whether the record was taken back meanwhile.
    pub(super) fn was_revoked(words: &impl Words, position: u64) -> bool {
        // With the fence in `Producer::settle`: whoever has read a byte written after that one reads the flag after this one.
        fence(Ordering::Acquire);
        words.revoked(slot(words, position)).load(Ordering::Relaxed) == position + 1
    }

    /// About to sleep. `false` when there is a record: it must not.
    pub(super) fn sleep(&self, words: &impl Words) -> bool {
        words.asleep().swap(1, Ordering::AcqRel);
        // With the fence in `Producer::must_ring`.
        fence(Ordering::SeqCst);
        if self.ready(words) {
            self.awake(words);
            return false;
        }
        true
    }

    /// Awake, and need not be rung.
    pub(super) fn awake(&self, words: &impl Words) {
        words.asleep().swap(0, Ordering::AcqRel);
    }
}

#[cfg(all(test, doorbell_loom))]
mod model;
