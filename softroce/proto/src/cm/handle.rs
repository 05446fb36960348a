//! Dispatch of received messages to connections, and replies to those that match none.

use core::net::IpAddr;

use super::connection::{self, Connection, State};
use super::message::{Apr, Dreq, IdsOnly, Message, MessageKind, Rej, Rep, Req, SidrReq};
use super::sidr;
use super::types::{
    CmEvent, ConnectionId, DEFAULT_MAX_RETRIES, DEFAULT_RESPONSE_TIMEOUT, PeerRequest, RejectReason, ServiceId,
    SidrStatus,
};
use super::{Cm, Mad, RC, RequestKey, UC};
use crate::wire::Transport;
use crate::{Gid, Instant, Mtu};

impl Cm {
    /// Handles a management datagram received on queue pair 1. Its content is not trusted.
    pub fn handle_mad(&mut self, now: Instant, from: IpAddr, mad: &Mad) {
        let from = from.to_canonical();
        let Some((transaction, message)) = Message::parse(mad) else {
            self.dropped += 1;
            return;
        };
        let handled = match message {
            Message::Req(req) => self.req(now, from, transaction, *req),
            Message::SidrReq(req) => self.sidr_req(from, transaction, req),
            Message::Rep(rep) => self.rep(now, from, transaction, rep),
            Message::Dreq(dreq) => self.dreq(now, from, transaction, &dreq),
            Message::Rtu(rtu) => {
                let known = self.find_connection(from, rtu.remote_id, rtu.local_id);
                known.and_then(|id| self.update(id, |connection, out| connection.rtu(rtu.private_data, out)))
            }
            Message::Drep(drep) => {
                let known = self.find_connection(from, drep.remote_id, drep.local_id);
                known.and_then(|id| self.update(id, |connection, out| connection.drep(now, out)))
            }
            Message::Mra(mra) => {
                let known = self.find_connection(from, mra.remote_id, mra.local_id);
                known.and_then(|id| self.update(id, |connection, _| connection.mra(now, &mra)))
            }
            Message::Rej(rej) => {
                let known = self.find_connection(from, rej.remote_id, rej.local_id);
                known.and_then(|id| self.update(id, |connection, out| connection.rej(now, rej, out)))
            }
            Message::SidrRep(rep) => {
                let known = self.find_connection(from, rep.request_id, 0);
                known.and_then(|id| self.update(id, |exchange, out| exchange.sidr_rep(rep, out)))
            }
            Message::Lap(lap) => {
                let known = self.find_connection(from, lap.remote_id, lap.local_id);
                known.map(|_| {
                    let apr = Message::Apr(Apr {
                        local_id: lap.remote_id,
                        remote_id: lap.local_id,
                    });
                    self.out.transmit(from, apr.to_mad(transaction));
                })
            }
            Message::Apr(_) => None,
        };
        self.dropped += u64::from(handled.is_none());
    }

    /// The connection with the local id `ours` and this peer, whose id for it is `theirs` if known.
    fn find_connection(&self, from: IpAddr, ours: u32, theirs: u32) -> Option<u32> {
        let connection = self.connections.get(&ours)?;
        let same = connection.remote_id == 0 || connection.remote_id == theirs;
        (connection.peer == from && same).then_some(ours)
    }

    fn send_rej(
        &mut self,
        to: IpAddr,
        transaction: u64,
        (kind, ours, theirs): (MessageKind, u32, u32),
        reason: RejectReason,
    ) -> Option<()> {
        let rej = Message::Rej(Rej {
            local_id: ours,
            remote_id: theirs,
            message: kind,
            reason,
            info: Vec::new(),
            private_data: Vec::new(),
        });
        self.out.transmit(to, rej.to_mad(transaction));
        Some(())
    }

    fn req(&mut self, now: Instant, from: IpAddr, transaction: u64, req: Req) -> Option<()> {
        let key = RequestKey {
            from,
            id: req.local_id,
            sidr: false,
        };
        if let Some(&id) = self.requests.get(&key) {
            return self.update(id, |connection, out| connection.duplicate_request(out));
        }
        let target = (MessageKind::Request, 0, req.local_id);
        if req.local_id == 0 {
            // No id, by which later messages would match any connection without one.
            return None;
        }
        if req.primary.local_gid != Gid::from(from) {
            // A request for another address than its sender's could flood a third party.
            return None;
        }
        let transport = match req.transport {
            RC => Some(Transport::Rc),
            UC => Some(Transport::Uc),
            _ => None,
        };
        let mtu = Mtu::from_code(u32::from(req.mtu)).filter(|&mtu| mtu <= self.config.mtu);
        let stale = self.peers.get(&(from, req.guid, req.qpn)).copied();
        let known = self.listeners.contains_key(&req.service);
        let (transport, mtu) = match (transport, mtu) {
            _ if !known => return self.send_rej(from, transaction, target, RejectReason::INVALID_SERVICE_ID),
            _ if req.primary.remote_gid != Gid::from(self.config.address) => {
                return self.send_rej(from, transaction, target, RejectReason::INVALID_GID);
            }
            (None, _) => return self.send_rej(from, transaction, target, RejectReason::INVALID_TRANSPORT),
            (_, None) => return self.send_rej(from, transaction, target, RejectReason::INVALID_MTU),
            (Some(transport), Some(mtu)) => (transport, mtu),
        };
        if let Some(stale) = stale {
            self.update(stale, |connection, out| connection.superseded(now, out));
            return self.send_rej(from, transaction, target, RejectReason::STALE_CONNECTION);
        }
        let mut connection = self.new_passive(key, req.service, State::ReqReceived, transaction)?;
        let parameters = connection::passive_parameters(&req, (self.config.address, from), mtu, transport, self.psn());
        connection.take_request(&req, self.config.guid, parameters);
        let request = PeerRequest {
            peer: from,
            service: req.service,
            qpn: req.qpn,
            transport,
            responder_resources: req.initiator_depth,
            initiator_depth: req.responder_resources,
            flow_control: req.flow_control,
            retry_count: req.retry_count,
            rnr_retry_count: req.rnr_retry_count,
            srq: req.srq,
            ece: req.ece,
            private_data: req.private_data,
        };
        self.out.events.push_back(CmEvent::Request {
            listener: connection.listener?,
            id: connection.id,
            request: Box::new(request),
        });
        self.insert(connection);
        Some(())
    }

    /// A connection for a received request; `None` if the backlog is full: the peer retransmits.
    fn new_passive(
        &mut self,
        key: RequestKey,
        service: ServiceId,
        state: State,
        transaction: u64,
    ) -> Option<Connection> {
        if !self.listeners.get(&service)?.has_room_for(key.from) {
            return None;
        }
        let id: ConnectionId = self.new_id(true).ok()?;
        let listener = self.listeners.get_mut(&service)?;
        listener.add(key.from);
        let listener = listener.id;
        let mut connection = Connection::new(id, key.from, service, state, transaction);
        connection.passive = true;
        connection.remote_id = key.id;
        connection.listener = Some(listener);
        self.requests.insert(key, id.0);
        Some(connection)
    }

    fn rep(&mut self, now: Instant, from: IpAddr, transaction: u64, rep: Rep) -> Option<()> {
        let Some(id) = self.find_connection(from, rep.remote_id, rep.local_id) else {
            let target = (MessageKind::Reply, rep.remote_id, rep.local_id);
            return self.send_rej(from, transaction, target, RejectReason::INVALID_COMMUNICATION_ID);
        };
        let other = self.peers.get(&(from, rep.guid, rep.qpn)).copied();
        let stale = other.is_some_and(|other| other != id);
        self.update(id, |connection, out| {
            if stale && connection.state == State::ReqSent {
                connection.reject_stale(now, &rep, out);
            } else {
                connection.rep(rep, out);
            }
        })
    }

    fn dreq(&mut self, now: Instant, from: IpAddr, transaction: u64, dreq: &Dreq) -> Option<()> {
        if let Some(id) = self.find_connection(from, dreq.remote_id, dreq.local_id) {
            return self.update(id, |connection, out| connection.dreq(now, dreq, transaction, out));
        }
        // Unknown connection: it is already closed here, so the peer may close it too.
        let drep = Message::Drep(IdsOnly {
            local_id: dreq.remote_id,
            remote_id: dreq.local_id,
            private_data: Vec::new(),
        });
        self.out.transmit(from, drep.to_mad(transaction));
        Some(())
    }

    fn sidr_req(&mut self, from: IpAddr, transaction: u64, req: SidrReq) -> Option<()> {
        let key = RequestKey {
            from,
            id: req.request_id,
            sidr: true,
        };
        if let Some(&id) = self.requests.get(&key) {
            return self.update(id, |exchange, out| exchange.duplicate_request(out));
        }
        if !self.listeners.contains_key(&req.service) {
            let refusal = sidr::refusal_message(&req, SidrStatus::UNSUPPORTED);
            self.out.transmit(from, refusal.to_mad(transaction));
            return Some(());
        }
        let mut exchange = self.new_passive(key, req.service, State::SidrReceived, transaction)?;
        exchange.set_retry(connection::timeout(DEFAULT_RESPONSE_TIMEOUT), DEFAULT_MAX_RETRIES);
        self.out.events.push_back(CmEvent::SidrRequest {
            listener: exchange.listener?,
            id: exchange.id,
            peer: from,
            service: req.service,
            private_data: req.private_data,
        });
        self.insert(exchange);
        Some(())
    }
}
