//! The queue pairs of one device: demultiplexing by destination QPN, round-robin sending, timers.

mod config;
mod congestion;
mod deferred;
mod fast_path;
mod multicast;
mod schedule;
mod types;

use crate::cm::Mad;
use crate::congestion::ecn;
use crate::congestion::notifier::Notifier;
use crate::counters::Counters;
use crate::full_links::FullLinks;
use crate::gsi::{GSI, Gsi, ReceivedMad};
use crate::ident::{IdentTracker, Verdict};
use crate::memory::Memory;
use crate::outbox::Outbox;
use crate::qp::packet::{InboundPacket, PayloadSource};
use crate::qp::{Attributes, LinkId, LinkProgress, Modify, ModifyError, Path, QpInit, QueuePair};
use crate::qpn::QpnBlock;
use crate::srq::{SharedQueue, SrqAttributes, SrqError, SrqInit};
use crate::table::QpTable;
use crate::timer::Timers;
use crate::wire::{self, Cnp, IpFields, Packet, ParseError};
use crate::work::{Completion, CqId, Destination, PostError, ReceiveRequest, Remote, SendRequest, SrqId};
use crate::{Instant, Qpn};

pub use config::{EndpointConfig, LinkCapabilities};
pub use fast_path::FastPathSend;
use multicast::MulticastGroups;
pub use multicast::{AttachError, MULTICAST_QPN};
use schedule::SendSchedule;
pub use types::{AsyncEvent, Datagram, Ident, LinkPacket, Transmit};

/// [`Endpoint::has_only_acks`] examines at most this many queue pairs.
const MAX_ACK_ONLY_QPS: usize = 4;

/// The protocol state of one device: its queue pairs.
///
/// Order of calls: after any of `post_*`, `modify_qp`, `destroy_qp` and `handle_*`, drain
/// `poll_completion` and `poll_event`, call `poll_transmit` until it returns `None` (or the link is
/// full), then call `poll_timeout` for the next deadline of `handle_timeout`. `poll_transmit` reads
/// memory and so may fail requests: drain completions and events again after it.
///
/// Nothing is allocated per packet or request, beyond the high-water mark of the queues.
#[derive(Debug)]
pub struct Endpoint {
    qps: QpTable,
    config: EndpointConfig,
    idents: IdentTracker,
    timers: Timers,
    active: SendSchedule,
    /// The queue pair of the last UDP packet returned, cleared when its path may change.
    last_sent: Option<u32>,
    gsi: Gsi,
    notifier: Notifier,
    multicast: MulticastGroups,
    full_links: FullLinks,
    out: Outbox,
}

impl Endpoint {
    /// Maximum number of queue pairs.
    pub const MAX_QPS: usize = QpTable::MAX;

    /// An endpoint with the default configuration and the known key of this seed.
    pub fn new(seed: u64) -> Self {
        Self::with_config(EndpointConfig {
            key: seed.into(),
            ..EndpointConfig::default()
        })
    }

    /// An endpoint without queue pairs.
    pub fn with_config(config: EndpointConfig) -> Self {
        Self {
            qps: QpTable::new(config.key),
            config: EndpointConfig {
                window: config.window.clamp(1, EndpointConfig::MAX_WINDOW),
                link: LinkCapabilities {
                    window: config.link.window.clamp(1, EndpointConfig::MAX_WINDOW),
                    ..config.link
                },
                ..config
            },
            idents: IdentTracker::default(),
            timers: Timers::default(),
            last_sent: None,
            active: SendSchedule::new(),
            gsi: Gsi::default(),
            notifier: Notifier::new(config.congestion.cnp_interval),
            multicast: MulticastGroups::default(),
            full_links: FullLinks::default(),
            out: Outbox::default(),
        }
    }

    /// Adds a block of queue pair numbers. An endpoint without one before its first queue pair uses
    /// all numbers; otherwise it leaves the rest to other processes on its address.
    pub fn add_qpn_block(&mut self, block: QpnBlock) {
        self.qps.qpns().add_block(block);
    }

    /// The block to add next, if it is free: the key chooses it.
    pub fn next_qpn_block(&self) -> QpnBlock {
        self.qps.next_block()
    }

    /// Whether to add a block before creating the next queue pair: half of the numbers are in use.
    pub fn wants_qpn_block(&self) -> bool {
        self.qps.wants_qpn_block()
    }

    /// Whether the blocks have a free number for another queue pair.
    pub fn has_free_qpns(&self) -> bool {
        self.qps.has_free_qpns()
    }

    /// Creates a queue pair in [`State::Reset`](crate::qp::State::Reset), with its queues.
    ///
    /// # Panics
    /// When there are [`MAX_QPS`](Self::MAX_QPS) already, no number is free, or the shared receive
    /// queue does not exist: the caller must check all three.
    pub fn create_qp(&mut self, init: QpInit) -> Qpn {
        let config = self.config;
        let srq = init.srq.map(|id| match self.out.srqs.attach(id) {
            Some(srq) => srq,
            None => panic!("there is no {id:?}"),
        });
        let created = self.qps.insert(|qpn| QueuePair::new(qpn, init, &config, srq));
        let slots = self.qps.slots();
        self.timers.grow(slots);
        self.active.queued.resize(slots, false);
        self.full_links.grow(slots);
        match created {
            Some(qpn) => qpn,
            None => panic!(
                "{} queue pairs exist already, or all given numbers are in use",
                self.qps.len()
            ),
        }
    }

    /// Number of queue pairs.
    pub fn qp_count(&self) -> usize {
        self.qps.len()
    }

    /// Modifies a queue pair (ibv_modify_qp(3)). RESET discards all requests, ERR flushes them.
    ///
    /// # Errors
    /// When the transition table refuses it; nothing has changed then.
    pub fn modify_qp(&mut self, now: Instant, qpn: Qpn, modify: &Modify) -> Result<(), ModifyError> {
        let (index, qp) = self.qps.find_mut(qpn).ok_or(ModifyError::UnknownQp)?;
        self.last_sent = None;
        qp.modify(now, modify, &mut self.out)?;
        self.reschedule(index);
        Ok(())
    }

    /// The attributes, `None` for an unknown queue pair.
    pub fn query_qp(&self, qpn: Qpn) -> Option<Attributes> {
        self.qps.get(self.qps.find(qpn)?).map(QueuePair::attributes)
    }

    /// Destroys a queue pair and discards its requests; false when it does not exist.
    pub fn destroy_qp(&mut self, qpn: Qpn) -> bool {
        self.last_sent = None;
        if let Some((index, qp)) = self.qps.find_mut(qpn) {
            self.timers.set(index, None);
            qp.revoke_refs(&mut self.out);
            qp.discard_kept(&mut self.out);
            if let Some(srq) = qp.srq() {
                self.out.srqs.detach(srq);
            }
            self.multicast.detach(qpn, |_| true);
        }
        self.qps.remove(qpn)
    }

    /// Creates a shared receive queue, its limit not armed. Its ring is allocated here, once.
    pub fn create_srq(&mut self, init: SrqInit) -> SrqId {
        self.out.srqs.insert(init)
    }

    /// Resizes a shared receive queue to `max_wr`, arms `limit` (0 disarms): fewer receives cause
    /// one [`AsyncEvent::SrqLimitReached`], also if there are fewer now (IBTA vol 1, 10.2.9.5,
    /// 11.2.3).
    ///
    /// # Errors
    /// When a value is out of range; nothing has changed then.
    pub fn modify_srq(&mut self, srq: SrqId, max_wr: Option<u32>, limit: Option<u32>) -> Result<(), SrqError> {
        self.out.modify_srq(srq, max_wr, limit)
    }

    /// The attributes of a shared receive queue; `None` when it does not exist.
    pub fn query_srq(&self, srq: SrqId) -> Option<SrqAttributes> {
        self.out.srqs.get(srq).map(SharedQueue::attributes)
    }

    /// Destroys a shared receive queue and discards its receives without completions.
    ///
    /// # Errors
    /// When it does not exist, or a queue pair uses it.
    pub fn destroy_srq(&mut self, srq: SrqId) -> Result<(), SrqError> {
        self.out.srqs.remove(srq)?;
        self.qps.iter_mut().for_each(|qp| qp.discard_receives_of(srq));
        Ok(())
    }

    /// Queues a send request; its ACK timer starts with its first packet. In SQD it waits for the
    /// return to RTS, in ERR it is flushed at once.
    ///
    /// # Errors
    /// When it is refused; nothing was queued. In RESET, INIT and RTR every send request is refused
    /// (IBTA vol 1, 10.3.1), and so is what the transport does not offer: UC has neither READs nor
    /// atomics, UD needs [`post_datagram`](Self::post_datagram).
    pub fn post_send(&mut self, _now: Instant, qpn: Qpn, request: &SendRequest<'_>) -> Result<(), PostError> {
        let (index, qp) = self.qps.find_mut(qpn).ok_or(PostError::UnknownQp)?;
        qp.post_send(request, &mut self.out)?;
        self.active.add(index);
        Ok(())
    }

    /// Queues a SEND of a UD queue pair; otherwise as [`post_send`](Self::post_send). A message
    /// longer than the port's MTU completes without being sent (IBTA vol 1, 9.8.4: C10-93.1.1).
    ///
    /// # Errors
    /// When it is refused, as all but SENDs of UD queue pairs are; nothing was queued.
    pub fn post_datagram(
        &mut self,
        _now: Instant,
        qpn: Qpn,
        request: &SendRequest<'_>,
        to: &Destination,
    ) -> Result<(), PostError> {
        self.post_to(qpn, request, &Remote::Datagram(*to))
    }

    /// Queues a request of an XRC initiator or a SEND of a UD queue pair, with its remote end;
    /// otherwise as [`post_send`](Self::post_send).
    ///
    /// # Errors
    /// When it is refused, as for any other queue pair; nothing was queued.
    pub fn post_to(&mut self, qpn: Qpn, request: &SendRequest<'_>, to: &Remote) -> Result<(), PostError> {
        let (index, qp) = self.qps.find_mut(qpn).ok_or(PostError::UnknownQp)?;
        qp.post_to(request, to, &mut self.out)?;
        self.active.add(index);
        Ok(())
    }

    /// Whether [`post_send`](Self::post_send), or [`post_to`](Self::post_to) for a `remote` end,
    /// would accept a request after `ahead` others.
    ///
    /// # Errors
    /// The reason for which it would be refused.
    pub fn check_send(&self, qpn: Qpn, request: &SendRequest<'_>, remote: bool, ahead: u32) -> Result<(), PostError> {
        let qp = self.qps.find(qpn).and_then(|index| self.qps.get(index));
        qp.ok_or(PostError::UnknownQp)?.check_post(request, remote, ahead)
    }

    /// Queues a receive request. In ERR it is flushed at once.
    ///
    /// # Errors
    /// When it is refused, as always in RESET or with a shared receive queue; nothing was queued.
    pub fn post_receive(&mut self, qpn: Qpn, request: &ReceiveRequest<'_>) -> Result<(), PostError> {
        let (_, qp) = self.qps.find_mut(qpn).ok_or(PostError::UnknownQp)?;
        qp.post_receive(request, &mut self.out)
    }

    /// Queues a receive request on a shared receive queue, for the first of its queue pairs that
    /// needs one, whatever their states (IBTA vol 1, 10.2.9).
    ///
    /// # Errors
    /// When it is refused; nothing was queued.
    pub fn post_shared_receive(&mut self, srq: SrqId, request: &ReceiveRequest<'_>) -> Result<(), PostError> {
        self.out.srqs.get_mut(srq).ok_or(PostError::UnknownQp)?.post(request)
    }

    /// Handles a datagram from the network, whose UDP port the caller has checked. One that is
    /// malformed, fails its ICRC or has no queue pair only increments a counter.
    pub fn handle_datagram<M: Memory>(&mut self, now: Instant, datagram: &Datagram<'_>, memory: &mut M) {
        let counters = &mut self.out.counters;
        counters.received(datagram.payload.len());
        let packet = match Packet::parse(datagram.payload) {
            Ok(packet) => packet,
            Err(ParseError::Opcode(Cnp::OPCODE)) => return self.handle_cnp(now, datagram),
            Err(_) => {
                counters.malformed += 1;
                return;
            }
        };
        if datagram.dst.is_multicast() {
            return self.handle_multicast(now, datagram, packet, memory);
        }
        if packet.bth.dest_qp == GSI {
            self.handle_management(now, datagram, &packet);
            return;
        }
        let Some((index, qp)) = self.qps.find_mut(packet.bth.dest_qp).filter(|(_, qp)| qp.receives()) else {
            counters.no_qp += 1;
            return;
        };
        if packet.bth.opcode.transport() != qp.transport() {
            counters.malformed += 1;
            return;
        }
        if !qp.is_from_peer(datagram) {
            counters.wrong_peer += 1;
            return;
        }
        if self.idents.check(now, datagram) != Verdict::Valid {
            counters.icrc_errors += 1;
            return;
        }
        let unpinned = qp.peer_port().is_unknown().then(|| qp.progress());
        if ecn::is_marked(datagram.traffic_class) {
            self.notifier.handle_mark(now, qp, &packet.bth, &mut self.out.counters);
        }
        let psn = packet.bth.psn;
        qp.handle(now, &packet.into(), datagram.ip(), memory, &mut self.out);
        if unpinned.is_some_and(|before| qp.progress().is_by_valid_packet(psn, before)) {
            qp.pin_peer_port(datagram.src_port);
        }
        self.reschedule(index);
    }

    /// Pins the UDP source port of a connected peer that is known before its first packet.
    pub fn pin_peer_port(&mut self, qpn: Qpn, port: u16) {
        if let Some((_, qp)) = self.qps.find_mut(qpn) {
            qp.pin_peer_port(port);
        }
    }

    fn handle_management(&mut self, now: Instant, datagram: &Datagram<'_>, packet: &Packet<'_>) {
        if !Gsi::accepts(packet, &mut self.out.counters) {
            return;
        }
        if self.idents.check(now, datagram) == Verdict::Valid {
            self.gsi.handle(packet, datagram, &mut self.out.counters);
        } else {
            self.out.counters.icrc_errors += 1;
        }
    }

    /// The next management datagram received on queue pair 1.
    pub fn poll_mad(&mut self) -> Option<ReceivedMad> {
        self.gsi.poll()
    }

    /// Queues a management datagram to the peer's queue pair 1; false if the queue is full.
    pub fn send_mad(&mut self, path: Path, mad: Box<Mad>) -> bool {
        self.gsi.send(path, mad)
    }

    /// Handles an untrusted packet of a link; `now` is called only if it depends on the time.
    pub fn handle_link_packet<M: Memory>(
        &mut self,
        now: impl FnOnce() -> Instant,
        packet: &LinkPacket<'_>,
        memory: &mut M,
    ) {
        let counters = &mut self.out.counters;
        counters.received(packet.headers.len() + packet.len);
        let Ok((bth, extension)) = wire::parse_headers(packet.headers, packet.len) else {
            counters.malformed += 1;
            return;
        };
        let Some((index, qp)) = self.qps.find_mut(bth.dest_qp).filter(|(_, qp)| qp.receives()) else {
            counters.no_qp += 1;
            return;
        };
        if bth.opcode.transport() != qp.transport() {
            counters.malformed += 1;
            return;
        }
        if !qp.is_on_link(packet.link) {
            counters.wrong_peer += 1;
            return;
        }
        let arrival = InboundPacket {
            bth,
            extension,
            payload: PayloadSource::ByRef {
                offset: 0,
                len: packet.len,
            },
        };
        let ip = IpFields {
            src: packet.address,
            dst: packet.address,
            traffic_class: 0,
        };
        let now = if qp.needs_time(&arrival) { now() } else { Instant::ZERO };
        qp.handle(now, &arrival, ip, memory, &mut self.out);
        self.reschedule(index);
    }

    /// Queue pairs on this lossless link wait until [`link_ready`](Self::link_ready).
    pub fn link_full(&mut self, link: LinkId) {
        self.full_links.fill(link);
    }

    /// The link has free slots, or discards packets: [`has_more`](Self::has_more) may be true.
    pub fn link_ready(&mut self, link: LinkId) {
        for index in self.full_links.ready(link) {
            self.active.add(index);
        }
    }

    /// The next queue pair on a link that was reset, destroyed, or entered the error state:
    /// memory that its packets reference must not be read once its completions are reported.
    pub fn poll_revoked(&mut self) -> Option<Qpn> {
        self.out.revoked.pop_front()
    }

    /// Handles expired timers: local ACK timeout and end of RNR waits. Handle received packets
    /// first: an ACK not yet read counts as lost and costs a retry.
    pub fn handle_timeout(&mut self, now: Instant) {
        self.handle_timeout_on_links(now, |_| None);
    }

    /// As [`handle_timeout`](Self::handle_timeout), with the progress of lossless links: a timeout
    /// is no retry while the peer's process has not taken what was sent. `None`: the process is
    /// gone, and what is sent to it is dropped.
    pub fn handle_timeout_on_links(&mut self, now: Instant, progress: impl Fn(LinkId) -> Option<LinkProgress>) {
        while let Some(index) = self.timers.expired(now) {
            if let Some(qp) = self.qps.get_mut(index) {
                qp.handle_timeout(now, &progress, &mut self.out);
                self.reschedule(index);
            }
        }
    }

    /// Writes the next packet into `buf` (at least 4096 + 128 bytes), up to the ICRC. Packets of
    /// one message follow one another, so that runs of equal size can be batched (GSO).
    pub fn poll_transmit<M: Memory>(&mut self, now: Instant, memory: &mut M, buf: &mut [u8]) -> Option<Transmit> {
        if self.has_unqueued() {
            return self.transmit_unqueued(buf);
        }
        self.next_transmit(now, memory, buf, false)
    }

    /// Fast path of [`poll_transmit`](Self::poll_transmit): writes the next packet if it is a
    /// MIDDLE packet of the queue pair that sent the previous one; returns its length.
    pub fn poll_transmit_middle<M: Memory>(&mut self, now: Instant, memory: &mut M, buf: &mut [u8]) -> Option<usize> {
        let index = *self.active.queue.front()?;
        if self.last_sent != Some(index) || self.active.burst_left == 0 || self.has_unqueued() {
            return None;
        }
        let qp = self.qps.get_mut(index)?;
        let len = qp.transmit_middle(now, memory, buf, &mut self.out)?;
        self.active.sent(len);
        self.out.counters.sent(len);
        Some(len)
    }

    /// As [`poll_transmit`](Self::poll_transmit), but stops at a queue pair that sends over UDP;
    /// [`has_more`](Self::has_more) is true then.
    pub fn poll_transmit_link<M: Memory>(&mut self, now: Instant, memory: &mut M, buf: &mut [u8]) -> Option<Transmit> {
        self.next_transmit(now, memory, buf, true)
    }

    /// Whether [`poll_transmit`](Self::poll_transmit) may have a packet.
    pub fn has_more(&self) -> bool {
        !self.active.queue.is_empty() || self.has_unqueued()
    }

    fn next_transmit<M: Memory>(
        &mut self,
        now: Instant,
        memory: &mut M,
        buf: &mut [u8],
        links_only: bool,
    ) -> Option<Transmit> {
        while let Some(&index) = self.active.queue.front() {
            let Some(qp) = self.qps.get_mut(index) else {
                self.active.end_burst(false);
                continue;
            };
            if self.active.burst_left == 0 {
                qp.end_burst(true);
                self.active.end_burst(true);
                continue;
            }
            let link = qp.next_link();
            if links_only && link.is_none() {
                return None;
            }
            if let Some(link) = link.filter(|link| self.full_links.contains(*link)) {
                self.timers.set(index, qp.deadline());
                // One that has sent some of its burst waits behind the others: they would starve
                // on a link that has space for less than a burst.
                let begun = self.active.has_begun_burst();
                if !begun {
                    qp.end_burst(true);
                    self.full_links.wait(index, link);
                }
                self.active.end_burst(begun);
                continue;
            }
            let (sent, path) = (qp.transmit(now, memory, buf, &mut self.out), qp.path());
            let (Some(written), Some(path)) = (sent, path) else {
                qp.end_burst(false);
                let deadline = qp.deadline();
                self.timers.set(index, deadline);
                self.active.end_burst(false);
                continue;
            };
            let transmit = Transmit {
                header_len: written.header_len,
                by_ref_len: written.by_ref,
                copy_before_completion: qp.is_unreliable(),
                in_order: qp.ack_before_requests(),
                traffic_class: qp.traffic_class(path),
                ..Transmit::new(qp.qpn(), path, written.len)
            };
            self.timers.set(index, qp.deadline());
            if link.is_none() {
                self.last_sent = Some(index);
            }
            let len = written.len + written.by_ref as usize;
            self.active.sent(len);
            if !qp.has_more() {
                qp.end_burst(false);
                self.active.end_burst(false);
            }
            self.out.counters.sent(len);
            return Some(transmit);
        }
        None
    }

    /// Whether only ACKs of a few queue pairs are to be sent: the caller may delay them.
    pub fn has_only_acks(&self) -> bool {
        !self.has_unqueued()
            && (1..=MAX_ACK_ONLY_QPS).contains(&self.active.queue.len())
            && self
                .active
                .queue
                .iter()
                .all(|&index| self.qps.get(index).is_some_and(QueuePair::has_only_acks))
    }

    /// The next deadline of [`handle_timeout`](Self::handle_timeout): never late, sometimes early.
    pub fn poll_timeout(&self) -> Option<Instant> {
        self.timers.next()
    }

    /// Whether [`poll_completion`](Self::poll_completion), [`poll_event`](Self::poll_event) or
    /// [`poll_revoked`](Self::poll_revoked) has something.
    pub fn has_output(&self) -> bool {
        !self.out.completions.is_empty() || !self.out.events.is_empty() || !self.out.revoked.is_empty()
    }

    /// The next work completion; requests of one queue complete in order.
    pub fn poll_completion(&mut self) -> Option<(CqId, Completion)> {
        self.out.completions.pop_front()
    }

    /// The next asynchronous event.
    pub fn poll_event(&mut self) -> Option<AsyncEvent> {
        self.out.events.pop_front()
    }

    /// The counters since creation.
    pub const fn counters(&self) -> &Counters {
        &self.out.counters
    }

    fn reschedule(&mut self, index: u32) {
        let Some(qp) = self.qps.get(index) else {
            return;
        };
        self.timers.set(index, qp.deadline());
        if qp.has_more() {
            self.active.add(index);
        }
    }
}
