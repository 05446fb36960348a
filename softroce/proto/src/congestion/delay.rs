//! A window by delay, for a device in software: the window shrinks when the round-trip time exceeds
//! a target, as in Swift (Kumar et al., SIGCOMM 2020), and needs no marks of switches and no timer.
//!
//! The round-trip times of a device in software include the time until a thread of the peer runs.
//! They are lengthened by it and never shortened, so the controller decides by the least of a
//! round, and never holds a path itself longer than the target to be congested.

use core::time::Duration;

use crate::Instant;
use crate::congestion::{CongestionConfig, Controller};

/// Parameters of [`Delay`].
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct DelayConfig {
    /// The round-trip time up to which the window grows, 1 µs to 1 s (clamped). On a path whose
    /// shortest round trip is longer than half of it, that one plus half of this.
    pub target: Duration,
    /// The window of a new connection in bytes. It doubles with each round until the first that is
    /// above the target.
    pub initial_window: u64,
    /// What a round adds to the window, in bytes. Higher converges faster, to a longer queue.
    pub increase: u64,
    /// Consecutive rounds below the target after which a round adds an eighth of the window, if
    /// that is more.
    pub patience: u32,
    /// How strongly a delay beyond the target decreases the window, in 1/256: 205 is 0.8.
    pub gain: u32,
    /// The most by which a round decreases the window, in 1/256.
    pub max_decrease: u32,
}

impl Default for DelayConfig {
    fn default() -> Self {
        Self {
            target: Duration::from_micros(100),
            initial_window: 64 << 10,
            increase: 4096,
            patience: 5,
            gain: 205,
            max_decrease: 128,
        }
    }
}

/// A window of less than this is a rate: no packet is smaller by much.
const PACKET: u64 = 4096;

/// The window controller of a queue pair.
///
/// A round is the time in which one window is acknowledged. The maximum of the window is what the
/// line rate sends in the target time.
#[derive(Clone, Debug)]
pub struct Delay {
    config: DelayConfig,
    line_rate: u64,
    min_rate: u64,
    window: u64,
    /// The shortest round trip so far.
    base: Option<Duration>,
    /// The shortest round trip of this round.
    least: Option<Duration>,
    /// That of the round before.
    last: Duration,
    /// Acknowledged in this round.
    acked: u64,
    /// Rounds below the target.
    calm: u32,
    /// No round was above the target yet.
    starting: bool,
    cut: Cut,
}

/// The decrease of this round: the window decreases once for one queue.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Cut {
    None,
    /// At its begin, for the delay of the round before.
    Begin,
    /// In it, for a CNP or a loss.
    Event,
}

impl Delay {
    /// A controller with its initial window.
    pub fn new(limits: &CongestionConfig, config: DelayConfig) -> Self {
        let line_rate = limits.line_rate.max(1);
        let mut delay = Self {
            config: DelayConfig {
                target: config.target.clamp(Duration::from_micros(1), Duration::from_secs(1)),
                increase: config.increase.max(1),
                gain: config.gain.min(256),
                max_decrease: config.max_decrease.min(255),
                ..config
            },
            line_rate,
            min_rate: limits.min_rate.clamp(1, line_rate),
            window: 0,
            base: None,
            least: None,
            last: Duration::ZERO,
            acked: 0,
            calm: 0,
            starting: true,
            cut: Cut::None,
        };
        let least = delay.min_window();
        delay.window = delay.config.initial_window.clamp(least, delay.max_window());
        delay
    }

    fn target(&self) -> Duration {
        let half = self.config.target / 2;
        self.base
            .map_or(self.config.target, |base| base.saturating_add(half))
            .max(self.config.target)
    }

    fn max_window(&self) -> u64 {
        bytes_in(self.line_rate, self.target()).max(PACKET)
    }

    fn min_window(&self) -> u64 {
        bytes_in(self.min_rate, self.target()).clamp(1, self.max_window())
    }

    fn end_round(&mut self) {
        let filled = self.acked >= self.window / 2;
        let cut = core::mem::replace(&mut self.cut, Cut::None);
        self.acked = 0;
        let Some(rtt) = self.least.take() else { return };
        self.last = rtt;
        let target = self.target();
        if rtt > target {
            if cut != Cut::Event {
                let excess = (rtt - target).as_nanos() * u128::from(self.config.gain) / rtt.as_nanos();
                self.decrease(excess as u64);
                self.cut = Cut::Begin;
            }
        } else {
            self.calm = self.calm.saturating_add(1);
            if filled {
                self.grow();
            }
        }
    }

    fn grow(&mut self) {
        let fast = if self.starting {
            self.window
        } else if self.calm > self.config.patience {
            self.window / 8
        } else {
            0
        };
        self.window = self
            .window
            .saturating_add(self.config.increase.max(fast))
            .min(self.max_window());
    }

    /// By `parts` of 256.
    fn decrease(&mut self, parts: u64) {
        (self.calm, self.starting) = (0, false);
        let parts = parts.min(u64::from(self.config.max_decrease));
        let cut = (u128::from(self.window) * u128::from(parts) / 256) as u64;
        self.window = (self.window - cut).max(self.min_window());
    }

    fn decrease_for_event(&mut self, parts: u64) {
        if self.cut == Cut::None {
            self.cut = Cut::Event;
            self.decrease(parts);
        }
    }
}

impl Controller for Delay {
    /// As a delay far beyond the target.
    fn on_cnp(&mut self, _: Instant) {
        self.decrease_for_event(u64::from(self.config.gain / 2));
    }

    fn on_ack(&mut self, _: Instant, rtt: Option<Duration>, bytes: u64) {
        self.acked = self.acked.saturating_add(bytes);
        if let Some(rtt) = rtt {
            self.base = Some(self.base.map_or(rtt, |base| base.min(rtt)));
            self.least = Some(self.least.map_or(rtt, |least| least.min(rtt)));
        }
        if self.acked >= self.window && self.least.is_some() {
            self.end_round();
        }
    }

    /// A loss while the delay is below the target is not of congestion.
    fn on_loss(&mut self, _: Instant) {
        let rtt = self.least.unwrap_or(self.last);
        if rtt > self.target() {
            self.decrease_for_event(u64::from(self.config.max_decrease));
        }
    }

    fn on_sent(&mut self, _: Instant, _: u64) {}

    /// A window below one packet is a rate.
    fn rate(&self) -> Option<u64> {
        let rtt = self.last.max(self.target()).as_nanos();
        (self.window < PACKET).then(|| {
            let rate = u128::from(self.window) * 1_000_000_000 / rtt;
            (rate as u64).clamp(self.min_rate, self.line_rate)
        })
    }

    fn window(&self) -> Option<u64> {
        Some(self.window)
    }

    fn next_timer(&self) -> Option<Instant> {
        None
    }

    fn on_timer(&mut self, _: Instant) {}
}

/// What a rate sends in a time; saturates.
fn bytes_in(rate: u64, time: Duration) -> u64 {
    let bytes = u128::from(rate).saturating_mul(time.as_nanos()) / 1_000_000_000;
    u64::try_from(bytes).unwrap_or(u64::MAX)
}
