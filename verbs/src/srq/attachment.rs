//! The attachment of a shared receive queue to a completion queue, and a queue pair's membership in
//! both.

use std::sync::Arc;

use super::SrqInner;
use super::slots::ReturnRing;
use crate::cq::CqInner;

/// The entries that a shared receive queue has reserved in a completion queue, and the ring by
/// which its slots return from there. Dropped when the last queue pair that shares both has been
/// destroyed.
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

/// Held by a queue pair until it has been destroyed: the attachment of its completions, and then
/// the shared receive queue itself.
pub(crate) struct Membership {
    _attachment: Arc<SrqAttachment>,
    _srq: Arc<SrqInner>,
}

impl Membership {
    /// Joins a queue pair to `srq`, whose receives complete to `cq`. Err: the number of free
    /// entries.
    pub(crate) fn new(srq: &Arc<SrqInner>, cq: &Arc<CqInner>) -> Result<Self, u32> {
        Ok(Self {
            _attachment: srq.attachment(cq)?,
            _srq: Arc::clone(srq),
        })
    }
}
