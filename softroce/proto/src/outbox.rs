//! State shared by an endpoint's queue pairs: completions, events, counters, SRQs.

use std::collections::VecDeque;

use crate::counters::Counters;
use crate::srq::SrqTable;
use crate::work::{Completion, CqId};
use crate::{AsyncEvent, Qpn};

/// The shared state. The queues keep their capacity, so that a steady flow allocates nothing.
#[derive(Debug, Default)]
pub(crate) struct Outbox {
    pub(crate) completions: VecDeque<(CqId, Completion)>,
    pub(crate) events: VecDeque<AsyncEvent>,
    pub(crate) revoked: VecDeque<Qpn>,
    pub(crate) counters: Counters,
    pub(crate) srqs: SrqTable,
    /// Of packets that responders keep: bounded for the endpoint.
    pub(crate) kept_bytes: usize,
}

impl Outbox {
    pub(crate) fn complete(&mut self, cq: CqId, completion: Completion) {
        self.completions.push_back((cq, completion));
    }

    pub(crate) fn event(&mut self, event: AsyncEvent) {
        self.events.push_back(event);
    }
}
