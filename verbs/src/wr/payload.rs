//! The payload of a work request.

use core::ffi::c_uint;
use core::marker::PhantomData;

use doorbell_verbs_sys::{self as sys, work_requests};

use crate::memory::{Buffers, Source};
use crate::qp::RejectReason;

/// The payload of a work request: [`SingleSge`], [`SgeList`], [`InlineData`] or [`Window`].
pub trait Payload: sealed::Stage {}

/// A queue pair's limits for payloads.
#[derive(Debug, Clone, Copy)]
pub struct Limits {
    pub(crate) max_inline: u32,
    pub(crate) max_sge: u32,
}

pub(crate) mod sealed {
    use super::{Buffers, Limits, RejectReason, c_uint, sys};

    pub trait Stage: Sized {
        const FLAGS: c_uint;

        fn bytes(&self) -> u64;

        /// Why the queue pair would reject it; `None` if it is valid.
        fn reject_reason(&self, limits: Limits) -> Option<RejectReason>;

        #[inline(always)]
        fn fits(&self, limits: Limits) -> bool {
            self.reject_reason(limits).is_none()
        }

        /// Whether `reject_reason` is `None`, and `num_sge` is 1.
        fn is_single(&self, limits: Limits) -> bool;

        fn num_sge(&self) -> i32;

        /// Writes the scatter-gather list.
        ///
        /// # Safety
        /// `reject_reason` is `None`, and `sges` has space for `max_sge` elements.
        unsafe fn write_sges(&self, sges: *mut sys::ibv_sge);

        /// Sets it on the current `ibv_wr_*` request.
        ///
        /// # Safety
        /// `reject_reason` is `None`; `qp` is live and was made by ibv_create_qp_ex, and the last
        /// call of its batch was an operation.
        unsafe fn set_data(&self, qp: *mut sys::ibv_qp_ex);

        /// The buffers it owns, to be kept while in flight.
        fn into_buffers(self) -> Buffers;
    }
}

/// One buffer.
#[derive(Debug)]
#[doc(alias = "ibv_sge")]
pub struct SingleSge<S>(S);

impl<S: Source> SingleSge<S> {
    #[inline(always)]
    pub(crate) fn new(source: S) -> Self {
        Self(source)
    }
}

impl<S: Source> sealed::Stage for SingleSge<S> {
    const FLAGS: c_uint = 0;

    #[inline(always)]
    fn bytes(&self) -> u64 {
        u64::from(self.0.bytes())
    }

    #[inline(always)]
    fn reject_reason(&self, _limits: Limits) -> Option<RejectReason> {
        None
    }

    #[inline(always)]
    fn is_single(&self, _limits: Limits) -> bool {
        true
    }

    #[inline(always)]
    fn num_sge(&self) -> i32 {
        1
    }

    #[inline(always)]
    unsafe fn write_sges(&self, sges: *mut sys::ibv_sge) {
        // SAFETY: every list has space for one.
        unsafe { self.0.write_sge(sges) }
    }

    #[inline(always)]
    unsafe fn set_data(&self, qp: *mut sys::ibv_qp_ex) {
        let sge = self.0.sge();
        // SAFETY: by contract.
        unsafe { work_requests::wr_set_sge(qp, sge.lkey, sge.addr, sge.length) }
    }

    #[inline(always)]
    fn into_buffers(self) -> Buffers {
        self.0.into_buffers()
    }
}

/// A scatter-gather list of `N` buffers, in wire order.
#[derive(Debug)]
#[doc(alias("ibv_sge", "sg_list"))]
pub struct SgeList<const N: usize> {
    sges: [sys::ibv_sge; N],
    buffers: Buffers,
}

impl<const N: usize> SgeList<N> {
    pub(crate) fn new<S: Source>(sources: [S; N]) -> Self {
        const { assert!(N > 0, "a request of several buffers needs at least one") };
        let sges = core::array::from_fn(|index| sources[index].sge());
        let mut buffers = Buffers::NONE;
        for source in sources.into_iter().rev() {
            buffers.prepend(source.into_buffers());
        }
        Self { sges, buffers }
    }
}

impl<const N: usize> sealed::Stage for SgeList<N> {
    const FLAGS: c_uint = 0;

    fn bytes(&self) -> u64 {
        self.sges.iter().map(|sge| u64::from(sge.length)).sum()
    }

    fn reject_reason(&self, limits: Limits) -> Option<RejectReason> {
        if N > limits.max_sge as usize {
            return Some(RejectReason::TooManyBuffers {
                requested: N,
                max: limits.max_sge,
            });
        }
        let len = self.bytes();
        (len > MAX_MESSAGE).then_some(RejectReason::MessageTooLong { len })
    }

    fn is_single(&self, limits: Limits) -> bool {
        N == 1 && self.fits(limits)
    }

    fn num_sge(&self) -> i32 {
        N as i32
    }

    unsafe fn write_sges(&self, sges: *mut sys::ibv_sge) {
        for (index, sge) in self.sges.iter().enumerate() {
            // SAFETY: `reject_reason` has seen that N elements fit.
            unsafe { *sges.add(index) = *sge };
        }
    }

    unsafe fn set_data(&self, qp: *mut sys::ibv_qp_ex) {
        // SAFETY: by contract; the list is read during the call.
        unsafe { work_requests::wr_set_sge_list(qp, N, self.sges.as_ptr()) }
    }

    fn into_buffers(self) -> Buffers {
        self.buffers
    }
}

/// The longest message: 2^31 bytes (IBTA vol 1, 9.7.7).
const MAX_MESSAGE: u64 = 1 << 31;

/// Inline data: copied into the WQE, so that it may be changed as soon as the batch is posted.
#[derive(Debug)]
#[doc(alias = "IBV_SEND_INLINE")]
pub struct InlineData<'d> {
    bytes: *const u8,
    len: usize,
    data: PhantomData<&'d [u8]>,
}

impl<'d> InlineData<'d> {
    #[inline(always)]
    pub(crate) fn new(bytes: &'d [u8]) -> Self {
        Self {
            bytes: bytes.as_ptr(),
            len: bytes.len(),
            data: PhantomData,
        }
    }
}

impl sealed::Stage for InlineData<'_> {
    const FLAGS: c_uint = sys::IBV_SEND_INLINE;

    #[inline(always)]
    fn bytes(&self) -> u64 {
        self.len as u64
    }

    #[inline(always)]
    fn reject_reason(&self, limits: Limits) -> Option<RejectReason> {
        let max = limits.max_inline;
        (self.len > max as usize).then_some(RejectReason::InlineTooLong { len: self.len, max })
    }

    /// An empty one has no element.
    #[inline(always)]
    fn is_single(&self, limits: Limits) -> bool {
        self.len.wrapping_sub(1) < limits.max_inline as usize
    }

    #[inline(always)]
    fn num_sge(&self) -> i32 {
        i32::from(self.len != 0)
    }

    #[inline(always)]
    unsafe fn write_sges(&self, sges: *mut sys::ibv_sge) {
        // SAFETY: every list has space for one. An inline element's key is not read. The length
        // fits, being at most `max_inline`.
        unsafe {
            (*sges).addr = self.bytes.expose_provenance() as u64;
            (*sges).length = self.len as u32;
        }
    }

    #[inline(always)]
    unsafe fn set_data(&self, qp: *mut sys::ibv_qp_ex) {
        // SAFETY: by contract; the bytes are only read, though the prototype does not say so.
        unsafe { work_requests::wr_set_inline_data(qp, self.bytes.cast_mut().cast(), self.len) }
    }

    #[inline(always)]
    fn into_buffers(self) -> Buffers {
        Buffers::NONE
    }
}

/// A memory window, to be bound or unbound: nothing goes on the wire.
#[derive(Debug)]
pub struct Window(Buffers);

impl Window {
    pub(crate) fn new(in_flight: Buffers) -> Self {
        Self(in_flight)
    }
}

impl sealed::Stage for Window {
    const FLAGS: c_uint = 0;

    fn bytes(&self) -> u64 {
        0
    }

    fn reject_reason(&self, _limits: Limits) -> Option<RejectReason> {
        None
    }

    fn is_single(&self, _limits: Limits) -> bool {
        false
    }

    fn num_sge(&self) -> i32 {
        0
    }

    unsafe fn write_sges(&self, _sges: *mut sys::ibv_sge) {}

    unsafe fn set_data(&self, _qp: *mut sys::ibv_qp_ex) {}

    fn into_buffers(self) -> Buffers {
        self.0
    }
}

impl<S: Source> Payload for SingleSge<S> {}
impl<const N: usize> Payload for SgeList<N> {}
impl Payload for InlineData<'_> {}
impl Payload for Window {}
