//! Memory for messages on their way: slots of one length, taken in turn.

use doorbell_verbs::{MemoryError, ProtectionDomain};

use crate::memory::Segment;

/// How many slots there are.
pub(super) const STAGING: u64 = 4;

/// Slots of one length, taken in turn.
#[derive(Default)]
pub(super) struct Slots {
    pub(super) memory: Option<Segment>,
    /// Bytes of a slot.
    pub(super) len: usize,
    pub(super) taken: u64,
    pub(super) given: u64,
}

impl Slots {
    /// Makes the slots at least so long. None is taken.
    pub(super) fn fit(&mut self, domain: &ProtectionDomain, len: usize) -> Result<(), MemoryError> {
        if self.len < len {
            self.memory = None;
            self.memory = Some(Segment::new([domain], len * STAGING as usize)?);
            self.len = len;
        }
        Ok(())
    }

    pub(super) fn offset(&self, number: u64) -> usize {
        (number % STAGING) as usize * self.len
    }

    pub(super) fn start(&self, number: u64) -> *mut u8 {
        let start = self.memory.as_ref().map_or(core::ptr::null_mut(), Segment::start);
        start.wrapping_add(self.offset(number))
    }
}
