//! The clock of all measurements.
//!
//! A counter with a constant rate (the invariant TSC on x86-64, the system counter on aarch64)
//! costs a third of clock_gettime(2). Its rate is not reliably published, so it is calibrated
//! against CLOCK_MONOTONIC, and checked at the end of each size: the two may differ by
//! [`MAX_DRIFT`], twice the rate at which NTP slews. A counter that fails is not used again, and a
//! warning marks what it measured.
//!
//! Readings are not serialized, so they may be off by some tens of cycles. The crate `quanta` reads
//! the counter, without its own calibration, which cannot be checked.

#[cfg(target_arch = "x86_64")]
use raw_cpuid::CpuId;
use std::fs;
use std::time::{Duration, Instant};

use clap::ValueEnum;
use serde::{Deserialize, Serialize};

/// The largest accepted drift between the counter and CLOCK_MONOTONIC, as a fraction.
const MAX_DRIFT: f64 = 1e-3;
const CALIBRATION: Duration = Duration::from_millis(10);
/// Over less than this, the check measures the reading errors instead of the counter.
const MIN_CHECKED: Duration = Duration::from_millis(5);
/// Readings of both clocks, of which the quickest counts.
const READINGS: u32 = 32;
/// The counters that the kernel trusts; it removes the TSC when it has observed it to be wrong.
const TRUSTED: &str = "/sys/devices/system/clocksource/clocksource0/available_clocksource";

/// The clock of `--clock`.
#[derive(ValueEnum, Clone, Copy, PartialEq, Eq, Debug, Default)]
pub(crate) enum ClockChoice {
    /// The processor's counter where it can be trusted, else clock_gettime
    #[default]
    Auto,
    /// The processor's counter
    Tsc,
    /// clock_gettime
    System,
}

#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub(crate) enum ClockSource {
    Tsc,
    ClockGettime,
}

#[derive(Clone, Copy, PartialEq, Debug, Serialize, Deserialize)]
pub(crate) struct ClockReport {
    pub(crate) source: ClockSource,
    /// The smallest difference between two readings, ns.
    pub(crate) resolution_ns: f64,
    pub(crate) overhead_ns: f64,
}

#[derive(Debug)]
pub(crate) struct Clock {
    began: Instant,
    source: Source,
}

#[derive(Debug)]
enum Source {
    Counter(Counter),
    System,
    #[cfg(test)]
    Fake(std::rc::Rc<std::cell::Cell<u64>>),
}

#[derive(Debug)]
struct Counter {
    ticks: quanta::Clock,
    first: u64,
    /// ns per tick, times 2^32.
    scale: u64,
}

/// A simultaneous reading of both clocks.
#[derive(Clone, Copy, Debug)]
struct Reading {
    ticks: u64,
    at: Instant,
}

impl Reading {
    /// CLOCK_MONOTONIC between two readings of the counter; the quickest of several.
    fn read(ticks: &quanta::Clock) -> Reading {
        let mut best = (u64::MAX, None);
        for _ in 0..READINGS {
            let before = ticks.raw();
            let at = Instant::now();
            let between = ticks.raw().wrapping_sub(before);
            if between < best.0 {
                best = (
                    between,
                    Some(Reading {
                        ticks: before + between / 2,
                        at,
                    }),
                );
            }
        }
        best.1.unwrap_or_else(|| Reading {
            ticks: ticks.raw(),
            at: Instant::now(),
        })
    }
}

impl Counter {
    fn calibrate() -> Option<Counter> {
        let ticks = quanta::Clock::new();
        let from = Reading::read(&ticks);
        std::thread::sleep(CALIBRATION);
        let to = Reading::read(&ticks);
        let elapsed = (to.at - from.at).as_nanos() as f64;
        let counted = to.ticks.checked_sub(from.ticks).filter(|&counted| counted > 0)?;
        let scale = elapsed / counted as f64 * (1u64 << 32) as f64;
        (1.0..1e18).contains(&scale).then_some(Counter {
            ticks,
            first: from.ticks,
            scale: scale as u64,
        })
    }

    #[inline]
    fn ns(&self, ticks: u64) -> u64 {
        ((u128::from(ticks) * u128::from(self.scale)) >> 32) as u64
    }
}

/// Why the counter cannot be used; `None` if it can.
fn no_counter(trusted: Option<&str>) -> Option<&'static str> {
    if !has_invariant_counter() {
        return Some("this processor has no counter of one rate");
    }
    // The kernel's name of it; a missing list excludes nothing.
    let name = if cfg!(target_arch = "x86_64") {
        "tsc"
    } else {
        "arch_sys_counter"
    };
    match trusted {
        Some(list) if !list.split_whitespace().any(|one| one == name) => {
            Some("the kernel does not trust this machine's counter")
        }
        _ => None,
    }
}

#[cfg(target_arch = "x86_64")]
fn has_invariant_counter() -> bool {
    // Otherwise quanta would silently read CLOCK_MONOTONIC.
    let cpu = CpuId::new();
    let features = cpu.get_extended_processor_and_feature_identifiers();
    let power = cpu.get_advanced_power_mgmt_info();
    features.is_some_and(|features| features.has_rdtscp()) && power.is_some_and(|power| power.has_invariant_tsc())
}

#[cfg(not(target_arch = "x86_64"))]
fn has_invariant_counter() -> bool {
    cfg!(target_arch = "aarch64")
}

impl Clock {
    pub(crate) fn new(choice: ClockChoice) -> Result<Clock, &'static str> {
        let counter = || match no_counter(fs::read_to_string(TRUSTED).ok().as_deref()) {
            None => Counter::calibrate().ok_or("this processor's counter does not count"),
            Some(why) => Err(why),
        };
        let source = match choice {
            ClockChoice::System => Source::System,
            ClockChoice::Tsc => Source::Counter(counter()?),
            ClockChoice::Auto => counter().map_or(Source::System, Source::Counter),
        };
        Ok(Clock::of(source))
    }

    fn of(source: Source) -> Clock {
        let mut clock = Clock {
            began: Instant::now(),
            source,
        };
        if let Source::Counter(counter) = &mut clock.source {
            let moment = Reading::read(&counter.ticks);
            (counter.first, clock.began) = (moment.ticks, moment.at);
        }
        clock
    }

    /// A clock whose time a test sets.
    #[cfg(test)]
    pub(crate) fn fake() -> (Clock, std::rc::Rc<std::cell::Cell<u64>>) {
        let time = std::rc::Rc::new(std::cell::Cell::new(0));
        (Clock::of(Source::Fake(std::rc::Rc::clone(&time))), time)
    }

    #[inline]
    pub(crate) fn now(&self) -> u64 {
        match &self.source {
            Source::Counter(counter) => counter.ns(counter.ticks.raw().saturating_sub(counter.first)),
            // Five hundred years fit.
            Source::System => self.began.elapsed().as_nanos() as u64,
            #[cfg(test)]
            Source::Fake(time) => time.get(),
        }
    }

    pub(crate) fn source(&self) -> ClockSource {
        match self.source {
            Source::Counter(_) => ClockSource::Tsc,
            Source::System => ClockSource::ClockGettime,
            #[cfg(test)]
            Source::Fake(_) => ClockSource::ClockGettime,
        }
    }

    /// Ticks of the counter per ns; `None` where it is not used.
    pub(crate) fn cycles_per_ns(&self) -> Option<f64> {
        match &self.source {
            Source::Counter(counter) => Some((1u64 << 32) as f64 / counter.scale as f64),
            _ => None,
        }
    }

    /// Checks the counter against CLOCK_MONOTONIC over the time since its calibration. If it has
    /// drifted too far, switches to CLOCK_MONOTONIC and returns the drift as a fraction.
    pub(crate) fn check(&mut self) -> Option<f64> {
        let Source::Counter(counter) = &self.source else {
            return None;
        };
        let moment = Reading::read(&counter.ticks);
        let elapsed = moment.at - self.began;
        if elapsed < MIN_CHECKED {
            return None;
        }
        let counted = counter.ns(moment.ticks.saturating_sub(counter.first)) as f64;
        let drift = counted / elapsed.as_nanos() as f64 - 1.0;
        if drift.abs() <= MAX_DRIFT {
            return None;
        }
        self.source = Source::System;
        Some(drift)
    }

    pub(crate) fn report(&self) -> ClockReport {
        const BLOCK: u32 = 256;
        let (mut step, mut overhead) = (0, f64::INFINITY);
        for _ in 0..8 {
            let began = Instant::now();
            let mut last = self.reading();
            for _ in 0..BLOCK {
                let next = self.reading();
                step = greatest_common_divisor(step, next.saturating_sub(last));
                last = next;
            }
            // The quickest block: nothing else ran then.
            overhead = overhead.min(began.elapsed().as_nanos() as f64 / f64::from(BLOCK));
        }
        let unit = match &self.source {
            Source::Counter(counter) => counter.scale as f64 / (1u64 << 32) as f64,
            Source::System => 1.0,
            #[cfg(test)]
            Source::Fake(_) => 1.0,
        };
        ClockReport {
            source: self.source(),
            resolution_ns: step as f64 * unit,
            overhead_ns: overhead,
        }
    }

    /// A reading in the clock's own unit.
    #[inline]
    fn reading(&self) -> u64 {
        match &self.source {
            Source::Counter(counter) => counter.ticks.raw(),
            _ => self.now(),
        }
    }
}

/// With 0 as the neutral element.
fn greatest_common_divisor(mut a: u64, mut b: u64) -> u64 {
    while b != 0 {
        (a, b) = (b, a % b);
    }
    a
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn both_clocks_agree() {
        for choice in [ClockChoice::Auto, ClockChoice::System] {
            let mut clock = Clock::new(choice).unwrap();
            let source = clock.source();
            let (began, from) = (Instant::now(), clock.now());
            while began.elapsed() < Duration::from_millis(30) {
                std::thread::sleep(Duration::from_millis(5));
            }
            let (inner, to) = (began.elapsed(), clock.now());
            // Scheduling may extend the outer clock's interval: only the lower bound is certain.
            assert!(
                to - from >= (inner.as_nanos() as f64 * (1.0 - MAX_DRIFT)) as u64,
                "{to} {from} {inner:?}"
            );
            assert_eq!(clock.check(), None);
            assert_eq!(clock.source(), source);
        }
    }

    #[test]
    fn a_drifting_counter_is_not_used_again() {
        let Some(mut counter) = Counter::calibrate().filter(|_| no_counter(None).is_none()) else {
            assert!(Clock::new(ClockChoice::Tsc).is_err());
            return;
        };
        // Simulates a counter that has slowed down by 2 % since its calibration.
        counter.scale -= counter.scale / 50;
        let mut clock = Clock::of(Source::Counter(counter));
        std::thread::sleep(2 * MIN_CHECKED);
        let drift = clock.check().expect("it is noticed");
        assert!((drift + 0.02).abs() < 0.01, "{drift}");
        assert_eq!(clock.source(), ClockSource::ClockGettime);
        assert_eq!(clock.check(), None);
        // Time continues by the other clock.
        assert!(clock.now() >= 2 * MIN_CHECKED.as_nanos() as u64);
    }

    #[test]
    fn a_counter_the_kernel_distrusts_is_not_used() {
        if has_invariant_counter() {
            assert_eq!(no_counter(None), None);
            assert_eq!(no_counter(Some("kvm-clock tsc arch_sys_counter acpi_pm\n")), None);
            assert!(no_counter(Some("hpet acpi_pm\n")).is_some_and(|why| why.contains("kernel")));
        }
        assert_eq!(
            Clock::new(ClockChoice::System).unwrap().source(),
            ClockSource::ClockGettime
        );
    }

    #[test]
    fn a_clock_reports_resolution_and_overhead() {
        for choice in [ClockChoice::Auto, ClockChoice::System] {
            let report = Clock::new(choice).unwrap().report();
            assert!(report.resolution_ns > 0.0 && report.overhead_ns > 0.0, "{report:?}");
        }
        assert_eq!(greatest_common_divisor(0, 12), 12);
        assert_eq!(greatest_common_divisor(12, 18), 6);
    }
}
