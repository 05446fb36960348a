//! Communication management (CM): connects two queue pairs by address and service id, and resolves
//! datagram services (SIDR) (IBTA vol 1, chapter 12, annex A11). Compatible with the Linux kernel's
//! rdma_cm over RoCEv2: no subnet administrator, a path is two addresses.
//!
//! [`Cm`] is sans-IO and independent of the engine; its owner passes datagrams to and from queue
//! pair 1 ([`Endpoint::send_mad`](crate::Endpoint::send_mad),
//! [`Endpoint::poll_mad`](crate::Endpoint::poll_mad)).
//!
//! - [`mad`], [`IpHeader`]: the headers; `message` and `path`: the messages of the class;
//! - `connection` and `sidr`: state machines; `handle`: dispatch of messages.
//!
//! The upper bits of a communication id are the number (`slot`) of its process, as many may share
//! an address; [`route()`] resolves which one a message is for.

mod budget;
mod connection;
mod handle;
mod ip;
pub mod mad;
mod message;
mod path;
mod route;
mod sidr;
mod types;

use core::net::IpAddr;
use std::collections::{BTreeSet, HashMap, VecDeque};

use budget::Budget;
use connection::{Connection, PeerKey, State};
use message::{Message, Req};
use path::{PERMISSIVE_LID, PathRecord};

pub use ip::{IpHeader, PortSpace};
pub use mad::{MAD_LEN, Mad};
pub use message::private_data_len;
pub use route::{Route, route};
pub use types::{
    Accept, CmConfig, CmError, CmEvent, ConnectRequest, ConnectionId, Ece, ListenerId, Parameters, PeerReply,
    PeerRequest, RejectReason, ServiceId, SidrReply, SidrRequest, SidrStatus,
};

use crate::qp::Path;
use crate::random::Purpose;
use crate::wire::{DEFAULT_PKEY, Transport};
use crate::{Gid, Instant, Mtu, Psn, Qpn};

/// Maximum number of requests that wait for their listener's owner.
pub const MAX_BACKLOG: usize = 1024;

/// Bits of a communication id below the slot.
const ID_BITS: u32 = 22;

/// Maximum number of datagrams to be sent: more are dropped.
const MAX_TRANSMITS: usize = 4096;

/// The rate code of 10 Gb/s, given for every path (IBTA vol 1, 7.11); unused under RoCEv2.
const RATE: u8 = 3;

/// Transport codes in a REQ (IBTA vol 1, 12.7).
const RC: u8 = 0;
const UC: u8 = 1;

/// A management datagram to send, from queue pair 1 to queue pair 1.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct MadTransmit {
    /// Destination.
    pub to: IpAddr,
    /// The datagram.
    pub mad: Box<Mad>,
}

#[derive(Debug, Default)]
struct Output {
    transmits: VecDeque<MadTransmit>,
    events: VecDeque<CmEvent>,
}

impl Output {
    fn transmit(&mut self, to: IpAddr, mad: Mad) {
        if self.transmits.len() < MAX_TRANSMITS {
            self.transmits.push_back(MadTransmit::new(to, mad));
        }
    }
}

#[derive(Debug)]
struct Listener {
    id: ListenerId,
    backlog: usize,
    /// Requests that the owner has neither answered nor destroyed.
    waiting: usize,
    /// The same, by peer.
    waiting_of: HashMap<IpAddr, usize>,
}

impl Listener {
    /// Whether a peer's request can wait. A quarter of a backlog is not for a single peer.
    fn has_room_for(&self, peer: IpAddr) -> bool {
        let most = self.backlog - self.backlog / 4;
        self.waiting < self.backlog && self.waiting_of.get(&peer).is_none_or(|waiting| *waiting < most)
    }

    fn add(&mut self, peer: IpAddr) {
        self.waiting += 1;
        *self.waiting_of.entry(peer).or_default() += 1;
    }

    fn remove(&mut self, peer: IpAddr) {
        self.waiting -= 1;
        if let Some(waiting) = self.waiting_of.get_mut(&peer) {
            *waiting -= 1;
            if *waiting == 0 {
                self.waiting_of.remove(&peer);
            }
        }
    }
}

/// Connections made here, and those that peers made.
#[derive(Debug, Default)]
struct Budgets {
    active: Budget,
    passive: Budget,
}

impl Budgets {
    fn of(&mut self, passive: bool) -> &mut Budget {
        if passive { &mut self.passive } else { &mut self.active }
    }
}

/// A REQ or SIDR_REQ, as numbered by its sender.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
struct RequestKey {
    from: IpAddr,
    id: u32,
    sidr: bool,
}

/// The connection manager of one process at one address.
///
/// Order of calls as for [`Endpoint`](crate::Endpoint): after any command and any of `handle_*`,
/// drain `poll_event` and `poll_transmit`, then call `poll_timeout` for the next deadline of
/// `handle_timeout`.
#[derive(Debug)]
pub struct Cm {
    config: CmConfig,
    connections: HashMap<u32, Connection>,
    listeners: HashMap<ServiceId, Listener>,
    requests: HashMap<RequestKey, u32>,
    peers: HashMap<PeerKey, u32>,
    timers: BTreeSet<(Instant, u32)>,
    budgets: Budgets,
    out: Output,
    next_id: u32,
    next_listener: u64,
    next_transaction: u64,
    dropped: u64,
}

impl Cm {
    /// The largest path MTU that a peer may request from now on.
    pub fn set_mtu(&mut self, mtu: Mtu) {
        self.config.mtu = mtu;
    }

    /// A manager without connections.
    pub fn new(config: CmConfig) -> Self {
        Self {
            config,
            connections: HashMap::new(),
            listeners: HashMap::new(),
            requests: HashMap::new(),
            peers: HashMap::new(),
            timers: BTreeSet::new(),
            budgets: Budgets::default(),
            out: Output::default(),
            next_id: 0,
            next_listener: 0,
            next_transaction: 0,
            dropped: 0,
        }
    }

    /// Listens for requests to a service. At most `backlog` of them (1 to [`MAX_BACKLOG`]) wait to
    /// be answered; more are dropped, and retransmitted by the peer.
    ///
    /// # Errors
    /// When the service already has a listener.
    pub fn listen(&mut self, service: ServiceId, backlog: usize) -> Result<ListenerId, CmError> {
        if self.listeners.contains_key(&service) {
            return Err(CmError::InUse);
        }
        let id = ListenerId(self.next_listener);
        self.next_listener += 1;
        let listener = Listener {
            id,
            backlog: backlog.clamp(1, MAX_BACKLOG),
            waiting: 0,
            waiting_of: HashMap::new(),
        };
        self.listeners.insert(service, listener);
        Ok(id)
    }

    /// Destroys a listener. Requests already reported stay.
    ///
    /// # Errors
    /// When it does not exist.
    pub fn unlisten(&mut self, listener: ListenerId) -> Result<(), CmError> {
        let before = self.listeners.len();
        self.listeners.retain(|_, other| other.id != listener);
        if self.listeners.len() == before {
            return Err(CmError::Unknown);
        }
        Ok(())
    }

    /// Sends a REQ. Reports [`CmEvent::Reply`], [`CmEvent::Rejected`] or [`CmEvent::Unreachable`].
    ///
    /// # Errors
    /// When the request is invalid, or there are too many connections.
    pub fn connect(&mut self, now: Instant, request: &ConnectRequest) -> Result<ConnectionId, CmError> {
        check_private_data(&request.private_data, private_data_len::REQ)?;
        let transport = match request.transport {
            Transport::Rc => RC,
            Transport::Uc => UC,
            Transport::Ud | Transport::Xrc => return Err(CmError::Transport),
        };
        let peer = request.peer.to_canonical();
        let id = self.new_id(false)?;
        let mut connection = Connection::new(id, peer, request.service, State::ReqSent, self.transaction());
        connection.set_local_qp(self.config.guid, request.qpn);
        connection.parameters = Some(Parameters {
            transport: request.transport,
            path: Path {
                traffic_class: request.traffic_class,
                hop_limit: request.hop_limit,
                ..Path::new(self.config.address, peer)
            },
            mtu: request.mtu,
            dest_qpn: Qpn::new(0),
            rq_psn: request.psn,
            sq_psn: request.psn,
            responder_resources: request.responder_resources,
            initiator_depth: request.initiator_depth,
            ack_timeout: request.ack_timeout,
            retry_count: request.retry_count,
            rnr_retry_count: request.rnr_retry_count,
        });
        let interval = connection::timeout(request.response_timeout) + connection::timeout(request.ack_timeout);
        connection.set_retry(interval, request.max_retries);
        let message = Message::Req(Box::new(Req {
            local_id: id.0,
            service: request.service,
            guid: self.config.guid,
            qkey: 0,
            qpn: request.qpn,
            responder_resources: request.responder_resources,
            initiator_depth: request.initiator_depth,
            remote_timeout: request.response_timeout & 0x1f,
            local_timeout: request.response_timeout & 0x1f,
            transport,
            flow_control: request.flow_control,
            psn: request.psn,
            retry_count: request.retry_count & 7,
            rnr_retry_count: request.rnr_retry_count & 7,
            pkey: DEFAULT_PKEY,
            mtu: request.mtu as u8,
            max_retries: request.max_retries.min(15),
            srq: request.srq,
            extended_transport: 0,
            primary: PathRecord {
                local_lid: PERMISSIVE_LID,
                remote_lid: PERMISSIVE_LID,
                local_gid: Gid::from(self.config.address),
                remote_gid: Gid::from(peer),
                flow_label: 0,
                rate: RATE,
                traffic_class: request.traffic_class,
                hop_limit: request.hop_limit,
                service_level: 0,
                subnet_local: false,
                ack_timeout: request.ack_timeout & 0x1f,
            },
            ece: request.ece,
            private_data: request.private_data.clone(),
        }));
        connection.send_request(now, &message, &mut self.out);
        self.insert(connection);
        Ok(id)
    }

    /// Accepts a request: sends a REP. The result is [`CmEvent::Established`],
    /// [`CmEvent::Rejected`], [`CmEvent::Unreachable`] or [`CmEvent::Disconnected`]. The queue pair
    /// must be in RTR before.
    ///
    /// # Errors
    /// When the connection is in another state, or the private data does not fit.
    pub fn accept(&mut self, now: Instant, id: ConnectionId, accept: &Accept) -> Result<(), CmError> {
        check_private_data(&accept.private_data, private_data_len::REP)?;
        self.command(id, |connection, out| connection.accept(now, accept, out))
    }

    /// Rejects a REQ or a REP, which ends the connection.
    ///
    /// # Errors
    /// When there is nothing to reject, or the private data does not fit.
    pub fn reject(
        &mut self,
        now: Instant,
        id: ConnectionId,
        reason: RejectReason,
        private_data: &[u8],
    ) -> Result<(), CmError> {
        check_private_data(private_data, private_data_len::REJ)?;
        self.command(id, |connection, out| connection.reject(now, reason, private_data, out))
    }

    /// Acknowledges the REP: sends the RTU.
    ///
    /// # Errors
    /// When there was no REP, or the private data does not fit.
    pub fn establish(&mut self, id: ConnectionId, private_data: &[u8]) -> Result<(), CmError> {
        check_private_data(private_data, private_data_len::RTU)?;
        self.command(id, |connection, out| connection.establish(private_data, out))
    }

    /// IBV_EVENT_COMM_EST: the connection is established, though no RTU arrived (rdma_notify(3)).
    ///
    /// # Errors
    /// When it was not accepted, or is closed.
    pub fn notify(&mut self, id: ConnectionId) -> Result<(), CmError> {
        self.command(id, Connection::notify)
    }

    /// Sends a DREQ, if connected; [`CmEvent::Disconnected`] follows the DREP or all retries.
    ///
    /// # Errors
    /// When it was never connected, or the private data does not fit.
    pub fn disconnect(&mut self, now: Instant, id: ConnectionId, private_data: &[u8]) -> Result<(), CmError> {
        check_private_data(private_data, private_data_len::DREQ)?;
        self.command(id, |connection, out| connection.disconnect(now, private_data, out))
    }

    /// Destroys a connection or exchange: its id becomes invalid and no more events are reported.
    /// The peer is notified: a request is rejected, a connection disconnected.
    ///
    /// # Errors
    /// When it does not exist.
    pub fn destroy(&mut self, now: Instant, id: ConnectionId) -> Result<(), CmError> {
        self.command(id, |connection, out| {
            connection.release(now, out);
            true
        })
    }

    /// Sends a SIDR_REQ. The result is [`CmEvent::SidrReply`] or [`CmEvent::Unreachable`].
    ///
    /// # Errors
    /// When the private data does not fit, or there are too many connections.
    pub fn sidr_request(&mut self, now: Instant, request: &SidrRequest) -> Result<ConnectionId, CmError> {
        check_private_data(&request.private_data, private_data_len::SIDR_REQ)?;
        let id = self.new_id(false)?;
        let peer = request.peer.to_canonical();
        let mut exchange = Connection::new(id, peer, request.service, State::SidrSent, self.transaction());
        exchange.set_retry(connection::timeout(request.response_timeout), request.max_retries);
        exchange.send_sidr_req(now, &request.private_data, &mut self.out);
        self.insert(exchange);
        Ok(id)
    }

    /// Sends the SIDR_REP, which ends the exchange.
    ///
    /// # Errors
    /// When there is nothing to answer, or the private data does not fit.
    pub fn sidr_reply(&mut self, now: Instant, id: ConnectionId, reply: &SidrReply) -> Result<(), CmError> {
        check_private_data(&reply.private_data, private_data_len::SIDR_REP)?;
        self.command(id, |exchange, out| exchange.sidr_reply(now, reply, out))
    }

    /// Handles expired timers at `now`.
    pub fn handle_timeout(&mut self, now: Instant) {
        while let Some(&(due, id)) = self.timers.first()
            && due <= now
        {
            self.update(id, |connection, out| connection.handle_timeout(now, out));
        }
    }

    /// The process at `peer` with this `slot` is gone: ends its connections at once.
    pub fn handle_peer_gone(&mut self, now: Instant, peer: IpAddr, slot: u16) {
        let of_it = |connection: &&Connection| {
            connection.peer == peer.to_canonical()
                && connection.remote_id >> ID_BITS == u32::from(slot)
                && connection.is_live()
        };
        let lost: Vec<u32> = self
            .connections
            .values()
            .filter(of_it)
            .map(|connection| connection.id.0)
            .collect();
        for id in lost {
            self.update(id, |connection, out| connection.peer_gone(now, out));
        }
    }

    /// The next deadline of [`handle_timeout`](Self::handle_timeout).
    pub fn poll_timeout(&self) -> Option<Instant> {
        self.timers.first().map(|(due, _)| *due)
    }

    /// The next datagram to send.
    pub fn poll_transmit(&mut self) -> Option<MadTransmit> {
        self.out.transmits.pop_front()
    }

    /// The next event.
    pub fn poll_event(&mut self) -> Option<CmEvent> {
        self.out.events.pop_front()
    }

    /// The queue pair's parameters, from [`CmEvent::Request`] or [`CmEvent::Reply`] on.
    pub fn parameters(&self, id: ConnectionId) -> Option<Parameters> {
        let connection = self.owned(id)?;
        connection.parameters.filter(|_| connection.state != State::ReqSent)
    }

    /// Number of connections and exchanges, including closed ones that still linger.
    pub fn connections(&self) -> usize {
        self.connections.len()
    }

    /// Number of dropped management datagrams: of another class, or matching no connection.
    pub const fn dropped(&self) -> u64 {
        self.dropped
    }

    fn owned(&self, id: ConnectionId) -> Option<&Connection> {
        self.connections.get(&id.0).filter(|connection| !connection.released)
    }

    fn command(
        &mut self,
        id: ConnectionId,
        run: impl FnOnce(&mut Connection, &mut Output) -> bool,
    ) -> Result<(), CmError> {
        self.owned(id).ok_or(CmError::Unknown)?;
        let done = self.update(id.0, run);
        done.filter(|&done| done).map(drop).ok_or(CmError::State)
    }

    /// Runs `run` on a connection, then updates timers and indexes by its new state.
    fn update<T>(&mut self, id: u32, run: impl FnOnce(&mut Connection, &mut Output) -> T) -> Option<T> {
        let connection = self.connections.get_mut(&id)?;
        let (due, live, key) = (connection.deadline, connection.is_live(), connection.peer_key);
        let result = run(connection, &mut self.out);
        if connection.deadline != due {
            due.map(|due| self.timers.remove(&(due, id)));
            connection.deadline.map(|due| self.timers.insert((due, id)));
        }
        if let Some(listener) = connection.listener
            && !connection.waits_for_owner()
        {
            connection.listener = None;
            if let Some(listener) = self.listeners.get_mut(&connection.service).filter(|l| l.id == listener) {
                listener.remove(connection.peer);
            }
        }
        if live
            && !connection.is_live()
            && let Some(key) = key
            && self.peers.get(&key) == Some(&id)
        {
            self.peers.remove(&key);
        } else if let Some(key) = connection.peer_key.filter(|_| !live && connection.is_live()) {
            self.peers.insert(key, id);
        }
        if connection.released && connection.state == State::Closed {
            self.remove(id);
        } else if connection.released && connection.over.is_none() {
            let budget = self.budgets.of(connection.passive);
            let (number, excess) = budget.lost_owner(connection.peer, id);
            connection.over = Some(number);
            if let Some(excess) = excess {
                self.recycle(excess);
            }
        }
        Some(result)
    }

    /// Ends a connection without an owner.
    fn recycle(&mut self, id: u32) {
        self.update(id, |connection, _| connection.close());
    }

    /// Whether there is room for another connection, for which an old one may have to go.
    fn make_room(&mut self, passive: bool) -> bool {
        let budget = self.budgets.of(passive);
        if budget.is_full()
            && let Some(oldest) = budget.oldest()
        {
            self.recycle(oldest);
        }
        !self.budgets.of(passive).is_full()
    }

    fn insert(&mut self, connection: Connection) {
        let id = connection.id.0;
        if let Some(due) = connection.deadline {
            self.timers.insert((due, id));
        }
        if let Some(key) = connection.peer_key {
            self.peers.insert(key, id);
        }
        self.budgets.of(connection.passive).add();
        self.connections.insert(id, connection);
    }

    fn remove(&mut self, id: u32) {
        let Some(connection) = self.connections.remove(&id) else {
            return;
        };
        self.budgets
            .of(connection.passive)
            .remove(connection.peer, connection.over);
        for sidr in [false, true] {
            let key = RequestKey {
                from: connection.peer,
                id: connection.remote_id,
                sidr,
            };
            if self.requests.get(&key) == Some(&id) {
                self.requests.remove(&key);
            }
        }
    }

    fn new_id(&mut self, passive: bool) -> Result<ConnectionId, CmError> {
        if !self.make_room(passive) {
            return Err(CmError::Exhausted);
        }
        let slot = u32::from(self.config.slot) << ID_BITS;
        loop {
            self.next_id = self.next_id.wrapping_add(1);
            let id = slot | self.config.key.permute(Purpose::CommunicationId, ID_BITS, self.next_id);
            if id != 0 && !self.connections.contains_key(&id) {
                return Ok(ConnectionId(id));
            }
        }
    }

    /// Not predictable from the previous one: late packets of an old connection match no new one.
    fn psn(&self) -> Psn {
        Psn::new(self.config.key.draw(Purpose::Psn, self.next_id.into()) as u32)
    }

    fn transaction(&mut self) -> u64 {
        self.next_transaction = self.next_transaction.wrapping_add(1);
        self.config.key.draw(Purpose::Transaction, self.next_transaction)
    }
}

fn check_private_data(private_data: &[u8], max: usize) -> Result<(), CmError> {
    let len = private_data.len();
    if len > max {
        return Err(CmError::PrivateData { len, max });
    }
    Ok(())
}
