//! Taking completions: each confirms its own request and the unsignalled ones before it.

use std::sync::Arc;

use doorbell_verbs_sys as sys;

use super::CqInner;
use super::table::Table;
use crate::qp::Ring;
use crate::wr::completion::Completion;

/// The requests that one [`poll`](super::CompletionQueue::poll) has found completed.
pub struct Completions<'a> {
    /// What the device wrote, of which `*yielded` are done with.
    completions: &'a [sys::ibv_wc],
    yielded: &'a mut u32,
    table: &'a mut Table,
    cq: &'a Arc<CqInner>,
    /// The ring of the completion at hand, and its key.
    ring: Option<(&'a Ring, u32)>,
    /// The positions that it confirms and that are not yielded yet.
    next: u64,
    end: u64,
}

impl<'a> Completions<'a> {
    #[inline(always)]
    pub(super) fn new(
        completions: &'a [sys::ibv_wc],
        yielded: &'a mut u32,
        table: &'a mut Table,
        cq: &'a Arc<CqInner>,
    ) -> Self {
        Self {
            completions,
            yielded,
            table,
            cq,
            ring: None,
            next: 0,
            end: 0,
        }
    }

    /// The ring with this key; `None` for a queue pair that is gone.
    #[inline(always)]
    fn find(&mut self, key: u32) -> Option<&'a Ring> {
        let ring = match self.table.get(key) {
            Some(ring) => Arc::as_ptr(ring),
            None => self.welcome(key)?,
        };
        // SAFETY: the table's reference keeps the ring alive, and only `bury` removes one, which needs the `&mut CompletionQueue` that is borrowed for 'a.
        let ring = unsafe { &*ring };
        self.ring = Some((ring, key));
        Some(ring)
    }

    /// Looks for queue pairs made since.
    #[cold]
    #[inline(never)]
    fn welcome(&mut self, key: u32) -> Option<*const Ring> {
        self.cq.registry().welcome(self.table);
        self.table.get(key).map(Arc::as_ptr)
    }
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
        loop {
            let wc = self.completions.get(*self.yielded as usize)?;
            let key = (wc.wr_id >> 32) as u32;
            let ring = match self.ring {
                Some((ring, known)) if known == key => Some(ring),
                _ => self.find(key),
            };
            let Some(ring) = ring else {
                *self.yielded += 1;
                continue;
            };
            if self.next == self.end {
                let Some((tail, count)) = ring.confirmed_by(wc.wr_id as u32) else {
                    unexpected(wc);
                    *self.yielded += 1;
                    continue;
                };
                self.next = tail;
                self.end = tail + count;
            }
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
            .field("left", &(self.completions.len() - *self.yielded as usize))
            .finish_non_exhaustive()
    }
}
