//! What comes back: acknowledgements, NAKs, READ responses and atomic results (IBTA vol 1, 9.7.5.1).

use crate::Instant;
use crate::memory::{CopyError, Memory};
use crate::outbox::Outbox;
use crate::qp::parts::{Arrival, Source};
use crate::qp::requester::{FOR_EVER, Requester, Wait};
use crate::qp::send_queue::Wqe;
use crate::qp::{Connection, sges};
use crate::wire::{Extension, Nak, Operation as Wire, RnrTimer, Syndrome};
use crate::work::{Operation, Status};

impl Requester {
    /// Takes a response.
    ///
    /// # Errors
    /// The status with which the oldest request fails.
    pub(crate) fn handle_response<M: Memory>(
        &mut self,
        now: Instant,
        packet: &Arrival<'_>,
        connection: &Connection,
        memory: &mut M,
        out: &mut Outbox,
    ) -> Result<(), Status> {
        // Ghosts: packets of an earlier connection, or delayed beyond their use (IBTA vol 1, 9.7.5.1.2).
        let number = match self.number(packet.bth.psn) {
            Some(number) if number >= self.max => {
                out.counters.unexpected_responses += 1;
                return Ok(());
            }
            Some(number) if number >= self.una => number,
            _ => {
                out.counters.duplicates += 1;
                return Ok(());
            }
        };
        match (packet.bth.opcode.operation(), packet.extension) {
            (Wire::Acknowledge, Extension::Aeth(aeth)) => {
                self.acknowledgement(now, number, aeth.syndrome, connection, out)
            }
            (Wire::ReadResponse, _) => self.read_response(now, number, packet, connection, memory, out),
            (Wire::AtomicAcknowledge, Extension::AethAtomic(_, atomic)) => {
                self.atomic_response(now, number, atomic.original, connection, memory, out)
            }
            _ => {
                out.counters.unexpected_responses += 1;
                Ok(())
            }
        }
    }

    /// Whether it acknowledges all that is on its way, so that nothing is waited for afterwards.
    pub(crate) fn is_last_answer(&self, packet: &Arrival<'_>) -> bool {
        let acknowledges = matches!(packet.extension, Extension::Aeth(aeth) if matches!(aeth.syndrome, Syndrome::Ack(_)))
            && packet.bth.opcode.operation() == Wire::Acknowledge;
        acknowledges
            && self.awaiting == 0
            && self.next == self.max
            && self.number(packet.bth.psn) == self.max.checked_sub(1)
    }

    fn acknowledgement(
        &mut self,
        now: Instant,
        number: u64,
        syndrome: Syndrome,
        connection: &Connection,
        out: &mut Outbox,
    ) -> Result<(), Status> {
        // A NAK acknowledges everything before its PSN, an ACK that one too (IBTA vol 1, 9.7.5.1.1).
        let (end, nak) = match syndrome {
            Syndrome::Ack(_) => (number + 1, None),
            Syndrome::RnrNak(_) | Syndrome::Nak(_) => (number, Some(syndrome)),
        };
        if !self.advance(now, end, connection, out) {
            return self.response_lost(now, out);
        }
        let failed = match nak {
            None => return Ok(()),
            Some(Syndrome::RnrNak(timer)) => return self.receiver_not_ready(now, timer, out),
            Some(Syndrome::Nak(Nak::PsnSequence)) => {
                out.counters.sequence_naks_received += 1;
                return self.recover(now);
            }
            Some(Syndrome::Nak(Nak::RemoteAccess)) => Status::RemoteAccess,
            Some(Syndrome::Nak(Nak::RemoteOperational)) => Status::RemoteOperational,
            Some(_) => Status::RemoteInvalidRequest,
        };
        out.counters.fatal_naks_received += 1;
        Err(failed)
    }

    /// Waits as long as the responder asks (IBTA vol 1, 9.7.5.2.8). It has seen the request, so the connection is alive.
    fn receiver_not_ready(&mut self, now: Instant, timer: RnrTimer, out: &mut Outbox) -> Result<(), Status> {
        out.counters.rnr_naks_received += 1;
        if matches!(self.wait, Wait::Rnr(_)) {
            return Ok(());
        }
        if self.limits.rnr_retry != FOR_EVER {
            self.rnr_left = self.rnr_left.checked_sub(1).ok_or(Status::RnrRetryExceeded)?;
        }
        self.retries_left = self.limits.retry_cnt;
        self.recovering = None;
        self.go_back();
        self.wait = Wait::Rnr(now + timer.duration());
        Ok(())
    }

    fn read_response<M: Memory>(
        &mut self,
        now: Instant,
        number: u64,
        packet: &Arrival<'_>,
        connection: &Connection,
        memory: &mut M,
        out: &mut Outbox,
    ) -> Result<(), Status> {
        let refused = packet
            .extension
            .aeth()
            .is_some_and(|aeth| !matches!(aeth.syndrome, Syndrome::Ack(_)));
        let wqe = match self.find(number) {
            Some(wqe) if matches!(wqe.operation, Operation::Read { .. }) && !refused => wqe,
            _ => {
                out.counters.unexpected_responses += 1;
                return Ok(());
            }
        };
        // A response acknowledges the requests before its own (IBTA vol 1, 9.7.5.1.1).
        if !self.advance(now, number, connection, out) {
            return self.response_lost(now, out);
        }
        let index = number - wqe.first;
        let offset = index * connection.mtu as u64;
        let expected = (u64::from(wqe.len) - offset).min(connection.mtu as u64);
        let part_ends = number + 1 == self.part_end(&wqe, number);
        if packet.payload.len() as u64 != expected || packet.bth.opcode.position().ends() != part_ends {
            return Err(Status::BadResponse);
        }
        let list = self.queue.sges(self.queue.head);
        match sges::scatter(memory, connection.pd, list, offset, packet.payload) {
            Ok(()) => {}
            Err(CopyError::Access) => return Err(Status::LocalProtection),
            // As if it had been lost on its way.
            Err(CopyError::Gone) => return Ok(()),
        }
        self.awaiting -= u32::from(part_ends);
        self.take_data(now, number + 1 == wqe.end(), connection, out);
        Ok(())
    }

    fn atomic_response<M: Memory>(
        &mut self,
        now: Instant,
        number: u64,
        original: u64,
        connection: &Connection,
        memory: &mut M,
        out: &mut Outbox,
    ) -> Result<(), Status> {
        if !self
            .find(number)
            .is_some_and(|wqe| matches!(wqe.operation, Operation::Atomic { .. }))
        {
            out.counters.unexpected_responses += 1;
            return Ok(());
        }
        if !self.advance(now, number, connection, out) {
            return self.response_lost(now, out);
        }
        let bytes = original.to_ne_bytes();
        let list = self.queue.sges(self.queue.head);
        sges::scatter(memory, connection.pd, list, 0, Source::Bytes(&bytes)).map_err(|_| Status::LocalProtection)?;
        self.awaiting -= 1;
        self.take_data(now, true, connection, out);
        Ok(())
    }

    /// The request that holds a packet sent before.
    fn find(&self, number: u64) -> Option<Wqe> {
        (self.queue.head..self.begun)
            .map(|request| self.queue.get(request))
            .find(|wqe| number < wqe.end())
            .copied()
    }

    /// The data of packet `una` is in memory.
    fn take_data(&mut self, now: Instant, ends: bool, connection: &Connection, out: &mut Outbox) {
        self.una += 1;
        if ends {
            self.complete(Status::Success, connection, out);
            self.complete_local(connection, out);
        }
        self.progress(now);
    }

    /// Everything before packet `end` is acknowledged: completes the SENDs and WRITEs among it. False when a READ or atomic is among it whose
    /// data has not come: the responder has sent it, so it is lost (IBTA vol 1, 9.7.5.1.1: implied NAK).
    fn advance(&mut self, now: Instant, end: u64, connection: &Connection, out: &mut Outbox) -> bool {
        let before = self.una;
        while self.una < end && self.queue.head < self.begun {
            let wqe = self.queue.get(self.queue.head);
            if wqe.awaits_data() {
                break;
            }
            if end < wqe.end() {
                self.una = end;
            } else {
                self.una = wqe.end();
                self.complete(Status::Success, connection, out);
                self.complete_local(connection, out);
            }
        }
        if self.una > before {
            self.progress(now);
        }
        self.una >= end
    }

    /// Something new was acknowledged: the counters of retries start again (IBTA vol 1, 9.7.6.1.3).
    fn progress(&mut self, now: Instant) {
        self.retries_left = self.limits.retry_cnt;
        self.rnr_left = self.limits.rnr_retry;
        self.recovering = None;
        if self.next < self.una {
            self.go_back();
        }
        self.wait_for_ack(now);
    }

    /// The response to packet `una` is missing.
    fn response_lost(&mut self, now: Instant, out: &mut Outbox) -> Result<(), Status> {
        out.counters.out_of_sequence += 1;
        self.recover(now)
    }

    /// Packet `una`, or its response, is missing: goes back to it, once. In an RNR wait that is where we are already.
    fn recover(&mut self, now: Instant) -> Result<(), Status> {
        if self.recovering == Some(self.una) || matches!(self.wait, Wait::Rnr(_)) {
            return Ok(());
        }
        self.retry(now)?;
        self.recovering = Some(self.una);
        Ok(())
    }
}
