//! An entry of a published table, and the access word of an initiator.
//!
//! The owner of an entry is one process, its readers are others. The *guard* names the object, or
//! nothing, and counts its publications: a reader that finds the same guard before and after the
//! other words has read one publication. An initiator stores its access word before it reads the
//! guard, and the owner withdraws the guard before it reads access words: one of the two sees the
//! other's store. Proved by the models in `entry/model.rs`.

use doorbell_roce_proto::Qpn;

use crate::links::shm_ring::SharedWord;
use crate::sync::{Ordering, fence};

/// The words of an entry. A trait because of the models: loom's atomics cannot be in shared memory.
pub(super) trait EntryWords {
    type Word: SharedWord;
    fn guard(&self) -> &Self::Word;
    fn word(&self, index: usize) -> &Self::Word;
}

const NAME_BITS: u32 = 32;

fn name_of(guard: u64) -> u32 {
    guard as u32
}

/// The object that an entry is published for; 0 for none.
pub(super) fn published(entry: &impl EntryWords) -> u32 {
    name_of(entry.guard().load(Ordering::Relaxed))
}

/// Owner: publishes an entry that is withdrawn. `name` is not 0.
pub(super) fn publish<const N: usize>(entry: &impl EntryWords, name: u32, words: [u64; N]) {
    let count = entry.guard().load(Ordering::Relaxed) >> NAME_BITS;
    // Readers that find a new word find the guard withdrawn.
    fence(Ordering::Release);
    for (index, word) in words.into_iter().enumerate() {
        entry.word(index).store(word, Ordering::Relaxed);
    }
    let count = count.wrapping_add(1);
    entry
        .guard()
        .store(count << NAME_BITS | u64::from(name), Ordering::Release);
}

/// Owner: withdraws an entry. Accesses that began before may last: see [`Access::of`].
pub(super) fn withdraw(entry: &impl EntryWords) {
    let count = entry.guard().load(Ordering::Relaxed) >> NAME_BITS;
    // With the exchange in `begin`: the access is seen after this, or the withdrawal there.
    entry.guard().swap(count << NAME_BITS, Ordering::SeqCst);
}

/// One publication of an entry: its guard, which no other publication has.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) struct Publication(u64);

impl Publication {
    /// Whether it is not withdrawn: then its words are what [`read`] found.
    pub(super) fn is_current(self, entry: &impl EntryWords) -> bool {
        entry.guard().load(Ordering::SeqCst) == self.0
    }
}

/// The words of the entry of `name`, if it is published.
pub(super) fn read<const N: usize>(entry: &impl EntryWords, name: u32) -> Option<(Publication, [u64; N])> {
    let guard = entry.guard().load(Ordering::SeqCst);
    if name_of(guard) != name {
        return None;
    }
    let words = std::array::from_fn(|index| entry.word(index).load(Ordering::Relaxed));
    // With the fence in `publish`.
    fence(Ordering::Acquire);
    (entry.guard().load(Ordering::Relaxed) == guard).then_some((Publication(guard), words))
}

/// What an initiator accesses at the moment: a queue pair of the target, and memory by its key.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct Access {
    pub(crate) qpn: Qpn,
    pub(crate) key: u32,
}

impl Access {
    const ACTIVE: u64 = 1 << 63;

    fn pack(self) -> u64 {
        Self::ACTIVE | u64::from(self.qpn.get()) << 32 | u64::from(self.key)
    }

    /// Target: the access that an initiator's word names, after a withdrawal. With none, or one of
    /// other objects, no access of what was withdrawn is in progress or begins.
    pub(crate) fn of(word: &impl SharedWord) -> Option<Self> {
        let word = word.load(Ordering::SeqCst);
        (word & Self::ACTIVE != 0).then_some(Self {
            qpn: Qpn::new((word >> 32) as u32),
            key: word as u32,
        })
    }

    /// Initiator: before it reads the entries.
    pub(super) fn begin(self, word: &impl SharedWord) {
        // An exchange, which costs less than a store and a fence.
        word.swap(self.pack(), Ordering::SeqCst);
    }

    /// Initiator: after its last access.
    pub(super) fn end(word: &impl SharedWord) {
        word.store(0, Ordering::Release);
    }
}

#[cfg(all(test, doorbell_loom))]
mod model;
