//! Selective repeat at the requester (decision 111): a selective ACK reports which packets after
//! the expected one have arrived; those between that have not are resent, and no others.

use std::collections::VecDeque;

use crate::Instant;
use crate::memory::Memory;
use crate::outbox::Outbox;
use crate::qp::Connection;
use crate::qp::packet::PacketLens;
use crate::qp::requester::{Requester, Timer};
use crate::wire::SelectiveEth;
use crate::work::Status;

#[derive(Debug, Default)]
pub(super) struct Holes {
    /// The numbers of packets to be resent, in ascending order.
    missing: VecDeque<u64>,
    /// Packets before this were found missing already: the responder may not have them yet.
    resent_to: u64,
}

impl Holes {
    pub(super) fn is_empty(&self) -> bool {
        self.missing.is_empty()
    }

    /// All will be resent, or a probe queries them.
    pub(super) fn clear(&mut self) {
        self.missing.clear();
        self.resent_to = 0;
    }
}

impl Requester {
    /// `number`: of the packet that the responder expects.
    ///
    /// # Errors
    /// The status with which the oldest request fails.
    pub(super) fn handle_selective_ack(
        &mut self,
        now: Instant,
        number: u64,
        received: &SelectiveEth,
        connection: &Connection,
        out: &mut Outbox,
    ) -> Result<(), Status> {
        if !connection.selective {
            out.counters.unexpected_responses += 1;
            return Ok(());
        }
        out.counters.selective_acks_received += 1;
        if !self.advance_una(now, number, connection, out) {
            return self.implied_nak(now, out);
        }
        // Everything is being resent already.
        if self.next < self.max || matches!(self.timer, Timer::Rnr(_)) {
            return Ok(());
        }
        let bits = SelectiveEth::PACKETS.min((self.max - number - 1) as usize);
        let Some(last) = (0..bits).rev().find(|&index| received.has(index)) else {
            return Ok(());
        };
        let end = number + 1 + last as u64;
        for missing in number.max(self.holes.resent_to)..end {
            let has = missing > number && received.has((missing - number - 1) as usize);
            if !has && self.is_request_packet(missing) {
                self.holes.missing.push_back(missing);
            }
        }
        self.holes.resent_to = self.holes.resent_to.max(end);
        Ok(())
    }

    /// Whether a request packet was sent with this number: not for the later responses of a READ.
    fn is_request_packet(&self, number: u64) -> bool {
        self.find_wqe(number).is_some_and(|wqe| {
            let index = number - wqe.first;
            !wqe.awaits_data() || index.is_multiple_of(self.read_part)
        })
    }

    /// Writes the next missing packet.
    ///
    /// # Errors
    /// The status with which the oldest request fails.
    pub(super) fn transmit_missing<M: Memory>(
        &mut self,
        now: Instant,
        connection: &Connection,
        memory: &mut M,
        buf: &mut [u8],
        out: &mut Outbox,
    ) -> Result<Option<PacketLens>, Status> {
        while let Some(number) = self.holes.missing.pop_front() {
            let in_flight = (self.una..self.max).contains(&number) && self.next == self.max;
            let Some(request) = self.find_request(number).filter(|_| in_flight) else {
                continue;
            };
            let is_last = self.holes.is_empty();
            let sent = self.resend(now, (request, number), is_last, connection, memory, buf, out)?;
            if sent.is_some() {
                self.probe.discard_sample();
                return Ok(sent);
            }
        }
        Ok(None)
    }
}
