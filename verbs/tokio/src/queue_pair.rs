//! Operations that tasks await, any number at once on one queue pair.

use std::future::Future;
use std::io;
use std::net::ToSocketAddrs;
use std::pin::Pin;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::task::{Context, Poll, Waker, ready};
use std::time::Duration;

use doorbell_verbs::exchange::Exchange;
use doorbell_verbs::{
    AtomicWord, Buffer, Buffers, CompletionError, CompletionQueue, GrantsRead, GrantsWrite, Local, MemoryError,
    MemoryKind, PostError, ProtectionDomain, QueueKind, QueuePair, QueuePairBuilder, Remote, RemoteWord, Sink, Source,
    Success, TokioChannel,
};
use tokio::task::spawn_blocking;

use crate::connect::{ConnectError, joined, socket, tcp_of};
use crate::events::{Event, EventSource, Waiters};
use crate::peer::Peer;
use crate::pending::Pending;

/// Entries of its queues, which are the builder's default.
const DEPTH: u32 = 128;

/// How long connecting to a peer may take.
const TIMEOUT: Duration = Duration::from_secs(10);

/// Turns of the runtime that a task polls before it sleeps, as of a stream by default.
const SPINS: u32 = 200;

/// A reliable connection whose operations are futures. Clones are the same connection, for tasks
/// that use it side by side; it ends with the last clone and the last operation.
///
/// An operation is posted when it is called, in the order of calls, not when it is first polled.
/// Its future gives the buffer back. A future that is dropped cancels nothing: the device goes on,
/// and the buffer is dropped when it is done with it.
///
/// ```no_run
/// # use doorbell_tokio::AsyncQueuePair;
/// # use doorbell_verbs::{ProtectionDomain, Remote, WriteAccess};
/// # async fn example(pd: ProtectionDomain) -> Result<(), Box<dyn std::error::Error>> {
/// let (qp, their_data) = AsyncQueuePair::connect("server:18516", pd, |options| options, b"").await?;
/// let inbox = Remote::<WriteAccess>::from_bytes(&their_data)?;
/// let block = qp.write(qp.register(vec![7; 4096])?, inbox).await?;
/// let (success, answer) = qp.receive(qp.register(vec![0; 64])?).await?;
/// # Ok(())
/// # }
/// ```
#[derive(Clone)]
pub struct AsyncQueuePair {
    shared: Arc<Shared>,
}

/// An operation has failed.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum OperationError {
    /// It was not posted: the queue is full, say. The buffers are in the error.
    #[error(transparent)]
    Rejected(#[from] PostError),
    /// The device has failed it. Once one has failed, so do all later ones.
    #[error("{error}")]
    Failed {
        /// Why.
        error: CompletionError,
        /// Its buffers.
        buffers: Buffers,
    },
    /// The peer has closed its end, and sends nothing more. The buffer of a receive is with the
    /// device until the connection ends.
    #[error("the peer is gone: {0}")]
    PeerGone(Arc<io::Error>),
    /// The device is gone.
    #[error("{0}")]
    Device(Arc<dyn std::error::Error + Send + Sync>),
}

/// An operation in progress; its output is what it gives back.
#[must_use = "whether it succeeded is known by awaiting it alone"]
pub struct Operation<O> {
    state: State,
    give_back: fn(Success, Buffers) -> Option<O>,
    shared: Arc<Shared>,
    idle: u32,
}

enum State {
    Rejected(PostError),
    Posted(QueueKind, u64),
    Ended,
}

/// How a request has ended.
pub(crate) type Outcome = (Result<Success, CompletionError>, Buffers);

struct Shared {
    pd: ProtectionDomain,
    /// Held for the time of a post or a poll, never across an await.
    connection: Mutex<Connection>,
}

struct Connection {
    qp: QueuePair,
    cq: CompletionQueue,
    sends: Pending<Outcome>,
    receives: Pending<Outcome>,
    events: EventSource,
    broken: Option<Broken>,
    /// To be woken when the lock is free: a waker may run anything.
    woken: Vec<Waker>,
}

/// Why operations that are not complete never will be.
#[derive(Clone)]
enum Broken {
    PeerGone(Arc<io::Error>),
    Device(Arc<dyn std::error::Error + Send + Sync>),
}

impl AsyncQueuePair {
    /// Connects to a peer, an [`RdmaServer`](crate::RdmaServer) say, retrying until it listens, for
    /// 10 s at most; then as [`over`](Self::over), which may take as long again.
    ///
    /// # Errors
    /// When no program listens in time; and as of [`over`](Self::over).
    pub async fn connect(
        to: impl ToSocketAddrs + std::fmt::Debug + Send + 'static,
        pd: ProtectionDomain,
        options: impl FnOnce(QueuePairBuilder<'_>) -> QueuePairBuilder<'_>,
        data: &[u8],
    ) -> Result<(Self, Vec<u8>), ConnectError> {
        let exchange = joined(spawn_blocking(move || Exchange::connect(to, TIMEOUT)).await)??;
        Self::over(exchange, pd, options, data).await
    }

    /// Makes a queue pair with these options in `pd`, connects it to the peer's by `exchange`, and
    /// exchanges `data`: returns the peer's. Its queues have 128 entries each.
    ///
    /// A message that comes before its receive is posted waits, as its sender tries again.
    ///
    /// # Errors
    /// When an object cannot be made, or the peer is gone, too slow, or another program.
    pub async fn over(
        exchange: Exchange,
        pd: ProtectionDomain,
        options: impl FnOnce(QueuePairBuilder<'_>) -> QueuePairBuilder<'_>,
        data: &[u8],
    ) -> Result<(Self, Vec<u8>), ConnectError> {
        let channel = TokioChannel::new(pd.context().completion_channel()?).map_err(socket)?;
        let cq = pd.context().completion_queue_on(channel.channel(), 2 * DEPTH)?;
        let prepared = options(pd.queue_pair(&cq)).signal_all().rc()?;
        let data = data.to_vec();
        let exchanged = spawn_blocking(move || {
            let mut exchange = exchange;
            let (qp, theirs) = exchange.pair(prepared, &data)?;
            Ok::<_, ConnectError>((qp, theirs, exchange.into_stream()))
        });
        let (qp, theirs, tcp) = joined(exchanged.await)??;
        let connection = Connection {
            qp,
            cq,
            sends: Pending::default(),
            receives: Pending::default(),
            events: EventSource::new(channel, Peer::Exchange(tcp_of(tcp)?), Arc::new(Waiters::default())),
            broken: None,
            woken: Vec::new(),
        };
        let shared = Arc::new(Shared {
            pd,
            connection: Mutex::new(connection),
        });
        Ok((Self { shared }, theirs))
    }

    /// Registers memory in its protection domain for its operations: peers have no access.
    ///
    /// # Errors
    /// As of [`ProtectionDomain::register`].
    pub fn register(&self, memory: Vec<u8>) -> Result<Buffer, MemoryError> {
        self.shared.pd.register(memory, Local)
    }

    /// Sends `buffer`.
    #[doc(alias = "IBV_WR_SEND")]
    pub fn send<K: MemoryKind>(&self, buffer: Buffer<K>) -> Operation<Buffer<K>>
    where
        Buffer<K>: Source,
    {
        self.request(|qp| qp.send(buffer), |_, mut buffers| buffers.take())
    }

    /// Sends `bytes` inline: they may be reused at once.
    #[doc(alias = "IBV_SEND_INLINE")]
    pub fn send_inline(&self, bytes: &[u8]) -> Operation<()> {
        self.request(|qp| qp.send_inline(bytes), |_, _| Some(()))
    }

    /// Writes `buffer` to the beginning of `remote`.
    #[doc(alias = "IBV_WR_RDMA_WRITE")]
    pub fn write<K: MemoryKind>(&self, buffer: Buffer<K>, remote: Remote<impl GrantsWrite>) -> Operation<Buffer<K>>
    where
        Buffer<K>: Source,
    {
        self.request(|qp| qp.write(buffer, remote), |_, mut buffers| buffers.take())
    }

    /// As [`write`](Self::write), with immediate data, which completes a receive of the peer.
    #[doc(alias = "IBV_WR_RDMA_WRITE_WITH_IMM")]
    pub fn write_imm<K: MemoryKind>(
        &self,
        buffer: Buffer<K>,
        remote: Remote<impl GrantsWrite>,
        imm: u32,
    ) -> Operation<Buffer<K>>
    where
        Buffer<K>: Source,
    {
        let post = |qp: &mut QueuePair| {
            qp.post(|batch| {
                batch.write(buffer, remote).imm(imm);
            })
        };
        self.request(post, |_, mut buffers| buffers.take())
    }

    /// Reads the beginning of `remote` into `buffer`.
    #[doc(alias = "IBV_WR_RDMA_READ")]
    pub fn read<K: MemoryKind>(&self, buffer: Buffer<K>, remote: Remote<impl GrantsRead>) -> Operation<Buffer<K>>
    where
        Buffer<K>: Sink,
    {
        self.request(|qp| qp.read(buffer, remote), |_, mut buffers| buffers.take())
    }

    /// Adds to the word at `at`, whose old value comes back in `word`.
    #[doc(alias = "IBV_WR_ATOMIC_FETCH_AND_ADD")]
    pub fn fetch_add(&self, word: AtomicWord, at: RemoteWord, add: u64) -> Operation<AtomicWord> {
        self.request(|qp| qp.fetch_add(word, at, add), |_, mut buffers| buffers.take_word())
    }

    /// Replaces the word at `at` by `swap` if it is `compare`; its old value comes back in `word`.
    #[doc(alias = "IBV_WR_ATOMIC_CMP_AND_SWP")]
    pub fn compare_swap(&self, word: AtomicWord, at: RemoteWord, compare: u64, swap: u64) -> Operation<AtomicWord> {
        let post = |qp: &mut QueuePair| qp.compare_swap(word, at, compare, swap);
        self.request(post, |_, mut buffers| buffers.take_word())
    }

    /// Receives a message into `buffer`: what came, with its length and immediate data.
    #[doc(alias = "ibv_post_recv")]
    pub fn receive<K: MemoryKind>(&self, buffer: Buffer<K>) -> Operation<(Success, Buffer<K>)>
    where
        Buffer<K>: Sink,
    {
        let mut connection = self.shared.lock();
        let sequence = connection.qp.next_receive();
        let posted = connection.qp.receive(buffer);
        let queue = QueueKind::Receive;
        self.operation(connection, posted, (queue, sequence), |success, mut buffers| {
            buffers.take().map(|buffer| (success, buffer))
        })
    }

    fn request<O>(
        &self,
        post: impl FnOnce(&mut QueuePair) -> Result<(), PostError>,
        give_back: fn(Success, Buffers) -> Option<O>,
    ) -> Operation<O> {
        let mut connection = self.shared.lock();
        let sequence = connection.qp.next_send();
        let posted = post(&mut connection.qp);
        self.operation(connection, posted, (QueueKind::Send, sequence), give_back)
    }

    fn operation<O>(
        &self,
        mut connection: MutexGuard<'_, Connection>,
        posted: Result<(), PostError>,
        (queue, sequence): (QueueKind, u64),
        give_back: fn(Success, Buffers) -> Option<O>,
    ) -> Operation<O> {
        let state = match posted {
            Ok(()) => {
                // Before the lock is free, thus before it can be found complete.
                connection.pending(queue).push(sequence);
                State::Posted(queue, sequence)
            }
            Err(error) => State::Rejected(error),
        };
        Operation {
            state,
            give_back,
            shared: Arc::clone(&self.shared),
            idle: 0,
        }
    }
}

impl Shared {
    fn lock(&self) -> MutexGuard<'_, Connection> {
        // A panic in between, of an allocation say, leaves whole objects.
        self.connection.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Wakes the tasks whose requests have completed, once the lock is free.
    fn unlock(&self, mut connection: MutexGuard<'_, Connection>) {
        let woken = std::mem::take(&mut connection.woken);
        drop(connection);
        for waker in woken {
            waker.wake();
        }
    }
}

impl Connection {
    fn pending(&mut self, queue: QueueKind) -> &mut Pending<Outcome> {
        match queue {
            QueueKind::Send => &mut self.sends,
            QueueKind::Receive => &mut self.receives,
        }
    }

    /// Hands out what has completed. True if anything has.
    fn drive(&mut self) -> bool {
        let completions = match self.cq.poll() {
            Ok(completions) => completions,
            Err(error) => {
                self.broken.get_or_insert_with(|| Broken::Device(Arc::new(error)));
                return false;
            }
        };
        let mut any = false;
        for done in completions {
            any = true;
            let pending = match done.queue() {
                QueueKind::Send => &mut self.sends,
                QueueKind::Receive => &mut self.receives,
            };
            let (sequence, result) = (done.sequence(), done.result());
            self.woken
                .extend(pending.complete(sequence, (result, done.into_buffers())));
        }
        any
    }

    fn take(&mut self, event: Event) {
        let broken = match event {
            Event::Completions => return,
            // The peer's exchange is at its end.
            Event::Byte(_) => Broken::PeerGone(Arc::new(io::ErrorKind::UnexpectedEof.into())),
            Event::PeerGone(error) => Broken::PeerGone(Arc::new(error)),
            Event::Device(error) => Broken::Device(Arc::new(error)),
        };
        // What the peer sent before is in the completion queue.
        while self.drive() {}
        self.broken.get_or_insert(broken);
        self.events.waiters().wake_all();
    }

    /// The outcome of one request; drives all, and sleeps.
    fn poll(
        &mut self,
        (queue, sequence): (QueueKind, u64),
        idle: &mut u32,
        cx: &mut Context<'_>,
    ) -> Poll<Result<Outcome, OperationError>> {
        loop {
            if self.drive() {
                *idle = 0;
            }
            if let Some(outcome) = self.pending(queue).take(sequence) {
                return Poll::Ready(Ok(outcome));
            }
            match &self.broken {
                Some(Broken::Device(error)) => return Poll::Ready(Err(OperationError::Device(Arc::clone(error)))),
                // The device ends the operations that it has begun by itself.
                Some(Broken::PeerGone(error)) if queue == QueueKind::Receive => {
                    return Poll::Ready(Err(OperationError::PeerGone(Arc::clone(error))));
                }
                _ => {}
            }
            self.pending(queue).wait(sequence, cx.waker());
            if *idle < SPINS {
                *idle += 1;
                cx.waker().wake_by_ref();
                return Poll::Pending;
            }
            // Under the lock, as is whatever ends the wait: nothing comes between.
            self.events.waiters().add(cx.waker());
            let event = ready!(self.events.poll(&mut self.cq));
            self.take(event);
        }
    }
}

impl<O> Future for Operation<O> {
    type Output = Result<O, OperationError>;

    fn poll(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Self::Output> {
        let this = &mut *self;
        let posted = match std::mem::replace(&mut this.state, State::Ended) {
            State::Posted(queue, sequence) => (queue, sequence),
            State::Rejected(error) => return Poll::Ready(Err(error.into())),
            State::Ended => panic!("an operation is polled after its end"),
        };
        let mut connection = this.shared.lock();
        let polled = connection.poll(posted, &mut this.idle, cx);
        if polled.is_pending() {
            this.state = State::Posted(posted.0, posted.1);
        }
        this.shared.unlock(connection);
        let (result, buffers) = ready!(polled)?;
        Poll::Ready(match result {
            Ok(success) => Ok((this.give_back)(success, buffers).expect("a request has the buffers that it was given")),
            Err(error) => Err(OperationError::Failed { error, buffers }),
        })
    }
}

impl<O> Unpin for Operation<O> {}

impl<O> Drop for Operation<O> {
    fn drop(&mut self) {
        let State::Posted(queue, sequence) = self.state else {
            return;
        };
        // Its buffers are dropped when the lock is free: that may take long.
        let abandoned = self.shared.lock().pending(queue).abandon(sequence);
        drop(abandoned);
    }
}

impl<O> std::fmt::Debug for Operation<O> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let name = match &self.state {
            State::Rejected(_) => "rejected",
            State::Posted(..) => "posted",
            State::Ended => "ended",
        };
        f.debug_struct("Operation")
            .field("state", &name)
            .finish_non_exhaustive()
    }
}

impl std::fmt::Debug for AsyncQueuePair {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("AsyncQueuePair").finish_non_exhaustive()
    }
}
