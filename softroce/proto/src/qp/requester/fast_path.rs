//! Fast paths of a request: carried out in the peer's memory, or queued and sent at once.

use core::time::Duration;

use crate::Instant;
use crate::direct::{DirectMemory, DirectPath};
use crate::memory::Memory;
use crate::outbox::Outbox;
use crate::qp::requester::{Requester, Timer};
use crate::qp::{Connection, sges};
use crate::wire::{Bth, Extension, ImmDt, Opcode, Position, Reth, write_headers};
use crate::work::{Operation, Payload, SendRequest, Status};

impl Requester {
    /// As [`post`](Self::post) followed by the request's execution and completion. False, with
    /// nothing changed, unless no request is outstanding, so that nothing is before it.
    #[inline(always)]
    pub(crate) fn post_send_direct<D: DirectMemory>(
        &mut self,
        request: &SendRequest<'_>,
        path: &DirectPath,
        connection: &Connection,
        direct: &mut D,
        out: &mut Outbox,
    ) -> bool {
        let rd_atomic = match request.operation {
            Operation::Write { imm: None, .. } => false,
            Operation::Read { .. } | Operation::Atomic { .. } => true,
            _ => return false,
        };
        if self.queue.head != self.queue.tail || rd_atomic && self.limits.max_rd_atomic == 0 {
            return false;
        }
        let Ok(len) = self.queue.check_post(request, 0) else {
            return false;
        };
        if !direct.execute(path, &request.operation, request.payload) {
            return false;
        }
        let counters = &mut out.counters;
        let bytes = if rd_atomic {
            &mut counters.rx_bytes
        } else {
            &mut counters.tx_bytes
        };
        *bytes += u64::from(len);
        if request.signaled || self.signal_all {
            let opcode = request.operation.completion_opcode();
            self.report(request.wr_id, Status::Success, opcode, len, connection, out);
        }
        true
    }

    /// As [`post`](Self::post) followed by [`transmit`](Self::transmit); returns the length of the
    /// headers, and that with the payload. `None`, with nothing changed, unless the request can be
    /// sent at once, inlined in a packet of a lossless link.
    pub(crate) fn post_send_fast<M: Memory>(
        &mut self,
        now: impl FnOnce(Duration) -> Instant,
        request: &SendRequest<'_>,
        connection: &Connection,
        memory: &mut M,
        buf: &mut [u8],
    ) -> Option<(usize, usize)> {
        let idle = self.cursor == self.queue.tail && self.next == self.max && self.local_end <= self.queue.head;
        if !idle
            || !self.may_send()
            || request.fence && self.rd_atomic_outstanding > 0
            || memory.has_pending_copies(connection.qpn)
        {
            return None;
        }
        let len = match request.payload {
            Payload::Inline(bytes) => bytes.len(),
            Payload::Gather(list) if memory.is_device_memory(connection.pd, list) => return None,
            Payload::Gather(list) => usize::try_from(sges::total(list)).ok()?,
        };
        if len > connection.inline_limit.min(connection.mtu) {
            return None;
        }
        let (opcode, extension) = match request.operation {
            Operation::Write { addr: va, rkey, imm } => {
                let reth = Reth {
                    va,
                    rkey,
                    len: len as u32,
                };
                let extension = imm.map_or(Extension::Reth(reth), |imm| Extension::RethImm(reth, ImmDt(imm)));
                (Opcode::rc_write(Position::Only, imm.is_some()), extension)
            }
            Operation::Send { imm } => {
                let extension = imm.map_or(Extension::Bare, |imm| Extension::Imm(ImmDt(imm)));
                (Opcode::rc_send(Position::Only, imm.is_some()), extension)
            }
            _ => return None,
        };
        let (number, first) = (self.queue.tail, self.next);
        let mut bth = Bth::new(opcode, connection.peer, self.psn(first));
        bth.solicited = request.solicited;
        let headers = write_headers(buf, &bth, &extension).ok()?;
        let payload = buf.get_mut(headers..headers + len)?;
        match request.payload {
            Payload::Inline(bytes) => payload.copy_from_slice(bytes),
            Payload::Gather(list) => sges::gather(memory, connection.pd, list, 0, payload).ok()?,
        }
        self.queue.post(request, self.signal_all).ok()?;
        let wqe = self.queue.get_mut(number);
        (wqe.first, wqe.packets) = (first, 1);
        let wqe = *wqe;
        let suppress = self.may_suppress_ack(&wqe, connection);
        let ack_req = self.ack_request(1, true, suppress);
        if ack_req {
            Bth::set_ack_req(buf);
        }
        self.commit(1, ack_req, false);
        self.begun = number + 1;
        self.cursor = self.begun;
        if self.timer == Timer::Idle
            && let Some(timeout) = self.limits.timeout
        {
            self.restart_ack_timer(now(timeout));
        }
        Some((headers, headers + len))
    }
}
