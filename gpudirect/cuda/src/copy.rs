//! Asynchronous copies between memories, by the copy engines, and fills.

use core::ffi::c_void;
use std::ptr;

use crate::error::Error;
use crate::memory::Span;
use crate::resource::MemorySpace;
use crate::stream::Stream;
use crate::sys::{self, CopyAttributes, Location};

impl Stream {
    /// Copies all of `from` to `into` in stream order, between any memory kinds and devices, and
    /// keeps both until then. Between devices the copy is direct if one's memory is mapped for the
    /// other; otherwise use [`Stream::copy_peer`].
    ///
    /// # Errors
    /// [`Error::Lengths`], [`Error::Overlap`], or the driver's error.
    #[doc(alias(
        "cuMemcpyAsync",
        "cuMemcpyDtoDAsync",
        "cuMemcpyDtoHAsync",
        "cuMemcpyHtoDAsync",
        "cudaMemcpyAsync"
    ))]
    pub fn copy(&self, into: Span<'_>, from: Span<'_>) -> Result<(), Error> {
        check(into, from)?;
        if into.is_empty() {
            return Ok(());
        }
        let uses = &[into.resource(), from.resource()];
        let (to, source, bytes) = (into.address(), from.address(), into.len());
        match (into.space(), from.space()) {
            (MemorySpace::Device, MemorySpace::Device) => self.enqueue("cuMemcpyDtoDAsync", uses, |driver, stream| {
                // SAFETY: both ranges lie in memory that `uses` keeps until the work is done. On
                // the host no slice of them exists: a slice borrows the only handle, which then
                // cannot be borrowed here, and is given after waiting for all work that uses it.
                unsafe { (driver.table().memcpy_dtod_async)(to, source, bytes, stream) }
            }),
            (MemorySpace::Device, MemorySpace::Host { at }) => {
                self.enqueue("cuMemcpyHtoDAsync", uses, |driver, stream| {
                    // SAFETY: as above.
                    unsafe { (driver.table().memcpy_htod_async)(to, host(at), bytes, stream) }
                })
            }
            (MemorySpace::Host { at }, MemorySpace::Device) => {
                self.enqueue("cuMemcpyDtoHAsync", uses, |driver, stream| {
                    // SAFETY: as above.
                    unsafe { (driver.table().memcpy_dtoh_async)(host(at), source, bytes, stream) }
                })
            }
            (MemorySpace::Host { .. }, MemorySpace::Host { .. }) => {
                self.enqueue("cuMemcpyAsync", uses, |driver, stream| {
                    // SAFETY: as above; the driver distinguishes addresses of pinned host memory
                    // from device addresses.
                    unsafe { (driver.table().memcpy_async)(to, source, bytes, stream) }
                })
            }
        }
    }

    /// Copies between two devices; without peer access, the driver stages through the host.
    #[doc(alias("cuMemcpyPeerAsync", "cudaMemcpyPeerAsync"))]
    pub fn copy_peer(&self, into: Span<'_>, from: Span<'_>) -> Result<(), Error> {
        check(into, from)?;
        if into.is_empty() {
            return Ok(());
        }
        let (to, source, bytes) = (into.address(), from.address(), into.len());
        let (to_context, from_context) = (into.resource().context().raw(), from.resource().context().raw());
        self.enqueue(
            "cuMemcpyPeerAsync",
            &[into.resource(), from.resource()],
            |driver, stream| {
                // SAFETY: as for `copy`; the memory holds the contexts.
                unsafe { (driver.table().memcpy_peer_async)(to, to_context, source, from_context, bytes, stream) }
            },
        )
    }

    /// Copies each (target, source) pair, unordered among themselves: by one `cuMemcpyBatchAsync`
    /// if the driver has it (CUDA 12.8) and the stream is not captured, otherwise one by one.
    ///
    /// # Errors
    /// As [`Stream::copy`]. When the driver refuses one copy, others may already be enqueued.
    #[doc(alias("cuMemcpyBatchAsync", "cudaMemcpyBatchAsync"))]
    pub fn copy_batch(&self, copies: &[(Span<'_>, Span<'_>)]) -> Result<(), Error> {
        for (into, from) in copies {
            check(*into, *from)?;
        }
        let one_by_one = || copies.iter().try_for_each(|(into, from)| self.copy(*into, *from));
        if copies.len() < 2 || !self.supports_batches() {
            return one_by_one();
        }
        let some = || copies.iter().filter(|(into, _)| !into.is_empty());
        let uses: Vec<_> = some()
            .flat_map(|(into, from)| [into.resource(), from.resource()])
            .collect();
        let mut to: Vec<_> = some().map(|(into, _)| into.address()).collect();
        let mut from: Vec<_> = some().map(|(_, from)| from.address()).collect();
        let mut bytes: Vec<_> = some().map(|(into, _)| into.len()).collect();
        let count = to.len();
        if count == 0 {
            return Ok(());
        }
        let (to, from, bytes) = (to.as_mut_ptr(), from.as_mut_ptr(), bytes.as_mut_ptr());
        let none = Location { kind: 0, id: 0 };
        let mut attributes = CopyAttributes {
            source_order: sys::SOURCE_ORDER_STREAM,
            source: none,
            target: none,
            flags: 0,
        };
        // The attributes apply from the first copy on.
        let mut first = 0usize;
        let (attributes, first) = (&raw mut attributes, &raw mut first);
        let table = self.driver().table();
        match (table.memcpy_batch_async_v1, table.memcpy_batch_async_v2) {
            (_, Some(batch)) => self.enqueue("cuMemcpyBatchAsync", &uses, |_, stream| {
                // SAFETY: as for `copy`, for each pair; the arrays have `count` entries, and there
                // is one set of attributes.
                unsafe { batch(to, from, bytes, count, attributes, first, 1, stream) }
            }),
            (Some(batch), None) => self.enqueue("cuMemcpyBatchAsync", &uses, |_, stream| {
                let mut failed = 0usize;
                // SAFETY: as above; the last pointer but one is to a local size_t.
                unsafe { batch(to, from, bytes, count, attributes, first, 1, &raw mut failed, stream) }
            }),
            (None, None) => one_by_one(),
        }
    }

    /// Sets each byte of `span` to `value`, in stream order.
    #[doc(alias("cuMemsetD8Async", "cudaMemsetAsync"))]
    pub fn fill(&self, span: Span<'_>, value: u8) -> Result<(), Error> {
        if span.is_empty() {
            return Ok(());
        }
        self.enqueue("cuMemsetD8Async", &[span.resource()], |driver, stream| {
            // SAFETY: as for `copy`.
            unsafe { (driver.table().memset_d8_async)(span.address(), value, span.len(), stream) }
        })
    }
}

fn check(into: Span<'_>, from: Span<'_>) -> Result<(), Error> {
    let bytes = into.len();
    if bytes != from.len() {
        return Err(Error::Lengths {
            from: from.len(),
            into: bytes,
        });
    }
    if into.address().abs_diff(from.address()) < bytes as u64 {
        return Err(Error::Overlap { bytes });
    }
    Ok(())
}

fn host(at: usize) -> *mut c_void {
    ptr::with_exposed_provenance_mut(at)
}
