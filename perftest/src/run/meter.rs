//! What a measuring loop records with: the clock, the CPU time, and the samples.

use crate::stats::{Clock, CpuMeter, Latency, Pacer, Timeline};

/// Measures one repeat; `figures` is a [`Timeline`] or a [`Latency`].
#[derive(Debug)]
pub(crate) struct Meter<'a, T> {
    pub(crate) clock: &'a Clock,
    /// Accumulates over the repeats of a size.
    pub(crate) cpu: &'a mut CpuMeter,
    pub(crate) figures: &'a mut T,
}

impl Meter<'_, Timeline> {
    /// The warm-up is over: `done` messages. Returns the time.
    pub(crate) fn start(&mut self, done: u64) -> u64 {
        self.cpu.start();
        let now = self.clock.now();
        self.figures.start(now, done);
        now
    }

    pub(crate) fn finish(&mut self, done: u64) {
        self.figures.finish(self.clock.now(), done);
        self.cpu.stop();
    }
}

/// Closed loop (no rate): a message begins when the previous one ends, at the same clock reading.
/// Open loop: it begins when it is due, and its latency counts from then, which corrects
/// coordinated omission.
#[derive(Debug)]
pub(crate) struct LatencyMeter<'a, 'm> {
    meter: &'m mut Meter<'a, Latency>,
    rate_per_s: Option<f64>,
    pacer: Option<Pacer>,
    measured: u64,
    measuring: bool,
    due_ns: u64,
    began_ns: u64,
}

impl<'a, 'm> LatencyMeter<'a, 'm> {
    /// For an open loop at `rate_per_s` messages per second, or a closed loop.
    pub(crate) fn new(meter: &'m mut Meter<'a, Latency>, rate_per_s: Option<f64>) -> LatencyMeter<'a, 'm> {
        let now = meter.clock.now();
        LatencyMeter {
            meter,
            rate_per_s,
            pacer: None,
            measured: 0,
            measuring: false,
            due_ns: now,
            began_ns: now,
        }
    }

    /// The warm-up is over. Returns the time.
    pub(crate) fn start(&mut self) -> u64 {
        self.meter.cpu.start();
        let now = self.meter.clock.now();
        self.pacer = self.rate_per_s.map(|rate| Pacer::new(now, rate));
        self.measuring = true;
        (self.due_ns, self.began_ns) = (now, now);
        now
    }

    /// Polled until the next message is due, which begins when this returns true.
    #[inline]
    pub(crate) fn is_due(&mut self) -> bool {
        let Some(pacer) = &self.pacer else { return true };
        let due = pacer.due_ns(self.measured);
        let now = self.meter.clock.now();
        if now < due {
            return false;
        }
        (self.due_ns, self.began_ns) = (due, now);
        true
    }

    /// A message has ended. Returns the time.
    #[inline]
    pub(crate) fn end(&mut self) -> u64 {
        let now = self.meter.clock.now();
        if self.measuring {
            let late = self.began_ns - self.due_ns;
            self.meter.figures.record_late(late, now.saturating_sub(self.began_ns));
            self.measured += 1;
        }
        (self.due_ns, self.began_ns) = (now, now);
        now
    }
}

impl Drop for LatencyMeter<'_, '_> {
    /// CPU time is counted to the end of the test, however it ends.
    fn drop(&mut self) {
        self.meter.cpu.stop();
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::stats::{LatencySummary, Trip};

    /// 10,000 messages of 10 µs each, of which number 100 takes 100 ms; the clock advances only
    /// during a message or while none is due.
    fn with_a_stall(rate_per_s: Option<f64>) -> LatencySummary {
        let (clock, time) = Clock::fake();
        let (mut cpu, mut latency) = (CpuMeter::default(), Latency::new(Trip::Full));
        let mut meter = Meter {
            clock: &clock,
            cpu: &mut cpu,
            figures: &mut latency,
        };
        let mut latency_meter = LatencyMeter::new(&mut meter, rate_per_s);
        latency_meter.start();
        for message in 0..10_000 {
            while !latency_meter.is_due() {
                time.set(time.get() + 1000);
            }
            let takes = if message == 100 { 100_000_000 } else { 10_000 };
            time.set(time.get() + takes);
            latency_meter.end();
        }
        drop(latency_meter);
        latency.figures().unwrap()
    }

    #[test]
    fn coordinated_omission_is_corrected_in_an_open_loop_only() {
        let hidden = with_a_stall(None);
        assert!(hidden.p999 < 11_000.0 && hidden.max == 1e8, "{hidden:?}");
        // 1000 messages were due during the stall, and later ones waited: over a tenth of all.
        let seen = with_a_stall(Some(10_000.0));
        assert!(seen.p99 > 8e7 && seen.p90 > 1e6 && seen.p50 < 12_000.0, "{seen:?}");
        assert_eq!(seen.max, 1e8);
    }

    #[test]
    fn messages_on_time_have_the_latency_of_a_closed_loop() {
        let (clock, time) = Clock::fake();
        let (mut cpu, mut latency) = (CpuMeter::default(), Latency::new(Trip::Half));
        let mut meter = Meter {
            clock: &clock,
            cpu: &mut cpu,
            figures: &mut latency,
        };
        let mut latency_meter = LatencyMeter::new(&mut meter, Some(1e6));
        // The warm-up is neither paced nor counted.
        assert!(latency_meter.is_due());
        time.set(5_000);
        latency_meter.end();
        latency_meter.start();
        for _ in 0..100 {
            while !latency_meter.is_due() {
                time.set(time.get() + 100);
            }
            time.set(time.get() + 600);
            latency_meter.end();
        }
        drop(latency_meter);
        let figures = latency.figures().unwrap();
        assert_eq!((figures.count, figures.min, figures.max), (100, 300.0, 300.0));
        assert_eq!(time.get(), 5_000 + 99_000 + 600);
    }
}
