//! What the core lock guards: the engine, memory, and where completions and events go.

mod copying;
mod exposing;
mod objects;

use std::collections::HashMap;
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use doorbell_roce_proto::cm::{self, Route, ServiceId};
use doorbell_roce_proto::qp::{LinkId, Path};
use doorbell_roce_proto::wire::{Bth, Opcode};
use doorbell_roce_proto::work::{Completion, CqId, SendRequest, SrqId};
use doorbell_roce_proto::{AsyncEvent, Datagram, Endpoint, Ident, Instant, LinkPacket, Qpn, mad_of};

use self::copying::{defer_packet, defer_ticket};
use crate::capacity;
use crate::cm::{Connections, PendingRequests};
use crate::cq::CqRing;
use crate::direct::{DirectPeers, Initiator, Published};
use crate::event::{Event, EventOwner, EventQueue, QpEvent};
use crate::gpu::Copies;
use crate::gpu::deferred::{DeferQueue, Deferred};
use crate::host::{Host, MemberId};
use crate::link::{self, MAX_PACKET, TxBatch};
use crate::memory::{SharedBacking, Table};
use crate::shm::{
    Forwarded, OutgoingRings, PathError, RecordHeaders, RecordOutcome, ShmMemory, ShmPayload, Wakeups, is_immediate,
    link_to,
};
use crate::shm_ring::{Received, RecordKind};

const _: () = assert!(capacity::QPS <= Endpoint::MAX_QPS);

// fields: everything that one lock guards.
pub(crate) struct Core {
    pub(crate) endpoint: Endpoint,
    pub(crate) memory: Table,
    pub(crate) connections: Connections,
    /// Connection requests for services without a listener.
    pending_requests: PendingRequests,
    cqs: Vec<Option<Arc<CqRing>>>,
    /// Completion queues whose moderated channels are to be notified, and when (ibv_modify_cq(3)).
    moderated: Vec<(Instant, Arc<CqRing>)>,
    qps: HashMap<Qpn, EventOwner>,
    srqs: HashMap<SrqId, EventOwner>,
    pub(crate) listeners: Vec<Arc<EventQueue<Event>>>,
    pds: usize,
    device_memory: usize,
    next_pd: u32,
    host: Arc<Host>,
    /// The group's address with the UDP port of RoCEv2 devices, here and at all peers.
    address: SocketAddr,
    pub(crate) rings: OutgoingRings,
    /// What peers published for direct access.
    pub(crate) direct: DirectPeers,
    published: Option<Arc<Published>>,
    pub(crate) copies: Copies,
    deferred: DeferQueue,
    /// Queue pairs whose datagrams have staged writes to GPU memory.
    writers: Vec<Qpn>,
    /// Links whose next record was deferred after its piggybacked ACK was handled.
    deferred_links: Vec<LinkId>,
    /// Scratch buffer: a packet for a shm ring, or a forwarded datagram.
    packet: Box<[u8]>,
}

#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub(crate) struct Filled {
    /// The batch is full; the engine may have more.
    pub(crate) full: bool,
    /// The batch has a packet that must not be reordered, though it may be an ACK.
    pub(crate) in_order: bool,
}

enum Demux {
    Member(MemberId),
    /// A service without a listener, and the count of services when it was searched for.
    NoListener((ServiceId, u64)),
    /// To no member: any process may handle and drop it.
    Unknown,
}

/// Finds the member by the destination queue pair; for queue pair 1 by the management datagram.
fn demux(host: &Host, packet: &[u8]) -> Demux {
    let Some(qpn) = Bth::dest_qp_of(packet) else {
        return Demux::Unknown;
    };
    let owner = if qpn.get() > 1 {
        host.owner_of(qpn)
    } else {
        match mad_of(packet).and_then(cm::route) {
            Some(Route::Service(service)) => {
                // Read before the search: a service that is added meanwhile changes the count.
                let added = host.services_added();
                let Some(listener) = host.find_service(service.0) else {
                    return Demux::NoListener((service, added));
                };
                Some(listener)
            }
            Some(Route::Slot(slot)) => host.member(slot),
            None => None,
        }
    };
    owner.map_or(Demux::Unknown, Demux::Member)
}

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
    if memory.staged_write_count() != before
        && let Some(qpn) = Bth::dest_qp_of(datagram.payload)
        && !writers.contains(&qpn)
    {
        writers.push(qpn);
    }
}

impl Core {
    /// `address` is that of the group, whatever port this process has.
    pub(crate) fn new(endpoint: Endpoint, connections: Connections, host: Arc<Host>, address: SocketAddr) -> Self {
        Self {
            endpoint,
            memory: Table::new(),
            connections,
            pending_requests: PendingRequests::new(),
            cqs: Vec::new(),
            moderated: Vec::new(),
            qps: HashMap::new(),
            srqs: HashMap::new(),
            listeners: Vec::new(),
            pds: 0,
            device_memory: 0,
            next_pd: 0,
            rings: OutgoingRings::new(Arc::clone(&host), address.ip()),
            direct: DirectPeers::default(),
            published: None,
            copies: Copies::default(),
            deferred: DeferQueue::default(),
            writers: Vec::new(),
            deferred_links: Vec::new(),
            packet: vec![0; MAX_PACKET].into_boxed_slice(),
            host,
            address,
        }
    }

    /// Demultiplexes a datagram of the UDP link.
    pub(crate) fn receive(&mut self, now: Instant, datagram: &link::Datagram<'_>) {
        match demux(&self.host, datagram.bytes) {
            Demux::Member(owner) if owner != self.host.me() => {
                return self.rings.forward(owner, &Forwarded::of(datagram), datagram.bytes);
            }
            Demux::NoListener(wanted)
                if self
                    .pending_requests
                    .keep(now, wanted, Forwarded::of(datagram), datagram.bytes) =>
            {
                return;
            }
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
            payload: datagram.bytes,
        };
        let (endpoint, memory, writers) = (&mut self.endpoint, &mut self.memory, &mut self.writers);
        handle_datagram(endpoint, memory, writers, now, &datagram);
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
        if let Demux::NoListener(wanted) = demux(&self.host, bytes)
            && self.pending_requests.keep(now, wanted, forwarded, bytes)
        {
            return;
        }
        let datagram = forwarded.datagram(self.address.ip(), bytes);
        let (endpoint, memory, writers) = (&mut self.endpoint, &mut self.memory, &mut self.writers);
        handle_datagram(endpoint, memory, writers, now, &datagram);
    }

    /// Retries requests whose service may have a listener now, and rejects expired ones.
    fn retry_pending_requests(&mut self, now: Instant) {
        let added = self.host.services_added();
        for request in self.pending_requests.take(now, added) {
            match self.host.find_service(request.service.0) {
                Some(owner) if owner != self.host.me() => self.rings.forward(owner, &request.from, &request.packet),
                None if request.until > now => self.pending_requests.requeue(request),
                // Accepted or rejected by this process.
                _ => {
                    let datagram = request.from.datagram(self.address.ip(), &request.packet);
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
                let retried = !self.deferred_links.is_empty() && self.deferred_links.contains(&link);
                if let Some(acknowledgement) = headers.piggybacked_ack.filter(|_| !retried) {
                    self.receive_packet(&mut now, link, &acknowledgement, 0, record);
                }
                let outcome = self.receive_packet(now, link, headers.packet, record.body.len(), record);
                match (retried, outcome) {
                    (true, RecordOutcome::Consumed | RecordOutcome::Retained { .. }) => {
                        self.deferred_links.retain(|deferred_link| *deferred_link != link)
                    }
                    (false, RecordOutcome::Deferred) => self.deferred_links.push(link),
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
            address: self.address.ip(),
            headers,
            len,
        };
        let opcode = headers.first().copied().unwrap_or_default();
        let copies_pending = !self.copies.is_idle()
            && Bth::dest_qp_of(headers).is_some_and(|qpn| self.copies.pending_ticket(qpn).is_some());
        if copies_pending && is_immediate(opcode) {
            return RecordOutcome::Deferred;
        }
        let mut memory = ShmMemory {
            table: &mut self.memory,
            payload: ShmPayload {
                body: record.body,
                copies: &mut self.copies,
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
                self.endpoint.defer();
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
                self.copies.undo();
            }
            return RecordOutcome::Deferred;
        }
        if self.copies.is_idle() {
            return RecordOutcome::Consumed;
        }
        let Some(qpn) = Bth::dest_qp_of(headers) else {
            return RecordOutcome::Consumed;
        };
        if self.copies.has_pending_response(qpn) {
            self.memory.mark_reads_pending(qpn);
        }
        if !from_sender {
            return RecordOutcome::Consumed;
        }
        RecordOutcome::Retained {
            ticket: self.copies.ticket(),
            qpn,
            more_follows: Opcode::from_code(opcode).is_some_and(|opcode| !opcode.position().ends()),
        }
    }

    /// Fast path: carries a request out in the memory of a peer ([`direct`](crate::direct)).
    #[inline(always)]
    pub(crate) fn send_direct(&mut self, qpn: Qpn, request: &SendRequest<'_>) -> bool {
        if self.direct.is_empty() || self.is_copying() {
            return false;
        }
        let mut initiator = Initiator {
            table: &self.memory,
            peers: &mut self.direct,
            rings: &self.rings,
            me: link_to(self.host.me()),
        };
        self.endpoint.post_send_direct(qpn, request, &mut initiator)
    }

    /// Fast path: posts a request and puts its packet on the ring ([`Endpoint::post_send_fast`]).
    pub(crate) fn send_fast(
        &mut self,
        now: impl FnOnce(Duration) -> Instant,
        qpn: Qpn,
        request: &SendRequest<'_>,
    ) -> bool {
        // Completions and revocations come before new packets.
        if self.endpoint.has_output() || self.memory.has_revoked() {
            return false;
        }
        let (memory, packet) = (&mut self.memory, &mut self.packet);
        let Some(fast) = self.endpoint.post_send_fast(now, qpn, request, memory, packet) else {
            return false;
        };
        let packet = &self.packet[..fast.len];
        self.rings.send_fast(qpn, &fast, packet, &mut self.endpoint);
        true
    }

    pub(crate) fn has_nothing_to_send(&self) -> bool {
        !self.endpoint.has_more()
    }

    /// Whether nothing is to be sent, completed or revoked after packets of a shm ring.
    pub(crate) fn is_idle(&self) -> bool {
        self.has_nothing_to_send()
            && !self.endpoint.has_output()
            && !self.memory.has_revoked()
            && !self.rings.is_touched()
    }

    /// Moves the engine's packets for shm links onto the rings. Whether it may have more, for UDP.
    pub(crate) fn fill_shm(&mut self, now: Instant) -> bool {
        self.connections.exchange(now, &mut self.endpoint);
        while let Some(transmit) = self
            .endpoint
            .poll_transmit_link(now, &mut self.memory, &mut self.packet)
        {
            // `None` is for UDP.
            if let Some(link) = transmit.link {
                let packet = &self.packet[..transmit.len];
                if let Some(ticket) = defer_ticket(&self.copies, &self.deferred, &transmit, packet) {
                    defer_packet(&mut self.deferred, &mut self.memory, ticket, transmit, packet);
                    continue;
                }
                self.rings
                    .send(link, &transmit, packet, &mut self.memory, &mut self.endpoint);
            }
        }
        self.endpoint.has_more()
    }

    pub(crate) fn fill(&mut self, now: Instant, batch: &mut TxBatch) -> Filled {
        self.memory.set_read_ahead(true);
        let filled = self.fill_batch(now, batch);
        self.memory.set_read_ahead(false);
        filled
    }

    fn fill_batch(&mut self, now: Instant, batch: &mut TxBatch) -> Filled {
        let mut filled = Filled::default();
        self.connections.exchange(now, &mut self.endpoint);
        let mut before = None;
        while let Some(mut slot) = batch.slot() {
            if let Some(dst) = before
                && let Some(len) = self.endpoint.poll_transmit_middle(&mut self.memory, &mut slot)
            {
                slot.send(len, dst);
                continue;
            }
            let Some(transmit) = self.endpoint.poll_transmit(now, &mut self.memory, &mut slot) else {
                return filled;
            };
            if let Some(link) = transmit.link {
                let packet = &slot[..transmit.len];
                if let Some(ticket) = defer_ticket(&self.copies, &self.deferred, &transmit, packet) {
                    defer_packet(&mut self.deferred, &mut self.memory, ticket, transmit, packet);
                    continue;
                }
                self.rings
                    .send(link, &transmit, packet, &mut self.memory, &mut self.endpoint);
                continue;
            }
            let port = match transmit.dst == self.address.ip() {
                true => self.udp_port_of(&slot),
                false => self.address.port(),
            };
            slot.send(transmit.len, *before.insert(SocketAddr::new(transmit.dst, port)));
            filled.in_order |= transmit.in_order;
        }
        filled.full = true;
        filled
    }

    /// The UDP port for a packet to this address: that of the process that owns the queue pair.
    fn udp_port_of(&self, packet: &[u8]) -> u16 {
        let port = match demux(&self.host, packet) {
            Demux::Member(owner) => self.host.udp_port(owner),
            _ => None,
        };
        port.unwrap_or(self.address.port())
    }

    pub(crate) fn take_wakeups(&mut self) -> Wakeups {
        self.rings.finish_batch(&mut self.endpoint)
    }

    pub(crate) fn unblock_rings(&mut self) {
        self.rings.unblock(&mut self.endpoint);
    }

    /// A member is gone: what is sent to it is dropped from now on, and connections to it end,
    /// unless its slot has a new member.
    pub(crate) fn remove_member(&mut self, now: Instant, member: MemberId) {
        self.rings.close(member, &mut self.endpoint);
        self.direct.remove(link_to(member));
        self.copies.remove_imports(link_to(member));
        if self.host.member(member.slot()).is_none_or(|now| now == member) {
            self.connections.remove_member(now, member.slot());
        }
    }

    /// The shm link to a queue pair, or `None` for UDP. Fails when there is no permitted path.
    pub(crate) fn route(&mut self, path: &Path, peer: Qpn) -> Result<Option<LinkId>, PathError> {
        self.rings.route(path, peer)
    }

    /// What the region's memory holds from now on is part of no message. `shares` is what it loses.
    pub(crate) fn revoke_region_memory(&mut self, key: u32, shares: SharedBacking) {
        self.revoke_withdrawn();
        self.revoke_region(key);
        shares
            .segment
            .into_iter()
            .for_each(|segment| self.rings.release(segment));
        let allocation = shares.allocation.into_iter();
        allocation.for_each(|allocation| self.rings.release_allocation(allocation));
    }

    fn revoke_region(&mut self, key: u32) {
        self.deferred.revoke_region(key);
        self.rings.revoke_region(key);
    }

    /// Revokes what ended queue pairs and windows referred to.
    fn revoke_withdrawn(&mut self) {
        while let Some(qpn) = self.endpoint.poll_revoked() {
            self.withdraw_qp(qpn);
            self.deferred.revoke_qp(qpn);
            self.rings.revoke_qp(qpn);
        }
        while let Some(key) = self.memory.poll_revoked() {
            self.revoke_region(key);
        }
    }

    pub(crate) fn handle_timeout(&mut self, now: Instant) {
        let rings = &self.rings;
        self.endpoint.handle_timeout_on_links(now, |link| rings.progress(link));
        self.connections.handle_timeout(now);
        if self.pending_requests.due().is_some_and(|due| due <= now) {
            self.retry_pending_requests(now);
        }
    }

    pub(crate) fn due(&self) -> Option<Instant> {
        // No iterator: that goes through memory, and this runs for each packet.
        let earlier = |one: Option<Instant>, other: Option<Instant>| match (one, other) {
            (Some(one), Some(other)) => Some(one.min(other)),
            (one, other) => one.or(other),
        };
        earlier(
            earlier(self.endpoint.poll_timeout(), self.connections.due()),
            self.pending_requests.due(),
        )
    }

    /// `now` is called where the time is needed.
    pub(crate) fn deliver(&mut self, now: impl Fn() -> Instant) {
        if self.endpoint.has_output() || self.memory.has_revoked() {
            self.deliver_events(&now);
        }
        self.connections.deliver(now);
    }

    fn complete(&mut self, cq: CqId, completion: Completion, now: &impl Fn() -> Instant) {
        if let Some(Some(ring)) = self.cqs.get(cq.0 as usize)
            && let Some(due) = ring.push(completion, now)
        {
            self.moderated.push((due, Arc::clone(ring)));
        }
    }

    /// Delivers a completion, after the copies before it.
    fn complete_in_order(&mut self, cq: CqId, completion: Completion, now: &impl Fn() -> Instant) {
        match self.defer_ticket(completion.qpn) {
            Some(ticket) => {
                let qpn = completion.qpn;
                self.deferred.push(qpn, ticket, Deferred::Completion(cq, completion));
            }
            None => self.complete(cq, completion, now),
        }
    }

    fn deliver_events(&mut self, now: impl Fn() -> Instant) {
        // A completed buffer belongs to the application again.
        self.revoke_withdrawn();
        while let Some((cq, completion)) = self.endpoint.poll_completion() {
            self.complete_in_order(cq, completion, &now);
        }
        while let Some(event) = self.endpoint.poll_event() {
            let (qpn, event) = match event {
                AsyncEvent::QpFatal(qpn) => (qpn, QpEvent::Fatal),
                AsyncEvent::QpRequestError(qpn) => (qpn, QpEvent::RequestError),
                AsyncEvent::QpAccessError(qpn) => (qpn, QpEvent::AccessError),
                AsyncEvent::CommunicationEstablished(qpn) => {
                    self.publish_qp(qpn);
                    (qpn, QpEvent::CommunicationEstablished)
                }
                AsyncEvent::SendQueueDrained(qpn) => (qpn, QpEvent::SendQueueDrained),
                AsyncEvent::LastWqeReached(qpn) => (qpn, QpEvent::LastWqeReached),
                AsyncEvent::SrqLimitReached(srq) => {
                    if let Some(owner) = self.srqs.get(&srq) {
                        owner.queue.push(Event::SrqLimit(owner.token));
                    }
                    continue;
                }
            };
            if let Some(owner) = self.qps.get(&qpn) {
                owner.queue.push(Event::Qp(owner.token, event));
            }
        }
    }

    pub(crate) fn notify_moderated(&mut self, now: Instant) {
        self.moderated.retain_mut(|(due, ring)| {
            if *due > now {
                return true;
            }
            let again = ring.notify_if_due(now);
            *due = again.unwrap_or(*due);
            again.is_some()
        });
    }

    pub(crate) fn moderation_due(&self) -> Option<Instant> {
        self.moderated.iter().map(|(due, _)| *due).min()
    }

    /// Reports the loss of the device, once to each event queue of listeners and owners.
    pub(crate) fn report_fatal(&self) {
        let mut notified = Vec::new();
        let owners = self.qps.values().map(|owner| &owner.queue);
        for queue in self.listeners.iter().chain(owners) {
            if !notified.contains(&Arc::as_ptr(queue)) {
                notified.push(Arc::as_ptr(queue));
                queue.push(Event::DeviceFatal);
            }
        }
    }
}
