//! Datagram services by IP address and port: service id resolution (SIDR; IBTA vol 1, 12.11).

use core::time::Duration;
use std::net::SocketAddr;
use std::os::fd::{AsFd, BorrowedFd};

use doorbell_verbs_sys as sys;
use sys::rdmacm::RDMA_CM_EVENT_ESTABLISHED;

use super::ConnectionManager;
use super::connection::{check_device, check_private_data};
use super::error::CmError;
use super::event::ServicePath;
use super::id::{CmId, PortSpace};
use crate::ah::{AddressHandle, AddressHandleBuilder};
use crate::context::Context;
use crate::pd::ProtectionDomain;
use crate::qp::managed::ConnParams;
use crate::qp::{Backend, Connectionless, QueuePair, UdEndpoint};
use crate::types::{QKey, Qpn};
use crate::wait::Deadline;

/// Maximum private data of [`ConnectionManager::resolve_service`] in bytes: the 216 of a SIDR_REQ
/// less the CM's IP header (IBTA vol 1, A11.4).
pub const MAX_SERVICE_DATA: usize = 180;
/// Maximum bytes of private data of [`ServiceRequest::answer`] (SIDR_REP; IBTA vol 1, 12.11.2).
pub const MAX_ANSWER_DATA: usize = 136;

/// A peer's datagram service, and the path to it: see [`ConnectionManager::resolve_service`].
#[doc(alias("rdma_cm_id", "rdma_ud_param"))]
#[derive(Debug)]
pub struct DatagramService {
    id: CmId,
    path: ServicePath,
    private_data: Vec<u8>,
}

impl DatagramService {
    pub(super) fn resolve(
        manager: ConnectionManager,
        from: Option<SocketAddr>,
        peer: SocketAddr,
        private_data: &[u8],
        deadline: Deadline,
    ) -> Result<Self, CmError> {
        check_private_data("rdma_connect", private_data, MAX_SERVICE_DATA)?;
        let id = CmId::new(manager, peer, PortSpace::Datagrams)?;
        id.resolve(from, peer, deadline)?;
        id.connect(&unconnected(Qpn::truncated(0)), private_data)?;
        let event = id.wait_event(RDMA_CM_EVENT_ESTABLISHED, "rdma_connect", deadline)?;
        let path = event.service.ok_or(CmError::Disconnected { address: peer })?;
        Ok(Self {
            id,
            path,
            private_data: event.private_data,
        })
    }

    /// The service's queue pair; the MTU is the largest, as the manager does not know its port's.
    #[must_use]
    pub fn endpoint(&self) -> UdEndpoint {
        self.path.endpoint
    }

    /// The device that leads to it, to create the queue pair on.
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

    /// The private data of the answer, followed by zeros.
    #[must_use]
    pub fn private_data(&self) -> &[u8] {
        &self.private_data
    }

    /// The handle for datagrams to the service, along the manager's path.
    ///
    /// # Errors
    /// When the domain is of another device, or ibv_create_ah(3) fails.
    #[doc(alias = "ibv_create_ah")]
    pub fn address_handle(&self, pd: &ProtectionDomain) -> Result<AddressHandle, CmError> {
        check_device(&self.id, &pd.inner().context.name, self.path.vector.port)?;
        let builder = AddressHandleBuilder::along(pd, self.path.vector, self.path.gid_index);
        Ok(builder.to(&self.path.endpoint)?)
    }
}

/// Listens for requests of a datagram service (rdma_listen(3)). Its descriptor is readable when
/// there is an event.
#[doc(alias("rdma_listen", "rdma_bind_addr"))]
#[derive(Debug)]
pub struct ServiceListener {
    id: CmId,
}

impl ServiceListener {
    pub(super) fn new(manager: ConnectionManager, address: SocketAddr, backlog: u16) -> Result<Self, CmError> {
        let id = CmId::listening(manager, address, PortSpace::Datagrams, backlog)?;
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
    #[doc(alias("RDMA_CM_EVENT_CONNECT_REQUEST", "rdma_get_cm_event"))]
    pub fn next_request(&mut self, timeout: Duration) -> Result<Option<ServiceRequest>, CmError> {
        let request = self.id.next_request(Deadline::after(timeout))?;
        Ok(request.map(|(id, event)| ServiceRequest {
            id,
            private_data: event.private_data,
        }))
    }
}

impl AsFd for ServiceListener {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.id.as_fd()
    }
}

/// A peer's request for a datagram service (SIDR_REQ). Rejected when dropped.
#[doc(alias("RDMA_CM_EVENT_CONNECT_REQUEST", "rdma_cm_id"))]
#[derive(Debug)]
pub struct ServiceRequest {
    id: CmId,
    private_data: Vec<u8>,
}

impl ServiceRequest {
    /// The peer's private data, followed by zeros.
    #[must_use]
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

    /// The request's source address; `None` for a family without [`SocketAddr`].
    #[doc(alias = "rdma_get_peer_addr")]
    #[must_use]
    pub fn peer_addr(&self) -> Option<SocketAddr> {
        self.id.peer()
    }

    /// Answers that `qp` provides the service (rdma_accept(3)); its Q_Key must be
    /// [`QKey::RDMA_UDP`]. The peer sees `private_data`, at most [`MAX_ANSWER_DATA`] bytes. It
    /// sends datagrams at once: receives should be posted.
    ///
    /// # Errors
    /// When the queue pair has another Q_Key or is on another device or port, or the manager fails.
    #[doc(alias = "rdma_accept")]
    pub fn answer<T: Connectionless, B: Backend>(
        self,
        qp: &QueuePair<T, B>,
        private_data: &[u8],
    ) -> Result<(), CmError> {
        check_private_data("rdma_accept", private_data, MAX_ANSWER_DATA)?;
        check_device(&self.id, qp.device(), qp.port())?;
        let UdEndpoint { qpn, qkey, .. } = qp.endpoint();
        if qkey != QKey::RDMA_UDP {
            return Err(CmError::OtherQKey { qkey });
        }
        self.id.accept(&unconnected(qpn), private_data)
    }

    /// Rejects the request with a reason of at most [`MAX_ANSWER_DATA`] bytes (rdma_reject(3)).
    ///
    /// # Errors
    /// When the manager fails, or the reason is too long; the request is then rejected without one.
    #[doc(alias = "rdma_reject")]
    pub fn reject(self, reason: &[u8]) -> Result<(), CmError> {
        check_private_data("rdma_reject", reason, MAX_ANSWER_DATA)?;
        self.id.reject(reason)
    }
}

/// Of a datagram service only the queue pair's number is exchanged.
fn unconnected(qpn: Qpn) -> ConnParams {
    ConnParams {
        qpn,
        responder_resources: 0,
        initiator_depth: 0,
        retry_count: 0,
        rnr_retry: 0,
    }
}
