//! What the loop of a bandwidth test records with: the clock, the CPU time, and the timeline.

use std::time::Duration;

use crate::report::BandwidthInterval;
use crate::stats::{Bandwidth, Clock, CpuMeter, Timeline, nanoseconds};

/// Measures one repeat.
pub(crate) struct Meter<'a> {
    pub(crate) clock: &'a Clock,
    /// Accumulates over the repeats of a size.
    pub(crate) cpu: &'a mut CpuMeter,
    pub(crate) figures: &'a mut Timeline,
    pub(crate) intervals: Option<Intervals<'a>>,
}

impl Meter<'_> {
    /// The warm-up is over: `done` messages. Returns the time.
    pub(crate) fn start(&mut self, done: u64) -> u64 {
        self.cpu.start();
        let now = self.clock.now();
        self.figures.start(now, done);
        if let Some(intervals) = &mut self.intervals {
            intervals.start(now, done);
        }
        now
    }

    #[inline]
    pub(crate) fn note(&mut self, done: u64) {
        self.figures.note(self.clock, done);
        if let Some(intervals) = &mut self.intervals {
            intervals.note(self.clock.now(), done);
        }
    }

    pub(crate) fn finish(&mut self, done: u64) {
        self.figures.finish(self.clock.now(), done);
        self.cpu.stop();
    }
}

/// Reports what was done in each interval while a test runs.
pub(crate) struct Intervals<'a> {
    every_ns: u64,
    bytes: u64,
    report: &'a mut dyn FnMut(BandwidthInterval),
    began_ns: u64,
    /// The beginning of the current interval: when, and the messages done by then.
    from: (u64, u64),
    next_ns: u64,
}

impl<'a> Intervals<'a> {
    /// For messages of `bytes`.
    pub(crate) fn new(every: Duration, bytes: u64, report: &'a mut dyn FnMut(BandwidthInterval)) -> Intervals<'a> {
        Intervals {
            every_ns: nanoseconds(every).max(1),
            bytes,
            report,
            began_ns: 0,
            from: (0, 0),
            next_ns: u64::MAX,
        }
    }

    fn start(&mut self, now_ns: u64, done: u64) {
        (self.began_ns, self.from) = (now_ns, (now_ns, done));
        self.next_ns = now_ns.saturating_add(self.every_ns);
    }

    #[inline]
    fn note(&mut self, now_ns: u64, done: u64) {
        if now_ns >= self.next_ns {
            self.end(now_ns, done);
        }
    }

    /// An interval ends with the first completion after its time.
    #[cold]
    fn end(&mut self, now_ns: u64, done: u64) {
        let (from_ns, from) = self.from;
        let per_s = (done - from) as f64 * 1e9 / now_ns.saturating_sub(from_ns).max(1) as f64;
        (self.report)(BandwidthInterval {
            end_s: (now_ns - self.began_ns) as f64 / 1e9,
            iterations: done - from,
            bw_avg_bytes_per_s: per_s * self.bytes as f64,
            msg_rate_per_s: per_s,
        });
        self.from = (now_ns, done);
        // One that was missed altogether has no line.
        let passed = (now_ns - self.began_ns) / self.every_ns + 1;
        self.next_ns = self.began_ns.saturating_add(passed.saturating_mul(self.every_ns));
    }
}

/// The messages that arrive, without those of the warm-up: from the last poll before the first, as
/// all may come at once, to the last.
#[derive(Debug)]
pub(crate) struct Arrivals {
    timeline: Timeline,
    warmup: u64,
    /// The last poll before the first message, then that with the last one: when, and how many had
    /// arrived by then.
    last: (u64, u64),
}

impl Arrivals {
    pub(crate) fn new(clock: &Clock, in_flight: u32, warmup: u64) -> Arrivals {
        Arrivals {
            timeline: Timeline::new(in_flight.into()),
            warmup,
            last: (clock.now(), 0),
        }
    }

    /// A poll: so many have arrived.
    #[inline]
    pub(crate) fn note(&mut self, clock: &Clock, arrived: u64) {
        if arrived == self.last.1 && self.timeline.is_started() {
            return;
        }
        let before = std::mem::replace(&mut self.last, (clock.now(), arrived));
        if !self.timeline.is_started() && arrived > self.warmup {
            self.timeline.start(before.0, self.warmup.max(before.1));
        }
        if self.timeline.is_started() {
            self.timeline.note(clock, arrived);
        }
    }

    pub(crate) fn bandwidth(&mut self) -> Option<Bandwidth> {
        self.timeline.finish(self.last.0, self.last.1);
        self.timeline.bandwidth()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_interval_has_a_line_of_its_own_messages() {
        let mut lines = Vec::new();
        let mut report = |line: BandwidthInterval| lines.push((line.end_s, line.iterations, line.bw_avg_bytes_per_s));
        let mut intervals = Intervals::new(Duration::from_millis(10), 100, &mut report);
        intervals.note(5, 1);
        intervals.start(1_000, 10);
        for (ms, done) in [(5, 20), (10, 30), (12, 40), (35, 50), (39, 60), (40, 70)] {
            intervals.note(1_000 + ms * 1_000_000, done);
        }
        assert_eq!(
            lines,
            [(0.01, 20, 200_000.0), (0.035, 20, 80_000.0), (0.04, 20, 400_000.0)]
        );
    }

    #[test]
    fn arrivals_count_from_the_end_of_the_warm_up_to_the_last() {
        for (polls, figures) in [
            (
                &[(1, 5), (2, 10), (3, 20), (12, 110), (5000, 110)][..],
                Some((100, 1e7)),
            ),
            (&[(1, 0), (5, 0), (15, 110)], Some((100, 1e7))),
            (&[(10, 110)], Some((100, 1e7))),
            (&[(10, 10), (20, 10)], None),
        ] {
            let (clock, time) = Clock::fake();
            let mut arrivals = Arrivals::new(&clock, 1, 10);
            for &(us, arrived) in polls {
                time.set(us * 1000);
                arrivals.note(&clock, arrived);
            }
            let measured = arrivals.bandwidth();
            let measured = measured.map(|measured| (measured.messages, measured.average_per_s));
            assert_eq!(measured, figures, "{polls:?}");
        }
    }
}
