//! The owners of the blocks of queue pair numbers, in memory that all members change at any time.
//! Claiming, releasing and reclaiming are proved by the models in `blocks/model.rs`.

use super::MemberId;
use crate::sync::{AtomicU64, Ordering};

#[repr(C)]
pub(super) struct Blocks<const COUNT: usize> {
    releases: AtomicU64,
    /// The owner, packed; or the number of its release, 0 for a never used block.
    words: [AtomicU64; COUNT],
}

impl<const COUNT: usize> Blocks<COUNT> {
    /// Claims a free block for `me`: a never used one where there is one, searched from `start` on;
    /// else the one released longest ago.
    pub(super) fn claim(&self, me: MemberId, start: usize, is_alive: impl Fn(MemberId) -> bool) -> Option<usize> {
        // An attempt fails only if another member has claimed one at the same time.
        for _ in 0..=COUNT {
            let (found, index) = self.find(start, &is_alive)?;
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

    /// The block for [`claim`](Self::claim), and its word. Releases the blocks of dead members.
    fn find(&self, start: usize, is_alive: impl Fn(MemberId) -> bool) -> Option<(u64, usize)> {
        let mut oldest = None;
        for index in (0..COUNT).map(|offset| (start + offset) % COUNT) {
            let Some(found) = self.free(index, &is_alive) else {
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

    /// The release number of a block without owner, or of a dead one's, which is released.
    fn free(&self, index: usize, is_alive: impl Fn(MemberId) -> bool) -> Option<u64> {
        let word = &self.words[index];
        let mut found = word.load(Ordering::Acquire);
        while let Some(owner) = MemberId::unpack(found) {
            if is_alive(owner) {
                return None;
            }
            let release = self.next_release();
            found = match word.compare_exchange(found, release, Ordering::AcqRel, Ordering::Acquire) {
                Ok(_) => release,
                // Another member was first, and may have released it as well.
                Err(now) => now,
            };
        }
        Some(found)
    }

    fn next_release(&self) -> u64 {
        let before = self.releases.fetch_add(1, Ordering::Relaxed);
        before.wrapping_add(1) & !MemberId::PRESENT
    }

    pub(super) fn release_all(&self, member: MemberId) {
        for word in &self.words {
            if word.load(Ordering::Relaxed) == member.pack() {
                let _ = word.compare_exchange(member.pack(), self.next_release(), Ordering::AcqRel, Ordering::Relaxed);
            }
        }
    }

    pub(super) fn owner(&self, index: usize) -> Option<MemberId> {
        MemberId::unpack(self.words.get(index)?.load(Ordering::Acquire))
    }
}

#[cfg(all(test, doorbell_loom))]
mod model;
