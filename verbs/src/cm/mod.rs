//! Connecting by IP address, with the connection manager: librdmacm, loaded when first asked for (rdma_cm(7); IBTA vol 1, chapter 12 and annex A11).
//!
//! The active side resolves the peer's address, which tells it the device to use, makes a queue pair there and connects it. The passive side listens; each
//! request tells it the device, and is accepted with a queue pair or rejected. Both can say something while they do: the private data.
//!
//! ```no_run
//! use core::time::Duration;
//! use doorbell_verbs::cm::ConnectionManager;
//!
//! # fn main() -> Result<(), Box<dyn std::error::Error>> {
//! let patience = Duration::from_secs(5);
//! let route = ConnectionManager::system()?.resolve("10.9.0.1:7471".parse()?, patience)?;
//! let device = route.context()?;
//! let pd = device.protection_domain()?;
//! let cq = device.completion_queue(256)?;
//! let prepared = pd.queue_pair(&cq).port(route.port()).rc()?;
//! let (mut qp, mut connection) = route.connect(prepared, b"who I am", patience)?;
//! qp.send_inline(b"hello")?;
//! connection.disconnect(patience)?;
//! # Ok(())
//! # }
//! ```
//!
//! # Who owns what
//!
//! Queue pairs are made by verbs as ever, so all that holds of memory in flight holds here; the manager only says with which attributes to connect them. Each
//! identifier (`rdma_cm_id`) has an event channel of its own: waiting for one never swallows an event of another, and every object here has a file descriptor
//! that becomes readable when there is an event for it. Events are copied and acknowledged before they are looked at, so an identifier can always be destroyed;
//! it goes first, then its channel.
//!
//! The devices' contexts belong to librdmacm. A [`Context`](crate::Context) got here keeps its device open with an identifier of its own, and is not closed by us.
//! Queue pairs may as well be made on a context of one's own of the same device, opened by [`Library::open`](crate::Library::open): a server does that once, instead
//! of asking each request.

mod active;
mod address;
mod connection;
mod error;
mod event;
mod id;
mod passive;

use core::time::Duration;
use std::net::SocketAddr;

use doorbell_verbs_sys::Api;
use doorbell_verbs_sys::rdmacm::CmApi;

pub use active::Route;
pub use connection::{Connection, ConnectionEvent};
pub use error::{CmError, Rejection};
pub use passive::{ConnectionRequest, Listener};

use crate::wait::Deadline;

/// The most bytes of private data that [`Route::connect`] can send: what the manager's own header leaves of the request's 92 (IBTA vol 1, A11.4).
pub const MAX_CONNECT_DATA: usize = 56;
/// The most bytes of private data that [`ConnectionRequest::accept`] can send (IBTA vol 1, 12.6.8).
pub const MAX_ACCEPT_DATA: usize = 196;
/// The most bytes of private data that [`ConnectionRequest::reject`] can send (IBTA vol 1, 12.6.7).
pub const MAX_REJECT_DATA: usize = 148;

/// The system's connection manager (rdma_cm(7)).
#[derive(Debug, Clone, Copy)]
pub struct ConnectionManager {
    cm: &'static CmApi,
    verbs: &'static Api,
}

impl ConnectionManager {
    /// The system's librdmacm, loaded on the first call.
    ///
    /// # Errors
    /// When it, or libibverbs, isn't installed; the error says what to install.
    pub fn system() -> Result<Self, CmError> {
        Ok(Self {
            cm: CmApi::load()?,
            verbs: Api::load()?,
        })
    }

    /// Another implementation of librdmacm's functions, over the devices of `verbs`: the userspace device's.
    ///
    /// Whoever filled the tables gave their [`Promise`](doorbell_verbs_sys::Promise), on which every guarantee rests here as in [`Library::new`](crate::Library::new).
    #[must_use]
    pub const fn new(cm: &'static CmApi, verbs: &'static Api) -> Self {
        Self { cm, verbs }
    }

    /// Finds the device and the path by which `peer` can be reached (rdma_resolve_addr(3), rdma_resolve_route(3)), within `timeout`.
    ///
    /// # Errors
    /// When no RDMA device leads there, the address does not answer, or the time is up.
    pub fn resolve(&self, peer: SocketAddr, timeout: Duration) -> Result<Route, CmError> {
        Route::resolve(*self, None, peer, Deadline::after(timeout))
    }

    /// As [`resolve`](Self::resolve), from the local address `from`; its port may be 0.
    ///
    /// # Errors
    /// As for [`resolve`](Self::resolve), and when `from` is no address of an RDMA device here.
    pub fn resolve_from(&self, from: SocketAddr, peer: SocketAddr, timeout: Duration) -> Result<Route, CmError> {
        Route::resolve(*self, Some(from), peer, Deadline::after(timeout))
    }

    /// Listens on `address` (rdma_bind_addr(3), rdma_listen(3)): on all devices, if it is the unspecified one, and on any port that is free, if its port is 0.
    /// As many as `backlog` requests may wait.
    ///
    /// # Errors
    /// When the address is in use, or of no RDMA device here.
    pub fn listen(&self, address: SocketAddr, backlog: u16) -> Result<Listener, CmError> {
        Listener::new(*self, address, backlog)
    }
}
