//! What the connection manager is told, and what it tells: commands' arguments, events, reasons.

use core::fmt;
use core::net::IpAddr;

use crate::qp::Path;
use crate::wire::Transport;
use crate::{Mtu, Psn, Qpn};

/// What a listener offers and a request asks for (IBTA vol 1, 12.7). [`PortSpace`](super::PortSpace) makes them of ports.
#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Debug)]
pub struct ServiceId(pub u64);

/// A connection, or an exchange about a datagram service, of one [`Cm`](super::Cm): its communication id (IBTA vol 1, 12.7), never 0.
#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct ConnectionId(pub(super) u32);

impl ConnectionId {
    /// The number, as it is on the wire.
    pub const fn get(self) -> u32 {
        self.0
    }
}

impl fmt::Debug for ConnectionId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "ConnectionId({:#010x})", self.0)
    }
}

/// A listener of one [`Cm`](super::Cm).
#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Debug)]
pub struct ListenerId(pub(super) u64);

/// How a manager behaves.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct CmConfig {
    /// The device's address: where its paths begin.
    pub address: IpAddr,
    /// The GUID of the device.
    pub guid: u64,
    /// The port's MTU: the most that a path may have.
    pub mtu: Mtu,
    /// The upper 10 bits of every communication id: which of the processes at this address it is.
    pub slot: u16,
    /// Chooses the first communication id, so that a restarted process does not take up the old ones.
    pub seed: u64,
}

/// A request for a connection.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Request {
    /// The peer.
    pub peer: IpAddr,
    /// What is asked for.
    pub service: ServiceId,
    /// Our queue pair.
    pub qpn: Qpn,
    /// The PSN that the peer is to begin with (IBTA vol 1, 12.7): ours to receive.
    pub psn: Psn,
    /// RC or UC.
    pub transport: Transport,
    /// READs and atomics that we take from the peer at a time, at most.
    pub responder_resources: u8,
    /// READs and atomics that we have outstanding at the peer, at most.
    pub initiator_depth: u8,
    /// End-to-end flow control.
    pub flow_control: bool,
    /// How often both ends send again, 0 to 7.
    pub retry_count: u8,
    /// How often the peer sends again when we have posted no receive; 7 is for ever.
    pub rnr_retry_count: u8,
    /// Our queue pair has a shared receive queue.
    pub srq: bool,
    /// The path's MTU.
    pub mtu: Mtu,
    /// The local ACK timeout of the peer's queue pair: 4.096 µs · 2^t.
    pub ack_timeout: u8,
    /// IPv4 TOS or IPv6 traffic class.
    pub traffic_class: u8,
    /// TTL or hop limit.
    pub hop_limit: u8,
    /// How long each end waits for the other's next message before it sends its own again: 4.096 µs · 2^t, and as long as a packet takes.
    pub response_timeout: u8,
    /// How often it does, 0 to 15.
    pub max_retries: u8,
    /// At most [`private_data_len::REQ`](super::private_data_len::REQ) bytes for the peer.
    pub private_data: Vec<u8>,
}

impl Request {
    /// A request for a reliable connection, with what is usual for everything else: sent again every second, sixteen times in all.
    pub fn new(peer: IpAddr, service: ServiceId, qpn: Qpn, psn: Psn, mtu: Mtu) -> Self {
        Self {
            peer,
            service,
            qpn,
            psn,
            transport: Transport::Rc,
            responder_resources: 0,
            initiator_depth: 0,
            flow_control: true,
            retry_count: 7,
            rnr_retry_count: 7,
            srq: false,
            mtu,
            ack_timeout: DEFAULT_ACK_TIMEOUT,
            traffic_class: 0,
            hop_limit: 64,
            response_timeout: DEFAULT_RESPONSE_TIMEOUT,
            max_retries: DEFAULT_MAX_RETRIES,
            private_data: Vec::new(),
        }
    }
}

/// 268 ms.
const DEFAULT_ACK_TIMEOUT: u8 = 16;
/// 1.07 s.
pub(super) const DEFAULT_RESPONSE_TIMEOUT: u8 = 18;
pub(super) const DEFAULT_MAX_RETRIES: u8 = 15;

/// How a request is accepted. The PSN that the peer is to begin with is the manager's choice, see [`Parameters::rq_psn`].
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Accept {
    /// Our queue pair.
    pub qpn: Qpn,
    /// READs and atomics that we take from the peer at a time, at most.
    pub responder_resources: u8,
    /// READs and atomics that we have outstanding at the peer, at most.
    pub initiator_depth: u8,
    /// End-to-end flow control.
    pub flow_control: bool,
    /// How often the peer sends again when we have posted no receive; 7 is for ever.
    pub rnr_retry_count: u8,
    /// Our queue pair has a shared receive queue.
    pub srq: bool,
    /// At most [`private_data_len::REP`](super::private_data_len::REP) bytes for the peer.
    pub private_data: Vec<u8>,
}

/// A request for a datagram service.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct SidrRequest {
    /// The peer.
    pub peer: IpAddr,
    /// What is asked for.
    pub service: ServiceId,
    /// As [`Request::response_timeout`].
    pub response_timeout: u8,
    /// How often it is sent again, 0 to 15.
    pub max_retries: u8,
    /// At most [`private_data_len::SIDR_REQ`](super::private_data_len::SIDR_REQ) bytes for the peer.
    pub private_data: Vec<u8>,
}

impl SidrRequest {
    /// A request with the usual timeouts.
    pub fn new(peer: IpAddr, service: ServiceId) -> Self {
        Self {
            peer,
            service,
            response_timeout: DEFAULT_RESPONSE_TIMEOUT,
            max_retries: DEFAULT_MAX_RETRIES,
            private_data: Vec::new(),
        }
    }
}

/// The answer to a request for a datagram service.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct SidrReply {
    /// Whether it is granted.
    pub status: SidrStatus,
    /// The queue pair that offers it; of no meaning unless it is granted, as is what follows.
    pub qpn: Qpn,
    /// Its Q_Key.
    pub qkey: u32,
    /// At most [`private_data_len::SIDR_REP`](super::private_data_len::SIDR_REP) bytes for the peer.
    pub private_data: Vec<u8>,
}

/// Whether a datagram service is granted (IBTA vol 1, 12.11.2).
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub struct SidrStatus(pub u8);

impl SidrStatus {
    /// It is.
    pub const SUCCESS: Self = Self(0);
    /// There is no such service.
    pub const UNSUPPORTED: Self = Self(1);
    /// The consumer has said no.
    pub const REJECTED: Self = Self(2);
    /// There is no queue pair for it.
    pub const NO_QP: Self = Self(3);
}

/// Why a connection was rejected (IBTA vol 1, 12.6.7.2).
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub struct RejectReason(pub u16);

impl RejectReason {
    /// No room for another connection.
    pub const NO_RESOURCES: Self = Self(3);
    /// An answer did not come in time.
    pub const TIMEOUT: Self = Self(4);
    /// There is no such connection.
    pub const INVALID_COMMUNICATION_ID: Self = Self(6);
    /// Nobody listens there.
    pub const INVALID_SERVICE_ID: Self = Self(8);
    /// Another transport than RC and UC.
    pub const INVALID_TRANSPORT: Self = Self(9);
    /// The queue pair is connected already, as far as the peer knows.
    pub const STALE_CONNECTION: Self = Self(10);
    /// The GID asked for is another's.
    pub const INVALID_GID: Self = Self(12);
    /// The path's MTU is more than the port's.
    pub const INVALID_MTU: Self = Self(26);
    /// The consumer has said no.
    pub const CONSUMER: Self = Self(28);
}

/// A request that has arrived. Resources are told from our side: `responder_resources` bounds what the peer wants to have outstanding here.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct PeerRequest {
    /// The peer.
    pub peer: IpAddr,
    /// What it asks for.
    pub service: ServiceId,
    /// Its queue pair.
    pub qpn: Qpn,
    /// RC or UC.
    pub transport: Transport,
    /// READs and atomics that the peer wants to have outstanding here.
    pub responder_resources: u8,
    /// READs and atomics that the peer takes from us.
    pub initiator_depth: u8,
    /// End-to-end flow control.
    pub flow_control: bool,
    /// How often both ends are to send again.
    pub retry_count: u8,
    /// How often we are to send again when the peer has posted no receive.
    pub rnr_retry_count: u8,
    /// The peer's queue pair has a shared receive queue.
    pub srq: bool,
    /// What it says: always [`private_data_len::REQ`](super::private_data_len::REQ) bytes, padded with zeros.
    pub private_data: Vec<u8>,
}

/// The peer has accepted.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct PeerReply {
    /// Its queue pair.
    pub qpn: Qpn,
    /// READs and atomics that the peer wants to have outstanding here.
    pub responder_resources: u8,
    /// READs and atomics that the peer takes from us.
    pub initiator_depth: u8,
    /// End-to-end flow control.
    pub flow_control: bool,
    /// How often we are to send again when the peer has posted no receive.
    pub rnr_retry_count: u8,
    /// The peer's queue pair has a shared receive queue.
    pub srq: bool,
    /// What it says: always [`private_data_len::REP`](super::private_data_len::REP) bytes.
    pub private_data: Vec<u8>,
}

/// What happened. After `Rejected`, `Unreachable` and `TimewaitExit` nothing more happens to a connection; only [`Cm::destroy`](super::Cm::destroy) ends its id.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum CmEvent {
    /// A request for a connection came to a listener: to be accepted, rejected or destroyed.
    Request {
        /// Whose.
        listener: ListenerId,
        /// The connection that may come of it.
        id: ConnectionId,
        /// What it asks for.
        request: Box<PeerRequest>,
    },
    /// The peer has accepted: connect the queue pair, then [`Cm::establish`](super::Cm::establish), or reject.
    Reply {
        /// Which connection.
        id: ConnectionId,
        /// How.
        reply: Box<PeerReply>,
    },
    /// The peer knows that its request was accepted.
    Established {
        /// Which connection.
        id: ConnectionId,
        /// What it says: always [`private_data_len::RTU`](super::private_data_len::RTU) bytes.
        private_data: Vec<u8>,
    },
    /// The peer, or its manager, has said no.
    Rejected {
        /// Which connection.
        id: ConnectionId,
        /// Why.
        reason: RejectReason,
        /// What it says: always [`private_data_len::REJ`](super::private_data_len::REJ) bytes.
        private_data: Vec<u8>,
    },
    /// No answer came, however often it was asked.
    Unreachable {
        /// Which connection.
        id: ConnectionId,
    },
    /// The connection is over, whoever wanted it.
    Disconnected {
        /// Which connection.
        id: ConnectionId,
    },
    /// Nothing of it can be on its way any more.
    TimewaitExit {
        /// Which connection.
        id: ConnectionId,
    },
    /// A request for a datagram service came to a listener: to be answered or destroyed.
    SidrRequest {
        /// Whose.
        listener: ListenerId,
        /// The exchange.
        id: ConnectionId,
        /// The peer.
        peer: IpAddr,
        /// What it asks for.
        service: ServiceId,
        /// What it says: always [`private_data_len::SIDR_REQ`](super::private_data_len::SIDR_REQ) bytes.
        private_data: Vec<u8>,
    },
    /// The answer to our own.
    SidrReply {
        /// The exchange, which is over with it.
        id: ConnectionId,
        /// The answer; its private data are always [`private_data_len::SIDR_REP`](super::private_data_len::SIDR_REP) bytes.
        reply: Box<SidrReply>,
    },
}

impl CmEvent {
    /// Which connection or exchange it is about.
    pub const fn connection(&self) -> ConnectionId {
        match self {
            Self::Request { id, .. }
            | Self::Reply { id, .. }
            | Self::Established { id, .. }
            | Self::Rejected { id, .. }
            | Self::Unreachable { id }
            | Self::Disconnected { id }
            | Self::TimewaitExit { id }
            | Self::SidrRequest { id, .. }
            | Self::SidrReply { id, .. } => *id,
        }
    }
}

/// What a queue pair is to be connected with: the attributes of INIT → RTR and RTR → RTS (ibv_modify_qp(3)).
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Parameters {
    /// RC or UC.
    pub transport: Transport,
    /// Where to.
    pub path: Path,
    /// IBV_QP_PATH_MTU.
    pub mtu: Mtu,
    /// IBV_QP_DEST_QPN.
    pub dest_qpn: Qpn,
    /// IBV_QP_RQ_PSN.
    pub rq_psn: Psn,
    /// IBV_QP_SQ_PSN.
    pub sq_psn: Psn,
    /// IBV_QP_MAX_DEST_RD_ATOMIC.
    pub responder_resources: u8,
    /// IBV_QP_MAX_QP_RD_ATOMIC.
    pub initiator_depth: u8,
    /// IBV_QP_TIMEOUT.
    pub ack_timeout: u8,
    /// IBV_QP_RETRY_CNT.
    pub retry_count: u8,
    /// IBV_QP_RNR_RETRY.
    pub rnr_retry_count: u8,
}

/// Why a command was refused; nothing changed then.
#[derive(Clone, Copy, PartialEq, Eq, Debug, thiserror::Error)]
pub enum CmError {
    /// There is no such connection or listener (`EINVAL`).
    #[error("there is no such connection or listener")]
    Unknown,
    /// The connection is in a state that does not allow it (`EINVAL`).
    #[error("the connection is in a state that does not allow it")]
    State,
    /// More private data than fits (`EINVAL`).
    #[error("{len} bytes of private data, of which at most {max} fit")]
    PrivateData {
        /// How much was given.
        len: usize,
        /// How much fits.
        max: usize,
    },
    /// Another transport than RC and UC (`EINVAL`).
    #[error("only RC and UC queue pairs are connected")]
    Transport,
    /// Somebody listens there already (`EADDRINUSE`).
    #[error("somebody listens at this service already")]
    InUse,
    /// The manager has no room for another connection (`ENOMEM`).
    #[error("there are too many connections")]
    Exhausted,
}
