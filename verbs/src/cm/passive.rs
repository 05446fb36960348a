//! The passive side: listening, and answering connection requests.

use core::time::Duration;
use std::net::SocketAddr;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, RawFd};

use doorbell_verbs_sys as sys;
use sys::rdmacm::RDMA_CM_EVENT_ESTABLISHED;

use super::connection::{self, Connection};
use super::error::CmError;
use super::id::{CmId, PortSpace};
use super::{ConnectionManager, MAX_ACCEPT_DATA, MAX_REJECT_DATA};
use crate::context::Context;
use crate::qp::{Backend, PreparedQueuePair, QueuePair, Reliable};
use crate::wait::Deadline;

/// Listens for connections (rdma_listen(3)). Its descriptor is readable when there is an event.
#[doc(alias("rdma_listen", "rdma_bind_addr"))]
#[derive(Debug)]
#[doc(alias = "rdma_cm_id")]
pub struct Listener {
    pub(super) id: CmId,
}

impl Listener {
    pub(super) fn new(manager: ConnectionManager, address: SocketAddr, backlog: u16) -> Result<Self, CmError> {
        let id = CmId::listening(manager, address, PortSpace::Connections, backlog)?;
        Ok(Self { id })
    }

    /// The address it listens on, with the actual port; `None` for a family without [`SocketAddr`].
    #[doc(alias = "rdma_get_local_addr")]
    #[must_use]
    pub fn local_addr(&self) -> Option<SocketAddr> {
        self.id.local()
    }

    /// Waits up to `timeout` for the next request; `None` when there is none.
    ///
    /// # Errors
    /// When the manager fails, or the device that it listens on is removed.
    #[doc(alias("RDMA_CM_EVENT_CONNECT_REQUEST", "rdma_get_cm_event", "rdma_migrate_id"))]
    pub fn next_request(&mut self, timeout: Duration) -> Result<Option<ConnectionRequest>, CmError> {
        let request = self.id.next_request(Deadline::after(timeout))?;
        Ok(request.map(|(id, event)| ConnectionRequest {
            id,
            private_data: event.private_data,
            responder_resources: event.responder_resources,
            initiator_depth: event.initiator_depth,
        }))
    }
}

impl AsFd for Listener {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.id.as_fd()
    }
}

impl AsRawFd for Listener {
    fn as_raw_fd(&self) -> RawFd {
        self.as_fd().as_raw_fd()
    }
}

/// A peer's connection request (REQ; rdma_accept(3), rdma_reject(3)). Rejected when dropped.
#[doc(alias("RDMA_CM_EVENT_CONNECT_REQUEST", "rdma_cm_id"))]
#[derive(Debug)]
pub struct ConnectionRequest {
    id: CmId,
    private_data: Vec<u8>,
    responder_resources: u8,
    initiator_depth: u8,
}

impl ConnectionRequest {
    /// The peer's private data, followed by zeros: most transports do not carry its length.
    #[must_use]
    #[doc(alias = "rdma_conn_param")]
    pub fn private_data(&self) -> &[u8] {
        &self.private_data
    }

    /// The device the request arrived on, to create the queue pair on.
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

    /// The request's destination address; `None` for a family without [`SocketAddr`].
    #[must_use]
    pub fn local_addr(&self) -> Option<SocketAddr> {
        self.id.local()
    }

    /// The request's source address; `None` for a family without [`SocketAddr`].
    #[doc(alias = "rdma_get_peer_addr")]
    #[must_use]
    pub fn peer_addr(&self) -> Option<SocketAddr> {
        self.id.peer()
    }

    /// Connects `qp`, with receives posted, and waits until the peer is connected (rdma_accept(3)).
    ///
    /// The peer sees `private_data`, at most [`MAX_ACCEPT_DATA`] bytes, followed by zeros. The
    /// builder's settings apply as in [`Route::connect`](super::Route::connect).
    ///
    /// # Errors
    /// When the peer is gone or does not answer, the queue pair is on another device or port, or
    /// the device refuses.
    #[doc(alias("rdma_accept", "RDMA_CM_EVENT_ESTABLISHED"))]
    pub fn accept<T: Reliable, B: Backend>(
        self,
        mut qp: PreparedQueuePair<T, B>,
        private_data: &[u8],
        timeout: Duration,
    ) -> Result<(QueuePair<T, B>, Connection), CmError> {
        let deadline = Deadline::after(timeout);
        connection::check_private_data("rdma_accept", private_data, MAX_ACCEPT_DATA)?;
        connection::bind_to_path(&self.id, &mut qp)?;
        let mut offer = qp.conn_params();
        // At most what the peer requests and serves.
        offer.responder_resources = offer.responder_resources.min(self.responder_resources);
        offer.initiator_depth = offer.initiator_depth.min(self.initiator_depth);
        let rtr = self.id.attributes(sys::IBV_QPS_RTR)?;
        let rts = self.id.attributes(sys::IBV_QPS_RTS)?;
        let qp = qp.connect_managed(rtr, rts)?;
        self.id.accept(&offer, private_data)?;
        self.id.wait_event(RDMA_CM_EVENT_ESTABLISHED, "rdma_accept", deadline)?;
        Ok((qp, Connection::new(self.id, self.private_data)))
    }

    /// Rejects the request with a reason of at most [`MAX_REJECT_DATA`] bytes (rdma_reject(3)).
    ///
    /// # Errors
    /// When the manager fails, or the reason is too long; the request is then rejected without one.
    #[doc(alias = "rdma_reject")]
    pub fn reject(self, reason: &[u8]) -> Result<(), CmError> {
        connection::check_private_data("rdma_reject", reason, MAX_REJECT_DATA)?;
        self.id.reject(reason)
    }
}
