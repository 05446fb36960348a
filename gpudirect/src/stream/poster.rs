//! The poster: posts when streams are ready, and reports completions to them.

use core::sync::atomic::Ordering;
use std::collections::VecDeque;
use std::sync::Arc;

use doorbell_cuda::Event;
use doorbell_verbs::{Buffers, CompletionQueue, QueuePair};

use super::repeated::Repeat;
use super::{COMPLETED, PendingPost, PostFailed, Shared, State};

pub(super) enum Ready {
    Now,
    /// When the word is at least the value.
    Word(usize, u64),
    Event(Event),
}

/// The posting side of a queue, driven by calls of [`progress`](Self::progress).
pub struct Poster {
    shared: Arc<Shared>,
    qp: QueuePair,
    cq: CompletionQueue,
    /// Send queue slots that must be free before anything is posted.
    reserved: u32,
    waiting: VecDeque<PendingPost>,
    repeats: Vec<Option<Repeat>>,
    in_flight: VecDeque<InFlight>,
    /// The number of completed requests.
    confirmed: u64,
    /// The number of completed posts.
    done: u64,
}

struct InFlight {
    /// The number of completed requests at which it is complete.
    until: u64,
    owner: BatchOwner,
    buffers: Vec<Buffers>,
    failed: Option<PostFailed>,
}

enum BatchOwner {
    Once(Arc<State>),
    Repeated(usize),
}

impl Poster {
    pub(super) fn new(shared: Arc<Shared>, qp: QueuePair, cq: CompletionQueue) -> Self {
        Self {
            shared,
            reserved: qp.free_send_slots().div_ceil(2),
            qp,
            cq,
            waiting: VecDeque::new(),
            repeats: Vec::new(),
            in_flight: VecDeque::new(),
            confirmed: 0,
            done: 0,
        }
    }

    /// One pass: posts, polls, updates the streams' words. Never blocks; `true` if it did anything.
    pub fn progress(&mut self) -> bool {
        if self.shared.waiting.load(Ordering::Acquire) {
            self.admit();
        }
        let mut any = self.post_once();
        any |= self.post_repeated();
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
        while self.qp.free_send_slots() >= self.reserved {
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
            let Some(PendingPost { build, state, .. }) = self.waiting.pop_front() else {
                break;
            };
            any = true;
            let failed = lost.or_else(|| self.qp.post(build).err().map(|refused| PostFailed(refused.to_string())));
            self.launch(BatchOwner::Once(state), failed);
        }
        any
    }

    fn post_repeated(&mut self) -> bool {
        let mut any = false;
        for index in 0..self.repeats.len() {
            if self.qp.free_send_slots() < self.reserved {
                break;
            }
            let place = &mut self.repeats[index];
            let Some(repeat) = place else { continue };
            if repeat.take() {
                any = true;
                let build = &mut repeat.build;
                let failed = self.qp.post(|batch| build(batch)).err();
                self.launch(
                    BatchOwner::Repeated(index),
                    failed.map(|refused| PostFailed(refused.to_string())),
                );
            } else if repeat.is_complete() {
                *place = None;
            }
        }
        any
    }

    fn launch(&mut self, owner: BatchOwner, failed: Option<PostFailed>) {
        self.in_flight.push_back(InFlight {
            until: self.qp.next_send(),
            owner,
            buffers: Vec::new(),
            failed,
        });
    }

    fn poll(&mut self) -> bool {
        let (in_flight, confirmed) = (&mut self.in_flight, &mut self.confirmed);
        let mut any = false;
        let polled = self.cq.poll().map(|completions| {
            completions.for_each(|done| {
                any = true;
                *confirmed = done.sequence() + 1;
                // Batches are in order: it belongs to the first one not confirmed before it.
                if let Some(entry) = in_flight.iter_mut().find(|entry| entry.until >= *confirmed) {
                    if let Err(failure) = done.check() {
                        entry.failed.get_or_insert_with(|| PostFailed(failure.to_string()));
                    }
                    let buffers = done.into_buffers();
                    if !buffers.is_empty() {
                        entry.buffers.push(buffers);
                    }
                }
            });
        });
        if let Err(error) = polled {
            // No more completions arrive: posted batches end; the queue pair keeps their buffers.
            self.confirmed = self.qp.next_send();
            for entry in &mut self.in_flight {
                entry.failed.get_or_insert_with(|| PostFailed(error.to_string()));
            }
        }
        any
    }

    fn retire(&mut self) {
        let before = self.done;
        while self
            .in_flight
            .front()
            .is_some_and(|entry| entry.until <= self.confirmed)
            && let Some(InFlight {
                owner, buffers, failed, ..
            }) = self.in_flight.pop_front()
        {
            if let Some(failed) = &failed {
                self.shared.failure.lock().get_or_insert_with(|| failed.clone());
            }
            match owner {
                BatchOwner::Once(state) => {
                    self.done += 1;
                    state.finish(failed.map_or(Ok(buffers), Err));
                }
                BatchOwner::Repeated(index) => {
                    if let Some(Some(repeat)) = self.repeats.get_mut(index) {
                        repeat.finish(failed.map_or(Ok(()), Err));
                    }
                }
            }
        }
        if self.done != before {
            self.shared.words.at(COMPLETED).store(self.done, Ordering::Release);
        }
    }
}

impl State {
    fn finish(&self, outcome: Result<Vec<Buffers>, PostFailed>) {
        *self.outcome.lock() = Some(outcome);
        self.completed.store(true, Ordering::Release);
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
        let posted = self.in_flight.drain(..).filter_map(|entry| match entry.owner {
            BatchOwner::Once(state) => Some(state),
            BatchOwner::Repeated(_) => None,
        });
        for state in posted.chain(self.waiting.drain(..).map(|requested| requested.state)) {
            state.finish(Err(failed.clone()));
            self.shared.failure.lock().get_or_insert_with(|| failed.clone());
        }
        for repeat in self.repeats.iter_mut().flatten() {
            repeat.abandon(&failed);
        }
        self.shared.words.at(COMPLETED).store(tickets, Ordering::Release);
    }
}

debug_fields!(
    Poster,
    self,
    waiting = self.waiting.len(),
    under_way = self.in_flight.len()
);
