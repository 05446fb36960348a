//! Selective repeat at the responder (decision 111): requests that arrive after a gap are kept, and
//! executed when the gap is filled, in PSN order by the rules for any request. So nothing is in
//! memory, or completed, before what precedes it.

use std::collections::VecDeque;

use crate::Psn;
use crate::memory::Memory;
use crate::outbox::Outbox;
use crate::qp::Connection;
use crate::qp::packet::{InboundPacket, PayloadSource};
use crate::qp::responder::replies::ReplyKind;
use crate::qp::responder::request::MASK_24;
use crate::qp::responder::{FatalNak, Responder};
use crate::wire::{Bth, Extension, SelectiveEth};

/// Bytes of packets that an endpoint keeps: more are dropped, as by go-back-N.
const MAX_KEPT_BYTES: usize = 64 << 20;

/// What a kept packet counts besides its payload.
const OVERHEAD: usize = size_of::<Kept>();

#[derive(Debug)]
struct Kept {
    bth: Bth,
    extension: Extension,
    payload: Box<[u8]>,
}

/// The packets after the expected one that have arrived.
#[derive(Debug, Default)]
pub(super) struct KeptPackets {
    /// The requester takes selective ACKs.
    enabled: bool,
    /// From the one after the expected packet to the last one kept.
    packets: VecDeque<Option<Kept>>,
}

impl KeptPackets {
    pub(super) const fn is_enabled(&self) -> bool {
        self.enabled
    }

    pub(super) const fn enable(&mut self) {
        self.enabled = true;
    }

    pub(super) fn is_empty(&self) -> bool {
        self.packets.is_empty()
    }

    pub(super) fn clear(&mut self, out: &mut Outbox) {
        while let Some(packet) = self.packets.pop_front() {
            release(packet.as_ref(), out);
        }
    }

    /// Keeps packet `index` + 1 after the expected one, if there is space. Whether it is the first
    /// after a gap that was not known.
    fn keep(&mut self, index: usize, packet: &InboundPacket<'_>, out: &mut Outbox) -> bool {
        let PayloadSource::Bytes(payload) = packet.payload else {
            return false;
        };
        let bytes = payload.len() + OVERHEAD;
        if index >= SelectiveEth::PACKETS || out.kept_bytes + bytes > MAX_KEPT_BYTES {
            return false;
        }
        let is_gap = self.packets.is_empty() || index > self.packets.len();
        if index >= self.packets.len() {
            self.packets.resize_with(index + 1, || None);
        }
        if let Some(place @ None) = self.packets.get_mut(index) {
            out.kept_bytes += bytes;
            *place = Some(Kept {
                bth: packet.bth,
                extension: packet.extension,
                payload: payload.into(),
            });
        }
        is_gap
    }

    fn received(&self) -> SelectiveEth {
        let mut received = SelectiveEth::default();
        for (index, packet) in self.packets.iter().enumerate() {
            if packet.is_some() {
                received.set(index);
            }
        }
        received
    }

    /// The expected PSN has grown by `numbers`: takes the packet that is expected now, if kept.
    fn advance(&mut self, numbers: usize, out: &mut Outbox) -> Option<Kept> {
        for _ in 1..numbers.min(self.packets.len() + 1) {
            release(self.packets.pop_front().flatten().as_ref(), out);
        }
        let next = self.packets.pop_front().flatten();
        release(next.as_ref(), out);
        next
    }
}

fn release(packet: Option<&Kept>, out: &mut Outbox) {
    out.kept_bytes -= packet.map_or(0, |kept| kept.payload.len() + OVERHEAD);
}

impl Responder {
    /// The requester takes selective ACKs from now on.
    pub(crate) const fn enable_selective_repeat(&mut self) {
        self.kept.enable();
    }

    /// The path is set anew, or the queue pair goes: drops what is kept.
    pub(crate) fn disable_selective_repeat(&mut self, out: &mut Outbox) {
        self.kept.clear(out);
        self.kept = KeptPackets::default();
    }

    /// Handles packet `index` + 1 after the expected one.
    pub(super) fn keep(&mut self, index: usize, packet: &InboundPacket<'_>, out: &mut Outbox) {
        let is_gap = self.kept.keep(index, packet, out);
        if is_gap || packet.bth.ack_req {
            out.counters.selective_acks_sent += 1;
            let received = self.kept.received();
            self.replies
                .nak(self.expected, self.msn, ReplyKind::Selective(received));
        }
    }

    /// After the expected packet has been executed: executes the kept ones that follow. `before`:
    /// the PSN that was expected.
    ///
    /// # Errors
    /// When one ends the connection.
    pub(super) fn execute_kept<M: Memory>(
        &mut self,
        mut before: Psn,
        connection: &Connection,
        memory: &mut M,
        out: &mut Outbox,
    ) -> Result<(), FatalNak> {
        let mut executed = false;
        while !self.kept.is_empty() {
            let Ok(numbers @ 1..) = usize::try_from(self.expected.since(before)) else {
                // Not executed: after an RNR NAK the requester resends everything from here.
                self.kept.clear(out);
                break;
            };
            let Some(kept) = self.kept.advance(numbers, out) else {
                break;
            };
            executed = true;
            before = self.expected;
            let packet = InboundPacket {
                bth: kept.bth,
                extension: kept.extension,
                payload: PayloadSource::Bytes(&kept.payload),
            };
            self.handle_next(&packet, connection, memory, out)?;
        }
        if executed {
            self.replies.ack(self.expected.add(MASK_24), self.msn);
        }
        Ok(())
    }
}
