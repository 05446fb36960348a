//! A server of many clients: one completion queue, one shared receive queue, one task.

use std::collections::{HashMap, HashSet, VecDeque};
use std::future::poll_fn;
use std::net::SocketAddr;
use std::task::{Context, Poll, ready};
use std::time::Duration;

use doorbell_verbs::exchange::{Exchange, ExchangeError};
use doorbell_verbs::{
    Buffer, CompletionQueue, Local, MemoryError, Notify, ProtectionDomain, QueueKind, QueuePair, QueuePairBuilder,
    ReliableConnection, SharedReceiveQueue, Success, TokioChannel, WithSrq,
};
use tokio::net::{TcpListener, TcpStream};
use tokio::task::coop::consume_budget;
use tokio::task::{AbortHandle, JoinSet};

use crate::connect::{ConnectError, HANDSHAKES, joined, listen, socket, tcp_of};

/// The settings of an [`RdmaServer`].
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct ServerConfig {
    /// The longest message received by a SEND, in bytes: 4 KiB by default.
    pub message: u32,
    /// Receives for the messages of all clients together: 128 by default. They take
    /// `message * receives` bytes of registered memory. A client that finds none tries again.
    pub receives: u32,
    /// Requests that the server may have in flight to one client: 16 by default.
    pub sends: u32,
    /// Clients at once: 64 by default. Others wait in the backlog of the TCP listener.
    pub clients: u32,
    /// How long connecting may take, from the TCP connection on: 10 s by default.
    pub timeout: Duration,
}

impl Default for ServerConfig {
    fn default() -> Self {
        Self {
            message: 4096,
            receives: 128,
            sends: 16,
            clients: 64,
            timeout: Duration::from_secs(10),
        }
    }
}

impl ServerConfig {
    /// Sets [`message`](Self::message).
    #[must_use]
    pub fn message(mut self, bytes: u32) -> Self {
        self.message = bytes;
        self
    }

    /// Sets [`receives`](Self::receives).
    #[must_use]
    pub fn receives(mut self, receives: u32) -> Self {
        self.receives = receives;
        self
    }

    /// Sets [`clients`](Self::clients).
    #[must_use]
    pub fn clients(mut self, clients: u32) -> Self {
        self.clients = clients;
        self
    }
}

type Options = dyn Fn(QueuePairBuilder<'_>) -> QueuePairBuilder<'_> + Send;
type Welcome<T> = dyn FnMut(&ProtectionDomain) -> Result<(Vec<u8>, T), MemoryError> + Send;
type SharedQueuePair = QueuePair<WithSrq<ReliableConnection>>;

/// Accepts [`AsyncQueuePair::connect`](crate::AsyncQueuePair::connect) of many clients, and
/// receives their messages into buffers that all share: its memory does not grow with their number.
/// One task serves them all.
///
/// ```no_run
/// # use doorbell_tokio::{ConnectError, RdmaServer, ServerConfig};
/// # use doorbell_verbs::ProtectionDomain;
/// /// Answers each message with how many its client has sent before.
/// async fn count(pd: ProtectionDomain) -> Result<(), ConnectError> {
///     let config = ServerConfig::default().message(256);
///     let welcome = |_: &ProtectionDomain| Ok((Vec::new(), 0_u8));
///     let mut server = RdmaServer::bind("0.0.0.0:18516", pd, config, |qp| qp.max_inline_data(1), welcome).await?;
///     loop {
///         let client = server.next().await?.client;
///         client.qp.send_inline(&[client.state])?;
///         client.state += 1;
///     }
/// }
/// ```
///
/// A client that leaves, or whose queue pair fails, is removed once its last message is taken. The
/// receive that its queue pair held when it failed may be lost until the server is dropped, as
/// [`SharedReceiveQueue`] says.
// fields: what accepts, the queues, the clients by state: one task owns them all.
pub struct RdmaServer<T> {
    listener: TcpListener,
    address: SocketAddr,
    pd: ProtectionDomain,
    config: ServerConfig,
    options: Box<Options>,
    welcome: Box<Welcome<T>>,
    channel: TokioChannel,
    cq: CompletionQueue,
    /// The queue has requested an event and has raised none since.
    armed: bool,
    srq: SharedReceiveQueue,
    next_tag: u64,
    connecting: HashSet<u64>,
    handshakes: JoinSet<(u64, Result<Connected<T>, ExchangeError>)>,
    /// By the tag of the queue pair.
    clients: HashMap<u64, Client<T>>,
    /// Each of a client's TCP connection.
    ends: JoinSet<u64>,
    /// Have failed or left.
    leaving: Vec<u64>,
    messages: VecDeque<(u64, Success, Buffer)>,
    /// Of the message that was returned last.
    lent: Option<Buffer>,
}

type Connected<T> = (SharedQueuePair, T, std::net::TcpStream);

/// A client of an [`RdmaServer`].
#[derive(Debug)]
pub struct Client<T> {
    /// Its queue pair. What is sent with it completes in the server, which drops the buffers.
    pub qp: SharedQueuePair,
    /// What the server has for this client.
    pub state: T,
    end: AbortHandle,
}

/// A message of a client.
#[derive(Debug)]
pub struct Message<'a, T> {
    /// Its sender.
    pub client: &'a mut Client<T>,
    /// [`Success::Receive`], or [`Success::ReceiveWrite`], whose data is where it was written.
    pub success: Success,
    /// The bytes of a SEND. Their buffer is posted again by the next call.
    pub bytes: &'a [u8],
}

impl<T: Send + 'static> RdmaServer<T> {
    /// Listens on `address`; port 0 is any free port. Queue pairs are made in `pd` with `options`.
    /// For each client that connects, `welcome` makes what it gets as the data of the exchange, and
    /// what the server keeps for it: memory that it may write, say.
    ///
    /// # Errors
    /// When the address is in use, or not of this host, or the device refuses.
    pub async fn bind(
        address: impl tokio::net::ToSocketAddrs + std::fmt::Debug,
        pd: ProtectionDomain,
        config: ServerConfig,
        options: impl Fn(QueuePairBuilder<'_>) -> QueuePairBuilder<'_> + Send + 'static,
        welcome: impl FnMut(&ProtectionDomain) -> Result<(Vec<u8>, T), MemoryError> + Send + 'static,
    ) -> Result<Self, ConnectError> {
        let (listener, address) = listen(address).await?;
        let channel = TokioChannel::new(pd.context().completion_channel()?).map_err(socket)?;
        // Twice: entries of clients that have left are free once they are polled.
        let sends = config.clients.saturating_mul(config.sends).saturating_mul(2);
        let entries = sends.saturating_add(config.receives);
        let cq = pd.context().completion_queue_on(channel.channel(), entries)?;
        let mut srq = pd.shared_receive_queue(config.receives).create()?;
        let message = config.message as usize;
        let buffers = pd.register_chunks(vec![0; message * config.receives as usize], message, Local)?;
        srq.post_receives(|batch| buffers.for_each(|buffer| batch.receive(buffer)))?;
        Ok(Self {
            listener,
            address,
            pd,
            config,
            options: Box::new(options),
            welcome: Box::new(welcome),
            channel,
            cq,
            armed: false,
            srq,
            next_tag: 0,
            connecting: HashSet::new(),
            handshakes: JoinSet::new(),
            clients: HashMap::new(),
            ends: JoinSet::new(),
            leaving: Vec::new(),
            messages: VecDeque::new(),
            lent: None,
        })
    }

    /// The address it listens on.
    #[must_use]
    pub fn local_addr(&self) -> SocketAddr {
        self.address
    }

    /// The next message of any client, of each in the order of its sends. Meanwhile clients
    /// connect, side by side, and others are removed. Cancel-safe.
    ///
    /// # Errors
    /// Of the listening socket or the device. That a client fails to connect is an error of its
    /// own end alone.
    pub async fn next(&mut self) -> Result<Message<'_, T>, ConnectError> {
        // Other tasks of the thread run, too, while there are always messages.
        consume_budget().await;
        if let Some(buffer) = self.lent.take() {
            self.srq.receive(buffer)?;
        }
        let (tag, success, buffer) = poll_fn(|cx| self.poll(cx)).await?;
        let len = match success {
            Success::Receive { len, .. } => len as usize,
            _ => 0,
        };
        let buffer = self.lent.insert(buffer);
        Ok(Message {
            client: self.clients.get_mut(&tag).expect("poll returns messages of clients"),
            success,
            bytes: &buffer[..len],
        })
    }

    fn poll(&mut self, cx: &mut Context<'_>) -> Poll<Result<(u64, Success, Buffer), ConnectError>> {
        loop {
            if let Some(message) = self.take_message()? {
                return Poll::Ready(Ok(message));
            }
            self.remove_leaving();
            // Both: clients connect while there are always messages.
            if self.drive()? | self.poll_clients(cx)? {
                continue;
            }
            if !self.armed {
                // What came before raises no event: polls once more.
                self.cq.arm(Notify::Any)?;
                self.armed = true;
                continue;
            }
            ready!(self.channel.poll_events(cx))?;
            self.armed = false;
        }
    }

    /// The first message of a client. One that is about to be connected has its messages later;
    /// one that failed to has none.
    fn take_message(&mut self) -> Result<Option<(u64, Success, Buffer)>, ConnectError> {
        let is_due = |(tag, ..): &(u64, Success, Buffer)| !self.connecting.contains(tag);
        while let Some(at) = self.messages.iter().position(is_due) {
            let Some((tag, success, buffer)) = self.messages.remove(at) else {
                break;
            };
            if self.clients.contains_key(&tag) {
                return Ok(Some((tag, success, buffer)));
            }
            self.srq.receive(buffer)?;
        }
        Ok(None)
    }

    /// When all of their messages are taken.
    fn remove_leaving(&mut self) {
        self.leaving.retain(|tag| {
            if let Some(mut client) = self.clients.remove(tag) {
                client.end.abort();
                // Its receive returns by a completion. Fails when the device is gone.
                let _ = client.qp.flush();
            }
            self.connecting.contains(tag)
        });
    }

    fn poll_clients(&mut self, cx: &mut Context<'_>) -> Result<bool, ConnectError> {
        let mut any = false;
        while self.connecting.len() < HANDSHAKES
            && self.connecting.len() + self.clients.len() < self.config.clients as usize
            && let Poll::Ready(accepted) = self.listener.poll_accept(cx)
        {
            let accepted = accepted.map_err(|error| ConnectError::Socket {
                what: format!("accepting on {}", self.address),
                error,
            })?;
            self.begin(accepted.0)?;
            any = true;
        }
        while let Poll::Ready(Some(handshake)) = self.handshakes.poll_join_next(cx) {
            let (tag, connected) = joined(handshake)?;
            self.connecting.remove(&tag);
            if let Ok(connected) = connected {
                self.admit(tag, connected)?;
            }
            any = true;
        }
        while let Poll::Ready(Some(end)) = self.ends.poll_join_next(cx) {
            // An error is that of a client which has been removed.
            if let Ok(tag) = end {
                // What it sent before is in the completion queue.
                while self.drive()? {}
                self.leaving.push(tag);
                any = true;
            }
        }
        Ok(any)
    }

    fn begin(&mut self, tcp: TcpStream) -> Result<(), ConnectError> {
        let tcp = tcp.into_std().map_err(socket)?;
        let (data, state) = (self.welcome)(&self.pd)?;
        let tag = self.next_tag;
        let builder = self.pd.queue_pair(&self.cq).max_send_wr(self.config.sends);
        let builder = (self.options)(builder).tag(tag);
        let prepared = builder.shared_receive_queue(&self.srq).rc()?;
        let timeout = self.config.timeout;
        self.next_tag += 1;
        self.connecting.insert(tag);
        self.handshakes.spawn_blocking(move || {
            let connect = || {
                let mut exchange = Exchange::over(tcp, timeout)?;
                let (qp, _) = exchange.pair(prepared, &data)?;
                Ok((qp, state, exchange.into_stream()))
            };
            (tag, connect())
        });
        Ok(())
    }

    fn admit(&mut self, tag: u64, (qp, state, tcp): Connected<T>) -> Result<(), ConnectError> {
        let tcp = tcp_of(tcp)?;
        let end = self.ends.spawn(async move {
            // The exchange is over: a byte is an end, too.
            let _ = tcp.peek(&mut [0]).await;
            tag
        });
        self.clients.insert(tag, Client { qp, state, end });
        Ok(())
    }

    /// Takes what has completed. True if anything has.
    fn drive(&mut self) -> Result<bool, ConnectError> {
        let mut any = false;
        for mut done in self.cq.poll()? {
            any = true;
            let (tag, result) = (done.tag(), done.result());
            if result.is_err() {
                self.leaving.push(tag);
            }
            let received = match done.queue() {
                QueueKind::Receive => done.take::<Local>(),
                QueueKind::Send => None,
            };
            match (result, received) {
                (Ok(success), Some(buffer)) => self.messages.push_back((tag, success, buffer)),
                (Err(_), Some(buffer)) => self.srq.receive(buffer)?,
                (_, None) => {}
            }
        }
        Ok(any)
    }
}

impl<T> std::fmt::Debug for RdmaServer<T> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("RdmaServer")
            .field("address", &self.address)
            .field("clients", &self.clients.len())
            .finish_non_exhaustive()
    }
}
