//! Receiving: datagrams and records of shm rings, to the engine.

use doorbell_roce_proto::qp::LinkId;
use doorbell_roce_proto::wire::{Bth, Opcode};
use doorbell_roce_proto::{Datagram, Endpoint, Ident, Instant, LinkPacket, MULTICAST_QPN, Qpn};

use super::Core;
use super::demux::Owner;
use crate::links::shm::{Forwarded, RecordHeaders, RecordOutcome, ShmMemory, ShmPayload, is_immediate};
use crate::links::shm_ring::{Received, RecordKind};
use crate::links::udp;
use crate::memory::Table;

/// Stages writes to GPU memory until [`Core::finish_staged_writes`].
fn handle_datagram(
    endpoint: &mut Endpoint,
    memory: &mut Table,
    writers: &mut Vec<Qpn>,
    now: Instant,
    datagram: &Datagram<'_>,
) {
    memory.begin_write_behind();
    let before = memory.staged_write_count();
    endpoint.handle_datagram(now, datagram, memory);
    if memory.staged_write_count() == before {
        return;
    }
    let mut add = |qpn| {
        if !writers.contains(&qpn) {
            writers.push(qpn);
        }
    };
    match Bth::dest_qp_of(datagram.payload) {
        Some(MULTICAST_QPN) => endpoint.attached_to(datagram.dst).for_each(add),
        Some(qpn) => add(qpn),
        None => {}
    }
}

impl Core {
    /// Demultiplexes a datagram of the UDP link.
    pub(crate) fn receive(&mut self, now: Instant, datagram: &udp::Datagram<'_>) {
        let from = Forwarded::of(datagram);
        let owner = match datagram.dst.ip().is_multicast() {
            // Every process with a queue pair in the group has a socket of its own.
            true => Owner::Unknown,
            false => self.demux.owner(datagram.bytes),
        };
        match owner {
            Owner::Member(owner) if owner != self.demux.host.me() => {
                return self.rings.forward(owner, &from, datagram.bytes);
            }
            _ if self.demux.keep(now, &owner, from, datagram.bytes) => return,
            _ => {}
        }
        let datagram = Datagram {
            src: datagram.src.ip(),
            dst: datagram.dst.ip(),
            src_port: datagram.src.port(),
            dst_port: datagram.dst.port(),
            ident: Ident::Unknown {
                segment: datagram.segment,
            },
            traffic_class: datagram.traffic_class,
            payload: datagram.bytes,
        };
        handle_datagram(
            &mut self.endpoint,
            &mut self.memory,
            &mut self.copying.writers,
            now,
            &datagram,
        );
    }

    fn receive_forwarded(&mut self, now: Instant, record: &Received<'_>) {
        let Some(forwarded) = Forwarded::decode(record.header) else {
            return;
        };
        let Some(bytes) = self.packet.get_mut(..record.body.len()) else {
            return;
        };
        if record.body.copy_to_slice(0, bytes).is_err() {
            return;
        }
        // The listener may have ended meanwhile.
        let owner = self.demux.owner(bytes);
        if self.demux.keep(now, &owner, forwarded, bytes) {
            return;
        }
        let datagram = forwarded.datagram(self.demux.address.ip(), bytes);
        handle_datagram(
            &mut self.endpoint,
            &mut self.memory,
            &mut self.copying.writers,
            now,
            &datagram,
        );
    }

    /// Retries requests whose service may have a listener now, and rejects expired ones.
    pub(super) fn retry_pending_requests(&mut self, now: Instant) {
        let added = self.demux.host.services_added();
        for request in self.demux.pending_requests.take(now, added) {
            match self.demux.host.find_service(request.service.0) {
                Some(owner) if owner != self.demux.host.me() => {
                    self.rings.forward(owner, &request.from, &request.packet)
                }
                None if request.until > now => self.demux.pending_requests.requeue(request),
                // Accepted or rejected by this process.
                _ => {
                    let datagram = request.from.datagram(self.demux.address.ip(), &request.packet);
                    self.endpoint.handle_datagram(now, &datagram, &mut self.memory);
                }
            }
        }
    }

    pub(crate) fn receive_record(
        &mut self,
        mut now: impl FnMut() -> Instant,
        link: LinkId,
        record: &Received<'_>,
    ) -> RecordOutcome {
        match record.kind {
            RecordKind::Packet => {
                let headers = RecordHeaders::split(record.header);
                let retried = !self.copying.deferred_links.is_empty() && self.copying.deferred_links.contains(&link);
                if let Some(acknowledgement) = headers.piggybacked_ack.filter(|_| !retried) {
                    self.receive_packet(&mut now, link, &acknowledgement, 0, record);
                }
                let outcome = self.receive_packet(now, link, headers.packet, record.body.len(), record);
                match (retried, outcome) {
                    (true, RecordOutcome::Consumed | RecordOutcome::Retained { .. }) => self
                        .copying
                        .deferred_links
                        .retain(|deferred_link| *deferred_link != link),
                    (false, RecordOutcome::Deferred) => self.copying.deferred_links.push(link),
                    _ => {}
                }
                outcome
            }
            RecordKind::Datagram => {
                self.receive_forwarded(now(), record);
                RecordOutcome::Consumed
            }
        }
    }

    fn receive_packet(
        &mut self,
        now: impl FnOnce() -> Instant,
        link: LinkId,
        headers: &[u8],
        len: usize,
        record: &Received<'_>,
    ) -> RecordOutcome {
        let packet = LinkPacket {
            link,
            address: self.demux.address.ip(),
            headers,
            len,
        };
        let opcode = headers.first().copied().unwrap_or_default();
        let copies_pending = !self.copying.copies.is_idle()
            && Bth::dest_qp_of(headers).is_some_and(|qpn| self.copying.copies.pending_ticket(qpn).is_some());
        if copies_pending && is_immediate(opcode) {
            return RecordOutcome::Deferred;
        }
        let mut memory = ShmMemory {
            table: &mut self.memory,
            payload: ShmPayload {
                body: record.body,
                copies: &mut self.copying.copies,
                link,
                headers,
                copies_pending,
                requested: false,
                from_sender: false,
                deferred: false,
            },
        };
        if !self.endpoint.handle_write_fast(&packet, &mut memory) && !memory.payload.deferred {
            self.endpoint.handle_link_packet(now, &packet, &mut memory);
            if memory.payload.deferred {
                self.endpoint.defer(&packet);
            }
        }
        let ShmPayload {
            requested,
            from_sender,
            deferred,
            ..
        } = memory.payload;
        if deferred {
            if requested {
                self.copying.copies.undo();
            }
            return RecordOutcome::Deferred;
        }
        if self.copying.copies.is_idle() {
            return RecordOutcome::Consumed;
        }
        let Some(qpn) = Bth::dest_qp_of(headers) else {
            return RecordOutcome::Consumed;
        };
        if self.copying.copies.has_pending_response(qpn) {
            self.memory.mark_reads_pending(qpn);
        }
        if !from_sender {
            return RecordOutcome::Consumed;
        }
        RecordOutcome::Retained {
            ticket: self.copying.copies.ticket(),
            qpn,
            more_follows: Opcode::from_code(opcode).is_some_and(|opcode| !opcode.position().ends()),
        }
    }
}
