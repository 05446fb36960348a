//! The proxy's connections: a queue pair to each rank, by which descriptors become requests.

use core::any::Any;
use std::collections::VecDeque;

use doorbell_verbs::{
    Alias, All, Buffer, CompletionQueue, CompletionQueueError, Local, MemoryError, ProtectionDomain, QueuePair, Remote,
    RemoteWord, Word,
};

use super::descriptor::{Descriptor, Operation, Signalling, Update};
use super::failure::{Cause, Failed};
use crate::words::WORD;

/// The most bytes of one request: ports take 1 GiB and more.
const PIECE: u64 = 1 << 30;
/// Requests that a batch has at most, about: the last of them is signalled.
const BATCH: usize = 64;

/// What a peer has given away.
#[derive(Debug, Clone, Copy)]
pub struct PeerMemory {
    /// The memory that is put to and got from.
    pub data: Remote<All>,
    /// Its signals, 8 bytes each.
    pub signals: Remote<All>,
}

/// How to get to the ranks: what a [`Proxy`](super::Proxy) posts by.
pub struct Wire {
    // Queue pairs before what they use.
    links: Vec<Link>,
    cq: CompletionQueue,
    local: Alias,
    local_len: u64,
    _keep: Box<dyn Any + Send>,
}

/// The connection to a rank.
struct Link {
    qp: QueuePair,
    memory: PeerMemory,
    /// Where old values of words that are added to come; one for each request that the queue takes.
    words: Vec<Word>,
    /// What is posted next, and the values that are written by it.
    staged: Vec<Request>,
    values: Vec<[u8; WORD]>,
    flights: VecDeque<Flight>,
    /// How many of them are staged: the last ones.
    staged_flights: usize,
    /// Why nothing goes this way any more.
    broken: Option<String>,
}

enum Request {
    Write(Alias, Remote<All>),
    Read(Alias, Remote<All>),
    /// The value of this index.
    Set(usize, Remote<All>),
    Add(Word, RemoteWord, u64),
}

/// Which descriptor: of which ring, and its index there.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Origin {
    pub(crate) ring: usize,
    pub(crate) index: u64,
}

/// A descriptor that has become requests.
struct Flight {
    /// The sequence of the last of them.
    last: u64,
    origin: Origin,
    descriptor: Descriptor,
}

/// What came of a descriptor.
pub(crate) type Outcome = (Origin, Result<(), Failed>);

/// Whether a descriptor has been taken.
pub(crate) enum Staging {
    /// It goes with the next doorbell.
    Taken,
    /// There is no room yet.
    Full,
    /// It is done: there was nothing to do, or it cannot be done.
    Over(Result<(), Failed>),
}

impl Wire {
    /// Connections to ranks, from 0 on: a queue pair to each, all of whose completions come to `cq`, and of each what it has given away. `local` is the own memory, so many bytes, and `keep` is dropped after all requests are done.
    ///
    /// Each queue pair was made with room for 8 bytes of inline data, and the rank as its tag; the one to the own rank is connected to another of this process.
    ///
    /// # Errors
    /// When the words that atomics leave old values in cannot be registered.
    pub fn new(
        pd: &ProtectionDomain,
        cq: CompletionQueue,
        links: Vec<(QueuePair, PeerMemory)>,
        local: (Alias, u64),
        keep: Box<dyn Any + Send>,
    ) -> Result<Self, MemoryError> {
        let links = links.into_iter().map(|(qp, memory)| {
            let depth = qp.send_room() as usize;
            let chunks = pd.register_chunks(doorbell_verbs::Memory::zeroed(depth * WORD), WORD, Local)?;
            Ok(Link {
                qp,
                memory,
                words: chunks
                    .filter_map(|chunk: Buffer<Local>| chunk.into_word().ok())
                    .collect(),
                staged: Vec::with_capacity(BATCH + 8),
                values: Vec::with_capacity(BATCH + 8),
                flights: VecDeque::with_capacity(depth + 8),
                staged_flights: 0,
                broken: None,
            })
        });
        Ok(Self {
            links: links.collect::<Result<_, MemoryError>>()?,
            cq,
            local: local.0,
            local_len: local.1,
            _keep: keep,
        })
    }

    /// Checks a descriptor, whoever wrote it, and makes requests of it, which [`ring_doorbells`](Self::ring_doorbells) posts.
    #[inline]
    pub(crate) fn stage(&mut self, descriptor: &Descriptor, origin: Origin) -> Staging {
        let Some(link) = self.links.get_mut(descriptor.peer as usize) else {
            return over(Cause::Peer, descriptor);
        };
        let (moves, signalling) = match descriptor.operation {
            Operation::Put(signalling) => (true, signalling),
            Operation::Get => (true, None),
            Operation::Signal(signalling) => (false, Some(signalling)),
        };
        if moves && !fits(descriptor.local, descriptor.len, self.local_len) {
            return over(Cause::Local, descriptor);
        }
        if moves && !fits(descriptor.remote, descriptor.len, link.memory.data.len()) {
            return over(Cause::Remote, descriptor);
        }
        let word = match signalling {
            None => None,
            Some(Signalling { signal, .. }) => {
                let at = signal.checked_mul(WORD as u64);
                match at.and_then(|at| {
                    link.memory
                        .signals
                        .word(at)
                        .zip(link.memory.signals.slice(at, WORD as u64))
                }) {
                    None => return over(Cause::Signal, descriptor),
                    word => word,
                }
            }
        };
        if link.broken.is_some() {
            return Staging::Over(Err(link.failure(descriptor)));
        }

        let pieces = if moves { descriptor.len.div_ceil(PIECE) } else { 0 } as usize;
        let requests = pieces + usize::from(word.is_some());
        let adds = matches!(
            signalling,
            Some(Signalling {
                update: Update::Add(_),
                ..
            })
        );
        if requests == 0 {
            return Staging::Over(Ok(()));
        }
        let room = (link.qp.send_room() as usize).saturating_sub(link.staged.len());
        if requests > room || link.staged.len() >= BATCH || (adds && link.words.is_empty()) {
            return Staging::Full;
        }
        for piece in 0..pieces as u64 {
            let at = piece * PIECE;
            let len = PIECE.min(descriptor.len - at);
            let local = self.local.slice((descriptor.local + at) as usize, len as usize);
            let remote = link.memory.data.slice(descriptor.remote + at, len);
            // Both lie where they should, as the whole does.
            if let (Some(local), Some(remote)) = (local, remote) {
                link.staged.push(match descriptor.operation {
                    Operation::Get => Request::Read(local, remote),
                    _ => Request::Write(local, remote),
                });
            }
        }
        if let (Some((word, remote)), Some(signalling)) = (word, signalling) {
            match signalling.update {
                Update::Set(value) => {
                    link.staged.push(Request::Set(link.values.len(), remote));
                    link.values.push(value.to_ne_bytes());
                }
                Update::Add(value) => {
                    if let Some(old) = link.words.pop() {
                        link.staged.push(Request::Add(old, word, value));
                    }
                }
            }
        }
        link.flights.push_back(Flight {
            last: link.qp.next_send() + link.staged.len() as u64 - 1,
            origin,
            descriptor: *descriptor,
        });
        link.staged_flights += 1;
        Staging::Taken
    }

    /// Posts what is staged: one call of the device for each rank. Notes what has come to an end by that.
    #[inline]
    pub(crate) fn ring_doorbells(&mut self, outcomes: &mut Vec<Outcome>) {
        for link in &mut self.links {
            if !link.staged.is_empty() {
                link.post(outcomes);
            }
        }
    }

    /// Takes completions, and notes what has come to an end. Gives whether there were any.
    ///
    /// # Errors
    /// What the device says of its completion queue.
    #[inline]
    pub(crate) fn poll(&mut self, outcomes: &mut Vec<Outcome>) -> Result<bool, CompletionQueueError> {
        let links = &mut self.links;
        let mut any = false;
        self.cq.poll()?.for_each(|mut done| {
            any = true;
            let Some(link) = links.get_mut(done.tag() as usize) else {
                return;
            };
            if let Err(failure) = done.check() {
                link.broken.get_or_insert_with(|| failure.to_string());
            }
            if let Some(word) = done.take_word() {
                link.words.push(word);
            }
            while link
                .flights
                .front()
                .is_some_and(|flight| flight.last <= done.sequence())
                && let Some(flight) = link.flights.pop_front()
            {
                let result = if done.is_ok() {
                    Ok(())
                } else {
                    Err(link.failure(&flight.descriptor))
                };
                outcomes.push((flight.origin, result));
            }
        });
        Ok(any)
    }

    /// All that is under way has failed.
    pub(crate) fn fail_all(&mut self, why: &str, outcomes: &mut Vec<Outcome>) {
        for link in &mut self.links {
            link.broken.get_or_insert_with(|| why.to_owned());
            while let Some(flight) = link.flights.pop_front() {
                outcomes.push((flight.origin, Err(link.failure(&flight.descriptor))));
            }
        }
    }
}

impl Link {
    #[cold]
    fn failure(&self, descriptor: &Descriptor) -> Failed {
        Failed {
            detail: self.broken.as_ref().map(|why| format!("; {why}")).unwrap_or_default(),
            ..Failed::new(Cause::Connection, descriptor)
        }
    }

    fn post(&mut self, outcomes: &mut Vec<Outcome>) {
        let Self { qp, staged, values, .. } = self;
        let values = &*values;
        let mut left = staged.len();
        let posted = qp.post(|batch| {
            // The last is signalled: it confirms those before.
            for request in staged.drain(..) {
                left -= 1;
                macro_rules! add {
                    ($request:expr) => {{
                        $request.signalled_if(left == 0);
                    }};
                }
                match request {
                    Request::Write(local, remote) => add!(batch.write(local, remote)),
                    Request::Read(local, remote) => add!(batch.read(local, remote)),
                    Request::Set(value, remote) => add!(batch.write_inline(&values[value], remote)),
                    Request::Add(old, word, value) => add!(batch.fetch_add(old, word, value)),
                }
            }
        });
        self.values.clear();
        let staged = std::mem::take(&mut self.staged_flights);
        if let Err(refused) = posted {
            // Completions of some of them may come yet, and find nothing that they belong to.
            self.broken.get_or_insert_with(|| refused.to_string());
            for flight in self.flights.split_off(self.flights.len() - staged) {
                outcomes.push((flight.origin, Err(self.failure(&flight.descriptor))));
            }
        }
    }
}

/// Whether the range lies in so many bytes.
fn fits(at: u64, len: u64, whole: u64) -> bool {
    at <= whole && len <= whole - at
}

#[cold]
fn over(cause: Cause, descriptor: &Descriptor) -> Staging {
    Staging::Over(Err(Failed::new(cause, descriptor)))
}

impl core::fmt::Debug for Wire {
    fn fmt(&self, f: &mut core::fmt::Formatter<'_>) -> core::fmt::Result {
        f.debug_struct("Wire")
            .field("ranks", &self.links.len())
            .finish_non_exhaustive()
    }
}
