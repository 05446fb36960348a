//! What is deferred until GPU memory copies are done (see [`gpu`](crate::gpu)).

use std::mem;

use doorbell_roce_proto::qp::{LinkId, Modify, State};
use doorbell_roce_proto::work::Status;
use doorbell_roce_proto::{Instant, Qpn, Transmit};

use super::Core;
use crate::event::{Event, QpEvent};
use crate::gpu::deferred::{DeferQueue, Deferred, DeferredResponse};
use crate::gpu::{Copies, StagedCopy};
use crate::links::shm::is_response;
use crate::memory::Table;

/// Copies of GPU memory, and what waits for them.
#[derive(Default)]
pub(crate) struct Copying {
    pub(crate) copies: Copies,
    pub(super) deferred: DeferQueue,
    /// Queue pairs whose datagrams have staged writes to GPU memory.
    pub(super) writers: Vec<Qpn>,
    /// Links whose next record was deferred after its piggybacked ACK was handled.
    pub(super) deferred_links: Vec<LinkId>,
}

/// The ticket that a packet of a shm link waits for: a response waits for its request's copies.
pub(super) fn defer_ticket(copying: &Copying, transmit: &Transmit, packet: &[u8]) -> Option<u64> {
    let ticket = copying.deferred.ticket(&copying.copies, transmit.qpn)?;
    packet
        .first()
        .is_some_and(|opcode| is_response(*opcode))
        .then_some(ticket)
}

pub(super) fn defer_packet(copying: &mut Copying, memory: &mut Table, ticket: u64, transmit: Transmit, packet: &[u8]) {
    let response = DeferredResponse {
        transmit,
        bytes: packet.to_vec(),
        payload_refs: memory.payload_refs().to_vec(),
    };
    memory.clear_payload_refs();
    copying
        .deferred
        .push(transmit.qpn, ticket, Deferred::Packet(Box::new(response)));
}

impl Core {
    pub(super) fn defer_ticket(&self, qpn: Qpn) -> Option<u64> {
        self.copying.deferred.ticket(&self.copying.copies, qpn)
    }

    /// Whether copies are in flight, or something is deferred behind them.
    pub(crate) fn is_copying(&self) -> bool {
        !self.copying.copies.is_idle() || !self.copying.deferred.is_empty()
    }

    /// Called before completions are delivered. Queue pairs whose writes failed go to ERR.
    pub(crate) fn finish_staged_writes(&mut self, now: impl Fn() -> Instant) {
        let writers = mem::take(&mut self.copying.writers);
        if self.memory.end_write_behind().is_ok() {
            return;
        }
        self.revoke_withdrawn();
        while let Some((cq, mut completion)) = self.endpoint.poll_completion() {
            if writers.contains(&completion.qpn) && completion.status == Status::Success {
                completion.status = Status::Flushed;
            }
            self.complete_in_order(cq, completion, &now);
        }
        self.finish_copies(now(), &[], writers);
    }

    /// Handles finished copies. `failed` are queue pairs whose copies failed or were revoked.
    pub(crate) fn finish_copies(&mut self, now: Instant, staged: &[StagedCopy], mut failed: Vec<Qpn>) {
        for copy in staged {
            // What was revoked during the copy is no message.
            if !failed.contains(&copy.qpn) && self.copying.copies.finish_staged(copy).is_err() {
                failed.push(copy.qpn);
            }
        }
        failed.sort_unstable_by_key(|qpn| qpn.get());
        failed.dedup();
        for qpn in failed {
            self.copying.deferred.fail(qpn);
            let error = Modify {
                state: Some(State::Err),
                ..Modify::default()
            };
            // It may be destroyed by now.
            if self.endpoint.modify_qp(now, qpn, &error).is_ok() {
                tracing::warn!(
                    "queue pair {qpn} goes to the error state: a copy from or to GPU memory failed or was revoked"
                );
                if let Some(owner) = self.objects.qps.get(&qpn) {
                    owner.queue.push(Event::Qp(owner.token, QpEvent::Fatal));
                }
            }
        }
        let copies = &self.copying.copies;
        for qpn in self.memory.take_reads_done(|qpn| copies.has_pending_response(qpn)) {
            self.endpoint.handle_copies_complete(qpn);
        }
    }

    /// Delivers what waited for finished copies, while the rings have space.
    pub(crate) fn deliver_deferred(&mut self, now: impl Fn() -> Instant) {
        let done = self.copying.copies.done();
        loop {
            let rings = &self.rings;
            let may_send = |held: &Deferred| match held {
                Deferred::Completion(..) => true,
                Deferred::Packet(response) => response.transmit.link.is_none_or(|link| rings.accepts(link)),
            };
            match self.copying.deferred.next(done, may_send) {
                None => return,
                Some(Deferred::Completion(cq, completion)) => self.complete(cq, completion, &now),
                Some(Deferred::Packet(response)) => {
                    let DeferredResponse {
                        transmit,
                        bytes,
                        payload_refs,
                    } = *response;
                    if let Some(link) = transmit.link {
                        self.memory.restore_payload_refs(payload_refs);
                        self.rings
                            .send(link, &transmit, &bytes, &mut self.memory, &mut self.endpoint);
                    }
                }
            }
        }
    }
}
