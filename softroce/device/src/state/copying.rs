//! What is deferred until GPU memory copies are done (see [`gpu`](crate::gpu)).

use std::mem;

use doorbell_roce_proto::qp::{Modify, State};
use doorbell_roce_proto::work::Status;
use doorbell_roce_proto::{Instant, Qpn, Transmit};

use super::Core;
use crate::event::{Event, QpEvent};
use crate::gpu::gate::{Answer, Gate, Held};
use crate::gpu::{Copies, Landing};
use crate::lanes::is_response;
use crate::memory::Table;

/// The ticket for which a packet of a shm link is deferred: a response waits for the copies of its
/// request.
pub(super) fn gate_of(copies: &Copies, gate: &Gate, transmit: &Transmit, packet: &[u8]) -> Option<u64> {
    let ticket = gate.ticket(copies, transmit.qpn)?;
    packet
        .first()
        .is_some_and(|opcode| is_response(*opcode))
        .then_some(ticket)
}

/// Defers a response.
pub(super) fn hold(gate: &mut Gate, memory: &mut Table, ticket: u64, transmit: Transmit, packet: &[u8]) {
    let answer = Answer {
        transmit,
        bytes: packet.to_vec(),
        referred: memory.referred().to_vec(),
    };
    memory.forget_referred();
    gate.hold(transmit.qpn, ticket, Held::Packet(Box::new(answer)));
}

impl Core {
    /// The ticket for which completions of a queue pair are deferred.
    pub(super) fn gate_of(&self, qpn: Qpn) -> Option<u64> {
        self.gate.ticket(&self.copies, qpn)
    }

    /// Whether copies are in flight, or something is deferred behind them.
    pub(crate) fn is_copying(&self) -> bool {
        !self.copies.is_idle() || !self.gate.is_empty()
    }

    /// After datagrams, and before their completions are delivered: completes staged writes to GPU
    /// memory. Queue pairs whose writes failed go to the error state.
    pub(crate) fn store_writes(&mut self, now: impl Fn() -> Instant) {
        let writers = mem::take(&mut self.writers);
        if self.memory.store().is_ok() {
            return;
        }
        self.take_back();
        while let Some((cq, mut completion)) = self.endpoint.poll_completion() {
            if writers.contains(&completion.qpn) && completion.status == Status::Success {
                completion.status = Status::Flushed;
            }
            self.pass_on(cq, completion, &now);
        }
        self.finish_copies(now(), &[], writers);
    }

    /// Handles finished copies. `failed` are queue pairs whose copies failed or were revoked.
    pub(crate) fn finish_copies(&mut self, now: Instant, landings: &[Landing], mut failed: Vec<Qpn>) {
        for landing in landings {
            // What was revoked during the copy is no message.
            if !failed.contains(&landing.qpn) && self.copies.land(landing).is_err() {
                failed.push(landing.qpn);
            }
        }
        failed.sort_unstable_by_key(|qpn| qpn.get());
        failed.dedup();
        for qpn in failed {
            self.gate.fail(qpn);
            let error = Modify {
                state: Some(State::Err),
                ..Modify::default()
            };
            // It may be destroyed by now.
            if self.endpoint.modify_qp(now, qpn, &error).is_ok() {
                tracing::warn!(
                    "queue pair {qpn} ends: bytes for it could not be copied from or to a GPU's memory, or were taken back meanwhile"
                );
                if let Some(owner) = self.qps.get(&qpn) {
                    owner.queue.push(Event::Qp(owner.token, QpEvent::Fatal));
                }
            }
        }
        let copies = &self.copies;
        for qpn in self.memory.settle(|qpn| copies.is_unsettled(qpn)) {
            self.endpoint.settled(qpn);
        }
    }

    /// Delivers deferred completions and responses whose copies are done, while the rings have
    /// space.
    pub(crate) fn open_gate(&mut self, now: impl Fn() -> Instant) {
        let done = self.copies.done();
        loop {
            let lanes = &self.lanes;
            let may_go = |held: &Held| match held {
                Held::Completion(..) => true,
                Held::Packet(answer) => answer.transmit.lane.is_none_or(|lane| lanes.takes(lane)),
            };
            match self.gate.next(done, may_go) {
                None => return,
                Some(Held::Completion(cq, completion)) => self.complete(cq, completion, &now),
                Some(Held::Packet(answer)) => {
                    let Answer {
                        transmit,
                        bytes,
                        referred,
                    } = *answer;
                    if let Some(lane) = transmit.lane {
                        self.memory.refer_again(referred);
                        self.lanes
                            .send(lane, &transmit, &bytes, &mut self.memory, &mut self.endpoint);
                    }
                }
            }
        }
    }
}
