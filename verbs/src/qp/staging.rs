//! Staging a batch: requests are written into the queue's own array, counted, and given to the provider by one call, or taken back.

use core::mem::ManuallyDrop;
use std::io;
use std::sync::Arc;

use doorbell_verbs_sys as sys;

use super::backend::post_list::{RequestArray, WorkRequest};
use super::refused::{Reason, Refused, RefusedBatch};
use super::ring::{Ring, slots_for};
use crate::memory::Buffers;

/// The poster's side of one queue.
pub(crate) struct Poster<W: WorkRequest> {
    qp: *mut sys::ibv_qp,
    requests: RequestArray<W>,
    ring: Arc<Ring>,
    /// Requests posted so far: what the ring's head is.
    head: u64,
    /// The position that would be one too many: the tail when last looked at, plus the depth.
    limit: u64,
    pub(crate) max_sge: u32,
}

// SAFETY: `qp` is only passed to verbs, which may be called from any thread; the rest is Send.
unsafe impl<W: WorkRequest> Send for Poster<W> {}
// SAFETY: shared access only reads counters.
unsafe impl<W: WorkRequest> Sync for Poster<W> {}

impl<W: WorkRequest> Poster<W> {
    /// # Safety
    /// `qp` is live as long as the poster is used; the poster is the ring's only one; `key` is the ring's in its completion queue.
    pub(crate) unsafe fn new(qp: *mut sys::ibv_qp, ring: Arc<Ring>, key: u32, max_sge: u32) -> Self {
        let requests = RequestArray::new(slots_for(ring.depth()), max_sge, key);
        let limit = u64::from(ring.depth());
        Self {
            qp,
            requests,
            ring,
            head: 0,
            limit,
            max_sge,
        }
    }

    pub(crate) fn head(&self) -> u64 {
        self.head
    }

    pub(crate) fn in_flight(&self) -> u32 {
        self.ring.in_flight()
    }

    pub(crate) fn depth(&self) -> u32 {
        self.ring.depth()
    }
}

/// A batch being built. What it has staged is the poster's until [`finish`](Self::finish); dropped before, by an unwinding panic, it takes all back.
pub(crate) struct Staging<'q, W: WorkRequest> {
    poster: &'q mut Poster<W>,
    /// The position of the next request.
    next: u64,
    /// Where the next request is linked.
    link: *mut *mut W,
    /// From the first refused request on, nothing is staged.
    refusal: Option<Box<Refusal>>,
}

struct Refusal {
    reason: Reason,
    /// The buffers of the refused request and those after it.
    buffers: Vec<Buffers>,
}

impl<'q, W: WorkRequest> Staging<'q, W> {
    #[inline(always)]
    pub(crate) fn new(poster: &'q mut Poster<W>) -> Self {
        let (next, link) = (poster.head, poster.requests.anchor());
        Self {
            poster,
            next,
            link,
            refusal: None,
        }
    }

    /// The position that the next request will have.
    #[inline(always)]
    pub(crate) fn next(&self) -> u64 {
        self.next
    }

    pub(crate) fn max_sge(&self) -> u32 {
        self.poster.max_sge
    }

    /// Whether there is a free slot, as far as is known without looking at what the poller has retired since.
    #[inline(always)]
    pub(crate) fn has_room(&self) -> bool {
        self.next != self.poster.limit
    }

    /// Whether there is a free slot, now that the poller has been asked.
    fn look_for_room(&mut self) -> bool {
        self.poster.limit = self.poster.ring.retired() + u64::from(self.poster.depth());
        self.has_room()
    }

    /// Stages the next request: takes its place in the chain, and has it written by `fill` (what only this kind of request has) and `fill_sges` (its
    /// scatter-gather list, whose length it returns).
    ///
    /// # Safety
    /// `has_room` is true. `fill` and `fill_sges` leave a request that the provider may be given, of at most `max_sge` elements, and do not panic. Their memory
    /// is in the buffers that [`keep_in_flight`](Self::keep_in_flight) is called with next, or is inline data that stays readable until `finish`.
    #[inline(always)]
    pub(crate) unsafe fn push(&mut self, fill: impl FnOnce(*mut W), fill_sges: impl FnOnce(*mut sys::ibv_sge) -> i32) {
        // SAFETY: the mask keeps the slot in range. Slots of `head..limit` are the poster's, and so are their requests: `next` is one of them by contract.
        // `link` points to the anchor or to the request staged before.
        unsafe {
            let request = self.poster.requests.request(self.next & self.poster.ring.mask());
            *self.link = request;
            self.link = W::link(request);
            fill(request);
            W::set_num_sge(request, fill_sges(W::sg_list(request)));
        }
    }

    /// Puts the buffers of the request just pushed into its slot, and counts it.
    ///
    /// # Safety
    /// `push` was called just before.
    #[inline(always)]
    pub(crate) unsafe fn keep_in_flight(&mut self, buffers: Buffers) {
        // SAFETY: we are the poster, and there was room for this position.
        unsafe { self.poster.ring.put(self.next, buffers) };
        self.next += 1;
    }

    /// What to do with a request that [`has_room`](Self::has_room) or its own check would not let pass: `reason` is what its own check said. True if it may be
    /// staged after all; else its buffers go to [`keep`](Self::keep).
    #[cold]
    #[inline(never)]
    pub(crate) fn reconsider(&mut self, reason: Option<Reason>) -> bool {
        if self.refusal.is_some() {
            return false;
        }
        let reason = match reason {
            Some(reason) => reason,
            None if self.look_for_room() => return true,
            None => Reason::QueueFull {
                depth: self.poster.depth(),
            },
        };
        // From now on `has_room` is false, so that every later request comes here.
        self.poster.limit = self.next;
        self.refusal = Some(Box::new(Refusal {
            reason,
            buffers: Vec::new(),
        }));
        false
    }

    /// Keeps the buffers of a request that may not be staged, to be given back with the refusal.
    #[cold]
    #[inline(never)]
    pub(crate) fn keep(&mut self, buffers: Buffers) {
        if let Some(refusal) = &mut self.refusal {
            refusal.buffers.push(buffers);
        }
    }

    /// Gives all that was staged to the provider: one doorbell.
    #[inline(always)]
    pub(crate) fn finish(self) -> Result<(), Refused> {
        let mut this = ManuallyDrop::new(self);
        if this.refusal.is_some() {
            return Err(this.refuse());
        }
        let (head, next) = (this.poster.head, this.next);
        if head == next {
            return Ok(());
        }
        // SAFETY: `link` points to the last request staged: this ends the chain.
        unsafe { *this.link = core::ptr::null_mut() };
        this.poster.head = next;
        // Before the device may complete them.
        this.poster.ring.publish(next);
        let mut bad = core::ptr::null_mut();
        // SAFETY: the queue pair is live. The chain begins with the request of position `head` and ends with that of `next - 1`, each filled as `push` requires;
        // their memory is owned by the ring, which keeps it until completed, or until the queue pair is destroyed.
        let result = unsafe {
            let first = this.poster.requests.request(head & this.poster.ring.mask());
            W::post(this.poster.qp, first, &raw mut bad)
        };
        if result == 0 {
            return Ok(());
        }
        Err(this.take_back(head, bad, result))
    }

    /// Takes everything back, because a request was refused here.
    #[cold]
    fn refuse(&mut self) -> Refused {
        let index = (self.next - self.poster.head) as usize;
        let mut buffers = self.unstage();
        // The limit was lowered to refuse what came after.
        self.poster.limit = self.poster.ring.retired() + u64::from(self.poster.depth());
        let reason = match self.refusal.take() {
            Some(refusal) => {
                buffers.extend(refusal.buffers);
                refusal.reason
            }
            None => Reason::QueueFull {
                depth: self.poster.depth(),
            },
        };
        Box::new(RefusedBatch {
            index,
            reason,
            posted: 0,
            buffers,
        })
    }

    /// Takes back what the provider did not accept of the chain that began at `start`.
    #[cold]
    fn take_back(&mut self, start: u64, bad: *mut W, result: i32) -> Refused {
        let error = match result {
            errno if errno > 0 => io::Error::from_raw_os_error(errno),
            _ => io::Error::last_os_error(),
        };
        // A provider that names no request of this chain leaves open which it took: then they all stay in flight, where nothing can touch them.
        let accepted = self
            .poster
            .requests
            .slot_of(bad)
            .map(|slot| slot.wrapping_sub(start) & self.poster.ring.mask())
            .filter(|&accepted| accepted < self.next - start)
            .unwrap_or(self.next - start);
        self.poster.head = start + accepted;
        self.poster.ring.publish(self.poster.head);
        let buffers = self.unstage();
        let verb = match self.poster.ring.queue() {
            super::ring::Queue::Send => "ibv_post_send",
            super::ring::Queue::Receive => "ibv_post_recv",
        };
        let posted = accepted as usize;
        Box::new(RefusedBatch {
            index: posted,
            reason: Reason::Device { verb, error },
            posted,
            buffers,
        })
    }

    /// Takes the buffers of `head..next` out of their slots.
    fn unstage(&mut self) -> Vec<Buffers> {
        let staged = self.poster.head..self.next;
        self.next = self.poster.head;
        // SAFETY: all of them were put by `push`, are not published, and are taken once: `next` no longer counts them.
        staged
            .map(|position| unsafe { self.poster.ring.take_back(position) })
            .collect()
    }
}

impl<W: WorkRequest> Drop for Staging<'_, W> {
    /// Only an unwinding panic in the closure that builds the batch comes here.
    fn drop(&mut self) {
        drop(self.unstage());
        if self.refusal.is_some() {
            self.poster.limit = self.poster.head;
        }
    }
}
