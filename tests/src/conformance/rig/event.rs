//! Asynchronous events.

use std::fmt;
use std::time::Duration;

use anyhow::{Context, Result};
use doorbell_verbs_sys::*;

use super::channel::readable;
use super::{Cq, Device, Qp, Srq, zeroed};

/// An event taken; acknowledged on drop.
pub(in crate::conformance) struct Event(ibv_async_event, Device);

impl Device {
    /// The next event, or `None` when none comes in time.
    pub(in crate::conformance) fn event(&self, within: Duration) -> Option<Event> {
        // SAFETY: live.
        let fd = unsafe { (*self.raw()).async_fd };
        if !readable(fd, within) {
            return None;
        }
        let mut event: ibv_async_event = zeroed();
        // SAFETY: live; `event` may be written.
        let result = unsafe { (self.api().get_async_event)(self.raw(), &mut event) };
        (result == 0).then(|| Event(event, self.clone()))
    }
}

impl Device {
    /// The next event; an error when none comes.
    pub(in crate::conformance) fn next_event(&self) -> Result<Event> {
        self.event(self.patience()).context("no asynchronous event came")
    }
}

impl Event {
    pub(in crate::conformance) fn kind(&self) -> ibv_event_type {
        self.0.event_type
    }

    pub(in crate::conformance) fn is_of_qp(&self, qp: &Qp) -> bool {
        // SAFETY: every member is a pointer or a smaller number, in a union that was zeroed before.
        unsafe { self.0.element.qp == qp.raw() }
    }

    pub(in crate::conformance) fn is_of_cq(&self, cq: &Cq) -> bool {
        // SAFETY: as above.
        unsafe { self.0.element.cq == cq.raw() }
    }
}

impl Event {
    pub(in crate::conformance) fn is_of_srq(&self, srq: &Srq) -> bool {
        // SAFETY: as above.
        unsafe { self.0.element.srq == srq.raw() }
    }
}

impl Drop for Event {
    fn drop(&mut self) {
        // SAFETY: taken once; what it names lives, as destroying that waits for this call.
        unsafe { (self.1.api().ack_async_event)(&mut self.0) };
    }
}

impl fmt::Debug for Event {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self.0.event_type {
            IBV_EVENT_CQ_ERR => "CQ_ERR",
            IBV_EVENT_QP_FATAL => "QP_FATAL",
            IBV_EVENT_QP_REQ_ERR => "QP_REQ_ERR",
            IBV_EVENT_QP_ACCESS_ERR => "QP_ACCESS_ERR",
            IBV_EVENT_COMM_EST => "COMM_EST",
            IBV_EVENT_SQ_DRAINED => "SQ_DRAINED",
            IBV_EVENT_SRQ_ERR => "SRQ_ERR",
            IBV_EVENT_SRQ_LIMIT_REACHED => "SRQ_LIMIT_REACHED",
            IBV_EVENT_QP_LAST_WQE_REACHED => "QP_LAST_WQE_REACHED",
            other => return write!(f, "event {other}"),
        })
    }
}
