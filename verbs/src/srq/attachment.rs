//! A shared receive queue on a completion queue, and a queue pair's membership in both.

use std::sync::Arc;

use super::SrqInner;
use super::slots::ReturnRing;
use crate::cq::CqInner;

/// The entries that an SRQ has reserved in a completion queue, and the ring by which its slots
/// return from there. Dropped with the last queue pair that shares both.
pub(crate) struct SrqAttachment {
    cq: Arc<CqInner>,
    entries: u32,
    returns: Arc<ReturnRing>,
}

impl SrqAttachment {
    /// Reserves `entries`. Err: the number of free entries.
    pub(super) fn new(cq: &Arc<CqInner>, entries: u32, returns: Arc<ReturnRing>) -> Result<Self, u32> {
        cq.attach_srq(entries, &returns)?;
        Ok(Self {
            cq: Arc::clone(cq),
            entries,
            returns,
        })
    }

    pub(super) fn is_on(&self, cq: &Arc<CqInner>) -> bool {
        Arc::ptr_eq(&self.cq, cq)
    }
}

impl Drop for SrqAttachment {
    fn drop(&mut self) {
        // The number of completions left in the queue is unknown; there may be one for each entry.
        self.cq.detach_srq(self.entries, Arc::clone(&self.returns));
    }
}

/// Held by a queue pair until it is destroyed: the attachment, then the shared receive queue.
pub(crate) struct Membership {
    _attachment: Arc<SrqAttachment>,
    _srq: Arc<SrqInner>,
}

impl Membership {
    /// Err: the number of free entries.
    pub(crate) fn new(srq: &Arc<SrqInner>, cq: &Arc<CqInner>) -> Result<Self, u32> {
        Ok(Self {
            _attachment: srq.attachment(cq)?,
            _srq: Arc::clone(srq),
        })
    }
}
