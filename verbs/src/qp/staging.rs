//! Staging a batch: requests are written into the queue's own array, counted, and given to the provider by one call, or taken back.
//!
//! What changes with every request ([`Staging`]) is two words that live in registers: everything that may be called out of line gets them by value.

use core::ffi::c_int;
use core::mem::ManuallyDrop;
use core::ptr::NonNull;
use std::io;
use std::sync::Arc;

use doorbell_verbs_sys as sys;

use super::backend::post_list::{RequestArray, WorkRequest};
use super::refused::{Reason, Refused, RefusedBatch};
use super::ring::{Queue, Ring, Slot, slots_for};
use crate::memory::Buffers;
use crate::wr::payload::Payload;

/// The poster's side of one queue.
pub(crate) struct Poster<W: WorkRequest> {
    requests: RequestArray<W>,
    ring: Arc<Ring>,
    /// The ring's slots.
    slots: NonNull<Slot>,
    qp: *mut sys::ibv_qp,
    /// The slots less one.
    mask: u64,
    /// Requests posted so far: what the ring's head is.
    head: u64,
    /// The position that would be one too many: the tail when last looked at, plus the depth. While a batch is being refused, the position of its first
    /// request refused, so that all later ones are noticed too.
    limit: u64,
    pub(crate) max_sge: u32,
    /// Which request the provider has refused, as it said in the last call. Here, as a stack frame for it would cost as much as the rest of a call.
    bad: *mut W,
    /// Why the batch being built is refused, if it is.
    refusal: Option<Box<Refusal>>,
}

struct Refusal {
    reason: Reason,
    /// The buffers of the refused request and those after it.
    buffers: Vec<Buffers>,
}

// SAFETY: `qp` is only passed to verbs, which may be called from any thread; `slots` points into the ring, which is Send; so is the rest.
unsafe impl<W: WorkRequest> Send for Poster<W> {}
// SAFETY: shared access only reads counters.
unsafe impl<W: WorkRequest> Sync for Poster<W> {}

impl<W: WorkRequest> Poster<W> {
    /// # Safety
    /// `qp` is live as long as the poster is used; the poster is the ring's only one; `key` is the ring's in its completion queue.
    pub(crate) unsafe fn new(qp: *mut sys::ibv_qp, ring: Arc<Ring>, key: u32, max_sge: u32) -> Self {
        let requests = RequestArray::new(slots_for(ring.depth()), max_sge, key);
        let (slots, mask, limit) = (ring.slots(), ring.mask(), u64::from(ring.depth()));
        Self {
            requests,
            ring,
            slots,
            qp,
            mask,
            head: 0,
            limit,
            max_sge,
            bad: core::ptr::null_mut(),
            refusal: None,
        }
    }

    #[inline(always)]
    pub(crate) fn head(&self) -> u64 {
        self.head
    }

    pub(crate) fn in_flight(&self) -> u32 {
        self.ring.in_flight()
    }

    pub(crate) fn depth(&self) -> u32 {
        self.ring.depth()
    }

    /// Puts `buffers` into a slot.
    ///
    /// # Safety
    /// `slot` is that of a position in `head..tail + depth`; what it held was taken out.
    #[inline(always)]
    unsafe fn put(&mut self, slot: u64, buffers: Buffers) {
        // SAFETY: the slots live as long as the ring; this one is the poster's.
        unsafe { *self.slots.add(slot as usize).as_ref().get() = buffers.into_head() }
    }

    /// Whether there is a free slot for the request at `head`, as far as is known without looking at what the poller has retired since.
    #[inline(always)]
    pub(crate) fn has_room(&self) -> bool {
        self.head != self.limit
    }

    /// Posts one request: as [`Staging::push`] and [`Staging::finish`] do, in one. Returns what the provider said.
    ///
    /// # Safety
    /// As for [`Staging::push`], of the request at `head`; the payload `is_single`, and inline data stays readable until this returns. If the result is not 0,
    /// `take_back_one` is called next.
    #[inline(always)]
    pub(crate) unsafe fn post_one(&mut self, fill: impl FnOnce(*mut W), payload: impl Payload) -> c_int {
        let slot = self.head & self.mask;
        // SAFETY: the mask keeps the slot in range; it is the poster's, since there is room, and so is its request, which is a chain of its own and complete by
        // contract. The queue pair is live. The request's memory is owned by the ring, which keeps it until completed, or until the queue pair is destroyed.
        unsafe {
            let request = self.requests.request(slot);
            W::link(request, core::ptr::null_mut());
            W::set_num_sge(request, 1);
            fill(request);
            payload.fill(W::sg_list(request));
            self.put(slot, payload.into_buffers());
            self.head += 1;
            // Before the device may complete it.
            self.ring.publish(self.head);
            self.bad = core::ptr::null_mut();
            W::post(self.qp, request, &raw mut self.bad)
        }
    }

    /// Takes back the request just posted, if the provider did not accept it: `result` is what [`post_one`](Self::post_one) returned.
    #[cold]
    #[inline(never)]
    pub(crate) fn take_back_one(&mut self, result: c_int) -> Refused {
        self.take_back(self.head - 1, result)
    }

    /// Asks the poller how far it has come.
    fn look_for_room(&mut self) {
        self.limit = self.ring.retired() + u64::from(self.ring.depth());
    }

    /// What to do with the request at `position` that did not pass: `reason` is what its own check said, if it was that. Gives it back if it may be staged after
    /// all; else keeps its buffers, to be given back with the refusal.
    pub(crate) fn reconsider<P: Payload>(&mut self, position: u64, reason: Option<Reason>, payload: P) -> Option<P> {
        if self.refusal.is_none() {
            if reason.is_none() {
                self.look_for_room();
                if position != self.limit {
                    return Some(payload);
                }
            }
            let reason = reason.unwrap_or(Reason::QueueFull {
                depth: self.ring.depth(),
            });
            self.limit = position;
            self.refusal = Some(Box::new(Refusal {
                reason,
                buffers: Vec::new(),
            }));
        }
        if let Some(refusal) = &mut self.refusal {
            refusal.buffers.push(payload.into_buffers());
        }
        None
    }

    /// Takes back the requests `head..next`, because one of the batch was refused here.
    #[cold]
    #[inline(never)]
    fn refuse(&mut self, next: u64) -> Refused {
        let index = (next - self.head) as usize;
        let mut buffers = self.unstage(next);
        self.look_for_room();
        let reason = match self.refusal.take() {
            Some(refusal) => {
                buffers.extend(refusal.buffers);
                refusal.reason
            }
            None => Reason::QueueFull {
                depth: self.ring.depth(),
            },
        };
        Box::new(RefusedBatch {
            index,
            reason,
            posted: 0,
            buffers,
        })
    }

    /// Takes back what the provider did not accept of the chain of `start..self.head`: from the request at `bad` on.
    #[cold]
    #[inline(never)]
    fn take_back(&mut self, start: u64, result: c_int) -> Refused {
        let error = match result {
            errno if errno > 0 => io::Error::from_raw_os_error(errno),
            _ => io::Error::last_os_error(),
        };
        let next = self.head;
        // A provider that names no request of this chain leaves open which it took: then they all stay in flight, where nothing can touch them.
        let accepted = self
            .requests
            .slot_of(self.bad)
            .map(|slot| slot.wrapping_sub(start) & self.mask)
            .filter(|&accepted| accepted < next - start)
            .unwrap_or(next - start);
        self.head = start + accepted;
        self.ring.publish(self.head);
        let buffers = self.unstage(next);
        let verb = match self.ring.queue() {
            Queue::Send => "ibv_post_send",
            Queue::Receive => "ibv_post_recv",
        };
        let posted = accepted as usize;
        Box::new(RefusedBatch {
            index: posted,
            reason: Reason::Device { verb, error },
            posted,
            buffers,
        })
    }

    /// Takes back all, because the closure that builds the batch has panicked.
    #[cold]
    #[inline(never)]
    fn abandon(&mut self, next: u64) {
        drop(self.unstage(next));
        self.refusal = None;
        self.look_for_room();
    }

    /// Takes the buffers of `head..next` out of their slots.
    fn unstage(&mut self, next: u64) -> Vec<Buffers> {
        // SAFETY: all of them were put by `push`, are not published (or no more), and are taken once: the caller forgets `next`.
        (self.head..next)
            .map(|position| unsafe { self.ring.take_back(position) })
            .collect()
    }
}

/// A batch being built: what it has staged of a poster's queue. Dropped before [`finish`](Self::finish), by an unwinding panic, it takes all back.
pub(crate) struct Staging<'q, W: WorkRequest> {
    poster: &'q mut Poster<W>,
    /// The position of the next request.
    next: u64,
    /// The request to which the next one is linked.
    last: *mut W,
}

impl<'q, W: WorkRequest> Staging<'q, W> {
    #[inline(always)]
    pub(crate) fn new(poster: &'q mut Poster<W>) -> Self {
        let (next, last) = (poster.head, poster.requests.scratch());
        Self { poster, next, last }
    }

    /// The position that the next request will have.
    #[inline(always)]
    pub(crate) fn next(&self) -> u64 {
        self.next
    }

    #[inline(always)]
    pub(crate) fn poster(&mut self) -> &mut Poster<W> {
        self.poster
    }

    #[inline(always)]
    pub(crate) fn max_sge(&self) -> u32 {
        self.poster.max_sge
    }

    /// Whether there is a free slot, as far as is known without looking at what the poller has retired since.
    #[inline(always)]
    pub(crate) fn has_room(&self) -> bool {
        self.next != self.poster.limit
    }

    /// Stages the next request: takes its place in the chain, has it written by `fill` (what only this kind of request has) and by its `payload`, and keeps
    /// the payload's buffers.
    ///
    /// # Safety
    /// `has_room` is true, and the payload keeps to the queue pair's limits. `fill` completes a request that the provider may be given, and does not panic. Inline
    /// data stays readable until `finish`.
    #[inline(always)]
    pub(crate) unsafe fn push(&mut self, fill: impl FnOnce(*mut W), payload: impl Payload) -> *mut W {
        // SAFETY: the mask keeps the slot in range. Slots of `head..limit` are the poster's, and so are their requests: `next` is one of them by contract.
        // `last` is the scratch request or the one staged before.
        unsafe {
            let slot = self.next & self.poster.mask;
            let request = self.poster.requests.request(slot);
            W::link(self.last, request);
            self.last = request;
            W::set_num_sge(request, payload.num_sge());
            fill(request);
            payload.fill(W::sg_list(request));
            self.poster.put(slot, payload.into_buffers());
            self.next += 1;
            request
        }
    }

    /// A request that is never posted.
    #[inline(always)]
    pub(crate) fn scratch(&self) -> *mut W {
        self.poster.requests.scratch()
    }

    /// Gives all that was staged to the provider: one doorbell.
    #[inline(always)]
    pub(crate) fn finish(self) -> Result<(), Refused> {
        let mut this = ManuallyDrop::new(self);
        let (next, last) = (this.next, this.last);
        let poster = &mut *this.poster;
        if poster.refusal.is_some() {
            return Err(poster.refuse(next));
        }
        let start = poster.head;
        if start == next {
            return Ok(());
        }
        // SAFETY: it is the last request staged: this ends the chain.
        unsafe { W::link(last, core::ptr::null_mut()) };
        poster.head = next;
        // Before the device may complete them.
        poster.ring.publish(next);
        poster.bad = core::ptr::null_mut();
        // SAFETY: the queue pair is live. The chain begins with the request of position `start` and ends with that of `next - 1`, each filled as `push` requires;
        // their memory is owned by the ring, which keeps it until completed, or until the queue pair is destroyed.
        let result = unsafe {
            W::post(
                poster.qp,
                poster.requests.request(start & poster.mask),
                &raw mut poster.bad,
            )
        };
        if result == 0 {
            return Ok(());
        }
        Err(poster.take_back(start, result))
    }
}

impl<W: WorkRequest> Drop for Staging<'_, W> {
    /// Only an unwinding panic in the closure that builds the batch comes here.
    #[inline(always)]
    fn drop(&mut self) {
        self.poster.abandon(self.next);
    }
}
