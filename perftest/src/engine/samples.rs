//! The samples of a latency test at one message size, and when its messages are due.
//!
//! Every round trip is one sample; with margins, those count that begin and end between the two.
//! Without a pace (closed loop) a message begins when the previous one ends, at the same clock
//! reading. On a schedule (open loop) it begins when it is due, and its latency counts from then,
//! which corrects coordinated omission.

use std::time::Duration;

use super::lat::{LoopState, Monitor};
use crate::failure::Failure;
use crate::stats::{Clock, CpuMeter, Latency, LatencySummary, Pacer, Trip, nanoseconds};

/// Samples reserved at once where their number is not known; more make the memory grow.
const RESERVED_SAMPLES: u64 = 1 << 20;

/// When the next message of a latency test begins.
#[derive(Clone, Copy, PartialEq, Debug)]
pub(crate) enum Pace {
    /// When the previous one has ended.
    AtOnce,
    /// So long after the previous one.
    Gap(Duration),
    /// At so many messages per second.
    PerSecond(f64),
}

#[derive(Clone, Copy, Debug)]
pub(crate) struct SampleParams {
    pub(crate) trip: Trip,
    pub(crate) pace: Pace,
    pub(crate) duration: Option<Duration>,
    /// How far from the beginning and the end of the duration samples begin to count.
    pub(crate) margin: Option<Duration>,
    /// Whether each sample is kept, and how many are expected if that is known.
    pub(crate) keep: Option<Option<u64>>,
}

// fields: the parameters, the state of one sample, and the results
pub(crate) struct Samples<'a> {
    clock: &'a Clock,
    cpu: &'a mut CpuMeter,
    params: SampleParams,
    latency: Latency,
    /// Round trips in ns in the order of measurement.
    kept: Option<Vec<u64>>,
    measuring: bool,
    /// The schedule of an open loop.
    pacer: Option<Pacer>,
    ended: u64,
    due_ns: u64,
    began_ns: u64,
    /// The sample to be recorded: how late it began, when, and when it ended.
    pending: Option<(u64, u64, u64)>,
    end_ns: u64,
    /// First and last instant at which samples count.
    window: (u64, u64),
    /// From the beginning of the first counted sample to the end of the last.
    span: Option<(u64, u64)>,
    intervals: Option<Intervals<'a>>,
}

/// What is reported of each interval: the seconds from the start to its end, and its samples.
struct Intervals<'a> {
    every_ns: u64,
    began_ns: u64,
    next_ns: u64,
    latency: Latency,
    report: &'a mut dyn FnMut(f64, LatencySummary),
}

impl Intervals<'_> {
    /// An interval ends with the first message after its time.
    #[cold]
    fn end(&mut self, now_ns: u64, trip: Trip) {
        let elapsed = now_ns - self.began_ns;
        let latency = std::mem::replace(&mut self.latency, Latency::new(trip));
        if let Some(figures) = latency.figures() {
            (self.report)(elapsed as f64 / 1e9, figures);
        }
        // One that was missed altogether has no line.
        let passed = elapsed / self.every_ns + 1;
        self.next_ns = self.began_ns.saturating_add(passed.saturating_mul(self.every_ns));
    }
}

impl<'a> Samples<'a> {
    /// `cpu` accumulates the CPU time of the measurement.
    pub(crate) fn new(clock: &'a Clock, cpu: &'a mut CpuMeter, params: SampleParams) -> Samples<'a> {
        let room = |expected: Option<u64>| expected.map_or(RESERVED_SAMPLES, |count| count.min(RESERVED_SAMPLES * 128));
        Samples {
            clock,
            cpu,
            params,
            latency: Latency::new(params.trip),
            kept: params
                .keep
                .map(|expected| Vec::with_capacity(usize::try_from(room(expected)).unwrap_or(0))),
            measuring: false,
            pacer: None,
            ended: 0,
            due_ns: 0,
            began_ns: 0,
            pending: None,
            end_ns: u64::MAX,
            window: (0, u64::MAX),
            span: None,
            intervals: None,
        }
    }

    /// Has `report` called after every interval, with its samples.
    pub(crate) fn report_every(&mut self, every: Duration, report: &'a mut dyn FnMut(f64, LatencySummary)) {
        self.intervals = Some(Intervals {
            every_ns: nanoseconds(every).max(1),
            began_ns: 0,
            next_ns: u64::MAX,
            latency: Latency::new(self.params.trip),
            report,
        });
    }

    /// Starts the measurement. Returns when it ends, `u64::MAX` without a duration.
    pub(crate) fn start(&mut self) -> u64 {
        self.cpu.start();
        let now = self.clock.now();
        if let Some(duration) = self.params.duration {
            self.end_ns = now.saturating_add(nanoseconds(duration));
        }
        if let Some(margin) = self.params.margin.map(nanoseconds) {
            self.window = (now.saturating_add(margin), self.end_ns.saturating_sub(margin));
        }
        if let Pace::PerSecond(rate) = self.params.pace {
            self.pacer = Some(Pacer::new(now, rate));
        }
        self.measuring = true;
        if let Some(intervals) = &mut self.intervals {
            (intervals.began_ns, intervals.next_ns) = (now, now.saturating_add(intervals.every_ns));
        }
        (self.due_ns, self.began_ns) = (now, now);
        self.end_ns
    }

    /// Waits until the next message is due, or the time is up; it begins then.
    ///
    /// # Errors
    /// As those of the monitor.
    #[inline]
    pub(crate) fn await_due(&mut self, monitor: &mut impl Monitor) -> Result<(), Failure> {
        match self.params.pace {
            _ if !self.measuring => Ok(()),
            Pace::AtOnce => Ok(()),
            Pace::Gap(_) | Pace::PerSecond(_) => self.pause(monitor),
        }
    }

    fn pause(&mut self, monitor: &mut impl Monitor) -> Result<(), Failure> {
        let due = match (&self.pacer, self.params.pace) {
            (Some(pacer), _) => pacer.due_ns(self.ended),
            (None, Pace::Gap(gap)) => self.clock.now().saturating_add(nanoseconds(gap)),
            (None, _) => 0,
        };
        loop {
            let now = self.clock.now();
            if now >= due || monitor.idle()? == LoopState::TimeUp {
                self.began_ns = now;
                self.due_ns = if self.pacer.is_some() { due.min(now) } else { now };
                // Resets the idle count; otherwise the wait for the answer would yield the CPU at
                // once.
                return monitor.busy();
            }
        }
    }

    /// A message has ended. Returns whether the time is over.
    #[inline]
    pub(crate) fn end(&mut self) -> bool {
        let mut now = self.clock.now();
        if self.measuring {
            let late = self.began_ns - self.due_ns;
            self.pending = Some((late, self.began_ns, now));
            self.ended += 1;
            if let Some(intervals) = &mut self.intervals {
                intervals.latency.record_late(late, now.saturating_sub(self.began_ns));
                if now >= intervals.next_ns {
                    intervals.end(now, self.params.trip);
                    // The next message does not wait for the line.
                    now = self.clock.now();
                }
            }
        }
        (self.due_ns, self.began_ns) = (now, now);
        now >= self.end_ns
    }

    /// Records the last sample that has ended.
    #[inline]
    pub(crate) fn record(&mut self) {
        let Some((late, began, ended)) = self.pending.take() else {
            return;
        };
        if began < self.window.0 || ended > self.window.1 {
            return;
        }
        let ns = ended.saturating_sub(began);
        self.latency.record_late(late, ns);
        if let Some(kept) = &mut self.kept {
            kept.push(ns);
        }
        let first = self.span.map_or(began, |(first, _)| first);
        self.span = Some((first, ended));
    }

    /// The measurement has ended, however that was.
    pub(crate) fn finish(&mut self) {
        self.record();
        self.cpu.stop();
    }

    pub(crate) fn latency(&self) -> &Latency {
        &self.latency
    }

    pub(crate) fn rate_per_s(&self) -> f64 {
        let count = self.latency.count() as f64;
        self.span.map_or(0.0, |(first, last)| {
            count * 1e9 / last.saturating_sub(first).max(1) as f64
        })
    }

    /// Every sample in ns, where they were kept; half round trips in a ping-pong.
    pub(crate) fn samples_ns(&self) -> Option<Vec<f64>> {
        let share = match self.params.trip {
            Trip::Half => 0.5,
            Trip::Full => 1.0,
        };
        let kept = self.kept.as_ref()?;
        Some(kept.iter().map(|&ns| ns as f64 * share).collect())
    }
}

#[cfg(test)]
mod tests {
    use std::cell::Cell;
    use std::rc::Rc;

    use super::*;
    use crate::stats::LatencySummary;

    /// Waiting takes `idle_ns` each time.
    struct FakeMonitor(Rc<Cell<u64>>, u64);

    impl Monitor for FakeMonitor {
        fn busy(&mut self) -> Result<(), Failure> {
            Ok(())
        }

        fn idle(&mut self) -> Result<LoopState, Failure> {
            self.0.set(self.0.get() + self.1);
            Ok(LoopState::Continue)
        }
    }

    fn params(trip: Trip, pace: Pace) -> SampleParams {
        SampleParams {
            trip,
            pace,
            duration: None,
            margin: None,
            keep: None,
        }
    }

    /// 10,000 messages of 10 µs each, of which number 100 takes 100 ms; the clock advances only
    /// during a message or while none is due.
    fn with_a_stall(pace: Pace) -> LatencySummary {
        let (clock, time) = Clock::fake();
        let mut cpu = CpuMeter::default();
        let mut samples = Samples::new(&clock, &mut cpu, params(Trip::Full, pace));
        let mut monitor = FakeMonitor(Rc::clone(&time), 1000);
        samples.start();
        for message in 0..10_000 {
            samples.await_due(&mut monitor).unwrap();
            samples.record();
            let takes = if message == 100 { 100_000_000 } else { 10_000 };
            time.set(time.get() + takes);
            samples.end();
        }
        samples.finish();
        samples.latency().figures().unwrap()
    }

    #[test]
    fn coordinated_omission_is_corrected_in_an_open_loop_only() {
        let hidden = with_a_stall(Pace::AtOnce);
        assert!(hidden.p999 < 11_000.0 && hidden.max == 1e8, "{hidden:?}");
        // 1000 messages were due during the stall, and later ones waited: over a tenth of all.
        let seen = with_a_stall(Pace::PerSecond(10_000.0));
        assert!(seen.p99 > 8e7 && seen.p90 > 1e6 && seen.p50 < 12_000.0, "{seen:?}");
        assert_eq!(seen.max, 1e8);
    }

    #[test]
    fn messages_on_time_have_the_latency_of_a_closed_loop() {
        let (clock, time) = Clock::fake();
        let mut cpu = CpuMeter::default();
        let mut samples = Samples::new(&clock, &mut cpu, params(Trip::Half, Pace::PerSecond(1e6)));
        let mut monitor = FakeMonitor(Rc::clone(&time), 100);
        // The warm-up is neither paced nor counted.
        samples.await_due(&mut monitor).unwrap();
        assert_eq!(time.get(), 0);
        time.set(5_000);
        samples.end();
        samples.start();
        for _ in 0..100 {
            samples.await_due(&mut monitor).unwrap();
            samples.record();
            time.set(time.get() + 600);
            samples.end();
        }
        samples.finish();
        let figures = samples.latency().figures().unwrap();
        assert_eq!((figures.count, figures.min, figures.max), (100, 300.0, 300.0));
        assert_eq!(time.get(), 5_000 + 99_000 + 600);
    }

    /// Records samples that begin and end at these times, each after its gap; the measurement
    /// starts at 5000.
    fn recorded(params: SampleParams, trips: &[(u64, u64)], check: impl FnOnce(&Samples<'_>)) {
        let (clock, time) = Clock::fake();
        let mut cpu = CpuMeter::default();
        let mut samples = Samples::new(&clock, &mut cpu, params);
        let mut monitor = FakeMonitor(Rc::clone(&time), 1);
        time.set(5000);
        samples.start();
        for &(began, ended) in trips {
            time.set(began);
            samples.await_due(&mut monitor).unwrap();
            time.set(ended);
            samples.end();
            samples.record();
        }
        check(&samples);
    }

    #[test]
    fn samples_are_kept_in_order() {
        let params = SampleParams {
            keep: Some(Some(3)),
            ..params(Trip::Half, Pace::Gap(Duration::from_nanos(5)))
        };
        recorded(params, &[(5095, 5300), (5295, 5340), (5395, 5500)], |samples| {
            let figures = samples.latency().figures().unwrap();
            assert_eq!(samples.samples_ns(), Some(vec![100.0, 20.0, 50.0]));
            assert_eq!((figures.min, figures.max), (20.0, 100.0));
            assert_eq!(samples.rate_per_s(), 3e9 / 400.0);
        });
    }

    #[test]
    fn samples_that_touch_a_margin_do_not_count() {
        let params = SampleParams {
            duration: Some(Duration::from_nanos(1000)),
            margin: Some(Duration::from_nanos(100)),
            ..params(Trip::Full, Pace::AtOnce)
        };
        let ends = [5000, 5090, 5110, 5200, 5890, 5910, 5990];
        let trips: Vec<_> = ends.windows(2).map(|pair| (pair[0], pair[1])).collect();
        recorded(params, &trips, |samples| {
            let figures = samples.latency().figures().unwrap();
            assert_eq!((figures.count, figures.max, samples.samples_ns()), (2, 690.0, None));
            assert_eq!(samples.rate_per_s(), 2e9 / 780.0);
        });
    }

    #[test]
    fn the_time_is_over_at_its_end_and_no_samples_give_no_latency() {
        let (clock, time) = Clock::fake();
        let mut cpu = CpuMeter::default();
        let params = SampleParams {
            duration: Some(Duration::from_nanos(1000)),
            ..params(Trip::Full, Pace::AtOnce)
        };
        let mut samples = Samples::new(&clock, &mut cpu, params);
        assert_eq!((samples.latency().figures(), samples.rate_per_s()), (None, 0.0));
        time.set(5000);
        assert_eq!(samples.start(), 6000);
        time.set(5999);
        assert!(!samples.end());
        time.set(6000);
        assert!(samples.end());
    }
}
