//! The order of a bandwidth test at one size: a number of messages or a time, each way.

use super::super::requester::{ClassicRequester, Context};
use super::super::settings::{Rate, Settings, TestLength, Transport};
use super::super::spin_wait::SpinWait;
use super::super::test_end::TestEnd;
use super::super::tool::Verb;
use super::super::wire::PeerMonitor;
use crate::engine::bw::{BwLoop, InlineList, PostParams};
use crate::engine::receiver::Receiver;
use crate::engine::transport::TestTransport;
use crate::failure::Failure;
use crate::stats::{Bandwidth, Clock, CpuMeter, Pacer, Timeline, nanoseconds};

/// Time limit for requests in flight when the test time is over; nothing is measured by then.
const DRAIN_TIMEOUT_NS: u64 = 200_000_000;
/// How long to wait for messages that may be lost, once nothing arrives any more.
const MISSING_TIMEOUT_NS: u64 = 2_000_000_000;

#[derive(Debug, Default)]
pub(super) struct Outcome {
    /// What this end sent, read or did atomics on.
    pub(super) sent: Option<Bandwidth>,
    /// What arrived here.
    pub(super) received: Option<Bandwidth>,
    /// Messages of this size in either direction, without warm-up and margins.
    pub(super) iterations: u64,
    /// CPU time of this process during the measurement.
    pub(super) cpu: CpuMeter,
}

// fields: the state of a measurement, counted by its loop
pub(super) struct TestLoop<'a, T: TestTransport, F> {
    settings: &'a Settings,
    bw: BwLoop<'a, T, F>,
    clock: &'a Clock,
    monitor: PeerMonitor<'a>,
    bytes: u64,
    qps: u64,
    depth: u64,
    sends: bool,
    receives: bool,
    spin: SpinWait,
    /// Since when the peer is done, or nothing arrives any more, while messages are missing.
    quiet_since: Option<u64>,
}

/// The requesters of this end: one per queue pair; none where it does not send.
pub(super) fn requesters<T: TestTransport, F: ClassicRequester<T>>(
    settings: &Settings,
    test_end: &TestEnd<T>,
    bytes: u64,
) -> Result<Vec<F>, Failure> {
    let sends = !settings.receives() || settings.bidirectional;
    let (cycle, window) = (test_end.cycle(bytes), settings.tx_depth.max(1));
    (0..if sends { test_end.links.len() } else { 0 })
        .map(|qp_index| {
            F::new(&Context {
                settings,
                test_end,
                qp_index,
                cycle,
                window,
            })
        })
        .collect()
}

/// What one iteration of the loop found.
#[derive(Clone, Copy, Debug)]
struct Progress {
    /// Nothing has completed.
    idle: bool,
    /// The peer has sent its next control message.
    peer_advanced: bool,
}

struct Measurement {
    sent: Timeline,
    received: Timeline,
    /// Messages sent before the measurement.
    base: u64,
    cpu: CpuMeter,
}

impl<'a, T: TestTransport, F: ClassicRequester<T>> TestLoop<'a, T, F> {
    pub(super) fn new(
        settings: &'a Settings,
        test_end: &'a mut TestEnd<T>,
        requesters: &'a mut [F],
        receivers: &'a mut [Receiver],
        bytes: u64,
        clock: &'a Clock,
        monitor: PeerMonitor<'a>,
    ) -> Self {
        let params = PostParams::new(settings.tx_depth, settings.post_list, settings.cq_mod, 0);
        let has_inline = test_end.is_inline(bytes) && matches!(settings.tool.verb, Verb::Write | Verb::Send);
        let inline = has_inline.then(|| InlineList::new(&params, usize::try_from(bytes).unwrap_or(0), false));
        TestLoop {
            settings,
            qps: test_end.links.len() as u64,
            depth: params.depth().into(),
            sends: !requesters.is_empty(),
            receives: !receivers.is_empty(),
            bw: BwLoop::new(
                &mut test_end.end,
                requesters,
                receivers,
                params,
                inline,
                settings.events,
            ),
            clock,
            monitor,
            bytes,
            spin: SpinWait::default(),
            quiet_since: None,
        }
    }

    /// Runs until the size is done. What was measured is in `outcome` even when it ends early.
    ///
    /// # Errors
    /// [`Failure::Interrupted`]; [`Failure::Test`] and [`Failure::Lost`] when a request failed or
    /// the peer is gone.
    pub(super) fn run(&mut self, outcome: &mut Outcome) -> Result<(), Failure> {
        if self.settings.warm_up && self.settings.tool.verb != Verb::Send {
            self.warm_up()?;
        }
        let in_flight = self.depth * if self.sends { self.qps } else { 1 };
        let mut measurement = Measurement {
            sent: Timeline::new(in_flight),
            // The receiver sees up to one poll's worth of messages at once.
            received: Timeline::new(u64::from(self.settings.rx_depth).min(in_flight)),
            base: self.bw.done(),
            cpu: CpuMeter::default(),
        };
        let result = match self.settings.length {
            TestLength::Iterations(iterations) => self.run_iterations(iterations, &mut measurement),
            TestLength::Duration { duration, margin } => {
                self.run_duration(nanoseconds(duration), nanoseconds(margin), &mut measurement)
            }
        };
        measurement.cpu.stop();
        let sent = measurement.sent.bandwidth();
        let received = measurement.received.bandwidth();
        outcome.iterations = match (self.settings.length, &sent, &received) {
            (TestLength::Duration { .. }, Some(figures), _) | (TestLength::Duration { .. }, None, Some(figures)) => {
                figures.messages
            }
            (TestLength::Duration { .. }, None, None) => 0,
            (TestLength::Iterations(_), _, _) if !self.sends => self.bw.received(),
            (TestLength::Iterations(_), _, _) => self.bw.done() - measurement.base,
        };
        (outcome.sent, outcome.received) = (sent, received);
        outcome.cpu = measurement.cpu;
        result
    }

    /// Warm-up: one window of messages on each queue pair, all completed.
    fn warm_up(&mut self) -> Result<(), Failure> {
        self.bw.add(self.depth);
        while !self.bw.is_done() {
            self.poll_once()?;
        }
        Ok(())
    }

    /// A number of messages each way.
    fn run_iterations(&mut self, iterations: u64, measurement: &mut Measurement) -> Result<(), Failure> {
        let to_receive = if self.receives {
            iterations.saturating_mul(self.qps)
        } else {
            0
        };
        let start = self.clock.now();
        self.bw.add(iterations);
        self.limit_rate(start);
        measurement.cpu.start();
        measurement.sent.start(start, self.bw.done());
        let result = loop {
            if self.bw.is_done() && self.bw.received() >= to_receive {
                break Ok(());
            }
            if self.bw.received() == 0 && to_receive > 0 {
                measurement.received.start(self.clock.now(), 0);
            }
            let progress = match self.poll_once() {
                Ok(progress) => progress,
                Err(failure) => break Err(failure),
            };
            measurement.sent.note(self.clock, self.bw.done());
            measurement.received.note(self.clock, self.bw.received());
            if !progress.idle || !self.bw.is_done() {
                self.quiet_since = None;
            } else if self.receive_timed_out(progress.peer_advanced) {
                break self.check_missing(to_receive);
            }
        };
        let end = self.clock.now();
        measurement.sent.finish(end, self.bw.done());
        measurement.received.finish(end, self.bw.received());
        result
    }

    /// A duration each way, of which `margin` at each end does not count.
    fn run_duration(&mut self, duration: u64, margin: u64, measurement: &mut Measurement) -> Result<(), Failure> {
        let start = self.clock.now();
        self.bw.add(u64::MAX);
        self.limit_rate(start);
        let sends = self.sends;
        // An end that only receives counts from its first message, and until the peer is done.
        let mut began = sends.then_some(start);
        // Posting the first requests counts as well, since posting is what moves the data on some
        // devices.
        let mut measuring = sends && margin == 0;
        let mut measured = false;
        if measuring {
            self.start_measuring(measurement, start);
        }
        let result = loop {
            let progress = match self.poll_once() {
                Ok(progress) => progress,
                Err(failure) => break Err(failure),
            };
            let now = self.clock.now();
            if began.is_none() && self.bw.received() > 0 {
                began = Some(now);
            }
            let elapsed = began.map_or(0, |began| now.saturating_sub(began));
            if !measuring && began.is_some() && elapsed >= margin {
                measuring = true;
                self.start_measuring(measurement, now);
            } else if measuring && !measured {
                measurement.sent.note(self.clock, self.bw.done());
                measurement.received.note(self.clock, self.bw.received());
                if elapsed >= duration - margin || (progress.peer_advanced && !sends) {
                    measured = true;
                    measurement.cpu.stop();
                    measurement.sent.finish(now, self.bw.done());
                    measurement.received.finish(now, self.bw.received());
                }
            }
            let over = if sends {
                elapsed >= duration
            } else {
                progress.peer_advanced && progress.idle
            };
            if over {
                break Ok(());
            }
        };
        if measuring && !measured {
            let end = self.clock.now();
            measurement.sent.finish(end, self.bw.done());
            measurement.received.finish(end, self.bw.received());
        }
        result?;
        self.drain();
        Ok(())
    }

    fn start_measuring(&self, measurement: &mut Measurement, now: u64) {
        measurement.base = self.bw.done();
        measurement.cpu.start();
        measurement.sent.start(now, self.bw.done());
        measurement.received.start(now, self.bw.received());
    }

    /// Polls for what is still in flight, up to [`DRAIN_TIMEOUT_NS`]. None of it counts, so a
    /// failure does not matter.
    fn drain(&mut self) {
        self.bw.stop();
        let end = self.clock.now() + DRAIN_TIMEOUT_NS;
        while self.bw.awaits_completion() && self.clock.now() < end {
            if self.poll_once().is_err() {
                return;
            }
        }
    }

    fn limit_rate(&mut self, now_ns: u64) {
        if let Some(rate) = &self.settings.rate {
            self.bw.pace(pacer(rate, self.bytes, now_ns));
        }
    }

    /// Whether missing messages are given up: this end has sent all of its own, and nothing has
    /// arrived for [`MISSING_TIMEOUT_NS`].
    #[cold]
    fn receive_timed_out(&mut self, peer_advanced: bool) -> bool {
        // A reliable connection delivers what is in flight as long as the peer is not done.
        let waits =
            peer_advanced || (self.settings.transport != Transport::Rc && (self.bw.received() > 0 || self.sends));
        if !waits {
            return false;
        }
        let now = self.clock.now();
        let since = *self.quiet_since.get_or_insert(now);
        now.saturating_sub(since) >= MISSING_TIMEOUT_NS
    }

    /// The result when messages are missing.
    #[cold]
    fn check_missing(&self, expected: u64) -> Result<(), Failure> {
        if self.settings.transport != Transport::Rc && self.bw.received() > 0 {
            // An unreliable transport may lose messages: only those that arrived count.
            return Ok(());
        }
        Err(Failure::test(format!(
            "the peer is done, and {} of {expected} messages of {} B have arrived: are both ends given the same options?",
            self.bw.received(),
            self.bytes
        )))
    }

    #[inline]
    fn poll_once(&mut self) -> Result<Progress, Failure> {
        let idle = !self.bw.step(self.clock)?;
        if idle {
            self.spin.idle();
        } else {
            self.spin.progress();
        }
        let peer_advanced = self.monitor.poll()?;
        Ok(Progress { idle, peer_advanced })
    }
}

/// The rate limiter of `--rate_limit`: bursts at even intervals.
fn pacer(rate: &Rate, bytes: u64, now_ns: u64) -> Pacer {
    let per_s = if rate.per_message {
        rate.value
    } else {
        rate.value / bytes.max(1) as f64
    };
    Pacer::in_bursts(now_ns, per_s, rate.burst)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_rate_counts_messages_or_bytes() {
        let rate = Rate {
            value: 1000.0,
            per_message: true,
            burst: 10,
        };
        let bytes = Rate {
            value: 64_000.0,
            per_message: false,
            ..rate
        };
        assert_eq!(pacer(&rate, 64, 500), Pacer::in_bursts(500, 1000.0, 10));
        assert_eq!(pacer(&bytes, 64, 500), Pacer::in_bursts(500, 1000.0, 10));
    }
}
