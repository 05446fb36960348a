//! What waits for copies of GPUs' memory, and what is told when they are done (see [`gpu`](crate::gpu)).

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

/// What a packet for a lane has to wait for: an answer, for the copies of what it answers.
pub(super) fn gate_of(copies: &Copies, gate: &Gate, transmit: &Transmit, packet: &[u8]) -> Option<u64> {
    let ticket = gate.ticket(copies, transmit.qpn)?;
    packet
        .first()
        .is_some_and(|opcode| is_response(*opcode))
        .then_some(ticket)
}

/// Keeps an answer back.
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
    /// What something of a queue pair has to wait for before anybody is told of it.
    pub(super) fn gate_of(&self, qpn: Qpn) -> Option<u64> {
        self.gate.ticket(&self.copies, qpn)
    }

    /// Whether copies are under way, or something waits that has come behind them.
    pub(crate) fn is_copying(&self) -> bool {
        !self.copies.is_idle() || !self.gate.is_empty()
    }

    /// After datagrams, and before anybody is told of them: has what they wrote to memory of GPUs be there. Queue pairs of which it cannot be end.
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

    /// Copies are done; those for some queue pairs have failed, or what they copied was taken back.
    pub(crate) fn finish_copies(&mut self, now: Instant, landings: &[Landing], mut failed: Vec<Qpn>) {
        for landing in landings {
            // What was taken back while it was copied is no message.
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
            // It may be gone by now.
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

    /// Tells applications and peers what waited for copies that are done, as far as there is room for it.
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
