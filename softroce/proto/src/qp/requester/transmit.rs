//! Selects and writes the requester's next packet.

use crate::memory::{AccessError, AtomicOp, Memory, PdId};
use crate::outbox::Outbox;
use crate::qp::packet::{PacketLens, PayloadLocation};
use crate::qp::requester::{Requester, Timer};
use crate::qp::send_queue::Wqe;
use crate::qp::{Connection, sges};
use crate::wire::{AtomicEth, Bth, Extension, Feth, Ieth, ImmDt, Opcode, Position, Reth, Transport};
use crate::work::{Operation, Status};
use crate::{Instant, RKey, icrc};

/// A packet that was written, to be committed.
pub(super) struct RequestPacket {
    pub(super) lens: PacketLens,
    /// PSNs that it takes: those of its responses if it is a READ request.
    numbers: u64,
    ack_req: bool,
}

impl Requester {
    /// `Ok(None)` when none may be sent now. When `draining` (SQD), no request begins.
    ///
    /// # Errors
    /// The status with which the oldest request fails.
    pub(crate) fn transmit<M: Memory>(
        &mut self,
        now: Instant,
        connection: &Connection,
        draining: bool,
        memory: &mut M,
        buf: &mut [u8],
        out: &mut Outbox,
    ) -> Result<Option<PacketLens>, Status> {
        if self.probe.is_pending()
            && let Some(lens) = self.transmit_probe(now, connection, memory, buf, out)?
        {
            return Ok(Some(lens));
        }
        if !self.holes.is_empty()
            && let Some(lens) = self.transmit_missing(now, connection, memory, buf, out)?
        {
            return Ok(Some(lens));
        }
        let sent = self.transmit_next(now, connection, draining, memory, buf, out)?;
        if sent.is_none() {
            self.probe.wait();
        }
        Ok(sent)
    }

    /// Writes a packet in flight again, of this request and number, and leaves `next` alone. `None`
    /// if it cannot be sent now.
    ///
    /// # Errors
    /// The status with which the oldest request fails.
    #[expect(clippy::too_many_arguments, reason = "those of transmit, and the packet")]
    pub(super) fn resend<M: Memory>(
        &mut self,
        now: Instant,
        (request, number): (u64, u64),
        ack_req: bool,
        connection: &Connection,
        memory: &mut M,
        buf: &mut [u8],
        out: &mut Outbox,
    ) -> Result<Option<PacketLens>, Status> {
        let wqe = *self.queue.get(request);
        // As for any packet: it might read memory that a deferred copy has not written yet.
        let is_read = matches!(wqe.operation, Operation::Read { .. });
        if (!is_read || wqe.fence) && memory.has_pending_copies(connection.qpn) {
            return Ok(None);
        }
        let after = (self.next, self.cursor, self.unacked_since_req);
        (self.next, self.cursor) = (number, request);
        if ack_req {
            self.unacked_since_req = self.ack_req_interval;
        }
        let written = self.write(&wqe, connection, memory, buf);
        (self.next, self.cursor, self.unacked_since_req) = after;
        let Some(packet) = written? else {
            return Ok(None);
        };
        self.unacked_since_req = if packet.ack_req { 0 } else { self.unacked_since_req + 1 };
        self.probe.sent(now, None);
        out.counters.retransmits += 1;
        Ok(Some(packet.lens))
    }

    fn transmit_next<M: Memory>(
        &mut self,
        now: Instant,
        connection: &Connection,
        draining: bool,
        memory: &mut M,
        buf: &mut [u8],
        out: &mut Outbox,
    ) -> Result<Option<PacketLens>, Status> {
        if self.cursor == self.queue.tail || !self.may_send() {
            return Ok(None);
        }
        if !self.advance_cursor(connection, draining, memory, out)? {
            return Ok(None);
        }
        let wqe = *self.queue.get(self.cursor);
        // It might read memory that a deferred copy has not written yet.
        let is_read = matches!(wqe.operation, Operation::Read { .. });
        if (!is_read || wqe.fence) && memory.has_pending_copies(connection.qpn) {
            return Ok(None);
        }
        // READ responses consume the window too: all of them must fit.
        if self.next > self.una && self.part_end(&wqe, self.next) - self.una > self.window && wqe.awaits_data() {
            return Ok(None);
        }
        let new_part = wqe.awaits_data() && self.next == self.max && self.next > wqe.first;
        if new_part && self.rd_atomic_outstanding >= self.limits.max_rd_atomic {
            return Ok(None);
        }
        let Some(packet) = self.write(&wqe, connection, memory, buf)? else {
            return Ok(None);
        };
        let first_response = self.next + 1;
        let retransmission = self.commit(packet.numbers, packet.ack_req, wqe.awaits_data());
        let has_response = packet.ack_req || wqe.awaits_data();
        self.probe
            .sent(now, (has_response && !retransmission).then_some(first_response));
        out.counters.retransmits += u64::from(retransmission);
        self.rd_atomic_outstanding += u32::from(new_part);
        if self.next == wqe.end() {
            self.cursor += 1;
        }
        if self.timer == Timer::Idle {
            self.restart_ack_timer(now);
        }
        Ok(Some(packet.lens))
    }

    /// Fast path of [`transmit`](Self::transmit) for the MIDDLE packet of a SEND or WRITE in
    /// flight; returns its length. The packet is the same; no deadline changes.
    pub(crate) fn transmit_middle<M: Memory>(
        &mut self,
        now: Instant,
        connection: &Connection,
        memory: &mut M,
        buf: &mut [u8],
        out: &mut Outbox,
    ) -> Option<usize> {
        // The timer runs already, so that no deadline changes.
        let timed = matches!(self.timer, Timer::LocalAck(_));
        if !timed || !self.may_send() || self.cursor >= self.begun || self.resends() {
            return None;
        }
        let wqe = self.queue.get(self.cursor);
        let opcode = match wqe.operation {
            Operation::Write { .. } => Opcode::RcWriteMiddle,
            Operation::Send { .. } | Operation::SendInvalidate { .. } => Opcode::RcSendMiddle,
            _ => return None,
        };
        let index = self.next - wqe.first;
        if index == 0 || index + 1 >= u64::from(wqe.packets) {
            return None;
        }
        let ack_req = self.ack_request(1, false, false);
        // The path MTU is a multiple of 4, so there is no pad.
        let packet = buf.get_mut(..Bth::LEN + connection.mtu + icrc::LEN)?;
        let len = packet.len();
        let (header, rest) = packet.split_first_chunk_mut::<{ Bth::LEN }>()?;
        let mut bth = Bth::new(opcode, connection.peer, self.psn(self.next));
        bth.ack_req = ack_req;
        bth.selective = connection.selective;
        *header = bth.to_bytes(0);
        let (payload, offset) = (&mut rest[..connection.mtu], index * connection.mtu as u64);
        self.queue
            .gather(self.cursor, memory, connection.pd, offset, payload)
            .ok()?;
        let first_response = self.next + 1;
        let retransmission = self.commit(1, ack_req, false);
        out.counters.retransmits += u64::from(retransmission);
        self.probe
            .sent(now, (ack_req && !retransmission).then_some(first_response));
        Some(len)
    }

    /// Assigns PSNs to the request at the cursor, unless it must wait.
    pub(super) fn begin<M: Memory>(
        &mut self,
        connection: &Connection,
        draining: bool,
        memory: &mut M,
    ) -> Result<bool, Status> {
        let number = self.cursor;
        let wqe = *self.queue.get(number);
        if draining || wqe.fence && self.rd_atomic_outstanding > 0 {
            return Ok(false);
        }
        if wqe.awaits_data() {
            if self.limits.max_rd_atomic == 0 {
                return self.fail_or_stall(Status::LocalQpOperation).map(|()| false);
            }
            if self.rd_atomic_outstanding >= self.limits.max_rd_atomic {
                return Ok(false);
            }
        }
        if wqe.operation.is_local() {
            return self.begin_local(&wqe.operation, connection, memory);
        }
        let packets = connection.packets(wqe.len);
        // A longer request is checked before its first packet; one packet is checked when read.
        if (wqe.awaits_data() || packets > 1)
            && sges::check(memory, connection.pd, self.queue.sges(number), wqe.awaits_data()).is_err()
        {
            return self.fail_or_stall(Status::LocalProtection).map(|()| false);
        }
        let first = self.next;
        let entry = self.queue.get_mut(number);
        entry.first = first;
        entry.packets = packets;
        self.begun += 1;
        self.rd_atomic_outstanding += u32::from(wqe.awaits_data());
        Ok(true)
    }

    /// The request at the cursor stalls the queue, and fails when it is the oldest.
    pub(super) fn fail_or_stall(&self, status: Status) -> Result<(), Status> {
        if self.cursor == self.queue.head {
            Err(status)
        } else {
            Ok(())
        }
    }

    /// Writes packet `next`, of the request at the cursor.
    pub(super) fn write<M: Memory>(
        &self,
        wqe: &Wqe,
        connection: &Connection,
        memory: &mut M,
        buf: &mut [u8],
    ) -> Result<Option<RequestPacket>, Status> {
        let index = self.next - wqe.first;
        let offset = index * connection.mtu as u64;
        let left = u64::from(wqe.len) - offset;
        let part = left.min(connection.mtu as u64) as usize;
        let (opcode, extension, len, numbers) = match wqe.operation {
            Operation::Send { imm } => {
                let (opcode, extension) = send_headers(wqe, index, imm);
                (opcode, extension, part, 1)
            }
            Operation::SendInvalidate { rkey } => {
                let (opcode, extension) = send_invalidate_headers(wqe, index, rkey);
                (opcode, extension, part, 1)
            }
            Operation::Write { addr, rkey, imm } => {
                let (opcode, extension) = write_headers(wqe, index, addr, rkey, imm);
                (opcode, extension, part, 1)
            }
            // A retransmitted READ starts at the first missing response (IBTA vol 1, 9.7.5.1.3).
            Operation::Read { addr, rkey } => {
                let va = addr.saturating_add(offset);
                let numbers = self.part_end(wqe, self.next) - self.next;
                let len = left.min(numbers * connection.mtu as u64) as u32;
                let reth = Reth { va, rkey, len };
                (Opcode::RcReadRequest, Extension::Reth(reth), 0, numbers)
            }
            Operation::Atomic { addr: va, rkey, op } => {
                let (opcode, swap_add, compare) = match op {
                    AtomicOp::CompareSwap { compare, swap } => (Opcode::RcCompareSwap, swap, compare),
                    AtomicOp::FetchAdd { add } => (Opcode::RcFetchAdd, add, 0),
                };
                let atomic = AtomicEth {
                    va,
                    rkey,
                    swap_add,
                    compare,
                };
                (opcode, Extension::Atomic(atomic), 0, 1)
            }
            Operation::AtomicWrite { addr: va, rkey, word } => {
                let len = word.len();
                let reth = Reth {
                    va,
                    rkey,
                    len: len as u32,
                };
                (Opcode::RcAtomicWrite, Extension::Reth(reth), len, 1)
            }
            Operation::Flush(flush) => {
                let (feth, reth) = Feth::of(&flush);
                (Opcode::RcFlush, Extension::FethReth(feth, reth), 0, 1)
            }
            Operation::Bind(_) | Operation::Invalidate { .. } => return Ok(None),
        };
        let ends = self.next + numbers == wqe.end();
        let mut bth = connection.bth(opcode, self.psn(self.next));
        if connection.transport == Transport::Xrc {
            bth.xrc = self.queue.remote_srq(self.cursor);
        }
        let suppress = ends && self.may_suppress_ack(wqe, connection);
        bth.ack_req = self.ack_request(numbers, ends, suppress);
        bth.solicited = ends && wqe.solicited;
        bth.selective = connection.selective;
        let location = self.payload_location(self.cursor, connection, memory);
        let Some(written) = connection.write_packet_headers(buf, &bth, &extension, len, location) else {
            return Ok(None);
        };
        let filled = match wqe.operation {
            Operation::AtomicWrite { word, .. } => {
                buf[written.header_len..][..len].copy_from_slice(&word);
                Ok(())
            }
            _ => self.fill(&written, len, offset, memory, connection.pd, buf),
        };
        if filled.is_err() {
            return self.fail_or_stall(Status::LocalProtection).map(|()| None);
        }
        Ok(Some(RequestPacket {
            lens: written,
            numbers,
            ack_req: bth.ack_req,
        }))
    }

    pub(super) fn payload_location<M: Memory>(
        &self,
        number: u64,
        connection: &Connection,
        memory: &mut M,
    ) -> PayloadLocation {
        let wqe = self.queue.get(number);
        if wqe.inline || wqe.operation.is_without_payload() {
            return PayloadLocation::Inline;
        }
        let device_memory =
            connection.link.is_some() && memory.is_device_memory(connection.pd, self.queue.sges(number));
        PayloadLocation::registered(device_memory)
    }

    pub(super) fn fill<M: Memory>(
        &self,
        written: &PacketLens,
        len: usize,
        offset: u64,
        memory: &mut M,
        pd: PdId,
        buf: &mut [u8],
    ) -> Result<(), AccessError> {
        if written.by_ref > 0 {
            return sges::add_refs(memory, pd, self.queue.sges(self.cursor), offset, len);
        }
        let payload = &mut buf[written.header_len..written.header_len + len];
        self.queue.gather(self.cursor, memory, pd, offset, payload)
    }
}

pub(super) fn send_headers(wqe: &Wqe, index: u64, imm: Option<u32>) -> (Opcode, Extension) {
    let opcode = Opcode::rc_send(position(wqe, index), imm.is_some());
    (opcode, with_imm(opcode, None, imm))
}

fn send_invalidate_headers(wqe: &Wqe, index: u64, rkey: RKey) -> (Opcode, Extension) {
    match position(wqe, index) {
        Position::Last => (Opcode::RcSendLastInvalidate, Extension::Ieth(Ieth { rkey })),
        Position::Only => (Opcode::RcSendOnlyInvalidate, Extension::Ieth(Ieth { rkey })),
        Position::First | Position::Middle => send_headers(wqe, index, None),
    }
}

pub(super) fn write_headers(wqe: &Wqe, index: u64, addr: u64, rkey: RKey, imm: Option<u32>) -> (Opcode, Extension) {
    let opcode = Opcode::rc_write(position(wqe, index), imm.is_some());
    let len = wqe.len;
    (opcode, with_imm(opcode, Some(Reth { va: addr, rkey, len }), imm))
}

fn position(wqe: &Wqe, index: u64) -> Position {
    Position::of(index == 0, index + 1 == u64::from(wqe.packets))
}

fn with_imm(opcode: Opcode, reth: Option<Reth>, imm: Option<u32>) -> Extension {
    let starts = opcode.position().starts();
    let imm = imm.filter(|_| opcode.position().ends()).map(ImmDt);
    match (reth.filter(|_| starts), imm) {
        (None, None) => Extension::Bare,
        (None, Some(imm)) => Extension::Imm(imm),
        (Some(reth), None) => Extension::Reth(reth),
        (Some(reth), Some(imm)) => Extension::RethImm(reth, imm),
    }
}
