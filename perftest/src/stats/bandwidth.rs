//! Bandwidth from a timeline of completions.
//!
//! A [`Timeline`] keeps *(time, messages completed)* pairs in a fixed number of records; when it is
//! full, every second one is dropped, so a test of any length fits at constant cost per message.
//!
//! - **Average**: messages completed between the first and the last record, times their size, over
//!   the time between the two. The first record is the start (the clock before the first post) or,
//!   after a warm-up, the completion that ended it.
//! - **Peak**: the best rate over any stretch of the timeline that completes at least
//!   [`WINDOW_SHARE`]⁻¹ of all messages and at least four windows of requests in flight. One window
//!   of a stretch's messages is not counted, because those may have been in flight before it began:
//!   completions that are only reported late and together never raise the peak. One pass with two
//!   indices finds it, linear in the records. A peak is never below the average.

use serde::{Deserialize, Serialize};

use super::clock::Clock;

const RECORDS: usize = 4096;
/// A peak is measured over at least this fraction of the messages.
const WINDOW_SHARE: u64 = 16;

#[derive(Clone, Copy, Debug)]
struct Record {
    at_ns: u64,
    done: u64,
}

#[derive(Debug)]
pub(crate) struct Timeline {
    records: Vec<Record>,
    stride: u64,
    next: u64,
    in_flight: u64,
}

#[derive(Clone, Copy, PartialEq, Debug, Serialize, Deserialize)]
pub(crate) struct Bandwidth {
    pub(crate) messages: u64,
    /// Messages per second over the whole measurement.
    pub(crate) average_per_s: f64,
    /// Messages per second over the best stretch.
    pub(crate) peak_per_s: f64,
}

impl Bandwidth {
    /// Whether a peer can have measured it.
    pub(crate) fn is_plausible(&self) -> bool {
        (0.0..1e18).contains(&self.average_per_s) && (self.average_per_s..1e18).contains(&self.peak_per_s)
    }

    /// That of two directions together.
    pub(crate) fn and(self, other: Bandwidth) -> Bandwidth {
        Bandwidth {
            messages: self.messages.saturating_add(other.messages),
            average_per_s: self.average_per_s + other.average_per_s,
            peak_per_s: self.peak_per_s + other.peak_per_s,
        }
    }
}

impl Timeline {
    /// A timeline for a test with so many requests in flight over all queue pairs.
    pub(crate) fn new(in_flight: u64) -> Timeline {
        Timeline {
            records: Vec::with_capacity(RECORDS),
            stride: 1,
            next: 0,
            in_flight,
        }
    }

    /// Starts, or after a warm-up restarts, the measurement: `done` messages have completed by
    /// `at_ns`.
    pub(crate) fn start(&mut self, at_ns: u64, done: u64) {
        self.records.clear();
        self.stride = 1;
        self.records.push(Record { at_ns, done });
        self.next = done + 1;
    }

    /// Records that `done` messages have completed; reads the clock only when a record is due.
    #[inline]
    pub(crate) fn note(&mut self, clock: &Clock, done: u64) {
        if done >= self.next {
            self.record(clock.now(), done);
        }
    }

    /// Whether the measurement has started.
    pub(crate) fn is_started(&self) -> bool {
        !self.records.is_empty()
    }

    /// Ends the measurement: `done` messages have completed by `at_ns`.
    pub(crate) fn finish(&mut self, at_ns: u64, done: u64) {
        if self.records.last().is_some_and(|last| done > last.done) {
            self.record(at_ns, done);
        }
    }

    fn record(&mut self, at_ns: u64, done: u64) {
        if self.records.len() == RECORDS {
            let mut keep = false;
            self.records.retain(|_| {
                keep = !keep;
                keep
            });
            self.stride *= 2;
        }
        self.records.push(Record { at_ns, done });
        self.next = done + self.stride;
    }

    pub(crate) fn bandwidth(&self) -> Option<Bandwidth> {
        self.bandwidth_in(&mut 0)
    }

    /// As [`Timeline::bandwidth`]; counts the steps of the two indices in `steps`.
    fn bandwidth_in(&self, steps: &mut u64) -> Option<Bandwidth> {
        let (first, last) = (self.records.first()?, self.records.last()?);
        let average_per_s = rate(first, last, 0)?;
        let messages = last.done - first.done;
        let window = (messages / WINDOW_SHARE).max(4 * self.in_flight).max(1);
        let mut peak_per_s = average_per_s;
        let mut from = 0;
        for to in &self.records {
            *steps += 1;
            while self
                .records
                .get(from + 1)
                .is_some_and(|next| to.done.saturating_sub(next.done) >= window)
            {
                from += 1;
                *steps += 1;
            }
            let start = &self.records[from];
            if to.done - start.done >= window
                && let Some(rate) = rate(start, to, self.in_flight)
            {
                peak_per_s = peak_per_s.max(rate);
            }
        }
        Some(Bandwidth {
            messages,
            average_per_s,
            peak_per_s,
        })
    }
}

/// Messages per second between two records, without the first `uncounted` of them.
fn rate(from: &Record, to: &Record, uncounted: u64) -> Option<f64> {
    let seconds = to.at_ns.checked_sub(from.at_ns)? as f64 / 1e9;
    let messages = (to.done - from.done).saturating_sub(uncounted);
    (seconds > 0.0 && messages > 0).then(|| messages as f64 / seconds)
}

#[cfg(test)]
mod tests {
    use super::*;

    const START: u64 = 77;

    fn timeline(in_flight: u64, points: impl IntoIterator<Item = (u64, u64)>) -> Timeline {
        let mut timeline = Timeline::new(in_flight);
        timeline.start(START, 0);
        for (us, done) in points {
            timeline.record(START + us * 1000, done);
        }
        timeline
    }

    #[test]
    fn nothing_measured_is_no_figure() {
        assert_eq!(Timeline::new(1).bandwidth(), None);
        assert_eq!(timeline(1, []).bandwidth(), None);
        assert_eq!(timeline(1, [(0, 5)]).bandwidth(), None);
    }

    #[test]
    fn a_steady_stream_peaks_at_its_average() {
        let figures = timeline(4, (1..=1000).map(|i| (i * 10, i))).bandwidth().unwrap();
        assert_eq!(figures.messages, 1000);
        assert!((figures.average_per_s - 1e5).abs() < 1.0);
        assert!((figures.peak_per_s - 1e5).abs() < 1.0);
    }

    #[test]
    fn a_fast_stretch_is_the_peak() {
        // 400 messages at 10 us, 200 at 1 us, 400 at 10 us.
        let mut at = 0;
        let points = (1..=1000).map(|i| {
            at += if (401..=600).contains(&i) { 1 } else { 10 };
            (at, i)
        });
        let figures = timeline(4, points).bandwidth().unwrap();
        assert!((9e5..=1e6).contains(&figures.peak_per_s), "{figures:?}");
    }

    #[test]
    fn messages_in_flight_do_not_raise_the_peak() {
        // 1e5 per second, but half way everything in flight is delayed by 1 ms and then reported at
        // once.
        let points = (1..=1000).filter(|i| !(501..564).contains(i)).map(|i| (i * 10, i));
        let figures = timeline(64, points).bandwidth().unwrap();
        assert!((figures.peak_per_s - 1e5).abs() < 1.0, "{figures:?}");
    }

    #[test]
    fn a_burst_of_completions_does_not_raise_the_peak() {
        // 64 completions are reported at once every 640 us: the true rate is 1e5.
        let figures = timeline(64, (1..=100).map(|i| (i * 640, i * 64))).bandwidth().unwrap();
        assert!((figures.peak_per_s - 1e5).abs() < 1.0, "{figures:?}");
    }

    #[test]
    fn long_tests_fit_and_keep_their_figures() {
        let (clock, time) = Clock::fake();
        let mut timeline = Timeline::new(4);
        timeline.start(0, 0);
        for done in 1..=1_000_000 {
            time.set(done * 1000);
            timeline.note(&clock, done);
        }
        timeline.finish(clock.now(), 1_000_000);
        assert!(timeline.records.len() <= RECORDS && timeline.records.capacity() == RECORDS);
        let figures = timeline.bandwidth().unwrap();
        assert_eq!(figures.messages, 1_000_000);
        assert!((figures.peak_per_s - 1e6).abs() < 1.0);
    }

    /// 64 queue pairs of 5000 messages each, for which the C tool computes a minute and a half.
    /// Each index passes each record at most once.
    #[test]
    fn the_peak_takes_two_steps_a_record() {
        let mut at = 0;
        let points = (1..=320_000u64).map(|done| {
            at += done % 7;
            (at, done)
        });
        let mut all = Timeline::new(64 * 128);
        all.start(START, 0);
        let (clock, time) = Clock::fake();
        for (us, done) in points {
            time.set(START + us * 1000);
            all.note(&clock, done);
        }
        let mut steps = 0;
        let figures = all.bandwidth_in(&mut steps).unwrap();
        assert!(figures.messages >= 320_000 - all.stride, "{figures:?}");
        assert!(
            (all.records.len() as u64..=2 * RECORDS as u64).contains(&steps),
            "{steps}"
        );
    }

    #[test]
    fn a_warm_up_does_not_count() {
        let mut timeline = Timeline::new(1);
        timeline.start(START, 0);
        timeline.start(START + 10_000_000_000, 100);
        timeline.finish(START + 11_000_000_000, 1100);
        let figures = timeline.bandwidth().unwrap();
        assert_eq!((figures.messages, figures.average_per_s.round() as u64), (1000, 1000));
    }
}
