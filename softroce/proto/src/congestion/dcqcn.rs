//! DCQCN's reaction point (Zhu et al., Congestion Control for Large-Scale RDMA Deployments, SIGCOMM
//! 2015, section 3): a CNP cuts the rate, a timer and a byte counter restore it.
//!
//! All is in integers and computed from the time of the event: after an idle hour the state is what
//! the timers would have made of it, at the cost of one.

use core::time::Duration;

use crate::Instant;
use crate::congestion::{CongestionConfig, Controller};

/// Parameters of [`Dcqcn`], by default those that the paper recommends (section 5, table 14), for
/// 40 Gb/s.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct DcqcnConfig {
    /// The gain of alpha as a power of two: `g` = 2^-`gain_shift`, 1 to 16 (clamped).
    pub gain_shift: u32,
    /// `K`: alpha decreases by `g` after this time without a CNP. Longer than the interval of CNPs.
    pub alpha_timer: Duration,
    /// `T`: the rate increases after this time without a CNP.
    pub rate_timer: Duration,
    /// `B`: the rate increases after this many bytes.
    pub byte_counter: u64,
    /// `F`: increases of either kind that are fast recovery, at most 31 (clamped).
    pub fast_recovery: u32,
    /// `R_AI`: what an additive increase adds to the target rate, in bytes/s.
    pub additive_increase: u64,
    /// What a hyper increase adds to the target rate, in bytes/s: 10 times the additive one, as on
    /// adapters; the paper gives no value.
    pub hyper_increase: u64,
}

impl Default for DcqcnConfig {
    fn default() -> Self {
        Self {
            gain_shift: 8,
            alpha_timer: Duration::from_micros(55),
            rate_timer: Duration::from_micros(55),
            byte_counter: 10_000_000,
            fast_recovery: 5,
            additive_increase: 5_000_000,
            hyper_increase: 50_000_000,
        }
    }
}

/// Alpha of 1.
const ONE: u64 = 1 << 32;

/// Increases that are computed one by one; what a timer has missed beyond is one step.
const MAX_STEPS: u64 = 64;

/// The rate limiter is released at the line rate less this fraction, a power of two.
const RELEASE_SHIFT: u32 = 10;

/// The rate controller of a queue pair.
///
/// It begins at the line rate, without a limit. The first CNP sets alpha to 1, and so halves the
/// rate; back at the line rate the limit is released, and the next CNP is a first one again.
#[derive(Clone, Debug)]
pub struct Dcqcn {
    config: DcqcnConfig,
    line_rate: u64,
    min_rate: u64,
    limited: bool,
    current: u64,
    target: u64,
    /// In units of 2^-32.
    alpha: u64,
    alpha_deadline: Instant,
    rate_deadline: Instant,
    /// Since the last increase by the byte counter.
    bytes: u64,
    /// Increases by each since the last CNP.
    by_timer: u32,
    by_bytes: u32,
}

#[derive(Clone, Copy)]
enum Counter {
    Timer,
    Bytes,
}

impl Dcqcn {
    /// A controller at the line rate.
    pub fn new(limits: &CongestionConfig, config: DcqcnConfig) -> Self {
        const SHORTEST: Duration = Duration::from_micros(1);
        let line_rate = limits.line_rate.max(1);
        Self {
            config: DcqcnConfig {
                gain_shift: config.gain_shift.clamp(1, 16),
                alpha_timer: config.alpha_timer.max(SHORTEST),
                rate_timer: config.rate_timer.max(SHORTEST),
                byte_counter: config.byte_counter.max(1),
                fast_recovery: config.fast_recovery.min(31),
                ..config
            },
            line_rate,
            min_rate: limits.min_rate.clamp(1, line_rate),
            limited: false,
            current: line_rate,
            target: line_rate,
            alpha: ONE,
            alpha_deadline: Instant::ZERO,
            rate_deadline: Instant::ZERO,
            bytes: 0,
            by_timer: 0,
            by_bytes: 0,
        }
    }

    /// Alpha, the estimate of how much of the traffic is marked, in units of 2^-32.
    pub const fn alpha(&self) -> u64 {
        self.alpha
    }

    /// `times` increases by one counter.
    fn increase(&mut self, counter: Counter, times: u64) {
        let steps = times.min(MAX_STEPS);
        for _ in 0..steps {
            let count = match counter {
                Counter::Timer => &mut self.by_timer,
                Counter::Bytes => &mut self.by_bytes,
            };
            *count = count.saturating_add(1);
            self.target = self.target.saturating_add(self.rise()).min(self.line_rate);
            self.current = self.current.midpoint(self.target).max(self.current);
        }
        // By now the current rate follows the target at the distance of one rise.
        let rest = times - steps;
        if rest > 0 {
            let rise = self.rise();
            self.target = self
                .target
                .saturating_add(rise.saturating_mul(rest))
                .min(self.line_rate);
            self.current = self.target.saturating_sub(rise).max(self.current);
        }
        if self.line_rate - self.current <= self.line_rate >> RELEASE_SHIFT {
            self.limited = false;
        }
    }

    /// What the increase just counted adds to the target rate (figure 7 of the paper).
    fn rise(&self) -> u64 {
        let fast_recovery = self.config.fast_recovery;
        if self.by_timer.max(self.by_bytes) <= fast_recovery {
            0
        } else if self.by_timer.min(self.by_bytes) > fast_recovery {
            self.config.hyper_increase
        } else {
            self.config.additive_increase
        }
    }
}

impl Controller for Dcqcn {
    fn on_cnp(&mut self, now: Instant) {
        self.on_timer(now);
        if !self.limited {
            self.limited = true;
            self.current = self.line_rate;
            self.alpha = ONE;
        }
        self.target = self.current;
        let cut = ((u128::from(self.current) * u128::from(self.alpha)) >> 33) as u64;
        self.current = (self.current - cut).max(self.min_rate);
        let shift = self.config.gain_shift;
        self.alpha = (self.alpha - (self.alpha >> shift) + (ONE >> shift)).min(ONE);
        self.alpha_deadline = now + self.config.alpha_timer;
        self.rate_deadline = now + self.config.rate_timer;
        (self.bytes, self.by_timer, self.by_bytes) = (0, 0, 0);
    }

    fn on_ack(&mut self, _: Instant, _: Option<Duration>, _: u64) {}

    /// Nothing: of a loss, DCQCN knows only what CNPs report.
    fn on_loss(&mut self, _: Instant) {}

    fn on_sent(&mut self, _: Instant, bytes: u64) {
        if !self.limited {
            return;
        }
        self.bytes = self.bytes.saturating_add(bytes);
        let times = self.bytes / self.config.byte_counter;
        if times > 0 {
            self.bytes %= self.config.byte_counter;
            self.increase(Counter::Bytes, times);
        }
    }

    fn rate(&self) -> Option<u64> {
        self.limited.then_some(self.current)
    }

    /// Of the rate; alpha has no effect before the next CNP.
    fn next_timer(&self) -> Option<Instant> {
        self.limited.then_some(self.rate_deadline)
    }

    fn on_timer(&mut self, now: Instant) {
        if !self.limited {
            return;
        }
        let times = expire(&mut self.alpha_deadline, self.config.alpha_timer, now);
        self.alpha = decay(self.alpha, self.config.gain_shift, times);
        let times = expire(&mut self.rate_deadline, self.config.rate_timer, now);
        self.increase(Counter::Timer, times);
    }
}

/// How often a periodic timer has expired by `now`; moves its deadline past it.
fn expire(deadline: &mut Instant, period: Duration, now: Instant) -> u64 {
    if now < *deadline {
        return 0;
    }
    let period = u64::try_from(period.as_nanos()).unwrap_or(u64::MAX);
    let times = now.since(*deadline).as_nanos() as u64 / period + 1;
    *deadline = Instant(deadline.0.saturating_add(times.saturating_mul(period)));
    times
}

/// `alpha * (1 - 2^-shift)^times`, by squaring.
fn decay(alpha: u64, shift: u32, mut times: u64) -> u64 {
    let product = |a: u64, b: u64| ((u128::from(a) * u128::from(b)) >> 32) as u64;
    let (mut alpha, mut factor) = (alpha, ONE - (ONE >> shift));
    while times > 0 && alpha > 0 {
        if times & 1 == 1 {
            alpha = product(alpha, factor);
        }
        factor = product(factor, factor);
        times >>= 1;
    }
    alpha
}
