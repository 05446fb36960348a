//! Writes the responder's packets.

use crate::Psn;
use crate::memory::{AccessContext, Memory};
use crate::qp::Connection;
use crate::qp::packet::{PacketLens, PayloadLocation};
use crate::qp::responder::replies::{ReadStream, Reply, ReplyKind};
use crate::qp::responder::{FatalNak, Responder};
use crate::wire::{Aeth, AtomicAckEth, Bth, Credits, Extension, Opcode, Position, Syndrome, header_len};

impl Responder {
    /// Writes the next packet and returns its lengths; `Ok(None)` when there is none.
    ///
    /// # Errors
    /// When the memory of a READ is no longer accessible: this ends the connection.
    pub(crate) fn transmit<M: Memory>(
        &mut self,
        connection: &Connection,
        memory: &mut M,
        buf: &mut [u8],
    ) -> Result<Option<PacketLens>, FatalNak> {
        while let Some(reply) = self.replies.front() {
            let ReplyKind::Read(stream) = &mut reply.kind else {
                let written = write_single(reply, connection, buf);
                self.replies.pop();
                return Ok(written);
            };
            let context = AccessContext {
                pd: stream.pd,
                qpn: connection.qpn,
            };
            let device_memory = connection.link.is_some() && memory.is_remote_device_memory(context, stream.rkey);
            let location = PayloadLocation::registered(device_memory);
            let Some(written) = write_read_headers(reply.psn, reply.msn, stream, location, connection, buf) else {
                return Ok(None);
            };
            let bytes = stream.bytes(connection);
            let (rkey, addr) = (stream.rkey, stream.addr);
            let granted = if bytes == 0 {
                Ok(())
            } else if written.by_ref > 0 {
                memory.add_remote_ref(context, rkey, addr, written.by_ref)
            } else {
                let behind = stream.left as usize - bytes;
                memory.remote_read_ahead(context, rkey, addr, &mut buf[written.header_len..][..bytes], behind)
            };
            if granted.is_err() {
                if reply.duplicate {
                    self.replies.pop();
                    continue;
                }
                return self.abort_read();
            }
            stream.addr = stream.addr.saturating_add(bytes as u64);
            stream.left -= bytes as u32;
            stream.packets -= 1;
            stream.unsent = false;
            reply.psn = reply.psn.add(1);
            if stream.packets == 0 {
                self.replies.pop();
            }
            return Ok(Some(written));
        }
        Ok(None)
    }

    /// Takes the first reply if it is an ACK, as the headers of a packet of a lossless link.
    pub(crate) fn take_ack(&mut self, connection: &Connection) -> Option<[u8; header_len(Opcode::RcAcknowledge)]> {
        let reply = self
            .replies
            .front()
            .filter(|reply| matches!(reply.kind, ReplyKind::Ack))?;
        let mut headers = [0; header_len(Opcode::RcAcknowledge)];
        let bth = Bth::new(Opcode::RcAcknowledge, connection.peer, reply.psn);
        let (front, aeth) = headers.split_at_mut(Bth::LEN);
        front.copy_from_slice(&bth.to_bytes(0));
        aeth.copy_from_slice(&ack(reply.msn).to_bytes());
        self.replies.pop();
        Some(headers)
    }

    /// Drops all replies; the NAK gets the PSN of the READ's next response.
    fn abort_read(&mut self) -> Result<Option<PacketLens>, FatalNak> {
        if let Some(reply) = self.replies.front() {
            self.expected = reply.psn;
        }
        self.replies.clear();
        Err(FatalNak::REMOTE_ACCESS)
    }
}

impl ReadStream {
    fn bytes(&self, connection: &Connection) -> usize {
        (self.left as usize).min(connection.mtu)
    }

    fn opcode(&self) -> Opcode {
        Opcode::rc_read_response(Position::of(self.unsent, self.packets == 1))
    }
}

fn write_single(reply: &Reply, connection: &Connection, buf: &mut [u8]) -> Option<PacketLens> {
    let (opcode, extension) = match reply.kind {
        ReplyKind::Ack => (Opcode::RcAcknowledge, Extension::Aeth(ack(reply.msn))),
        ReplyKind::Nak(nak) => (Opcode::RcAcknowledge, aeth(Syndrome::Nak(nak), reply.msn)),
        ReplyKind::Rnr(timer) => (Opcode::RcAcknowledge, aeth(Syndrome::RnrNak(timer), reply.msn)),
        ReplyKind::Selective(received) => (Opcode::RcSelectiveAcknowledge, Extension::Selective(received)),
        ReplyKind::Atomic { original } => (
            Opcode::RcAtomicAcknowledge,
            Extension::AethAtomic(ack(reply.msn), AtomicAckEth { original }),
        ),
        ReplyKind::Read(_) => return None,
    };
    let bth = connection.bth(opcode, reply.psn);
    connection.write_packet_headers(buf, &bth, &extension, 0, PayloadLocation::Inline)
}

fn write_read_headers(
    psn: Psn,
    msn: u32,
    stream: &ReadStream,
    location: PayloadLocation,
    connection: &Connection,
    buf: &mut [u8],
) -> Option<PacketLens> {
    let opcode = stream.opcode();
    let extension = if opcode == Opcode::RcReadResponseMiddle {
        Extension::Bare
    } else {
        Extension::Aeth(ack(msn))
    };
    let bth = connection.bth(opcode, psn);
    connection.write_packet_headers(buf, &bth, &extension, stream.bytes(connection), location)
}

/// An ACK with unlimited end-to-end credits: flow control is by RNR NAK (IBTA vol 1, 9.7.7.2).
const fn ack(msn: u32) -> Aeth {
    let syndrome = Syndrome::Ack(Credits::UNLIMITED);
    Aeth { syndrome, msn }
}

const fn aeth(syndrome: Syndrome, msn: u32) -> Extension {
    Extension::Aeth(Aeth { syndrome, msn })
}
