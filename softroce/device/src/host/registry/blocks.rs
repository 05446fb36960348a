//! Who has which block of queue pair numbers, in memory that all members change at any time.

use super::MemberId;
use crate::sync::{AtomicU64, Ordering};

/// `COUNT` blocks.
#[repr(C)]
pub(super) struct Blocks<const COUNT: usize> {
    /// How many have been given back so far.
    releases: AtomicU64,
    /// The owner, packed; or which release it was, 0 for a block that nobody has had.
    words: [AtomicU64; COUNT],
}

impl<const COUNT: usize> Blocks<COUNT> {
    /// The index of a block that nobody has, for `me`: one that nobody has had where there is one, looked for from `start` on; else the one given back longest ago.
    pub(super) fn claim(&self, me: MemberId, start: usize, lives: impl Fn(MemberId) -> bool) -> Option<usize> {
        // A try fails only where another claims at the same time, and then that one has got something.
        for _ in 0..=COUNT {
            let (found, index) = self.find(start, &lives)?;
            let word = &self.words[index];
            if word
                .compare_exchange(found, me.pack(), Ordering::AcqRel, Ordering::Relaxed)
                .is_ok()
            {
                return Some(index);
            }
        }
        None
    }

    /// What [`claim`](Self::claim) should take, and what it says now. What dead members had is given back on the way.
    fn find(&self, start: usize, lives: impl Fn(MemberId) -> bool) -> Option<(u64, usize)> {
        let mut oldest = None;
        for index in (0..COUNT).map(|offset| (start + offset) % COUNT) {
            let Some(found) = self.free(index, &lives) else {
                continue;
            };
            if found == 0 {
                return Some((0, index));
            }
            if oldest.is_none_or(|(before, _)| found < before) {
                oldest = Some((found, index));
            }
        }
        oldest
    }

    /// Which release a block was; `None` when somebody has it. One that a dead member had is given back.
    fn free(&self, index: usize, lives: impl Fn(MemberId) -> bool) -> Option<u64> {
        let word = &self.words[index];
        let mut found = word.load(Ordering::Acquire);
        while let Some(owner) = MemberId::unpack(found) {
            if lives(owner) {
                return None;
            }
            let release = self.next_release();
            found = match word.compare_exchange(found, release, Ordering::AcqRel, Ordering::Acquire) {
                Ok(_) => release,
                // Another was first, and may have given it back as well.
                Err(now) => now,
            };
        }
        Some(found)
    }

    fn next_release(&self) -> u64 {
        let before = self.releases.fetch_add(1, Ordering::Relaxed);
        before.wrapping_add(1) & !MemberId::PRESENT
    }

    /// Gives back all that a member has.
    pub(super) fn release_all(&self, member: MemberId) {
        for word in &self.words {
            if word.load(Ordering::Relaxed) == member.pack() {
                let _ = word.compare_exchange(member.pack(), self.next_release(), Ordering::AcqRel, Ordering::Relaxed);
            }
        }
    }

    /// Whose it is, or was until that one died.
    pub(super) fn owner(&self, index: usize) -> Option<MemberId> {
        MemberId::unpack(self.words.get(index)?.load(Ordering::Acquire))
    }
}

#[cfg(all(test, doorbell_loom))]
mod model;
