//! Connecting by a connection manager's attributes, instead of a peer's [`Endpoint`].

use doorbell_verbs_sys as sys;

use super::attributes::QpState;
use super::backend::Backend;
use super::connected::QueuePair;
use super::endpoint::Endpoint;
use super::object::zeroed_attr;
use super::prepared::PreparedQueuePair;
use super::transport::{Link, Reliable};
use crate::error::QueuePairError;
use crate::types::{Gid, Lid, Mtu, Psn, Qpn};

/// The connection parameters of a queue pair (`rdma_conn_param`).
#[derive(Debug, Clone, Copy)]
pub(crate) struct ConnParams {
    pub(crate) qpn: Qpn,
    /// READs and atomics that it serves at once.
    pub(crate) responder_resources: u8,
    /// READs and atomics that it may have outstanding.
    pub(crate) initiator_depth: u8,
    pub(crate) retry_count: u8,
    pub(crate) rnr_retry: u8,
}

impl<T: Reliable, B: Backend> PreparedQueuePair<T, B> {
    pub(crate) fn conn_params(&self) -> ConnParams {
        ConnParams {
            qpn: self.qpn(),
            responder_resources: self.rd_atomic,
            initiator_depth: self.rd_atomic.min(self.object.pd().context.attr.max_qp_init_rd_atomic),
            retry_count: self.settings.retry_count,
            rnr_retry: self.settings.rnr_retry,
        }
    }

    pub(crate) fn device(&self) -> &str {
        &self.object.pd().context.name
    }

    pub(crate) fn port(&self) -> u8 {
        self.settings.port
    }

    pub(crate) fn set_pkey_index(&mut self, pkey_index: u16) -> Result<(), QueuePairError> {
        if self.settings.pkey_index == pkey_index {
            return Ok(());
        }
        self.settings.pkey_index = pkey_index;
        let mut attr = zeroed_attr();
        attr.pkey_index = pkey_index;
        self.object
            .transition((QpState::Init, QpState::Init), attr, sys::IBV_QP_PKEY_INDEX, |_| {
                vec![format!("P_Key index {pkey_index} must exist")]
            })
    }

    /// INIT to RTR to RTS, with the connection manager's attributes. The builder's local settings
    /// apply (local ACK timeout, RNR timer), and bound the READs and atomics.
    pub(crate) fn connect_managed(
        self,
        mut rtr: sys::ibv_qp_attr,
        mut rts: sys::ibv_qp_attr,
    ) -> Result<QueuePair<T, B>, QueuePairError> {
        let offer = self.conn_params();
        rtr.max_dest_rd_atomic = rtr.max_dest_rd_atomic.min(offer.responder_resources);
        rtr.min_rnr_timer = self.settings.min_rnr_timer;
        let mask = sys::IBV_QP_AV
            | sys::IBV_QP_PATH_MTU
            | sys::IBV_QP_DEST_QPN
            | sys::IBV_QP_RQ_PSN
            | sys::IBV_QP_MAX_DEST_RD_ATOMIC
            | sys::IBV_QP_MIN_RNR_TIMER;
        self.object
            .transition((QpState::Init, QpState::Rtr), rtr, mask, |error| {
                let path = "the connection manager's path is no longer there";
                let is_invalid = error.kind() == std::io::ErrorKind::InvalidInput;
                is_invalid.then(|| path.to_owned()).into_iter().collect()
            })?;
        rts.max_rd_atomic = rts.max_rd_atomic.min(offer.initiator_depth);
        rts.timeout = self.settings.timeout;
        let mask = sys::IBV_QP_SQ_PSN
            | sys::IBV_QP_TIMEOUT
            | sys::IBV_QP_RETRY_CNT
            | sys::IBV_QP_RNR_RETRY
            | sys::IBV_QP_MAX_QP_RD_ATOMIC;
        self.object
            .transition((QpState::Rtr, QpState::Rts), rts, mask, |_| Vec::new())?;
        let mtu = Mtu::from_code(rtr.path_mtu).unwrap_or(Mtu::B256);
        let peer = Endpoint {
            gid: Gid::from_sys(&rtr.ah_attr.grh.dgid),
            lid: Lid(rtr.ah_attr.dlid),
            qpn: Qpn::truncated(rtr.dest_qp_num),
            psn: Psn::truncated(rtr.rq_psn),
            mtu,
            max_dest_rd_atomic: rts.max_rd_atomic,
        };
        Ok(QueuePair::new(
            self.send_queue,
            self.recv_queue,
            self.object,
            Link { peer, mtu },
        ))
    }
}
