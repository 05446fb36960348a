//! The state machine of one connection: commands of its owner, messages of the peer, timeouts (IBTA
//! vol 1, 12.9).
//!
//! ```text
//! active:  ReqSent ─REP▶ RepReceived ─establish▶ Established ─disconnect▶ DreqSent ─DREP▶ TimeWait
//! passive: ReqReceived ─accept▶ RepSent ─RTU▶ Established ─DREQ▶ TimeWait
//! both:    TimeWait ─timeout▶ Closed
//! ```
//!
//! REQ, REP and DREQ are retransmitted until answered; RTU, REJ and DREP are resent when what they
//! answer is repeated. A destroyed connection lasts, without events, until the peer is answered.

use core::net::IpAddr;
use core::time::Duration;

use super::mad::Mad;
use super::message::{Dreq, IdsOnly, Message, MessageKind, Mra, Rej, Rep, Req};
use super::types::{Accept, CmEvent, ConnectionId, ListenerId, Parameters, PeerReply, RejectReason, ServiceId};
use super::{MadTransmit, Output};
use crate::qp::Path;
use crate::wire::Transport;
use crate::{Instant, Mtu, Psn, Qpn};

/// Service timeout in an MRA: 69 s, as in the Linux kernel's rdma_cm.
const SERVICE_TIMEOUT: u8 = 24;
/// Upper bound for a 5-bit timeout: 69 s.
const MAX_TIMEOUT: u8 = 24;
/// Upper bound for the interval that a peer gives for retransmissions to it, the default of the
/// Linux kernel's rdma_cm: with 15 of them its state lasts at most 78 s.
const MAX_PEER_INTERVAL: Duration = Duration::from_nanos((4096 << 20) + (4096 << 16));
/// For how long MRAs of a peer can extend the wait for its answer, from the message on.
const MAX_MRA: Duration = Duration::from_secs(300);
/// The target ACK delay of a soft device, as in ibv_query_device(3): 134 ms.
const ACK_DELAY: u8 = 15;

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum State {
    ReqSent,
    ReqReceived,
    RepReceived,
    RepSent,
    Established,
    DreqSent,
    /// Over; packets of it may still be in flight.
    TimeWait,
    SidrSent,
    SidrReceived,
    /// Over, after a reply of ours that may be lost: kept so that it can be resent.
    Lingering,
    Closed,
}

/// Address, GUID and queue pair of a peer: connected at most once (12.9.8.3).
pub(super) type PeerKey = (IpAddr, u64, Qpn);

#[derive(Debug)]
// fields: the state of one connection, used as a whole by its state machine
pub(super) struct Connection {
    pub(super) id: ConnectionId,
    pub(super) peer: IpAddr,
    /// The peer's communication id, 0 while unknown; in SIDR the request's.
    pub(super) remote_id: u32,
    pub(super) state: State,
    /// Made by the peer's request.
    pub(super) passive: bool,
    /// Destroyed by its owner.
    pub(super) released: bool,
    /// Its number among those without an owner.
    pub(super) over: Option<u64>,
    pub(super) service: ServiceId,
    /// The listener, until the owner has answered the request.
    pub(super) listener: Option<ListenerId>,
    pub(super) deadline: Option<Instant>,
    pub(super) parameters: Option<Parameters>,
    pub(super) peer_key: Option<PeerKey>,
    transaction: u64,
    guid: u64,
    qpn: Qpn,
    /// The message to resend, on a timeout or on a duplicate from the peer.
    sent: Option<Box<Mad>>,
    resends_left: u8,
    max_retries: u8,
    interval: Duration,
    /// Until when MRAs of the peer can extend the wait for its answer.
    mra_until: Instant,
}

/// 4.096 µs · 2^t, bounded.
pub(super) fn timeout(code: u8) -> Duration {
    Duration::from_nanos(4096 << code.min(MAX_TIMEOUT))
}

/// The code of a timeout that covers the sum of two.
fn combined_timeout(a: u8, b: u8) -> u8 {
    // If they are far apart, the smaller is lost in the rounding of the larger.
    let (less, more) = if a < b { (a, b) } else { (b, a) };
    (more + u8::from(more - less <= 1)).min(31)
}

impl Connection {
    pub(super) fn new(id: ConnectionId, peer: IpAddr, service: ServiceId, state: State, transaction: u64) -> Self {
        Self {
            id,
            peer,
            remote_id: 0,
            state,
            passive: false,
            released: false,
            over: None,
            service,
            listener: None,
            deadline: None,
            parameters: None,
            peer_key: None,
            transaction,
            guid: 0,
            qpn: Qpn::new(0),
            sent: None,
            resends_left: 0,
            max_retries: 0,
            interval: Duration::ZERO,
            mra_until: Instant::ZERO,
        }
    }

    pub(super) fn set_retry(&mut self, interval: Duration, max_retries: u8) {
        self.interval = interval;
        self.max_retries = max_retries.min(15);
    }

    pub(super) fn set_local_qp(&mut self, guid: u64, qpn: Qpn) {
        self.guid = guid;
        self.qpn = qpn;
    }

    /// Applies a peer's REQ: replies are retransmitted with the timeouts it gives.
    pub(super) fn take_request(&mut self, req: &Req, guid: u64, parameters: Parameters) {
        self.remote_id = req.local_id;
        self.guid = guid;
        self.peer_key = Some((self.peer, req.guid, req.qpn));
        self.parameters = Some(parameters);
        let interval = timeout(req.local_timeout) + timeout(req.primary.ack_timeout);
        self.set_retry(interval.min(MAX_PEER_INTERVAL), req.max_retries);
    }

    fn send_once(&self, message: &Message, out: &mut Output) {
        out.transmit(self.peer, message.to_mad(self.transaction));
    }

    /// Sends a message that is resent when the peer repeats its own.
    fn send_reply(&mut self, message: &Message, out: &mut Output) {
        let mad = message.to_mad(self.transaction);
        out.transmit(self.peer, mad);
        self.sent = Some(Box::new(mad));
        self.resends_left = 0;
        self.deadline = None;
    }

    pub(super) fn send_request(&mut self, now: Instant, message: &Message, out: &mut Output) {
        self.send_reply(message, out);
        self.resends_left = self.max_retries;
        self.deadline = Some(now + self.interval);
        self.mra_until = now + MAX_MRA;
    }

    fn resend(&self, out: &mut Output) {
        if let Some(mad) = &self.sent {
            out.transmit(self.peer, **mad);
        }
    }

    fn ids_only(&self, private_data: &[u8]) -> IdsOnly {
        IdsOnly {
            local_id: self.id.0,
            remote_id: self.remote_id,
            private_data: private_data.to_vec(),
        }
    }

    fn rej_message(&self, message: MessageKind, reason: RejectReason, private_data: &[u8]) -> Message {
        // A timed-out REQ's receiver may have no id yet, and finds it by the GUID (12.6.7.2).
        let info = if reason == RejectReason::TIMEOUT {
            self.guid.to_be_bytes().to_vec()
        } else {
            Vec::new()
        };
        Message::Rej(Rej {
            local_id: self.id.0,
            remote_id: self.remote_id,
            message,
            reason,
            info,
            private_data: private_data.to_vec(),
        })
    }

    fn mra_message(&self, message: MessageKind) -> Message {
        Message::Mra(Mra {
            local_id: self.id.0,
            remote_id: self.remote_id,
            message,
            timeout: SERVICE_TIMEOUT,
        })
    }

    fn push_event(&self, event: CmEvent, out: &mut Output) {
        if !self.released {
            out.events.push_back(event);
        }
    }

    pub(super) fn close(&mut self) {
        self.state = State::Closed;
        self.deadline = None;
        self.resends_left = 0;
        self.sent = None;
    }

    pub(super) fn reply_and_linger(&mut self, now: Instant, message: &Message, out: &mut Output) {
        self.send_reply(message, out);
        self.state = State::Lingering;
        self.deadline = Some(now + self.interval * (u32::from(self.max_retries) + 2));
    }

    fn enter_timewait(&mut self, now: Instant, out: &mut Output) {
        self.state = State::TimeWait;
        self.sent = None;
        self.resends_left = 0;
        let rest = self.parameters.map_or(Duration::ZERO, |set| timeout(set.ack_timeout));
        self.deadline = Some(now + rest);
        self.push_event(CmEvent::Disconnected { id: self.id }, out);
    }

    fn disconnect_request(&mut self, now: Instant, private_data: &[u8], out: &mut Output) {
        let message = Message::Dreq(Dreq {
            local_id: self.id.0,
            remote_id: self.remote_id,
            qpn: self.parameters.map_or(Qpn::new(0), |set| set.dest_qpn),
            private_data: private_data.to_vec(),
        });
        self.state = State::DreqSent;
        self.send_request(now, &message, out);
    }

    // Commands. They return false if the state does not allow them.

    pub(super) fn accept(&mut self, now: Instant, accept: &Accept, out: &mut Output) -> bool {
        let (State::ReqReceived, Some(set)) = (self.state, &mut self.parameters) else {
            return false;
        };
        set.responder_resources = accept.responder_resources;
        set.initiator_depth = accept.initiator_depth;
        let psn = set.rq_psn;
        self.qpn = accept.qpn;
        let message = Message::Rep(Rep {
            local_id: self.id.0,
            remote_id: self.remote_id,
            qkey: 0,
            qpn: accept.qpn,
            psn,
            responder_resources: accept.responder_resources,
            initiator_depth: accept.initiator_depth,
            ack_delay: ACK_DELAY,
            flow_control: accept.flow_control,
            rnr_retry_count: accept.rnr_retry_count,
            srq: accept.srq,
            guid: self.guid,
            ece: accept.ece,
            private_data: accept.private_data.clone(),
        });
        self.state = State::RepSent;
        self.send_request(now, &message, out);
        true
    }

    pub(super) fn reject(&mut self, now: Instant, reason: RejectReason, private_data: &[u8], out: &mut Output) -> bool {
        let kind = match self.state {
            State::ReqReceived => MessageKind::Request,
            State::RepReceived => MessageKind::Reply,
            _ => return false,
        };
        let message = self.rej_message(kind, reason, private_data);
        self.reply_and_linger(now, &message, out);
        true
    }

    pub(super) fn establish(&mut self, private_data: &[u8], out: &mut Output) -> bool {
        if self.state != State::RepReceived {
            return false;
        }
        let message = Message::Rtu(self.ids_only(private_data));
        self.send_reply(&message, out);
        self.state = State::Established;
        true
    }

    /// The queue pair has received before the RTU arrived (12.9.6, communication established).
    pub(super) fn notify(&mut self, out: &mut Output) -> bool {
        match self.state {
            State::RepSent => {
                self.rtu(vec![0; super::private_data_len::RTU], out);
                true
            }
            State::Established => true,
            _ => false,
        }
    }

    pub(super) fn disconnect(&mut self, now: Instant, private_data: &[u8], out: &mut Output) -> bool {
        match self.state {
            State::Established | State::RepSent => self.disconnect_request(now, private_data, out),
            State::DreqSent | State::TimeWait => {}
            _ => return false,
        }
        true
    }

    /// Destroyed by its owner: sends what the peer must still be sent.
    pub(super) fn release(&mut self, now: Instant, out: &mut Output) {
        self.released = true;
        match self.state {
            State::ReqSent => {
                let message = self.rej_message(MessageKind::Request, RejectReason::TIMEOUT, &[]);
                self.send_once(&message, out);
                self.close();
            }
            State::ReqReceived | State::RepReceived => {
                self.reject(now, RejectReason::CONSUMER, &[], out);
            }
            State::RepSent => {
                let message = self.rej_message(MessageKind::Other, RejectReason::CONSUMER, &[]);
                self.reply_and_linger(now, &message, out);
            }
            State::Established => self.disconnect_request(now, &[], out),
            State::DreqSent | State::TimeWait | State::Lingering | State::Closed => {}
            State::SidrSent | State::SidrReceived => self.release_sidr(now, out),
        }
    }

    pub(super) fn handle_timeout(&mut self, now: Instant, out: &mut Output) {
        if self.resends_left > 0 {
            self.resends_left -= 1;
            self.resend(out);
            self.deadline = Some(now + self.interval);
            return;
        }
        self.deadline = None;
        match self.state {
            State::ReqSent | State::RepSent => {
                let kind = if self.state == State::ReqSent {
                    MessageKind::Request
                } else {
                    MessageKind::Reply
                };
                let message = self.rej_message(kind, RejectReason::TIMEOUT, &[]);
                self.send_once(&message, out);
                self.close();
                self.push_event(CmEvent::Unreachable { id: self.id }, out);
            }
            State::SidrSent => {
                self.close();
                self.push_event(CmEvent::Unreachable { id: self.id }, out);
            }
            State::DreqSent => self.enter_timewait(now, out),
            State::TimeWait => {
                self.close();
                self.push_event(CmEvent::TimewaitExit { id: self.id }, out);
            }
            State::Lingering => self.close(),
            State::ReqReceived | State::RepReceived | State::Established | State::SidrReceived | State::Closed => {}
        }
    }

    pub(super) fn duplicate_request(&self, out: &mut Output) {
        match self.state {
            State::ReqReceived => self.send_once(&self.mra_message(MessageKind::Request), out),
            State::RepSent | State::Lingering => self.resend(out),
            _ => {}
        }
    }

    pub(super) fn mra(&mut self, now: Instant, mra: &Mra) {
        let kind = match self.state {
            State::ReqSent => MessageKind::Request,
            State::RepSent => MessageKind::Reply,
            _ => return,
        };
        if mra.message == kind && now < self.mra_until {
            self.deadline = Some((now + timeout(mra.timeout) + self.interval).min(self.mra_until));
        }
    }

    /// The peer's queue pair belongs to another connection: rejects the REP as stale.
    pub(super) fn reject_stale(&mut self, now: Instant, rep: &Rep, out: &mut Output) {
        self.remote_id = rep.local_id;
        let message = self.rej_message(MessageKind::Reply, RejectReason::STALE_CONNECTION, &[]);
        self.reply_and_linger(now, &message, out);
        self.push_event(CmEvent::Unreachable { id: self.id }, out);
    }

    pub(super) fn rep(&mut self, rep: Rep, out: &mut Output) {
        match self.state {
            State::ReqSent => {}
            State::RepReceived => return self.send_once(&self.mra_message(MessageKind::Reply), out),
            // The RTU or REJ was lost.
            State::Established | State::Lingering => return self.resend(out),
            _ => return,
        }
        self.remote_id = rep.local_id;
        self.peer_key = Some((self.peer, rep.guid, rep.qpn));
        self.state = State::RepReceived;
        self.deadline = None;
        self.resends_left = 0;
        if let Some(set) = &mut self.parameters {
            set.dest_qpn = rep.qpn;
            set.sq_psn = rep.psn;
            set.responder_resources = rep.initiator_depth;
            set.initiator_depth = rep.responder_resources;
            set.ack_timeout = combined_timeout(set.ack_timeout, rep.ack_delay);
            set.rnr_retry_count = rep.rnr_retry_count;
        }
        let reply = PeerReply {
            qpn: rep.qpn,
            responder_resources: rep.initiator_depth,
            initiator_depth: rep.responder_resources,
            flow_control: rep.flow_control,
            rnr_retry_count: rep.rnr_retry_count,
            srq: rep.srq,
            ece: rep.ece,
            private_data: rep.private_data,
        };
        self.push_event(
            CmEvent::Reply {
                id: self.id,
                reply: Box::new(reply),
            },
            out,
        );
    }

    pub(super) fn rtu(&mut self, private_data: Vec<u8>, out: &mut Output) {
        if self.state == State::RepSent {
            self.state = State::Established;
            self.deadline = None;
            self.resends_left = 0;
            self.sent = None;
            let id = self.id;
            self.push_event(CmEvent::Established { id, private_data }, out);
        }
    }

    pub(super) fn rej(&mut self, now: Instant, rej: Rej, out: &mut Output) {
        match self.state {
            State::ReqSent | State::ReqReceived | State::RepReceived | State::RepSent | State::SidrSent => {
                self.close();
                let (id, reason) = (self.id, rej.reason);
                let private_data = rej.private_data;
                self.push_event(
                    CmEvent::Rejected {
                        id,
                        reason,
                        private_data,
                    },
                    out,
                );
            }
            State::Established | State::DreqSent => self.enter_timewait(now, out),
            State::TimeWait | State::SidrReceived | State::Lingering | State::Closed => {}
        }
    }

    pub(super) fn dreq(&mut self, now: Instant, dreq: &Dreq, transaction: u64, out: &mut Output) {
        let is_over = matches!(self.state, State::TimeWait | State::Closed);
        let ends = matches!(self.state, State::Established | State::RepSent | State::DreqSent);
        if dreq.qpn != self.qpn || !is_over && !ends {
            return;
        }
        let message = Message::Drep(self.ids_only(&[]));
        out.transmit(self.peer, message.to_mad(transaction));
        if ends {
            self.enter_timewait(now, out);
        }
    }

    pub(super) fn drep(&mut self, now: Instant, out: &mut Output) {
        if self.state == State::DreqSent {
            self.enter_timewait(now, out);
        }
    }

    /// Whether its owner has neither answered nor destroyed it: also after the peer has withdrawn
    /// its request, which the owner may not know yet.
    pub(super) fn waits_for_owner(&self) -> bool {
        match self.state {
            State::ReqReceived | State::SidrReceived => true,
            State::Closed => !self.released,
            _ => false,
        }
    }

    /// Whether it still holds its peer's queue pair.
    pub(super) fn is_live(&self) -> bool {
        matches!(
            self.state,
            State::ReqReceived | State::RepReceived | State::RepSent | State::Established | State::DreqSent
        )
    }

    pub(super) fn peer_gone(&mut self, now: Instant, out: &mut Output) {
        match self.state {
            State::Established | State::DreqSent => self.enter_timewait(now, out),
            State::ReqReceived | State::RepReceived | State::RepSent => {
                self.close();
                self.push_event(CmEvent::Unreachable { id: self.id }, out);
            }
            _ => {}
        }
    }

    /// The peer restarted and reused the queue pair of this connection (12.9.8.3.1).
    pub(super) fn superseded(&mut self, now: Instant, out: &mut Output) {
        match self.state {
            State::Established => self.disconnect_request(now, &[], out),
            State::ReqReceived | State::RepSent => {
                self.close();
                self.push_event(CmEvent::Unreachable { id: self.id }, out);
            }
            _ => {}
        }
    }
}

/// The passive side's parameters by a REQ; the peer is to start with `psn`.
pub(super) fn passive_parameters(
    req: &Req,
    (local, remote): (IpAddr, IpAddr),
    mtu: Mtu,
    transport: Transport,
    psn: Psn,
) -> Parameters {
    Parameters {
        transport,
        path: Path {
            traffic_class: req.primary.traffic_class,
            ..Path::new(local, remote)
        },
        mtu,
        dest_qpn: req.qpn,
        rq_psn: psn,
        sq_psn: req.psn,
        responder_resources: req.initiator_depth,
        initiator_depth: req.responder_resources,
        ack_timeout: req.primary.ack_timeout,
        retry_count: req.retry_count,
        rnr_retry_count: req.rnr_retry_count,
    }
}

impl MadTransmit {
    pub(super) fn new(to: IpAddr, mad: Mad) -> Self {
        Self { to, mad: Box::new(mad) }
    }
}
