//! Connecting streams: queue pairs are made here, and their endpoints exchanged over TCP, or by the
//! connection manager.

use std::future::poll_fn;
use std::io;
use std::net::{SocketAddr, ToSocketAddrs};
use std::sync::Arc;
use std::task::{Context, Poll, ready};

use doorbell_verbs::cm::{CmError, ConnectionManager, TokioListener};
use doorbell_verbs::exchange::{Exchange, ExchangeError};
use doorbell_verbs::{
    EventError, MemoryError, PostError, PreparedQueuePair, ProtectionDomain, QueuePair, QueuePairBuilder,
    QueuePairError, SharedReceiveQueueError, TokioChannel,
};
use tokio::net::{TcpListener, TcpStream};
use tokio::task::{JoinError, JoinSet, spawn_blocking};

use crate::config::{ConfigError, Sizes, StreamConfig};
use crate::connection::{self, Memory, StreamConnection};
use crate::events::{EventSource, Waiters};
use crate::managed;
use crate::peer::Peer;
use crate::stream::RdmaStream;

/// Clients that are being connected at once; others wait in the listener's backlog.
pub(crate) const HANDSHAKES: usize = 64;

/// A stream or queue pair could not be connected, or a server cannot go on.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ConnectError {
    /// A setting is out of range.
    #[error(transparent)]
    Config(#[from] ConfigError),
    /// The endpoints could not be exchanged.
    #[error(transparent)]
    Exchange(#[from] ExchangeError),
    /// The connection manager has not connected the ends.
    #[error(transparent)]
    Manager(#[from] CmError),
    /// The peer's program is none that uses streams of this version.
    #[error("{peer} exchanges endpoints, but not for a stream of this version")]
    NoStream {
        /// The peer's address.
        peer: SocketAddr,
    },
    /// The memory could not be registered.
    #[error(transparent)]
    Memory(#[from] MemoryError),
    /// The queue pair could not be made.
    #[error(transparent)]
    QueuePair(#[from] QueuePairError),
    /// The completion channel could not be made.
    #[error(transparent)]
    Channel(#[from] EventError),
    /// Receives could not be posted.
    #[error(transparent)]
    Post(#[from] PostError),
    /// The device has no completion queue of the length that the settings need.
    #[error(transparent)]
    Device(#[from] doorbell_verbs::DeviceError),
    /// The completion queue could not be made.
    #[error(transparent)]
    Queue(#[from] doorbell_verbs::CompletionQueueError),
    /// The shared receive queue could not be made.
    #[error(transparent)]
    SharedReceiveQueue(#[from] SharedReceiveQueueError),
    /// The system refuses a socket.
    #[error("{what}: {error}")]
    Socket {
        /// What was to be done.
        what: String,
        /// The system's error.
        error: io::Error,
    },
}

/// Waits for [`RdmaStream::connect`], or for [`RdmaStream::connect_cm`].
#[derive(Debug)]
pub struct RdmaListener {
    source: Source,
    address: SocketAddr,
    config: StreamConfig,
    handshakes: JoinSet<Result<RdmaStream, ConnectError>>,
}

/// Where clients come from.
#[derive(Debug)]
enum Source {
    Exchange(TcpListener, ProtectionDomain),
    Managed(TokioListener),
}

impl RdmaListener {
    /// Listens on `address`; port 0 is any free port. Streams are made in `pd`.
    ///
    /// # Errors
    /// When the address is in use, or not of this host, or a setting is out of range.
    pub async fn bind(
        address: impl tokio::net::ToSocketAddrs + std::fmt::Debug,
        pd: ProtectionDomain,
        config: StreamConfig,
    ) -> Result<Self, ConnectError> {
        config.check()?;
        let (listener, address) = listen(address).await?;
        Ok(Self::new(Source::Exchange(listener, pd), address, config))
    }

    /// Listens on `address` by the connection manager (rdma_cm(7)) instead of TCP: on all devices
    /// if it is unspecified; port 0 is any free port. Streams are made on the device that a
    /// client's request comes to.
    ///
    /// # Errors
    /// When the address is in use, or of no local RDMA device, or a setting is out of range.
    ///
    /// # Panics
    /// Outside a runtime, or in one whose I/O is not enabled.
    pub fn bind_cm(
        manager: ConnectionManager,
        address: SocketAddr,
        config: StreamConfig,
    ) -> Result<Self, ConnectError> {
        config.check()?;
        let listener = manager.listen(address, HANDSHAKES as u16)?;
        let address = listener.local_addr().unwrap_or(address);
        let listener = TokioListener::new(listener).map_err(socket)?;
        Ok(Self::new(Source::Managed(listener), address, config))
    }

    fn new(source: Source, address: SocketAddr, config: StreamConfig) -> Self {
        Self {
            source,
            address,
            config,
            handshakes: JoinSet::new(),
        }
    }

    /// The address it listens on.
    #[must_use]
    pub fn local_addr(&self) -> SocketAddr {
        self.address
    }

    /// The next client that is connected. Clients connect side by side, up to 64 of them: one that
    /// says nothing delays none. Cancel-safe: a client whose connecting had begun comes next time.
    ///
    /// # Errors
    /// Of one client, after which others may be accepted; or of the listening socket or identifier.
    pub async fn accept(&mut self) -> Result<RdmaStream, ConnectError> {
        poll_fn(|cx| self.poll_accept(cx)).await
    }

    fn poll_accept(&mut self, cx: &mut Context<'_>) -> Poll<Result<RdmaStream, ConnectError>> {
        while self.handshakes.len() < HANDSHAKES
            && let Poll::Ready(begun) = self.poll_begin(cx)
        {
            begun?;
        }
        match self.handshakes.poll_join_next(cx) {
            Poll::Ready(Some(connected)) => Poll::Ready(joined(connected)?),
            // None: the listener wakes the task.
            Poll::Ready(None) | Poll::Pending => Poll::Pending,
        }
    }

    /// Begins to connect the next client.
    fn poll_begin(&mut self, cx: &mut Context<'_>) -> Poll<Result<(), ConnectError>> {
        let config = self.config.clone();
        match &mut self.source {
            Source::Exchange(listener, pd) => {
                let (tcp, _) = ready!(listener.poll_accept(cx)).map_err(|error| ConnectError::Socket {
                    what: format!("accepting on {}", self.address),
                    error,
                })?;
                let (tcp, pd) = (tcp.into_std().map_err(socket)?, pd.clone());
                let timeout = config.timeout;
                self.handshakes
                    .spawn(open_over(pd, config, move || Exchange::over(tcp, timeout)));
            }
            Source::Managed(listener) => {
                let request = ready!(listener.poll_request(cx))?;
                self.handshakes.spawn(managed::accept(request, self.address, config));
            }
        }
        Poll::Ready(Ok(()))
    }
}

pub(crate) async fn connect(
    to: impl ToSocketAddrs + std::fmt::Debug + Send + 'static,
    pd: ProtectionDomain,
    config: StreamConfig,
) -> Result<RdmaStream, ConnectError> {
    let timeout = config.timeout;
    open_over(pd, config, move || Exchange::connect(to, timeout)).await
}

async fn open_over(
    pd: ProtectionDomain,
    config: StreamConfig,
    exchange: impl FnOnce() -> Result<Exchange, ExchangeError> + Send + 'static,
) -> Result<RdmaStream, ConnectError> {
    let connect = move |prepared, own: Sizes| {
        let mut exchange = exchange()?;
        let (qp, theirs) = exchange.pair(prepared, &own.to_bytes())?;
        let address = exchange.peer_addr();
        Ok(Connected {
            qp,
            theirs: Sizes::from_bytes(&theirs).ok_or(ConnectError::NoStream { peer: address })?,
            peer: Peer::Exchange(tcp_of(exchange.into_stream())?),
            address,
        })
    };
    open(&pd, |qp| qp, &config, connect).await
}

/// A stream's queue pair, and its peer.
pub(crate) struct Connected {
    pub(crate) qp: QueuePair,
    pub(crate) theirs: Sizes,
    pub(crate) peer: Peer,
    pub(crate) address: SocketAddr,
}

/// Makes a queue pair with its receives posted, and connects it by `connect`, which blocks.
pub(crate) async fn open(
    pd: &ProtectionDomain,
    options: impl FnOnce(QueuePairBuilder<'_>) -> QueuePairBuilder<'_>,
    config: &StreamConfig,
    connect: impl FnOnce(PreparedQueuePair, Sizes) -> Result<Connected, ConnectError> + Send + 'static,
) -> Result<RdmaStream, ConnectError> {
    let own = config.check()?;
    let channel = TokioChannel::new(pd.context().completion_channel()?).map_err(socket)?;
    let depth = connection::send_depth(own);
    let entries = depth + u32::from(own.chunks);
    let cq = pd.context().completion_queue_on(channel.channel(), entries)?;
    let mut prepared = options(pd.queue_pair(&cq))
        .max_send_wr(depth)
        .max_recv_wr(own.chunks.into())
        .max_inline_data(connection::INLINE)
        .rc()?;
    let memory = Memory::register(pd, own)?;
    for buffer in memory.receiving {
        prepared.receive(buffer)?;
    }

    let connected = joined(spawn_blocking(move || connect(prepared, own)).await)??;
    let waiters = Arc::new(Waiters::default());
    let queues = (cq, connected.qp);
    let connection = StreamConnection::new(queues, memory.sending, (own, connected.theirs), &waiters);
    let events = EventSource::new(channel, connected.peer, waiters);
    Ok(RdmaStream::new(connection, events, connected.address, config))
}

/// A listening socket, and its address.
pub(crate) async fn listen(
    address: impl tokio::net::ToSocketAddrs + std::fmt::Debug,
) -> Result<(TcpListener, SocketAddr), ConnectError> {
    let failed = |error| ConnectError::Socket {
        what: format!("listening on {address:?}"),
        error,
    };
    let listener = TcpListener::bind(&address).await.map_err(failed)?;
    let address = listener.local_addr().map_err(failed)?;
    Ok((listener, address))
}

/// The TCP connection of an exchange, for tasks.
pub(crate) fn tcp_of(tcp: std::net::TcpStream) -> Result<TcpStream, ConnectError> {
    tcp.set_nonblocking(true).map_err(socket)?;
    TcpStream::from_std(tcp).map_err(socket)
}

pub(crate) fn joined<T>(result: Result<T, JoinError>) -> Result<T, ConnectError> {
    result.map_err(|error| match error.try_into_panic() {
        Ok(panic) => std::panic::resume_unwind(panic),
        Err(error) => socket(io::Error::other(error)),
    })
}

pub(crate) fn socket(error: io::Error) -> ConnectError {
    ConnectError::Socket {
        what: "the connection's descriptors".to_owned(),
        error,
    }
}
