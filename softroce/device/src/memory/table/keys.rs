//! The keys of regions and windows: 32 random bits, which a peer that was not given the key cannot
//! guess (decision 070). The upper 16 are a position, random among the free ones, so that a key is
//! found without a search; the lower 8 of a window's are the consumer's.

use std::collections::hash_map::RandomState;
use std::hash::BuildHasher;

#[derive(Debug)]
pub(super) struct Keys {
    /// By position: the slot's index + 1; 0 if free. Pages that are never used have no memory.
    positions: Box<[u32]>,
    random: RandomState,
    drawn: u64,
}

impl Keys {
    pub(super) fn new() -> Self {
        Self {
            positions: vec![0; 1 << 16].into_boxed_slice(),
            random: RandomState::new(),
            drawn: 0,
        }
    }

    /// The slot at the position of a key, which may be another key's.
    pub(super) fn find(&self, key: u32) -> Option<u16> {
        let index = self.positions[(key >> 16) as usize].checked_sub(1)?;
        // From `take`.
        Some(index as u16)
    }

    /// A new key for a slot; `None` when there are as many keys as positions.
    pub(super) fn take(&mut self, index: u16) -> Option<u32> {
        self.drawn += 1;
        let drawn = self.random.hash_one(self.drawn) as u32;
        let start = (drawn >> 16) as u16;
        let is_free = |position: &u16| self.positions[usize::from(*position)] == 0;
        let position = (0..=u16::MAX).map(|by| start.wrapping_add(by)).find(is_free)?;
        self.positions[usize::from(position)] = u32::from(index) + 1;
        let key = u32::from(position) << 16 | drawn & 0xffff;
        // Never 0, whatever a window's lower 8 bits are: some programs take key 0 for none.
        Some(key.max(0x100))
    }

    pub(super) fn free(&mut self, key: u32) {
        self.positions[(key >> 16) as usize] = 0;
    }
}
