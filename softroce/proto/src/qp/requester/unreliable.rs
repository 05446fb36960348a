//! Sending over UC and UD: each request completes with its last packet, so nothing is in flight and
//! `una`, `next` and `max` are equal (IBTA vol 1, 9.8.2 and 9.8.4).

use crate::memory::Memory;
use crate::outbox::Outbox;
use crate::qp::packet::PacketLens;
use crate::qp::requester::Requester;
use crate::qp::requester::transmit::{send_headers, write_headers};
use crate::qp::{Connection, Path};
use crate::wire::{Bth, Deth, Extension, ImmDt, Opcode};
use crate::work::{Operation, PostError, Remote, SendRequest, Status};

/// Selects the queue pair's own Q_Key (IBTA vol 1, 10.2.5: controlled Q_Keys).
const USE_OWN_QKEY: u32 = 0x8000_0000;

impl Requester {
    pub(crate) fn post_to(&mut self, request: &SendRequest<'_>, to: &Remote) -> Result<(), PostError> {
        self.queue.post_to(request, to, self.signal_all)
    }

    /// `Ok(None)` when there is none. When `draining`, no request begins.
    ///
    /// # Errors
    /// The status with which the oldest request fails.
    pub(crate) fn transmit_unreliable<M: Memory>(
        &mut self,
        connection: &Connection,
        draining: bool,
        memory: &mut M,
        buf: &mut [u8],
        out: &mut Outbox,
    ) -> Result<Option<PacketLens>, Status> {
        if !self.advance_cursor(connection, draining, memory, out)? {
            return Ok(None);
        }
        let wqe = *self.queue.get(self.cursor);
        let index = self.next - wqe.first;
        let (opcode, extension) = match wqe.operation {
            Operation::Send { imm } => send_headers(&wqe, index, imm),
            Operation::Write { addr, rkey, imm } => write_headers(&wqe, index, addr, rkey, imm),
            // Refused at posting.
            _ => return Err(Status::LocalQpOperation),
        };
        let mut bth = connection.bth(opcode, self.psn(self.next));
        bth.solicited = opcode.position().ends() && wqe.solicited;
        let offset = index * connection.mtu as u64;
        let len = (u64::from(wqe.len) - offset).min(connection.mtu as u64) as usize;
        self.write_unreliable(&bth, &extension, (offset, len), connection, memory, buf, out)
    }

    /// # Errors
    /// The status with which the oldest request fails.
    pub(crate) fn transmit_datagram<M: Memory>(
        &mut self,
        connection: &Connection,
        own_qkey: u32,
        draining: bool,
        memory: &mut M,
        buf: &mut [u8],
        out: &mut Outbox,
    ) -> Result<Option<(PacketLens, Path)>, Status> {
        while self.has_more() && !draining {
            let wqe = *self.queue.get(self.cursor);
            let (Operation::Send { imm }, Some(to)) = (wqe.operation, self.queue.destination(self.cursor)) else {
                return Err(Status::LocalQpOperation);
            };
            if wqe.len as usize > connection.mtu {
                // Not sent, and not an error: C10-93.1.1.
                out.counters.dropped_messages += 1;
                self.begun += 1;
                self.cursor += 1;
                self.complete(Status::Success, connection, out);
                continue;
            }
            if !self.begin(connection, draining, memory)? {
                return Ok(None);
            }
            let deth = Deth {
                qkey: if to.qkey & USE_OWN_QKEY == 0 { to.qkey } else { own_qkey },
                src_qp: connection.qpn,
            };
            let extension = imm.map_or(Extension::Deth(deth), |imm| Extension::DethImm(deth, ImmDt(imm)));
            let mut bth = Bth::new(Opcode::ud_send(imm.is_some()), to.qpn, self.psn(self.next));
            bth.solicited = wqe.solicited;
            let part = (0, wqe.len as usize);
            let link = to.path.link;
            let connection = &Connection { link, ..*connection };
            let written = self.write_unreliable(&bth, &extension, part, connection, memory, buf, out)?;
            return Ok(written.map(|written| (written, to.path)));
        }
        Ok(None)
    }

    /// Writes bytes (`offset`, `len`) of the message at the cursor; the last packet completes it.
    #[expect(
        clippy::too_many_arguments,
        reason = "the engine's surroundings, handed down to where both transports meet"
    )]
    fn write_unreliable<M: Memory>(
        &mut self,
        bth: &Bth,
        extension: &Extension,
        (offset, len): (u64, usize),
        connection: &Connection,
        memory: &mut M,
        buf: &mut [u8],
        out: &mut Outbox,
    ) -> Result<Option<PacketLens>, Status> {
        let location = self.payload_location(self.cursor, connection, memory);
        let Some(written) = connection.write_packet_headers(buf, bth, extension, len, location) else {
            return Ok(None);
        };
        self.fill(&written, len, offset, memory, connection.pd, buf)
            .map_err(|_| Status::LocalProtection)?;
        self.next += 1;
        self.una = self.next;
        self.max = self.next;
        if bth.opcode.position().ends() {
            self.cursor += 1;
            self.complete(Status::Success, connection, out);
        }
        Ok(Some(written))
    }
}
