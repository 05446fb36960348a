//! The active side: a route to a peer, and connecting on it.

use core::time::Duration;
use std::net::SocketAddr;

use doorbell_verbs_sys as sys;
use sys::rdmacm::RDMA_CM_EVENT_CONNECT_RESPONSE;

use super::connection::{self, Connection};
use super::error::CmError;
use super::id::{CmId, PortSpace};
use super::{ConnectionManager, MAX_CONNECT_DATA};
use crate::context::Context;
use crate::qp::{Backend, PreparedQueuePair, QueuePair, Reliable};
use crate::wait::Deadline;

/// A resolved device and path to a peer: see [`ConnectionManager::resolve`].
#[doc(alias("rdma_cm_id", "rdma_resolve_route"))]
#[derive(Debug)]
pub struct Route {
    id: CmId,
}

impl Route {
    pub(super) fn resolve(
        manager: ConnectionManager,
        from: Option<SocketAddr>,
        peer: SocketAddr,
        deadline: Deadline,
    ) -> Result<Self, CmError> {
        let id = CmId::new(manager, peer, PortSpace::Connections)?;
        id.resolve(from, peer, deadline)?;
        Ok(Self { id })
    }

    /// The device, to create the queue pair on.
    ///
    /// # Errors
    /// When it cannot be queried.
    pub fn context(&self) -> Result<Context, CmError> {
        self.id.context()
    }

    /// The device's port, for [`QueuePairBuilder::port`](crate::QueuePairBuilder::port).
    #[must_use]
    pub fn port(&self) -> u8 {
        self.id.port()
    }

    /// The local address of the connection; `None` for a family without [`SocketAddr`].
    #[doc(alias = "rdma_get_local_addr")]
    #[must_use]
    pub fn local_addr(&self) -> Option<SocketAddr> {
        self.id.local()
    }

    /// Connects `qp` to the peer's listener, and waits until it accepts (rdma_connect(3)).
    ///
    /// The peer sees `private_data`, at most [`MAX_CONNECT_DATA`] bytes, followed by zeros. Path
    /// MTU and retry counts are negotiated by the two managers; the builder's `timeout` and
    /// `min_rnr_timer` apply, its `gid_index`, `mtu` and `psn` do not.
    ///
    /// # Errors
    /// When no program listens there, the peer rejects or does not answer, the queue pair is on
    /// another device or port, or the device refuses.
    #[doc(alias("rdma_connect", "rdma_establish", "rdma_conn_param"))]
    pub fn connect<T: Reliable, B: Backend>(
        self,
        mut qp: PreparedQueuePair<T, B>,
        private_data: &[u8],
        timeout: Duration,
    ) -> Result<(QueuePair<T, B>, Connection), CmError> {
        let deadline = Deadline::after(timeout);
        connection::check_private_data("rdma_connect", private_data, MAX_CONNECT_DATA)?;
        connection::bind_to_path(&self.id, &mut qp)?;
        self.id.connect(&qp.conn_params(), private_data)?;
        let response = self
            .id
            .wait_event(RDMA_CM_EVENT_CONNECT_RESPONSE, "rdma_connect", deadline)?;
        let rtr = self.id.attributes(sys::IBV_QPS_RTR)?;
        let rts = self.id.attributes(sys::IBV_QPS_RTS)?;
        let qp = qp.connect_managed(rtr, rts)?;
        self.id.establish()?;
        Ok((qp, Connection::new(self.id, response.private_data)))
    }
}
