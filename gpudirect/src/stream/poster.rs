//! What posts when streams have come so far, and tells them what is over.

use core::fmt;
use core::sync::atomic::Ordering;
use std::collections::VecDeque;
use std::sync::Arc;

use doorbell_cuda::Event;
use doorbell_verbs::{Buffers, CompletionQueue, QueuePair};

use super::repeated::Repeat;
use super::{Asked, DONE, PostFailed, Shared, State};

/// When a post may go.
pub(super) enum Ready {
    Now,
    /// When the word has the value, or is beyond it.
    Word(usize, u64),
    Event(Event),
}

/// The queue's end that posts: to be driven by calls of [`progress`](Self::progress).
pub struct Poster {
    shared: Arc<Shared>,
    qp: QueuePair,
    cq: CompletionQueue,
    /// Requests that must be free before anything is posted.
    room: u32,
    waiting: VecDeque<Asked>,
    repeats: Vec<Option<Repeat>>,
    flights: VecDeque<Flight>,
    /// How many requests are confirmed.
    confirmed: u64,
    /// How many posts are over.
    done: u64,
}

/// A batch that was posted, or refused.
struct Flight {
    /// How many requests must be confirmed.
    until: u64,
    what: What,
    buffers: Vec<Buffers>,
    failed: Option<PostFailed>,
}

enum What {
    Once(Arc<State>),
    /// The repeat of this index.
    Again(usize),
}

impl Poster {
    pub(super) fn new(shared: Arc<Shared>, qp: QueuePair, cq: CompletionQueue) -> Self {
        Self {
            shared,
            room: qp.send_room().div_ceil(2),
            qp,
            cq,
            waiting: VecDeque::new(),
            repeats: Vec::new(),
            flights: VecDeque::new(),
            confirmed: 0,
            done: 0,
        }
    }

    /// Posts what may go, takes completions, and tells streams. Gives whether there was anything to do. Never waits.
    pub fn progress(&mut self) -> bool {
        if self.shared.waiting.load(Ordering::Acquire) {
            self.admit();
        }
        let mut any = self.post_once();
        any |= self.post_again();
        any |= self.poll();
        self.retire();
        any
    }

    #[cold]
    fn admit(&mut self) {
        let mut incoming = self.shared.incoming.lock();
        self.shared.waiting.store(false, Ordering::Release);
        self.waiting.append(&mut incoming.posts);
        for repeat in incoming.repeats.drain(..) {
            match self.repeats.iter_mut().find(|place| place.is_none()) {
                Some(place) => *place = Some(repeat),
                None => self.repeats.push(Some(repeat)),
            }
        }
    }

    fn post_once(&mut self) -> bool {
        let mut any = false;
        while self.qp.send_room() >= self.room {
            let Some(first) = self.waiting.front() else { break };
            let lost = match &first.ready {
                Ready::Now => None,
                Ready::Word(word, value) => {
                    let now = self.shared.words.at(*word).load(Ordering::Acquire);
                    if (now.wrapping_sub(*value) as i64) < 0 {
                        break;
                    }
                    None
                }
                Ready::Event(event) => match event.is_done() {
                    Ok(true) => None,
                    Ok(false) => break,
                    Err(error) => Some(PostFailed(format!("the event that it waited for: {error}"))),
                },
            };
            let Some(Asked { build, state, .. }) = self.waiting.pop_front() else {
                break;
            };
            any = true;
            let failed = lost.or_else(|| self.qp.post(build).err().map(|refused| PostFailed(refused.to_string())));
            self.launch(What::Once(state), failed);
        }
        any
    }

    fn post_again(&mut self) -> bool {
        let mut any = false;
        for index in 0..self.repeats.len() {
            if self.qp.send_room() < self.room {
                break;
            }
            let place = &mut self.repeats[index];
            let Some(repeat) = place else { continue };
            if repeat.take() {
                any = true;
                let build = &mut repeat.build;
                let failed = self.qp.post(|batch| build(batch)).err();
                self.launch(
                    What::Again(index),
                    failed.map(|refused| PostFailed(refused.to_string())),
                );
            } else if repeat.is_over() {
                *place = None;
            }
        }
        any
    }

    fn launch(&mut self, what: What, failed: Option<PostFailed>) {
        self.flights.push_back(Flight {
            until: self.qp.next_send(),
            what,
            buffers: Vec::new(),
            failed,
        });
    }

    fn poll(&mut self) -> bool {
        let (flights, confirmed) = (&mut self.flights, &mut self.confirmed);
        let mut any = false;
        let polled = self.cq.poll().map(|completions| {
            completions.for_each(|done| {
                any = true;
                *confirmed = done.sequence() + 1;
                // Flights are in order: this is of the first that is not confirmed before it.
                if let Some(flight) = flights.iter_mut().find(|flight| flight.until >= *confirmed) {
                    if let Err(failure) = done.check() {
                        flight.failed.get_or_insert_with(|| PostFailed(failure.to_string()));
                    }
                    let buffers = done.into_buffers();
                    if !buffers.is_empty() {
                        flight.buffers.push(buffers);
                    }
                }
            });
        });
        if let Err(error) = polled {
            // No completion comes any more: what was posted is over, and its buffers stay with the queue pair.
            self.confirmed = self.qp.next_send();
            for flight in &mut self.flights {
                flight.failed.get_or_insert_with(|| PostFailed(error.to_string()));
            }
        }
        any
    }

    /// Tells of what is over.
    fn retire(&mut self) {
        let before = self.done;
        while self
            .flights
            .front()
            .is_some_and(|flight| flight.until <= self.confirmed)
            && let Some(Flight {
                what, buffers, failed, ..
            }) = self.flights.pop_front()
        {
            if let Some(failed) = &failed {
                self.shared.failure.lock().get_or_insert_with(|| failed.clone());
            }
            match what {
                What::Once(state) => {
                    self.done += 1;
                    state.finish(failed.map_or(Ok(buffers), Err));
                }
                What::Again(index) => {
                    if let Some(Some(repeat)) = self.repeats.get_mut(index) {
                        repeat.finish(failed.map_or(Ok(()), Err));
                    }
                }
            }
        }
        if self.done != before {
            self.shared.words.at(DONE).store(self.done, Ordering::Release);
        }
    }
}

impl State {
    fn finish(&self, outcome: Result<Vec<Buffers>, PostFailed>) {
        *self.outcome.lock() = Some(outcome);
        self.over.store(true, Ordering::Release);
    }
}

impl Drop for Poster {
    fn drop(&mut self) {
        let tickets = {
            let mut incoming = self.shared.incoming.lock();
            incoming.gone = true;
            incoming.tickets
        };
        self.admit();
        let failed = PostFailed("the queue was dropped before it completed".to_owned());
        let posted = self.flights.drain(..).filter_map(|flight| match flight.what {
            What::Once(state) => Some(state),
            What::Again(_) => None,
        });
        for state in posted.chain(self.waiting.drain(..).map(|asked| asked.state)) {
            state.finish(Err(failed.clone()));
            self.shared.failure.lock().get_or_insert_with(|| failed.clone());
        }
        for repeat in self.repeats.iter_mut().flatten() {
            repeat.abandon(&failed);
        }
        self.shared.words.at(DONE).store(tickets, Ordering::Release);
    }
}

impl fmt::Debug for Poster {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Poster")
            .field("waiting", &self.waiting.len())
            .field("under_way", &self.flights.len())
            .finish_non_exhaustive()
    }
}
