//! A queue pair's states and attributes (IBTA vol 1, 10.3 and 11.2.5.2; ibv_modify_qp(3)).

use core::net::IpAddr;
use core::time::Duration;

use crate::memory::{PdId, Placement};
use crate::wire::HOP_LIMIT;
use crate::wire::Transport;
use crate::work::{CqId, SrqId, XrcDomain};
use crate::{Mtu, Psn, Qpn};

/// The state of a queue pair, by the codes of `enum ibv_qp_state`.
#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Debug)]
#[repr(u32)]
pub enum State {
    /// Created, nothing set.
    Reset = 0,
    /// Receives may be posted.
    Init = 1,
    /// Ready to receive (RTR).
    Rtr = 2,
    /// Ready to send (RTS).
    Rts = 3,
    /// Send queue drain: requests in flight finish, no request begins.
    Sqd = 4,
    /// UC and UD: a send request failed. Later ones are flushed; receiving continues. RC: ERR.
    Sqe = 5,
    /// Error: every request is flushed.
    Err = 6,
}

/// Creation attributes of a queue pair; all sizes are fixed for its life.
// fields: the attributes of ibv_create_qp_ex(3).
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct QpInit {
    /// Its protection domain.
    pub pd: PdId,
    /// CQ of send requests.
    pub send_cq: CqId,
    /// CQ of receives.
    pub recv_cq: CqId,
    /// Maximum outstanding send requests.
    pub max_send_wr: u32,
    /// Maximum outstanding receive requests.
    pub max_recv_wr: u32,
    /// Maximum SGEs per send request.
    pub max_send_sge: u32,
    /// Maximum SGEs per receive request.
    pub max_recv_sge: u32,
    /// Maximum inline bytes per send request.
    pub max_inline: u32,
    /// Complete every send request, whatever its signaled flag.
    pub signal_all: bool,
    /// Its transport service.
    pub transport: Transport,
    /// Its shared receive queue; `max_recv_wr` and `max_recv_sge` are ignored then.
    pub srq: Option<SrqId>,
    /// Of an XRC target: its domain, whose queues it takes receives from in place of its own; it
    /// sends nothing. An XRC queue pair without one is an initiator: it receives nothing.
    pub xrc_domain: Option<XrcDomain>,
    /// Over UDP, send a pending ACK before requests posted after it, as an adapter does; otherwise
    /// behind them, as both then leave in one GSO run.
    pub ack_before_requests: bool,
}

/// Remote access that the queue pair allows, in addition to the region's rights.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct RemoteAccess {
    /// RDMA READ.
    pub read: bool,
    /// RDMA WRITE.
    pub write: bool,
    /// Atomics.
    pub atomic: bool,
    /// FLUSH, with these placements.
    pub flush: Placement,
}

/// A link (shared memory, to a process of the same host), as numbered by the endpoint's owner.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub struct LinkId(pub u32);

/// How far the packets on a lossless link have got; both counts only grow.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct LinkProgress {
    /// Packets sent on the link, of all queue pairs.
    pub sent: u64,
    /// How many of them the peer's process has taken from it.
    pub taken: u64,
}

/// How an address vector names the two ends, for queries; packets have their addresses.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct GidsUsed {
    /// The source GID's index.
    pub source_index: u8,
    /// The destination GID is the link-local one.
    pub link_local: bool,
}

/// The path to the peer: an address vector under RoCEv2.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Path {
    /// The local address: that of the source GID.
    pub local: IpAddr,
    /// The peer's address: that of the destination GID.
    pub remote: IpAddr,
    /// IPv4 TOS or IPv6 traffic class.
    pub traffic_class: u8,
    /// TTL or hop limit.
    pub hop_limit: u8,
    /// The flow label of the address vector. Unused: packets leave by one UDP socket, and Linux may
    /// want a lease (`IPV6_FLOWLABEL_MGR`) of each label.
    pub flow_label: u32,
    /// The lossless link that packets take instead of UDP, chosen by the owner at both ends.
    pub link: Option<LinkId>,
    /// The GIDs of the address vector.
    pub gids: GidsUsed,
}

impl Path {
    /// With the traffic class 0 and the usual hop limit, over UDP.
    pub fn new(local: IpAddr, remote: IpAddr) -> Self {
        Self {
            local,
            remote,
            traffic_class: 0,
            hop_limit: HOP_LIMIT,
            flow_label: 0,
            link: None,
            gids: GidsUsed::default(),
        }
    }
}

/// The attributes of one modify: `Some` is a bit in the mask of ibv_modify_qp(3).
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
// fields: one per bit of enum ibv_qp_attr_mask
pub struct Modify {
    /// IBV_QP_STATE.
    pub state: Option<State>,
    /// IBV_QP_CUR_STATE.
    pub current_state: Option<State>,
    /// IBV_QP_PKEY_INDEX.
    pub pkey_index: Option<u16>,
    /// IBV_QP_PORT.
    pub port: Option<u8>,
    /// IBV_QP_ACCESS_FLAGS.
    pub access: Option<RemoteAccess>,
    /// IBV_QP_AV.
    pub path: Option<Path>,
    /// IBV_QP_PATH_MTU.
    pub path_mtu: Option<Mtu>,
    /// IBV_QP_DEST_QPN.
    pub dest_qpn: Option<Qpn>,
    /// IBV_QP_RQ_PSN.
    pub rq_psn: Option<Psn>,
    /// IBV_QP_MAX_DEST_RD_ATOMIC: READs and atomics the peer may have outstanding here.
    pub max_dest_rd_atomic: Option<u8>,
    /// IBV_QP_MIN_RNR_TIMER: the 5-bit code of the RNR timer sent in RNR NAKs.
    pub min_rnr_timer: Option<u8>,
    /// IBV_QP_SQ_PSN.
    pub sq_psn: Option<Psn>,
    /// IBV_QP_TIMEOUT: the 5-bit code t of the local ACK timeout 4.096 µs · 2^t; 0 is infinite.
    pub timeout: Option<u8>,
    /// IBV_QP_RETRY_CNT, 0–7.
    pub retry_cnt: Option<u8>,
    /// IBV_QP_RNR_RETRY, 0–7; 7 is infinite.
    pub rnr_retry: Option<u8>,
    /// IBV_QP_MAX_QP_RD_ATOMIC: maximum READs and atomics outstanding at the peer.
    pub max_rd_atomic: Option<u8>,
    /// IBV_QP_QKEY: the Q_Key that a received datagram must carry (IBTA vol 1, 10.2.5).
    pub qkey: Option<u32>,
    /// IBV_QP_EN_SQD_ASYNC_NOTIFY.
    pub sqd_async_notify: Option<bool>,
}

/// The attributes of a queue pair (ibv_query_qp(3)).
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Attributes {
    /// Its state.
    pub state: State,
    /// Creation attributes.
    pub init: QpInit,
    /// In SQD: requests are in flight.
    pub sq_draining: bool,
    /// Modified attributes: `Some` if ever set; `state` and `sq_psn` are the current ones.
    pub set: Modify,
}

/// Why a modify was refused; nothing changed. All are `EINVAL`.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum ModifyError {
    /// No such queue pair.
    UnknownQp,
    /// No such state transition, or `current_state` does not match.
    Transition {
        /// The current state.
        from: State,
        /// The requested state.
        to: State,
    },
    /// A required attribute is missing (its `enum ibv_qp_attr_mask` bit).
    Missing(u32),
    /// An attribute is not allowed in this transition (its `enum ibv_qp_attr_mask` bit).
    NotAllowed(u32),
    /// An attribute's value is out of range (its `enum ibv_qp_attr_mask` bit).
    Value(u32),
}

/// Local ACK timeout: 4.096 µs · 2^t, `None` (infinite) for 0 (IBTA vol 1, 9.7.6.1.3).
pub const fn ack_timeout(t: u8) -> Option<Duration> {
    if t == 0 {
        None
    } else {
        Some(Duration::from_nanos(4096 << (t & 0x1f)))
    }
}

impl Modify {
    /// Those of `newer` replace these.
    pub(super) fn overlay(&mut self, newer: &Self) {
        *self = Self {
            state: newer.state.or(self.state),
            current_state: None,
            pkey_index: newer.pkey_index.or(self.pkey_index),
            port: newer.port.or(self.port),
            access: newer.access.or(self.access),
            path: newer.path.map(Path::canonical).or(self.path),
            path_mtu: newer.path_mtu.or(self.path_mtu),
            dest_qpn: newer.dest_qpn.or(self.dest_qpn),
            qkey: newer.qkey.or(self.qkey),
            rq_psn: newer.rq_psn.or(self.rq_psn),
            max_dest_rd_atomic: newer.max_dest_rd_atomic.or(self.max_dest_rd_atomic),
            min_rnr_timer: newer.min_rnr_timer.or(self.min_rnr_timer),
            sq_psn: newer.sq_psn.or(self.sq_psn),
            timeout: newer.timeout.or(self.timeout),
            retry_cnt: newer.retry_cnt.or(self.retry_cnt),
            rnr_retry: newer.rnr_retry.or(self.rnr_retry),
            max_rd_atomic: newer.max_rd_atomic.or(self.max_rd_atomic),
            sqd_async_notify: newer.sqd_async_notify.or(self.sqd_async_notify),
        };
    }
}

impl Path {
    fn canonical(self) -> Self {
        Self {
            local: self.local.to_canonical(),
            remote: self.remote.to_canonical(),
            ..self
        }
    }
}
