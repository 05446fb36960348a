//! The progress thread: drives the device for applications that poll memory, or sleep.
//!
//! A peer's WRITE needs no call of ours, and an application that polls its memory or sleeps on a
//! completion channel does not drive. The thread has three states (decision 018):
//! - **busy-poll**: it drives, yielding when idle, until [`DeviceConfig::spin`] after the last
//!   traffic. After a slow yield (an oversubscribed machine) it sleeps for [`BACKOFF_FACTOR`] times
//!   as long: a sleeping thread is scheduled as soon as its datagram arrives;
//! - **sleep**: it sleeps in ppoll(2) until a datagram, a wake-up or the next deadline;
//! - **yield to app polling**: while application threads poll in a loop, it only samples that they
//!   do.
//!
//! [`DeviceConfig::spin`]: crate::DeviceConfig::spin

use std::mem;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::thread;
use std::time::{Duration, Instant as Clock};

use doorbell_roce_proto::Instant;
use nix::sys::prctl;

use crate::counters::CounterFiles;
use crate::drive::Shared;
use crate::gpu::FreesDeferred;
use crate::host::Host;
use crate::links::udp::{LinkFiles, Port};
use crate::wakeup::{Reasons, Sleep};

/// How long every sample must have found application threads polling before this thread yields.
const APP_POLLING_MIN: Duration = Duration::from_micros(100);

/// The longest time before the next sample, as a fraction of the time for which they have polled:
/// of two devices that wait for each other, neither yields for as long as the other.
const APP_POLLING_SLICE: Duration = Duration::from_micros(250);
const APP_POLLING_SHARE: u32 = 8;

/// A longer iteration is no polling loop; an idle one takes half a microsecond.
const POLL_LOOP_PERIOD: Duration = Duration::from_micros(5);

/// A yield that takes longer gave the CPU to another thread for a whole time slice.
const OVERSUBSCRIBED_THRESHOLD: Duration = Duration::from_millis(1);

/// How many times as long the thread then sleeps instead of busy-polling, and the maximum.
const BACKOFF_FACTOR: u32 = 50;
const BACKOFF_MAX: Duration = Duration::from_secs(10);

/// How often a thread that does not sleep polls the port. A sleeping one is woken.
const PORT_POLL_INTERVAL: Duration = Duration::from_millis(10);

/// How often a thread that does not sleep polls the group: a third of a microsecond if empty.
const HOST_POLL_INTERVAL: Duration = Duration::from_micros(100);

pub(crate) fn run(
    shared: &Arc<Shared>,
    host: &Host,
    (files, port): (LinkFiles, Port),
    counters: Option<CounterFiles>,
    spin: Duration,
) {
    // Kernels wait for this thread.
    let _deferred = FreesDeferred::on_this_thread();
    let body = AssertUnwindSafe(|| {
        let mut progress = Progress::new(shared, host, files, port, spin);
        progress.counters = counters;
        progress.run();
    });
    // A panic here is a bug. Peers would wait without an error; the application is notified.
    if catch_unwind(body).is_err() {
        tracing::error!("the soft device's progress thread panicked");
        shared.report_fatal();
    }
}

struct Progress<'a> {
    shared: &'a Shared,
    host: &'a Host,
    files: LinkFiles,
    port: Port,
    counters: Option<CounterFiles>,
    port_poll_at: Instant,
    host_poll_at: Instant,
    spin: Duration,
    backoff_until: Instant,
    /// The last drive here that did something.
    last_traffic: Instant,
    /// Drives by application threads at the last sample.
    drives: u64,
    /// Since when every sample has found them polling.
    polling_since: Instant,
}

impl<'a> Progress<'a> {
    fn new(shared: &'a Shared, host: &'a Host, files: LinkFiles, port: Port, spin: Duration) -> Self {
        let now = shared.now();
        Self {
            shared,
            host,
            files,
            port,
            counters: None,
            port_poll_at: now,
            host_poll_at: now,
            spin,
            backoff_until: now,
            last_traffic: now,
            drives: 0,
            polling_since: now,
        }
    }

    fn run(&mut self) {
        // Its sleeps are microseconds long; by default the kernel may add 50. Failure only makes
        // them longer.
        let _ = prctl::set_timerslack(1000);
        while !self.shared.wakeup.has(Reasons::STOP) {
            self.step();
        }
        self.write_counters();
    }

    fn step(&mut self) {
        let now = self.shared.now();
        self.poll_port(now);
        self.poll_host(now);
        self.poll_counters(now);
        let backing_off = now < self.backoff_until;
        if self.app_is_polling(now) {
            if now - self.polling_since > APP_POLLING_MIN {
                self.yield_to_app_polling();
            } else if backing_off {
                self.sleep();
            } else {
                self.yield_cpu(now);
            }
        } else if self.shared.drive_for_progress() {
            self.last_traffic = now;
        } else if now - self.last_traffic < self.spin && !backing_off {
            self.yield_cpu(now);
        } else {
            self.sleep();
        }
    }

    fn poll_port(&mut self, now: Instant) {
        if now < self.port_poll_at {
            return;
        }
        self.port_poll_at = now + PORT_POLL_INTERVAL;
        if let Some(state) = self.port.changed() {
            self.shared.set_port(state);
        }
    }

    fn poll_counters(&mut self, now: Instant) {
        if self.counters.as_ref().is_some_and(|counters| counters.is_due(now)) {
            self.write_counters();
        }
    }

    fn write_counters(&mut self) {
        if let Some(counters) = &mut self.counters {
            let counted = *self.shared.core.lock().endpoint.counters();
            counters.write(&counted, self.shared.now());
        }
    }

    /// Also takes the UDP port over if its holder is gone.
    fn poll_host(&mut self, now: Instant) {
        if now < self.host_poll_at {
            return;
        }
        self.host_poll_at = now + HOST_POLL_INTERVAL;
        while let Some(event) = self.host.poll() {
            self.shared.handle_host_event(event);
        }
        if self.host.take_over_at().is_some_and(|at| at <= Clock::now())
            && let Some(port) = self.host.take_over()
        {
            tracing::debug!(address = %self.host.address(), "took the port over");
            if let Err(error) = self.files.take_over(port) {
                tracing::warn!("the soft device cannot receive from the port that it took over: {error}");
            }
        }
    }

    /// Whether they drove since the last sample. One that mostly polls memory needs this thread.
    fn app_is_polling(&mut self, now: Instant) -> bool {
        let drives = self.shared.app_polling.drives();
        let before = mem::replace(&mut self.drives, drives);
        let polling = drives != before || self.shared.app_polling.is_active();
        if !polling {
            self.polling_since = now;
        }
        polling
    }

    /// Yields the CPU, and backs off if the machine is oversubscribed.
    fn yield_cpu(&mut self, before: Instant) {
        thread::yield_now();
        let after = self.shared.now();
        let took = after - before;
        if took > OVERSUBSCRIBED_THRESHOLD {
            self.backoff_until = after + (took * BACKOFF_FACTOR).min(BACKOFF_MAX);
        }
    }

    fn yield_to_app_polling(&mut self) {
        while !self.shared.wakeup.has(Reasons::STOP) {
            let before = self.drives;
            let slice = ((self.shared.now() - self.polling_since) / APP_POLLING_SHARE).min(APP_POLLING_SLICE);
            self.shared.wakeup.pause(slice);
            let inside = self.shared.app_polling.is_active();
            self.drives = self.shared.app_polling.drives();
            let wanted = (slice.as_nanos() / POLL_LOOP_PERIOD.as_nanos()) as u64;
            let now = self.shared.now();
            self.poll_port(now);
            self.poll_host(now);
            self.poll_counters(now);
            if !inside && self.drives.wrapping_sub(before) < wanted {
                break;
            }
        }
        self.polling_since = self.shared.now();
    }

    fn sleep(&mut self) {
        let shared = self.shared;
        if let Some(sleep) = shared.wakeup.prepare_sleep() {
            let timeout = sleep.due().map(|due| due - shared.now());
            if timeout == Some(Duration::ZERO) {
                // Timers come after another thread's receiving, which may be waiting for this CPU.
                drop(sleep);
                thread::yield_now();
            } else {
                if shared.prepare_shm_sleep() {
                    self.commit(sleep, timeout);
                }
                shared.end_shm_sleep();
            }
        }
        shared.poll_all_next();
    }

    fn commit(&mut self, sleep: Sleep<'_>, timeout: Option<Duration>) {
        let take_over = self.host.take_over_at();
        let until = take_over.map(|at| at.saturating_duration_since(Clock::now()));
        let sources = self.files.sources(self.host.pollfd());
        let outage = self.port.next_change();
        let counters = self.counters.as_ref().and_then(CounterFiles::sleep_until);
        let counters = counters.map(|due| due - self.shared.now());
        let timeout = timeout.into_iter().chain(until).chain(outage).chain(counters).min();
        match sleep.commit(&sources, timeout) {
            Ok(woken) => {
                if let Some(counters) = &mut self.counters {
                    counters.wake(self.shared.now());
                }
                if woken.port || outage.is_some() {
                    self.port_poll_at = Instant::ZERO;
                }
                if woken.members || until.is_some() {
                    self.host_poll_at = Instant::ZERO;
                }
            }
            Err(error) => {
                tracing::warn!("the soft device's progress thread cannot sleep: {error}");
                self.shared.wakeup.pause(Duration::from_millis(1));
            }
        }
    }
}
