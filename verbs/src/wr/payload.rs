//! What a request carries: one buffer, several, or bytes inline.

use core::ffi::c_uint;
use core::marker::PhantomData;

use doorbell_verbs_sys as sys;

use crate::memory::{Buffers, Single, Source};
use crate::qp::Reason;

/// What a request carries: [`One`], [`Several`] or [`Inline`].
pub trait Payload: sealed::Stage {}

/// The limits of a queue pair that a payload must keep to.
#[derive(Debug, Clone, Copy)]
pub struct Limits {
    pub(crate) max_inline: u32,
    pub(crate) max_sge: u32,
}

pub(crate) mod sealed {
    use super::{Buffers, Limits, Reason, c_uint, sys};

    pub trait Stage: Sized {
        /// Flags that the work request gets.
        const FLAGS: c_uint;

        /// What its scatter-gather list is made from.
        type List;

        /// Bytes of the message.
        fn bytes(&self) -> u64;

        /// Why the queue pair would not take it, if so.
        fn check(&self, limits: Limits) -> Option<Reason>;

        /// Whether `check` finds nothing.
        #[inline(always)]
        fn admits(&self, limits: Limits) -> bool {
            self.check(limits).is_none()
        }

        /// Its list, and the buffers it owns, to be kept while in flight.
        fn stage(self) -> (Self::List, Buffers);

        /// How many elements the scatter-gather list has.
        fn num_sge(&self) -> i32;

        /// Writes the scatter-gather list.
        ///
        /// # Safety
        /// `check` found nothing, and there is room for `max_sge` elements.
        unsafe fn fill(list: &Self::List, sges: *mut sys::ibv_sge);
    }
}

/// One buffer.
#[derive(Debug)]
pub struct One(Single);

impl One {
    #[inline(always)]
    pub(crate) fn new<S: Source>(source: S) -> Self {
        Self(source.into_single())
    }
}

impl sealed::Stage for One {
    const FLAGS: c_uint = 0;
    type List = sys::ibv_sge;

    #[inline(always)]
    fn bytes(&self) -> u64 {
        u64::from(self.0.sge.length)
    }

    #[inline(always)]
    fn check(&self, _limits: Limits) -> Option<Reason> {
        None
    }

    #[inline(always)]
    fn stage(self) -> (sys::ibv_sge, Buffers) {
        (self.0.sge, self.0.buffers)
    }

    #[inline(always)]
    fn num_sge(&self) -> i32 {
        1
    }

    #[inline(always)]
    unsafe fn fill(sge: &sys::ibv_sge, sges: *mut sys::ibv_sge) {
        // SAFETY: every list has room for one.
        unsafe { *sges = *sge };
    }
}

/// `N` buffers, one after the other on the wire.
#[derive(Debug)]
pub struct Several<const N: usize> {
    sges: [sys::ibv_sge; N],
    buffers: Buffers,
}

impl<const N: usize> Several<N> {
    pub(crate) fn new<S: Source>(sources: [S; N]) -> Self {
        const { assert!(N > 0, "a request of several buffers needs at least one") };
        let singles = sources.map(S::into_single);
        let sges = core::array::from_fn(|index| singles[index].sge);
        let mut buffers = Buffers::NONE;
        for single in singles.into_iter().rev() {
            buffers.prepend(single.buffers);
        }
        Self { sges, buffers }
    }
}

impl<const N: usize> sealed::Stage for Several<N> {
    const FLAGS: c_uint = 0;
    type List = [sys::ibv_sge; N];

    fn bytes(&self) -> u64 {
        self.sges.iter().map(|sge| u64::from(sge.length)).sum()
    }

    fn check(&self, limits: Limits) -> Option<Reason> {
        if N > limits.max_sge as usize {
            return Some(Reason::TooManyBuffers {
                asked: N,
                max: limits.max_sge,
            });
        }
        let len = self.bytes();
        (len > MAX_MESSAGE).then_some(Reason::MessageTooLong { len })
    }

    fn stage(self) -> ([sys::ibv_sge; N], Buffers) {
        (self.sges, self.buffers)
    }

    fn num_sge(&self) -> i32 {
        N as i32
    }

    unsafe fn fill(list: &[sys::ibv_sge; N], sges: *mut sys::ibv_sge) {
        for (index, sge) in list.iter().enumerate() {
            // SAFETY: `check` has seen that N elements fit.
            unsafe { *sges.add(index) = *sge };
        }
    }
}

/// The longest message: 2^31 bytes (IBTA vol 1, 9.7.7).
const MAX_MESSAGE: u64 = 1 << 31;

/// Bytes that the device takes as part of the work request, so that they may be changed as soon as the batch is posted.
#[derive(Debug)]
pub struct Inline<'d> {
    bytes: *const u8,
    len: usize,
    data: PhantomData<&'d [u8]>,
}

impl<'d> Inline<'d> {
    #[inline(always)]
    pub(crate) fn new(bytes: &'d [u8]) -> Self {
        Self {
            bytes: bytes.as_ptr(),
            len: bytes.len(),
            data: PhantomData,
        }
    }
}

impl sealed::Stage for Inline<'_> {
    const FLAGS: c_uint = sys::IBV_SEND_INLINE;
    type List = sys::ibv_sge;

    #[inline(always)]
    fn bytes(&self) -> u64 {
        self.len as u64
    }

    #[inline(always)]
    fn check(&self, limits: Limits) -> Option<Reason> {
        let max = limits.max_inline;
        (self.len > max as usize).then_some(Reason::InlineTooLong { len: self.len, max })
    }

    #[inline(always)]
    fn stage(self) -> (sys::ibv_sge, Buffers) {
        // An inline element's key is not looked at. The length fits, being at most `max_inline`.
        let sge = sys::ibv_sge {
            addr: self.bytes.expose_provenance() as u64,
            length: self.len as u32,
            lkey: 0,
        };
        (sge, Buffers::NONE)
    }

    #[inline(always)]
    fn num_sge(&self) -> i32 {
        i32::from(self.len != 0)
    }

    #[inline(always)]
    unsafe fn fill(sge: &sys::ibv_sge, sges: *mut sys::ibv_sge) {
        // SAFETY: every list has room for one.
        unsafe {
            (*sges).addr = sge.addr;
            (*sges).length = sge.length;
        }
    }
}

impl Payload for One {}
impl<const N: usize> Payload for Several<N> {}
impl Payload for Inline<'_> {}
