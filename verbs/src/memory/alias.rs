//! Memory that an executor manages by itself: ranges of a region, posted repeatedly in requests
//! that own no buffers. Code that sends from, receives into and computes on one region in
//! overlapping ways promises (`unsafe`) what the moves of a [`Buffer`] guarantee.

use core::any::Any;
use core::ffi::c_uint;
use core::ops::RangeBounds;
use std::sync::Arc;

use doorbell_verbs_sys as sys;

use super::buffer::{Buffer, bytes_of};
use super::range::Buffers;
use super::region::{Backing, Region, check_buffer};
use super::rights::{Local, MemoryKind, Rights};
use super::source::{Sink, Source, sealed};
use crate::error::MemoryError;
use crate::pd::ProtectionDomain;

/// A range of a region that can be posted any number of times (see [`Buffer::alias`]).
///
/// A request with it owns nothing: its completion returns nothing, posting allocates nothing.
#[derive(Debug, Clone, Copy)]
pub struct BufferAlias {
    sge: sys::ibv_sge,
}

impl BufferAlias {
    /// The address of its first byte, for the device.
    #[inline]
    #[must_use]
    pub const fn addr(&self) -> u64 {
        self.sge.addr
    }

    /// The `len` bytes at `offset`; `None` if they are out of range.
    #[inline]
    #[must_use]
    pub fn slice(&self, offset: usize, len: usize) -> Option<Self> {
        let whole = self.sge.length as usize;
        (offset <= whole && len <= whole - offset).then(|| Self {
            sge: sys::ibv_sge {
                addr: self.sge.addr + offset as u64,
                length: len as u32,
                lkey: self.sge.lkey,
            },
        })
    }
}

impl<K: MemoryKind> Buffer<K> {
    /// The bytes of `range`, to be posted while the buffer stays here.
    ///
    /// # Safety
    /// The poster promises, for each request, until it has completed or its queue pair is dropped:
    ///
    /// - This buffer, or another of its region, is not dropped, nor turned back into memory.
    /// - If the request reads these bytes (as the source of a send or write), nothing writes them;
    ///   if it writes them (as the target of a receive or read), nothing touches them. Bytes of an
    ///   unconfirmed source may be written once all of them are known to have arrived, by a message
    ///   from the peer for example: the peer drops what a device retransmits.
    ///
    /// Nor may any of them be reached by a slice that this buffer lends meanwhile.
    ///
    /// # Panics
    /// If the range is beyond the buffer.
    #[must_use]
    pub unsafe fn alias(&self, range: impl RangeBounds<usize>) -> BufferAlias {
        let (offset, len) = bytes_of(self.len(), range);
        let whole = self.header().sge;
        BufferAlias {
            sge: sys::ibv_sge {
                addr: whole.addr + offset as u64,
                length: len as u32,
                ..whole
            },
        }
    }
}

impl ProtectionDomain {
    /// Registers `len` bytes at `start` (ibv_reg_mr(3)), which remain the caller's: in several
    /// domains, say. `owner` is dropped after deregistering; never, if the device refuses that. A
    /// software device shares the bytes with its peers if they are all those of an `owner` that is
    /// [`Memory::shared`](crate::Memory::shared).
    ///
    /// # Errors
    /// As for [`register`](Self::register).
    ///
    /// # Safety
    /// The bytes are initialised, and stay mapped until `owner` is dropped. Until then they are
    /// touched only through buffers of the region, and by peers as far as `R` lets them; or by code
    /// that knows, by a protocol of the caller's, that no device and no buffer touches the same
    /// bytes.
    #[doc(alias = "ibv_reg_mr")]
    pub unsafe fn register_raw<R: Rights>(
        &self,
        start: *mut u8,
        len: usize,
        _: R,
        owner: Arc<dyn Any + Send + Sync>,
    ) -> Result<Buffer<R>, MemoryError> {
        // SAFETY: by contract.
        unsafe { self.register_with(start, len, R::ACCESS, owner) }
    }

    /// As [`register_raw`](Self::register_raw), for requests of this process alone and on demand:
    /// no page is populated or pinned, so that it takes as long for any length.
    ///
    /// # Errors
    /// As for [`register`](Self::register); also when the device cannot page on demand.
    ///
    /// # Safety
    /// As of `register_raw`.
    #[doc(alias = "IBV_ACCESS_ON_DEMAND")]
    pub unsafe fn register_raw_on_demand(
        &self,
        start: *mut u8,
        len: usize,
        owner: Arc<dyn Any + Send + Sync>,
    ) -> Result<Buffer, MemoryError> {
        // SAFETY: by contract.
        unsafe { self.register_with(start, len, Local::ACCESS | sys::IBV_ACCESS_ON_DEMAND, owner) }
    }

    /// # Safety
    /// As of `register_raw`; the access is that of `R`, or on demand.
    unsafe fn register_with<R: Rights>(
        &self,
        start: *mut u8,
        len: usize,
        access: c_uint,
        owner: Arc<dyn Any + Send + Sync>,
    ) -> Result<Buffer<R>, MemoryError> {
        check_buffer(len)?;
        // SAFETY: by contract.
        let region = unsafe { Region::register(self.inner(), start, len, access, Backing::KeepAlive(owner)) }?;
        let start = region.start();
        Ok(Buffer::new(region, start, len))
    }
}

impl sealed::Element for BufferAlias {
    #[inline(always)]
    fn sge(&self) -> sys::ibv_sge {
        self.sge
    }

    #[inline(always)]
    fn bytes(&self) -> u32 {
        self.sge.length
    }

    #[inline(always)]
    fn into_buffers(self) -> Buffers {
        Buffers::NONE
    }
}

impl Source for BufferAlias {}
impl Sink for BufferAlias {}
