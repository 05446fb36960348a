//! What an engine and the thread of the control mesh know of one another.
//!
//! The engine writes two words per operation and reads one message whenever it likes; it says what it waits for only when it is asked, so that a healthy operation pays nothing for what is told of a broken one.

use std::sync::atomic::{AtomicBool, AtomicU8, AtomicU32, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use nix::sys::eventfd::EventFd;

use crate::plan::Collective;
use crate::types::Rank;

/// How many operations may be pending and still be told apart by kind.
const KINDS: usize = 64;
/// Numbers of operations from here on are of messages between two ranks, which no other counts: which it is of those in its direction, counted from 1.
pub const MESSAGES: u64 = 1 << 63;

/// Which message between two ranks an operation's number is of, if it is.
pub(crate) fn message_number(operation: u64) -> Option<u64> {
    (operation & MESSAGES != 0).then_some(operation & !MESSAGES)
}

/// Somebody wants to know what the engine waits for.
const REPORT_REQUESTED: u32 = 1;
/// The group has failed.
const GROUP_FAILED: u32 = 2;

/// What a wait is for.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub enum Awaited {
    /// A message from the peer.
    Message,
    /// Room for a message to the peer: the peer has not said where it goes.
    Credit,
    /// That the peer's device acknowledges what was sent.
    Acknowledgement,
    /// Nothing any more: the queue pair to the peer has failed.
    QueuePairFailed,
}

/// Something that an engine waits for.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub struct Wait {
    /// The operation, counted from 1 in the order in which the communicator began them; from [`MESSAGES`] on, a message between two ranks.
    pub operation: u64,
    /// The connection: channel and strand.
    pub connection: u32,
    /// The slice of the operation.
    pub slice: u64,
    /// The step of the program.
    pub step: u32,
    /// From whom.
    pub peer: Rank,
    /// The number of this rank's queue pair to it.
    pub qpn: u32,
    /// What.
    pub awaited: Awaited,
}

/// What an engine has begun and finished, and what it waits for.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct Report {
    /// The last operation it has begun; 0 is none.
    pub begun: u64,
    /// The last operation it has finished, as all before; 0 is none.
    pub finished: u64,
    /// What the operations after `finished` are, in order; at most 64, and none where that is not known.
    pub pending: Vec<Option<Collective>>,
    /// What it waits for; none if nobody drives it.
    pub waits: Option<Vec<Wait>>,
    /// To whom its links were found to work, when all were asked to try theirs; none if it could not.
    pub reachable: Option<Vec<Rank>>,
}

/// What an engine shows to the control mesh, and the flag by which the mesh calls it.
#[derive(Debug)]
pub struct ProgressMonitor {
    flags: AtomicU32,
    begun: AtomicU64,
    finished: AtomicU64,
    /// Whether messages between this rank and others are under way.
    messages_in_flight: AtomicBool,
    /// 1 + the place of the kind in [`Collective::ALL`], by number of the operation.
    kind_of: [AtomicU8; KINDS],
    waits: Mutex<Option<Vec<Wait>>>,
    /// How long the engine may try its links before it reports, in milliseconds; 0 is not at all.
    link_test_ms: AtomicU32,
    reachable: Mutex<Option<Vec<Rank>>>,
    /// Rings when the engine has reported.
    wakeup: Option<Arc<EventFd>>,
}

impl Default for ProgressMonitor {
    fn default() -> Self {
        Self::with_wakeup(None)
    }
}

impl ProgressMonitor {
    pub(crate) fn with_wakeup(wakeup: Option<Arc<EventFd>>) -> Self {
        Self {
            flags: AtomicU32::new(0),
            begun: AtomicU64::new(0),
            finished: AtomicU64::new(0),
            messages_in_flight: AtomicBool::new(false),
            kind_of: std::array::from_fn(|_| AtomicU8::new(0)),
            waits: Mutex::new(None),
            link_test_ms: AtomicU32::new(0),
            reachable: Mutex::new(None),
            wakeup,
        }
    }

    /// Whether there is something to look at: [`failed`](Self::failed), or [`asked`](Self::asked). One relaxed load, for loops that spin.
    #[inline]
    #[must_use]
    pub fn needs_attention(&self) -> bool {
        self.flags.load(Ordering::Relaxed) != 0
    }

    /// Whether the group has failed: a member has died, or somebody has aborted it. It never becomes well again.
    #[inline]
    #[must_use]
    pub fn failed(&self) -> bool {
        self.flags.load(Ordering::Relaxed) & GROUP_FAILED != 0
    }

    /// Whether somebody wants to know what this engine waits for: call [`report`](Self::report).
    #[inline]
    #[must_use]
    pub fn report_requested(&self) -> bool {
        self.flags.load(Ordering::Relaxed) & REPORT_REQUESTED != 0
    }

    /// Reported what the engine waits for now: of each connection, the wait that is first. An empty list is an engine that is busy.
    pub fn report(&self, waits: Vec<Wait>) {
        *self.waits.lock().unwrap_or_else(PoisonError::into_inner) = Some(waits);
        self.flags.fetch_and(!REPORT_REQUESTED, Ordering::Relaxed);
        if let Some(wakeup) = &self.wakeup {
            // It fails only where the count is at its end, and then the mesh's thread is awake.
            let _ = wakeup.write(1);
        }
    }

    /// An operation begins. They are numbered from 1, without gaps, alike on all ranks.
    pub fn begin(&self, operation: u64, kind: Collective) {
        let place = Collective::ALL
            .iter()
            .position(|one| *one == kind)
            .map_or(0, |place| place as u8 + 1);
        self.kind_of[operation as usize % KINDS].store(place, Ordering::Relaxed);
        self.begun.store(operation, Ordering::Release);
    }

    /// An operation, and all before it, are finished.
    pub fn finish(&self, operation: u64) {
        self.finished.store(operation, Ordering::Release);
    }

    /// Messages between this rank and others are under way, or none are: then the engine has something to say of them when it is asked.
    pub fn set_messages_in_flight(&self, in_flight: bool) {
        self.messages_in_flight.store(in_flight, Ordering::Relaxed);
    }

    /// Whether messages between this rank and others are under way.
    pub(crate) fn messages_in_flight(&self) -> bool {
        self.messages_in_flight.load(Ordering::Relaxed)
    }

    pub(crate) fn fail(&self) {
        self.flags.fetch_or(GROUP_FAILED, Ordering::Relaxed);
    }

    /// Asks the engine to report; what it reported before is forgotten.
    pub fn request_report(&self) {
        *self.waits.lock().unwrap_or_else(PoisonError::into_inner) = None;
        self.flags.fetch_or(REPORT_REQUESTED, Ordering::Relaxed);
    }

    /// Wants the engine to try its links before it reports, for so long at most.
    pub(crate) fn request_link_test(&self, timeout: Duration) {
        let ms = u32::try_from(timeout.as_millis()).unwrap_or(u32::MAX);
        self.link_test_ms.store(ms, Ordering::Relaxed);
    }

    /// How long the engine may try its links before it reports, if it is to.
    pub(crate) fn requested_link_test(&self) -> Option<Duration> {
        let ms = self.link_test_ms.load(Ordering::Relaxed);
        (ms > 0).then(|| Duration::from_millis(ms.into()))
    }

    /// Reported to whom the engine's links work.
    pub(crate) fn report_reachable(&self, peers: Vec<Rank>) {
        *self.reachable.lock().unwrap_or_else(PoisonError::into_inner) = Some(peers);
    }

    /// What is known of the engine.
    #[must_use]
    pub fn snapshot(&self) -> Report {
        let finished = self.finished.load(Ordering::Acquire);
        let begun = self.begun.load(Ordering::Acquire).max(finished);
        let kind = |operation: u64| {
            let place = self.kind_of[operation as usize % KINDS].load(Ordering::Relaxed);
            Collective::ALL.get(usize::from(place).checked_sub(1)?).copied()
        };
        // Kinds further back have been written over.
        let known = |operation: &u64| begun - operation < KINDS as u64;
        let pending = (finished + 1..=begun).map(|operation| known(&operation).then(|| kind(operation))?);
        Report {
            begun,
            finished,
            pending: pending.take(KINDS).collect(),
            waits: self.waits.lock().unwrap_or_else(PoisonError::into_inner).clone(),
            reachable: self.reachable.lock().unwrap_or_else(PoisonError::into_inner).clone(),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_report_says_what_is_pending_and_of_what_kind() {
        let monitor = ProgressMonitor::default();
        assert_eq!(monitor.snapshot(), Report::default());
        monitor.begin(1, Collective::AllReduce);
        monitor.begin(2, Collective::Barrier);
        monitor.finish(1);
        let report = monitor.snapshot();
        assert_eq!((report.begun, report.finished), (2, 1));
        assert_eq!(report.pending, [Some(Collective::Barrier)]);
        for operation in 3..200 {
            monitor.begin(operation, Collective::AllToAll);
        }
        let pending = monitor.snapshot().pending;
        assert_eq!(pending.len(), KINDS);
        assert_eq!(pending[0], None, "its kind has been written over");
        monitor.finish(150);
        assert_eq!(monitor.snapshot().pending, [Some(Collective::AllToAll); 49]);
    }

    #[test]
    fn an_engine_that_is_asked_answers_once_and_failure_stays() {
        let monitor = ProgressMonitor::default();
        assert!(!monitor.needs_attention());
        monitor.request_report();
        assert!(monitor.needs_attention() && monitor.report_requested() && !monitor.failed());
        monitor.report(Vec::new());
        assert!(!monitor.needs_attention());
        assert_eq!(monitor.snapshot().waits, Some(Vec::new()));
        monitor.request_report();
        assert_eq!(monitor.snapshot().waits, None, "it has not answered this time");
        monitor.fail();
        monitor.report(Vec::new());
        assert!(monitor.needs_attention() && monitor.failed() && !monitor.report_requested());
    }
}
