//! Taking completions: each confirms its own request and the unsignalled ones before it.

use std::sync::Arc;

use doorbell_verbs_sys as sys;

use super::CqInner;
use super::table::Table;
use crate::qp::Ring;
use crate::wr::completion::Completion;

/// The requests that one [`poll`](super::CompletionQueue::poll) has found completed.
pub struct Completions<'a> {
    /// What the device wrote and has not been looked at.
    rest: core::slice::Iter<'a, sys::ibv_wc>,
    /// How many of the device's completions are done with: one is as soon as its own request, the last that it confirms, is yielded.
    yielded: &'a mut u32,
    table: &'a mut Table,
    cq: &'a Arc<CqInner>,
    /// The ring of the completion at hand, and its key.
    ring: *const Ring,
    key: u64,
    /// The completion at hand, and the positions that it confirms and that are not yielded yet.
    wc: Option<&'a sys::ibv_wc>,
    next: u64,
    end: u64,
}

/// No ring's key.
const NO_KEY: u64 = u64::MAX;

// SAFETY: `ring` points into the table's rings, which are Send and Sync, and the table is borrowed.
unsafe impl Send for Completions<'_> {}
// SAFETY: as above.
unsafe impl Sync for Completions<'_> {}

impl<'a> Completions<'a> {
    #[inline(always)]
    pub(super) fn new(
        completions: &'a [sys::ibv_wc],
        yielded: &'a mut u32,
        table: &'a mut Table,
        cq: &'a Arc<CqInner>,
    ) -> Self {
        let rest = completions.get(*yielded as usize..).unwrap_or_default().iter();
        Self {
            rest,
            yielded,
            table,
            cq,
            ring: core::ptr::null(),
            key: NO_KEY,
            wc: None,
            next: 0,
            end: 0,
        }
    }

    /// Takes up the next completion of a request in flight. `None` when there is none.
    #[inline(always)]
    fn advance(&mut self) -> Option<()> {
        loop {
            let wc = self.rest.next()?;
            let key = wc.wr_id >> 32;
            if key == self.key || self.find(key) {
                // SAFETY: `ring` is the ring of `key`. The table's reference keeps it alive, and only `bury` removes one, which needs the `&mut CompletionQueue`
                // that is borrowed for 'a.
                let confirmed = unsafe { &*self.ring }.confirmed_by(wc.wr_id as u32);
                if let Some((tail, count)) = confirmed {
                    (self.wc, self.next, self.end) = (Some(wc), tail, tail + count);
                    return Some(());
                }
                unexpected(wc);
            }
            *self.yielded += 1;
        }
    }

    /// Makes the ring with this key the one at hand. False for a queue pair that is gone.
    #[inline(always)]
    fn find(&mut self, key: u64) -> bool {
        let found = match self.table.get(key as u32) {
            Some(ring) => Some(Arc::as_ptr(ring)),
            None => welcome(self.table, self.cq, key as u32),
        };
        match found {
            Some(ring) => (self.ring, self.key) = (ring, key),
            None => return false,
        }
        true
    }
}

/// Looks for a queue pair made since. Not a method, so that the iterator's state can stay in registers.
#[cold]
#[inline(never)]
fn welcome(table: &mut Table, cq: &CqInner, key: u32) -> Option<*const Ring> {
    cq.registry().welcome(table);
    table.get(key).map(Arc::as_ptr)
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
        if self.next == self.end {
            self.advance()?;
        }
        let wc = self.wc?;
        // SAFETY: as in `advance`.
        let ring = unsafe { &*self.ring };
        loop {
            let position = self.next;
            self.next += 1;
            // SAFETY: we are the poller; `position` is one of those that this completion confirms (IBTA vol 1, 10.8.5.1: a completion of a send queue
            // implies that those posted before it are complete), and is taken once, since the tail is moved past it before anything else sees the ring.
            let buffers = unsafe { ring.take(position) };
            let confirmed = self.next != self.end;
            if confirmed && buffers.is_empty() {
                continue;
            }
            if !confirmed {
                *self.yielded += 1;
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
