//! The progress thread: drives the device for those who wait in memory, or sleep.
//!
//! A peer's WRITE or READ needs no call of ours: the application polls its memory, and somebody has to drive. So does an application that sleeps on a
//! completion channel. The thread has three gaits:
//! - **spin**: it drives, and yields the processor when nothing came, for some time after the last traffic. Where others want the processor this is
//!   no way to be quick: who yields forfeits the rest of its time slice, and comes back milliseconds later, or tenths of a second where many want it, while who sleeps is let in at once
//!   when its datagram comes. So a yield that took long makes the thread park for many times as long instead: a peer whose packet comes during one must not have to wait for the next as well;
//! - **park**: it then sleeps in poll(2) until a datagram comes or the next deadline is there: a device at rest uses no processor;
//! - **aside**: while threads of the application drive in a loop, it only looks now and then whether they still do, touches no lock, and is not woken by
//!   the socket.

use std::mem;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::thread;
use std::time::{Duration, Instant as Clock};

use doorbell_roce_proto::Instant;
use nix::sys::prctl;

use crate::drive::Shared;
use crate::host::Host;
use crate::link::{Interest, Parker, PortWatch};

/// How long the application's threads must have been found driving at every look for this thread to step aside.
const STEP_ASIDE: Duration = Duration::from_micros(100);

/// The longest that it stands aside before it looks again, and what part of the time for which they have been driving it does. In proportion, because two
/// devices may wait for one another: were each to stand aside for as long as the other made its application poll, that would never end.
const ASIDE: Duration = Duration::from_micros(250);
const ASIDE_SHARE: u32 = 8;

/// They no longer drive in a loop when they took longer for each turn: one with nothing to do takes half a microsecond.
const LOOP_TURN: Duration = Duration::from_micros(5);

/// A yield that takes longer gave the processor to somebody who wanted it for a whole time slice.
const CROWDED: Duration = Duration::from_millis(1);

/// How many times as long the thread then parks where it would spin, and how long at most.
const GIVE_WAY: u32 = 50;
const GIVE_WAY_MOST: Duration = Duration::from_secs(10);

/// How often the port is looked at by a thread that does not sleep. One that does is woken.
const LOOK: Duration = Duration::from_millis(10);

/// How often other processes on this address are listened to by a thread that does not sleep: a look at nothing takes a third of a microsecond.
const LISTEN: Duration = Duration::from_micros(100);

/// The thread's body: runs until the device is dropped.
pub(crate) fn run(shared: &Arc<Shared>, host: &Host, parker: Parker, watch: Option<PortWatch>, spin: Duration) {
    let turns = AssertUnwindSafe(|| Progress::new(shared, host, parker, watch, spin).run());
    // A panic here is a bug of ours. Peers would wait for this device without a word; the application at least is told.
    if catch_unwind(turns).is_err() {
        tracing::error!("the soft device's progress thread failed");
        shared.tell_fatal();
    }
}

struct Progress<'a> {
    shared: &'a Shared,
    host: &'a Host,
    parker: Parker,
    watch: Option<PortWatch>,
    /// When to look whether the port has changed.
    look_at: Instant,
    /// When to listen to the other processes on this address.
    listen_at: Instant,
    spin: Duration,
    /// Until when it parks where it would spin.
    crowded_until: Instant,
    /// The last time that driving here did something.
    last_traffic: Instant,
    /// How often they had driven when last looked at.
    drives: u64,
    /// Since when every look has found them driving.
    driven_since: Instant,
}

impl<'a> Progress<'a> {
    fn new(shared: &'a Shared, host: &'a Host, parker: Parker, watch: Option<PortWatch>, spin: Duration) -> Self {
        let now = shared.now();
        Self {
            shared,
            host,
            parker,
            watch,
            look_at: now,
            listen_at: now,
            spin,
            crowded_until: now,
            last_traffic: now,
            drives: 0,
            driven_since: now,
        }
    }

    fn run(&mut self) {
        // Its sleeps are a few microseconds long; by default the kernel may add 50. Without it they are longer.
        let _ = prctl::set_timerslack(1000);
        while !self.shared.stop.load(Ordering::Acquire) {
            self.turn();
        }
    }

    fn turn(&mut self) {
        let now = self.shared.now();
        self.look_at_port(now);
        self.listen_to_members(now);
        let crowded = now < self.crowded_until;
        if self.application_drives(now) {
            if now - self.driven_since > STEP_ASIDE {
                self.stand_aside();
            } else if crowded {
                self.park();
            } else {
                self.give_way(now);
            }
        } else if self.shared.drive_for_progress() {
            self.last_traffic = now;
        } else if now - self.last_traffic < self.spin && !crowded {
            self.give_way(now);
        } else {
            self.park();
        }
    }

    /// Tells of what has changed at the port. While this thread is awake it looks only now and then.
    fn look_at_port(&mut self, now: Instant) {
        if now < self.look_at {
            return;
        }
        self.look_at = now + LOOK;
        if let Some(state) = self.watch.as_mut().and_then(PortWatch::changed) {
            self.shared.set_port(state);
        }
    }

    /// Serves what other processes on this address say. While this thread is awake it listens only now and then.
    fn listen_to_members(&mut self, now: Instant) {
        if now < self.listen_at {
            return;
        }
        self.listen_at = now + LISTEN;
        while let Some(arrival) = self.host.poll() {
            self.shared.handle_arrival(arrival);
        }
        if self.host.take_over_at().is_some_and(|at| at <= Clock::now())
            && let Some(port) = self.host.take_over()
        {
            tracing::debug!(address = %self.host.address(), "took the port over");
            if let Err(error) = self.parker.take_over(port) {
                tracing::warn!("the port of the soft device cannot be received from: {error}");
            }
        }
    }

    /// Whether threads of the application drove since the last look, or do so now. One that does so in a loop is found at every look; one that polls only
    /// now and then, and its memory in between, needs this thread.
    fn application_drives(&mut self, now: Instant) -> bool {
        let drives = self.shared.application.drives();
        let before = mem::replace(&mut self.drives, drives);
        let driven = drives != before || self.shared.application.is_inside();
        if !driven {
            self.driven_since = now;
        }
        driven
    }

    /// Lets others have the processor, and finds out whether any want it.
    fn give_way(&mut self, before: Instant) {
        thread::yield_now();
        let after = self.shared.now();
        let took = after - before;
        if took > CROWDED {
            self.crowded_until = after + (took * GIVE_WAY).min(GIVE_WAY_MOST);
        }
    }

    /// Leaves the device to the application for as long as it goes on driving in a loop.
    fn stand_aside(&mut self) {
        while !self.shared.stop.load(Ordering::Acquire) {
            let before = self.drives;
            let slice = ((self.shared.now() - self.driven_since) / ASIDE_SHARE).min(ASIDE);
            thread::park_timeout(slice);
            let inside = self.shared.application.is_inside();
            self.drives = self.shared.application.drives();
            let wanted = (slice.as_nanos() / LOOP_TURN.as_nanos()) as u64;
            let now = self.shared.now();
            self.look_at_port(now);
            self.listen_to_members(now);
            if !inside && self.drives.wrapping_sub(before) < wanted {
                break;
            }
        }
        self.driven_since = self.shared.now();
    }

    /// Sleeps until there is something to do.
    fn park(&mut self) {
        let shared = self.shared;
        let due = shared.doze.begin(|| {
            // What was changed before that under core has also published its deadline once core can be had.
            drop(shared.core.lock());
            shared.due()
        });
        let interest = if shared.tx_blocked.load(Ordering::SeqCst) {
            Interest::ReceiveOrSend
        } else {
            Interest::Receive
        };
        let timeout = due.map(|due| due - shared.now());
        let take_over = self.host.take_over_at();
        let until = take_over.map(|at| at.saturating_duration_since(Clock::now()));
        if timeout == Some(Duration::ZERO) {
            // Due, but another thread is receiving, and the timers come after: it may be waiting for this processor.
            thread::yield_now();
        } else if !shared.holds() && shared.sleep_on_lanes() {
            match self.parker.park(interest, timeout.into_iter().chain(until).min()) {
                Ok(woken) => {
                    if woken.port {
                        self.look_at = Instant::ZERO;
                    }
                    if woken.members || until.is_some() {
                        self.listen_at = Instant::ZERO;
                    }
                }
                Err(error) => {
                    tracing::warn!("the soft device's progress thread cannot sleep: {error}");
                    thread::sleep(Duration::from_millis(1));
                }
            }
        }
        shared.wake_on_lanes();
        shared.look_at_all();
        shared.doze.end();
    }
}
