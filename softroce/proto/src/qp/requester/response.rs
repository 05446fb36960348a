//! Responses: ACKs, NAKs, READ responses and atomic ACKs (IBTA vol 1, 9.7.5.1).

use crate::Instant;
use crate::memory::{CopyError, Memory};
use crate::outbox::Outbox;
use crate::qp::packet::{InboundPacket, PayloadSource};
use crate::qp::requester::{RNR_RETRY_INFINITE, Requester, Timer};
use crate::qp::send_queue::Wqe;
use crate::qp::{Connection, sges};
use crate::wire::{Extension, Nak, Operation as Wire, RnrTimer, Syndrome};
use crate::work::{Operation, Status};

impl Requester {
    /// # Errors
    /// The status with which the oldest request fails.
    pub(crate) fn handle_response<M: Memory>(
        &mut self,
        now: Instant,
        packet: &InboundPacket<'_>,
        connection: &Connection,
        memory: &mut M,
        out: &mut Outbox,
    ) -> Result<(), Status> {
        // Ghost packets: of an earlier connection, or delayed too long (IBTA vol 1, 9.7.5.1.2).
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
            (Wire::Acknowledge, Extension::Aeth(aeth)) => self.handle_ack(now, number, aeth.syndrome, connection, out),
            (Wire::SelectiveAck, Extension::Selective(received)) => {
                self.handle_selective_ack(now, number, &received, connection, out)
            }
            (Wire::ReadResponse, _) => self.handle_read_response(now, number, packet, connection, memory, out),
            (Wire::AtomicAcknowledge, Extension::AethAtomic(_, atomic)) => {
                self.handle_atomic_response(now, number, atomic.original, connection, memory, out)
            }
            _ => {
                out.counters.unexpected_responses += 1;
                Ok(())
            }
        }
    }

    /// Whether it acknowledges everything in flight, so that no timer runs afterwards.
    pub(crate) fn is_final_ack(&self, packet: &InboundPacket<'_>) -> bool {
        let acknowledges = matches!(packet.extension, Extension::Aeth(aeth) if matches!(aeth.syndrome, Syndrome::Ack(_)))
            && packet.bth.opcode.operation() == Wire::Acknowledge;
        acknowledges
            && self.rd_atomic_outstanding == 0
            && self.next == self.max
            && self.number(packet.bth.psn) == self.max.checked_sub(1)
    }

    fn handle_ack(
        &mut self,
        now: Instant,
        number: u64,
        syndrome: Syndrome,
        connection: &Connection,
        out: &mut Outbox,
    ) -> Result<(), Status> {
        // A NAK acknowledges all before its PSN, a coalesced ACK that too (IBTA vol 1, 9.7.5.1.1).
        let (end, nak) = match syndrome {
            Syndrome::Ack(_) => (number + 1, None),
            Syndrome::RnrNak(_) | Syndrome::Nak(_) => (number, Some(syndrome)),
        };
        if !self.advance_una(now, end, connection, out) {
            return self.implied_nak(now, out);
        }
        let failed = match nak {
            None => return Ok(()),
            Some(Syndrome::RnrNak(timer)) => return self.handle_rnr_nak(now, timer, out),
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

    /// The responder is alive: transport retries are restored (IBTA vol 1, 9.7.5.2.8).
    fn handle_rnr_nak(&mut self, now: Instant, timer: RnrTimer, out: &mut Outbox) -> Result<(), Status> {
        out.counters.rnr_naks_received += 1;
        if matches!(self.timer, Timer::Rnr(_)) {
            return Ok(());
        }
        if self.limits.rnr_retry != RNR_RETRY_INFINITE && !self.probe.take_answer() {
            self.rnr_retries_left = self.rnr_retries_left.checked_sub(1).ok_or(Status::RnrRetryExceeded)?;
        }
        self.retries_left = self.limits.retry_cnt;
        self.recovering = None;
        self.go_back_n();
        self.probe.disarm();
        self.timer = Timer::Rnr(now + timer.duration());
        Ok(())
    }

    fn handle_read_response<M: Memory>(
        &mut self,
        now: Instant,
        number: u64,
        packet: &InboundPacket<'_>,
        connection: &Connection,
        memory: &mut M,
        out: &mut Outbox,
    ) -> Result<(), Status> {
        let refused = packet
            .extension
            .aeth()
            .is_some_and(|aeth| !matches!(aeth.syndrome, Syndrome::Ack(_)));
        let wqe = match self.find_wqe(number) {
            Some(wqe) if wqe.operation.awaits_read_response() && !refused => wqe,
            _ => {
                out.counters.unexpected_responses += 1;
                return Ok(());
            }
        };
        // A response acknowledges all earlier requests (IBTA vol 1, 9.7.5.1.1).
        if !self.advance_una(now, number, connection, out) {
            return self.implied_nak(now, out);
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
            // Counts as lost.
            Err(CopyError::Gone) => return Ok(()),
        }
        self.rd_atomic_outstanding -= u32::from(part_ends);
        self.complete_una(now, number + 1 == wqe.end(), connection, out);
        Ok(())
    }

    fn handle_atomic_response<M: Memory>(
        &mut self,
        now: Instant,
        number: u64,
        original: u64,
        connection: &Connection,
        memory: &mut M,
        out: &mut Outbox,
    ) -> Result<(), Status> {
        if !self
            .find_wqe(number)
            .is_some_and(|wqe| matches!(wqe.operation, Operation::Atomic { .. }))
        {
            out.counters.unexpected_responses += 1;
            return Ok(());
        }
        if !self.advance_una(now, number, connection, out) {
            return self.implied_nak(now, out);
        }
        let bytes = original.to_ne_bytes();
        let list = self.queue.sges(self.queue.head);
        sges::scatter(memory, connection.pd, list, 0, PayloadSource::Bytes(&bytes))
            .map_err(|_| Status::LocalProtection)?;
        self.rd_atomic_outstanding -= 1;
        self.complete_una(now, true, connection, out);
        Ok(())
    }

    pub(super) fn find_wqe(&self, number: u64) -> Option<Wqe> {
        self.find_request(number).map(|request| *self.queue.get(request))
    }

    /// The request that contains packet `number`.
    pub(super) fn find_request(&self, number: u64) -> Option<u64> {
        (self.queue.head..self.begun).find(|&request| number < self.queue.get(request).end())
    }

    /// The response data of packet `una` is in memory.
    fn complete_una(&mut self, now: Instant, ends: bool, connection: &Connection, out: &mut Outbox) {
        self.una += 1;
        if ends {
            self.complete(Status::Success, connection, out);
            self.complete_local(connection, out);
        }
        self.restart_retries(now);
    }

    /// Completes SENDs and WRITEs before packet `end`. False at a READ or atomic: its response was
    /// lost, as the responder has sent it (implied NAK, IBTA vol 1, 9.7.5.1.1).
    pub(super) fn advance_una(&mut self, now: Instant, end: u64, connection: &Connection, out: &mut Outbox) -> bool {
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
            self.restart_retries(now);
        }
        self.una >= end
    }

    /// Progress: restores the retry counts (IBTA vol 1, 9.7.6.1.3).
    fn restart_retries(&mut self, now: Instant) {
        self.retries_left = self.limits.retry_cnt;
        self.rnr_retries_left = self.limits.rnr_retry;
        self.recovering = None;
        self.undelivered = None;
        let probed = self.probe.is_enabled() && self.probe.progress(now, self.una);
        if self.next < self.una {
            self.go_back_n();
        }
        self.restart_ack_timer(now);
        if probed && self.una < self.max {
            self.probe.repeat();
        }
    }

    /// Implied NAK: the response to packet `una` was lost.
    pub(super) fn implied_nak(&mut self, now: Instant, out: &mut Outbox) -> Result<(), Status> {
        out.counters.out_of_sequence += 1;
        self.recover(now)
    }

    /// Go-back-N to packet `una`, once. After an RNR NAK that was already done.
    fn recover(&mut self, now: Instant) -> Result<(), Status> {
        if self.recovering == Some(self.una) || matches!(self.timer, Timer::Rnr(_)) {
            return Ok(());
        }
        self.retry(now)?;
        self.recovering = Some(self.una);
        Ok(())
    }
}
