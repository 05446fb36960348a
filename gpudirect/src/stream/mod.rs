//! Posting in the order of streams: requests that wait for work of a GPU, and work of a GPU that waits for requests.
//!
//! A [`StreamQueue`] has a queue pair. What it is asked to post it posts when an event has completed, or all that a stream has before it is done ([`post_after`](StreamQueue::post_after)); and a stream can wait until that has completed
//! ([`Posted::enqueue_wait`]). Neither keeps the caller waiting: a thread of the queue's own sees to it, by words in pinned memory that streams write and wait for.
//!
//! ```no_run
//! use doorbell_gpudirect::proxy::Idle;
//! use doorbell_gpudirect::stream::StreamQueue;
//! use doorbell_verbs::{Buffer, CompletionQueue, Opaque, QueuePair, Remote, RemoteWrite, Write};
//!
//! /// The queue pair was made by `signal_all`, with `cq` for itself.
//! fn example(
//!     stream: &doorbell_cuda::Stream,
//!     (qp, cq): (QueuePair, CompletionQueue),
//!     gradients: Buffer<Opaque<RemoteWrite>>,
//!     theirs: Remote<Write>,
//! ) -> Result<(), Box<dyn std::error::Error>> {
//!     let queue = StreamQueue::spawn(stream.context(), qp, cq, Idle::default())?;
//!     // ... kernels that make the gradients are launched into the stream ...
//!     let posted = queue.post_after(stream, move |batch| {
//!         batch.write(gradients, theirs); // when they are done
//!     })?;
//!     posted.enqueue_wait(stream)?;
//!     // ... kernels that use the memory anew ...
//!     stream.synchronize()?;
//!     let buffers = posted.finish(None)?; // what went wrong, or the buffers back
//!     # drop(buffers);
//!     Ok(())
//! }
//! ```
//!
//! # Graphs
//!
//! What is posted once has a number, which a graph would use again each time it runs: such calls are refused while a stream is captured. [`StreamQueue::repeated`] is what graphs have: a batch that is made anew each time that a stream comes to
//! [`RepeatedPost::enqueue_post`], so that a graph that is launched twice posts twice.
//!
//! # What fails
//!
//! A request that fails is told by [`Posted::finish`], and by [`StreamQueue::failure`], which keeps the first. Streams are never left waiting for it: what they wait for is said to be over, whether it succeeded or not, and also when the queue is dropped. So work behind it runs on what
//! may not have arrived; look before its results are used.

mod error;
mod poster;
mod repeated;

use core::fmt;
use core::sync::atomic::{AtomicBool, Ordering};
use core::time::Duration;
use std::collections::VecDeque;
use std::sync::Arc;
use std::thread::{self, JoinHandle};

use doorbell_cuda::{Context, Event, Stream, Until};
use doorbell_verbs::{Batch, Buffers, CompletionQueue, QueuePair};
pub use error::{PostFailed, StreamError};
use parking_lot::Mutex;
pub use poster::Poster;
use poster::Ready;
use repeated::Repeat;
pub use repeated::RepeatedPost;

use crate::proxy::{Idle, Patience, drive};
use crate::words::Words;

/// What builds a batch.
type Build = Box<dyn for<'q> FnOnce(&mut Batch<'q, 'static>) + Send>;

/// How many posts have come to an end.
const DONE: usize = 0;
/// The first of the words by which streams say that they have come so far: one for each post that is not over.
const READY: usize = 16;
/// How many posts may be under way.
const DEPTH: u64 = 256;

/// What a queue and its poster share.
struct Shared {
    words: Words,
    /// Held while a stream is told to say so, so that posts go to the poster in the order of their tickets.
    incoming: Mutex<Incoming>,
    /// Whether something has come in.
    waiting: AtomicBool,
    failure: Mutex<Option<PostFailed>>,
    stop: AtomicBool,
}

#[derive(Default)]
struct Incoming {
    /// How many tickets were given.
    tickets: u64,
    posts: VecDeque<Asked>,
    repeats: Vec<Repeat>,
    gone: bool,
}

/// A post that was asked for.
struct Asked {
    ready: Ready,
    build: Build,
    state: Arc<State>,
}

/// What became of a post.
#[derive(Default)]
struct State {
    over: AtomicBool,
    outcome: Mutex<Option<Result<Vec<Buffers>, PostFailed>>>,
}

/// What a post waits for.
#[derive(Debug, Clone, Copy)]
pub enum After<'a> {
    /// What the event was recorded after, when this is asked for; nothing, if it never was. It must not be recorded again before that. It is asked for again and again, which takes longer than a stream's word.
    Event(&'a Event),
    /// All that is in the stream now.
    Stream(&'a Stream),
}

impl<'a> From<&'a Event> for After<'a> {
    fn from(event: &'a Event) -> Self {
        Self::Event(event)
    }
}

impl<'a> From<&'a Stream> for After<'a> {
    fn from(stream: &'a Stream) -> Self {
        Self::Stream(stream)
    }
}

/// A queue pair that posts in the order of streams: see the [module](self). Any thread may ask.
///
/// Posts go in the order in which they are asked for, so one that waits keeps back those behind it: streams that wait for each other should have a queue each.
///
/// When it is dropped what has not completed has failed.
pub struct StreamQueue {
    shared: Arc<Shared>,
    thread: Option<Arc<Thread>>,
}

/// The thread, ended with its last handle.
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
    /// A queue that posts to `qp`, driven by a thread of its own. `cq` has the completions of its requests, and of nothing else.
    ///
    /// # Errors
    /// [`StreamError::NotSignalled`] of a queue pair that was not made by [`signal_all`](doorbell_verbs::QueuePairBuilder::signal_all); the driver's error.
    pub fn spawn(context: &Context, qp: QueuePair, cq: CompletionQueue, idle: Idle) -> Result<Self, StreamError> {
        let (mut queue, mut poster) = Self::driven(context, qp, cq)?;
        let shared = Arc::clone(&queue.shared);
        let handle = thread::Builder::new()
            .name("doorbell-stream".to_owned())
            .spawn(move || drive(idle, || poster.progress(), || shared.stop.load(Ordering::Acquire)))
            .map_err(StreamError::Thread)?;
        queue.thread = Some(Arc::new(Thread {
            shared: Arc::clone(&queue.shared),
            handle: Some(handle),
        }));
        Ok(queue)
    }

    /// The same, driven by whoever calls [`Poster::progress`].
    ///
    /// # Errors
    /// As of [`spawn`](Self::spawn).
    pub fn driven(context: &Context, qp: QueuePair, cq: CompletionQueue) -> Result<(Self, Poster), StreamError> {
        if !qp.query()?.signal_all {
            return Err(StreamError::NotSignalled);
        }
        let shared = Arc::new(Shared {
            words: Words::pinned(context, READY + DEPTH as usize)?,
            incoming: Mutex::default(),
            waiting: AtomicBool::new(false),
            failure: Mutex::default(),
            stop: AtomicBool::new(false),
        });
        let poster = Poster::new(Arc::clone(&shared), qp, cq);
        Ok((Self { shared, thread: None }, poster))
    }

    /// Posts what `build` makes, when `after` has completed. `build` runs on the queue's thread. A batch may have half as many requests as the send queue holds.
    ///
    /// # Errors
    /// [`StreamError::Full`] of more than 256 posts that are not over; [`StreamError::Capturing`]; [`StreamError::Gone`]; the driver's error.
    pub fn post_after<'a>(
        &self,
        after: impl Into<After<'a>>,
        build: impl for<'q> FnOnce(&mut Batch<'q, 'static>) + Send + 'static,
    ) -> Result<Posted, StreamError> {
        let shared = &self.shared;
        let after = after.into();
        match after {
            After::Stream(stream) if stream.is_capturing()? => return Err(StreamError::Capturing),
            _ => {}
        }
        let mut incoming = shared.incoming.lock();
        if incoming.gone {
            return Err(StreamError::Gone);
        }
        let ticket = incoming.tickets;
        if ticket - shared.words.at(DONE).load(Ordering::Acquire) >= DEPTH {
            return Err(StreamError::Full);
        }
        let ready = match after {
            // An event of a capture, or of a context that has failed, is told here.
            After::Event(event) if event.is_done()? => Ready::Now,
            After::Event(event) => Ready::Event(event.clone()),
            After::Stream(stream) => {
                let word = READY + (ticket % DEPTH) as usize;
                let span = shared.words.span(word).ok_or(StreamError::Gone)?;
                stream.write_value64(span, ticket + 1)?;
                Ready::Word(word, ticket + 1)
            }
        };
        let state = Arc::<State>::default();
        incoming.tickets += 1;
        incoming.posts.push_back(Asked {
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

    /// A batch that is posted each time a stream comes to it, in graphs too. `build` makes it anew each time.
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

    /// The first post that has failed.
    #[must_use]
    pub fn failure(&self) -> Option<PostFailed> {
        self.shared.failure.lock().clone()
    }
}

/// A post that was asked for.
#[must_use = "it says what became of the post"]
pub struct Posted {
    shared: Arc<Shared>,
    ticket: u64,
    state: Arc<State>,
}

impl Posted {
    /// What comes into the stream from now on waits until the post is over, whether it succeeded or failed.
    ///
    /// # Errors
    /// [`StreamError::Capturing`]; the driver's error.
    pub fn enqueue_wait(&self, stream: &Stream) -> Result<(), StreamError> {
        if stream.is_capturing()? {
            return Err(StreamError::Capturing);
        }
        let span = self.shared.words.span(DONE).ok_or(StreamError::Gone)?;
        Ok(stream.wait_value64(span, Until::AtLeast(self.ticket + 1))?)
    }

    /// Whether it is over.
    #[must_use]
    pub fn is_over(&self) -> bool {
        self.state.over.load(Ordering::Acquire)
    }

    /// Waits until it is over, and gives back what buffers it had.
    ///
    /// # Errors
    /// What has failed; [`StreamError::Timeout`], with the post.
    pub fn finish(self, timeout: Option<Duration>) -> Result<Vec<Buffers>, StreamError> {
        let mut patience = Patience::new(timeout);
        while !self.is_over() {
            if !patience.wait() {
                return Err(StreamError::Timeout(self));
            }
        }
        let outcome = self.state.outcome.lock().take();
        Ok(outcome.unwrap_or_else(|| Ok(Vec::new()))?)
    }
}

impl fmt::Debug for Posted {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Posted")
            .field("ticket", &self.ticket)
            .field("over", &self.is_over())
            .finish_non_exhaustive()
    }
}

impl fmt::Debug for StreamQueue {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("StreamQueue")
            .field("failure", &self.failure())
            .finish_non_exhaustive()
    }
}
