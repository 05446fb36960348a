//! The progress monitor: what an engine and the mesh I/O thread share.
//!
//! A healthy operation costs two words written and one flag polled; waits are reported on request.
//!
//! No model: numbers that only grow, each kind stored before its number, and flags that guard no
//! data; reports are under a lock.

use std::sync::atomic::{AtomicBool, AtomicU8, AtomicU32, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use nix::sys::eventfd::EventFd;
use serde::{Deserialize, Serialize};

use crate::plan::Collective;
use crate::types::Rank;

/// Pending operations whose collective is remembered.
const KINDS: usize = 64;
/// Operation numbers from here on are point-to-point messages, counted from 1 per direction.
pub const MESSAGES: u64 = 1 << 63;

pub(crate) fn message_number(operation: u64) -> Option<u64> {
    (operation & MESSAGES != 0).then_some(operation & !MESSAGES)
}

const REPORT_REQUESTED: u32 = 1;
const GROUP_FAILED: u32 = 2;

/// What a wait is for.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug, Serialize, Deserialize)]
pub enum Awaited {
    /// A message from the peer.
    Message,
    /// A credit to send to the peer: a grant of memory, or a free slot.
    Credit,
    /// An acknowledgement by the peer's device.
    Acknowledgement,
    /// Nothing can arrive: the queue pair to the peer has failed.
    QueuePairFailed,
}

/// Something that an engine waits for.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Wait {
    /// The operation, counted from 1; from [`MESSAGES`] on, a point-to-point message.
    pub operation: u64,
    /// The connection: index of channel and strand.
    pub connection: u32,
    /// The slice of the operation.
    pub slice: u64,
    /// The step of the program.
    pub step: u32,
    /// The peer.
    pub peer: Rank,
    /// This rank's queue pair number to it.
    pub qpn: u32,
    /// What the wait is for.
    pub awaited: Awaited,
}

/// An engine's progress and waits.
#[derive(Clone, PartialEq, Eq, Debug, Default, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Report {
    /// The last operation that has begun; 0 is none.
    pub begun: u64,
    /// The last operation up to which all have finished; 0 is none.
    pub finished: u64,
    /// The collectives of the at most 64 operations after `finished`; `None` where unknown.
    pub pending: Vec<Option<Collective>>,
    /// The waits; `None` if the engine is not driven.
    pub waits: Option<Vec<Wait>>,
    /// The peers that a link test reached; `None` if there was no test.
    pub reachable: Option<Vec<Rank>>,
}

/// The status that an engine publishes to the control mesh, and the flags that the mesh raises.
#[derive(Debug)]
pub struct ProgressMonitor {
    flags: AtomicU32,
    begun: AtomicU64,
    finished: AtomicU64,
    messages_in_flight: AtomicBool,
    /// 1 + the index of the collective in [`Collective::ALL`], by operation number.
    kind_of: [AtomicU8; KINDS],
    waits: Mutex<Option<Vec<Wait>>>,
    /// Maximum duration of a link test before the report, in milliseconds; 0 for no test.
    link_test_ms: AtomicU32,
    reachable: Mutex<Option<Vec<Rank>>>,
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

    /// Whether [`failed`](Self::failed) or [`report_requested`](Self::report_requested) is set. One
    /// relaxed load, for busy-poll loops.
    #[inline]
    #[must_use]
    pub fn needs_attention(&self) -> bool {
        self.flags.load(Ordering::Relaxed) != 0
    }

    /// Whether the group has failed: a member died, or the group was aborted. Final.
    #[inline]
    #[must_use]
    pub fn failed(&self) -> bool {
        self.flags.load(Ordering::Relaxed) & GROUP_FAILED != 0
    }

    /// Whether a report of the engine's waits is requested: call [`report`](Self::report).
    #[inline]
    #[must_use]
    pub fn report_requested(&self) -> bool {
        self.flags.load(Ordering::Relaxed) & REPORT_REQUESTED != 0
    }

    /// Reports the engine's first wait of each connection. An empty list is a busy engine.
    pub fn report(&self, waits: Vec<Wait>) {
        *self.waits.lock().unwrap_or_else(PoisonError::into_inner) = Some(waits);
        self.flags.fetch_and(!REPORT_REQUESTED, Ordering::Relaxed);
        if let Some(wakeup) = &self.wakeup {
            // Fails only if the counter is full, and then the mesh I/O thread is awake.
            let _ = wakeup.write(1);
        }
    }

    /// An operation begins. Operations are numbered from 1 without gaps, alike on all ranks.
    pub fn begin(&self, operation: u64, kind: Collective) {
        let place = Collective::ALL
            .iter()
            .position(|one| *one == kind)
            .map_or(0, |place| place as u8 + 1);
        self.kind_of[operation as usize % KINDS].store(place, Ordering::Relaxed);
        self.begun.store(operation, Ordering::Release);
    }

    /// An operation and all before it are finished.
    pub fn finish(&self, operation: u64) {
        self.finished.store(operation, Ordering::Release);
    }

    /// Whether point-to-point messages are in flight: then the engine has waits to report.
    pub fn set_messages_in_flight(&self, in_flight: bool) {
        self.messages_in_flight.store(in_flight, Ordering::Relaxed);
    }

    pub(crate) fn messages_in_flight(&self) -> bool {
        self.messages_in_flight.load(Ordering::Relaxed)
    }

    pub(crate) fn fail(&self) {
        self.flags.fetch_or(GROUP_FAILED, Ordering::Relaxed);
    }

    /// Requests a report from the engine and discards the previous one.
    pub fn request_report(&self) {
        *self.waits.lock().unwrap_or_else(PoisonError::into_inner) = None;
        self.flags.fetch_or(REPORT_REQUESTED, Ordering::Relaxed);
    }

    /// Has the engine test its links before it reports, for at most `timeout`.
    pub(crate) fn request_link_test(&self, timeout: Duration) {
        let ms = u32::try_from(timeout.as_millis()).unwrap_or(u32::MAX);
        self.link_test_ms.store(ms, Ordering::Relaxed);
    }

    pub(crate) fn requested_link_test(&self) -> Option<Duration> {
        let ms = self.link_test_ms.load(Ordering::Relaxed);
        (ms > 0).then(|| Duration::from_millis(ms.into()))
    }

    pub(crate) fn report_reachable(&self, peers: Vec<Rank>) {
        *self.reachable.lock().unwrap_or_else(PoisonError::into_inner) = Some(peers);
    }

    /// The engine's current status.
    #[must_use]
    pub fn snapshot(&self) -> Report {
        let finished = self.finished.load(Ordering::Acquire);
        let begun = self.begun.load(Ordering::Acquire).max(finished);
        let kind = |operation: u64| {
            let place = self.kind_of[operation as usize % KINDS].load(Ordering::Relaxed);
            Collective::ALL.get(usize::from(place).checked_sub(1)?).copied()
        };
        // Older entries have been overwritten.
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
    fn a_report_lists_pending_operations() {
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
    fn a_report_request_is_answered_once_and_failure_is_final() {
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
