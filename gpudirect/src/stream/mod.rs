//! Stream-ordered posting: work requests that wait for GPU work, and GPU work that waits for work
//! requests.
//!
//! A [`StreamQueue`] posts a batch once an event or a stream's current work is done
//! ([`post_after`](StreamQueue::post_after)), and a stream can wait for the batch's completion
//! ([`Posted::enqueue_wait`]). Neither blocks the caller: the queue's thread and the streams
//! communicate through words in pinned memory.
//!
//! ```no_run
//! use doorbell_gpudirect::proxy::IdlePolicy;
//! use doorbell_gpudirect::stream::StreamQueue;
//! use doorbell_verbs::{Buffer, CompletionQueue, Opaque, QueuePair, Remote, PeerWrite, WriteAccess};
//!
//! /// The queue pair was built with `signal_all`, and has `cq` for itself.
//! fn example(
//!     stream: &doorbell_cuda::Stream,
//!     (qp, cq): (QueuePair, CompletionQueue),
//!     gradients: Buffer<Opaque<PeerWrite>>,
//!     theirs: Remote<WriteAccess>,
//! ) -> Result<(), Box<dyn std::error::Error>> {
//!     let queue = StreamQueue::spawn(stream.context(), qp, cq, IdlePolicy::default())?;
//!     // ... kernels that compute the gradients are launched on the stream ...
//!     let posted = queue.post_after(stream, move |batch| {
//!         batch.write(gradients, theirs); // when they are done
//!     })?;
//!     posted.enqueue_wait(stream)?;
//!     // ... kernels that overwrite the memory ...
//!     stream.synchronize()?;
//!     let buffers = posted.finish(None)?; // the error, or the buffers back
//!     # drop(buffers);
//!     Ok(())
//! }
//! ```
//!
//! # Graphs
//!
//! A graph would reuse the value of a single post at each launch, so these calls are refused during
//! capture. Graphs use [`StreamQueue::repeated`], whose batch is rebuilt each time a stream reaches
//! [`RepeatedPost::enqueue_post`].
//!
//! # Failures
//!
//! A failed request is reported by [`Posted::finish`], the first also by [`StreamQueue::failure`].
//! Waits of streams end also when a post fails or the queue is dropped, so work behind them may run
//! on missing data: check for failure before using its results.

mod error;
mod poster;
mod repeated;

use core::sync::atomic::{AtomicBool, Ordering};
use core::time::Duration;
use std::collections::VecDeque;
use std::sync::Arc;
use std::thread::JoinHandle;

use doorbell_cuda::{Context, Event, Stream, WaitCondition};
use doorbell_verbs::{Batch, Buffers, CompletionQueue, QueuePair};
pub use error::{PostFailed, StreamError};
use parking_lot::Mutex;
pub use poster::Poster;
use poster::Ready;
use repeated::Repeat;
pub use repeated::RepeatedPost;

use crate::proxy::{Backoff, IdlePolicy, run_until};
use crate::words::SharedWords;

type Build = Box<dyn for<'q> FnOnce(&mut Batch<'q, 'static>) + Send>;

const COMPLETED: usize = 0;
/// Index of the first word by which streams report that they reached a post: one per pending post.
const READY: usize = 16;
const MAX_PENDING: u64 = 256;

struct Shared {
    words: SharedWords,
    /// Locked while a stream operation is enqueued, so that posts reach the poster in ticket order.
    incoming: Mutex<Incoming>,
    waiting: AtomicBool,
    failure: Mutex<Option<PostFailed>>,
    stop: AtomicBool,
}

#[derive(Default)]
struct Incoming {
    tickets: u64,
    posts: VecDeque<PendingPost>,
    repeats: Vec<Repeat>,
    gone: bool,
}

struct PendingPost {
    ready: Ready,
    build: Build,
    state: Arc<State>,
}

#[derive(Default)]
struct State {
    completed: AtomicBool,
    outcome: Mutex<Option<Result<Vec<Buffers>, PostFailed>>>,
}

/// What a post waits for.
#[derive(Debug, Clone, Copy)]
pub enum PostTrigger<'a> {
    /// The event's work so far (none if never recorded); not to be recorded again meanwhile.
    /// Polled by driver queries, which are slower than a stream's word.
    Event(&'a Event),
    /// The stream's current work.
    Stream(&'a Stream),
}

impl<'a> From<&'a Event> for PostTrigger<'a> {
    fn from(event: &'a Event) -> Self {
        Self::Event(event)
    }
}

impl<'a> From<&'a Stream> for PostTrigger<'a> {
    fn from(stream: &'a Stream) -> Self {
        Self::Stream(stream)
    }
}

/// A queue pair that posts in stream order: see the [module](self). Thread-safe.
///
/// Posts execute in submission order, so streams that wait for each other need separate queues. On
/// drop, incomplete posts fail.
pub struct StreamQueue {
    shared: Arc<Shared>,
    thread: Option<Arc<Thread>>,
}

struct Thread {
    shared: Arc<Shared>,
    handle: Option<JoinHandle<()>>,
}

impl Drop for Thread {
    fn drop(&mut self) {
        self.shared.stop.store(true, Ordering::Release);
        if let Some(handle) = self.handle.take()
            && handle.join().is_err()
        {
            tracing::error!("the thread of a stream's queue has panicked");
        }
    }
}

impl StreamQueue {
    /// A queue driven by its own thread. `cq` must receive completions of `qp` only.
    ///
    /// # Errors
    /// [`StreamError::NotSignaled`] for a queue pair not built with
    /// [`signal_all`](doorbell_verbs::QueuePairBuilder::signal_all); the driver's error.
    pub fn spawn(context: &Context, qp: QueuePair, cq: CompletionQueue, idle: IdlePolicy) -> Result<Self, StreamError> {
        let (mut queue, mut poster) = Self::without_thread(context, qp, cq)?;
        let shared = Arc::clone(&queue.shared);
        let drive = move || run_until(idle, || poster.progress(), || shared.stop.load(Ordering::Acquire));
        let handle = doorbell_threads::spawn("doorbell-stream", drive).map_err(StreamError::Thread)?;
        queue.thread = Some(Arc::new(Thread {
            shared: Arc::clone(&queue.shared),
            handle: Some(handle),
        }));
        Ok(queue)
    }

    /// The same, driven by calls of [`Poster::progress`].
    pub fn without_thread(
        context: &Context,
        qp: QueuePair,
        cq: CompletionQueue,
    ) -> Result<(Self, Poster), StreamError> {
        if !qp.query()?.signal_all {
            return Err(StreamError::NotSignaled);
        }
        let shared = Arc::new(Shared {
            words: SharedWords::pinned(context, READY + MAX_PENDING as usize)?,
            incoming: Mutex::default(),
            waiting: AtomicBool::new(false),
            failure: Mutex::default(),
            stop: AtomicBool::new(false),
        });
        let poster = Poster::new(Arc::clone(&shared), qp, cq);
        Ok((Self { shared, thread: None }, poster))
    }

    /// Posts the batch of `build` after `after`. `build` runs on the queue's thread. A batch may
    /// have half as many requests as the send queue.
    ///
    /// # Errors
    /// [`StreamError::Full`] beyond 256 pending posts; [`StreamError::Capturing`];
    /// [`StreamError::Gone`]; the driver's error.
    pub fn post_after<'a>(
        &self,
        after: impl Into<PostTrigger<'a>>,
        build: impl for<'q> FnOnce(&mut Batch<'q, 'static>) + Send + 'static,
    ) -> Result<Posted, StreamError> {
        let shared = &self.shared;
        let after = after.into();
        match after {
            PostTrigger::Stream(stream) if stream.is_capturing()? => return Err(StreamError::Capturing),
            _ => {}
        }
        let mut incoming = shared.incoming.lock();
        if incoming.gone {
            return Err(StreamError::Gone);
        }
        let ticket = incoming.tickets;
        if ticket - shared.words.at(COMPLETED).load(Ordering::Acquire) >= MAX_PENDING {
            return Err(StreamError::Full);
        }
        let ready = match after {
            // An event of a capture, or of a failed context, is an error here.
            PostTrigger::Event(event) if event.is_done()? => Ready::Now,
            PostTrigger::Event(event) => Ready::Event(event.clone()),
            PostTrigger::Stream(stream) => {
                let word = READY + (ticket % MAX_PENDING) as usize;
                let span = shared.words.span(word).ok_or(StreamError::Gone)?;
                stream.write_value64(span, ticket + 1)?;
                Ready::Word(word, ticket + 1)
            }
        };
        let state = Arc::<State>::default();
        incoming.tickets += 1;
        incoming.posts.push_back(PendingPost {
            ready,
            build: Box::new(build),
            state: Arc::clone(&state),
        });
        shared.waiting.store(true, Ordering::Release);
        Ok(Posted {
            shared: Arc::clone(shared),
            ticket,
            state,
        })
    }

    /// A batch that `build` rebuilds, posted each time a stream reaches it, also in graphs.
    ///
    /// # Errors
    /// [`StreamError::Gone`]; the driver's error.
    pub fn repeated(
        &self,
        build: impl for<'q> FnMut(&mut Batch<'q, 'static>) + Send + 'static,
    ) -> Result<RepeatedPost, StreamError> {
        let repeated = RepeatedPost::new(&self.shared.words, self.thread.clone())?;
        let mut incoming = self.shared.incoming.lock();
        if incoming.gone {
            return Err(StreamError::Gone);
        }
        incoming.repeats.push(repeated.repeat(Box::new(build)));
        self.shared.waiting.store(true, Ordering::Release);
        Ok(repeated)
    }

    /// The first failed post.
    #[must_use]
    pub fn failure(&self) -> Option<PostFailed> {
        self.shared.failure.lock().clone()
    }
}

/// A submitted post.
#[must_use = "it says what became of the post"]
pub struct Posted {
    shared: Arc<Shared>,
    ticket: u64,
    state: Arc<State>,
}

impl Posted {
    /// Makes later work of the stream wait until the post is complete, successfully or not.
    ///
    /// # Errors
    /// [`StreamError::Capturing`]; the driver's error.
    pub fn enqueue_wait(&self, stream: &Stream) -> Result<(), StreamError> {
        if stream.is_capturing()? {
            return Err(StreamError::Capturing);
        }
        let span = self.shared.words.span(COMPLETED).ok_or(StreamError::Gone)?;
        Ok(stream.wait_value64(span, WaitCondition::AtLeast(self.ticket + 1))?)
    }

    /// Whether it is complete.
    #[must_use]
    pub fn is_complete(&self) -> bool {
        self.state.completed.load(Ordering::Acquire)
    }

    /// Waits until it is complete, and returns its buffers.
    ///
    /// # Errors
    /// Its failure; [`StreamError::Timeout`], with the post.
    pub fn finish(self, timeout: Option<Duration>) -> Result<Vec<Buffers>, StreamError> {
        let mut backoff = Backoff::new(timeout);
        while !self.is_complete() {
            if !backoff.wait() {
                return Err(StreamError::Timeout(self));
            }
        }
        let outcome = self.state.outcome.lock().take();
        Ok(outcome.unwrap_or_else(|| Ok(Vec::new()))?)
    }
}

debug_fields!(Posted, self, ticket = self.ticket, over = self.is_complete());

debug_fields!(StreamQueue, self, failure = self.failure());
