//! Receiving over UC and UD: what cannot be received is dropped silently (IBTA vol 1, 9.8.2.2 and
//! 9.8.4; 9.9.3: class D). Only a receive that cannot be written ends the queue pair (class A).

use crate::memory::{CopyError, Memory};
use crate::outbox::Outbox;
use crate::qp::packet::{InboundPacket, PayloadSource};
use crate::qp::responder::request::Executed;
use crate::qp::responder::{FatalNak, InboundMessage, Outcome, Responder};
use crate::qp::{Connection, sges};
use crate::wire::{self, Extension, GRH_LEN, IpFields, Operation, ip_header};
use crate::work::{CompletionOpcode, Status};

/// A receive completed with a local error: the queue pair enters the error state.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct LocalFault;

impl Responder {
    /// Handles a UC packet. True when it was executed, in part or in whole.
    ///
    /// # Errors
    /// When it ends the queue pair.
    pub(crate) fn handle_unreliable<M: Memory>(
        &mut self,
        packet: &InboundPacket<'_>,
        connection: &Connection,
        memory: &mut M,
        out: &mut Outbox,
    ) -> Result<bool, LocalFault> {
        let (psn, starts) = (packet.bth.psn, packet.bth.opcode.position().starts());
        let gap = psn != self.expected;
        out.counters.out_of_sequence += u64::from(gap);
        self.expected = psn.add(1);
        // A message that lacks a packet is dropped, its receive reused; a new one may have any PSN.
        if (gap || starts) && self.message != InboundMessage::None {
            self.drop_message(out);
        }
        if !starts && self.message == InboundMessage::None {
            return Ok(false);
        }
        let done = match packet.bth.opcode.operation() {
            Operation::Send if self.receive_fits(packet, out) => {
                self.send(packet, packet.extension, connection, memory, out)
            }
            Operation::Write => self.write(packet, packet.extension, connection, memory, out),
            _ => Ok(Executed::ReceiverNotReady),
        };
        match done {
            Ok(Executed::ReceiverNotReady | Executed::PayloadLost) | Err(FatalNak { reported: false, .. }) => {
                self.drop_message(out);
                Ok(false)
            }
            Ok(_) => Ok(true),
            Err(_) => Err(LocalFault),
        }
    }

    fn drop_message(&mut self, out: &mut Outbox) {
        out.counters.dropped_messages += 1;
        self.message = InboundMessage::None;
    }

    fn receive_fits(&mut self, packet: &InboundPacket<'_>, out: &mut Outbox) -> bool {
        let done = match self.message {
            InboundMessage::Send { done } => done,
            InboundMessage::None | InboundMessage::Write(_) => 0,
        };
        if packet.bth.opcode.position().starts() && !self.has_receive(out) {
            return false;
        }
        let end = done + packet.payload.len() as u64;
        self.queue.front().is_some_and(|(receive, _)| end <= receive.capacity)
    }

    /// Handles a UD packet: IP header and payload go into the oldest receive.
    ///
    /// # Errors
    /// When it ends the queue pair.
    pub(crate) fn handle_datagram<M: Memory>(
        &mut self,
        packet: &InboundPacket<'_>,
        ip: IpFields,
        qkey: u32,
        connection: &Connection,
        memory: &mut M,
        out: &mut Outbox,
    ) -> Result<(), LocalFault> {
        let (Extension::Deth(deth) | Extension::DethImm(deth, _)) = packet.extension else {
            return Ok(());
        };
        if deth.qkey != qkey {
            out.counters.qkey_violations += 1;
            return Ok(());
        }
        let byte_len = GRH_LEN + packet.payload.len();
        let takes = packet.payload.len() <= connection.mtu && self.has_receive(out);
        let Some((_, list)) = self
            .queue
            .front()
            .filter(|(receive, _)| takes && byte_len as u64 <= receive.capacity)
        else {
            out.counters.dropped_messages += 1;
            return Ok(());
        };
        let (version, header) = ip_header(ip, wire::packet_len(packet.bth.opcode, packet.payload.len()));
        let pd = self.receive_pd;
        let scattered = sges::scatter(memory, pd, list, 0, PayloadSource::Bytes(&header))
            .and_then(|()| sges::scatter(memory, pd, list, GRH_LEN as u64, packet.payload));
        match scattered {
            Ok(()) => {}
            Err(CopyError::Gone) => {
                out.counters.dropped_messages += 1;
                return Ok(());
            }
            Err(CopyError::Access) => {
                self.complete(connection, Outcome::error(Status::LocalProtection), out);
                return Err(LocalFault);
            }
        }
        let outcome = Outcome {
            status: Status::Success,
            opcode: CompletionOpcode::Receive,
            byte_len: byte_len as u32,
            imm: packet.extension.imm().map(|imm| imm.0),
            invalidated: None,
            solicited: packet.bth.solicited,
            datagram_from: Some((deth.src_qp, version)),
        };
        self.complete(connection, outcome, out);
        Ok(())
    }
}
