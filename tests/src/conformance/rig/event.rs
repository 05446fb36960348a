//! Asynchronous events.

use std::fmt;
use std::thread;
use std::time::Duration;

use anyhow::{Context, Result};
use doorbell_verbs_sys::*;

use super::channel::readable;
use super::{Cq, Device, Errno, Qp, Srq, zeroed};

/// An event that was read; acknowledged on drop.
pub(in crate::conformance) struct Event(ibv_async_event, Device);

impl Device {
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
    /// The next event; an error on timeout.
    pub(in crate::conformance) fn next_event(&self) -> Result<Event> {
        self.event(self.time_limit()).context("no asynchronous event came")
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

struct Sent(*mut ibv_qp);

// SAFETY: verbs may be called from any thread (man pages).
unsafe impl Send for Sent {}

impl Qp {
    /// Acknowledges `event` after `after`; returns whether the destruction waited for that.
    pub(in crate::conformance) fn destroy_in_parallel(&self, event: Event, after: Duration) -> (bool, Errno) {
        let api = self.device().api();
        let taken = Sent(self.take());
        thread::scope(|scope| {
            let destruction = scope.spawn(move || {
                let taken = taken;
                // SAFETY: live, and no longer used by the case.
                unsafe { (api.destroy_qp)(taken.0) }
            });
            thread::sleep(after);
            let waited = !destruction.is_finished();
            if waited {
                drop(event);
            } else {
                // Its queue pair is gone, so it cannot be acknowledged.
                std::mem::forget(event);
            }
            (waited, Errno(destruction.join().unwrap_or(-1)))
        })
    }
}

impl Drop for Event {
    fn drop(&mut self) {
        // SAFETY: read once; its element lives, as destroying that waits for this call.
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
