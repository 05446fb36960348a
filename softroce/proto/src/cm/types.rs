//! Public types of the connection manager: command arguments, events, reject reasons.

use core::fmt;
use core::net::IpAddr;

use crate::qp::Path;
use crate::wire::Transport;
use crate::{Mtu, NumberKey, Psn, Qpn};

/// Service id (IBTA vol 1, 12.7); [`PortSpace`](super::PortSpace) maps ports to service ids.
#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Debug)]
pub struct ServiceId(pub u64);

/// Communication id of a connection or SIDR exchange (IBTA vol 1, 12.7), never 0.
#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct ConnectionId(pub(super) u32);

impl ConnectionId {
    /// The id on the wire.
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

/// Configuration of a connection manager.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct CmConfig {
    /// The device's address: the source of its paths.
    pub address: IpAddr,
    /// The GUID of the device.
    pub guid: u64,
    /// The port's MTU: the maximum path MTU.
    pub mtu: Mtu,
    /// The upper 10 bits of every communication id: the number of this process at the address.
    pub slot: u16,
    /// Determines communication ids, transactions and PSNs: a [random](NumberKey::random) one, so
    /// that peers cannot predict them and a restarted process does not reuse the old ones.
    pub key: NumberKey,
}

/// Enhanced connection establishment: vendor options that a REQ offers and its REP accepts, passed
/// on as they are (ibv_set_ece(3)). The default is none.
#[derive(Clone, Copy, PartialEq, Eq, Default, Debug)]
pub struct Ece {
    /// The vendor's OUI, 24 bits; 0 is none.
    pub vendor_id: u32,
    /// Options of the vendor.
    pub options: u32,
}

/// A request for a connection.
#[derive(Clone, PartialEq, Eq, Debug)]
// fields: those of struct rdma_conn_param and the path
pub struct ConnectRequest {
    /// The peer.
    pub peer: IpAddr,
    /// The service id.
    pub service: ServiceId,
    /// Local queue pair.
    pub qpn: Qpn,
    /// The peer's starting PSN (IBTA vol 1, 12.7), which the local queue pair expects.
    pub psn: Psn,
    /// RC or UC.
    pub transport: Transport,
    /// Maximum READs and atomics accepted from the peer at a time.
    pub responder_resources: u8,
    /// Maximum READs and atomics outstanding at the peer.
    pub initiator_depth: u8,
    /// End-to-end flow control.
    pub flow_control: bool,
    /// Transport retry count of both ends, 0 to 7.
    pub retry_count: u8,
    /// The peer's RNR retry count; 7 is infinite.
    pub rnr_retry_count: u8,
    /// The local queue pair has a shared receive queue.
    pub srq: bool,
    /// The path MTU.
    pub mtu: Mtu,
    /// The local ACK timeout of the peer's queue pair: 4.096 µs · 2^t.
    pub ack_timeout: u8,
    /// IPv4 TOS or IPv6 traffic class.
    pub traffic_class: u8,
    /// TTL or hop limit.
    pub hop_limit: u8,
    /// CM response timeout of both ends: 4.096 µs · 2^t, plus the packet lifetime.
    pub response_timeout: u8,
    /// Maximum CM retries, 0 to 15.
    pub max_retries: u8,
    /// Vendor options.
    pub ece: Ece,
    /// At most [`private_data_len::REQ`](super::private_data_len::REQ) bytes for the peer.
    pub private_data: Vec<u8>,
}

impl ConnectRequest {
    /// A request for a reliable connection with defaults: sent every second, sixteen times in all.
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
            ece: Ece::default(),
            private_data: Vec::new(),
        }
    }
}

/// 268 ms.
const DEFAULT_ACK_TIMEOUT: u8 = 16;
/// 1.07 s.
pub(super) const DEFAULT_RESPONSE_TIMEOUT: u8 = 18;
pub(super) const DEFAULT_MAX_RETRIES: u8 = 15;

/// Parameters of a REP. The manager chooses the peer's starting PSN.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Accept {
    /// Local queue pair.
    pub qpn: Qpn,
    /// Maximum READs and atomics accepted from the peer at a time.
    pub responder_resources: u8,
    /// Maximum READs and atomics outstanding at the peer.
    pub initiator_depth: u8,
    /// End-to-end flow control.
    pub flow_control: bool,
    /// The peer's RNR retry count; 7 is infinite.
    pub rnr_retry_count: u8,
    /// The local queue pair has a shared receive queue.
    pub srq: bool,
    /// Vendor options.
    pub ece: Ece,
    /// At most [`private_data_len::REP`](super::private_data_len::REP) bytes for the peer.
    pub private_data: Vec<u8>,
}

/// A request to resolve a datagram service (SIDR_REQ).
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct SidrRequest {
    /// The peer.
    pub peer: IpAddr,
    /// The service id.
    pub service: ServiceId,
    /// As [`ConnectRequest::response_timeout`].
    pub response_timeout: u8,
    /// Maximum CM retries, 0 to 15.
    pub max_retries: u8,
    /// At most [`SIDR_REQ`](super::private_data_len::SIDR_REQ) bytes for the peer.
    pub private_data: Vec<u8>,
}

impl SidrRequest {
    /// A request with default timeouts.
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

/// The reply to a SIDR_REQ.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct SidrReply {
    /// The status.
    pub status: SidrStatus,
    /// The queue pair of the service; like the following fields, valid on success only.
    pub qpn: Qpn,
    /// Its Q_Key.
    pub qkey: u32,
    /// At most [`SIDR_REP`](super::private_data_len::SIDR_REP) bytes for the peer.
    pub private_data: Vec<u8>,
}

/// Status of a SIDR_REP (IBTA vol 1, 12.11.2).
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub struct SidrStatus(pub u8);

impl SidrStatus {
    /// Success.
    pub const SUCCESS: Self = Self(0);
    /// Service id not supported.
    pub const UNSUPPORTED: Self = Self(1);
    /// Rejected by the consumer.
    pub const REJECTED: Self = Self(2);
    /// No queue pair available.
    // public: a code of the standard.
    pub const NO_QP: Self = Self(3);
}

/// Why a connection was rejected (IBTA vol 1, 12.6.7.2).
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub struct RejectReason(pub u16);

impl RejectReason {
    /// No resources available.
    // public: a code of the standard.
    pub const NO_RESOURCES: Self = Self(3);
    /// Timeout: a reply was not received in time.
    pub const TIMEOUT: Self = Self(4);
    pub(crate) const INVALID_COMMUNICATION_ID: Self = Self(6);
    /// Invalid service id: no listener.
    pub const INVALID_SERVICE_ID: Self = Self(8);
    /// Invalid transport service type: neither RC nor UC.
    pub(crate) const INVALID_TRANSPORT: Self = Self(9);
    /// Stale connection: the queue pair is already connected.
    pub const STALE_CONNECTION: Self = Self(10);
    /// Invalid GID: not an address of the receiver.
    pub(crate) const INVALID_GID: Self = Self(12);
    /// Invalid path MTU: larger than the port's.
    pub const INVALID_MTU: Self = Self(26);
    /// Rejected by the consumer.
    pub const CONSUMER: Self = Self(28);
    /// Vendor option not supported.
    pub const VENDOR_OPTION: Self = Self(35);
}

/// A received REQ; `responder_resources` bounds the peer's outstanding READs and atomics here.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct PeerRequest {
    /// The peer.
    pub peer: IpAddr,
    /// The service id.
    pub service: ServiceId,
    /// The peer's queue pair.
    pub qpn: Qpn,
    /// RC or UC.
    pub transport: Transport,
    /// READs and atomics that the peer wants to have outstanding here.
    pub responder_resources: u8,
    /// READs and atomics that the peer accepts.
    pub initiator_depth: u8,
    /// End-to-end flow control.
    pub flow_control: bool,
    /// Transport retry count of both ends.
    pub retry_count: u8,
    /// The local RNR retry count that the peer requires.
    pub rnr_retry_count: u8,
    /// The peer's queue pair has a shared receive queue.
    pub srq: bool,
    /// Vendor options.
    pub ece: Ece,
    /// Private data: always [`REQ`](super::private_data_len::REQ) bytes, zero-padded.
    pub private_data: Vec<u8>,
}

/// A received REP.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct PeerReply {
    /// The peer's queue pair.
    pub qpn: Qpn,
    /// READs and atomics that the peer wants to have outstanding here.
    pub responder_resources: u8,
    /// READs and atomics that the peer accepts.
    pub initiator_depth: u8,
    /// End-to-end flow control.
    pub flow_control: bool,
    /// The local RNR retry count that the peer requires.
    pub rnr_retry_count: u8,
    /// The peer's queue pair has a shared receive queue.
    pub srq: bool,
    /// Vendor options.
    pub ece: Ece,
    /// Private data: always [`private_data_len::REP`](super::private_data_len::REP) bytes.
    pub private_data: Vec<u8>,
}

/// An event. `Rejected`, `Unreachable` and `TimewaitExit` are the last of a connection; its id is
/// valid until [`Cm::destroy`](super::Cm::destroy).
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum CmEvent {
    /// A listener received a REQ: accept, reject or destroy it.
    Request {
        /// The listener.
        listener: ListenerId,
        /// The new connection.
        id: ConnectionId,
        /// The request.
        request: Box<PeerRequest>,
    },
    /// REP received: connect the queue pair, then [`establish`](super::Cm::establish), or reject.
    Reply {
        /// The connection.
        id: ConnectionId,
        /// The reply.
        reply: Box<PeerReply>,
    },
    /// The RTU was received (or [`Cm::notify`](super::Cm::notify) called).
    Established {
        /// The connection.
        id: ConnectionId,
        /// Private data: always [`private_data_len::RTU`](super::private_data_len::RTU) bytes.
        private_data: Vec<u8>,
    },
    /// A REJ was received.
    Rejected {
        /// The connection.
        id: ConnectionId,
        /// The reason.
        reason: RejectReason,
        /// Private data: always [`private_data_len::REJ`](super::private_data_len::REJ) bytes.
        private_data: Vec<u8>,
    },
    /// No reply after all retries.
    Unreachable {
        /// The connection.
        id: ConnectionId,
    },
    /// The connection was disconnected by either side.
    Disconnected {
        /// The connection.
        id: ConnectionId,
    },
    /// The TimeWait state ended: no packet of the connection can be in flight any more.
    TimewaitExit {
        /// The connection.
        id: ConnectionId,
    },
    /// A listener received a SIDR_REQ: answer or destroy it.
    SidrRequest {
        /// The listener.
        listener: ListenerId,
        /// The exchange.
        id: ConnectionId,
        /// The peer.
        peer: IpAddr,
        /// The service id.
        service: ServiceId,
        /// Private data: always [`SIDR_REQ`](super::private_data_len::SIDR_REQ) bytes.
        private_data: Vec<u8>,
    },
    /// The SIDR_REP was received.
    SidrReply {
        /// The exchange, which ends with it.
        id: ConnectionId,
        /// Its private data is always [`SIDR_REP`](super::private_data_len::SIDR_REP) bytes.
        reply: Box<SidrReply>,
    },
}

impl CmEvent {
    /// The connection or exchange of the event.
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

/// Attributes for connecting a queue pair, INIT → RTR → RTS (ibv_modify_qp(3)).
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Parameters {
    /// RC or UC.
    pub transport: Transport,
    /// The path.
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

/// Why a command was refused; nothing has changed then.
#[derive(Clone, Copy, PartialEq, Eq, Debug, thiserror::Error)]
pub enum CmError {
    /// No such connection or listener (`EINVAL`).
    #[error("no such connection or listener")]
    Unknown,
    /// The connection is in a state that does not allow it (`EINVAL`).
    #[error("the connection is in a state that does not allow it")]
    State,
    /// Too much private data (`EINVAL`).
    #[error("{len} bytes of private data, of which at most {max} fit")]
    PrivateData {
        /// Bytes given.
        len: usize,
        /// Maximum.
        max: usize,
    },
    /// Neither RC nor UC (`EINVAL`).
    #[error("only RC and UC queue pairs are connected")]
    Transport,
    /// The service already has a listener (`EADDRINUSE`).
    #[error("the service already has a listener")]
    InUse,
    /// The connection table is full (`ENOMEM`).
    #[error("there are too many connections")]
    Exhausted,
}
