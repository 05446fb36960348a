//! The loop of every bandwidth test: fills the send queues, polls completions and reposts receives
//! until all messages are sent and received or the time is over.
//!
//! It never allocates, formats or makes a system call of its own. It reads the clock when a
//! timeline wants a record, and in timed or rate-limited tests once per iteration. Selective
//! signaling: one request in [`PostParams::signal_every`] is signaled, often enough that a queue
//! pair too full for another post list always has a completion in flight.

use std::time::Duration;

use doorbell_verbs::QueueKind;

use super::super::settings::{Rate, Settings, TestLength, Transport};
use super::super::spin_wait::SpinWait;
use super::super::test_end::{TestEnd, TestQp, TestTransport};
use super::super::tool::Verb;
use super::super::wire::PeerMonitor;
use super::requester::{Receiver, Requester};
use crate::failure::{Failure, refused};
use crate::stats::{Bandwidth, Clock, CpuMeter, Timeline};

/// Time limit for requests in flight when the test time is over; nothing is measured by then.
const DRAIN_TIMEOUT_NS: u64 = 200_000_000;
/// How long to wait for messages that may be lost, once nothing arrives any more.
const MISSING_TIMEOUT_NS: u64 = 2_000_000_000;
/// Longest wait for a completion event before the control connection is polled.
const EVENT_TIMEOUT: Duration = Duration::from_millis(50);

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

/// How a send queue is filled.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
struct PostParams {
    /// tx depth: the most requests in flight.
    depth: u32,
    /// Requests per post list.
    list: u32,
    /// cq_mod: one request in so many is signaled.
    signal_every: u32,
}

impl PostParams {
    fn new(settings: &Settings) -> PostParams {
        PostParams::of(settings.tx_depth, settings.post_list, settings.cq_mod)
    }

    fn of(depth: u32, list: u32, cq_mod: u32) -> PostParams {
        let depth = depth.max(1);
        let list = list.clamp(1, depth);
        PostParams {
            depth,
            list,
            signal_every: cq_mod.clamp(1, depth - list + 1),
        }
    }
}

#[derive(Debug, Default)]
struct SendProgress {
    posted: u64,
    retired: u64,
    /// Messages to post in all.
    limit: u64,
    unsignaled: u32,
}

/// The rate limiter of `--rate_limit`: bursts at even intervals.
#[derive(Clone, Copy, PartialEq, Debug)]
struct RateLimiter {
    /// ns from one burst to the next.
    interval_ns: f64,
    burst: u64,
    from_ns: u64,
    /// Messages posted before the limiter started.
    base: u64,
}

impl RateLimiter {
    fn new(rate: &Rate, bytes: u64, from_ns: u64, base: u64) -> RateLimiter {
        let per_s = if rate.per_message {
            rate.value
        } else {
            rate.value / bytes.max(1) as f64
        };
        let burst = u64::from(rate.burst.max(1));
        RateLimiter {
            interval_ns: 1e9 * burst as f64 / per_s.max(f64::MIN_POSITIVE),
            burst,
            from_ns,
            base,
        }
    }

    /// Messages that may have been posted at `now_ns`.
    fn allowed_at(&self, now_ns: u64) -> u64 {
        let bursts = (now_ns.saturating_sub(self.from_ns) as f64 / self.interval_ns) as u64;
        bursts
            .saturating_add(1)
            .saturating_mul(self.burst)
            .saturating_add(self.base)
    }
}

// fields: the state of the hot loop, borrowed and counted separately
pub(super) struct TestLoop<'a, T: TestTransport, F> {
    settings: &'a Settings,
    test_end: &'a mut TestEnd<T>,
    clock: &'a Clock,
    monitor: PeerMonitor<'a>,
    bytes: u64,
    post_params: PostParams,
    /// The payload of messages sent inline.
    inline: Option<Vec<u8>>,
    /// One per queue pair; none where this end does not send.
    requesters: Vec<F>,
    sent: Vec<SendProgress>,
    /// One per queue pair, or one for all with a shared receive queue, or none where nothing
    /// arrives here.
    receivers: &'a mut [Receiver],
    done: u64,
    posted: u64,
    allowed: u64,
    received: u64,
    spin: SpinWait,
    /// Since when the peer is done, or nothing arrives any more, while messages are missing.
    quiet_since: Option<u64>,
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

impl<'a, T: TestTransport, F: Requester<T>> TestLoop<'a, T, F> {
    pub(super) fn new(
        settings: &'a Settings,
        test_end: &'a mut TestEnd<T>,
        receivers: &'a mut [Receiver],
        bytes: u64,
        clock: &'a Clock,
        monitor: PeerMonitor<'a>,
    ) -> Result<Self, Failure> {
        let sends = !settings.receives() || settings.bidirectional;
        let post_params = PostParams::new(settings);
        let requesters: Vec<F> = (0..if sends { test_end.qps.len() } else { 0 })
            .map(|qp_index| F::new(settings, test_end, qp_index, bytes, post_params.depth))
            .collect::<Result<_, _>>()?;
        let has_inline = test_end.is_inline(bytes) && matches!(settings.tool.verb, Verb::Write | Verb::Send);
        Ok(TestLoop {
            settings,
            sent: test_end
                .qps
                .iter()
                .take(requesters.len())
                .map(|test_qp| {
                    let posted = test_qp.qp.next_send();
                    // Unsignaled requests of the previous size still hold their send queue slots.
                    let left = u64::from(post_params.depth).saturating_sub(test_qp.qp.free_send_slots().into());
                    SendProgress {
                        posted,
                        retired: posted - left.min(posted),
                        limit: posted,
                        unsignaled: 0,
                    }
                })
                .collect(),
            test_end,
            clock,
            monitor,
            bytes,
            post_params,
            inline: has_inline.then(|| vec![0x5a; usize::try_from(bytes).unwrap_or(0)]),
            requesters,
            receivers,
            done: 0,
            posted: 0,
            allowed: u64::MAX,
            received: 0,
            spin: SpinWait::default(),
            quiet_since: None,
        })
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
        let in_flight = u64::from(self.post_params.depth) * self.requesters.len().max(1) as u64;
        let mut measurement = Measurement {
            sent: Timeline::new(in_flight),
            // The receiver sees up to one poll's worth of messages at once.
            received: Timeline::new(u64::from(self.settings.rx_depth).min(in_flight)),
            base: self.done,
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
            (TestLength::Iterations(_), _, _) if self.requesters.is_empty() => self.received,
            (TestLength::Iterations(_), _, _) => self.done - measurement.base,
        };
        (outcome.sent, outcome.received) = (sent, received);
        outcome.cpu = measurement.cpu;
        result
    }

    /// Warm-up: one window of messages on each queue pair, all completed.
    fn warm_up(&mut self) -> Result<(), Failure> {
        let window = u64::from(self.post_params.depth);
        self.add_messages(window);
        let total = window * self.requesters.len() as u64;
        while self.done < total {
            self.poll_once()?;
        }
        Ok(())
    }

    fn add_messages(&mut self, messages: u64) {
        for sent in &mut self.sent {
            sent.limit = sent.posted.saturating_add(messages);
        }
    }

    /// A number of messages each way.
    fn run_iterations(&mut self, iterations: u64, measurement: &mut Measurement) -> Result<(), Failure> {
        let qps = self.test_end.qps.len() as u64;
        let total = iterations.saturating_mul(qps);
        let to_send = self.done + if self.requesters.is_empty() { 0 } else { total };
        let to_receive = if self.receivers.is_empty() { 0 } else { total };
        let start = self.clock.now();
        self.add_messages(iterations);
        let rate = self.rate_limiter(start);
        measurement.cpu.start();
        measurement.sent.start(start, self.done);
        let result = loop {
            if self.done >= to_send && self.received >= to_receive {
                break Ok(());
            }
            self.apply_rate_limit(rate.as_ref());
            if self.received == 0 && to_receive > 0 {
                measurement.received.start(self.clock.now(), 0);
            }
            let progress = match self.poll_once() {
                Ok(progress) => progress,
                Err(failure) => break Err(failure),
            };
            measurement.sent.note(self.clock, self.done);
            measurement.received.note(self.clock, self.received);
            if !progress.idle || self.done < to_send {
                self.quiet_since = None;
            } else if self.receive_timed_out(progress.peer_advanced) {
                break self.check_missing(to_receive);
            }
        };
        let end = self.clock.now();
        measurement.sent.finish(end, self.done);
        measurement.received.finish(end, self.received);
        result
    }

    /// A duration each way, of which `margin` at each end does not count.
    fn run_duration(&mut self, duration: u64, margin: u64, measurement: &mut Measurement) -> Result<(), Failure> {
        let start = self.clock.now();
        self.add_messages(u64::MAX);
        let rate = self.rate_limiter(start);
        let sends = !self.requesters.is_empty();
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
            self.apply_rate_limit(rate.as_ref());
            let progress = match self.poll_once() {
                Ok(progress) => progress,
                Err(failure) => break Err(failure),
            };
            let now = self.clock.now();
            if began.is_none() && self.received > 0 {
                began = Some(now);
            }
            let elapsed = began.map_or(0, |began| now.saturating_sub(began));
            if !measuring && began.is_some() && elapsed >= margin {
                measuring = true;
                self.start_measuring(measurement, now);
            } else if measuring && !measured {
                measurement.sent.note(self.clock, self.done);
                measurement.received.note(self.clock, self.received);
                if elapsed >= duration - margin || (progress.peer_advanced && !sends) {
                    measured = true;
                    measurement.cpu.stop();
                    measurement.sent.finish(now, self.done);
                    measurement.received.finish(now, self.received);
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
            measurement.sent.finish(end, self.done);
            measurement.received.finish(end, self.received);
        }
        result?;
        self.drain();
        Ok(())
    }

    fn start_measuring(&self, measurement: &mut Measurement, now: u64) {
        measurement.base = self.done;
        measurement.cpu.start();
        measurement.sent.start(now, self.done);
        measurement.received.start(now, self.received);
    }

    /// Polls for what is still in flight, up to [`DRAIN_TIMEOUT_NS`]. None of it counts, so a
    /// failure does not matter.
    fn drain(&mut self) {
        for sent in &mut self.sent {
            sent.limit = sent.posted;
        }
        let end = self.clock.now() + DRAIN_TIMEOUT_NS;
        let open = |sent: &SendProgress| sent.posted - sent.retired > u64::from(sent.unsignaled);
        while self.sent.iter().any(open) && self.clock.now() < end {
            if self.poll_once().is_err() {
                return;
            }
        }
    }

    fn rate_limiter(&self, now_ns: u64) -> Option<RateLimiter> {
        let rate = self.settings.rate.as_ref()?;
        Some(RateLimiter::new(rate, self.bytes, now_ns, self.posted))
    }

    /// Updates the number of messages that the rate limit allows by now.
    #[inline]
    fn apply_rate_limit(&mut self, rate: Option<&RateLimiter>) {
        if let Some(rate) = rate {
            self.allowed = rate.allowed_at(self.clock.now());
        }
    }

    /// Whether missing messages are given up: this end has sent all of its own, and nothing has
    /// arrived for [`MISSING_TIMEOUT_NS`].
    #[cold]
    fn receive_timed_out(&mut self, peer_advanced: bool) -> bool {
        // A reliable connection delivers what is in flight as long as the peer is not done.
        let waits = peer_advanced
            || (self.settings.transport != Transport::Rc && (self.received > 0 || !self.requesters.is_empty()));
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
        if self.settings.transport != Transport::Rc && self.received > 0 {
            // An unreliable transport may lose messages: only those that arrived count.
            return Ok(());
        }
        Err(Failure::test(format!(
            "the peer is done, and {} of {expected} messages of {} B have arrived: are both ends given the same options?",
            self.received, self.bytes
        )))
    }

    #[inline]
    fn poll_once(&mut self) -> Result<Progress, Failure> {
        self.post_sends()?;
        let (done, received) = (self.done, self.received);
        self.poll_completions()?;
        let idle = self.done == done && self.received == received;
        if idle {
            self.spin.idle();
        } else {
            self.spin.progress();
        }
        let peer_advanced = self.monitor.poll()?;
        Ok(Progress { idle, peer_advanced })
    }

    #[inline]
    fn post_sends(&mut self) -> Result<(), Failure> {
        let PostParams {
            depth,
            list,
            signal_every,
        } = self.post_params;
        let inline = self.inline.as_deref();
        for ((test_qp, requester), sent) in self
            .test_end
            .qps
            .iter_mut()
            .zip(&mut self.requesters)
            .zip(&mut self.sent)
        {
            loop {
                let count = u64::from(list)
                    .min(sent.limit - sent.posted)
                    .min(self.allowed - self.posted);
                if count == 0 || sent.posted - sent.retired + count > u64::from(depth) {
                    break;
                }
                let (first, last) = (sent.posted, sent.posted + count);
                let ends = last == sent.limit;
                let mut unsignaled = sent.unsignaled;
                let TestQp { qp, to, .. } = &mut *test_qp;
                let to = &*to;
                let result = qp.post(|batch| {
                    for index in first..last {
                        unsignaled += 1;
                        let signal = unsignaled >= signal_every || (ends && index + 1 == last);
                        if signal {
                            unsignaled = 0;
                        }
                        requester.stage(batch, to, inline, index, signal);
                    }
                });
                result.map_err(|e| test_qp.refused(&e))?;
                sent.posted = last;
                sent.unsignaled = unsignaled;
                self.posted += count;
            }
        }
        Ok(())
    }

    #[inline]
    fn poll_completions(&mut self) -> Result<(), Failure> {
        let TestEnd { cq, qps, shared, .. } = &mut *self.test_end;
        // With a rate limit there may be something to post without a completion.
        let sleeps = self.settings.events && self.settings.rate.is_none();
        let completions = if sleeps {
            cq.wait(EVENT_TIMEOUT).map_err(refused)?
        } else {
            cq.poll().map_err(refused)?
        };
        for completion in completions {
            let index = usize::try_from(completion.tag()).unwrap_or(usize::MAX);
            if let Err(failure) = completion.check() {
                return Err(match qps.get(index) {
                    Some(test_qp) => test_qp.failed(&failure),
                    None => refused(failure),
                });
            }
            if completion.queue() == QueueKind::Receive {
                self.received += 1;
                // Queue pairs with a shared receive queue share one receiver.
                let last = self.receivers.len().saturating_sub(1);
                if let Some(receiver) = self.receivers.get_mut(index.min(last)) {
                    receiver.retire(completion);
                }
            } else if let (Some(requester), Some(sent)) = (self.requesters.get_mut(index), self.sent.get_mut(index)) {
                let retired = completion.sequence() + 1;
                // A completion of the previous size does not count here.
                if retired > sent.retired {
                    self.done += retired - sent.retired;
                    sent.retired = retired;
                }
                requester.retire(completion);
            }
        }
        for (test_qp, receiver) in qps.iter_mut().zip(&mut *self.receivers) {
            receiver.post(test_qp, shared.as_mut())?;
        }
        if self.settings.cuda.is_some() {
            let sent = self.requesters.iter_mut().find_map(Requester::take_gpu_error);
            let failed = sent.or_else(|| self.receivers.iter_mut().find_map(Receiver::take_gpu_error));
            return failed.map_or(Ok(()), Err);
        }
        Ok(())
    }
}

fn nanoseconds(duration: Duration) -> u64 {
    u64::try_from(duration.as_nanos()).unwrap_or(u64::MAX)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_full_send_queue_always_has_a_completion_in_flight() {
        for depth in [1, 2, 3, 16, 100, 128] {
            for list in [1, 2, 7, 64, 100, 128] {
                for cq_mod in [1, 50, 100, 128, 4096] {
                    let post_params = PostParams::of(depth, list, cq_mod);
                    assert!((1..=depth).contains(&post_params.list));
                    assert!(
                        (1..=depth - post_params.list + 1).contains(&post_params.signal_every),
                        "{post_params:?}"
                    );
                }
            }
        }
    }

    #[test]
    fn a_rate_limiter_allows_bursts_at_even_intervals() {
        let rate = Rate {
            value: 1000.0,
            per_message: true,
            burst: 10,
        };
        let limiter = RateLimiter::new(&rate, 64, 500, 7);
        for (ms, allowed) in [(0, 10), (9, 10), (10, 20), (19, 20), (25, 30), (1000, 1010)] {
            assert_eq!(limiter.allowed_at(500 + ms * 1_000_000), 7 + allowed, "{ms}");
        }
        let bytes = Rate {
            value: 64_000.0,
            per_message: false,
            ..rate
        };
        assert_eq!(RateLimiter::new(&bytes, 64, 500, 7), limiter);
    }
}
