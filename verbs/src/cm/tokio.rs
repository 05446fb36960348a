//! The connection manager in tasks of a tokio runtime, whose I/O driver must be enabled.

use core::future::poll_fn;
use core::task::{Context, Poll, ready};
use core::time::Duration;
use std::io;
use std::os::fd::AsRawFd;

use ::tokio::io::Interest;
use ::tokio::io::unix::AsyncFd;

use super::connection::{Connection, ConnectionEvent};
use super::error::CmError;
use super::id::CmId;
use super::passive::{ConnectionRequest, Listener};

/// A [`Listener`] whose requests a task waits for.
#[doc(alias("rdma_listen", "rdma_cm_id"))]
#[derive(Debug)]
pub struct TokioListener {
    fd: AsyncFd<Listener>,
}

/// A [`Connection`] whose events a task waits for.
#[doc(alias = "rdma_cm_id")]
#[derive(Debug)]
pub struct TokioConnection {
    fd: AsyncFd<Connection>,
}

impl TokioListener {
    /// Registers `listener` with the current task's runtime.
    ///
    /// # Errors
    /// When the runtime refuses the descriptor.
    ///
    /// # Panics
    /// Outside a runtime, or in one whose I/O is not enabled.
    pub fn new(listener: Listener) -> io::Result<Self> {
        // SAFETY: the AsyncFd owns the listener, whose identifier keeps its channel's descriptor.
        let fd = unsafe { AsyncFd::register_with_interest(listener, Interest::READABLE) }?;
        Ok(Self { fd })
    }

    /// The next request. Cancel-safe: dropping it loses none.
    ///
    /// # Errors
    /// As of [`Listener::next_request`].
    #[doc(alias("RDMA_CM_EVENT_CONNECT_REQUEST", "rdma_get_cm_event"))]
    pub async fn next_request(&mut self) -> Result<ConnectionRequest, CmError> {
        poll_fn(|cx| self.poll_request(cx)).await
    }

    /// [`next_request`](Self::next_request), for a future written by hand.
    ///
    /// # Errors
    /// As there.
    pub fn poll_request(&mut self, cx: &mut Context<'_>) -> Poll<Result<ConnectionRequest, CmError>> {
        poll_next(&mut self.fd, cx, |listener| listener.next_request(Duration::ZERO))
    }
}

impl TokioConnection {
    /// Registers `connection` with the current task's runtime.
    ///
    /// # Errors
    /// When the runtime refuses the descriptor.
    ///
    /// # Panics
    /// Outside a runtime, or in one whose I/O is not enabled.
    pub fn new(connection: Connection) -> io::Result<Self> {
        // SAFETY: the AsyncFd owns the connection, whose identifier keeps its channel's descriptor.
        let fd = unsafe { AsyncFd::register_with_interest(connection, Interest::READABLE) }?;
        Ok(Self { fd })
    }

    /// The next event. Cancel-safe: dropping it loses none.
    ///
    /// # Errors
    /// As of [`Connection::next_event`].
    #[doc(alias = "rdma_get_cm_event")]
    pub async fn next_event(&mut self) -> Result<ConnectionEvent, CmError> {
        poll_fn(|cx| self.poll_event(cx)).await
    }

    /// [`next_event`](Self::next_event), for a future written by hand.
    ///
    /// # Errors
    /// As there.
    pub fn poll_event(&mut self, cx: &mut Context<'_>) -> Poll<Result<ConnectionEvent, CmError>> {
        poll_next(&mut self.fd, cx, |connection| connection.next_event(Duration::ZERO))
    }
}

/// What owns an identifier.
trait Identified: AsRawFd {
    fn id(&self) -> &CmId;
}

impl Identified for Listener {
    fn id(&self) -> &CmId {
        &self.id
    }
}

impl Identified for Connection {
    fn id(&self) -> &CmId {
        &self.id
    }
}

/// What `next`, which does not wait, finds first.
fn poll_next<T: Identified, F>(
    fd: &mut AsyncFd<T>,
    cx: &mut Context<'_>,
    next: impl Fn(&mut T) -> Result<Option<F>, CmError>,
) -> Poll<Result<F, CmError>> {
    loop {
        if let Some(found) = next(fd.get_mut())? {
            return Poll::Ready(Ok(found));
        }
        let ready = ready!(fd.poll_read_ready(cx)).map(|mut guard| guard.clear_ready());
        ready.map_err(|error| fd.get_ref().id().failed("epoll_wait", error))?;
        // An event before the readiness was cleared is read now, a later one sets it again.
    }
}
