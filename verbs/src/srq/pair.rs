//! A shared receive queue's place in a completion queue, and a queue pair's membership in both.

use std::sync::Arc;

use super::SrqInner;
use super::slots::Returns;
use crate::cq::CqInner;

/// The entries that a shared receive queue has reserved in a completion queue, and the way of its slots back from there. Given up when the last queue pair that
/// shares both has been destroyed.
pub(crate) struct Pair {
    cq: Arc<CqInner>,
    entries: u32,
    returns: Arc<Returns>,
}

impl Pair {
    /// Reserves `entries`.
    ///
    /// # Errors
    /// How many there are, when they are too few.
    pub(super) fn new(cq: &Arc<CqInner>, entries: u32, returns: Arc<Returns>) -> Result<Self, u32> {
        cq.attach_srq(entries, &returns)?;
        Ok(Self {
            cq: Arc::clone(cq),
            entries,
            returns,
        })
    }

    pub(super) fn is_in(&self, cq: &Arc<CqInner>) -> bool {
        Arc::ptr_eq(&self.cq, cq)
    }
}

impl Drop for Pair {
    fn drop(&mut self) {
        // It is not known how many completions are in the queue; there may be one for each entry.
        self.cq.detach_srq(self.entries, Arc::clone(&self.returns));
    }
}

/// What a queue pair holds until it has been destroyed: the place of its completions, and then the shared receive queue itself.
pub(crate) struct Membership {
    _pair: Arc<Pair>,
    _srq: Arc<SrqInner>,
}

impl Membership {
    /// A queue pair is to take receives from `srq`, which complete to `cq`.
    ///
    /// # Errors
    /// How many entries of `cq` are free, when they are too few.
    pub(crate) fn new(srq: &Arc<SrqInner>, cq: &Arc<CqInner>) -> Result<Self, u32> {
        Ok(Self {
            _pair: srq.pair(cq)?,
            _srq: Arc::clone(srq),
        })
    }
}
