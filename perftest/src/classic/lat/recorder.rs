//! The samples of a latency test at one message size.
//!
//! Every round trip is one sample. With `-n` all of them count; with `-D` those that begin and end
//! between the two margins. `-H` and `-U` keep each sample, in memory allocated before the first.

use crate::classic::settings::TestLength;
use crate::stats::{Latency, LatencySummary, Trip};

/// Samples reserved at once where their number is not known; more make the memory grow.
const RESERVED_SAMPLES: u64 = 1 << 20;

#[derive(Debug)]
pub(super) struct LatencyRecorder {
    trip: Trip,
    latency: Latency,
    /// Round trips in ns in the order of measurement, where `-H` or `-U` wants them.
    kept: Option<Vec<u64>>,
    length: TestLength,
    /// First and last instant at which samples count; ns of the test's clock.
    window: (u64, u64),
    end: u64,
    /// From the start of the first counted sample to the end of the last.
    span: Option<(u64, u64)>,
}

impl LatencyRecorder {
    pub(super) fn new(trip: Trip, length: TestLength, keep: bool) -> LatencyRecorder {
        let room = match length {
            TestLength::Iterations(count) => count.min(RESERVED_SAMPLES * 128),
            TestLength::Duration { .. } => RESERVED_SAMPLES,
        };
        LatencyRecorder {
            trip,
            latency: Latency::new(trip),
            kept: keep.then(|| Vec::with_capacity(usize::try_from(room).unwrap_or(0))),
            length,
            window: (0, u64::MAX),
            end: u64::MAX,
            span: None,
        }
    }

    pub(super) fn start(&mut self, now: u64) {
        if let TestLength::Duration { duration, margin } = self.length {
            let (duration, margin) = (duration.as_nanos() as u64, margin.as_nanos() as u64);
            self.end = now.saturating_add(duration);
            self.window = (now.saturating_add(margin), self.end.saturating_sub(margin));
        }
    }

    /// Messages to exchange; `u64::MAX` in a timed test.
    pub(super) fn total(&self) -> u64 {
        match self.length {
            TestLength::Iterations(count) => count,
            TestLength::Duration { .. } => u64::MAX,
        }
    }

    pub(super) fn end(&self) -> u64 {
        self.end
    }

    #[inline]
    pub(super) fn is_over(&self, now: u64) -> bool {
        now >= self.end
    }

    #[inline]
    pub(super) fn record(&mut self, began: u64, ended: u64) {
        if began < self.window.0 || ended > self.window.1 {
            return;
        }
        let ns = ended.saturating_sub(began);
        self.latency.record(ns);
        if let Some(kept) = &mut self.kept {
            kept.push(ns);
        }
        let first = self.span.map_or(began, |(first, _)| first);
        self.span = Some((first, ended));
    }

    /// The percentiles, of half round trips in a ping-pong; `None` when nothing was measured.
    pub(super) fn figures(&self) -> Option<LatencySummary> {
        self.latency.figures()
    }

    pub(super) fn rate_per_s(&self) -> f64 {
        let count = self.latency.count() as f64;
        self.span.map_or(0.0, |(first, last)| {
            count * 1e9 / last.saturating_sub(first).max(1) as f64
        })
    }

    /// Every sample in ns, where they were kept; half round trips in a ping-pong.
    pub(super) fn samples_ns(&self) -> Option<Vec<f64>> {
        let share = match self.trip {
            Trip::Half => 0.5,
            Trip::Full => 1.0,
        };
        let kept = self.kept.as_ref()?;
        Some(kept.iter().map(|&ns| ns as f64 * share).collect())
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    #[test]
    fn samples_are_kept_in_order() {
        let mut recorder = LatencyRecorder::new(Trip::Half, TestLength::Iterations(3), true);
        recorder.start(100);
        for (began, ended) in [(100, 300), (300, 340), (400, 500)] {
            assert!(!recorder.is_over(began));
            recorder.record(began, ended);
        }
        let figures = recorder.figures().unwrap();
        assert_eq!(recorder.samples_ns(), Some(vec![100.0, 20.0, 50.0]));
        assert_eq!((figures.min, figures.max), (20.0, 100.0));
        assert_eq!(recorder.rate_per_s(), 3e9 / 400.0);
    }

    #[test]
    fn samples_that_touch_a_margin_do_not_count() {
        let length = TestLength::Duration {
            duration: Duration::from_nanos(1000),
            margin: Duration::from_nanos(100),
        };
        let mut recorder = LatencyRecorder::new(Trip::Full, length, false);
        recorder.start(5000);
        for (began, ended) in [
            (5000, 5090),
            (5090, 5110),
            (5110, 5200),
            (5200, 5890),
            (5890, 5910),
            (5910, 5990),
        ] {
            assert!(!recorder.is_over(ended));
            recorder.record(began, ended);
        }
        assert!(recorder.is_over(6000));
        let figures = recorder.figures().unwrap();
        assert_eq!((figures.count, figures.max, recorder.samples_ns()), (2, 690.0, None));
        assert_eq!(recorder.rate_per_s(), 2e9 / 780.0);
    }

    #[test]
    fn no_samples_give_no_latency() {
        let recorder = LatencyRecorder::new(Trip::Full, TestLength::Iterations(5), true);
        assert_eq!((recorder.figures(), recorder.rate_per_s()), (None, 0.0));
    }
}
