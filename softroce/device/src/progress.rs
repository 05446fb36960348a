//! The progress thread: drives the device for those who wait in memory, or sleep.
//!
//! A peer's WRITE or READ needs no call of ours: the application polls its memory, and somebody has to drive. So does an application that sleeps on a
//! completion channel. The thread has three gaits:
//! - **spin**: it drives, and yields the processor when nothing came, for some time after the last traffic;
//! - **park**: it then sleeps in poll(2) until a datagram comes or the next deadline is there: a device at rest uses no processor;
//! - **aside**: while threads of the application drive in a loop, it only looks now and then whether they still do, touches no lock, and is not woken by
//!   the socket.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::thread;
use std::time::Duration;

use doorbell_roce_proto::Instant;

use crate::drive::Shared;
use crate::link::{Interest, Parker};

/// How long the application's threads must have left the device alone before this one drives: somewhat longer than one turn of a polling loop.
const COURTESY: Duration = Duration::from_micros(2);

/// How long they must have driven without a longer pause for this thread to step aside.
const STEP_ASIDE: Duration = Duration::from_micros(100);

/// How long it stands aside before it looks again: the longest that a peer's request waits when the application stops polling.
const ASIDE: Duration = Duration::from_micros(250);

/// The thread's body: runs until the device is dropped.
pub(crate) fn run(shared: &Arc<Shared>, parker: Parker, spin: Duration) {
    let turns = AssertUnwindSafe(|| Progress::new(shared, parker, spin).run());
    // A panic here is a bug of ours. Peers would wait for this device without a word; the application at least is told.
    if catch_unwind(turns).is_err() {
        tracing::error!("the soft device's progress thread failed");
        shared.tell_fatal();
    }
}

struct Progress<'a> {
    shared: &'a Shared,
    parker: Parker,
    spin: Duration,
    /// The last time that driving here did something.
    last_traffic: Instant,
    /// `application_drives` when last looked at.
    drives: u64,
    /// When it was last seen to change.
    last_drive: Option<Instant>,
    /// Since when it has changed with pauses no longer than [`COURTESY`].
    driven_since: Instant,
}

impl<'a> Progress<'a> {
    fn new(shared: &'a Shared, parker: Parker, spin: Duration) -> Self {
        let now = shared.now();
        Self {
            shared,
            parker,
            spin,
            last_traffic: now,
            drives: 0,
            last_drive: None,
            driven_since: now,
        }
    }

    fn run(&mut self) {
        while !self.shared.stop.load(Ordering::Acquire) {
            self.turn();
        }
    }

    fn turn(&mut self) {
        let now = self.shared.now();
        if self.application_drives(now) {
            if now - self.driven_since > STEP_ASIDE {
                self.stand_aside();
            } else {
                thread::yield_now();
            }
        } else if self.shared.drive() {
            self.last_traffic = now;
        } else if now - self.last_traffic < self.spin {
            thread::yield_now();
        } else {
            self.park();
        }
    }

    /// Whether threads of the application are driving in a loop.
    fn application_drives(&mut self, now: Instant) -> bool {
        let drives = self.shared.application_drives.load(Ordering::Relaxed);
        if drives != self.drives || self.shared.application_inside.load(Ordering::Relaxed) > 0 {
            self.drives = drives;
            if self.last_drive.is_none_or(|last| now - last > COURTESY) {
                self.driven_since = now;
            }
            self.last_drive = Some(now);
            return true;
        }
        self.last_drive.is_some_and(|last| now - last <= COURTESY)
    }

    /// Leaves the device to the application for a while, and after it too if the application drove meanwhile.
    fn stand_aside(&mut self) {
        thread::park_timeout(ASIDE);
        let drives = self.shared.application_drives.load(Ordering::Relaxed);
        self.last_drive = (drives != self.drives).then(|| self.shared.now());
        self.drives = drives;
    }

    /// Sleeps until there is something to do.
    fn park(&mut self) {
        let shared = self.shared;
        // First say that this thread sleeps, for ever, then ask for the deadline: whoever sets an earlier one from here on wakes it.
        shared.parked_until.store(u64::MAX, Ordering::SeqCst);
        // What was changed before that under core has also published its deadline once core can be had.
        drop(shared.core.lock());
        let due = shared.due();
        if let Some(due) = due {
            shared.parked_until.store(due.0, Ordering::SeqCst);
        }
        let interest = if shared.tx_blocked.load(Ordering::SeqCst) {
            Interest::ReceiveOrSend
        } else {
            Interest::Receive
        };
        let timeout = due.map(|due| due - shared.now());
        if timeout != Some(Duration::ZERO)
            && let Err(error) = self.parker.park(interest, timeout)
        {
            tracing::warn!("the soft device's progress thread cannot sleep: {error}");
            thread::sleep(Duration::from_millis(1));
        }
        shared.parked_until.store(0, Ordering::SeqCst);
    }
}
