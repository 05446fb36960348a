//! Queue pairs: the state machine around a requester and a responder (IBTA vol 1, 10.3).

mod attributes;
mod congestion;
mod fast_path;
pub(crate) mod packet;
mod peer_port;
pub(crate) mod receive_queue;
mod requester;
mod responder;
mod selective;
mod send_queue;
mod sges;
mod transitions;
mod unreliable;
mod xrc;

pub use attributes::{
    Attributes, GidsUsed, LinkId, LinkProgress, Modify, ModifyError, Path, QpInit, RemoteAccess, State, ack_timeout,
};

pub use peer_port::FIRST_ENTROPY_PORT;

use crate::congestion::Congestion;
use crate::memory::{AccessContext, Memory, PdId};
use crate::outbox::Outbox;
use crate::qp::packet::{InboundPacket, PacketLens};
use crate::qp::peer_port::{PeerPort, Progress};
use crate::qp::requester::Requester;
use crate::qp::responder::{FatalNak, Responder};
use crate::srq::SharedQueue;
use crate::wire::{Bth, IpFields, Nak, Opcode, Transport};
use crate::work::{PostError, ReceiveRequest, SendRequest, SrqId, Status};
use crate::{AsyncEvent, Datagram, EndpointConfig, Instant, LinkCapabilities, Mtu, Psn, Qpn};

/// Maximum message length: 2^31 bytes (IBTA vol 1, 9.7.8: maximum message size).
const MAX_MESSAGE: u32 = 1 << 31;

/// Connection attributes that both requester and responder use.
#[derive(Clone, Copy, Debug)]
struct Connection {
    transport: Transport,
    pd: PdId,
    qpn: Qpn,
    peer: Qpn,
    /// Maximum payload of a packet in bytes: the path MTU, or that of a lossless link.
    mtu: usize,
    /// The lossless link that its packets take, `None` for UDP.
    link: Option<LinkId>,
    peer_port: PeerPort,
    /// On the lossless link, a longer payload is passed by reference.
    inline_limit: usize,
    /// The requester offers selective repeat, and takes selective ACKs.
    selective: bool,
}

impl Connection {
    const fn access_context(&self) -> AccessContext {
        AccessContext {
            pd: self.pd,
            qpn: self.qpn,
        }
    }

    /// A header to the peer of a packet that has this opcode over RC.
    fn bth(&self, opcode: Opcode, psn: Psn) -> Bth {
        let opcode = match self.transport {
            Transport::Rc => opcode,
            other => opcode.over(other).unwrap_or(opcode),
        };
        Bth::new(opcode, self.peer, psn)
    }

    /// Number of packets of a message: at least one (IBTA vol 1, 9.4.1).
    const fn packets(&self, len: u32) -> u32 {
        let packets = len.div_ceil(self.mtu as u32);
        if packets == 0 { 1 } else { packets }
    }
}

#[derive(Debug)]
// fields: connection, the two halves, and what orders their packets
pub(crate) struct QueuePair {
    init: QpInit,
    state: State,
    set: Modify,
    connection: Connection,
    /// Send window in PSNs over UDP; what a lossless link permits instead.
    window: u32,
    capabilities: LinkCapabilities,
    tail_loss_probes: bool,
    selective_repeat: bool,
    requester: Requester,
    responder: Responder,
    /// The first message arrived (or RTS was entered), so IBV_EVENT_COMM_EST is not due any more.
    established: bool,
    /// In SQD: requests in flight have not all completed.
    draining: bool,
    burst: BurstState,
    /// UD: the destination of the last packet written.
    datagram_path: Option<Path>,
    /// The reaction point, `None` without an algorithm.
    congestion: Option<Box<Congestion>>,
    /// The notification point: when the last CNP was due.
    notified: Option<Instant>,
}

/// Replies go first, unless they had the whole previous burst. ACKs go behind requests, unless they
/// waited for the whole previous burst: an ACK and the consumer's answer then leave together, the
/// longer one first, as one GSO run.
#[derive(Clone, Copy, Debug, Default)]
struct BurstState {
    requests_first: bool,
    requests_sent: bool,
    acks_deferred: bool,
}

impl QueuePair {
    pub(crate) fn new(qpn: Qpn, init: QpInit, config: &EndpointConfig, srq: Option<&SharedQueue>) -> Self {
        // UD uses the port's MTU; the others are configured by modify.
        let mtu = match init.transport {
            Transport::Ud => config.mtu,
            Transport::Rc | Transport::Uc | Transport::Xrc => Mtu::Mtu256,
        };
        Self {
            init,
            state: State::Reset,
            set: Modify::default(),
            connection: Connection {
                transport: init.transport,
                pd: init.pd,
                qpn,
                peer: Qpn::new(0),
                mtu: mtu.bytes(),
                link: None,
                peer_port: PeerPort::default(),
                inline_limit: config.link.inline_limit,
                selective: false,
            },
            window: config.window,
            capabilities: config.link,
            tail_loss_probes: config.tail_loss_probes,
            selective_repeat: config.selective_repeat && init.transport == Transport::Rc,
            requester: Requester::new(&init, config.window),
            responder: Responder::new(&init, srq),
            established: false,
            draining: false,
            burst: BurstState::default(),
            datagram_path: None,
            congestion: Congestion::new(&config.congestion).filter(|_| init.transport.is_connected()),
            notified: None,
        }
    }

    pub(crate) fn attributes(&self) -> Attributes {
        let mut set = self.set;
        set.state = Some(self.state);
        set.rq_psn = set.rq_psn.map(|_| self.responder.expected_psn());
        set.sq_psn = set.sq_psn.map(|_| self.requester.next_psn());
        Attributes {
            state: self.state,
            init: self.init,
            sq_draining: self.draining,
            set,
        }
    }

    pub(crate) const fn qpn(&self) -> Qpn {
        self.connection.qpn
    }

    pub(crate) const fn transport(&self) -> Transport {
        self.init.transport
    }

    pub(crate) const fn srq(&self) -> Option<SrqId> {
        self.init.srq
    }

    pub(crate) const fn path(&self) -> Option<&Path> {
        match self.init.transport {
            Transport::Ud => self.datagram_path.as_ref(),
            Transport::Rc | Transport::Uc | Transport::Xrc => self.set.path.as_ref(),
        }
    }

    /// Whether received packets are processed: from RTR on, except in ERR (IBTA vol 1, 10.3.1).
    pub(crate) const fn receives(&self) -> bool {
        matches!(self.state, State::Rtr | State::Rts | State::Sqd | State::Sqe)
    }

    /// Whether it has the addresses of the path, and the peer's port; UD accepts packets from any.
    pub(crate) fn is_from_peer(&self, datagram: &Datagram<'_>) -> bool {
        if self.init.transport == Transport::Ud {
            return true;
        }
        let ends = (datagram.dst.to_canonical(), datagram.src.to_canonical());
        let on_path = |path: Path| path.link.is_none() && (path.local, path.remote) == ends;
        self.set.path.is_some_and(on_path) && self.connection.peer_port.admits(datagram.src_port)
    }

    pub(crate) const fn peer_port(&self) -> PeerPort {
        self.connection.peer_port
    }

    pub(crate) fn progress(&self) -> Progress {
        Progress {
            expected: self.responder.expected_psn(),
            acked: self.requester.acked(),
        }
    }

    /// Whether its packets arrive on this lossless link; UD accepts packets from any.
    pub(crate) fn is_on_link(&self, link: LinkId) -> bool {
        self.init.transport == Transport::Ud || self.connection.link == Some(link)
    }

    pub(crate) fn next_link(&self) -> Option<LinkId> {
        match self.init.transport {
            Transport::Ud => self.requester.next_destination().and_then(|to| to.path.link),
            Transport::Rc | Transport::Uc | Transport::Xrc => self.connection.link,
        }
    }

    /// Whether memory that its packets reference may change as soon as they are written (UC, UD).
    pub(crate) fn is_unreliable(&self) -> bool {
        !self.init.transport.is_reliable()
    }

    pub(crate) const fn ack_before_requests(&self) -> bool {
        self.init.ack_before_requests
    }

    pub(crate) fn has_only_acks(&self) -> bool {
        self.responder.has_only_ack() && !self.requester.has_more()
    }

    pub(crate) fn has_more(&self) -> bool {
        self.responder.has_replies() || self.requester.has_more()
    }

    #[inline]
    pub(crate) fn deadline(&self) -> Option<Instant> {
        if self.congestion.is_some() {
            return self.paced_deadline();
        }
        self.requester.deadline()
    }

    pub(crate) fn modify(&mut self, now: Instant, modify: &Modify, out: &mut Outbox) -> Result<(), ModifyError> {
        let (from, to) = (self.state, modify.target(&self.init, self.state)?);
        match to {
            State::Reset => {
                self.reset(out);
                return Ok(());
            }
            // A pending fatal NAK that explains the error state must still be sent.
            State::Err if from == State::Err => return Ok(()),
            State::Err => {
                self.enter_error(out);
                self.responder.clear_replies();
                return Ok(());
            }
            _ => {}
        }
        self.set.overlay(modify);
        self.requester.configure(now, &self.set);
        self.responder.configure(&self.set);
        self.connection.peer = self.set.dest_qpn.unwrap_or(self.connection.peer);
        self.connection.link = self.set.path.and_then(|path| path.link);
        if modify.path.is_some() {
            self.connection.peer_port = PeerPort::default();
            self.connection.selective = false;
            self.responder.disable_selective_repeat(out);
        }
        self.connection.mtu = match (self.connection.link, self.set.path_mtu) {
            (Some(_), _) => self.capabilities.mtu,
            (None, Some(mtu)) => mtu.bytes(),
            (None, None) => self.connection.mtu,
        };
        let window = self.connection.link.map_or(self.window, |_| self.capabilities.window);
        self.requester.set_window(window);
        self.limit_to_selective();
        self.requester
            .set_probes(self.tail_loss_probes && self.connection.link.is_none());
        match (from, to) {
            (State::Init, State::Rtr) => self.set.rq_psn.into_iter().for_each(|psn| self.responder.start(psn)),
            (State::Rtr, State::Rts) => {
                self.established = true;
                self.set.sq_psn.into_iter().for_each(|psn| self.requester.start(psn));
            }
            (State::Rts, State::Sqd) => {
                self.draining = true;
                self.requester.request_ack();
            }
            (State::Sqd, State::Rts) => self.draining = false,
            _ => {}
        }
        self.state = to;
        self.check_drained(out);
        Ok(())
    }

    fn reset(&mut self, out: &mut Outbox) {
        self.revoke_refs(out);
        self.state = State::Reset;
        self.set = Modify::default();
        self.connection.link = None;
        self.connection.selective = false;
        self.responder.disable_selective_repeat(out);
        self.requester.reset();
        self.responder.reset();
        self.established = false;
        self.draining = false;
        self.reset_congestion();
    }

    pub(crate) fn revoke_refs(&self, out: &mut Outbox) {
        if self.connection.link.is_some() {
            out.revoked.push_back(self.connection.qpn);
        }
    }

    /// The replies stay queued: a NAK that explains the error may be among them.
    fn enter_error(&mut self, out: &mut Outbox) {
        let fresh = self.state != State::Err;
        self.state = State::Err;
        self.draining = false;
        self.revoke_refs(out);
        self.requester.flush(&self.connection, out);
        self.responder.flush(&self.connection, out);
        // It holds and consumes no more receives (IBTA vol 1, 11.6.3: last WQE reached).
        if fresh && self.init.srq.is_some() {
            out.event(AsyncEvent::LastWqeReached(self.connection.qpn));
        }
    }

    /// Completes the oldest send request with `status` and flushes the rest (IBTA vol 1, 10.7.3.1).
    fn fail(&mut self, status: Status, out: &mut Outbox) {
        self.requester.fail(status, &self.connection, out);
        self.enter_error(out);
        self.responder.clear_replies();
    }

    /// Ends the connection with a NAK (IBTA vol 1, 9.9.3: responder class C errors).
    fn fail_with_nak(&mut self, fatal: FatalNak, out: &mut Outbox) {
        self.responder.queue_fatal_nak(fatal.nak, out);
        if !fatal.reported {
            out.event(match fatal.nak {
                Nak::RemoteAccess => AsyncEvent::QpAccessError(self.connection.qpn),
                _ => AsyncEvent::QpRequestError(self.connection.qpn),
            });
        }
        self.enter_error(out);
    }

    fn check_drained(&mut self, out: &mut Outbox) {
        if self.draining && !self.requester.is_busy() {
            self.draining = false;
            if self.set.sqd_async_notify == Some(true) {
                out.event(AsyncEvent::SendQueueDrained(self.connection.qpn));
            }
        }
    }

    pub(crate) fn post_send(&mut self, request: &SendRequest<'_>, out: &mut Outbox) -> Result<(), PostError> {
        if self.state < State::Rts {
            return Err(PostError::State);
        }
        if !self.offers(&request.operation, false) {
            return Err(PostError::Invalid);
        }
        self.requester.post(request)?;
        if matches!(self.state, State::Sqe | State::Err) {
            self.requester.flush(&self.connection, out);
        }
        Ok(())
    }

    /// See [`Endpoint::check_send`](crate::Endpoint::check_send).
    pub(crate) fn check_post(&self, request: &SendRequest<'_>, remote: bool, ahead: u32) -> Result<(), PostError> {
        if self.state < State::Rts {
            return Err(PostError::State);
        }
        if !self.offers(&request.operation, remote) {
            return Err(PostError::Invalid);
        }
        self.requester.check_post(request, ahead)
    }

    pub(crate) fn post_receive(&mut self, request: &ReceiveRequest<'_>, out: &mut Outbox) -> Result<(), PostError> {
        if self.init.srq.is_some() || self.init.transport == Transport::Xrc {
            return Err(PostError::Invalid);
        }
        if self.state == State::Reset {
            return Err(PostError::State);
        }
        self.responder.post(request)?;
        if self.state == State::Err {
            self.responder.flush(&self.connection, out);
        }
        Ok(())
    }

    /// The queue pair [`receives`](Self::receives).
    pub(crate) fn handle<M: Memory>(
        &mut self,
        now: Instant,
        packet: &InboundPacket<'_>,
        ip: IpFields,
        memory: &mut M,
        out: &mut Outbox,
    ) {
        if self.congestion.is_some() {
            return self.handle_reporting(now, packet, ip, memory, out);
        }
        self.handle_any(now, packet, ip, memory, out);
    }

    #[inline(always)]
    fn handle_any<M: Memory>(
        &mut self,
        now: Instant,
        packet: &InboundPacket<'_>,
        ip: IpFields,
        memory: &mut M,
        out: &mut Outbox,
    ) {
        match self.init.transport {
            Transport::Rc => self.handle_packet(now, packet, memory, out),
            Transport::Xrc => self.handle_xrc(now, packet, memory, out),
            Transport::Uc => self.handle_unreliable(packet, memory, out),
            Transport::Ud => self.handle_datagram(packet, ip, memory, out),
        }
    }

    pub(crate) fn needs_time(&self, packet: &InboundPacket<'_>) -> bool {
        packet.bth.opcode.is_response() && !self.requester.is_final_ack(packet)
    }

    fn handle_packet<M: Memory>(&mut self, now: Instant, packet: &InboundPacket<'_>, memory: &mut M, out: &mut Outbox) {
        if packet.bth.opcode.is_response() {
            // In RTR no request was sent yet.
            if self.state != State::Rtr
                && let Err(status) = self
                    .requester
                    .handle_response(now, packet, &self.connection, memory, out)
            {
                self.fail(status, out);
            }
            self.check_drained(out);
            return;
        }
        if packet.bth.selective && self.connection.selective {
            self.responder.enable_selective_repeat();
        }
        // The PD of an XRC request is that of the queue that it names.
        let named;
        let connection = if self.init.transport == Transport::Xrc {
            named = Connection {
                pd: self.responder.receive_pd(),
                ..self.connection
            };
            &named
        } else {
            &self.connection
        };
        match self.responder.handle_request(packet, connection, memory, out) {
            Ok(true) if !self.established => {
                self.established = true;
                out.event(AsyncEvent::CommunicationEstablished(self.connection.qpn));
            }
            Ok(_) => {}
            Err(fatal) => self.fail_with_nak(fatal, out),
        }
    }

    /// `progress` returns that of its link, if that is lossless.
    pub(crate) fn handle_timeout(
        &mut self,
        now: Instant,
        progress: impl FnOnce(LinkId) -> Option<LinkProgress>,
        out: &mut Outbox,
    ) {
        let link = self.connection.link.and_then(progress);
        if let Err(status) = self.requester.handle_timeout(now, link, out) {
            self.fail(status, out);
        }
        if self.congestion.is_some() {
            self.handle_congestion_timeout(now);
        }
    }

    /// Ends a burst; `cut` when its limit was reached, as opposed to nothing left to send.
    pub(crate) fn end_burst(&mut self, cut: bool) {
        self.burst = BurstState {
            requests_first: cut && !self.burst.requests_sent,
            requests_sent: false,
            acks_deferred: cut && self.responder.has_only_ack(),
        };
    }

    #[inline]
    pub(crate) fn transmit<M: Memory>(
        &mut self,
        now: Instant,
        memory: &mut M,
        buf: &mut [u8],
        out: &mut Outbox,
    ) -> Option<PacketLens> {
        if self.congestion.is_some() {
            return self.transmit_paced(now, memory, buf, out);
        }
        self.transmit_next(now, memory, buf, out)
    }

    #[inline(always)]
    fn transmit_next<M: Memory>(
        &mut self,
        now: Instant,
        memory: &mut M,
        buf: &mut [u8],
        out: &mut Outbox,
    ) -> Option<PacketLens> {
        // Over UDP an ACK can end a request's GSO run; on a link it goes first, as in hardware.
        let in_order = self.connection.link.is_some() || self.init.ack_before_requests;
        let defer_acks = !in_order && self.responder.has_only_ack() && !self.burst.acks_deferred;
        if self.burst.requests_first || defer_acks {
            self.transmit_request(now, memory, buf, out)
                .or_else(|| self.transmit_reply(memory, buf, out))
        } else {
            self.transmit_reply(memory, buf, out)
                .or_else(|| self.transmit_request(now, memory, buf, out))
        }
    }

    /// Fast path of [`transmit`](Self::transmit): a MIDDLE packet over UDP, no reply pending.
    pub(crate) fn transmit_middle<M: Memory>(
        &mut self,
        now: Instant,
        memory: &mut M,
        buf: &mut [u8],
        out: &mut Outbox,
    ) -> Option<usize> {
        let eligible =
            self.init.transport == Transport::Rc && self.state == State::Rts && self.connection.link.is_none();
        if !eligible || self.responder.has_replies() || self.congestion.is_some() {
            return None;
        }
        let len = self
            .requester
            .transmit_middle(now, &self.connection, memory, buf, out)?;
        self.burst.requests_sent = true;
        Some(len)
    }

    fn transmit_request<M: Memory>(
        &mut self,
        now: Instant,
        memory: &mut M,
        buf: &mut [u8],
        out: &mut Outbox,
    ) -> Option<PacketLens> {
        if !self.init.transport.is_reliable() {
            return self.transmit_unreliable(memory, buf, out);
        }
        let draining = match self.state {
            State::Rts => false,
            State::Sqd => true,
            _ => return None,
        };
        match self
            .requester
            .transmit(now, &self.connection, draining, memory, buf, out)
        {
            Ok(written) => {
                self.burst.requests_sent |= written.is_some();
                written
            }
            Err(status) => {
                self.fail(status, out);
                None
            }
        }
    }

    fn transmit_reply<M: Memory>(&mut self, memory: &mut M, buf: &mut [u8], out: &mut Outbox) -> Option<PacketLens> {
        match self.responder.transmit(&self.connection, memory, buf) {
            Ok(written) => written,
            Err(fatal) => {
                self.fail_with_nak(fatal, out);
                self.responder.transmit(&self.connection, memory, buf).ok().flatten()
            }
        }
    }
}
