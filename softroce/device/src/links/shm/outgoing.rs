//! The outgoing rings of the shm links, and path selection.

mod exposing;

use std::io;
use std::net::IpAddr;
use std::os::fd::AsFd;
use std::sync::atomic::AtomicU64;
use std::sync::{Arc, Weak};

use doorbell_roce_proto::qp::{LinkId, LinkProgress, Path};
use doorbell_roce_proto::{Endpoint, FastPathSend, Qpn, Transmit};

use super::piggyback::{PendingAck, RecordHeaders};
use super::{CopyMode, Forwarded, SLOT_BITS, link_to, slot_of};
use crate::direct::Published;
use crate::gpu::Allocation;
use crate::host::{Connection, Flags, Host, MemberId, Message};
use crate::links::shm_ring::segment::{Segment, SegmentId};
use crate::links::shm_ring::{Payload, Receiver, Record, RecordKind, Reference, Referrer, RingFull, Sender};
use crate::memory::{Fault, PayloadRef, Table, copy};

pub(crate) struct OutgoingRings {
    host: Arc<Host>,
    address: IpAddr,
    /// Queue pairs use shm links; otherwise UDP alone.
    enabled: bool,
    only: bool,
    /// The only copy mode is [`CopyMode::Ring`].
    ring_only: bool,
    rings: Vec<Option<OutgoingRing>>,
    /// Slots of rings that got records since [`finish_batch`](Self::finish_batch).
    touched: Vec<usize>,
    full: usize,
    references: Vec<Reference>,
    keys: Vec<u32>,
    /// What peers access directly: the tables, and segments, with whether they may write.
    published: Option<Arc<Published>>,
    exposed: Vec<(Weak<Segment>, bool)>,
}

struct OutgoingRing {
    to: MemberId,
    sender: Sender,
    /// `None` for the ring of this process to itself.
    connection: Option<Arc<Connection>>,
    touched: bool,
    /// Piggybacks on the next packet, or is sent by itself at the end of the batch.
    delayed_ack: Option<PendingAck>,
    full: bool,
    /// The member is gone or the ring is corrupt: what is sent is dropped.
    closed: bool,
}

#[derive(Debug, thiserror::Error)]
pub(crate) enum PathError {
    /// `DOORBELL_LINK=local`, and the peer is not local.
    #[error(
        "no process on this address that can be reached without UDP has queue pair {0}, and DOORBELL_LINK=local permits nothing else"
    )]
    NotLocal(Qpn),
    /// The ring could not be created.
    #[error("no shm link to the peer's process: {0}")]
    Failed(io::Error),
}

/// The threads to wake, once no lock is held.
#[derive(Default)]
pub(crate) struct Wakeups {
    pub(crate) own: bool,
    pub(crate) peers: Vec<Arc<Connection>>,
}

impl OutgoingRings {
    /// Rings for forwarded datagrams; queue pairs use them after [`enable`](Self::enable).
    pub(crate) fn new(host: Arc<Host>, address: IpAddr) -> Self {
        Self {
            host,
            address,
            enabled: false,
            only: false,
            ring_only: false,
            rings: Vec::new(),
            touched: Vec::new(),
            full: 0,
            references: Vec::new(),
            keys: Vec::new(),
            published: None,
            exposed: Vec::new(),
        }
    }

    /// Lets queue pairs use the links: `only` those when set. Returns the receiving end of the ring
    /// of this process to itself; fails without memory or descriptors.
    pub(crate) fn enable(
        &mut self,
        only: bool,
        forced: Option<CopyMode>,
        published: Arc<Published>,
    ) -> io::Result<(MemberId, Receiver)> {
        let me = self.host.me();
        let (sender, fd) = Sender::create()?;
        // SAFETY: the sender is this process's, and refers to registered memory by address, which
        // stays until it is revoked.
        let receiver = unsafe { Receiver::attach_own(fd) }?;
        self.put(me, sender, None);
        (self.enabled, self.only) = (true, only);
        self.ring_only = forced == Some(CopyMode::Ring);
        self.published = Some(published);
        Ok((me, receiver))
    }

    fn put(&mut self, to: MemberId, sender: Sender, connection: Option<Arc<Connection>>) {
        let slot = usize::from(to.slot());
        if self.rings.len() <= slot {
            self.rings.resize_with(slot + 1, || None);
        }
        let ring = OutgoingRing {
            to,
            sender,
            connection,
            touched: false,
            delayed_ack: None,
            full: false,
            closed: false,
        };
        if let Some(old) = self.rings[slot].replace(ring) {
            self.full -= usize::from(old.full);
        }
    }

    /// The link to a queue pair, whose ring then exists; `None` for UDP, also where its process has
    /// died. As with an adapter (IBTA vol 1, 10.3.1) a queue pair goes to RTR without regard to the
    /// peer. Fails when there is no permitted path.
    pub(crate) fn route(&mut self, path: &Path, peer: Qpn) -> Result<Option<LinkId>, PathError> {
        let own = |end: IpAddr| end.to_canonical() == self.address;
        let ours = self.enabled && own(path.local) && own(path.remote);
        let member = ours.then(|| self.host.owner_of(peer)).flatten().filter(|member| {
            let flags = self.host.flags(*member);
            flags.is_some_and(|flags| !flags.contains(Flags::UDP_ONLY))
        });
        if let Some(member) = member {
            match self.open(member) {
                Ok(()) => return Ok(Some(link_to(member))),
                Err(error) if is_peer_gone(&error) => {}
                Err(error) => return Err(PathError::Failed(error)),
            }
        }
        if self.only {
            return Err(PathError::NotLocal(peer));
        }
        Ok(None)
    }

    fn open(&mut self, member: MemberId) -> io::Result<()> {
        let slot = usize::from(member.slot());
        if let Some(Some(ring)) = self.rings.get(slot)
            && ring.to == member
        {
            return Ok(());
        }
        let connection = self.host.connect(member)?;
        let (sender, fd) = Sender::create()?;
        connection.send(Message::Ring, &[fd.as_fd()])?;
        self.send_exposed(&connection);
        self.put(member, sender, Some(connection));
        Ok(())
    }

    #[inline]
    fn ring(&self, link: LinkId) -> Option<&OutgoingRing> {
        let ring = self.rings.get(slot_of(link))?.as_ref()?;
        (!ring.closed && link_to(ring.to) == link).then_some(ring)
    }

    /// Where direct accesses over this link are named, while its member scans the word.
    #[inline]
    pub(crate) fn access_word(&self, link: LinkId) -> Option<&AtomicU64> {
        self.ring(link)?.sender.access_word()
    }

    /// Whether a record on this link would have to wake its member.
    pub(crate) fn is_peer_asleep(&self, link: LinkId) -> bool {
        self.ring(link).is_some_and(|ring| ring.sender.is_receiver_asleep())
    }

    /// How far the packets on a link have got, while its member is alive.
    pub(crate) fn progress(&self, link: LinkId) -> Option<LinkProgress> {
        let (sent, taken) = self.ring(link)?.sender.progress();
        Some(LinkProgress { sent, taken })
    }

    pub(crate) fn close(&mut self, member: MemberId, endpoint: &mut Endpoint) {
        let slot = usize::from(member.slot());
        if let Some(Some(ring)) = self.rings.get_mut(slot)
            && ring.to == member
        {
            ring.closed = true;
            self.reopen(slot, endpoint);
        }
    }

    fn reopen(&mut self, slot: usize, endpoint: &mut Endpoint) {
        if let Some(Some(ring)) = self.rings.get_mut(slot)
            && ring.full
        {
            ring.full = false;
            self.full -= 1;
            endpoint.link_ready(link_to(ring.to));
        }
    }

    pub(crate) fn is_blocked(&self) -> bool {
        self.full > 0
    }

    /// Resumes the full rings that have space again.
    pub(crate) fn unblock(&mut self, endpoint: &mut Endpoint) {
        for slot in 0..self.rings.len() {
            let Some(Some(ring)) = self.rings.get_mut(slot) else {
                continue;
            };
            if !ring.full || !ring.has_space() {
                continue;
            }
            let pushed = ring.push_delayed_ack();
            let reopens = !pushed || ring.has_space();
            if pushed && !ring.touched {
                // The peer that returned the credits may sleep, and no other record may follow.
                ring.touched = true;
                self.touched.push(slot);
            }
            if reopens {
                self.reopen(slot, endpoint);
            }
        }
    }

    /// Sends a packet; what is not in `packet` is in the table's payload references.
    pub(crate) fn send(
        &mut self,
        id: LinkId,
        transmit: &Transmit,
        packet: &[u8],
        table: &mut Table,
        endpoint: &mut Endpoint,
    ) {
        let slot = slot_of(id);
        let Some(Some(ring)) = self.rings.get_mut(slot) else {
            table.clear_payload_refs();
            return;
        };
        if ring.closed || link_to(ring.to) != id {
            table.clear_payload_refs();
            return;
        }
        if !ring.touched {
            ring.touched = true;
            self.touched.push(slot);
        }
        let (header, inline) = packet.split_at(transmit.header_len);
        if let Some(acknowledgement) = PendingAck::of(header, transmit.qpn) {
            // ACKs are cumulative: a later one of the queue pair replaces an earlier one.
            let earlier = ring.delayed_ack.replace(acknowledgement);
            if let Some(earlier) = earlier.filter(|earlier| earlier.qpn() != transmit.qpn) {
                ring.push(earlier.headers(), Payload::Inline(&[]), earlier.qpn(), &[]);
                self.mark_if_full(slot, endpoint);
            }
            return;
        }
        let mut combined = [0; RecordHeaders::MAX];
        let header = match ring.delayed_ack.take_if(|ack| ack.qpn() == transmit.qpn) {
            Some(ack) => ack.prepended_to(header, &mut combined),
            None => header,
        };
        self.references.clear();
        self.keys.clear();
        if transmit.by_ref_len > 0 {
            let by_ring = self.ring_only || transmit.copy_before_completion;
            let added = ring.add_references(table, by_ring, &mut self.references, &mut self.keys);
            if added.is_err() {
                // The ring was closed, as there was space for the largest payload; or memory has
                // just been unmapped, which is found when the packet is sent again.
                ring.sender.discard();
                return;
            }
        }
        let payload = if transmit.by_ref_len > 0 {
            Payload::Referred(&self.references)
        } else {
            Payload::Inline(inline)
        };
        ring.push(header, payload, transmit.qpn, &self.keys);
        self.mark_if_full(slot, endpoint);
    }

    /// Fast path: sends a packet, with its queue pair's delayed ACK, as [`send`](Self::send) would.
    pub(crate) fn send_fast(&mut self, qpn: Qpn, fast: &FastPathSend, packet: &[u8], endpoint: &mut Endpoint) {
        let slot = slot_of(fast.link);
        let Some(Some(ring)) = self.rings.get_mut(slot) else {
            return;
        };
        if ring.closed || link_to(ring.to) != fast.link {
            return;
        }
        if !ring.touched {
            ring.touched = true;
            self.touched.push(slot);
        }
        let ack = fast
            .ack
            .and_then(|headers| PendingAck::of(&headers, qpn))
            .or_else(|| ring.delayed_ack.take_if(|ack| ack.qpn() == qpn));
        let (header, inline) = packet.split_at(fast.header_len);
        let mut combined = [0; RecordHeaders::MAX];
        let header = match ack {
            Some(ack) => ack.prepended_to(header, &mut combined),
            None => header,
        };
        ring.push(header, Payload::Inline(inline), qpn, &[]);
        self.mark_if_full(slot, endpoint);
    }

    /// Whether the ring takes a packet now, or drops it.
    pub(crate) fn accepts(&self, link: LinkId) -> bool {
        !matches!(self.rings.get(slot_of(link)), Some(Some(found)) if found.full && link_to(found.to) == link)
    }

    pub(crate) fn is_touched(&self) -> bool {
        !self.touched.is_empty()
    }

    /// Marks a ring full, which pauses its queue pairs, when it has no space.
    fn mark_if_full(&mut self, slot: usize, endpoint: &mut Endpoint) {
        if let Some(Some(ring)) = self.rings.get_mut(slot)
            && !ring.full
            && !ring.has_space()
        {
            ring.full = true;
            self.full += 1;
            endpoint.link_full(link_to(ring.to));
        }
    }

    /// Forwards a datagram to its queue pair's owner; it may be lost, as on any network.
    pub(crate) fn forward(&mut self, to: MemberId, header: &Forwarded, datagram: &[u8]) {
        let slot = usize::from(to.slot());
        if self.open(to).is_err() {
            return;
        }
        let Some(Some(ring)) = self.rings.get_mut(slot) else {
            return;
        };
        if ring.closed || ring.full || !ring.sender.has_space().unwrap_or(false) {
            return;
        }
        let record = Record {
            kind: RecordKind::Datagram,
            header: &header.encode(),
            payload: Payload::Inline(datagram),
        };
        let referrer = Referrer { qpn: 0, keys: &[] };
        if ring.sender.push(&record, referrer).is_ok() && !ring.touched {
            ring.touched = true;
            self.touched.push(slot);
        }
    }

    /// Sends the delayed ACKs that found no packet, and returns the threads to wake.
    pub(crate) fn finish_batch(&mut self, endpoint: &mut Endpoint) -> Wakeups {
        let mut wakeups = Wakeups::default();
        while let Some(slot) = self.touched.pop() {
            if let Some(Some(ring)) = self.rings.get_mut(slot)
                && !ring.full
                && ring.push_delayed_ack()
            {
                self.mark_if_full(slot, endpoint);
            }
            let Some(Some(ring)) = self.rings.get_mut(slot) else {
                continue;
            };
            ring.touched = false;
            if ring.sender.needs_wake() {
                match &ring.connection {
                    Some(connection) => wakeups.peers.push(Arc::clone(connection)),
                    None => wakeups.own = true,
                }
            }
        }
        wakeups
    }

    /// The connection to another member that waits for credits.
    pub(crate) fn connection(&self, member: MemberId) -> Option<Arc<Connection>> {
        if member == self.host.me() {
            return None;
        }
        self.host.connect(member).ok()
    }

    pub(crate) fn revoke_qp(&mut self, qpn: Qpn) {
        for ring in self.rings.iter_mut().flatten() {
            // An error is reported where packets are sent.
            let _ = ring.sender.revoke_qp(qpn.get());
        }
    }

    pub(crate) fn revoke_region(&mut self, key: u32) {
        for ring in self.rings.iter_mut().flatten() {
            let _ = ring.sender.revoke_region(key);
        }
    }

    /// Peers unmap the segment if a region that is gone was its last.
    pub(crate) fn release(&mut self, segment: Arc<Segment>) {
        let id = segment.id();
        let exposed = self.is_exposed(id);
        if Arc::into_inner(segment).is_some() {
            self.release_id(id, exposed);
        }
    }

    /// The same of an allocation of GPU memory.
    pub(crate) fn release_allocation(&mut self, allocation: Arc<Allocation>) {
        let id = allocation.id();
        if Arc::into_inner(allocation).is_some() {
            self.release_id(id, false);
        }
    }

    fn release_id(&mut self, id: SegmentId, exposed: bool) {
        for ring in self.rings.iter_mut().flatten() {
            if let Some(connection) = &ring.connection
                && (ring.sender.withdraw(id) || exposed)
            {
                // A peer that does not get it keeps the mapping, which costs only memory.
                let _ = connection.send(Message::Released { id: u64::from(id.0) }, &[]);
            }
        }
    }
}

/// Whether connecting, or the first message on a connection, failed because the peer is gone.
fn is_peer_gone(error: &io::Error) -> bool {
    use io::ErrorKind::{BrokenPipe, ConnectionReset, NotConnected};
    matches!(error.kind(), NotConnected | BrokenPipe | ConnectionReset)
}

impl OutgoingRing {
    /// The caller has checked for space. If the ring is corrupt by now the packet is lost.
    fn push(&mut self, header: &[u8], payload: Payload<'_>, qpn: Qpn, keys: &[u32]) {
        let record = Record {
            kind: RecordKind::Packet,
            header,
            payload,
        };
        let _lost = self.sender.push(&record, Referrer { qpn: qpn.get(), keys });
    }

    /// Sends the delayed ACK, if any, as a record. The caller has checked for space.
    fn push_delayed_ack(&mut self) -> bool {
        let ack = self.delayed_ack.take();
        if let Some(ack) = ack {
            self.push(ack.headers(), Payload::Inline(&[]), ack.qpn(), &[]);
        }
        ack.is_some()
    }

    /// Whether the ring takes another packet, or drops it. Otherwise a credit wake-up is requested.
    fn has_space(&mut self) -> bool {
        if self.closed {
            return true;
        }
        let space = self.sender.has_space().and_then(|space| {
            if space {
                Ok(true)
            } else {
                self.sender.request_credit_wakeup()
            }
        });
        space.unwrap_or_else(|error| {
            tracing::warn!("{error}");
            self.closed = true;
            true
        })
    }

    fn add_references(
        &mut self,
        table: &mut Table,
        by_ring: bool,
        references: &mut Vec<Reference>,
        keys: &mut Vec<u32>,
    ) -> Result<(), RingFull> {
        let result = table.payload_refs().iter().try_for_each(|payload_ref| {
            if !keys.contains(&payload_ref.key) {
                keys.push(payload_ref.key);
            }
            references.push(self.reference(payload_ref, table, by_ring)?);
            Ok(())
        });
        table.clear_payload_refs();
        result
    }

    fn reference(&mut self, payload_ref: &PayloadRef, table: &Table, by_ring: bool) -> Result<Reference, RingFull> {
        // No packet is longer than LARGEST.
        let len = payload_ref.len as u32;
        if let Some(offset) = payload_ref.device {
            return self.device_reference(payload_ref, offset, table, by_ring);
        }
        if !by_ring
            && let Some((id, offset)) = payload_ref.segment
            && let Some(connection) = &self.connection
        {
            if self.sender.can_reference(id) {
                return Ok(Reference::Segment { id, offset, len });
            }
            if !self.sender.is_announced(id)
                && let Some(segment) = table.segment(payload_ref.key)
            {
                let message = Message::Segment { id: u64::from(id.0) };
                // Another copy mode serves until it is mapped; the next packet tries again.
                if connection.send(message, &[segment.fd()]).is_ok() {
                    self.sender.announce(id);
                }
            }
        }
        if self.connection.is_none() && !by_ring {
            let addr = payload_ref.at.expose_provenance() as u64;
            return Ok(Reference::Process { addr, len });
        }
        let (reference, to) = self.sender.copy_in(payload_ref.len)?;
        // SAFETY: registered memory; the ring gave as many bytes, part of no region.
        let copied = unsafe { copy::unordered(payload_ref.at, to, payload_ref.len) };
        copied.map(|()| reference).map_err(|Fault| RingFull)
    }

    /// A reference to GPU memory from `offset` of its allocation on, if the receiver has imported
    /// that. Otherwise, or when it is to be copied `now`, the bytes are copied into the ring.
    fn device_reference(
        &mut self,
        payload_ref: &PayloadRef,
        offset: u64,
        table: &Table,
        now: bool,
    ) -> Result<Reference, RingFull> {
        let Some(allocation) = table.allocation(payload_ref.key) else {
            return Err(RingFull);
        };
        let (id, len) = (allocation.id(), payload_ref.len as u32);
        if !now && (self.connection.is_none() || self.sender.can_reference_device(id)) {
            return Ok(Reference::Device { id, offset, len });
        }
        if self.sender.peer_supports_devices()
            && !self.sender.is_announced(id)
            && let Some(connection) = &self.connection
            && let Some((len, fd, own)) = allocation.shared()
        {
            let message = Message::Device {
                id: u64::from(id.0),
                len: len as u64,
                own,
            };
            if connection.send(message, &[fd]).is_ok() {
                self.sender.announce(id);
                connection.wake();
            }
        }
        let (reference, to) = self.sender.copy_in(payload_ref.len)?;
        let start = usize::try_from(offset).unwrap_or(usize::MAX);
        // SAFETY: the ring gave as many bytes.
        let copied = unsafe { allocation.read(start, to, payload_ref.len) };
        // If the copy fails the packet is lost.
        copied.map(|()| reference).map_err(|_| RingFull)
    }
}

const _: () = assert!(1 << SLOT_BITS >= crate::host::SLOTS);

#[cfg(test)]
mod tests;
