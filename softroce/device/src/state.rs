//! The state that the core lock guards: the engine, registered memory, and where completions and
//! events go.

mod copying;

use std::collections::HashMap;
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use doorbell_roce_proto::cm::{self, Route, ServiceId};
use doorbell_roce_proto::memory::PdId;
use doorbell_roce_proto::qp::{LaneId, Path, QpInit};
use doorbell_roce_proto::wire::{Bth, Opcode};
use doorbell_roce_proto::work::{Completion, CqId, SendRequest, SrqId};
use doorbell_roce_proto::{AsyncEvent, Datagram, Endpoint, Ident, Instant, LanePacket, Qpn, SrqInit, mad_of};

use self::copying::{gate_of, hold};
use crate::capacity;
use crate::cm::{Connections, Waiting};
use crate::cq::CqRing;
use crate::event::{Event, EventQueue, Owner, QpEvent};
use crate::gpu::Copies;
use crate::gpu::gate::{Gate, Held};
use crate::host::{Host, MemberId};
use crate::lanes::{Forwarded, Joined, NoLane, Outgoing, Payload, Reach, Verdict, Wake, is_immediate, lane_of};
use crate::link::{self, MAX_PACKET, TxBatch};
use crate::local::{Kind, Received};
use crate::memory::{Shares, Table};

const _: () = assert!(capacity::QPS <= Endpoint::MAX_QPS);

/// The state of a device, apart from its link.
pub(crate) struct Core {
    pub(crate) endpoint: Endpoint,
    pub(crate) memory: Table,
    pub(crate) connections: Connections,
    /// Connection requests for services without a listener.
    early: Waiting,
    cqs: Vec<Option<Arc<CqRing>>>,
    /// Completion queues whose moderated channels are to be notified, and when (ibv_modify_cq(3)).
    moderated: Vec<(Instant, Arc<CqRing>)>,
    qps: HashMap<Qpn, Owner>,
    srqs: HashMap<SrqId, Owner>,
    /// Receive port and device events.
    pub(crate) listeners: Vec<Arc<EventQueue<Event>>>,
    pds: usize,
    /// Bytes of device memory in use.
    device_memory: usize,
    next_pd: u32,
    /// The process group on this address.
    host: Arc<Host>,
    /// The group's address with the UDP port of RoCEv2 devices, here and at all peers.
    address: SocketAddr,
    /// The outgoing rings of the shm links.
    pub(crate) lanes: Outgoing,
    /// GPU memory copies in flight, and what is deferred until they are done.
    pub(crate) copies: Copies,
    gate: Gate,
    /// Queue pairs whose datagrams have staged writes to GPU memory.
    writers: Vec<Qpn>,
    /// Links whose next record was deferred after its piggybacked ACK was handled.
    left: Vec<LaneId>,
    /// Scratch buffer: a packet for a shm ring, or a forwarded datagram.
    packet: Box<[u8]>,
}

/// Result of [`Core::fill`].
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub(crate) struct Filled {
    /// The batch is full; the engine may have more.
    pub(crate) full: bool,
    /// The batch has a packet that must not be reordered, though it may be an ACK.
    pub(crate) in_order: bool,
}

/// Where a packet goes within the process group.
enum Whose {
    Member(MemberId),
    /// A service without a listener, and the count of services when it was searched for.
    Early((ServiceId, u64)),
    /// To no member: any process may handle and drop it.
    Nobody,
}

/// Demultiplexes a packet to a member by its destination queue pair. Queue pair 1 is shared: there
/// the management datagram names the member.
fn whose(host: &Host, packet: &[u8]) -> Whose {
    let Some(qpn) = Bth::dest_qp_of(packet) else {
        return Whose::Nobody;
    };
    let owner = if qpn.get() > 1 {
        host.owner_of(qpn)
    } else {
        match mad_of(packet).and_then(cm::route) {
            Some(Route::Service(service)) => {
                // Read before the search: a service that is added meanwhile changes the count.
                let added = host.services_added();
                let Some(listener) = host.find_service(service.0) else {
                    return Whose::Early((service, added));
                };
                Some(listener)
            }
            Some(Route::Slot(slot)) => host.member(slot),
            None => None,
        }
    };
    owner.map_or(Whose::Nobody, Whose::Member)
}

/// Gives the engine a datagram; its writes to GPU memory are staged until
/// [`Core::finish_staged_writes`].
fn handle_datagram(
    endpoint: &mut Endpoint,
    memory: &mut Table,
    writers: &mut Vec<Qpn>,
    now: Instant,
    datagram: &Datagram<'_>,
) {
    memory.put_by();
    let before = memory.count_put();
    endpoint.handle_datagram(now, datagram, memory);
    if memory.count_put() != before
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
            early: Waiting::new(),
            cqs: Vec::new(),
            moderated: Vec::new(),
            qps: HashMap::new(),
            srqs: HashMap::new(),
            listeners: Vec::new(),
            pds: 0,
            device_memory: 0,
            next_pd: 0,
            lanes: Outgoing::new(Arc::clone(&host), address.ip()),
            copies: Copies::default(),
            gate: Gate::default(),
            writers: Vec::new(),
            left: Vec::new(),
            packet: vec![0; MAX_PACKET].into_boxed_slice(),
            host,
            address,
        }
    }

    // Objects

    pub(crate) fn add_pd(&mut self) -> Option<PdId> {
        if self.pds == capacity::PDS {
            return None;
        }
        // Identifiers are never reused, so that a stale one matches nothing. There are 2^32.
        self.next_pd = self.next_pd.checked_add(1)?;
        self.pds += 1;
        Some(PdId(self.next_pd))
    }

    pub(crate) fn remove_pd(&mut self) {
        self.pds -= 1;
    }

    /// Allocates device memory, if that much is left.
    pub(crate) fn take_device_memory(&mut self, len: usize) -> bool {
        let left = capacity::DEVICE_MEMORY - self.device_memory;
        if len > left {
            return false;
        }
        self.device_memory += len;
        true
    }

    pub(crate) fn return_device_memory(&mut self, len: usize) {
        self.device_memory -= len;
    }

    pub(crate) fn add_cq(&mut self, ring: Arc<CqRing>) -> Option<CqId> {
        if let Some(index) = self.cqs.iter().position(Option::is_none) {
            self.cqs[index] = Some(ring);
            return Some(CqId(index as u32));
        }
        if self.cqs.len() == capacity::CQS {
            return None;
        }
        self.cqs.push(Some(ring));
        Some(CqId(self.cqs.len() as u32 - 1))
    }

    pub(crate) fn remove_cq(&mut self, id: CqId) {
        if let Some(ring) = self.cqs.get_mut(id.0 as usize).and_then(Option::take) {
            self.moderated.retain(|(_, waiting)| !Arc::ptr_eq(waiting, &ring));
        }
    }

    pub(crate) fn add_qp(&mut self, init: QpInit, owner: Owner) -> Option<Qpn> {
        if self.qps.len() == capacity::QPS {
            return None;
        }
        if self.endpoint.wants_numbers() {
            match self.host.claim(0) {
                Some(block) => self.endpoint.give_numbers(block),
                None if self.endpoint.has_numbers() => {}
                None => return None,
            }
        }
        let qpn = self.endpoint.create_qp(init);
        self.qps.insert(qpn, owner);
        Some(qpn)
    }

    pub(crate) fn remove_qp(&mut self, qpn: Qpn) {
        self.endpoint.destroy_qp(qpn);
        self.memory.release_windows_of(qpn);
        self.qps.remove(&qpn);
        self.gate.forget(qpn);
    }

    /// Drops what is deferred for a queue pair that was reset.
    pub(crate) fn forget_held(&mut self, qpn: Qpn) {
        self.gate.forget(qpn);
    }

    pub(crate) fn add_srq(&mut self, init: SrqInit, owner: Owner) -> Option<SrqId> {
        if self.srqs.len() == capacity::SRQS {
            return None;
        }
        let id = self.endpoint.create_srq(init);
        self.srqs.insert(id, owner);
        Some(id)
    }

    pub(crate) fn remove_srq(&mut self, id: SrqId) {
        // Fails while queue pairs use it: each holds a handle.
        if self.endpoint.destroy_srq(id).is_ok() {
            self.srqs.remove(&id);
        }
    }

    // Packets

    /// Demultiplexes a datagram of the UDP link: to the engine, or to another process on this
    /// address.
    pub(crate) fn receive(&mut self, now: Instant, datagram: &link::Datagram<'_>) {
        match whose(&self.host, datagram.bytes) {
            Whose::Member(owner) if owner != self.host.me() => {
                return self.lanes.forward(owner, &Forwarded::of(datagram), datagram.bytes);
            }
            Whose::Early(wanted) if self.early.keep(now, wanted, Forwarded::of(datagram), datagram.bytes) => return,
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

    /// Gives the engine a datagram that the UDP port holder forwarded.
    fn receive_handed_on(&mut self, now: Instant, record: &Received<'_>) {
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
        if let Whose::Early(wanted) = whose(&self.host, bytes)
            && self.early.keep(now, wanted, forwarded, bytes)
        {
            return;
        }
        let datagram = forwarded.datagram(self.address.ip(), bytes);
        let (endpoint, memory, writers) = (&mut self.endpoint, &mut self.memory, &mut self.writers);
        handle_datagram(endpoint, memory, writers, now, &datagram);
    }

    /// Retries pending connection requests whose service may have a listener now, and rejects
    /// expired ones.
    fn look_for_services(&mut self, now: Instant) {
        let added = self.host.services_added();
        for request in self.early.take(now, added) {
            match self.host.find_service(request.service.0) {
                Some(owner) if owner != self.host.me() => self.lanes.forward(owner, &request.from, &request.packet),
                None if request.until > now => self.early.put_back(request),
                // Accepted or rejected by this process.
                _ => {
                    let datagram = request.from.datagram(self.address.ip(), &request.packet);
                    self.endpoint.handle_datagram(now, &datagram, &mut self.memory);
                }
            }
        }
    }

    /// Gives the engine a record of a shm ring.
    pub(crate) fn receive_record(
        &mut self,
        mut now: impl FnMut() -> Instant,
        lane: LaneId,
        record: &Received<'_>,
    ) -> Verdict {
        match record.kind {
            Kind::Packet => {
                let headers = Joined::split(record.header);
                let again = !self.left.is_empty() && self.left.contains(&lane);
                if let Some(acknowledgement) = headers.acknowledgement.filter(|_| !again) {
                    self.receive_packet(&mut now, lane, &acknowledgement, 0, record);
                }
                let verdict = self.receive_packet(now, lane, headers.packet, record.body.len(), record);
                match (again, verdict) {
                    (true, Verdict::Done | Verdict::Kept { .. }) => self.left.retain(|left| *left != lane),
                    (false, Verdict::Left) => self.left.push(lane),
                    _ => {}
                }
                verdict
            }
            Kind::Datagram => {
                self.receive_handed_on(now(), record);
                Verdict::Done
            }
        }
    }

    fn receive_packet(
        &mut self,
        now: impl FnOnce() -> Instant,
        lane: LaneId,
        headers: &[u8],
        len: usize,
        record: &Received<'_>,
    ) -> Verdict {
        let packet = LanePacket {
            lane,
            address: self.address.ip(),
            headers,
            len,
        };
        let opcode = headers.first().copied().unwrap_or_default();
        let behind =
            !self.copies.is_idle() && Bth::dest_qp_of(headers).is_some_and(|qpn| self.copies.of(qpn).is_some());
        if behind && is_immediate(opcode) {
            return Verdict::Left;
        }
        let mut reach = Reach {
            table: &mut self.memory,
            at: Payload {
                body: record.body,
                copies: &mut self.copies,
                lane,
                headers,
                behind,
                asked: false,
                kept: false,
                later: false,
            },
        };
        if !self.endpoint.handle_short(&packet, &mut reach) && !reach.at.later {
            self.endpoint.handle_lane(now, &packet, &mut reach);
            if reach.at.later {
                self.endpoint.put_off();
            }
        }
        let Payload { asked, kept, later, .. } = reach.at;
        if later {
            if asked {
                self.copies.undo();
            }
            return Verdict::Left;
        }
        if self.copies.is_idle() {
            return Verdict::Done;
        }
        let Some(qpn) = Bth::dest_qp_of(headers) else {
            return Verdict::Done;
        };
        if self.copies.is_unsettled(qpn) {
            self.memory.unsettle(qpn);
        }
        if !kept {
            return Verdict::Done;
        }
        Verdict::Kept {
            ticket: self.copies.ticket(),
            qpn,
            goes_on: Opcode::from_code(opcode).is_some_and(|opcode| !opcode.position().ends()),
        }
    }

    /// Fast path: posts a send request and puts its packet on the shm ring, if it needs nothing
    /// else ([`Endpoint::post_short`]).
    pub(crate) fn send_short(
        &mut self,
        now: impl FnOnce(Duration) -> Instant,
        qpn: Qpn,
        request: &SendRequest<'_>,
    ) -> bool {
        // Completions and revocations come before new packets.
        if self.endpoint.has_news() || self.memory.has_retracted() {
            return false;
        }
        let (memory, packet) = (&mut self.memory, &mut self.packet);
        let Some(short) = self.endpoint.post_short(now, qpn, request, memory, packet) else {
            return false;
        };
        let packet = &self.packet[..short.len];
        self.lanes.send_short(qpn, &short, packet, &mut self.endpoint);
        true
    }

    pub(crate) fn sends_nothing(&self) -> bool {
        !self.endpoint.has_more()
    }

    /// Whether nothing is to be sent, completed or revoked after packets of a shm ring.
    pub(crate) fn is_at_rest(&self) -> bool {
        self.sends_nothing() && !self.endpoint.has_news() && !self.memory.has_retracted() && !self.lanes.is_touched()
    }

    /// Moves the engine's packets for shm links onto the rings. Whether it may have more, for UDP.
    pub(crate) fn fill_lanes(&mut self, now: Instant) -> bool {
        self.connections.exchange(now, &mut self.endpoint);
        while let Some(transmit) = self.endpoint.poll_lanes(now, &mut self.memory, &mut self.packet) {
            // `None` is for UDP.
            if let Some(lane) = transmit.lane {
                let packet = &self.packet[..transmit.len];
                if let Some(ticket) = gate_of(&self.copies, &self.gate, &transmit, packet) {
                    hold(&mut self.gate, &mut self.memory, ticket, transmit, packet);
                    continue;
                }
                self.lanes
                    .send(lane, &transmit, packet, &mut self.memory, &mut self.endpoint);
            }
        }
        self.endpoint.has_more()
    }

    /// Moves the engine's packets into `batch`, up to its capacity, or onto the shm rings.
    pub(crate) fn fill(&mut self, now: Instant, batch: &mut TxBatch) -> Filled {
        self.memory.read_ahead(true);
        let filled = self.fill_batch(now, batch);
        self.memory.read_ahead(false);
        filled
    }

    fn fill_batch(&mut self, now: Instant, batch: &mut TxBatch) -> Filled {
        let mut filled = Filled::default();
        self.connections.exchange(now, &mut self.endpoint);
        let mut before = None;
        while let Some(mut slot) = batch.slot() {
            if let Some(dst) = before
                && let Some(len) = self.endpoint.poll_middle(&mut self.memory, &mut slot)
            {
                slot.send(len, dst);
                continue;
            }
            let Some(transmit) = self.endpoint.poll_transmit(now, &mut self.memory, &mut slot) else {
                return filled;
            };
            if let Some(lane) = transmit.lane {
                let packet = &slot[..transmit.len];
                if let Some(ticket) = gate_of(&self.copies, &self.gate, &transmit, packet) {
                    hold(&mut self.gate, &mut self.memory, ticket, transmit, packet);
                    continue;
                }
                self.lanes
                    .send(lane, &transmit, packet, &mut self.memory, &mut self.endpoint);
                continue;
            }
            let port = match transmit.dst == self.address.ip() {
                true => self.port_of(&slot),
                false => self.address.port(),
            };
            slot.send(transmit.len, *before.insert(SocketAddr::new(transmit.dst, port)));
            filled.in_order |= transmit.in_order;
        }
        filled.full = true;
        filled
    }

    /// The UDP port for a packet to this address: that of the process that owns the queue pair.
    fn port_of(&self, packet: &[u8]) -> u16 {
        let port = match whose(&self.host, packet) {
            Whose::Member(owner) => self.host.udp_port(owner),
            _ => None,
        };
        port.unwrap_or(self.address.port())
    }

    /// Flushes the rings' delayed ACKs, and returns the threads to wake for what was sent.
    pub(crate) fn ring(&mut self) -> Wake {
        self.lanes.ring(&mut self.endpoint)
    }

    /// Resumes rings that have space again.
    pub(crate) fn unblock_lanes(&mut self) {
        self.lanes.unblock(&mut self.endpoint);
    }

    /// A member is gone: what is sent to it is dropped from now on, and connections to it end,
    /// unless its slot has a new member.
    pub(crate) fn forget_member(&mut self, now: Instant, member: MemberId) {
        self.lanes.close(member, &mut self.endpoint);
        self.copies.remove_imports(lane_of(member));
        if self.host.member(member.slot()).is_none_or(|now| now == member) {
            self.connections.forget_member(now, member.slot());
        }
    }

    /// The shm link to a queue pair, or `None` for UDP.
    ///
    /// # Errors
    /// When there is no permitted path.
    pub(crate) fn route(&mut self, path: &Path, peer: Qpn) -> Result<Option<LaneId>, NoLane> {
        self.lanes.route(path, peer)
    }

    /// Revokes the references to a region's memory in records: what it holds from now on is part of
    /// no message. `backing` is the memory's, if the region loses it.
    pub(crate) fn take_back_region(&mut self, key: u32, shares: Shares) {
        self.take_back();
        self.revoke_region(key);
        shares
            .segment
            .into_iter()
            .for_each(|segment| self.lanes.release(segment));
        let allocation = shares.allocation.into_iter();
        allocation.for_each(|allocation| self.lanes.release_allocation(allocation));
    }

    fn revoke_region(&mut self, key: u32) {
        self.gate.withdraw_region(key);
        self.lanes.revoke_region(key);
    }

    /// Revokes what ended queue pairs and windows referred to.
    fn take_back(&mut self) {
        while let Some(qpn) = self.endpoint.poll_withdrawn() {
            self.gate.withdraw(qpn);
            self.lanes.revoke_qp(qpn);
        }
        while let Some(key) = self.memory.retracted() {
            self.revoke_region(key);
        }
    }

    /// Handles timers of the engine and of connection management.
    pub(crate) fn handle_timeout(&mut self, now: Instant) {
        self.endpoint.handle_timeout(now);
        self.connections.handle_timeout(now);
        if self.early.due().is_some_and(|due| due <= now) {
            self.look_for_services(now);
        }
    }

    /// When to call [`handle_timeout`](Self::handle_timeout).
    pub(crate) fn due(&self) -> Option<Instant> {
        // No iterator: that goes through memory, and this runs for each packet.
        let sooner = |one: Option<Instant>, other: Option<Instant>| match (one, other) {
            (Some(one), Some(other)) => Some(one.min(other)),
            (one, other) => one.or(other),
        };
        sooner(
            sooner(self.endpoint.poll_timeout(), self.connections.due()),
            self.early.due(),
        )
    }

    /// Delivers the engine's completions to their queues, and its events to the owners of the
    /// objects. `now` is called where the time is needed.
    pub(crate) fn deliver(&mut self, now: impl Fn() -> Instant) {
        if self.endpoint.has_news() || self.memory.has_retracted() {
            self.deliver_news(&now);
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
    fn pass_on(&mut self, cq: CqId, completion: Completion, now: &impl Fn() -> Instant) {
        match self.gate_of(completion.qpn) {
            Some(ticket) => {
                let qpn = completion.qpn;
                self.gate.hold(qpn, ticket, Held::Completion(cq, completion));
            }
            None => self.complete(cq, completion, now),
        }
    }

    fn deliver_news(&mut self, now: impl Fn() -> Instant) {
        // A completed buffer belongs to the application again.
        self.take_back();
        while let Some((cq, completion)) = self.endpoint.poll_completion() {
            self.pass_on(cq, completion, &now);
        }
        while let Some(event) = self.endpoint.poll_event() {
            let (qpn, event) = match event {
                AsyncEvent::QpFatal(qpn) => (qpn, QpEvent::Fatal),
                AsyncEvent::QpRequestError(qpn) => (qpn, QpEvent::RequestError),
                AsyncEvent::QpAccessError(qpn) => (qpn, QpEvent::AccessError),
                AsyncEvent::CommunicationEstablished(qpn) => (qpn, QpEvent::CommunicationEstablished),
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

    /// Notifies the moderated channels that are due.
    pub(crate) fn tell_moderated(&mut self, now: Instant) {
        self.moderated.retain_mut(|(due, ring)| {
            if *due > now {
                return true;
            }
            let again = ring.tell_if_due(now);
            *due = again.unwrap_or(*due);
            again.is_some()
        });
    }

    /// When [`notify_moderated`](Self::notify_moderated) is due.
    pub(crate) fn moderation_due(&self) -> Option<Instant> {
        self.moderated.iter().map(|(due, _)| *due).min()
    }

    /// Reports the loss of the device to listeners and to owners of queue pairs; once to each event
    /// queue.
    pub(crate) fn tell_fatal(&self) {
        let mut told = Vec::new();
        let owners = self.qps.values().map(|owner| &owner.queue);
        for queue in self.listeners.iter().chain(owners) {
            if !told.contains(&Arc::as_ptr(queue)) {
                told.push(Arc::as_ptr(queue));
                queue.push(Event::DeviceFatal);
            }
        }
    }
}
