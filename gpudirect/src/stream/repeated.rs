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
        if !self.is_armed() {
            return false;
        }
        self.begin();
        self.disarm();
        true
    }

    fn is_armed(&self) -> bool {
        self.words.at(ARMED).load(Ordering::Acquire) == 1
    }

    /// It is not done, before it may be waited for.
    fn begin(&mut self) {
        self.under_way += 1;
        self.words.at(COMPLETED).store(0, Ordering::Release);
    }

    fn disarm(&self) {
        self.words.at(ARMED).store(0, Ordering::Release);
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
    /// The driver's error.
    pub fn enqueue_post(&self, stream: &Stream) -> Result<(), StreamError> {
        let armed = self.words.span(ARMED).ok_or(StreamError::Gone)?;
        stream.wait_value64(armed, Until::Equal(0))?;
        Ok(stream.write_value64(armed, 1)?)
    }

    /// What comes into the stream from now on waits until all that this stream, or those before it, have had posted by this is over, whether it succeeded or failed.
    ///
    /// # Errors
    /// The driver's error.
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

#[cfg(test)]
mod tests {
    use std::collections::HashSet;

    use super::*;

    /// What a stream does, word by word, as `enqueue_post` and `enqueue_wait` have it.
    #[derive(Clone, Copy)]
    enum Step {
        AwaitDisarmed,
        Arm,
        /// All so far must have completed when it goes past this.
        AwaitCompleted,
    }

    const POST: [Step; 2] = [Step::AwaitDisarmed, Step::Arm];
    const WAIT: [Step; 2] = [Step::AwaitDisarmed, Step::AwaitCompleted];

    /// All that there is: the words, how far the stream and the poster are, and what has completed.
    #[derive(Clone, Copy, PartialEq, Eq, Hash)]
    struct State {
        armed: u64,
        completed_word: u64,
        under_way: u64,
        stream: usize,
        /// Between which of its steps the poster is.
        phase: u8,
        asked: u64,
        posted: u64,
        completed: u64,
    }

    fn load(repeat: &mut Repeat, state: &State) {
        repeat.words.at(ARMED).store(state.armed, Ordering::Relaxed);
        repeat
            .words
            .at(COMPLETED)
            .store(state.completed_word, Ordering::Relaxed);
        repeat.under_way = state.under_way;
    }

    fn store(repeat: &Repeat, state: State) -> State {
        State {
            armed: repeat.words.at(ARMED).load(Ordering::Relaxed),
            completed_word: repeat.words.at(COMPLETED).load(Ordering::Relaxed),
            under_way: repeat.under_way,
            ..state
        }
    }

    /// All states that can come next.
    fn next(repeat: &mut Repeat, program: &[Step], state: State) -> Vec<State> {
        let mut found = Vec::new();
        let moved = State {
            stream: state.stream + 1,
            ..state
        };
        match program.get(state.stream) {
            Some(Step::AwaitDisarmed) if state.armed == 0 => found.push(moved),
            Some(Step::Arm) => found.push(State {
                armed: 1,
                asked: state.asked + 1,
                ..moved
            }),
            Some(Step::AwaitCompleted) if state.completed_word == 1 => {
                assert_eq!(state.completed, state.asked, "a wait that is over too early");
                found.push(moved);
            }
            _ => {}
        }
        load(repeat, &state);
        match state.phase {
            0 if repeat.is_armed() => found.push(State { phase: 1, ..state }),
            1 => {
                repeat.begin();
                found.push(store(repeat, State { phase: 2, ..state }));
            }
            2 => {
                repeat.disarm();
                let posted = state.posted + 1;
                found.push(store(
                    repeat,
                    State {
                        phase: 0,
                        posted,
                        ..state
                    },
                ));
            }
            _ => {}
        }
        // The poster takes completions when it is not in the middle of that.
        if state.phase == 0 && state.completed < state.posted {
            load(repeat, &state);
            repeat.finish(Ok(()));
            let completed = state.completed + 1;
            found.push(store(repeat, State { completed, ..state }));
        }
        found
    }

    /// Every order of a stream's words and the poster's steps: no wait is over too early, nothing is lost, and nothing stands still.
    #[test]
    fn every_order() {
        let programs = [
            [POST, WAIT, POST, WAIT].concat(),
            [WAIT, POST, POST, WAIT, WAIT].concat(),
            [POST, POST, POST, WAIT, POST, WAIT].concat(),
        ];
        for program in programs {
            let posts = program.iter().filter(|step| matches!(step, Step::Arm)).count() as u64;
            let mut repeat = Repeat {
                words: Words::plain(COUNT),
                build: Box::new(|_| {}),
                failure: Arc::default(),
                under_way: 0,
            };
            let first = State {
                armed: 0,
                completed_word: 1,
                under_way: 0,
                stream: 0,
                phase: 0,
                asked: 0,
                posted: 0,
                completed: 0,
            };
            let (mut seen, mut left, mut ends) = (HashSet::from([first]), vec![first], 0);
            while let Some(state) = left.pop() {
                let following = next(&mut repeat, &program, state);
                if following.is_empty() {
                    let whole = (state.stream, state.posted, state.completed) == (program.len(), posts, posts);
                    assert!(whole, "it stands still");
                    ends += 1;
                }
                left.extend(following.into_iter().filter(|state| seen.insert(*state)));
            }
            assert_eq!(ends, 1);
        }
    }
}
