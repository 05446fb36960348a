//! Building a queue pair: capacities, remote access rights and connection parameters.

use core::marker::PhantomData;
use std::sync::Arc;

use doorbell_verbs_sys as sys;

use super::backend::{Backend, PostList, WrPost};
use super::connected::QueuePair;
use super::prepared::PreparedQueuePair;
use super::transport::{ReliableConnection, UnreliableConnection, UnreliableDatagram};
use crate::ah::AddressVector;
use crate::cq::{CompletionQueue, CqInner, CqKind};
use crate::error::QueuePairError;
use crate::pd::ProtectionDomain;
use crate::srq::{SharedReceiveQueueHandle, SrqQueuePairBuilder};
use crate::types::{Mtu, Psn, QKey};

/// Builds a queue pair (ibv_create_qp(3); IBTA vol 1, 11.2.5.1).
///
/// Defaults: queues of 128, one buffer per request, port 1, GID of the widest scope, port's MTU.
#[derive(Debug, Clone)]
#[must_use = "a builder does nothing until rc(), uc() or ud() is called"]
#[doc(alias(
    "ibv_qp_init_attr",
    "ibv_qp_init_attr_ex",
    "ibv_qp_cap",
    "ibv_create_qp",
    "ibv_create_qp_ex"
))]
// fields: one per option of the builder
pub struct QueuePairBuilder<'a, B: Backend = PostList> {
    pub(super) pd: &'a ProtectionDomain,
    pub(super) send_cq: &'a Arc<CqInner>,
    pub(super) recv_cq: &'a Arc<CqInner>,
    pub(super) srq: Option<&'a SharedReceiveQueueHandle>,
    pub(super) send_depth: u32,
    pub(super) recv_depth: u32,
    pub(super) max_send_sge: u32,
    pub(super) max_recv_sge: u32,
    pub(super) max_inline: u32,
    pub(super) signal_all: bool,
    pub(super) tag: u64,
    pub(super) access: sys::ibv_access_flags,
    pub(super) settings: Settings,
    backend: PhantomData<B>,
}

#[derive(Debug, Clone, Copy)]
// fields: the attributes of a connection, one per option of the builder
pub(super) struct Settings {
    pub(super) port: u8,
    pub(super) gid_index: Option<u8>,
    pub(super) mtu: Option<Mtu>,
    pub(super) timeout: u8,
    pub(super) retry_count: u8,
    pub(super) rnr_retry: u8,
    pub(super) min_rnr_timer: u8,
    pub(super) rd_atomic: Option<u8>,
    pub(super) psn: Option<Psn>,
    pub(super) traffic_class: u8,
    pub(super) hop_limit: u8,
    pub(super) service_level: u8,
    pub(super) flow_label: u32,
    pub(super) pkey_index: u16,
    pub(super) qkey: QKey,
}

impl Settings {
    pub(super) fn route(&self) -> AddressVector {
        AddressVector {
            port: self.port,
            traffic_class: self.traffic_class,
            hop_limit: self.hop_limit,
            service_level: self.service_level,
            flow_label: self.flow_label,
        }
    }

    const DEFAULT: Self = Self {
        port: 1,
        gid_index: None,
        mtu: None,
        // 4.096 µs · 2^14 = 67 ms, as perftest.
        timeout: 14,
        retry_count: 7,
        rnr_retry: 7,
        // 0.64 ms (IBTA vol 1, table 46).
        min_rnr_timer: 12,
        rd_atomic: None,
        psn: None,
        traffic_class: 0,
        hop_limit: 64,
        service_level: 0,
        flow_label: 0,
        pkey_index: 0,
        qkey: QKey::DEFAULT,
    };
}

impl<'a> QueuePairBuilder<'a> {
    pub(crate) fn new(pd: &'a ProtectionDomain, cq: &'a Arc<CqInner>) -> Self {
        Self {
            pd,
            send_cq: cq,
            recv_cq: cq,
            srq: None,
            send_depth: 128,
            recv_depth: 128,
            max_send_sge: 1,
            max_recv_sge: 1,
            max_inline: 0,
            signal_all: false,
            tag: 0,
            access: 0,
            settings: Settings::DEFAULT,
            backend: PhantomData,
        }
    }

    /// Posts by `ibv_wr_*` (ibv_wr_post(3)) instead of post lists; without them creating fails with
    /// [`NoWrPost`](QueuePairError::NoWrPost).
    #[doc(alias("ibv_wr_post", "ibv_qp_ex", "ibv_create_qp_ex"))]
    pub fn wr_post(self) -> QueuePairBuilder<'a, WrPost> {
        QueuePairBuilder {
            pd: self.pd,
            send_cq: self.send_cq,
            recv_cq: self.recv_cq,
            srq: self.srq,
            send_depth: self.send_depth,
            recv_depth: self.recv_depth,
            max_send_sge: self.max_send_sge,
            max_recv_sge: self.max_recv_sge,
            max_inline: self.max_inline,
            signal_all: self.signal_all,
            tag: self.tag,
            access: self.access,
            settings: self.settings,
            backend: PhantomData,
        }
    }
}

impl<'a, B: Backend> QueuePairBuilder<'a, B> {
    /// Uses `cq` for completions of receives; those of sends stay on the first one.
    pub fn recv_cq<Q: CqKind>(mut self, cq: &'a CompletionQueue<Q>) -> Self {
        self.recv_cq = cq.inner();
        self
    }

    /// The most send requests outstanding (default 128), with as many completion queue entries.
    pub fn max_send_wr(mut self, requests: u32) -> Self {
        self.send_depth = requests;
        self
    }

    /// The most receives outstanding (default 128), with as many completion queue entries.
    pub fn max_recv_wr(mut self, requests: u32) -> Self {
        self.recv_depth = requests;
        self
    }

    /// The most buffers (scatter-gather elements) of a send request (default 1).
    pub fn max_send_sge(mut self, buffers: u32) -> Self {
        self.max_send_sge = buffers;
        self
    }

    /// The most buffers (scatter-gather elements) of a receive (default 1).
    pub fn max_recv_sge(mut self, buffers: u32) -> Self {
        self.max_recv_sge = buffers;
        self
    }

    /// The most bytes that a request may carry inline (default 0); the device may grant more.
    #[doc(alias = "IBV_SEND_INLINE")]
    pub fn max_inline_data(mut self, bytes: u32) -> Self {
        self.max_inline = bytes;
        self
    }

    /// Signals every request of the send queue, as if each were `signaled()`.
    #[doc(alias = "sq_sig_all")]
    pub fn signal_all(mut self) -> Self {
        self.signal_all = true;
        self
    }

    /// A number that its completions carry, to find the connection's state (default 0).
    #[doc(alias = "qp_context")]
    pub fn tag(mut self, tag: u64) -> Self {
        self.tag = tag;
        self
    }

    /// Allows the peer to READ, from memory registered for it (default: nothing remote).
    #[doc(alias("IBV_ACCESS_REMOTE_READ", "qp_access_flags"))]
    pub fn allow_remote_read(mut self) -> Self {
        self.access |= sys::IBV_ACCESS_REMOTE_READ;
        self
    }

    /// Allows the peer to WRITE, to memory registered for it.
    #[doc(alias("IBV_ACCESS_REMOTE_WRITE", "qp_access_flags"))]
    pub fn allow_remote_write(mut self) -> Self {
        self.access |= sys::IBV_ACCESS_REMOTE_WRITE;
        self
    }

    /// Allows the peer to use atomics, on memory registered for them.
    #[doc(alias("IBV_ACCESS_REMOTE_ATOMIC", "qp_access_flags"))]
    pub fn allow_remote_atomic(mut self) -> Self {
        self.access |= sys::IBV_ACCESS_REMOTE_ATOMIC;
        self
    }

    /// The port, from 1 (default 1).
    #[doc(alias("port_num", "IBV_QP_PORT"))]
    pub fn port(mut self, port: u8) -> Self {
        self.settings.port = port;
        self
    }

    /// The GID index (default on RoCE: that of the widest scope; on InfiniBand: none).
    #[doc(alias = "sgid_index")]
    pub fn gid_index(mut self, index: u8) -> Self {
        self.settings.gid_index = Some(index);
        self
    }

    /// The path MTU (default: the smaller of the two ports').
    #[doc(alias("path_mtu", "IBV_QP_PATH_MTU"))]
    pub fn mtu(mut self, mtu: Mtu) -> Self {
        self.settings.mtu = Some(mtu);
        self
    }

    /// The local ACK timeout: 4.096 µs · 2^`exponent`, 0 is infinite, at most 31 (default 14, 67
    /// ms). IBTA vol 1, 9.9.2.1.1.
    #[doc(alias("IBV_QP_TIMEOUT", "local_ack_timeout"))]
    pub fn timeout(mut self, exponent: u8) -> Self {
        self.settings.timeout = exponent;
        self
    }

    /// The retry count: retransmissions before
    /// [`RetryExceeded`](crate::CompletionStatus::RetryExceeded), at most 7 (default 7).
    #[doc(alias("retry_cnt", "IBV_QP_RETRY_CNT"))]
    pub fn retry_count(mut self, retries: u8) -> Self {
        self.settings.retry_count = retries;
        self
    }

    /// The RNR retry count: retries when the peer has no receive posted; 7 is infinite (default 7).
    #[doc(alias("IBV_QP_RNR_RETRY", "rnr_retry_count"))]
    pub fn rnr_retry(mut self, retries: u8) -> Self {
        self.settings.rnr_retry = retries;
        self
    }

    /// RNR NAK timer until the peer retries: code of IBTA vol 1, table 46 (default 12, 0.64 ms).
    #[doc(alias = "IBV_QP_MIN_RNR_TIMER")]
    pub fn min_rnr_timer(mut self, code: u8) -> Self {
        self.settings.min_rnr_timer = code;
        self
    }

    /// The READs and atomics outstanding and served at once (default 16, or the device's limit).
    #[doc(alias("max_dest_rd_atomic", "initiator_depth", "responder_resources"))]
    pub fn max_rd_atomic(mut self, requests: u8) -> Self {
        self.settings.rd_atomic = Some(requests);
        self
    }

    /// The PSN of the first packet to send (default: random).
    #[doc(alias("sq_psn", "rq_psn"))]
    pub fn psn(mut self, psn: Psn) -> Self {
        self.settings.psn = Some(psn);
        self
    }

    /// The traffic class: on RoCEv2 the IP header's DSCP and ECN bits (default 0).
    #[doc(alias = "tclass")]
    pub fn traffic_class(mut self, class: u8) -> Self {
        self.settings.traffic_class = class;
        self
    }

    /// The hop limit (default 64).
    pub fn hop_limit(mut self, hops: u8) -> Self {
        self.settings.hop_limit = hops;
        self
    }

    /// The flow label, 20 bits (default 0); over IPv4 adapters derive the UDP source port from it.
    pub fn flow_label(mut self, label: u32) -> Self {
        self.settings.flow_label = label;
        self
    }

    /// The InfiniBand service level (SL), at most 15 (default 0).
    #[doc(alias = "sl")]
    pub fn service_level(mut self, level: u8) -> Self {
        self.settings.service_level = level;
        self
    }

    /// The P_Key index (default 0).
    #[doc(alias = "IBV_QP_PKEY_INDEX")]
    pub fn pkey_index(mut self, index: u16) -> Self {
        self.settings.pkey_index = index;
        self
    }

    /// The Q_Key that datagrams must carry (default [`QKey::DEFAULT`]). For [`ud`](Self::ud).
    #[doc(alias = "IBV_QP_QKEY")]
    pub fn qkey(mut self, qkey: QKey) -> Self {
        self.settings.qkey = qkey;
        self
    }

    /// Takes receives from `srq`, perhaps of another domain, instead of a receive queue. Its
    /// completion queue reserves `srq`'s depth, once for all queue pairs that share both.
    #[doc(alias("ibv_srq", "srq"))]
    pub fn shared_receive_queue(mut self, srq: &'a impl AsRef<SharedReceiveQueueHandle>) -> SrqQueuePairBuilder<'a, B> {
        self.srq = Some(srq.as_ref());
        (self.recv_depth, self.max_recv_sge) = (0, 0);
        SrqQueuePairBuilder::new(self)
    }

    /// Creates an RC queue pair and moves it to INIT (ibv_create_qp(3), IBTA vol 1, 10.2.4).
    ///
    /// # Errors
    /// When a capacity is beyond the device's limits, a completion queue is too small, the port is
    /// not active, the GID does not exist, or the device refuses.
    #[doc(alias("IBV_QPT_RC", "ibv_create_qp"))]
    pub fn rc(self) -> Result<PreparedQueuePair<ReliableConnection, B>, QueuePairError> {
        self.prepare()
    }

    /// Creates an unreliable connection (UC) queue pair and moves it to INIT. The peer's must be UC
    /// too. Settings for acknowledgements, retries, READs and atomics have no effect.
    ///
    /// # Errors
    /// As for [`rc`](Self::rc), and when the peer may READ or use atomics, which UC has not.
    #[doc(alias("IBV_QPT_UC", "ibv_create_qp"))]
    pub fn uc(self) -> Result<PreparedQueuePair<UnreliableConnection, B>, QueuePairError> {
        self.prepare_unreliable()
    }

    /// Creates an unreliable datagram (UD) queue pair and moves it to RTS: it is ready for use.
    /// Peers need its [`endpoint`](QueuePair::endpoint). Datagrams that arrive before a receive is
    /// posted are dropped.
    ///
    /// Receives must be [`GRH_BYTES`](crate::GRH_BYTES) longer than the longest message (the MTU).
    ///
    /// # Errors
    /// As for [`rc`](Self::rc), and when peers are allowed any remote access: UD has SEND alone.
    #[doc(alias("IBV_QPT_UD", "ibv_create_qp"))]
    pub fn ud(self) -> Result<QueuePair<UnreliableDatagram, B>, QueuePairError> {
        self.create_ready()
    }
}
