//! Building a queue pair: capacities, remote access rights and connection parameters.

use core::hash::{BuildHasher, Hasher};
use core::marker::PhantomData;
use std::hash::RandomState;
use std::io;
use std::sync::Arc;

use doorbell_verbs_sys as sys;

use super::attributes::QpState;
use super::backend::{Backend, PostList, Receives, WorkRequests};
use super::connected::{QueuePair, UdLimits};
use super::endpoint::UdEndpoint;
use super::object::{QpObject, zeroed_attr};
use super::poster::{Poster, SignalPolicy};
use super::prepared::PreparedQueuePair;
use super::ring::Queue;
use super::transport::{Connected, Connectionless, Rc, Transport, TransportKind, Uc, Ud};
use crate::ah::{MAX_FLOW_LABEL, Route};
use crate::cq::{Attachment, CompletionQueue, CqInner, CqKind};
use crate::error::QueuePairError;
use crate::pd::ProtectionDomain;
use crate::port::{GidEntry, PortAttr, PortState};
use crate::raw::Lender;
use crate::srq::{SharedQueuePairBuilder, SharedReceiveHandle};
use crate::types::{Mtu, Psn, QKey};
use crate::wr::payload::Limits;

/// Builds a queue pair; made by [`ProtectionDomain::queue_pair`] (ibv_create_qp(3); IBTA vol 1,
/// 11.2.5.1).
///
/// Defaults: queues of 128, one buffer per request, no inline data, no remote rights, port 1, the
/// GID with the widest scope, the port's MTU.
#[derive(Debug, Clone)]
#[must_use = "a builder does nothing until rc(), uc() or ud() is called"]
#[doc(alias(
    "ibv_qp_init_attr",
    "ibv_qp_init_attr_ex",
    "ibv_qp_cap",
    "ibv_create_qp",
    "ibv_create_qp_ex"
))]
pub struct QueuePairBuilder<'a, B: Backend = PostList> {
    pub(super) pd: &'a ProtectionDomain,
    send_cq: &'a Arc<CqInner>,
    recv_cq: &'a Arc<CqInner>,
    srq: Option<&'a SharedReceiveHandle>,
    send_depth: u32,
    recv_depth: u32,
    max_send_sge: u32,
    max_recv_sge: u32,
    max_inline: u32,
    signal_all: bool,
    tag: u64,
    access: sys::ibv_access_flags,
    pub(super) settings: Settings,
    backend: PhantomData<B>,
}

/// Connection parameters (IBTA vol 1, 11.2.5.2).
#[derive(Debug, Clone, Copy)]
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
    pub(super) fn route(&self) -> Route {
        Route {
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

/// A queue pair just created, in RESET.
pub(super) struct CreatedQp {
    pub(super) object: QpObject,
    pub(super) port: PortAttr,
    pub(super) gid: Option<GidEntry>,
    max_inline: u32,
}

/// Default for READs and atomics outstanding and served at once, if the device allows as many.
const DEFAULT_RD_ATOMIC: u8 = 16;

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

    /// Posts by the `ibv_wr_*` calls of ibv_wr_post(3) instead of post lists. Not every provider
    /// has them: then creating the queue pair fails with
    /// [`NoWorkRequests`](QueuePairError::NoWorkRequests).
    #[doc(alias("ibv_wr_post", "ibv_qp_ex", "ibv_create_qp_ex"))]
    pub fn work_requests(self) -> QueuePairBuilder<'a, WorkRequests> {
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

    /// The most send requests outstanding (default 128). Reserves as many entries of the completion
    /// queue.
    pub fn send_depth(mut self, requests: u32) -> Self {
        self.send_depth = requests;
        self
    }

    /// The most receives outstanding (default 128). Reserves as many entries of the completion
    /// queue.
    pub fn recv_depth(mut self, requests: u32) -> Self {
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

    /// The most bytes that a request may carry inline (default 0); the device may grant more, see
    /// [`QueuePair::max_inline`](crate::QueuePair::max_inline).
    #[doc(alias = "IBV_SEND_INLINE")]
    pub fn max_inline(mut self, bytes: u32) -> Self {
        self.max_inline = bytes;
        self
    }

    /// Signals every request of the send queue, as if each were `signalled()`.
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

    /// Allows the peer to READ, from memory registered for it. Nothing remote is allowed by
    /// default.
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

    /// The GID index (default on RoCE: the GID with the widest scope; on InfiniBand: none,
    /// addressing by LID).
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

    /// The retry count: retransmissions before [`RetryExceeded`](crate::Status::RetryExceeded), at
    /// most 7 (default 7).
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

    /// The minimum RNR NAK timer: the time that the peer waits before a retry when this side has no
    /// receive posted, as a code of IBTA vol 1, table 46 (default 12, 0.64 ms).
    #[doc(alias = "IBV_QP_MIN_RNR_TIMER")]
    pub fn min_rnr_timer(mut self, code: u8) -> Self {
        self.settings.min_rnr_timer = code;
        self
    }

    /// The most READs and atomics to have outstanding and to serve at once (default: 16, or the
    /// device's limit).
    #[doc(alias("max_dest_rd_atomic", "initiator_depth", "responder_resources"))]
    pub fn rd_atomic(mut self, requests: u8) -> Self {
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

    /// The flow label, of 20 bits (default 0). RoCEv2 over IPv4 has no such header field; adapters
    /// derive the UDP source port from it, which routers use for ECMP.
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

    /// Takes receives from the shared receive queue `srq`, which may be of another protection
    /// domain; the builder's own receive settings have no effect. The receive completion queue
    /// reserves as many entries as `srq` holds receives, once for all queue pairs that share both
    /// queues.
    #[doc(alias("ibv_srq", "srq"))]
    pub fn shared_receive(mut self, srq: &'a impl AsRef<SharedReceiveHandle>) -> SharedQueuePairBuilder<'a, B> {
        self.srq = Some(srq.as_ref());
        (self.recv_depth, self.max_recv_sge) = (0, 0);
        SharedQueuePairBuilder::new(self)
    }

    /// Creates a reliable connection (RC) queue pair and moves it to INIT (ibv_create_qp(3), IBTA
    /// vol 1, 10.2.4).
    ///
    /// # Errors
    /// When a capacity is beyond the device's limits, a completion queue is too small, the port is
    /// not active, the GID does not exist, or the device refuses.
    #[doc(alias("IBV_QPT_RC", "ibv_create_qp"))]
    pub fn rc(self) -> Result<PreparedQueuePair<Rc, B>, QueuePairError> {
        self.prepare()
    }

    /// Creates an unreliable connection (UC) queue pair and moves it to INIT. The peer's must be UC
    /// too. Settings for acknowledgements, retries, READs and atomics have no effect.
    ///
    /// # Errors
    /// As for [`rc`](Self::rc), and when the peer is allowed to READ or to use atomics, which UC
    /// does not have.
    #[doc(alias("IBV_QPT_UC", "ibv_create_qp"))]
    pub fn uc(self) -> Result<PreparedQueuePair<Uc, B>, QueuePairError> {
        self.prepare_unreliable()
    }

    /// Creates an unreliable datagram (UD) queue pair and moves it to RTS: it is ready for use.
    /// Peers need its [`endpoint`](QueuePair::endpoint). Datagrams that arrive before a receive is
    /// posted are dropped.
    ///
    /// Receives must be [`GRH_BYTES`](crate::GRH_BYTES) longer than the longest message, which is
    /// the port's MTU, or that set by [`mtu`](Self::mtu).
    ///
    /// # Errors
    /// As for [`rc`](Self::rc), and when peers are allowed any remote access: UD has SEND alone.
    #[doc(alias("IBV_QPT_UD", "ibv_create_qp"))]
    pub fn ud(self) -> Result<QueuePair<Ud, B>, QueuePairError> {
        self.create_ready()
    }

    pub(crate) fn create_ready<T: Connectionless>(self) -> Result<QueuePair<T, B>, QueuePairError> {
        self.check_rights(TransportKind::Ud, 0)?;
        let made = self.create::<T>()?;
        self.ready_from(made)
    }

    /// From a queue pair in RESET.
    pub(super) fn ready_from<T: Connectionless>(self, made: CreatedQp) -> Result<QueuePair<T, B>, QueuePairError> {
        self.to_init::<T>(&made.object)?;
        self.to_ready(&made.object)?;
        let mtu = self.settings.mtu.unwrap_or(made.port.active_mtu);
        let endpoint = UdEndpoint {
            gid: made.gid.map(|entry| entry.gid).unwrap_or_default(),
            lid: made.port.lid,
            qpn: made.object.qpn(),
            qkey: self.settings.qkey,
            mtu,
        };
        let (mut send, recv) = self.posters(&made);
        send.ud = UdLimits {
            pd: Arc::as_ptr(self.pd.inner()).addr(),
            port: self.settings.port,
            max_len: mtu.bytes(),
        };
        made.object.recv().ring().set_datagrams();
        self.pd.inner().handles.enlist(made.object.send().ring());
        Ok(QueuePair::new(send, recv, made.object, endpoint))
    }

    pub(crate) fn prepare_unreliable<T: Connected>(self) -> Result<PreparedQueuePair<T, B>, QueuePairError> {
        self.check_rights(TransportKind::Uc, sys::IBV_ACCESS_REMOTE_WRITE)?;
        self.prepare()
    }

    pub(crate) fn prepare<T: Connected>(self) -> Result<PreparedQueuePair<T, B>, QueuePairError> {
        let made = self.create::<T>()?;
        self.prepared_from(made)
    }

    /// From a queue pair in RESET.
    pub(super) fn prepared_from<T: Connected>(
        self,
        made: CreatedQp,
    ) -> Result<PreparedQueuePair<T, B>, QueuePairError> {
        self.to_init::<T>(&made.object)?;
        let rd_atomic = if T::KIND == TransportKind::Rc {
            self.granted_rd_atomic()
        } else {
            0
        };
        let psn = self.settings.psn.unwrap_or_else(random_psn);
        let (send, recv) = self.posters(&made);
        Ok(PreparedQueuePair::new(made, send, recv, self.settings, rd_atomic, psn))
    }

    /// Creates the queue pair, in RESET.
    fn create<T: Transport>(&self) -> Result<CreatedQp, QueuePairError> {
        // SAFETY: none is given.
        unsafe { self.create_or_adopt::<T>(None) }
    }

    /// Creates the queue pair, or adopts `given`.
    ///
    /// # Safety
    /// As of [`prepared_from_raw`](QueuePairBuilder::prepared_from_raw), but in any state, if one
    /// is given. It is not adopted when this fails.
    pub(super) unsafe fn create_or_adopt<T: Transport>(
        &self,
        given: Option<(*mut sys::ibv_qp, Lender)>,
    ) -> Result<CreatedQp, QueuePairError> {
        self.check_limits()?;
        let context = self.pd.context();
        let port = context.port(self.settings.port)?;
        if !matches!(port.state, PortState::Active | PortState::ActiveDefer) {
            return Err(QueuePairError::PortDown {
                device: context.name().to_owned(),
                port: self.settings.port,
                state: port.state,
            });
        }
        self.check_mtu(&port)?;
        let gid = context.source_gid(self.settings.port, self.settings.gid_index, &port)?;

        let send = self.attach("send", self.send_cq, self.send_depth, Queue::Send)?;
        let mut recv = self.attach("receive", self.recv_cq, self.recv_depth, Queue::Receive)?;
        let srq = self.attach_srq(&mut recv)?;
        let mut init = sys::ibv_qp_init_attr {
            qp_context: core::ptr::null_mut(),
            send_cq: send.cq().raw(),
            recv_cq: recv.cq().raw(),
            srq,
            cap: sys::ibv_qp_cap {
                max_send_wr: self.send_depth,
                max_recv_wr: self.recv_depth,
                max_send_sge: self.max_send_sge,
                max_recv_sge: self.max_recv_sge,
                max_inline_data: self.max_inline,
            },
            qp_type: T::KIND.to_sys(),
            sq_sig_all: i32::from(self.signal_all),
        };
        let pd = self.pd.inner();
        // The completion queues stay live as long as the queue pair: the object below holds them.
        let (raw, lender) = match given {
            Some((raw, lender)) => (raw, lender),
            None => (B::create(self.pd, T::KIND, &mut init)?, None),
        };
        // SAFETY: just made, with these; or given, which is as good by contract.
        let object = unsafe { QpObject::new(raw, T::KIND, pd.clone(), send, recv, lender) };
        Ok(CreatedQp {
            object,
            port,
            gid,
            // The granted capacity: at least the requested one, by ibv_create_qp(3).
            max_inline: init.cap.max_inline_data.max(self.max_inline),
        })
    }

    /// The posters of both work queues of a queue pair just created.
    pub(super) fn posters(&self, made: &CreatedQp) -> (Poster<B>, Poster<Receives>) {
        let (raw, send, recv) = (made.object.raw(), made.object.send(), made.object.recv());
        let to_send = Limits {
            max_inline: made.max_inline,
            max_sge: self.max_send_sge,
        };
        let to_receive = Limits {
            max_inline: 0,
            max_sge: self.max_recv_sge,
        };
        let signalling = if self.signal_all {
            SignalPolicy::None
        } else {
            SignalPolicy::EveryHalfQueue
        };
        // SAFETY: the queue pair lives as long as the object, which goes after the posters in
        // PreparedQueuePair and in QueuePair; each ring is fresh, and this is called once.
        unsafe {
            (
                Poster::new(raw, send.ring().clone(), send.key(), to_send, signalling),
                Poster::new(raw, recv.ring().clone(), recv.key(), to_receive, SignalPolicy::None),
            )
        }
    }

    /// Rejects remote rights that the transport does not have.
    pub(super) fn check_rights(
        &self,
        transport: TransportKind,
        possible: sys::ibv_access_flags,
    ) -> Result<(), QueuePairError> {
        let rights = [
            (sys::IBV_ACCESS_REMOTE_READ, "allow_remote_read"),
            (sys::IBV_ACCESS_REMOTE_WRITE, "allow_remote_write"),
            (sys::IBV_ACCESS_REMOTE_ATOMIC, "allow_remote_atomic"),
        ];
        let excess = self.access & !possible;
        match rights.iter().find(|(bit, _)| excess & bit != 0) {
            Some(&(_, setting)) => Err(QueuePairError::NotOfTransport { transport, setting }),
            None => Ok(()),
        }
    }

    fn check_limits(&self) -> Result<(), QueuePairError> {
        let attr = *self.pd.context().attr();
        let depth = attr.max_queue_depth;
        let limits = [
            ("a send depth of", self.send_depth, depth),
            ("a receive depth of", self.recv_depth, depth),
            ("max_send_sge", self.max_send_sge, attr.max_sge),
            ("max_recv_sge", self.max_recv_sge, attr.max_sge),
            ("port", self.settings.port.into(), attr.ports.into()),
            (
                "rd_atomic",
                self.settings.rd_atomic.unwrap_or(0).into(),
                attr.max_rd_atomic.into(),
            ),
            ("timeout", self.settings.timeout.into(), 31),
            ("retry_count", self.settings.retry_count.into(), 7),
            ("rnr_retry", self.settings.rnr_retry.into(), 7),
            ("min_rnr_timer", self.settings.min_rnr_timer.into(), 31),
            ("service_level", self.settings.service_level.into(), 15),
            ("flow_label", self.settings.flow_label, MAX_FLOW_LABEL),
        ];
        for (what, requested, max) in limits {
            if requested > max {
                return Err(QueuePairError::Limit {
                    device: self.pd.context().name().to_owned(),
                    what,
                    requested,
                    max,
                });
            }
        }
        Ok(())
    }

    fn check_mtu(&self, port: &PortAttr) -> Result<(), QueuePairError> {
        match self.settings.mtu {
            Some(requested) if requested > port.active_mtu => Err(QueuePairError::Mtu {
                device: self.pd.context().name().to_owned(),
                port: self.settings.port,
                requested,
                active: port.active_mtu,
            }),
            _ => Ok(()),
        }
    }

    fn attach(
        &self,
        which: &'static str,
        inner: &Arc<CqInner>,
        depth: u32,
        queue: Queue,
    ) -> Result<Attachment, QueuePairError> {
        if inner.context.raw != self.pd.inner().context.raw {
            return Err(QueuePairError::ForeignCompletionQueue { which });
        }
        Attachment::new(inner, depth, queue, self.tag).map_err(|free| QueuePairError::CompletionQueueTooSmall {
            which,
            needed: depth,
            free,
            capacity: inner.capacity(),
        })
    }

    /// Attaches the receive queue to the SRQ, if there is one, and returns that.
    fn attach_srq(&self, recv: &mut Attachment) -> Result<*mut sys::ibv_srq, QueuePairError> {
        let Some(srq) = self.srq.map(SharedReceiveHandle::inner) else {
            return Ok(core::ptr::null_mut());
        };
        if srq.context().raw != self.pd.inner().context.raw {
            return Err(QueuePairError::ForeignSharedReceiveQueue);
        }
        recv.share(srq)
            .map_err(|free| QueuePairError::CompletionQueueTooSmall {
                which: "receive",
                needed: srq.depth(),
                free,
                capacity: recv.cq().capacity(),
            })?;
        Ok(srq.raw())
    }

    fn to_init<T: Transport>(&self, object: &QpObject) -> Result<(), QueuePairError> {
        let mut attr = zeroed_attr();
        attr.pkey_index = self.settings.pkey_index;
        attr.port_num = self.settings.port;
        attr.qp_access_flags = self.access;
        attr.qkey = self.settings.qkey.0;
        let own = match T::KIND {
            TransportKind::Rc | TransportKind::Uc => sys::IBV_QP_ACCESS_FLAGS,
            TransportKind::Ud => sys::IBV_QP_QKEY,
        };
        let mask = sys::IBV_QP_PKEY_INDEX | sys::IBV_QP_PORT | own;
        object.transition((QpState::Reset, QpState::Init), attr, mask, |error| {
            self.init_notes(T::KIND, error)
        })
    }

    fn init_notes(&self, transport: TransportKind, error: &io::Error) -> Vec<String> {
        let Settings {
            port, pkey_index, qkey, ..
        } = self.settings;
        match transport {
            TransportKind::Ud if qkey.is_controlled() && error.kind() == io::ErrorKind::PermissionDenied => {
                vec![format!(
                    "Q_Key {qkey} has its highest bit set: only privileged processes may use it"
                )]
            }
            TransportKind::Ud => vec![format!("port {port} and P_Key index {pkey_index} must exist")],
            TransportKind::Rc | TransportKind::Uc => vec![format!(
                "port {port} and P_Key index {pkey_index} must exist, and the device must have the rights allowed to the peer"
            )],
        }
    }

    /// Moves a UD queue pair from INIT to RTS.
    fn to_ready(&self, object: &QpObject) -> Result<(), QueuePairError> {
        object.transition((QpState::Init, QpState::Rtr), zeroed_attr(), 0, |_| Vec::new())?;
        let mut attr = zeroed_attr();
        attr.sq_psn = self.settings.psn.unwrap_or_else(random_psn).get();
        object.transition((QpState::Rtr, QpState::Rts), attr, sys::IBV_QP_SQ_PSN, |_| Vec::new())
    }

    fn granted_rd_atomic(&self) -> u8 {
        let attr = *self.pd.context().attr();
        self.settings
            .rd_atomic
            .unwrap_or(DEFAULT_RD_ATOMIC)
            .min(attr.max_rd_atomic)
    }
}

/// A random PSN, which a packet of an earlier connection is unlikely to match (IBTA vol 1, 9.7.1).
fn random_psn() -> Psn {
    // The standard library's hasher is seeded by the operating system.
    Psn::truncated(RandomState::new().build_hasher().finish() as u32)
}
