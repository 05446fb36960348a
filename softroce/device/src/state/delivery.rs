//! Delivery: completions to completion queues, events to the owners of objects.

use std::sync::Arc;

use doorbell_roce_proto::work::{Completion, CqId};
use doorbell_roce_proto::{AsyncEvent, Instant};

use super::Core;
use crate::event::{Event, QpEvent};
use crate::gpu::deferred::Deferred;

impl Core {
    /// `now` is called where the time is needed.
    pub(crate) fn deliver(&mut self, now: impl Fn() -> Instant) {
        if self.endpoint.has_output() || self.memory.has_revoked() {
            self.deliver_events(&now);
        }
        self.connections.deliver(now);
    }

    pub(super) fn complete(&mut self, cq: CqId, completion: Completion, now: &impl Fn() -> Instant) {
        if let Some(Some(ring)) = self.objects.cqs.get(cq.0 as usize)
            && let Some(due) = ring.push(completion, now)
        {
            self.objects.moderated.push((due, Arc::clone(ring)));
        }
    }

    /// Delivers a completion, after the copies before it.
    pub(super) fn complete_in_order(&mut self, cq: CqId, completion: Completion, now: &impl Fn() -> Instant) {
        match self.defer_ticket(completion.qpn) {
            Some(ticket) => {
                let qpn = completion.qpn;
                self.copying
                    .deferred
                    .push(qpn, ticket, Deferred::Completion(cq, completion));
            }
            None => self.complete(cq, completion, now),
        }
    }

    fn deliver_events(&mut self, now: impl Fn() -> Instant) {
        // A completed buffer belongs to the application again.
        self.revoke_withdrawn();
        while let Some((cq, completion)) = self.endpoint.poll_completion() {
            self.complete_in_order(cq, completion, &now);
        }
        while let Some(event) = self.endpoint.poll_event() {
            let (qpn, event) = match event {
                AsyncEvent::QpFatal(qpn) => (qpn, QpEvent::Fatal),
                AsyncEvent::QpRequestError(qpn) => (qpn, QpEvent::RequestError),
                AsyncEvent::QpAccessError(qpn) => (qpn, QpEvent::AccessError),
                AsyncEvent::CommunicationEstablished(qpn) => {
                    self.publish_qp(qpn);
                    (qpn, QpEvent::CommunicationEstablished)
                }
                AsyncEvent::SendQueueDrained(qpn) => (qpn, QpEvent::SendQueueDrained),
                AsyncEvent::LastWqeReached(qpn) => (qpn, QpEvent::LastWqeReached),
                AsyncEvent::SrqLimitReached(srq) => {
                    if let Some(owner) = self.objects.srqs.get(&srq) {
                        owner.queue.push(Event::SrqLimit(owner.token));
                    }
                    continue;
                }
            };
            if let Some(owner) = self.objects.qps.get(&qpn) {
                owner.queue.push(Event::Qp(owner.token, event));
            }
        }
    }

    pub(crate) fn notify_moderated(&mut self, now: Instant) {
        self.objects.moderated.retain_mut(|(due, ring)| {
            if *due > now {
                return true;
            }
            let again = ring.notify_if_due(now);
            *due = again.unwrap_or(*due);
            again.is_some()
        });
    }

    pub(crate) fn moderation_due(&self) -> Option<Instant> {
        self.objects.moderated.iter().map(|(due, _)| *due).min()
    }

    /// Reports the loss of the device, once to each event queue of listeners and owners.
    pub(crate) fn report_fatal(&self) {
        let mut notified = Vec::new();
        let owners = self.objects.qps.values().map(|owner| &owner.queue);
        for queue in self.objects.listeners.iter().chain(owners) {
            if !notified.contains(&Arc::as_ptr(queue)) {
                notified.push(Arc::as_ptr(queue));
                queue.push(Event::DeviceFatal);
            }
        }
    }
}
