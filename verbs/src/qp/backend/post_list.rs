//! The classic data path: a chain of work requests handed to `ibv_post_send` or `ibv_post_recv` (ibv_post_send(3)).
//!
//! One array of work requests runs parallel to the ring's slots, so that a request is written once, where the provider reads it. What never changes
//! (`wr_id`, which is the slot, and where its scatter-gather list lies) is written at creation.

use core::ffi::c_int;
use core::ptr::NonNull;

use doorbell_verbs_sys::{self as sys, inline};

/// The two kinds of work request, as far as chaining them goes.
pub(crate) trait WorkRequest: Sized {
    /// A request with this identity, and with room for its scatter-gather list at `sg_list`; the rest is zero.
    fn new(wr_id: u64, sg_list: *mut sys::ibv_sge) -> Self;

    /// Makes `next` follow `wr`.
    ///
    /// # Safety
    /// `wr` points to a request.
    unsafe fn link(wr: *mut Self, next: *mut Self);

    /// Sets the number of scatter-gather elements.
    ///
    /// # Safety
    /// `wr` points to a request.
    unsafe fn set_num_sge(wr: *mut Self, num_sge: c_int);

    /// The scatter-gather list of `new`.
    ///
    /// # Safety
    /// `wr` points to a request.
    unsafe fn sg_list(wr: *mut Self) -> *mut sys::ibv_sge;

    /// Hands the chain that begins at `first` to the provider.
    ///
    /// # Safety
    /// As for ibv_post_send(3): `qp` is live, the chain is well-formed, and its memory stays registered and untouched until completed.
    unsafe fn post(qp: *mut sys::ibv_qp, first: *mut Self, bad: *mut *mut Self) -> c_int;
}

impl WorkRequest for sys::ibv_send_wr {
    fn new(wr_id: u64, sg_list: *mut sys::ibv_sge) -> Self {
        // SAFETY: all-zero is a valid value of this struct of integers, nullable pointers and unions of them.
        let zero: Self = unsafe { core::mem::zeroed() };
        Self { wr_id, sg_list, ..zero }
    }

    #[inline(always)]
    unsafe fn link(wr: *mut Self, next: *mut Self) {
        // SAFETY: points to a request by contract.
        unsafe { (*wr).next = next }
    }

    #[inline(always)]
    unsafe fn set_num_sge(wr: *mut Self, num_sge: c_int) {
        // SAFETY: as above.
        unsafe { (*wr).num_sge = num_sge }
    }

    #[inline(always)]
    unsafe fn sg_list(wr: *mut Self) -> *mut sys::ibv_sge {
        // SAFETY: as above.
        unsafe { (*wr).sg_list }
    }

    #[inline(always)]
    unsafe fn post(qp: *mut sys::ibv_qp, first: *mut Self, bad: *mut *mut Self) -> c_int {
        // SAFETY: by contract.
        unsafe { inline::post_send(qp, first, bad) }
    }
}

impl WorkRequest for sys::ibv_recv_wr {
    fn new(wr_id: u64, sg_list: *mut sys::ibv_sge) -> Self {
        Self {
            wr_id,
            next: core::ptr::null_mut(),
            sg_list,
            num_sge: 0,
        }
    }

    #[inline(always)]
    unsafe fn link(wr: *mut Self, next: *mut Self) {
        // SAFETY: points to a request by contract.
        unsafe { (*wr).next = next }
    }

    #[inline(always)]
    unsafe fn set_num_sge(wr: *mut Self, num_sge: c_int) {
        // SAFETY: as above.
        unsafe { (*wr).num_sge = num_sge }
    }

    #[inline(always)]
    unsafe fn sg_list(wr: *mut Self) -> *mut sys::ibv_sge {
        // SAFETY: as above.
        unsafe { (*wr).sg_list }
    }

    #[inline(always)]
    unsafe fn post(qp: *mut sys::ibv_qp, first: *mut Self, bad: *mut *mut Self) -> c_int {
        // SAFETY: by contract.
        unsafe { inline::post_recv(qp, first, bad) }
    }
}

/// The work requests of one queue, one per slot, and one more that is never posted: every chain is linked to it, and requests refused are written to it.
pub(crate) struct RequestArray<W: WorkRequest> {
    requests: NonNull<W>,
    scratch: *mut W,
    slots: usize,
    sges: NonNull<sys::ibv_sge>,
    num_sges: usize,
}

// SAFETY: it owns both arrays; the pointers in the requests point into `sges` and `requests` alone.
unsafe impl<W: WorkRequest> Send for RequestArray<W> {}
// SAFETY: shared access reads nothing.
unsafe impl<W: WorkRequest> Sync for RequestArray<W> {}

impl<W: WorkRequest> RequestArray<W> {
    /// Requests for `slots` slots of `max_sge` elements each; `key` is the upper half of their `wr_id`.
    pub(crate) fn new(slots: u32, max_sge: u32, key: u32) -> Self {
        let slots = slots as usize;
        let per_slot = max_sge.max(1) as usize;
        let sges = vec![
            sys::ibv_sge {
                addr: 0,
                length: 0,
                lkey: 0
            };
            slots * per_slot
        ]
        .into_boxed_slice();
        let num_sges = sges.len();
        let sges = NonNull::from(Box::leak(sges)).cast::<sys::ibv_sge>();
        let requests: Box<[W]> = (0..=slots)
            .map(|slot| {
                // The last one has no list; nothing reads it.
                let list = sges.as_ptr().wrapping_add(slot * per_slot);
                W::new(u64::from(key) << 32 | slot as u64, list)
            })
            .collect();
        let requests = NonNull::from(Box::leak(requests)).cast::<W>();
        let scratch = requests.as_ptr().wrapping_add(slots);
        Self {
            requests,
            scratch,
            slots,
            sges,
            num_sges,
        }
    }

    /// The request of `slot`.
    ///
    /// # Safety
    /// `slot` is below the number of slots.
    #[inline(always)]
    pub(crate) unsafe fn request(&self, slot: u64) -> *mut W {
        // SAFETY: in bounds of the array by contract.
        unsafe { self.requests.as_ptr().add(slot as usize) }
    }

    /// The request that no slot has: where a chain begins, and what a refused request is written to.
    #[inline(always)]
    pub(crate) fn scratch(&self) -> *mut W {
        self.scratch
    }

    /// The slot of the request at `bad`, if it is one of this array.
    pub(crate) fn slot_of(&self, bad: *mut W) -> Option<u64> {
        let offset = bad.addr().checked_sub(self.requests.addr().get())?;
        let slot = offset / size_of::<W>();
        (offset % size_of::<W>() == 0 && slot < self.slots).then_some(slot as u64)
    }
}

impl<W: WorkRequest> Drop for RequestArray<W> {
    fn drop(&mut self) {
        // SAFETY: both were leaked from boxes of these lengths in `new`, and are freed once.
        unsafe {
            drop(Box::from_raw(
                NonNull::slice_from_raw_parts(self.requests, self.slots + 1).as_ptr(),
            ));
            drop(Box::from_raw(
                NonNull::slice_from_raw_parts(self.sges, self.num_sges).as_ptr(),
            ));
        }
    }
}
