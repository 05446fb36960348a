//! A byte stream: the traits of tokio over a [`StreamConnection`].

use std::future::poll_fn;
use std::io::{self, IoSlice};
use std::net::{SocketAddr, ToSocketAddrs};
use std::pin::Pin;
use std::task::{Context, Poll, ready};
use std::time::Duration;

use bytes::Bytes;
use doorbell_verbs::ProtectionDomain;
use doorbell_verbs::cm::ConnectionManager;
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};

use crate::chunk::SendChunk;
use crate::config::StreamConfig;
use crate::connect::{self, ConnectError};
use crate::connection::StreamConnection;
use crate::events::{Event, EventSource};
use crate::managed;

/// Sent over TCP when all of the peer's bytes are here: its acknowledgements may be lost once the
/// queue pair is destroyed.
const DONE: u8 = 2;

/// A byte stream over a reliable connection, as a `TcpStream` is over TCP.
///
/// Dropping it sends what was written and the end of the bytes in the background, for
/// [`StreamConfig::linger`] at most; [`poll_shutdown`](AsyncWrite::poll_shutdown) waits until
/// the peer has them. A peer that is gone ends both directions with `ConnectionReset`, after the
/// bytes that came before.
#[derive(Debug)]
pub struct RdmaStream {
    /// Present until it is dropped.
    inner: Option<Box<Inner>>,
    linger: Duration,
}

pub(crate) struct Inner {
    connection: StreamConnection,
    events: EventSource,
    peer: SocketAddr,
    /// Turns of the runtime since something happened.
    idle: u32,
    spins: u32,
    sent_done: bool,
}

impl std::fmt::Debug for Inner {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Inner")
            .field("peer", &self.peer)
            .finish_non_exhaustive()
    }
}

impl RdmaStream {
    pub(crate) fn new(
        connection: StreamConnection,
        events: EventSource,
        peer: SocketAddr,
        config: &StreamConfig,
    ) -> Self {
        Self {
            inner: Some(Box::new(Inner {
                connection,
                events,
                peer,
                idle: 0,
                spins: config.spins,
                sent_done: false,
            })),
            linger: config.linger,
        }
    }

    /// Connects to an [`RdmaListener`](crate::RdmaListener), retrying until it listens, for
    /// [`StreamConfig::timeout`] at most.
    ///
    /// # Errors
    /// When no program listens in time, the peer is another one, a setting is out of range, or the
    /// device refuses.
    pub async fn connect(
        to: impl ToSocketAddrs + std::fmt::Debug + Send + 'static,
        pd: ProtectionDomain,
        config: StreamConfig,
    ) -> Result<Self, ConnectError> {
        connect::connect(to, pd, config).await
    }

    /// Connects to an [`RdmaListener::bind_cm`](crate::RdmaListener::bind_cm) by the connection
    /// manager (rdma_cm(7)) instead of TCP, on the device that has a route to `to`.
    ///
    /// # Errors
    /// When no program listens there, the peer is another one, no RDMA device has a route, a
    /// setting is out of range, or the device refuses.
    pub async fn connect_cm(
        manager: ConnectionManager,
        to: SocketAddr,
        config: StreamConfig,
    ) -> Result<Self, ConnectError> {
        managed::connect(manager, to, config).await
    }

    /// The peer's address: of the TCP connection, or the connection manager's.
    #[must_use]
    pub fn peer_addr(&self) -> SocketAddr {
        self.get().peer
    }

    /// The next bytes, in the buffer that the peer's device has filled; `None` at the end. Dropping
    /// them posts the buffer again; the peer may stop when more than half of the
    /// [chunks](StreamConfig::chunks) are kept. Cancel-safe.
    ///
    /// # Errors
    /// `ConnectionReset` when the peer is gone, `InvalidData` when it breaks the protocol.
    pub async fn read_bytes(&mut self) -> io::Result<Option<Bytes>> {
        let inner = self.get_mut();
        let bytes = poll_fn(|cx| inner.poll(cx, StreamConnection::take)).await?;
        Ok((!bytes.is_empty()).then_some(bytes))
    }

    /// A registered buffer, to be filled in place and [sent](Self::send): `len` bytes or the most
    /// that one message takes, whichever is less. Waits while all are in flight. Cancel-safe; a
    /// buffer that is dropped is free again.
    ///
    /// # Errors
    /// As of [`poll_write`](AsyncWrite::poll_write).
    pub async fn reserve(&mut self, len: usize) -> io::Result<SendChunk> {
        let inner = self.get_mut();
        poll_fn(|cx| inner.poll(cx, |connection| connection.reserve(len))).await
    }

    /// Sends a reserved buffer without a copy. Waits while the peer reads slowly: dropped before it
    /// was ready, it has sent nothing.
    ///
    /// # Errors
    /// As of [`poll_write`](AsyncWrite::poll_write); `InvalidInput` for a buffer of another
    /// stream.
    pub async fn send(&mut self, mut chunk: SendChunk) -> io::Result<()> {
        let inner = self.get_mut();
        poll_fn(|cx| inner.poll(cx, |connection| connection.send(&mut chunk))).await
    }

    fn get(&self) -> &Inner {
        self.inner.as_ref().expect("taken by drop alone")
    }

    fn get_mut(&mut self) -> &mut Inner {
        self.inner.as_mut().expect("taken by drop alone")
    }
}

impl Inner {
    /// Drives the connection until `attempt` has a result.
    fn poll<T>(
        &mut self,
        cx: &mut Context<'_>,
        mut attempt: impl FnMut(&mut StreamConnection) -> io::Result<Option<T>>,
    ) -> Poll<io::Result<T>> {
        let mut registered = false;
        loop {
            if self.connection.drive() {
                self.idle = 0;
                // The task of the other direction may sleep. This takes the own waker, too.
                self.events.waiters().wake_all();
                registered = false;
            }
            self.send_done();
            match attempt(&mut self.connection) {
                Ok(None) => {}
                Ok(Some(done)) => return Poll::Ready(Ok(done)),
                Err(error) => return Poll::Ready(Err(error)),
            }
            if self.idle < self.spins {
                self.idle += 1;
                cx.waker().wake_by_ref();
                return Poll::Pending;
            }
            if !registered {
                // Then once more: a buffer that another thread drops wakes registered tasks alone.
                self.events.waiters().add(cx.waker());
                registered = true;
                continue;
            }
            let event = ready!(self.events.poll(&mut self.connection.cq));
            registered = false;
            self.take(event);
        }
    }

    fn take(&mut self, event: Event) {
        match event {
            Event::Completions => {}
            Event::Byte(DONE) => self.connection.acknowledge(),
            Event::Byte(_) => self
                .connection
                .fail(io::ErrorKind::InvalidData, "the peer is no stream of this kind"),
            Event::PeerGone(error) => {
                // What it sent before is in the completion queue.
                while self.connection.drive() {}
                self.connection
                    .fail(io::ErrorKind::ConnectionReset, &format!("the peer is gone: {error}"));
            }
            Event::Device(error) => self.connection.fail(io::ErrorKind::Other, &error.to_string()),
        }
    }

    fn send_done(&mut self) {
        if self.connection.has_ended() && !self.sent_done {
            self.events.peer().send(DONE);
            self.sent_done = true;
        }
    }

    fn poll_shutdown(&mut self, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        self.poll(cx, |connection| Ok(connection.shut_down()?.then_some(())))
    }
}

impl AsyncRead for RdmaStream {
    fn poll_read(self: Pin<&mut Self>, cx: &mut Context<'_>, into: &mut ReadBuf<'_>) -> Poll<io::Result<()>> {
        if into.remaining() == 0 {
            return Poll::Ready(Ok(()));
        }
        let inner = self.get_mut().get_mut();
        let bytes = into.initialize_unfilled();
        let len = ready!(inner.poll(cx, |connection| connection.read(bytes)))?;
        into.advance(len);
        Poll::Ready(Ok(()))
    }
}

impl AsyncWrite for RdmaStream {
    fn poll_write(self: Pin<&mut Self>, cx: &mut Context<'_>, bytes: &[u8]) -> Poll<io::Result<usize>> {
        self.poll_write_vectored(cx, &[IoSlice::new(bytes)])
    }

    fn poll_write_vectored(
        self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        bytes: &[IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        let inner = self.get_mut().get_mut();
        inner.poll(cx, |connection| connection.write(bytes))
    }

    fn is_write_vectored(&self) -> bool {
        true
    }

    fn poll_flush(self: Pin<&mut Self>, _: &mut Context<'_>) -> Poll<io::Result<()>> {
        // What was written is posted.
        Poll::Ready(Ok(()))
    }

    fn poll_shutdown(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        self.get_mut().get_mut().poll_shutdown(cx)
    }
}

#[cfg(feature = "futures-io")]
impl futures_io::AsyncRead for RdmaStream {
    fn poll_read(self: Pin<&mut Self>, cx: &mut Context<'_>, into: &mut [u8]) -> Poll<io::Result<usize>> {
        let inner = self.get_mut().get_mut();
        if into.is_empty() {
            return Poll::Ready(Ok(0));
        }
        inner.poll(cx, |connection| connection.read(into))
    }
}

#[cfg(feature = "futures-io")]
impl futures_io::AsyncWrite for RdmaStream {
    fn poll_write(self: Pin<&mut Self>, cx: &mut Context<'_>, bytes: &[u8]) -> Poll<io::Result<usize>> {
        AsyncWrite::poll_write(self, cx, bytes)
    }

    fn poll_write_vectored(
        self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        bytes: &[IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        AsyncWrite::poll_write_vectored(self, cx, bytes)
    }

    fn poll_flush(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        AsyncWrite::poll_flush(self, cx)
    }

    fn poll_close(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        AsyncWrite::poll_shutdown(self, cx)
    }
}

impl Drop for RdmaStream {
    fn drop(&mut self) {
        let Some(mut inner) = self.inner.take() else { return };
        let Ok(runtime) = tokio::runtime::Handle::try_current() else {
            return;
        };
        if inner.connection.is_unfinished() {
            let linger = self.linger;
            runtime.spawn(async move {
                let finished = poll_fn(|cx| inner.poll_shutdown(cx));
                // A peer that does not read in time loses the rest, as with TCP.
                let _ = tokio::time::timeout(linger, finished).await;
            });
        }
    }
}
