//! The watchdog thread of a GPU communicator, for failures of the group, missed deadlines, messages
//! of unexpected lengths, and impossible routings.
//!
//! A stream that waits for a dead rank would block the device. So when the group has failed, the
//! watchdog writes all words that streams may wait for, repeatedly, as each wait resets its word,
//! and the abort word; its rank's, and those of ranks that are gone, whose work may go on without
//! them ([`control`](super::control)). It continues until the communicator is dropped and its work
//! is done.

use std::collections::VecDeque;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use doorbell_cuda::{Context, Event, Memory, RelaxedCapture, Stream};

use super::error::GpuError;
use super::exchange;
use super::moe::report;
use super::peers::Peers;
use crate::communicator::Communicator;

const POLL_INTERVAL: Duration = Duration::from_millis(2);
/// The time limit for enqueued work to complete once no wait remains.
const DRAIN_TIMEOUT: Duration = Duration::from_secs(10);
/// The maximum number of tracked operations: the last one covers those in between. A query of one
/// takes more than a microsecond, in which the program's calls of the driver may wait.
const MAX_TRACKED: usize = 8;

pub(super) struct Watchdog {
    shared: Arc<Shared>,
    thread: Option<JoinHandle<()>>,
}

struct Shared {
    pending: Mutex<VecDeque<(Event, Instant)>>,
    stop_requested: AtomicBool,
}

impl Watchdog {
    pub(super) fn new(
        comm: &Arc<Communicator>,
        context: &Context,
        peers: Option<Arc<Peers>>,
    ) -> Result<Self, GpuError> {
        let shared = Arc::new(Shared {
            pending: Mutex::default(),
            stop_requested: AtomicBool::new(false),
        });
        // Higher priority than the waiting streams, in case both share a hardware queue.
        let stream = Stream::with_priority(context, -1)?;
        let (comm, theirs) = (Arc::clone(comm), Arc::clone(&shared));
        let watch = move || theirs.watch(&comm, peers.as_deref(), &stream);
        let thread = doorbell_threads::spawn("gpu watch", watch).map_err(GpuError::Thread)?;
        Ok(Self {
            shared,
            thread: Some(thread),
        })
    }

    /// Tracks an operation, which ends with all of `ends`, behind those before it.
    pub(super) fn watch(&self, ends: impl IntoIterator<Item = Event>, until: Instant) {
        let mut pending = self.shared.pending();
        if pending.len() >= MAX_TRACKED {
            pending.pop_back();
        }
        pending.extend(ends.into_iter().map(|end| (end, until)));
    }

    /// Waits for enqueued work to complete or to be released, and stops the thread.
    pub(super) fn end(mut self) {
        self.stop();
    }

    fn stop(&mut self) {
        self.shared.stop_requested.store(true, Ordering::Release);
        if let Some(thread) = self.thread.take() {
            thread.thread().unpark();
            let _ = thread.join();
        }
    }
}

impl Drop for Watchdog {
    fn drop(&mut self) {
        self.stop();
    }
}

impl Shared {
    fn pending(&self) -> MutexGuard<'_, VecDeque<(Event, Instant)>> {
        self.pending.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The deadline of the first operation that has not ended. The lock is released during a query,
    /// so that no enqueue waits for it: only this thread removes the first one.
    fn first(&self) -> Option<Instant> {
        loop {
            let (end, until) = self.pending().front().cloned()?;
            // A failed query means that nothing waits for it any more.
            if !end.is_done().unwrap_or(true) {
                return Some(until);
            }
            self.pending().pop_front();
        }
    }

    fn watch(&self, comm: &Communicator, peers: Option<&Peers>, stream: &Stream) {
        // The program may capture in another thread, and forbid the queries of this one.
        let _relaxed = RelaxedCapture::enter(stream.context().driver());
        let mut end = None;
        loop {
            // Read before the failure: one that preceded the request is handled before the end.
            let is_stopping = self.stop_requested.load(Ordering::Acquire);
            let (first, has_failed) = (self.first(), comm.has_failed());
            if has_failed {
                if let Err(error) = peers.map_or(Ok(()), |peers| release_waits(comm, peers, stream)) {
                    tracing::warn!("what waits in streams for a rank that is gone cannot be let go on: {error}");
                    return;
                }
            } else if let Some(reason) =
                peers.and_then(|peers| exchange::mismatch(peers).or_else(|| report::violation(peers)))
            {
                comm.abort(&reason);
            } else if first.is_some_and(|until| Instant::now() >= until) {
                let deadline = comm.options().deadline;
                comm.abort(&format!(
                    "an operation in a stream has not finished within {deadline:?}"
                ));
            }
            // After the release of waits: those of graphs, which are not tracked.
            if is_stopping {
                // Until it fails, which the first deadline sees to, work may wait for other ranks.
                if has_failed {
                    end.get_or_insert_with(|| Instant::now() + DRAIN_TIMEOUT);
                }
                if first.is_none() || end.is_some_and(|end| Instant::now() >= end) {
                    return;
                }
            }
            thread::park_timeout(POLL_INTERVAL);
        }
    }
}

fn release_waits(comm: &Communicator, peers: &Peers, stream: &Stream) -> Result<(), doorbell_cuda::Error> {
    let (pages, dead) = (peers.pages(), comm.dead());
    pages.stop()?;
    pages.stop_gone(&dead);
    for rank in dead.into_iter().chain([peers.rank()]) {
        let words = peers.areas().words.clone();
        stream.fill(peers.arenas().of(rank).span(words)?, 0xff)?;
    }
    stream.synchronize()
}
