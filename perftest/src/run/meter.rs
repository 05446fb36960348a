//! What a loop measures with: the clock, the processor time, and the record of what it finds.

use crate::stats::{Clock, CpuMeter, Latency, Pacer, Timeline};

/// The measuring of one repeat; `figures` are a [`Timeline`] or a [`Latency`].
#[derive(Debug)]
pub(crate) struct Meter<'a, T> {
    /// Where time comes from.
    pub(crate) clock: &'a Clock,
    /// Adds up over the repeats of a size.
    pub(crate) cpu: &'a mut CpuMeter,
    /// What is found.
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

    /// Nothing more is measured, after `done` messages.
    pub(crate) fn finish(&mut self, done: u64) {
        self.figures.finish(self.clock.now(), done);
        self.cpu.stop();
    }
}

/// The measuring of one message after another.
///
/// Without a rate a message begins when the one before has ended, at the same reading of the clock. With one it begins when it is due, and if the one before ends later than that, its time counts
/// from when it was due all the same.
#[derive(Debug)]
pub(crate) struct Turns<'a, 'm> {
    meter: &'m mut Meter<'a, Latency>,
    rate_per_s: Option<f64>,
    /// Of the measured messages, from the first of them.
    pacer: Option<Pacer>,
    measured: u64,
    measuring: bool,
    due_ns: u64,
    began_ns: u64,
}

impl<'a, 'm> Turns<'a, 'm> {
    /// For a test at so many messages per second, or as they come.
    pub(crate) fn new(meter: &'m mut Meter<'a, Latency>, rate_per_s: Option<f64>) -> Turns<'a, 'm> {
        let now = meter.clock.now();
        Turns {
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

    /// Whether the next message is due; it begins when this says so, and has to be asked until it does.
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

impl Drop for Turns<'_, '_> {
    /// However a test ends, its processor time is counted to there.
    fn drop(&mut self) {
        self.meter.cpu.stop();
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::stats::{LatencyFigures, Trip};

    /// 10,000 messages of 10 µs each, of which the hundredth takes 100 ms, by a clock that goes only while a message is under way or none is due.
    fn with_a_stall(rate_per_s: Option<f64>) -> LatencyFigures {
        let (clock, time) = Clock::fake();
        let (mut cpu, mut latency) = (CpuMeter::default(), Latency::new(Trip::Full));
        let mut meter = Meter {
            clock: &clock,
            cpu: &mut cpu,
            figures: &mut latency,
        };
        let mut turns = Turns::new(&mut meter, rate_per_s);
        turns.start();
        for message in 0..10_000 {
            while !turns.is_due() {
                time.set(time.get() + 1000);
            }
            let takes = if message == 100 { 100_000_000 } else { 10_000 };
            time.set(time.get() + takes);
            turns.end();
        }
        drop(turns);
        latency.figures().unwrap()
    }

    #[test]
    fn a_stall_hides_where_nobody_asks_meanwhile() {
        let hidden = with_a_stall(None);
        assert!(hidden.p999 < 11_000.0 && hidden.max == 1e8, "{hidden:?}");
        // 1000 messages were due while nothing was answered, and those after them waited for these: a tenth of all and more.
        let seen = with_a_stall(Some(10_000.0));
        assert!(seen.p99 > 8e7 && seen.p90 > 1e6 && seen.p50 < 12_000.0, "{seen:?}");
        assert_eq!(seen.max, 1e8);
    }

    #[test]
    fn messages_of_a_timetable_are_as_quick_as_others() {
        let (clock, time) = Clock::fake();
        let (mut cpu, mut latency) = (CpuMeter::default(), Latency::new(Trip::Half));
        let mut meter = Meter {
            clock: &clock,
            cpu: &mut cpu,
            figures: &mut latency,
        };
        let mut turns = Turns::new(&mut meter, Some(1e6));
        // A warm-up is not paced, and not counted.
        assert!(turns.is_due());
        time.set(5_000);
        turns.end();
        turns.start();
        for _ in 0..100 {
            while !turns.is_due() {
                time.set(time.get() + 100);
            }
            time.set(time.get() + 600);
            turns.end();
        }
        drop(turns);
        let figures = latency.figures().unwrap();
        assert_eq!((figures.count, figures.min, figures.max), (100, 300.0, 300.0));
        assert_eq!(time.get(), 5_000 + 99_000 + 600);
    }
}
