//! The thread that looks after a GPU communicator: whether the group has failed, and whether operations end in their time.
//!
//! A stream that waits for a rank that is gone would wait for ever, and with it the device. So when the group has failed, all words that streams may wait for are written, again and again, for who waits for one makes it zero; and the word is set that
//! kernels look at which wait. Streams come to their ends then, with whatever is there. It goes on until the communicator is dropped, and all that it had put into streams is done.

use std::collections::VecDeque;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use doorbell_cuda::{Context, Event, Memory, Stream};

use super::error::GpuError;
use super::peers::Peers;
use crate::communicator::Communicator;

/// Between two looks at the group.
const PAUSE: Duration = Duration::from_millis(2);
/// How long what is in streams may take to end when nobody is waited for any more.
const END: Duration = Duration::from_secs(10);
/// Ends of operations that are remembered at most: those in between are as good as the last.
const REMEMBERED: usize = 64;

/// Looks after a communicator until it is dropped.
pub(super) struct Watcher {
    shared: Arc<Shared>,
    thread: Option<JoinHandle<()>>,
}

struct Shared {
    /// The ends of operations, and until when they should have come.
    pending: Mutex<VecDeque<(Event, Instant)>>,
    over: AtomicBool,
}

impl Watcher {
    pub(super) fn new(
        comm: &Arc<Communicator>,
        context: &Context,
        peers: Option<Arc<Peers>>,
    ) -> Result<Self, GpuError> {
        let shared = Arc::new(Shared {
            pending: Mutex::default(),
            over: AtomicBool::new(false),
        });
        // It goes before what waits, where both are in one queue of the device.
        let stream = Stream::with_priority(context, -1)?;
        let (comm, theirs) = (Arc::clone(comm), Arc::clone(&shared));
        let thread = thread::Builder::new().name("gpu watch".to_owned());
        let thread = thread
            .spawn(move || theirs.watch(&comm, peers.as_deref(), &stream))
            .map_err(GpuError::Thread)?;
        Ok(Self {
            shared,
            thread: Some(thread),
        })
    }

    /// An operation whose end is to come until then.
    pub(super) fn expect(&self, end: Event, until: Instant) {
        let mut pending = self.shared.pending();
        if pending.len() >= REMEMBERED {
            pending.pop_back();
        }
        pending.push_back((end, until));
    }

    /// Waits for what is under way, or for its being let go on; and ends.
    pub(super) fn end(mut self) {
        self.stop();
    }

    fn stop(&mut self) {
        self.shared.over.store(true, Ordering::Relaxed);
        if let Some(thread) = self.thread.take() {
            thread.thread().unpark();
            // It does not panic.
            let _ = thread.join();
        }
    }
}

impl Drop for Watcher {
    fn drop(&mut self) {
        self.stop();
    }
}

impl Shared {
    fn pending(&self) -> MutexGuard<'_, VecDeque<(Event, Instant)>> {
        self.pending.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Forgets operations that have ended; when the first that has not is to.
    fn first(&self) -> Option<Instant> {
        let mut pending = self.pending();
        // What cannot be asked for any more, nobody waits for.
        while pending.front().is_some_and(|(end, _)| end.is_done().unwrap_or(true)) {
            pending.pop_front();
        }
        pending.front().map(|(_, until)| *until)
    }

    fn watch(&self, comm: &Communicator, peers: Option<&Peers>, stream: &Stream) {
        let mut end = None;
        loop {
            let first = self.first();
            if self.over.load(Ordering::Relaxed) {
                let end = *end.get_or_insert_with(|| Instant::now() + END.max(comm.options().deadline));
                if first.is_none() || Instant::now() >= end {
                    return;
                }
            }
            if comm.has_failed() {
                if let Err(error) = peers.map_or(Ok(()), |peers| release(peers, stream)) {
                    tracing::warn!("what waits in streams for a rank that is gone cannot be let go on: {error}");
                    return;
                }
            } else if first.is_some_and(|until| Instant::now() >= until) {
                let deadline = comm.options().deadline;
                comm.abort(&format!(
                    "an operation in a stream has not finished within {deadline:?}"
                ));
            }
            thread::park_timeout(PAUSE);
        }
    }
}

/// Writes all that anything of this rank's waits for.
fn release(peers: &Peers, stream: &Stream) -> Result<(), doorbell_cuda::Error> {
    peers.control().atomic_u32(0)?.store(1, Ordering::Release);
    let words = peers.areas().words.clone();
    stream.fill(peers.arenas().of(peers.rank()).span(words)?, 0xff)?;
    stream.synchronize()
}
