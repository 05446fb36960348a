//! What can be posted: sources (gather) and targets (scatter) of requests.

use doorbell_verbs_sys as sys;

use super::buffer::{Buffer, BufferPart};
use super::clonable::Scratch;
use super::range::Buffers;
use super::rights::{MemoryKind, Opaque, Rights};
use super::word::AtomicWord;

/// Memory that a request may read: any [`Buffer`], or [`BufferPart`] of one.
pub trait Source: sealed::Element {}

/// Memory that a request may write: any but frozen.
pub trait Sink: Source {}

pub(crate) mod sealed {
    use super::{Buffers, sys};

    /// One scatter-gather element (SGE), and the buffer it is of.
    pub trait Element {
        fn sge(&self) -> sys::ibv_sge;

        fn bytes(&self) -> u32;

        /// Writes the element.
        ///
        /// # Safety
        /// `at` may be written, and is not in the header of a buffer.
        #[inline(always)]
        unsafe fn write_sge(&self, at: *mut sys::ibv_sge) {
            // SAFETY: by contract.
            unsafe { *at = self.sge() }
        }

        fn into_buffers(self) -> Buffers;
    }
}

impl<K: MemoryKind> sealed::Element for Buffer<K> {
    #[inline(always)]
    fn sge(&self) -> sys::ibv_sge {
        self.header().sge
    }

    #[inline(always)]
    fn bytes(&self) -> u32 {
        self.header().sge.length
    }

    /// One copy of 16 bytes, where the optimiser would make three.
    #[inline(always)]
    unsafe fn write_sge(&self, at: *mut sys::ibv_sge) {
        // SAFETY: `at` may be written by contract, and does not overlap a header.
        unsafe { core::ptr::copy_nonoverlapping(&raw const self.header().sge, at, 1) }
    }

    #[inline(always)]
    fn into_buffers(self) -> Buffers {
        // SAFETY: the range is owned by `self`, which gives it up.
        unsafe { Buffers::from_head(Some(self.into_range())) }
    }
}

impl<K: MemoryKind> sealed::Element for BufferPart<K> {
    #[inline(always)]
    fn sge(&self) -> sys::ibv_sge {
        let whole = self.buffer.sge();
        sys::ibv_sge {
            addr: whole.addr + u64::from(self.offset),
            length: self.len,
            ..whole
        }
    }

    #[inline(always)]
    fn bytes(&self) -> u32 {
        self.len
    }

    #[inline(always)]
    fn into_buffers(self) -> Buffers {
        self.buffer.into_buffers()
    }
}

impl sealed::Element for AtomicWord {
    #[inline(always)]
    fn sge(&self) -> sys::ibv_sge {
        (**self).sge()
    }

    #[inline(always)]
    fn bytes(&self) -> u32 {
        (**self).bytes()
    }

    #[inline(always)]
    fn into_buffers(self) -> Buffers {
        self.into_buffer().into_buffers()
    }
}

impl<K: MemoryKind> Source for Buffer<K> {}
impl<K: MemoryKind> Source for BufferPart<K> {}
impl<R: Rights> Sink for Buffer<R> {}
impl<R: Rights> Sink for BufferPart<R> {}
impl<R: Rights> Sink for Buffer<Opaque<R>> {}
impl<R: Rights> Sink for BufferPart<Opaque<R>> {}
impl Sink for Buffer<Scratch> {}
impl Sink for BufferPart<Scratch> {}
impl Source for AtomicWord {}
impl Sink for AtomicWord {}
