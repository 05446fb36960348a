//! All the queue pairs of one device, and the demultiplexing of datagrams to them.

mod config;
mod deferred;
mod fast_path;

use core::net::IpAddr;
use std::collections::VecDeque;

use crate::cm::Mad;
use crate::counters::Counters;
use crate::gsi::{GSI, Gsi, ReceivedMad};
use crate::ident::{IdentTracker, Verdict};
use crate::memory::Memory;
use crate::outbox::Outbox;
use crate::qp::packet::{InboundPacket, PayloadSource};
use crate::qp::{Attributes, LaneId, Modify, ModifyError, Path, QpInit, QueuePair};
use crate::qpn::Block;
use crate::shm_links::FullShmLinks;
use crate::srq::{SharedQueue, SrqAttributes, SrqError, SrqInit};
use crate::table::QpTable;
use crate::timer::Timers;
use crate::wire::{self, Packet};
use crate::work::{Completion, CqId, Destination, PostError, ReceiveRequest, SendRequest, SrqId};
use crate::{Instant, Qpn};

pub use config::EndpointConfig;
pub use fast_path::Short;

/// Packets of one queue pair that are sent before another one has its turn: enough for runs that a link can batch.
const MAX_BURST: u32 = 16;

/// Queue pairs that are worth looking at for [`Endpoint::only_acknowledges`].
const MAX_ACK_ONLY_QPS: usize = 4;

/// What the receiver knows of the IPv4 Identification of a datagram, which the ICRC covers.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Ident {
    /// Its value.
    Known(u16),
    /// A UDP socket does not tell; the datagram was number `segment` of its receive batch (0 unless coalesced).
    Unknown {
        /// Its place in a coalesced receive.
        segment: u16,
    },
}

/// A datagram that arrived on the RoCEv2 port, and what its IP and UDP headers said.
#[derive(Clone, Copy, Debug)]
pub struct Datagram<'a> {
    /// Source address.
    pub src: IpAddr,
    /// Destination address.
    pub dst: IpAddr,
    /// Source UDP port.
    pub src_port: u16,
    /// Destination UDP port.
    pub dst_port: u16,
    /// IPv4 Identification; ignored for IPv6.
    pub ident: Ident,
    /// The UDP payload: BTH up to and with the ICRC.
    pub payload: &'a [u8],
}

/// A packet that arrived on a lane: its headers, which are the owner's copy. The payload is where the owner's [`Memory`] finds it.
#[derive(Clone, Copy, Debug)]
pub struct LanePacket<'a> {
    /// The lane.
    pub lane: LaneId,
    /// The address that both ends have.
    pub address: IpAddr,
    /// BTH and extension headers, without pad and ICRC.
    pub headers: &'a [u8],
    /// The length of the payload in bytes.
    pub len: usize,
}

/// A packet to send.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Transmit {
    /// Source address.
    pub src: IpAddr,
    /// Destination address.
    pub dst: IpAddr,
    /// IPv4 TOS or IPv6 traffic class.
    pub traffic_class: u8,
    /// TTL or hop limit.
    pub hop_limit: u8,
    /// Its length in the buffer, the 4 bytes of the ICRC included, which are not yet filled in: whoever knows the Identification seals it.
    pub len: usize,
    /// Which queue pair sends it.
    pub qpn: Qpn,
    /// The lane that it takes, if it takes one. It has neither pad nor ICRC then.
    pub lane: Option<LaneId>,
    /// On a lane: bytes of headers in front of those of the payload that are in the buffer.
    pub headers: usize,
    /// On a lane: bytes of payload that are not in the buffer, but in what the [`Memory`] was told to refer to.
    pub referred: u32,
    /// On a lane: what it refers to may change as soon as this is told, and is to be copied before. Otherwise it stays until the peer has answered.
    pub fleeting: bool,
    /// On the wire: it keeps its order towards the other packets of its queue pair, also if it is an acknowledgement. See [`QpInit::acknowledges_first`].
    pub in_order: bool,
}

impl Transmit {
    fn new(qpn: Qpn, path: &Path, len: usize) -> Self {
        Self {
            src: path.local,
            dst: path.remote,
            traffic_class: path.traffic_class,
            hop_limit: path.hop_limit,
            len,
            qpn,
            lane: path.lane,
            headers: 0,
            referred: 0,
            fleeting: false,
            in_order: false,
        }
    }
}

/// What a device tells its owner unasked (ibv_get_async_event(3)).
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum AsyncEvent {
    /// IBV_EVENT_QP_FATAL: an error that no completion of its own reports put the queue pair into the error state.
    QpFatal(Qpn),
    /// IBV_EVENT_QP_REQ_ERR: the peer sent a malformed request.
    QpRequestError(Qpn),
    /// IBV_EVENT_QP_ACCESS_ERR: the peer's request was refused access.
    QpAccessError(Qpn),
    /// IBV_EVENT_COMM_EST: the first message came while still in RTR.
    CommunicationEstablished(Qpn),
    /// IBV_EVENT_SQ_DRAINED.
    SendQueueDrained(Qpn),
    /// IBV_EVENT_QP_LAST_WQE_REACHED: the queue pair is in the error state and takes no more receives of its shared receive queue.
    LastWqeReached(Qpn),
    /// IBV_EVENT_SRQ_LIMIT_REACHED: fewer receives are in the shared receive queue than its limit, which is disarmed now.
    SrqLimitReached(SrqId),
}

/// The protocol state of one device: its queue pairs.
///
/// Order of calls, as quinn-proto has it: after any of `post_*`, `modify_qp`, `destroy_qp`, `handle_*`, drain `poll_completion` and
/// `poll_event`, call `poll_transmit` until it gives `None` (or the link is full), then ask `poll_timeout` when to call `handle_timeout`. As
/// `poll_transmit` reads memory it may fail requests too, so drain completions and events after it again.
///
/// Nothing is allocated per packet or per request, except that the queues of completions and events grow to the most that was ever in them.
#[derive(Debug)]
pub struct Endpoint {
    qps: QpTable,
    config: EndpointConfig,
    idents: IdentTracker,
    timers: Timers,
    active: Active,
    /// The queue pair of the packet for the wire given last, until its path may change.
    last_sent: Option<u32>,
    gsi: Gsi,
    full_shm_links: FullShmLinks,
    out: Outbox,
}

/// Queue pairs that may have something to send, in turn.
#[derive(Debug, Default)]
struct Active {
    queue: VecDeque<u32>,
    /// By slot: it is in the queue.
    queued: Vec<bool>,
    /// Packets that the first one may still send.
    burst_left: u32,
}

impl Active {
    fn add(&mut self, index: u32) {
        if let Some(queued) = self.queued.get_mut(index as usize)
            && !*queued
        {
            *queued = true;
            self.queue.push_back(index);
        }
    }

    /// The turn of the first one is over.
    fn end_burst(&mut self, requeue: bool) {
        self.burst_left = MAX_BURST;
        if let Some(index) = self.queue.pop_front() {
            self.queued[index as usize] = false;
            if requeue {
                self.add(index);
            }
        }
    }
}

impl Endpoint {
    /// Queue pairs that can exist at once.
    pub const MAX_QPS: usize = QpTable::MAX;

    /// An endpoint without queue pairs, with the default configuration but for the seed.
    pub fn new(seed: u64) -> Self {
        Self::with_config(EndpointConfig {
            seed,
            ..EndpointConfig::default()
        })
    }

    /// An endpoint without queue pairs.
    pub fn with_config(config: EndpointConfig) -> Self {
        Self {
            qps: QpTable::new(config.seed),
            config: EndpointConfig {
                window: config.window.clamp(1, EndpointConfig::MAX_WINDOW),
                shm_window: config.shm_window.clamp(1, EndpointConfig::MAX_WINDOW),
                ..config
            },
            idents: IdentTracker::default(),
            timers: Timers::default(),
            last_sent: None,
            active: Active {
                burst_left: MAX_BURST,
                ..Active::default()
            },
            gsi: Gsi::default(),
            full_shm_links: FullShmLinks::default(),
            out: Outbox::default(),
        }
    }

    // Objects

    /// Gives the endpoint a block of queue pair numbers. An endpoint that is given one before it has a queue pair uses none but those it is given: others on its address have the rest. One that is given
    /// none has its address for itself.
    pub fn give_numbers(&mut self, block: Block) {
        self.qps.qpns().add_block(block);
    }

    /// Whether another block should be given before the next queue pair is created: half of the numbers are in use, so that they would come again soon.
    pub fn wants_numbers(&self) -> bool {
        self.qps.wants_numbers()
    }

    /// Whether the given blocks have a number left for another queue pair.
    pub fn has_numbers(&self) -> bool {
        self.qps.has_numbers()
    }

    /// Creates a queue pair in [`State::Reset`](crate::qp::State::Reset). Its queues are allocated here, once.
    ///
    /// # Panics
    /// When there are [`MAX_QPS`](Self::MAX_QPS) already, the given blocks have no number left, or there is no such shared receive queue: their owner sees to all three.
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
        self.full_shm_links.grow(slots);
        match created {
            Some(qpn) => qpn,
            None => panic!(
                "{} queue pairs exist already, or all given numbers are in use",
                self.qps.len()
            ),
        }
    }

    /// How many queue pairs there are.
    pub fn qp_count(&self) -> usize {
        self.qps.len()
    }

    /// Changes attributes and state. Into RESET: everything queued is forgotten without completions. Into ERR: everything is flushed.
    ///
    /// # Errors
    /// When the table of ibv_modify_qp(3) refuses it; nothing changed then.
    pub fn modify_qp(&mut self, now: Instant, qpn: Qpn, modify: &Modify) -> Result<(), ModifyError> {
        let (index, qp) = find(&mut self.qps, qpn).ok_or(ModifyError::UnknownQp)?;
        self.last_sent = None;
        qp.modify(now, modify, &mut self.out)?;
        self.reschedule(index);
        Ok(())
    }

    /// The attributes, `None` for an unknown queue pair.
    pub fn query_qp(&self, qpn: Qpn) -> Option<Attributes> {
        self.qps.get(self.qps.find(qpn)?).map(QueuePair::attributes)
    }

    /// Forgets a queue pair and what is queued on it, without completions; false when there is none.
    pub fn destroy_qp(&mut self, qpn: Qpn) -> bool {
        self.last_sent = None;
        if let Some((index, qp)) = find(&mut self.qps, qpn) {
            self.timers.set(index, None);
            qp.revoke_refs(&mut self.out);
            if let Some(srq) = qp.srq() {
                self.out.srqs.detach(srq);
            }
        }
        self.qps.remove(qpn)
    }

    /// Creates a shared receive queue, its limit not armed. Its room is allocated here, once.
    pub fn create_srq(&mut self, init: SrqInit) -> SrqId {
        self.out.srqs.insert(init)
    }

    /// Changes a shared receive queue: its size where `max_wr` is given, and arms its limit where that is (0 disarms it). When fewer receives than that are queued,
    /// [`AsyncEvent::SrqLimitReached`] comes, at once if so already, and the limit is disarmed (IBTA vol 1, 10.2.9.5 and 11.2.3).
    ///
    /// # Errors
    /// When a value is out of range; nothing changed then.
    pub fn modify_srq(&mut self, srq: SrqId, max_wr: Option<u32>, limit: Option<u32>) -> Result<(), SrqError> {
        self.out.modify_srq(srq, max_wr, limit)
    }

    /// What a shared receive queue is like now; `None` when there is none.
    pub fn query_srq(&self, srq: SrqId) -> Option<SrqAttributes> {
        self.out.srqs.get(srq).map(SharedQueue::attributes)
    }

    /// Forgets a shared receive queue and what is queued on it, without completions.
    ///
    /// # Errors
    /// When there is none, or a queue pair takes receives from it.
    pub fn destroy_srq(&mut self, srq: SrqId) -> Result<(), SrqError> {
        self.out.srqs.remove(srq)
    }

    // Work

    /// Queues a send request; its time begins when its first packet is written, not now. In SQD it waits for the return to RTS, in ERR it completes flushed at once.
    ///
    /// # Errors
    /// When it is refused; nothing was queued. In RESET, INIT and RTR every send request is (IBTA vol 1, 10.3.1), and so is what the transport does not offer: UC
    /// has neither READs nor atomics, and UD takes [`post_datagram`](Self::post_datagram).
    pub fn post_send(&mut self, _now: Instant, qpn: Qpn, request: &SendRequest<'_>) -> Result<(), PostError> {
        let (index, qp) = find(&mut self.qps, qpn).ok_or(PostError::UnknownQp)?;
        qp.post_send(request, &mut self.out)?;
        self.active.add(index);
        Ok(())
    }

    /// Queues a SEND of a UD queue pair; otherwise as [`post_send`](Self::post_send). One that is longer than the port's MTU completes, but is not sent (IBTA vol 1,
    /// 9.8.4: C10-93.1.1).
    ///
    /// # Errors
    /// When it is refused; nothing was queued. On a queue pair that is not UD it is, as is any operation but SEND.
    pub fn post_datagram(
        &mut self,
        _now: Instant,
        qpn: Qpn,
        request: &SendRequest<'_>,
        to: &Destination,
    ) -> Result<(), PostError> {
        let (index, qp) = find(&mut self.qps, qpn).ok_or(PostError::UnknownQp)?;
        qp.post_datagram(request, to, &mut self.out)?;
        self.active.add(index);
        Ok(())
    }

    /// Whether [`post_send`](Self::post_send), or [`post_datagram`](Self::post_datagram) for a `datagram`, would queue a request after `ahead` others: for
    /// those who post several requests or none.
    ///
    /// # Errors
    /// When it would be refused, and why.
    pub fn check_send(&self, qpn: Qpn, request: &SendRequest<'_>, datagram: bool, ahead: u32) -> Result<(), PostError> {
        let qp = self.qps.find(qpn).and_then(|index| self.qps.get(index));
        qp.ok_or(PostError::UnknownQp)?.check_post(request, datagram, ahead)
    }

    /// Queues a receive request. In ERR it completes flushed at once.
    ///
    /// # Errors
    /// When it is refused; nothing was queued. In RESET every receive request is, and always on a queue pair with a shared receive queue.
    pub fn post_receive(&mut self, qpn: Qpn, request: &ReceiveRequest<'_>) -> Result<(), PostError> {
        let (_, qp) = find(&mut self.qps, qpn).ok_or(PostError::UnknownQp)?;
        qp.post_receive(request, &mut self.out)
    }

    /// Queues a receive request for whichever queue pair of a shared receive queue needs one first, whatever states those are in (IBTA vol 1, 10.2.9).
    ///
    /// # Errors
    /// When it is refused; nothing was queued.
    pub fn post_shared_receive(&mut self, srq: SrqId, request: &ReceiveRequest<'_>) -> Result<(), PostError> {
        self.out.srqs.get_mut(srq).ok_or(PostError::UnknownQp)?.post(request)
    }

    // Wire and time

    /// Takes a datagram from the wire. Anything may be in it: what is malformed, fails its ICRC, or belongs to no queue pair changes nothing but counters.
    ///
    /// Whether it came to the right UDP port is for the caller to know.
    pub fn handle_datagram<M: Memory>(&mut self, now: Instant, datagram: &Datagram<'_>, memory: &mut M) {
        let counters = &mut self.out.counters;
        counters.rx_packets += 1;
        let packet = match Packet::parse(datagram.payload) {
            Ok(packet) => packet,
            Err(_) => {
                counters.malformed += 1;
                return;
            }
        };
        if packet.bth.dest_qp == GSI {
            self.handle_management(now, datagram, &packet);
            return;
        }
        let Some((index, qp)) = find(&mut self.qps, packet.bth.dest_qp).filter(|(_, qp)| qp.receives()) else {
            counters.no_qp += 1;
            return;
        };
        if packet.bth.opcode.transport() != qp.transport() {
            counters.malformed += 1;
            return;
        }
        if !qp.matches_path(datagram.dst.to_canonical(), datagram.src.to_canonical()) {
            counters.wrong_peer += 1;
            return;
        }
        if self.idents.check(now, datagram) != Verdict::Valid {
            counters.icrc_errors += 1;
            return;
        }
        qp.handle(now, &packet.into(), (datagram.src, datagram.dst), memory, &mut self.out);
        self.reschedule(index);
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

    /// The next management datagram that came to queue pair 1.
    pub fn poll_mad(&mut self) -> Option<ReceivedMad> {
        self.gsi.poll()
    }

    /// Queues a management datagram from queue pair 1 to that of the peer; false when too many wait: it is lost then, as it may be on any network.
    pub fn send_mad(&mut self, path: Path, mad: Box<Mad>) -> bool {
        self.gsi.send(path, mad)
    }

    /// Takes a packet from a lane. As with a datagram, anything may be in it. `now` is asked for the time where something depends on it, which is so for few packets.
    pub fn handle_lane<M: Memory>(&mut self, now: impl FnOnce() -> Instant, packet: &LanePacket<'_>, memory: &mut M) {
        let counters = &mut self.out.counters;
        counters.rx_packets += 1;
        let Ok((bth, extension)) = wire::parse_headers(packet.headers, packet.len) else {
            counters.malformed += 1;
            return;
        };
        let Some((index, qp)) = find(&mut self.qps, bth.dest_qp).filter(|(_, qp)| qp.receives()) else {
            counters.no_qp += 1;
            return;
        };
        if bth.opcode.transport() != qp.transport() {
            counters.malformed += 1;
            return;
        }
        if !qp.is_on_shm_link(packet.lane) {
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
        let ends = (packet.address, packet.address);
        let now = if qp.needs_time(&arrival) { now() } else { Instant::ZERO };
        qp.handle(now, &arrival, ends, memory, &mut self.out);
        self.reschedule(index);
    }

    /// The lane has no room: queue pairs that would use it wait, and others go on, until [`lane_ready`](Self::lane_ready).
    pub fn lane_full(&mut self, lane: LaneId) {
        self.full_shm_links.fill(lane);
    }

    /// The lane has room again, or will never have any and loses what it is given. [`poll_transmit`](Self::poll_transmit) may have packets then.
    pub fn lane_ready(&mut self, lane: LaneId) {
        for index in self.full_shm_links.ready(lane) {
            self.active.add(index);
        }
    }

    /// The next queue pair that was reset or destroyed, or went into the error state, on a lane: what its packets there refer to is not to be read any more, as its
    /// requests have completed or are forgotten. To be asked before completions are given out.
    pub fn poll_withdrawn(&mut self) -> Option<Qpn> {
        self.out.revoked.pop_front()
    }

    /// Does what is due at `now`: retransmission, the end of RNR waits.
    ///
    /// Hand in first what has arrived: an answer not read yet looks like one that was lost, and costs a retry.
    pub fn handle_timeout(&mut self, now: Instant) {
        while let Some(index) = self.timers.expired(now) {
            if let Some(qp) = self.qps.get_mut(index) {
                qp.handle_timeout(now, &mut self.out);
                self.reschedule(index);
            }
        }
    }

    /// Writes the next packet into `buf`, which has room for 4096 + 128 bytes at least, up to the ICRC; `None` when nothing is to be sent.
    ///
    /// Consecutive packets of one message are given one after another, so that runs of equal size can be batched.
    pub fn poll_transmit<M: Memory>(&mut self, now: Instant, memory: &mut M, buf: &mut [u8]) -> Option<Transmit> {
        if let Some((len, path)) = self.gsi.transmit(buf) {
            self.last_sent = None;
            self.out.counters.tx_packets += 1;
            return Some(Transmit::new(GSI, &path, len));
        }
        self.next_transmit(now, memory, buf, false)
    }

    /// Writes the next packet into `buf` as [`poll_transmit`](Self::poll_transmit) does, and gives its length, when it goes where the one before went and is from the
    /// middle of the same message, or of one behind it: most packets of long messages are, and this is the short way to them. `None` when it is any other, or there is none.
    pub fn poll_middle<M: Memory>(&mut self, memory: &mut M, buf: &mut [u8]) -> Option<usize> {
        let index = *self.active.queue.front()?;
        if self.last_sent != Some(index) || self.active.burst_left == 0 || self.gsi.has_more() {
            return None;
        }
        let len = self.qps.get_mut(index)?.transmit_middle(memory, buf, &mut self.out)?;
        self.active.burst_left -= 1;
        self.out.counters.tx_packets += 1;
        Some(len)
    }

    /// As [`poll_transmit`](Self::poll_transmit), but stops at a queue pair whose packets go over the wire; [`has_more`](Self::has_more) tells then.
    pub fn poll_lanes<M: Memory>(&mut self, now: Instant, memory: &mut M, buf: &mut [u8]) -> Option<Transmit> {
        self.next_transmit(now, memory, buf, true)
    }

    /// Whether [`poll_transmit`](Self::poll_transmit) may have something.
    pub fn has_more(&self) -> bool {
        !self.active.queue.is_empty() || self.gsi.has_more()
    }

    fn next_transmit<M: Memory>(
        &mut self,
        now: Instant,
        memory: &mut M,
        buf: &mut [u8],
        shm_only: bool,
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
            let shm_link = qp.next_shm_link();
            if shm_only && shm_link.is_none() {
                return None;
            }
            if self.full_shm_links.blocks(index, shm_link) {
                qp.end_burst(true);
                self.timers.set(index, qp.deadline());
                self.active.end_burst(false);
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
                headers: written.header_len,
                referred: written.by_ref,
                fleeting: qp.is_unreliable(),
                in_order: qp.acknowledges_first(),
                ..Transmit::new(qp.qpn(), path, written.len)
            };
            self.timers.set(index, qp.deadline());
            if shm_link.is_none() {
                self.last_sent = Some(index);
            }
            self.active.burst_left -= 1;
            if !qp.has_more() {
                qp.end_burst(false);
                self.active.end_burst(false);
            }
            self.out.counters.tx_packets += 1;
            return Some(transmit);
        }
        None
    }

    /// Whether all there is to send is acknowledgements, of a few queue pairs: their owner may wait a moment for a request that takes them along.
    pub fn only_acknowledges(&self) -> bool {
        !self.gsi.has_more()
            && (1..=MAX_ACK_ONLY_QPS).contains(&self.active.queue.len())
            && self
                .active
                .queue
                .iter()
                .all(|&index| self.qps.get(index).is_some_and(QueuePair::has_only_acks))
    }

    /// When to call [`handle_timeout`](Self::handle_timeout) next: never late, and at times earlier than anything is due.
    pub fn poll_timeout(&self) -> Option<Instant> {
        self.timers.next()
    }

    /// Whether [`poll_completion`](Self::poll_completion), [`poll_event`](Self::poll_event) or [`poll_withdrawn`](Self::poll_withdrawn) has something.
    pub fn has_news(&self) -> bool {
        !self.out.completions.is_empty() || !self.out.events.is_empty() || !self.out.revoked.is_empty()
    }

    /// The next work completion, in the order in which the requests of a queue complete.
    pub fn poll_completion(&mut self) -> Option<(CqId, Completion)> {
        self.out.completions.pop_front()
    }

    /// The next asynchronous event.
    pub fn poll_event(&mut self) -> Option<AsyncEvent> {
        self.out.events.pop_front()
    }

    // Getters

    /// What was counted so far.
    pub const fn counters(&self) -> &Counters {
        &self.out.counters
    }

    /// A queue pair may have something to send, and another deadline.
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

/// A queue pair and its slot.
fn find(qps: &mut QpTable, qpn: Qpn) -> Option<(u32, &mut QueuePair)> {
    let index = qps.find(qpn)?;
    qps.get_mut(index).map(|qp| (index, qp))
}
