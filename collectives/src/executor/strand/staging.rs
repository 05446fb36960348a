//! Staging buffers for messages in flight: slots of one length, used round-robin.

use doorbell_verbs::{MemoryError, ProtectionDomain};

use crate::memory::Segment;
use crate::protocol::GRANTS;

const MIN_SLOTS: u64 = 4;
/// Bytes of all slots, where these are short: as many as there are grants.
const MAX_SHORT_BYTES: u64 = 1 << 20;

#[derive(Default)]
pub(super) struct StagingSlots {
    pub(super) memory: Option<Segment>,
    /// Bytes of a slot, and how many there are.
    len: usize,
    slots: u64,
    pub(super) acquired: u64,
    pub(super) released: u64,
}

impl StagingSlots {
    /// The number of a free slot of `len` bytes or more, which is in use then. Slots become longer
    /// when none is in use.
    pub(super) fn acquire(&mut self, domain: &ProtectionDomain, len: usize) -> Result<Option<u64>, MemoryError> {
        let in_use = self.acquired - self.released;
        if self.len < len && in_use == 0 {
            self.memory = None;
            self.len = len.next_power_of_two().max(4096);
            self.slots = (MAX_SHORT_BYTES / self.len as u64).clamp(MIN_SLOTS, GRANTS);
            self.memory = Some(Segment::new([domain], self.len * self.slots as usize)?);
        }
        if self.len < len || in_use == self.slots {
            return Ok(None);
        }
        self.acquired += 1;
        Ok(Some(self.acquired - 1))
    }

    pub(super) fn offset(&self, number: u64) -> usize {
        (number % self.slots) as usize * self.len
    }

    pub(super) fn start(&self, number: u64) -> *mut u8 {
        let start = self.memory.as_ref().map_or(core::ptr::null_mut(), Segment::start);
        start.wrapping_add(self.offset(number))
    }
}
