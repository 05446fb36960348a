//! The requests in flight on one work queue: a ring of slots, each with a request's buffers.
//!
//! Single producer, single consumer. The *poster* (owner of the `&mut QueuePair`) fills slots at
//! `head`; the *poller* (owner of the `&mut CompletionQueue`, perhaps on another thread) empties
//! them at `tail`. Each writes its own counter and reads the other's: loads and stores only.
//!
//! Invariant: the slots of positions `tail..head` are the poller's, all others the poster's; `head
//! - tail <= depth <= slots`. Position *n* follows *n* requests, in slot `n % slots`.
//!
//! Head, tail, slots and the cancellation of rejected requests are proved in `cq/model.rs`. The
//! device orders nothing, except after a rejection, when `head` had a value twice: then the
//! provider's barriers do. Number, tag and kind are written before the queue pair is returned.

use core::ptr::NonNull;

use crossbeam_utils::CachePadded;

use crate::memory::{Buffers, RangePtr};
use crate::sync::{AtomicBool, AtomicU32, AtomicU64, HandoffCell, Ordering};
use crate::types::Qpn;

/// One of a queue pair's two work queues (IBTA vol 1, 10.2.4).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum QueueKind {
    /// The send queue: sends, writes, reads, atomics.
    Send,
    /// The receive queue.
    Receive,
}

/// A queue pair of this process, whatever its device; never that of another. 0 for none.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct QpId(pub(crate) u64);

/// Holds the buffers of one request, if it has any.
pub(crate) type Slot = HandoffCell<Option<RangePtr>>;

pub(crate) struct Ring {
    slots: Box<[Slot]>,
    mask: u64,
    depth: u32,
    queue: QueueKind,
    tag: u64,
    qpn: AtomicU32,
    qp: AtomicU64,
    /// Whether its receives are datagrams, after a GRH. Set before the queue pair is used.
    datagrams: AtomicBool,
    /// Requests posted so far. Written by the poster, thus not in a cache line with `tail`.
    head: CachePadded<AtomicU64>,
    /// Requests retired so far. Written by the poller.
    tail: CachePadded<AtomicU64>,
}

// SAFETY: a ring owns the ranges in its slots, which are Send.
unsafe impl Send for Ring {}
// SAFETY: slots are accessed by the party that owns them (see the module's invariant), and
// ownership passes by a release store of a counter that the other party acquires.
unsafe impl Sync for Ring {}

impl Ring {
    pub(crate) fn new(depth: u32, queue: QueueKind, tag: u64) -> Self {
        let slots = slots_for(depth);
        Self {
            slots: (0..slots).map(|_| Slot::new(None)).collect(),
            mask: u64::from(slots) - 1,
            depth,
            queue,
            tag,
            qpn: AtomicU32::new(0),
            qp: AtomicU64::new(0),
            datagrams: AtomicBool::new(false),
            head: CachePadded::new(AtomicU64::new(0)),
            tail: CachePadded::new(AtomicU64::new(0)),
        }
    }

    pub(crate) fn depth(&self) -> u32 {
        self.depth
    }

    pub(crate) fn mask(&self) -> u64 {
        self.mask
    }

    pub(crate) fn queue(&self) -> QueueKind {
        self.queue
    }

    pub(crate) fn tag(&self) -> u64 {
        self.tag
    }

    pub(crate) fn qpn(&self) -> Qpn {
        Qpn::truncated(self.qpn.load(Ordering::Relaxed))
    }

    pub(crate) fn qp(&self) -> QpId {
        QpId(self.qp.load(Ordering::Relaxed))
    }

    pub(crate) fn set_qp(&self, qp: QpId, qpn: Qpn) {
        self.qp.store(qp.0, Ordering::Relaxed);
        self.qpn.store(qpn.get(), Ordering::Relaxed);
    }

    pub(crate) fn set_datagrams(&self) {
        self.datagrams.store(true, Ordering::Relaxed);
    }

    pub(crate) fn receives_datagrams(&self) -> bool {
        self.datagrams.load(Ordering::Relaxed)
    }

    /// Requests posted so far, for any thread.
    pub(crate) fn posted(&self) -> u64 {
        self.head.load(Ordering::Acquire)
    }

    /// Requests in flight, for either party; the other may be changing it.
    #[inline]
    pub(crate) fn in_flight(&self) -> u32 {
        let tail = self.tail.load(Ordering::Acquire);
        // At most `depth`: a head before its last store can't lie before a tail read earlier.
        self.head.load(Ordering::Acquire).saturating_sub(tail) as u32
    }

    /// Poster: requests retired so far. The slots of earlier positions are the poster's again.
    #[inline(always)]
    pub(crate) fn retired(&self) -> u64 {
        self.tail.load(Ordering::Acquire)
    }

    /// Poster: the slots, for buffers at positions `head..tail + depth`.
    pub(crate) fn slots(&self) -> NonNull<Slot> {
        NonNull::from(&*self.slots).cast()
    }

    /// Poster: reclaims the buffers of an unpublished `position`, or one that `publish` withdrew.
    ///
    /// # Safety
    /// The caller is the poster, its slot was filled and not taken; `position` is not below `head`.
    pub(crate) unsafe fn reclaim(&self, position: u64) -> Buffers {
        let slot = self.slot(position);
        // SAFETY: the slot is the poster's and owns its list, which no device has.
        unsafe {
            let buffers = Buffers::from_head(slot.get());
            slot.set(None);
            buffers
        }
    }

    /// Poster: publishes requests below `head`, before the doorbell; or withdraws rejected ones.
    #[inline(always)]
    pub(crate) fn publish(&self, head: u64) {
        self.head.store(head, Ordering::Release);
    }

    /// Poster: [`publish`](Self::publish)es one more request.
    #[inline(always)]
    pub(crate) fn publish_one(&self) {
        // No read-modify-write: the poster is the only writer.
        self.publish(self.head.load(Ordering::Relaxed) + 1);
    }

    #[inline(always)]
    pub(crate) fn head(&self) -> u64 {
        self.head.load(Ordering::Relaxed)
    }

    /// Poller: the position retired next.
    #[inline(always)]
    pub(crate) fn tail(&self) -> u64 {
        self.tail.load(Ordering::Relaxed)
    }

    #[inline(always)]
    pub(crate) fn slot_of(&self, position: u64) -> u64 {
        position & self.mask
    }

    /// Poller: whether the request at `position`, which is not retired, is in flight.
    #[inline(always)]
    pub(crate) fn is_in_flight(&self, position: u64) -> bool {
        // Acquire: what the poster put in the slots is visible.
        position < self.head.load(Ordering::Acquire)
    }

    /// Poller: how many requests before its own the completion of this slot retires, from `tail`
    /// on. `None` if no such request is in flight.
    #[inline(always)]
    pub(crate) fn unretired_before(&self, slot: u32, tail: u64) -> Option<u64> {
        let before = u64::from(slot).wrapping_sub(tail) & self.mask;
        self.is_in_flight(tail + before).then_some(before)
    }

    /// Poller: the slot of an unretired `position`, and how many requests are in flight from it on.
    #[inline(always)]
    pub(crate) fn from(&self, position: u64) -> (*const Slot, u64) {
        // Acquire: what the poster put in the slots is visible.
        let in_flight = self.head.load(Ordering::Acquire).saturating_sub(position);
        // Derived from the pointer to all slots, as the caller advances to later ones.
        (
            self.slots.as_ptr().wrapping_add(self.slot_of(position) as usize),
            in_flight,
        )
    }

    /// Poller: whether the request at `position` posted no buffers.
    ///
    /// # Safety
    /// The caller is the poller, and the request is in flight.
    #[inline(always)]
    pub(crate) unsafe fn is_vacant(&self, position: u64) -> bool {
        // SAFETY: the slot is the poller's.
        unsafe { self.slot(position).get() }.is_none()
    }

    /// Poller: gives the slots below `tail` back to the poster.
    #[inline(always)]
    pub(crate) fn retire(&self, tail: u64) {
        self.tail.store(tail, Ordering::Release);
    }

    /// Poller: [`retire`](Self::retire)s one more slot; as the only writer, not atomic as a whole.
    #[inline(always)]
    pub(crate) fn retire_next(&self) {
        self.retire(self.tail() + 1);
    }

    #[inline(always)]
    fn slot(&self, position: u64) -> &Slot {
        // SAFETY: `mask` is the number of slots less one, and that number is a power of two.
        unsafe { self.slots.get_unchecked(self.slot_of(position) as usize) }
    }
}

/// The slots of a ring for `depth` requests: a power of two.
pub(crate) fn slots_for(depth: u32) -> u32 {
    depth.max(1).next_power_of_two()
}

impl Drop for Ring {
    /// The queue pair, which holds a reference, has been destroyed: the device is done with them.
    fn drop(&mut self) {
        let (tail, head) = (self.tail(), self.head());
        for position in tail..head {
            // SAFETY: by `&mut self` no poster or poller is left; slots `tail..head` own lists.
            drop(unsafe { self.reclaim(position) });
        }
    }
}
