//! The eight bytes that receive an atomic operation's result.

use core::ops::Deref;

use doorbell_verbs_sys as sys;

use super::buffer::Buffer;
use super::rights::Local;

/// Eight aligned bytes, where CompareSwap and FetchAdd put the old value (IBTA vol 1, 9.4.5).
#[derive(Debug)]
#[repr(transparent)]
pub struct AtomicWord {
    buffer: Buffer<Local>,
}

impl AtomicWord {
    pub(super) fn new(buffer: Buffer<Local>) -> Self {
        Self { buffer }
    }

    pub(super) fn fits(sge: &sys::ibv_sge) -> bool {
        sge.length == 8 && sge.addr.is_multiple_of(8)
    }

    /// Its value, in host byte order, as the device stores it.
    #[inline]
    #[must_use]
    pub fn get(&self) -> u64 {
        let mut bytes = [0; 8];
        bytes.copy_from_slice(&self.buffer);
        u64::from_ne_bytes(bytes)
    }

    /// Sets its value.
    #[inline]
    pub fn set(&mut self, value: u64) {
        self.buffer.copy_from_slice(&value.to_ne_bytes());
    }

    /// The buffer it was made of.
    #[inline]
    #[must_use]
    pub fn into_buffer(self) -> Buffer<Local> {
        self.buffer
    }
}

/// Shared only: through `&mut Buffer` it could be replaced by a buffer of another size.
impl Deref for AtomicWord {
    type Target = Buffer<Local>;

    fn deref(&self) -> &Buffer<Local> {
        &self.buffer
    }
}
