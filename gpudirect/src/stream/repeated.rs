//! Posts that a stream, or a graph, repeats, by two words that are reused each time.
//!
//! A stream that reaches the post waits until `armed` is 0, and sets it to 1. The poster then sets
//! `done` to 0, posts, sets `armed` to 0 and, once all it posted has completed, `done` to 1. A
//! stream that waits for the post waits until `armed` is 0 and then until `done` is 1: its own
//! arming has been consumed by then, so the 1 is not stale. Only the poster writes `done`.

use core::sync::atomic::Ordering;
use std::sync::Arc;

use doorbell_cuda::{Stream, WaitCondition};
use doorbell_verbs::Batch;
use parking_lot::Mutex;

use super::{PostFailed, StreamError, Thread};
use crate::words::SharedWords;

const ARMED: usize = 0;
const COMPLETED: usize = 16;
const COUNT: usize = 17;

pub(super) type BuildRepeated = Box<dyn for<'q> FnMut(&mut Batch<'q, 'static>) + Send>;

pub(super) struct Repeat {
    words: SharedWords,
    pub(super) build: BuildRepeated,
    failure: Arc<Mutex<Option<PostFailed>>>,
    in_flight: u64,
}

impl Repeat {
    /// Whether its handle is gone, and nothing of it is in flight.
    pub(super) fn is_complete(&self) -> bool {
        self.in_flight == 0 && Arc::strong_count(&self.failure) == 1
    }

    /// Whether a stream has reached it; it then counts as posted.
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

    /// Clears `done` before it may be waited for.
    fn begin(&mut self) {
        self.in_flight += 1;
        self.words.at(COMPLETED).store(0, Ordering::Release);
    }

    fn disarm(&self) {
        self.words.at(ARMED).store(0, Ordering::Release);
    }

    pub(super) fn finish(&mut self, result: Result<(), PostFailed>) {
        if let Err(failed) = result {
            self.failure.lock().get_or_insert(failed);
        }
        self.in_flight = self.in_flight.saturating_sub(1);
        if self.in_flight == 0 {
            self.words.at(COMPLETED).store(1, Ordering::Release);
        }
    }

    pub(super) fn abandon(&mut self, failed: &PostFailed) {
        self.failure.lock().get_or_insert_with(|| failed.clone());
        self.words.at(COMPLETED).store(1, Ordering::Release);
        self.words.at(ARMED).store(0, Ordering::Release);
    }
}

/// A batch posted each time a stream reaches it; keep it as long as any graph that contains it.
///
/// Streams must use it one after another, as launches of one graph do.
pub struct RepeatedPost {
    words: SharedWords,
    failure: Arc<Mutex<Option<PostFailed>>>,
    /// Serves streams as long as this is kept.
    _thread: Option<Arc<Thread>>,
}

impl RepeatedPost {
    pub(super) fn new(like: &SharedWords, thread: Option<Arc<Thread>>) -> Result<Self, StreamError> {
        let words = like.same_kind(COUNT)?;
        words.at(COMPLETED).store(1, Ordering::Release);
        Ok(Self {
            words,
            failure: Arc::default(),
            _thread: thread,
        })
    }

    pub(super) fn repeat(&self, build: BuildRepeated) -> Repeat {
        Repeat {
            words: self.words.clone(),
            build,
            failure: Arc::clone(&self.failure),
            in_flight: 0,
        }
    }

    /// Posts the batch after all earlier work of the stream; at each launch, if captured.
    pub fn enqueue_post(&self, stream: &Stream) -> Result<(), StreamError> {
        let armed = self.words.span(ARMED).ok_or(StreamError::Gone)?;
        stream.wait_value64(armed, WaitCondition::Equal(0))?;
        Ok(stream.write_value64(armed, 1)?)
    }

    /// Makes later work wait until posts so far, by this stream and those before it, have ended.
    pub fn enqueue_wait(&self, stream: &Stream) -> Result<(), StreamError> {
        let (armed, done) = (self.words.span(ARMED), self.words.span(COMPLETED));
        let (armed, done) = armed.zip(done).ok_or(StreamError::Gone)?;
        stream.wait_value64(armed, WaitCondition::Equal(0))?;
        Ok(stream.wait_value64(done, WaitCondition::Equal(1))?)
    }

    /// The first failed post.
    #[must_use]
    pub fn failure(&self) -> Option<PostFailed> {
        self.failure.lock().clone()
    }
}

debug_fields!(RepeatedPost, self, failure = self.failure());

#[cfg(test)]
mod tests {
    use std::collections::HashSet;

    use super::*;

    /// A stream's operations on the words, as in `enqueue_post` and `enqueue_wait`.
    #[derive(Clone, Copy)]
    enum Step {
        AwaitDisarmed,
        Arm,
        /// All earlier posts must have completed when this wait ends.
        AwaitCompleted,
    }

    const POST: [Step; 2] = [Step::AwaitDisarmed, Step::Arm];
    const WAIT: [Step; 2] = [Step::AwaitDisarmed, Step::AwaitCompleted];

    #[derive(Clone, Copy, PartialEq, Eq, Hash)]
    struct State {
        armed: u64,
        completed_word: u64,
        in_flight: u64,
        stream: usize,
        /// The poster's position between its steps.
        phase: u8,
        requested: u64,
        posted: u64,
        completed: u64,
    }

    fn load(repeat: &mut Repeat, state: &State) {
        repeat.words.at(ARMED).store(state.armed, Ordering::Relaxed);
        repeat
            .words
            .at(COMPLETED)
            .store(state.completed_word, Ordering::Relaxed);
        repeat.in_flight = state.in_flight;
    }

    fn store(repeat: &Repeat, state: State) -> State {
        State {
            armed: repeat.words.at(ARMED).load(Ordering::Relaxed),
            completed_word: repeat.words.at(COMPLETED).load(Ordering::Relaxed),
            in_flight: repeat.in_flight,
            ..state
        }
    }

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
                requested: state.requested + 1,
                ..moved
            }),
            Some(Step::AwaitCompleted) if state.completed_word == 1 => {
                assert_eq!(state.completed, state.requested, "a wait that is over too early");
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
        // The poster polls completions between posts.
        if state.phase == 0 && state.completed < state.posted {
            load(repeat, &state);
            repeat.finish(Ok(()));
            let completed = state.completed + 1;
            found.push(store(repeat, State { completed, ..state }));
        }
        found
    }

    /// In every interleaving no wait ends early, nothing is lost, and there is no deadlock.
    #[test]
    fn every_interleaving() {
        let programs = [
            [POST, WAIT, POST, WAIT].concat(),
            [WAIT, POST, POST, WAIT, WAIT].concat(),
            [POST, POST, POST, WAIT, POST, WAIT].concat(),
        ];
        for program in programs {
            let posts = program.iter().filter(|step| matches!(step, Step::Arm)).count() as u64;
            let mut repeat = Repeat {
                words: SharedWords::plain(COUNT),
                build: Box::new(|_| {}),
                failure: Arc::default(),
                in_flight: 0,
            };
            let first = State {
                armed: 0,
                completed_word: 1,
                in_flight: 0,
                stream: 0,
                phase: 0,
                requested: 0,
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
