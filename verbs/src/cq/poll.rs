//! Taking completions: each confirms its own request and the unsignalled ones before it.

use std::sync::Arc;

use doorbell_verbs_sys as sys;

use super::Poller;
use crate::qp::Ring;
use crate::wr::completion::Completion;

/// The requests that one [`poll`](super::CompletionQueue::poll) has found completed.
pub struct Completions<'a> {
    /// What the device wrote and has not been looked at.
    rest: core::slice::Iter<'a, sys::ibv_wc>,
    /// Counts the completions that are done with: one is as soon as its own request, the last that it confirms, is yielded.
    poller: &'a mut Poller,
    /// The ring of the completion at hand, and its key, in the upper half.
    ring: *const Ring,
    key: u64,
    /// The completion at hand.
    wc: Option<&'a sys::ibv_wc>,
    /// The position in that ring that is retired next, and how many from there the completion at hand confirms.
    next: u64,
    left: u64,
}

/// The upper half of a `wr_id`: its ring's key.
const KEY: u64 = !0 << 32;

/// What no ring has as its key.
const NO_KEY: u64 = 1;

// SAFETY: `ring` points to one of the poller's rings, which are Send and Sync, and the poller is borrowed.
unsafe impl Send for Completions<'_> {}
// SAFETY: as above.
unsafe impl Sync for Completions<'_> {}

impl<'a> Completions<'a> {
    #[inline(always)]
    pub(super) fn new(completions: &'a [sys::ibv_wc], poller: &'a mut Poller) -> Self {
        Self {
            rest: completions.iter(),
            ring: Arc::as_ptr(&poller.none),
            poller,
            key: NO_KEY,
            wc: None,
            next: 0,
            left: 0,
        }
    }

    /// Takes up the next completion of a request in flight. `None` when there is none.
    #[inline(always)]
    fn advance(&mut self) -> Option<&'a sys::ibv_wc> {
        loop {
            let wc = self.rest.next()?;
            let key = wc.wr_id & KEY;
            if key == self.key || self.find(key) {
                // SAFETY: as in `next`.
                let confirmed = unsafe { &*self.ring }.confirmed_by(wc.wr_id as u32, self.next);
                if let Some(count) = confirmed {
                    (self.wc, self.left) = (Some(wc), count);
                    return Some(wc);
                }
                unexpected(wc);
            }
            self.poller.yielded += 1;
        }
    }

    /// Makes the ring with this key the one at hand. False for a queue pair that is gone.
    #[inline(always)]
    fn find(&mut self, key: u64) -> bool {
        let table_key = (key >> 32) as u32;
        let found = match self.poller.table.get(table_key) {
            Some(ring) => Some(Arc::as_ptr(ring)),
            None => welcome(self.poller, table_key),
        };
        let Some(ring) = found else { return false };
        // SAFETY: as in `next`.
        let tail = unsafe { &*ring }.tail();
        (self.ring, self.key, self.next) = (ring, key, tail);
        true
    }
}

/// Looks for a queue pair made since. Not a method, so that the iterator's state can stay in registers.
#[cold]
#[inline(never)]
fn welcome(poller: &mut Poller, key: u32) -> Option<*const Ring> {
    poller.inner.registry().welcome(&mut poller.table);
    poller.table.get(key).map(Arc::as_ptr)
}

/// A completion that confirms nothing in flight: the device says twice that a request is done, or says so of one never posted.
#[cold]
#[inline(never)]
fn unexpected(wc: &sys::ibv_wc) {
    tracing::error!(
        wr_id = wc.wr_id,
        qpn = wc.qp_num,
        "a completion of no request in flight; ignored"
    );
}

impl<'a> Iterator for Completions<'a> {
    type Item = Completion<'a>;

    #[inline]
    fn next(&mut self) -> Option<Completion<'a>> {
        // SAFETY: the poller's reference keeps the ring alive, and only `bury` removes one, which needs the `&mut CompletionQueue` that is borrowed for 'a.
        let ring = unsafe { &*self.ring };
        let position = self.next;
        let slot = ring.slot_of(position);
        if self.left == 0
            && let Some(wc) = self.rest.as_slice().first()
            && wc.wr_id == self.key | slot
            && ring.holds(position)
        {
            // The commonest: the completion of the very request that is next, on the same ring as before.
            self.rest.next();
            // SAFETY: we are the poller; it is in flight, and this completion is its own. The tail is moved past it before anything else sees the ring.
            let buffers = unsafe { ring.take_slot(slot) };
            self.next = position + 1;
            self.poller.yielded += 1;
            ring.retire(self.next);
            return Some(Completion::new(wc, ring, position, false, buffers));
        }
        self.next_of_several()
    }
}

impl<'a> Completions<'a> {
    /// The next request, whatever its completion is.
    #[inline(always)]
    fn next_of_several(&mut self) -> Option<Completion<'a>> {
        let wc = if self.left == 0 { self.advance()? } else { self.wc? };
        // SAFETY: as in `next`.
        let ring = unsafe { &*self.ring };
        loop {
            let position = self.next;
            self.next += 1;
            self.left -= 1;
            // SAFETY: we are the poller; `position` is one of those that this completion confirms (IBTA vol 1, 10.8.5.1: a completion of a send queue
            // implies that those posted before it are complete), and is taken once, since the tail is moved past it before anything else sees the ring.
            let buffers = unsafe { ring.take(position) };
            let confirmed = self.left != 0;
            if confirmed && buffers.is_empty() {
                continue;
            }
            if !confirmed {
                self.poller.yielded += 1;
            }
            ring.retire(self.next);
            return Some(Completion::new(wc, ring, position, confirmed, buffers));
        }
    }
}

impl core::fmt::Debug for Completions<'_> {
    fn fmt(&self, f: &mut core::fmt::Formatter<'_>) -> core::fmt::Result {
        f.debug_struct("Completions")
            .field("left", &self.rest.len())
            .finish_non_exhaustive()
    }
}
