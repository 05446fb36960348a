//! Execution of requests (IBTA vol 1, 9.7.4: order of checks, 9.7.5.2: NAKs, 9.4: operations).

use core::mem;

use crate::RKey;
use crate::memory::{AtomicOp, CopyError, Flush, Invalidator, Memory, RemoteRight};
use crate::outbox::Outbox;
use crate::qp::packet::{InboundPacket, PayloadSource};
use crate::qp::responder::replies::{ReadStream, ReplyKind};
use crate::qp::responder::{FatalNak, InboundMessage, Outcome, Responder, WriteTarget};
use crate::qp::{Connection, MAX_MESSAGE, sges};
use crate::wire::{AtomicEth, Bth, Extension, Nak, Operation, Reth};
use crate::work::{CompletionOpcode, Status};

pub(super) const MASK_24: u32 = 0x00ff_ffff;

/// The READ whose response acknowledges an atomic WRITE or a FLUSH.
const NO_BYTES: Reth = Reth {
    va: 0,
    rkey: RKey(0),
    len: 0,
};

pub(super) enum Executed {
    /// Part of a message that continues.
    Partial,
    /// The end of a message.
    Message,
    /// A READ, atomic, atomic WRITE or FLUSH: takes this many PSNs and has a reply of its own.
    RdAtomic(u32),
    ReceiverNotReady,
    /// The payload cannot be read: the packet counts as lost.
    PayloadLost,
}

impl Responder {
    /// Handles a request. True when it was the expected one and was executed, in part or in whole.
    ///
    /// # Errors
    /// When it ends the connection.
    pub(crate) fn handle_request<M: Memory>(
        &mut self,
        packet: &InboundPacket<'_>,
        connection: &Connection,
        memory: &mut M,
        out: &mut Outbox,
    ) -> Result<bool, FatalNak> {
        match packet.bth.psn.since(self.expected) {
            0 => {
                let before = self.expected;
                let executed = self.handle_next(packet, connection, memory, out)?;
                self.execute_kept(before, connection, memory, out)?;
                Ok(executed)
            }
            ahead @ 1.. => {
                out.counters.out_of_sequence += 1;
                if self.kept.is_enabled() && !self.nak_sent {
                    self.keep(ahead as usize - 1, packet, out);
                } else if !self.nak_sent {
                    self.nak_sent = true;
                    out.counters.sequence_naks_sent += 1;
                    self.replies
                        .nak(self.expected, self.msn, ReplyKind::Nak(Nak::PsnSequence));
                }
                Ok(false)
            }
            _ => {
                out.counters.duplicates += 1;
                self.handle_duplicate(packet, connection);
                Ok(false)
            }
        }
    }

    /// Fast path of [`handle_request`](Self::handle_request) for a WRITE ONLY of `len` bytes.
    /// False, with only bytes it may write changed, unless it is expected and valid.
    pub(crate) fn handle_write_fast<M: Memory>(
        &mut self,
        bth: &Bth,
        reth: &Reth,
        len: usize,
        connection: &Connection,
        memory: &mut M,
    ) -> bool {
        let next = bth.psn == self.expected && !self.nak_sent && self.message == InboundMessage::None;
        let whole = len > 0 && len <= connection.mtu && reth.len as usize == len;
        if !next || !whole || !self.limits.access.write {
            return false;
        }
        // A single packet: all checks precede the first byte.
        let written = memory.remote_write_by_ref(connection.access_context(), reth.rkey, reth.va, len);
        if written.is_err() {
            return false;
        }
        self.expected = bth.psn.add(1);
        self.msn = (self.msn + 1) & MASK_24;
        if bth.ack_req {
            self.replies.ack(bth.psn, self.msn);
        }
        true
    }

    pub(super) fn handle_next<M: Memory>(
        &mut self,
        packet: &InboundPacket<'_>,
        connection: &Connection,
        memory: &mut M,
        out: &mut Outbox,
    ) -> Result<bool, FatalNak> {
        if self.is_unselected {
            return Err(FatalNak::INVALID_REQUEST);
        }
        let nak_sent = mem::replace(&mut self.nak_sent, false);
        let psn = self.expected;
        let executed = match (packet.bth.opcode.operation(), packet.extension) {
            (Operation::Send, extension) => self.send(packet, extension, connection, memory, out)?,
            (Operation::Write, extension) => self.write(packet, extension, connection, memory, out)?,
            (Operation::ReadRequest, Extension::Reth(reth)) => self.read(&reth, connection, memory)?,
            (Operation::CompareSwap | Operation::FetchAdd, Extension::Atomic(atomic)) => {
                self.atomic(&packet.bth, &atomic, connection, memory)?
            }
            (Operation::AtomicWrite, Extension::Reth(reth)) => {
                self.atomic_write(packet.payload, &reth, connection, memory)?
            }
            (Operation::Flush, Extension::FethReth(feth, reth)) => {
                let flush = feth.flush(&reth).ok_or(FatalNak::INVALID_REQUEST)?;
                self.flush_memory(&flush, connection, memory)?
            }
            _ => return Err(FatalNak::INVALID_REQUEST),
        };
        match executed {
            Executed::ReceiverNotReady => {
                self.queue_rnr_nak(out);
                return Ok(true);
            }
            Executed::PayloadLost => {
                self.nak_sent = nak_sent;
                return Ok(false);
            }
            Executed::Partial => self.expected = psn.add(1),
            Executed::Message => {
                self.expected = psn.add(1);
                self.msn = (self.msn + 1) & MASK_24;
            }
            Executed::RdAtomic(numbers) => self.expected = psn.add(numbers),
        }
        if packet.bth.ack_req && !matches!(executed, Executed::RdAtomic(_)) {
            self.replies.ack(psn, self.msn);
        }
        Ok(true)
    }

    pub(super) fn send<M: Memory>(
        &mut self,
        packet: &InboundPacket<'_>,
        extension: Extension,
        connection: &Connection,
        memory: &mut M,
        out: &mut Outbox,
    ) -> Result<Executed, FatalNak> {
        let position = packet.bth.opcode.position();
        let done = match (self.message, position.starts()) {
            (InboundMessage::None, true) => 0,
            (InboundMessage::Send { done }, false) => done,
            _ => return Err(FatalNak::INVALID_REQUEST),
        };
        if !is_length_valid(packet, connection) {
            return Err(FatalNak::INVALID_REQUEST);
        }
        if position.starts() && !self.has_receive(out) {
            return Ok(Executed::ReceiverNotReady);
        }
        let Some((receive, list)) = self.queue.front() else {
            return Ok(Executed::ReceiverNotReady);
        };
        let end = done + packet.payload.len() as u64;
        if end > receive.capacity {
            self.complete(connection, Outcome::error(Status::LocalLength), out);
            return Err(FatalNak {
                nak: Nak::InvalidRequest,
                reported: true,
            });
        }
        match sges::scatter(memory, self.receive_pd, list, done, packet.payload) {
            Ok(()) => {}
            Err(CopyError::Gone) => return Ok(Executed::PayloadLost),
            Err(CopyError::Access) => {
                self.complete(connection, Outcome::error(Status::LocalProtection), out);
                return Err(FatalNak {
                    nak: Nak::RemoteOperational,
                    reported: true,
                });
            }
        }
        if !position.ends() {
            self.message = InboundMessage::Send { done: end };
            return Ok(Executed::Partial);
        }
        // The receive is consumed and reports the error (IBTA vol 1, 9.9.3: responder class J).
        let invalidated = extension.ieth().map(|ieth| ieth.rkey);
        let context = connection.access_context();
        if invalidated.is_some_and(|rkey| memory.invalidate(context, rkey, Invalidator::Peer).is_err()) {
            self.complete(connection, Outcome::error(Status::RemoteInvalidRequest), out);
            return Err(FatalNak {
                nak: Nak::RemoteAccess,
                reported: true,
            });
        }
        self.message = InboundMessage::None;
        let outcome = Outcome {
            status: Status::Success,
            opcode: CompletionOpcode::Receive,
            byte_len: end as u32,
            imm: extension.imm().map(|imm| imm.0),
            invalidated,
            solicited: packet.bth.solicited,
            datagram_from: None,
        };
        self.complete(connection, outcome, out);
        Ok(Executed::Message)
    }

    pub(super) fn write<M: Memory>(
        &mut self,
        packet: &InboundPacket<'_>,
        extension: Extension,
        connection: &Connection,
        memory: &mut M,
        out: &mut Outbox,
    ) -> Result<Executed, FatalNak> {
        let position = packet.bth.opcode.position();
        if !self.limits.access.write || !is_length_valid(packet, connection) {
            return Err(FatalNak::INVALID_REQUEST);
        }
        let target = match (self.message, extension.reth()) {
            (InboundMessage::None, Some(reth)) => WriteTarget {
                rkey: reth.rkey,
                addr: reth.va,
                left: reth.len,
                len: reth.len,
            },
            (InboundMessage::Write(target), None) => target,
            _ => return Err(FatalNak::INVALID_REQUEST),
        };
        // Only the last packet leaves no bytes to come (IBTA vol 1, 9.7.4.1.6).
        let bytes = packet.payload.len() as u32;
        let left = target.left.checked_sub(bytes).ok_or(FatalNak::INVALID_REQUEST)?;
        if position.ends() != (left == 0) || target.len > MAX_MESSAGE {
            return Err(FatalNak::INVALID_REQUEST);
        }
        // The whole range is checked before the first byte is written.
        if position.starts() && target.len > 0 {
            let len = u64::from(target.len);
            memory
                .check_remote(
                    connection.access_context(),
                    target.rkey,
                    target.addr,
                    len,
                    RemoteRight::Write,
                )
                .map_err(|_| FatalNak::REMOTE_ACCESS)?;
        }
        let imm = extension.imm();
        if imm.is_some() && !self.has_receive(out) {
            return Ok(Executed::ReceiverNotReady);
        }
        if bytes > 0 {
            let (context, rkey, addr) = (connection.access_context(), target.rkey, target.addr);
            let written = match packet.payload {
                PayloadSource::Bytes(bytes) => memory.remote_write(context, rkey, addr, bytes).map_err(CopyError::from),
                PayloadSource::ByRef { len, .. } => memory.remote_write_by_ref(context, rkey, addr, len),
            };
            match written {
                Ok(()) => {}
                Err(CopyError::Gone) => return Ok(Executed::PayloadLost),
                Err(CopyError::Access) => return Err(FatalNak::REMOTE_ACCESS),
            }
        }
        if !position.ends() {
            let addr = target.addr.saturating_add(u64::from(bytes));
            self.message = InboundMessage::Write(WriteTarget { addr, left, ..target });
            return Ok(Executed::Partial);
        }
        self.message = InboundMessage::None;
        if let Some(imm) = imm {
            let outcome = Outcome {
                status: Status::Success,
                opcode: CompletionOpcode::ReceiveWriteImm,
                byte_len: target.len,
                imm: Some(imm.0),
                invalidated: None,
                solicited: packet.bth.solicited,
                datagram_from: None,
            };
            self.complete(connection, outcome, out);
        }
        Ok(Executed::Message)
    }

    /// A READ: its responses are sent one by one as the link accepts them.
    fn read<M: Memory>(&mut self, reth: &Reth, connection: &Connection, memory: &mut M) -> Result<Executed, FatalNak> {
        if !self.limits.access.read || !self.may_accept_rd_atomic() || reth.len > MAX_MESSAGE {
            return Err(FatalNak::INVALID_REQUEST);
        }
        if reth.len > 0 {
            let len = u64::from(reth.len);
            memory
                .check_remote(connection.access_context(), reth.rkey, reth.va, len, RemoteRight::Read)
                .map_err(|_| FatalNak::REMOTE_ACCESS)?;
        }
        self.msn = (self.msn + 1) & MASK_24;
        let stream = read_stream(reth, connection);
        self.replies.data(self.expected, self.msn, ReplyKind::Read(stream));
        Ok(Executed::RdAtomic(stream.packets))
    }

    /// An atomic: executed now; its result is kept for replay.
    fn atomic<M: Memory>(
        &mut self,
        bth: &Bth,
        atomic: &AtomicEth,
        connection: &Connection,
        memory: &mut M,
    ) -> Result<Executed, FatalNak> {
        let aligned = atomic.va.is_multiple_of(8);
        if !self.limits.access.atomic || !self.may_accept_rd_atomic() || !aligned {
            return Err(FatalNak::INVALID_REQUEST);
        }
        let op = if bth.opcode.operation() == Operation::CompareSwap {
            AtomicOp::CompareSwap {
                compare: atomic.compare,
                swap: atomic.swap_add,
            }
        } else {
            AtomicOp::FetchAdd { add: atomic.swap_add }
        };
        let original = memory
            .remote_atomic(connection.access_context(), atomic.rkey, atomic.va, op)
            .map_err(|_| FatalNak::REMOTE_ACCESS)?;
        self.msn = (self.msn + 1) & MASK_24;
        self.atomic_replay.store(self.expected, original);
        self.replies
            .data(self.expected, self.msn, ReplyKind::Atomic { original });
        Ok(Executed::RdAtomic(1))
    }

    /// An atomic WRITE: executed now, and acknowledged as a READ of no bytes is (annex A19).
    fn atomic_write<M: Memory>(
        &mut self,
        payload: PayloadSource<'_>,
        reth: &Reth,
        connection: &Connection,
        memory: &mut M,
    ) -> Result<Executed, FatalNak> {
        let whole = payload.len() == size_of::<u64>() && reth.len as usize == payload.len();
        let aligned = reth.va.is_multiple_of(8);
        if !self.limits.access.write || !self.may_accept_rd_atomic() || !whole || !aligned {
            return Err(FatalNak::INVALID_REQUEST);
        }
        let (context, rkey, addr) = (connection.access_context(), reth.rkey, reth.va);
        let written = match payload {
            PayloadSource::Bytes(bytes) => {
                let word = bytes.try_into().map_err(|_| FatalNak::INVALID_REQUEST)?;
                memory
                    .remote_atomic_write(context, rkey, addr, word)
                    .map_err(CopyError::from)
            }
            PayloadSource::ByRef { .. } => memory.remote_atomic_write_by_ref(context, rkey, addr),
        };
        match written {
            Ok(()) => Ok(self.reply_without_data(connection)),
            Err(CopyError::Gone) => Ok(Executed::PayloadLost),
            Err(CopyError::Access) => Err(FatalNak::REMOTE_ACCESS),
        }
    }

    /// A FLUSH: what was executed before is in memory, and is placed as required now.
    fn flush_memory<M: Memory>(
        &mut self,
        flush: &Flush,
        connection: &Connection,
        memory: &mut M,
    ) -> Result<Executed, FatalNak> {
        let permitted = flush.placement.is_within(self.limits.access.flush) && flush.len <= MAX_MESSAGE;
        if !permitted || !self.may_accept_rd_atomic() {
            return Err(FatalNak::INVALID_REQUEST);
        }
        memory
            .remote_flush(connection.access_context(), flush)
            .map_err(|_| FatalNak::REMOTE_ACCESS)?;
        Ok(self.reply_without_data(connection))
    }

    fn reply_without_data(&mut self, connection: &Connection) -> Executed {
        self.msn = (self.msn + 1) & MASK_24;
        let stream = read_stream(&NO_BYTES, connection);
        self.replies.data(self.expected, self.msn, ReplyKind::Read(stream));
        Executed::RdAtomic(stream.packets)
    }

    /// Between messages, and within max_dest_rd_atomic (IBTA vol 1, 9.7.4.1.5, 9.4.4).
    fn may_accept_rd_atomic(&self) -> bool {
        self.message == InboundMessage::None && self.replies.outstanding() < self.limits.max_dest_rd_atomic
    }

    /// Duplicate request: acknowledged, read or replayed, not executed (IBTA vol 1, 9.7.5.1.4).
    fn handle_duplicate(&mut self, packet: &InboundPacket<'_>, connection: &Connection) {
        let psn = packet.bth.psn;
        let depth = self.limits.max_dest_rd_atomic;
        match (packet.bth.opcode.operation(), packet.extension) {
            (Operation::ReadRequest, Extension::Reth(reth)) => {
                let stream = read_stream(&reth, connection);
                // A duplicate's responses end before the expected PSN.
                let within = psn.add(stream.packets).since(self.expected) <= 0;
                if within && reth.len <= MAX_MESSAGE && self.limits.access.read && !self.is_unselected {
                    self.replies
                        .duplicate_data(psn, self.msn, ReplyKind::Read(stream), depth);
                }
            }
            (Operation::AtomicWrite | Operation::Flush, _) => {
                let stream = read_stream(&NO_BYTES, connection);
                self.replies
                    .duplicate_data(psn, self.msn, ReplyKind::Read(stream), depth);
            }
            (_, Extension::Atomic(_)) => {
                if let Some(original) = self.atomic_replay.find(psn) {
                    self.replies
                        .duplicate_data(psn, self.msn, ReplyKind::Atomic { original }, depth);
                }
            }
            _ => self.replies.ack(self.expected.add(MASK_24), self.msn),
        }
    }
}

fn read_stream(reth: &Reth, connection: &Connection) -> ReadStream {
    ReadStream {
        pd: connection.pd,
        addr: reth.va,
        rkey: reth.rkey,
        left: reth.len,
        packets: connection.packets(reth.len),
        unsent: true,
    }
}

/// Whether the payload length is valid for the packet's position: exactly the path MTU except in
/// the last packet, which must not be empty unless it is the only one (IBTA vol 1, 9.7.4.1.6).
fn is_length_valid(packet: &InboundPacket<'_>, connection: &Connection) -> bool {
    let position = packet.bth.opcode.position();
    let (bytes, mtu) = (packet.payload.len(), connection.mtu);
    if !position.ends() {
        return bytes == mtu;
    }
    bytes <= mtu && (bytes > 0 || position.starts())
}
