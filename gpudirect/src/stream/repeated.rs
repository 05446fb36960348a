//! Posts that a stream repeats, and graphs with it.
//!
//! Two words, of which no value is of one time only. A stream that comes to the post waits until `armed` is 0, and sets it to 1. The poster that finds 1 sets `done` to 0, posts, and sets `armed` to 0; when all that was posted so has completed, it sets `done` to 1. A stream
//! that waits for it waits until `armed` is 0, and then until `done` is 1: what it has armed before has been taken by then, so that the 1 is not of an earlier time. Only the poster writes `done`, so none of that is a race.

use core::fmt;
use core::sync::atomic::Ordering;
use std::sync::Arc;

use doorbell_cuda::{Stream, Until};
use doorbell_verbs::Batch;
use parking_lot::Mutex;

use super::{PostFailed, StreamError, Thread};
use crate::words::Words;

const ARMED: usize = 0;
const COMPLETED: usize = 16;
const COUNT: usize = 17;

/// What builds a batch, each time.
pub(super) type BuildAgain = Box<dyn for<'q> FnMut(&mut Batch<'q, 'static>) + Send>;

/// The poster's side.
pub(super) struct Repeat {
    words: Words,
    pub(super) build: BuildAgain,
    failure: Arc<Mutex<Option<PostFailed>>>,
    under_way: u64,
}

impl Repeat {
    /// Whether nobody has it any more, and nothing of it is under way.
    pub(super) fn is_over(&self) -> bool {
        self.under_way == 0 && Arc::strong_count(&self.failure) == 1
    }

    /// Whether a stream has come to it; then it is noted as posted.
    pub(super) fn take(&mut self) -> bool {
        if self.words.at(ARMED).load(Ordering::Acquire) != 1 {
            return false;
        }
        self.under_way += 1;
        self.words.at(COMPLETED).store(0, Ordering::Release);
        self.words.at(ARMED).store(0, Ordering::Release);
        true
    }

    /// One of the times that it was posted is over.
    pub(super) fn finish(&mut self, result: Result<(), PostFailed>) {
        if let Err(failed) = result {
            self.failure.lock().get_or_insert(failed);
        }
        self.under_way = self.under_way.saturating_sub(1);
        if self.under_way == 0 {
            self.words.at(COMPLETED).store(1, Ordering::Release);
        }
    }

    /// The poster goes.
    pub(super) fn abandon(&mut self, failed: &PostFailed) {
        self.failure.lock().get_or_insert_with(|| failed.clone());
        self.words.at(COMPLETED).store(1, Ordering::Release);
        self.words.at(ARMED).store(0, Ordering::Release);
    }
}

/// A batch that is posted each time a stream comes to it. To be kept as long as any graph that has it.
///
/// The streams that use it do so one after the other, as launches of one graph do.
pub struct RepeatedPost {
    words: Words,
    failure: Arc<Mutex<Option<PostFailed>>>,
    /// So that streams are served as long as this is kept.
    _thread: Option<Arc<Thread>>,
}

impl RepeatedPost {
    pub(super) fn new(like: &Words, thread: Option<Arc<Thread>>) -> Result<Self, StreamError> {
        let words = like.another(COUNT)?;
        words.at(COMPLETED).store(1, Ordering::Release);
        Ok(Self {
            words,
            failure: Arc::default(),
            _thread: thread,
        })
    }

    pub(super) fn repeat(&self, build: BuildAgain) -> Repeat {
        Repeat {
            words: self.words.clone(),
            build,
            failure: Arc::clone(&self.failure),
            under_way: 0,
        }
    }

    /// Has the batch posted when all that is in the stream now is done; each time, where the stream is captured.
    ///
    /// # Errors
    /// What the driver says.
    pub fn enqueue_post(&self, stream: &Stream) -> Result<(), StreamError> {
        let armed = self.words.span(ARMED).ok_or(StreamError::Gone)?;
        stream.wait_value64(armed, Until::Equal(0))?;
        Ok(stream.write_value64(armed, 1)?)
    }

    /// What comes into the stream from now on waits until all that this stream, or those before it, have had posted by this is over, whether it succeeded or failed.
    ///
    /// # Errors
    /// What the driver says.
    pub fn enqueue_wait(&self, stream: &Stream) -> Result<(), StreamError> {
        let (armed, done) = (self.words.span(ARMED), self.words.span(COMPLETED));
        let (armed, done) = armed.zip(done).ok_or(StreamError::Gone)?;
        stream.wait_value64(armed, Until::Equal(0))?;
        Ok(stream.wait_value64(done, Until::Equal(1))?)
    }

    /// The first time that failed.
    #[must_use]
    pub fn failure(&self) -> Option<PostFailed> {
        self.failure.lock().clone()
    }
}

impl fmt::Debug for RepeatedPost {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("RepeatedPost")
            .field("failure", &self.failure())
            .finish_non_exhaustive()
    }
}
