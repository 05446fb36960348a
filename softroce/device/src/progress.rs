//! The progress thread: drives the device for applications that poll memory, or sleep.
//!
//! A peer's WRITE or READ needs no call of ours, and an application that polls its memory or sleeps
//! on a completion channel does not drive. The thread has three states:
//! - **busy-poll**: it drives and yields the CPU when idle, until [`DeviceConfig::spin`] after the
//!   last traffic. On an oversubscribed machine a yielding thread forfeits its time slice and runs
//!   again milliseconds later, while a sleeping one is scheduled as soon as its datagram arrives.
//!   So a slow yield makes the thread park for [`BACKOFF_FACTOR`] times as long: a peer's packet
//!   must not wait for the next yield as well;
//! - **park**: it sleeps in poll(2) until a datagram or the next deadline: an idle device uses no
//!   CPU;
//! - **yield to app polling**: while application threads poll in a loop, it only samples whether
//!   they still do, takes no lock, and is not woken by the socket.
//!
//! [`DeviceConfig::spin`]: crate::DeviceConfig::spin

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

/// How long every sample must have found application threads polling before this thread yields.
const STEP_ASIDE: Duration = Duration::from_micros(100);

/// The longest time that it yields before the next sample, as a fraction of the time for which they
/// have polled. In proportion, because two devices may wait for each other: if each yielded for as
/// long as the other kept its application polling, that would never end.
const ASIDE: Duration = Duration::from_micros(250);
const ASIDE_SHARE: u32 = 8;

/// Application threads no longer poll in a loop when an iteration takes longer; an idle one takes
/// half a microsecond.
const LOOP_TURN: Duration = Duration::from_micros(5);

/// A yield that takes longer gave the CPU to another thread for a whole time slice.
const CROWDED: Duration = Duration::from_millis(1);

/// How many times as long the thread then parks instead of busy-polling, and the maximum.
const GIVE_WAY: u32 = 50;
const GIVE_WAY_MOST: Duration = Duration::from_secs(10);

/// How often a thread that does not sleep polls the port. A sleeping one is woken.
const LOOK: Duration = Duration::from_millis(10);

/// How often a thread that does not sleep polls the other processes on this address: an empty poll
/// takes a third of a microsecond.
const LISTEN: Duration = Duration::from_micros(100);

/// The thread's body: runs until the device is dropped.
pub(crate) fn run(shared: &Arc<Shared>, host: &Host, parker: Parker, watch: Option<PortWatch>, spin: Duration) {
    let turns = AssertUnwindSafe(|| Progress::new(shared, host, parker, watch, spin).run());
    // A panic here is a bug. Peers would wait without an error; the application at least is
    // notified.
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
    look_at: Instant,
    listen_at: Instant,
    spin: Duration,
    /// Until when it parks instead of busy-polling.
    crowded_until: Instant,
    /// The last drive here that did something.
    last_traffic: Instant,
    /// Drives by application threads at the last sample.
    drives: u64,
    /// Since when every sample has found them polling.
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
        // Its sleeps are microseconds long; by default the kernel may add 50. Failure only makes
        // them longer.
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

    /// Reports port changes.
    fn look_at_port(&mut self, now: Instant) {
        if now < self.look_at {
            return;
        }
        self.look_at = now + LOOK;
        if let Some(state) = self.watch.as_mut().and_then(PortWatch::changed) {
            self.shared.set_port(state);
        }
    }

    /// Handles messages of other processes on this address, and takes the UDP port over if its
    /// holder is gone.
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

    /// Whether application threads drove since the last sample, or do so now. One that polls the CQ
    /// only now and then, and its memory in between, needs this thread.
    fn application_drives(&mut self, now: Instant) -> bool {
        let drives = self.shared.application.drives();
        let before = mem::replace(&mut self.drives, drives);
        let driven = drives != before || self.shared.application.is_inside();
        if !driven {
            self.driven_since = now;
        }
        driven
    }

    /// Yields the CPU, and backs off if the machine is oversubscribed.
    fn give_way(&mut self, before: Instant) {
        thread::yield_now();
        let after = self.shared.now();
        let took = after - before;
        if took > CROWDED {
            self.crowded_until = after + (took * GIVE_WAY).min(GIVE_WAY_MOST);
        }
    }

    /// Leaves the device to the application threads for as long as they poll in a loop.
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
            // A change made under core before this has published its deadline once core is free.
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
            // Due, but another thread is receiving, and timers come after: it may be waiting for
            // this CPU.
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
