//! A queue pair in INIT: receives can be posted, then it is connected.

use core::marker::PhantomData;

use doorbell_verbs_sys as sys;

use super::attributes::QpState;
use super::backend::{Backend, PostList, Receives};
use super::builder::Settings;
use super::connected::QueuePair;
use super::create::CreatedQp;
use super::endpoint::Endpoint;
use super::object::{QpObject, zeroed_attr};
use super::post_error::PostError;
use super::poster::Poster;
use super::receive::ReceiveBatch;
use super::transport::{Connected, HasReceiveQueue, Link, ReliableConnection, TransportKind};
use crate::error::QueuePairError;
use crate::memory::Sink;
use crate::port::{GidEntry, LinkLayer, PortAttr};
use crate::types::{Mtu, Psn, Qpn};

/// A queue pair in INIT, with receives; connecting makes it a [`QueuePair`] (IBTA vol 1, 10.3.1.2).
#[doc(alias("ibv_qp", "IBV_QPS_INIT"))]
pub struct PreparedQueuePair<T: Connected = ReliableConnection, B: Backend = PostList> {
    // Before the object: it points into the queue pair.
    pub(super) send_queue: Poster<B>,
    pub(super) recv_queue: Poster<Receives>,
    pub(super) object: QpObject,
    pub(super) settings: Settings,
    port: PortAttr,
    gid: Option<GidEntry>,
    pub(super) rd_atomic: u8,
    psn: Psn,
    transport: PhantomData<T>,
}

impl<T: Connected, B: Backend> PreparedQueuePair<T, B> {
    pub(super) fn new(
        made: CreatedQp,
        send: Poster<B>,
        recv: Poster<Receives>,
        settings: Settings,
        rd_atomic: u8,
        psn: Psn,
    ) -> Self {
        Self {
            send_queue: send,
            recv_queue: recv,
            object: made.object,
            settings,
            port: made.port,
            gid: made.gid,
            rd_atomic,
            psn,
            transport: PhantomData,
        }
    }

    /// The address that the peer needs to connect to it.
    #[must_use]
    pub fn endpoint(&self) -> Endpoint {
        Endpoint {
            gid: self.gid.map(|entry| entry.gid).unwrap_or_default(),
            lid: self.port.lid,
            qpn: self.object.qpn(),
            psn: self.psn,
            mtu: self.mtu(),
            max_dest_rd_atomic: self.rd_atomic,
        }
    }

    /// Its queue pair number.
    #[must_use]
    pub fn qpn(&self) -> Qpn {
        self.object.qpn()
    }

    pub(super) fn mtu(&self) -> Mtu {
        self.settings.mtu.unwrap_or(self.port.active_mtu)
    }

    /// Connects it to `peer`: INIT to RTR to RTS (ibv_modify_qp(3)).
    ///
    /// The peer must do the same with [`endpoint`](Self::endpoint). Send nothing before both have:
    /// earlier packets are dropped, and retransmitted only as the timeout allows.
    ///
    /// # Errors
    /// When the device refuses: the attribute is named, queue pair and receives are destroyed.
    #[doc(alias("ibv_modify_qp", "IBV_QPS_RTR", "IBV_QPS_RTS"))]
    pub fn connect(self, peer: &Endpoint) -> Result<QueuePair<T, B>, QueuePairError> {
        let mtu = self.mtu().min(peer.mtu);
        self.to_rtr(peer, mtu)?;
        self.to_rts(peer)?;
        Ok(QueuePair::new(
            self.send_queue,
            self.recv_queue,
            self.object,
            Link { peer: *peer, mtu },
        ))
    }

    fn to_rtr(&self, peer: &Endpoint, mtu: Mtu) -> Result<(), QueuePairError> {
        let mut attr = zeroed_attr();
        attr.path_mtu = mtu.code();
        attr.dest_qp_num = peer.qpn.get();
        attr.rq_psn = peer.psn.get();
        attr.max_dest_rd_atomic = self.rd_atomic;
        attr.min_rnr_timer = self.settings.min_rnr_timer;
        attr.ah_attr = self
            .settings
            .route()
            .ah_attr(peer.gid, peer.lid, self.gid.map(|entry| entry.index));
        let mut mask = sys::IBV_QP_AV | sys::IBV_QP_PATH_MTU | sys::IBV_QP_DEST_QPN | sys::IBV_QP_RQ_PSN;
        if T::KIND == TransportKind::Rc {
            mask |= sys::IBV_QP_MAX_DEST_RD_ATOMIC | sys::IBV_QP_MIN_RNR_TIMER;
        }
        self.object
            .transition((QpState::Init, QpState::Rtr), attr, mask, |error| {
                self.rtr_notes(error, peer, mtu)
            })
    }

    fn rtr_notes(&self, error: &std::io::Error, peer: &Endpoint, mtu: Mtu) -> Vec<String> {
        use std::io::ErrorKind::{HostUnreachable, InvalidInput, NetworkUnreachable, TimedOut};
        let own = self.gid.map(|entry| entry.gid).unwrap_or_default();
        let mut notes = Vec::new();
        match error.kind() {
            TimedOut | HostUnreachable | NetworkUnreachable => notes.push(format!(
                "the peer's address {} cannot be resolved from {own}: check routing, and that both GIDs are of one kind (IPv4 or IPv6)",
                peer.gid
            )),
            InvalidInput => {
                if self.port.link_layer == LinkLayer::Ethernet && peer.gid.is_zero() {
                    notes.push("the peer gave no GID, which RoCE needs".to_owned());
                }
                if own.to_ip().is_ipv4() != peer.gid.to_ip().is_ipv4() && self.gid.is_some() {
                    notes.push(format!("this side's GID {own} and the peer's {} are of different kinds", peer.gid));
                }
                notes.push(format!("path MTU {mtu} must be at most the port's {}", self.port.active_mtu));
                if T::KIND == TransportKind::Rc {
                    notes.push(format!("max_dest_rd_atomic {} must be at most the device's", self.rd_atomic));
                }
            }
            _ => {}
        }
        notes
    }

    fn to_rts(&self, peer: &Endpoint) -> Result<(), QueuePairError> {
        let most = self.object.pd().context.attr.max_qp_init_rd_atomic;
        let mut attr = zeroed_attr();
        attr.sq_psn = self.psn.get();
        attr.timeout = self.settings.timeout;
        attr.retry_cnt = self.settings.retry_count;
        attr.rnr_retry = self.settings.rnr_retry;
        // At most the peer's responder resources: it would NAK the excess (IBTA vol 1, 9.7.5.1.4).
        attr.max_rd_atomic = self.rd_atomic.min(most).min(peer.max_dest_rd_atomic);
        if T::KIND == TransportKind::Uc {
            return self
                .object
                .transition((QpState::Rtr, QpState::Rts), attr, sys::IBV_QP_SQ_PSN, |_| Vec::new());
        }
        let mask = sys::IBV_QP_SQ_PSN
            | sys::IBV_QP_TIMEOUT
            | sys::IBV_QP_RETRY_CNT
            | sys::IBV_QP_RNR_RETRY
            | sys::IBV_QP_MAX_QP_RD_ATOMIC;
        self.object.transition((QpState::Rtr, QpState::Rts), attr, mask, |_| {
            vec![format!(
                "max_rd_atomic {} must be at most the device's {most}",
                attr.max_rd_atomic
            )]
        })
    }
}

impl<T: Connected + HasReceiveQueue, B: Backend> PreparedQueuePair<T, B> {
    /// Posts receives before connecting: see [`QueuePair::post_receives`].
    ///
    /// # Errors
    /// See [`QueuePair::post_receives`].
    #[inline(always)]
    #[doc(alias = "ibv_post_recv")]
    pub fn post_receives(&mut self, build: impl for<'q> FnOnce(&mut ReceiveBatch<'q, T>)) -> Result<(), PostError> {
        ReceiveBatch::post(&mut self.recv_queue, build)
    }

    /// Posts one receive.
    ///
    /// # Errors
    /// See [`QueuePair::post_receives`].
    #[inline(always)]
    #[doc(alias = "ibv_post_recv")]
    pub fn receive(&mut self, buffer: impl Sink) -> Result<(), PostError> {
        ReceiveBatch::<T>::post_one(&mut self.recv_queue, buffer)
    }
}

impl<T: Connected, B: Backend> core::fmt::Debug for PreparedQueuePair<T, B> {
    fn fmt(&self, f: &mut core::fmt::Formatter<'_>) -> core::fmt::Result {
        f.debug_struct("PreparedQueuePair")
            .field("endpoint", &self.endpoint())
            .finish_non_exhaustive()
    }
}
