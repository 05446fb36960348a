//! Connecting by IP address: librdmacm, loaded on first use (rdma_cm(7); IBTA vol 1, 12 and A11).
//!
//! The active side resolves the peer's address, which selects the device, and connects a queue pair
//! on it. The passive side accepts or rejects requests. Both can send private data. UD queue pairs
//! are not connected: the active side resolves the queue pair that provides a service.
//!
//! ```no_run
//! use core::time::Duration;
//! use doorbell_verbs::cm::ConnectionManager;
//!
//! # fn main() -> Result<(), Box<dyn std::error::Error>> {
//! let timeout = Duration::from_secs(5);
//! let route = ConnectionManager::system()?.resolve("10.9.0.1:7471".parse()?, timeout)?;
//! let device = route.context()?;
//! let pd = device.protection_domain()?;
//! let cq = device.completion_queue(256)?;
//! let prepared = pd.queue_pair(&cq).port(route.port()).rc()?;
//! let (mut qp, mut connection) = route.connect(prepared, b"my name", timeout)?;
//! qp.send_inline(b"hello")?;
//! connection.disconnect(timeout)?;
//! # Ok(())
//! # }
//! ```
//!
//! # Ownership
//!
//! Queue pairs are created by verbs, so the rules of memory in flight are unchanged; the manager
//! only supplies the attributes. Each identifier (`rdma_cm_id`) has its own event channel, whose
//! descriptor becomes readable: waiting for one never consumes an event of another. Events are
//! copied and acknowledged at once, so an identifier can always be destroyed; it is destroyed
//! before its channel. Tasks wait by `TokioListener` and `TokioConnection` (feature `tokio`).
//!
//! The devices' contexts belong to librdmacm. A [`Context`](crate::Context) obtained here keeps its
//! device open with an identifier of its own. Queue pairs may also be on a context of the same
//! device opened by [`Library::open`](crate::Library::open), once instead of per request.

mod active;
mod address;
mod connection;
mod datagrams;
mod error;
mod event;
mod id;
mod passive;
#[cfg(feature = "tokio")]
mod tokio;

use core::time::Duration;
use std::net::SocketAddr;

use doorbell_verbs_sys::Api;
use doorbell_verbs_sys::rdmacm::CmApi;

pub use active::Route;
pub use connection::{Connection, ConnectionEvent};
pub use datagrams::{DatagramService, MAX_ANSWER_DATA, MAX_SERVICE_DATA, ServiceListener, ServiceRequest};
pub use error::{CmError, Rejection};
pub use passive::{ConnectionRequest, Listener};
#[cfg(feature = "tokio")]
pub use tokio::{TokioConnection, TokioListener};

use crate::wait::Deadline;

/// Maximum length of the private data of [`Route::connect`] in bytes: the 92 of a REQ less the CM's
/// IP header (IBTA vol 1, A11.4).
pub const MAX_CONNECT_DATA: usize = 56;
/// Maximum bytes of private data of [`ConnectionRequest::accept`] (REP; IBTA vol 1, 12.6.8).
pub const MAX_ACCEPT_DATA: usize = 196;
/// Maximum bytes of private data of [`ConnectionRequest::reject`] (REJ; IBTA vol 1, 12.6.7).
pub const MAX_REJECT_DATA: usize = 148;

/// The system's connection manager (rdma_cm(7)).
#[doc(alias("rdma_cm", "librdmacm"))]
#[derive(Debug, Clone, Copy)]
#[doc(alias("rdma_create_event_channel", "rdma_cm_id", "rdmacm"))]
pub struct ConnectionManager {
    cm: &'static CmApi,
    verbs: &'static Api,
}

impl ConnectionManager {
    /// The system's librdmacm, loaded on the first call.
    ///
    /// # Errors
    /// When it or libibverbs is not installed; the error says what to install.
    pub fn system() -> Result<Self, CmError> {
        Ok(Self {
            cm: CmApi::load()?,
            verbs: Api::load()?,
        })
    }

    /// Another implementation of librdmacm's functions, over the devices of `verbs`.
    ///
    /// Both tables carry a [`Promise`](doorbell_verbs_sys::Promise), as there.
    #[must_use]
    pub const fn new(cm: &'static CmApi, verbs: &'static Api) -> Self {
        Self { cm, verbs }
    }

    /// Resolves device and path to `peer` (rdma_resolve_addr(3), rdma_resolve_route(3)).
    ///
    /// # Errors
    /// When no RDMA device has a route there, the address does not answer, or the timeout expires.
    #[doc(alias("rdma_resolve_addr", "rdma_resolve_route"))]
    pub fn resolve(&self, peer: SocketAddr, timeout: Duration) -> Result<Route, CmError> {
        Route::resolve(*self, None, peer, Deadline::after(timeout))
    }

    /// As [`resolve`](Self::resolve), from the local address `from`; its port may be 0.
    ///
    /// # Errors
    /// As for [`resolve`](Self::resolve), and when `from` is no address of a local RDMA device.
    #[doc(alias("rdma_resolve_addr", "rdma_resolve_route"))]
    pub fn resolve_from(&self, from: SocketAddr, peer: SocketAddr, timeout: Duration) -> Result<Route, CmError> {
        Route::resolve(*self, Some(from), peer, Deadline::after(timeout))
    }

    /// Listens on `address` (rdma_listen(3)): on all devices if unspecified, any free port for 0.
    ///
    /// # Errors
    /// When the address is in use, or of no local RDMA device.
    #[doc(alias("rdma_bind_addr", "rdma_listen"))]
    pub fn listen(&self, address: SocketAddr, backlog: u16) -> Result<Listener, CmError> {
        Listener::new(*self, address, backlog)
    }

    /// Resolves the datagram service at `peer` (SIDR; rdma_connect(3) in RDMA_PS_UDP), from the
    /// local address `from` if given; its port may be 0. The peer sees `private_data`, at most
    /// [`MAX_SERVICE_DATA`] bytes, followed by zeros.
    ///
    /// # Errors
    /// As for [`resolve_from`](Self::resolve_from), and when no program provides the service, or it
    /// rejects or does not answer.
    #[doc(alias("rdma_connect", "RDMA_PS_UDP"))]
    pub fn resolve_service(
        &self,
        from: Option<SocketAddr>,
        peer: SocketAddr,
        private_data: &[u8],
        timeout: Duration,
    ) -> Result<DatagramService, CmError> {
        DatagramService::resolve(*self, from, peer, private_data, Deadline::after(timeout))
    }

    /// Listens for requests of a datagram service on `address` (rdma_listen(3) in RDMA_PS_UDP): on
    /// all devices if unspecified, any free port for 0.
    ///
    /// # Errors
    /// As for [`listen`](Self::listen).
    #[doc(alias("rdma_bind_addr", "rdma_listen", "RDMA_PS_UDP"))]
    pub fn listen_for_datagrams(&self, address: SocketAddr, backlog: u16) -> Result<ServiceListener, CmError> {
        ServiceListener::new(*self, address, backlog)
    }
}
