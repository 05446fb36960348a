//! Staging buffers for messages in flight: slots of one length, used round-robin.

use doorbell_verbs::{MemoryError, ProtectionDomain};

use crate::memory::Segment;

pub(super) const STAGING_SLOTS: u64 = 4;

#[derive(Default)]
pub(super) struct StagingSlots {
    pub(super) memory: Option<Segment>,
    /// Bytes of a slot.
    pub(super) len: usize,
    pub(super) acquired: u64,
    pub(super) released: u64,
}

impl StagingSlots {
    /// Makes the slots at least `len` bytes long. None is in use.
    pub(super) fn ensure(&mut self, domain: &ProtectionDomain, len: usize) -> Result<(), MemoryError> {
        if self.len < len {
            self.memory = None;
            self.memory = Some(Segment::new([domain], len * STAGING_SLOTS as usize)?);
            self.len = len;
        }
        Ok(())
    }

    /// The number of a free slot, which is in use then.
    pub(super) fn acquire(&mut self) -> Option<u64> {
        let number = self.acquired;
        (number - self.released < STAGING_SLOTS).then(|| self.acquired += 1)?;
        Some(number)
    }

    pub(super) fn offset(&self, number: u64) -> usize {
        (number % STAGING_SLOTS) as usize * self.len
    }

    pub(super) fn start(&self, number: u64) -> *mut u8 {
        let start = self.memory.as_ref().map_or(core::ptr::null_mut(), Segment::start);
        start.wrapping_add(self.offset(number))
    }
}
