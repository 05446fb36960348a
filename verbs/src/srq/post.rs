//! Posting to a shared receive queue: slots off a free list, chained into a post list.

use core::ffi::c_int;
use core::mem::ManuallyDrop;
use core::ptr;
use std::io;
use std::sync::Arc;

use doorbell_verbs_sys::{self as sys, inline};

use super::SrqInner;
use super::slots::ReturnRing;
use crate::memory::{Buffers, Sink};
use crate::qp::{PostError, PostTarget, RejectReason, RejectedBatch};

/// The longest message: 2^31 bytes (IBTA vol 1, 9.7.7).
const MAX_MESSAGE: u64 = 1 << 31;

pub(super) struct Poster {
    pub(super) srq: Arc<SrqInner>,
    /// A request for each slot, and the SGEs of each.
    requests: Vec<sys::ibv_recv_wr>,
    elements: Vec<sys::ibv_sge>,
    /// Free slots, used from the end. Has capacity for all, as has `staged`.
    free: Vec<u32>,
    staged: Vec<u32>,
    returns: Vec<Arc<ReturnRing>>,
}

// SAFETY: the pointers in the requests point into the poster's own arrays; the rest is Send.
unsafe impl Send for Poster {}
// SAFETY: shared access reads no request.
unsafe impl Sync for Poster {}

impl Poster {
    /// # Safety
    /// It is the only poster of `srq`, to which nothing was posted.
    pub(super) unsafe fn new(srq: Arc<SrqInner>) -> Self {
        let request = |slot| sys::ibv_recv_wr {
            wr_id: u64::from(srq.key) << 32 | u64::from(slot),
            next: ptr::null_mut(),
            sg_list: ptr::null_mut(),
            num_sge: 0,
        };
        let empty = sys::ibv_sge {
            addr: 0,
            length: 0,
            lkey: 0,
        };
        Self {
            requests: (0..srq.depth).map(request).collect(),
            elements: vec![empty; srq.depth as usize * srq.max_sge as usize],
            free: (0..srq.depth).rev().collect(),
            staged: Vec::with_capacity(srq.depth as usize),
            returns: Vec::new(),
            srq,
        }
    }

    pub(super) fn room(&mut self) -> u32 {
        self.collect_returned();
        self.free.len() as u32
    }

    #[inline(never)]
    fn collect_returned(&mut self) {
        let Self { srq, free, returns, .. } = self;
        if srq.take_new_returns(returns) {
            // No longer in use: this is the last reference, so nothing is pushed any more.
            returns.retain_mut(|returns| {
                let over = Arc::get_mut(returns).is_some();
                free.extend(core::iter::from_fn(|| returns.pop()));
                !over
            });
        }
        for returns in returns {
            free.extend(core::iter::from_fn(|| returns.pop()));
        }
    }

    #[inline(always)]
    fn take_slot(&mut self) -> Option<u32> {
        if self.free.is_empty() {
            self.collect_returned();
        }
        self.free.pop()
    }

    #[inline]
    pub(super) fn post_one(&mut self, buffer: impl Sink) -> Result<(), PostError> {
        let Some(slot) = self.take_slot() else {
            return Err(self.full(buffer.into_buffers()));
        };
        // SAFETY: the slot was free, and every list has space for one SGE.
        unsafe { self.stage(slot, [buffer]) };
        self.post()
    }

    /// Fills a free slot and its request, which is then the last of those staged.
    ///
    /// # Safety
    /// The slot came from `take_slot`; `N` is at most `max_sge`.
    #[inline(always)]
    unsafe fn stage<S: Sink, const N: usize>(&mut self, slot: u32, buffers: [S; N]) {
        // SAFETY: slots are below the depth: each has a request with `max_sge` SGEs.
        unsafe {
            let list = self
                .elements
                .as_mut_ptr()
                .add(slot as usize * self.srq.max_sge as usize);
            for (index, buffer) in buffers.iter().enumerate() {
                buffer.write_sge(list.add(index));
            }
            let request = self.requests.as_mut_ptr().add(slot as usize);
            (*request).sg_list = list;
            (*request).num_sge = N as c_int;
        }
        let mut all = Buffers::NONE;
        for buffer in buffers.into_iter().rev() {
            all.prepend(buffer.into_buffers());
        }
        // SAFETY: the slot is the poster's.
        unsafe { self.srq.slots.put(slot, all) };
        self.staged.push(slot);
    }

    /// Posts all that was staged: one doorbell.
    #[inline(always)]
    fn post(&mut self) -> Result<(), PostError> {
        let requests = self.requests.as_mut_ptr();
        let mut next = ptr::null_mut();
        for &slot in self.staged.iter().rev() {
            // SAFETY: slots are below the depth.
            unsafe {
                let request = requests.add(slot as usize);
                (*request).next = next;
                next = request;
            }
        }
        if next.is_null() {
            return Ok(());
        }
        let mut bad = ptr::null_mut();
        // SAFETY: the queue is live. The chain is of requests filled by `stage`; their slots own
        // the memory until they have completed, or until the queue is destroyed.
        let result = unsafe { inline::post_srq_recv(self.srq.raw, next, &mut bad) };
        if result == 0 {
            self.staged.clear();
            return Ok(());
        }
        Err(self.reclaim_refused(bad, result))
    }

    /// Reclaims the staged requests that the provider did not accept: from that at `bad` on.
    #[cold]
    #[inline(never)]
    fn reclaim_refused(&mut self, bad: *mut sys::ibv_recv_wr, result: c_int) -> PostError {
        let error = match result {
            errno if errno > 0 => io::Error::from_raw_os_error(errno),
            _ => io::Error::last_os_error(),
        };
        let requests = self.requests.as_ptr();
        let is_bad = |&slot: &u32| ptr::eq(requests.wrapping_add(slot as usize), bad);
        // Without a name it is unknown which of this chain were accepted: all stay in flight.
        let accepted = self.staged.iter().position(is_bad).unwrap_or(self.staged.len());
        let buffers = self.unstage(accepted);
        self.staged.clear();
        Box::new(RejectedBatch {
            queue: self.name(),
            index: accepted,
            reason: RejectReason::Device {
                verb: "ibv_post_srq_recv",
                error,
            },
            posted: accepted,
            buffers,
        })
    }

    fn unstage(&mut self, first: usize) -> Vec<Buffers> {
        let Self { srq, free, staged, .. } = self;
        let take = |slot| {
            free.push(slot);
            // SAFETY: the device does not have it.
            unsafe { srq.slots.take(slot) }.unwrap_or(Buffers::NONE)
        };
        staged.drain(first..).map(take).collect()
    }

    #[cold]
    #[inline(never)]
    fn full(&self, buffers: Buffers) -> PostError {
        Box::new(RejectedBatch {
            queue: self.name(),
            index: 0,
            reason: self.queue_full(),
            posted: 0,
            buffers: vec![buffers],
        })
    }

    fn name(&self) -> PostTarget {
        PostTarget::Shared(self.srq.id())
    }

    fn queue_full(&self) -> RejectReason {
        RejectReason::QueueFull { depth: self.srq.depth }
    }
}

/// Receives being built for [`post_receives`](super::SharedReceiveQueue::post_receives)
/// (ibv_post_srq_recv(3)).
#[doc(alias("ibv_post_srq_recv", "ibv_recv_wr"))]
pub struct SharedReceiveBatch<'q> {
    poster: &'q mut Poster,
    /// Why the batch is refused, and the buffers of the refused request and those after it.
    refusal: Option<Box<(RejectReason, Vec<Buffers>)>>,
}

impl SharedReceiveBatch<'_> {
    #[inline]
    pub(super) fn post(
        poster: &mut Poster,
        build: impl for<'q> FnOnce(&mut SharedReceiveBatch<'q>),
    ) -> Result<(), PostError> {
        let mut batch = SharedReceiveBatch { poster, refusal: None };
        build(&mut batch);
        batch.finish()
    }

    /// Receives a message into `buffer`; a longer one is an error on both sides. A datagram is
    /// placed behind [`GRH_BYTES`](crate::GRH_BYTES) bytes of header.
    #[inline]
    pub fn receive(&mut self, buffer: impl Sink) {
        self.receive_scatter([buffer]);
    }

    /// Receives a message into several buffers, filled in order (scatter).
    #[inline]
    pub fn receive_scatter<S: Sink, const N: usize>(&mut self, buffers: [S; N]) {
        const { assert!(N > 0, "a receive needs a buffer") };
        match self.check(&buffers) {
            // SAFETY: the slot was free, and `check` has verified that the buffers fit.
            Ok(slot) => unsafe { self.poster.stage(slot, buffers) },
            Err(reason) => self.refuse(reason, buffers),
        }
    }

    /// A slot for the next request if it can be staged; otherwise the reason.
    #[inline]
    fn check<S: Sink, const N: usize>(&mut self, buffers: &[S; N]) -> Result<u32, Option<RejectReason>> {
        if self.refusal.is_some() {
            return Err(None);
        }
        let max = self.poster.srq.max_sge;
        if N > max as usize {
            return Err(Some(RejectReason::TooManyBuffers { requested: N, max }));
        }
        let len = buffers.iter().map(|buffer| u64::from(buffer.bytes())).sum();
        if len > MAX_MESSAGE {
            return Err(Some(RejectReason::MessageTooLong { len }));
        }
        self.poster.take_slot().ok_or_else(|| Some(self.poster.queue_full()))
    }

    /// Keeps the buffers, to be returned with the refusal; the first reason counts.
    #[cold]
    #[inline(never)]
    fn refuse<S: Sink, const N: usize>(&mut self, reason: Option<RejectReason>, buffers: [S; N]) {
        let mut all = Buffers::NONE;
        for buffer in buffers.into_iter().rev() {
            all.prepend(buffer.into_buffers());
        }
        let why = || reason.unwrap_or(self.poster.queue_full());
        let refusal = self.refusal.get_or_insert_with(|| Box::new((why(), Vec::new())));
        refusal.1.push(all);
    }

    #[inline]
    fn finish(self) -> Result<(), PostError> {
        let mut this = ManuallyDrop::new(self);
        match this.refusal.take() {
            None => this.poster.post(),
            Some(refusal) => Err(this.refused(*refusal)),
        }
    }

    #[cold]
    #[inline(never)]
    fn refused(&mut self, (reason, rest): (RejectReason, Vec<Buffers>)) -> PostError {
        let index = self.poster.staged.len();
        let mut buffers = self.poster.unstage(0);
        buffers.extend(rest);
        Box::new(RejectedBatch {
            queue: self.poster.name(),
            index,
            reason,
            posted: 0,
            buffers,
        })
    }
}

impl Drop for SharedReceiveBatch<'_> {
    /// Reached only by a panic that unwinds out of the closure that builds the batch.
    fn drop(&mut self) {
        drop(self.poster.unstage(0));
    }
}

impl core::fmt::Debug for SharedReceiveBatch<'_> {
    fn fmt(&self, f: &mut core::fmt::Formatter<'_>) -> core::fmt::Result {
        f.debug_struct("SharedReceiveBatch")
            .field("staged", &self.poster.staged.len())
            .finish_non_exhaustive()
    }
}
