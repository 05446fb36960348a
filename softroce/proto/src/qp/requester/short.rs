//! The short way of a request: queued and sent at once.

use core::time::Duration;

use crate::Instant;
use crate::memory::Memory;
use crate::qp::requester::{Requester, Wait};
use crate::qp::{Connection, sges};
use crate::wire::{Bth, Extension, ImmDt, Opcode, Position, Reth, write_headers};
use crate::work::{Operation, Payload, SendRequest};

impl Requester {
    /// Queues a SEND or WRITE and writes its packet, as [`post`](Self::post) and [`transmit`](Self::transmit) would one after the other: the length of its headers, and with its payload. `None` when
    /// something is to be sent before it, when it is to wait or to be refused, or is longer than what goes along in a lane's packet; nothing has changed then.
    pub(crate) fn post_short<M: Memory>(
        &mut self,
        now: impl FnOnce(Duration) -> Instant,
        request: &SendRequest<'_>,
        connection: &Connection,
        memory: &mut M,
        buf: &mut [u8],
    ) -> Option<(usize, usize)> {
        let at_rest = self.cursor == self.queue.tail && self.next == self.max && self.local <= self.queue.head;
        let may_send = self.next - self.una < self.window && !matches!(self.wait, Wait::Rnr(_));
        if !at_rest || !may_send || request.fence && self.awaiting > 0 || memory.is_unsettled(connection.qpn) {
            return None;
        }
        let len = match request.payload {
            Payload::Inline(bytes) => bytes.len(),
            Payload::Gather(list) if memory.is_distant(connection.pd, list) => return None,
            Payload::Gather(list) => usize::try_from(sges::total(list)).ok()?,
        };
        if len > connection.lane_inline.min(connection.mtu) {
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
        let quiet = self.is_quiet(&wqe, connection);
        let last_admitted = first + 1 - self.una >= self.window;
        let ack_req = !quiet || last_admitted || self.unasked + 1 >= self.ask_every;
        if ack_req {
            Bth::ask(buf);
        }
        self.unasked = if ack_req { 0 } else { self.unasked + 1 };
        self.quiet = !ack_req;
        self.next = first + 1;
        self.max = self.next;
        self.begun = number + 1;
        self.cursor = self.begun;
        if self.wait == Wait::Nothing
            && let Some(timeout) = self.limits.timeout
        {
            self.wait_for_ack(now(timeout));
        }
        Some((headers, headers + len))
    }
}
