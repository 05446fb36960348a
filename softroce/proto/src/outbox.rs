//! What the queue pairs of an endpoint hand out beside packets: completions, events and counts. And what they take in turn: the requests of shared
//! receive queues.

use std::collections::VecDeque;

use crate::counters::Counters;
use crate::srq::SrqTable;
use crate::work::{Completion, CqId};
use crate::{AsyncEvent, Qpn};

/// What all queue pairs have in common. The queues keep their room, so that a steady flow allocates nothing.
#[derive(Debug, Default)]
pub(crate) struct Outbox {
    pub(crate) completions: VecDeque<(CqId, Completion)>,
    pub(crate) events: VecDeque<AsyncEvent>,
    /// Queue pairs whose packets on lanes must not be read any more.
    pub(crate) revoked: VecDeque<Qpn>,
    pub(crate) counters: Counters,
    pub(crate) srqs: SrqTable,
}

impl Outbox {
    pub(crate) fn complete(&mut self, cq: CqId, completion: Completion) {
        self.completions.push_back((cq, completion));
    }

    pub(crate) fn event(&mut self, event: AsyncEvent) {
        self.events.push_back(event);
    }
}
