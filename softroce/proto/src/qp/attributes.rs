//! A queue pair's states and attributes (IBTA vol 1, 10.3 and 11.2.5.2; ibv_modify_qp(3)).

use core::net::IpAddr;
use core::time::Duration;

use crate::memory::PdId;
use crate::wire::Transport;
use crate::work::{CqId, SrqId};
use crate::{Mtu, Psn, Qpn};

/// The state of a queue pair, by the codes of `enum ibv_qp_state`.
#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Debug)]
#[repr(u32)]
pub enum State {
    /// Created, nothing set.
    Reset = 0,
    /// Receives may be posted.
    Init = 1,
    /// Ready to receive.
    Rtr = 2,
    /// Ready to send.
    Rts = 3,
    /// Send queue drained: what was begun finishes, nothing new is begun.
    Sqd = 4,
    /// Send queue error: a send request of a UC or UD queue pair failed. Further ones are flushed, while receiving goes on. RC has ERR for it.
    Sqe = 5,
    /// Error: every request is flushed.
    Err = 6,
}

/// What a queue pair is created with; all sizes are fixed for its life.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct QpInit {
    /// Its protection domain.
    pub pd: PdId,
    /// Where send requests complete.
    pub send_cq: CqId,
    /// Where receives complete.
    pub recv_cq: CqId,
    /// Send requests outstanding at most.
    pub max_send_wr: u32,
    /// Receive requests outstanding at most.
    pub max_recv_wr: u32,
    /// Elements per send request at most.
    pub max_send_sge: u32,
    /// Elements per receive request at most.
    pub max_recv_sge: u32,
    /// Inline bytes per send request at most.
    pub max_inline: u32,
    /// Complete every send request, whatever its flag.
    pub signal_all: bool,
    /// Its transport service.
    pub transport: Transport,
    /// The shared receive queue that it takes receives from; it has none of its own then, whatever `max_recv_wr` and `max_recv_sge` say.
    pub srq: Option<SrqId>,
    /// On the wire an acknowledgement goes before what is posted after it was owed, as from an adapter; otherwise behind it, as both leave as one GSO run then.
    pub acknowledges_first: bool,
}

/// What peers may do to memory through this queue pair, beside what the region grants.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct RemoteAccess {
    /// RDMA READ.
    pub read: bool,
    /// RDMA WRITE.
    pub write: bool,
    /// Atomics.
    pub atomic: bool,
}

/// A lane: a way to a peer on the same host, as the owner of the endpoint numbers them.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub struct LaneId(pub u32);

/// The path to the peer: what an address vector comes to under RoCEv2.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Path {
    /// Our address: that of the source GID.
    pub local: IpAddr,
    /// The peer's address: that of the destination GID.
    pub remote: IpAddr,
    /// IPv4 TOS or IPv6 traffic class.
    pub traffic_class: u8,
    /// TTL or hop limit.
    pub hop_limit: u8,
    /// The flow label that was asked for. Packets leave by one UDP socket, so that neither their source port nor their IPv6 header goes by it.
    pub flow_label: u32,
    /// The lane that its packets take in place of the wire: the owner's choice, the same at both ends.
    pub lane: Option<LaneId>,
}

/// The attributes of one modify: `Some` is a bit in the mask of ibv_modify_qp(3).
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
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
    /// IBV_QP_MIN_RNR_TIMER: the 5-bit code of the wait we ask for when no receive is posted.
    pub min_rnr_timer: Option<u8>,
    /// IBV_QP_SQ_PSN.
    pub sq_psn: Option<Psn>,
    /// IBV_QP_TIMEOUT: the 5-bit code t of the local ACK timeout 4.096 µs · 2^t; 0 waits for ever.
    pub timeout: Option<u8>,
    /// IBV_QP_RETRY_CNT, 0–7.
    pub retry_cnt: Option<u8>,
    /// IBV_QP_RNR_RETRY, 0–7; 7 tries for ever.
    pub rnr_retry: Option<u8>,
    /// IBV_QP_MAX_QP_RD_ATOMIC: READs and atomics outstanding to the peer at most.
    pub max_rd_atomic: Option<u8>,
    /// IBV_QP_QKEY: what a datagram must carry to be received (IBTA vol 1, 10.2.5).
    pub qkey: Option<u32>,
    /// IBV_QP_EN_SQD_ASYNC_NOTIFY.
    pub sqd_async_notify: Option<bool>,
}

/// The attributes of a queue pair as a query gives them.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Attributes {
    /// Its state.
    pub state: State,
    /// As created.
    pub init: QpInit,
    /// In SQD: requests begun are still going on.
    pub sq_draining: bool,
    /// As modified; every field that was ever set is `Some`, `state` and `sq_psn` are the current ones.
    pub set: Modify,
}

/// Why a modify was refused; nothing changed. All are `EINVAL`.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum ModifyError {
    /// No such queue pair.
    UnknownQp,
    /// No such transition of states, or `current_state` does not hold.
    Transition {
        /// The state it is in.
        from: State,
        /// The state asked for.
        to: State,
    },
    /// The transition needs an attribute that is not given (its `enum ibv_qp_attr_mask` bit).
    Missing(u32),
    /// The transition does not take an attribute that is given (its `enum ibv_qp_attr_mask` bit).
    NotAllowed(u32),
    /// An attribute's value is out of its range (its `enum ibv_qp_attr_mask` bit).
    Value(u32),
}

/// The local ACK timeout of code `t`: 4.096 µs · 2^t, or `None` (for ever) for 0 (IBTA vol 1, 9.7.6.1.3).
pub const fn ack_timeout(t: u8) -> Option<Duration> {
    if t == 0 {
        None
    } else {
        Some(Duration::from_nanos(4096 << (t & 0x1f)))
    }
}
