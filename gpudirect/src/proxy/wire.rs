//! The proxy's connections: a queue pair per rank, on which descriptors become work requests.

use core::any::Any;
use std::collections::VecDeque;

use doorbell_verbs::{
    AllAccess, AtomicWord, Buffer, BufferAlias, CompletionQueue, CompletionQueueError, Local, MemoryError,
    ProtectionDomain, QueuePair, Remote, RemoteWord,
};

use super::descriptor::{Descriptor, Operation, SignalOp, SignalUpdate};
use super::failure::{FailureCause, RequestFailure};
use crate::words::WORD;

/// The maximum bytes of a work request: ports support 1 GiB and more.
const MAX_REQUEST: u64 = 1 << 30;
/// Approximate work requests per batch, of which the last is signaled (selective signaling).
const MAX_BATCH: usize = 64;

/// A peer's remote memory.
#[derive(Debug, Clone, Copy)]
pub struct PeerMemory {
    /// The target of puts and source of gets.
    pub data: Remote<AllAccess>,
    /// Its signals, 8 bytes each.
    pub signals: Remote<AllAccess>,
}

/// Connections to all ranks, on which a [`Proxy`](super::Proxy) posts.
pub struct Connections {
    // Queue pairs are dropped before their resources.
    peers: Vec<PeerConnection>,
    cq: CompletionQueue,
    local: BufferAlias,
    local_len: u64,
    _keep: Box<dyn Any + Send>,
}

struct PeerConnection {
    qp: QueuePair,
    memory: PeerMemory,
    /// Scratch words for the original values that atomics return; one per send queue slot.
    words: Vec<AtomicWord>,
    /// Work requests staged for the next doorbell, and their inline values.
    staged: Vec<Request>,
    values: Vec<[u8; WORD]>,
    in_flight: VecDeque<InFlight>,
    /// How many of the in-flight entries are staged: the last ones.
    staged_in_flight: usize,
    /// The error that broke the connection.
    error_text: Option<String>,
}

enum Request {
    Write(BufferAlias, Remote<AllAccess>),
    Read(BufferAlias, Remote<AllAccess>),
    Set(usize, Remote<AllAccess>),
    Add(AtomicWord, RemoteWord, u64),
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Origin {
    pub(crate) ring: usize,
    pub(crate) index: u64,
}

struct InFlight {
    /// The sequence number of its last work request.
    last: u64,
    origin: Origin,
    descriptor: Descriptor,
}

pub(crate) type Outcome = (Origin, Result<(), RequestFailure>);

pub(crate) enum Staging {
    /// It is posted with the next doorbell.
    Staged,
    /// There is no free send queue slot.
    Full,
    /// It is complete: nothing to post, or invalid.
    Done(Result<(), RequestFailure>),
}

impl Connections {
    /// Connections to ranks 0, 1, …: per rank a queue pair with completions on `cq`, and its remote
    /// memory. `local` is the local memory with its length; `keep` is dropped after all requests.
    ///
    /// Each queue pair needs 8 bytes of inline data and the rank as its tag; the one to this rank
    /// is connected to another of this process.
    ///
    /// # Errors
    /// If the scratch words for atomics cannot be registered.
    pub fn new(
        pd: &ProtectionDomain,
        cq: CompletionQueue,
        peers: Vec<(QueuePair, PeerMemory)>,
        local: (BufferAlias, u64),
        keep: Box<dyn Any + Send>,
    ) -> Result<Self, MemoryError> {
        let peers = peers.into_iter().map(|(qp, memory)| {
            let depth = qp.free_send_slots() as usize;
            let chunks = pd.register_chunks(doorbell_verbs::Memory::zeroed(depth * WORD), WORD, Local)?;
            Ok(PeerConnection {
                qp,
                memory,
                words: chunks
                    .filter_map(|chunk: Buffer<Local>| chunk.into_word().ok())
                    .collect(),
                staged: Vec::with_capacity(MAX_BATCH + 8),
                values: Vec::with_capacity(MAX_BATCH + 8),
                in_flight: VecDeque::with_capacity(depth + 8),
                staged_in_flight: 0,
                error_text: None,
            })
        });
        Ok(Self {
            peers: peers.collect::<Result<_, MemoryError>>()?,
            cq,
            local: local.0,
            local_len: local.1,
            _keep: keep,
        })
    }

    /// Validates an untrusted descriptor and stages its work requests for the next doorbells.
    #[inline]
    pub(crate) fn stage(&mut self, descriptor: &Descriptor, origin: Origin) -> Staging {
        let Some(peer) = self.peers.get_mut(descriptor.peer as usize) else {
            return failed_staging(FailureCause::Peer, descriptor);
        };
        let (moves, signaling) = match descriptor.operation {
            Operation::Put(signaling) => (true, signaling),
            Operation::Get => (true, None),
            Operation::Signal(signaling) => (false, Some(signaling)),
        };
        if moves && !in_bounds(descriptor.local, descriptor.len, self.local_len) {
            return failed_staging(FailureCause::Local, descriptor);
        }
        if moves && !in_bounds(descriptor.remote, descriptor.len, peer.memory.data.len()) {
            return failed_staging(FailureCause::Remote, descriptor);
        }
        let word = match signaling {
            None => None,
            Some(SignalUpdate { signal, .. }) => {
                let at = signal.checked_mul(WORD as u64);
                match at.and_then(|at| {
                    peer.memory
                        .signals
                        .word(at)
                        .zip(peer.memory.signals.slice(at, WORD as u64))
                }) {
                    None => return failed_staging(FailureCause::Signal, descriptor),
                    word => word,
                }
            }
        };
        if peer.error_text.is_some() {
            return Staging::Done(Err(peer.failure(descriptor)));
        }

        let pieces = if moves { descriptor.len.div_ceil(MAX_REQUEST) } else { 0 } as usize;
        let requests = pieces + usize::from(word.is_some());
        let adds = matches!(
            signaling,
            Some(SignalUpdate {
                update: SignalOp::Add(_),
                ..
            })
        );
        if requests == 0 {
            return Staging::Done(Ok(()));
        }
        let room = (peer.qp.free_send_slots() as usize).saturating_sub(peer.staged.len());
        if requests > room || peer.staged.len() >= MAX_BATCH || (adds && peer.words.is_empty()) {
            return Staging::Full;
        }
        for piece in 0..pieces as u64 {
            let at = piece * MAX_REQUEST;
            let len = MAX_REQUEST.min(descriptor.len - at);
            let local = self.local.slice((descriptor.local + at) as usize, len as usize);
            let remote = peer.memory.data.slice(descriptor.remote + at, len);
            // Both are within bounds, as the whole ranges are.
            if let (Some(local), Some(remote)) = (local, remote) {
                peer.staged.push(match descriptor.operation {
                    Operation::Get => Request::Read(local, remote),
                    _ => Request::Write(local, remote),
                });
            }
        }
        if let (Some((word, remote)), Some(signaling)) = (word, signaling) {
            match signaling.update {
                SignalOp::Set(value) => {
                    peer.staged.push(Request::Set(peer.values.len(), remote));
                    peer.values.push(value.to_ne_bytes());
                }
                SignalOp::Add(value) => {
                    if let Some(old) = peer.words.pop() {
                        peer.staged.push(Request::Add(old, word, value));
                    }
                }
            }
        }
        peer.in_flight.push_back(InFlight {
            last: peer.qp.next_send() + peer.staged.len() as u64 - 1,
            origin,
            descriptor: *descriptor,
        });
        peer.staged_in_flight += 1;
        Staging::Staged
    }

    /// Posts staged requests, one post list per rank; appends descriptors that fail to post.
    #[inline]
    pub(crate) fn ring_doorbells(&mut self, outcomes: &mut Vec<Outcome>) {
        for peer in &mut self.peers {
            if !peer.staged.is_empty() {
                peer.post(outcomes);
            }
        }
    }

    /// Polls completions and appends the results. Returns whether there were any.
    ///
    /// # Errors
    /// The device's error for its completion queue.
    #[inline]
    pub(crate) fn poll(&mut self, outcomes: &mut Vec<Outcome>) -> Result<bool, CompletionQueueError> {
        let peers = &mut self.peers;
        let mut any = false;
        self.cq.poll()?.for_each(|mut done| {
            any = true;
            let Some(peer) = peers.get_mut(done.tag() as usize) else {
                return;
            };
            if let Err(failure) = done.check() {
                peer.error_text.get_or_insert_with(|| failure.to_string());
            }
            if let Some(word) = done.take_word() {
                peer.words.push(word);
            }
            while peer
                .in_flight
                .front()
                .is_some_and(|entry| entry.last <= done.sequence())
                && let Some(entry) = peer.in_flight.pop_front()
            {
                let result = if done.is_ok() {
                    Ok(())
                } else {
                    Err(peer.failure(&entry.descriptor))
                };
                outcomes.push((entry.origin, result));
            }
        });
        Ok(any)
    }

    pub(crate) fn fail_all(&mut self, why: &str, outcomes: &mut Vec<Outcome>) {
        for peer in &mut self.peers {
            peer.error_text.get_or_insert_with(|| why.to_owned());
            while let Some(entry) = peer.in_flight.pop_front() {
                outcomes.push((entry.origin, Err(peer.failure(&entry.descriptor))));
            }
        }
    }
}

impl PeerConnection {
    #[cold]
    fn failure(&self, descriptor: &Descriptor) -> RequestFailure {
        RequestFailure {
            detail: self
                .error_text
                .as_ref()
                .map(|why| format!("; {why}"))
                .unwrap_or_default(),
            ..RequestFailure::new(FailureCause::Connection, descriptor)
        }
    }

    fn post(&mut self, outcomes: &mut Vec<Outcome>) {
        let Self { qp, staged, values, .. } = self;
        let values = &*values;
        let mut left = staged.len();
        let posted = qp.post(|batch| {
            // The last one is signaled: its completion confirms the earlier ones.
            for request in staged.drain(..) {
                left -= 1;
                macro_rules! add {
                    ($request:expr) => {{
                        $request.signaled_if(left == 0);
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
        let staged = std::mem::take(&mut self.staged_in_flight);
        if let Err(refused) = posted {
            // Completions of some of them may still arrive, and then match no entry.
            self.error_text.get_or_insert_with(|| refused.to_string());
            for entry in self.in_flight.split_off(self.in_flight.len() - staged) {
                outcomes.push((entry.origin, Err(self.failure(&entry.descriptor))));
            }
        }
    }
}

fn in_bounds(at: u64, len: u64, whole: u64) -> bool {
    at <= whole && len <= whole - at
}

#[cold]
fn failed_staging(cause: FailureCause, descriptor: &Descriptor) -> Staging {
    Staging::Done(Err(RequestFailure::new(cause, descriptor)))
}

impl core::fmt::Debug for Connections {
    fn fmt(&self, f: &mut core::fmt::Formatter<'_>) -> core::fmt::Result {
        f.debug_struct("Wire")
            .field("ranks", &self.peers.len())
            .finish_non_exhaustive()
    }
}
