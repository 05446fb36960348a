//! WQE slots: requests whose constant fields (`wr_id`, list, buffers, successor) are prefilled.

use core::ptr::NonNull;
use std::alloc::{Layout, alloc_zeroed, dealloc, handle_alloc_error};

use doorbell_verbs_sys as sys;

use crate::qp::ring::{Ring, Slot};

/// A WQE slot. Its address is its work request's, by which the provider reports `bad_wr`.
#[repr(C)]
pub struct WqeSlot<R> {
    pub(crate) wr: R,
    /// The next slot, cyclic.
    pub(crate) next_slot: *mut WqeSlot<R>,
    /// Where the ring keeps the request's buffers.
    pub(crate) buffers: *const Slot,
    /// The first scatter-gather element; the queue's remaining ones per request follow the slot.
    pub(crate) sge: sys::ibv_sge,
}

/// All WQE slots of a queue, one per ring slot, in one block.
pub(crate) struct WqeSlots<R> {
    block: NonNull<u8>,
    layout: Layout,
    stride: usize,
    slots: usize,
    request: core::marker::PhantomData<R>,
}

// SAFETY: it owns the block; what the slots point to outlives them by the contract of `new`.
unsafe impl<R> Send for WqeSlots<R> {}
// SAFETY: shared access reads nothing.
unsafe impl<R> Sync for WqeSlots<R> {}

/// Slots begin on a cache line of their own.
const LINE: usize = 64;

impl<R> WqeSlots<R> {
    /// Slots for `ring`, of `max_sge` elements, by `new_wr`; `key` is the upper half of `wr_id`.
    ///
    /// # Safety
    /// The ring outlives them.
    pub(crate) unsafe fn new(
        ring: &Ring,
        max_sge: u32,
        key: u32,
        request: impl Fn(u64, *mut sys::ibv_sge) -> R,
    ) -> Self {
        let slots = ring.mask() as usize + 1;
        let more = max_sge.saturating_sub(1) as usize * size_of::<sys::ibv_sge>();
        let stride = (size_of::<WqeSlot<R>>() + more).next_multiple_of(LINE);
        let bytes = stride.saturating_mul(slots);
        let layout = Layout::from_size_align(bytes, LINE).expect("the device has no queue of half the address space");
        // SAFETY: a queue has at least one slot, and a slot is not empty.
        let Some(block) = NonNull::new(unsafe { alloc_zeroed(layout) }) else {
            handle_alloc_error(layout)
        };
        let wqes = Self {
            block,
            layout,
            stride,
            slots,
            request: core::marker::PhantomData,
        };
        for slot in 0..slots {
            let wqe = wqes.at(slot as u64);
            // SAFETY: the slot is in the block, which is ours and zero, as its elements may be.
            unsafe {
                (&raw mut (*wqe).wr).write(request(u64::from(key) << 32 | slot as u64, &raw mut (*wqe).sge));
                (*wqe).next_slot = wqes.at(slot as u64 + 1);
                (*wqe).buffers = ring.slots().add(slot).as_ptr();
            }
        }
        wqes
    }

    pub(crate) fn at(&self, position: u64) -> *mut WqeSlot<R> {
        let slot = position as usize & (self.slots - 1);
        self.block.as_ptr().wrapping_add(slot * self.stride).cast()
    }

    #[inline(always)]
    pub(crate) fn previous(&self, wqe: *mut WqeSlot<R>) -> *mut WqeSlot<R> {
        let first = self.block.as_ptr();
        let from = if wqe.cast() == first {
            first.wrapping_add(self.layout.size())
        } else {
            wqe.cast()
        };
        from.wrapping_sub(self.stride).cast()
    }

    /// The number of slots from `first` up to `next`, exclusive: 0 if they are the same.
    pub(crate) fn distance(&self, first: *mut WqeSlot<R>, next: *mut WqeSlot<R>) -> u64 {
        let slot = |wqe: *mut WqeSlot<R>| (wqe.addr() - self.block.addr().get()) / self.stride;
        (slot(next).wrapping_sub(slot(first)) & (self.slots - 1)) as u64
    }

    /// The slot that holds this work request, if it is one of these.
    pub(crate) fn find(&self, request: *mut R) -> Option<*mut WqeSlot<R>> {
        let offset = request.addr().checked_sub(self.block.addr().get())?;
        (offset % self.stride == 0 && offset < self.layout.size()).then(|| self.at((offset / self.stride) as u64))
    }
}

impl<R> Drop for WqeSlots<R> {
    fn drop(&mut self) {
        // SAFETY: allocated in `new` with this layout, and freed once. Requests are plain data.
        unsafe { dealloc(self.block.as_ptr(), self.layout) }
    }
}
