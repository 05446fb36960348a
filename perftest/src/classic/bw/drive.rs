//! The loop of every bandwidth test: fills the send queues, polls completions and reposts receives
//! until all messages are sent and received or the time is over.
//!
//! It never allocates, formats or makes a system call of its own. It reads the clock when a
//! timeline wants a record, and in timed or rate-limited tests once per iteration. Selective
//! signaling: one request in [`PostParams::signal_every`] is signaled, often enough that a queue
//! pair too full for another post list always has a completion in flight.

use std::time::Duration;

use doorbell_verbs::Queue;

use super::super::settings::{Length, Rate, Settings, Transport};
use super::super::spin::Spin;
use super::super::station::{Lane, Service, Station, refused};
use super::super::tool::Verb;
use super::super::wire::Watch;
use super::flow::{Arrivals, Flow};
use crate::failure::Failure;
use crate::stats::{Bandwidth, Clock, CpuMeter, Timeline};

/// Time limit for requests in flight when the test time is over; nothing is measured by then.
const DRAIN_NS: u64 = 200_000_000;
/// How long to wait for messages that may be lost, once nothing arrives any more.
const MISSING_NS: u64 = 2_000_000_000;
/// Longest wait for a completion event before the control connection is polled.
const LOOK: Duration = Duration::from_millis(50);

/// The result of one message size.
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
struct Pace {
    /// tx depth: the most requests in flight.
    depth: u32,
    /// Requests per post list.
    list: u32,
    /// cq_mod: one request in so many is signaled.
    signal_every: u32,
}

impl Pace {
    fn new(settings: &Settings) -> Pace {
        Pace::of(settings.tx_depth, settings.post_list, settings.cq_mod)
    }

    fn of(depth: u32, list: u32, cq_mod: u32) -> Pace {
        let depth = depth.max(1);
        let list = list.clamp(1, depth);
        Pace {
            depth,
            list,
            signal_every: cq_mod.clamp(1, depth - list + 1),
        }
    }
}

/// What one queue pair has sent.
#[derive(Debug, Default)]
struct Sent {
    posted: u64,
    retired: u64,
    /// Messages to post in all.
    limit: u64,
    unsignalled: u32,
}

/// The rate limiter of `--rate_limit`: bursts at even intervals.
#[derive(Clone, Copy, PartialEq, Debug)]
struct Allowance {
    /// ns from one burst to the next.
    interval_ns: f64,
    burst: u64,
    from_ns: u64,
    /// Messages posted before the limiter started.
    base: u64,
}

impl Allowance {
    fn new(rate: &Rate, bytes: u64, from_ns: u64, base: u64) -> Allowance {
        let per_s = if rate.per_message {
            rate.value
        } else {
            rate.value / bytes.max(1) as f64
        };
        let burst = u64::from(rate.burst.max(1));
        Allowance {
            interval_ns: 1e9 * burst as f64 / per_s.max(f64::MIN_POSITIVE),
            burst,
            from_ns,
            base,
        }
    }

    /// Messages that may have been posted at `now_ns`.
    fn by(&self, now_ns: u64) -> u64 {
        let bursts = (now_ns.saturating_sub(self.from_ns) as f64 / self.interval_ns) as u64;
        bursts
            .saturating_add(1)
            .saturating_mul(self.burst)
            .saturating_add(self.base)
    }
}

/// One message size of a running test.
pub(super) struct Drive<'a, T: Service, F> {
    settings: &'a Settings,
    station: &'a mut Station<T>,
    clock: &'a Clock,
    watch: Watch<'a>,
    bytes: u64,
    pace: Pace,
    /// The payload of messages sent inline.
    inline: Option<Vec<u8>>,
    /// One per queue pair; none where this end does not send.
    flows: Vec<F>,
    sent: Vec<Sent>,
    /// One per queue pair, or one for all with a shared receive queue, or none where nothing
    /// arrives here.
    arrivals: &'a mut [Arrivals],
    done: u64,
    posted: u64,
    allowed: u64,
    received: u64,
    spin: Spin,
    /// Since when the peer is done, or nothing arrives any more, while messages are missing.
    quiet_since: Option<u64>,
}

/// What one iteration of the loop found.
#[derive(Clone, Copy, Debug)]
struct Turn {
    /// Nothing has completed.
    idle: bool,
    /// The peer has sent its next control message.
    said: bool,
}

/// What is measured.
struct Measures {
    sent: Timeline,
    received: Timeline,
    /// Messages sent before the measurement.
    base: u64,
    cpu: CpuMeter,
}

impl<'a, T: Service, F: Flow<T>> Drive<'a, T, F> {
    /// Allocates what one size needs.
    ///
    /// # Errors
    /// [`Failure::Test`] when there is too little memory, or the device refuses.
    pub(super) fn new(
        settings: &'a Settings,
        station: &'a mut Station<T>,
        arrivals: &'a mut [Arrivals],
        bytes: u64,
        clock: &'a Clock,
        watch: Watch<'a>,
    ) -> Result<Self, Failure> {
        let sends = !settings.receives() || settings.bidirectional;
        let pace = Pace::new(settings);
        let flows: Vec<F> = (0..if sends { station.lanes.len() } else { 0 })
            .map(|lane| F::new(settings, station, lane, bytes, pace.depth))
            .collect::<Result<_, _>>()?;
        let has_inline = station.is_inline(bytes) && matches!(settings.tool.verb, Verb::Write | Verb::Send);
        Ok(Drive {
            settings,
            sent: station
                .lanes
                .iter()
                .take(flows.len())
                .map(|lane| {
                    let posted = lane.qp.next_send();
                    // Unsignaled requests of the previous size still hold their send queue slots.
                    let left = u64::from(pace.depth).saturating_sub(lane.qp.send_room().into());
                    Sent {
                        posted,
                        retired: posted - left.min(posted),
                        limit: posted,
                        unsignalled: 0,
                    }
                })
                .collect(),
            station,
            clock,
            watch,
            bytes,
            pace,
            inline: has_inline.then(|| vec![0x5a; usize::try_from(bytes).unwrap_or(0)]),
            flows,
            arrivals,
            done: 0,
            posted: 0,
            allowed: u64::MAX,
            received: 0,
            spin: Spin::default(),
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
        let in_flight = u64::from(self.pace.depth) * self.flows.len().max(1) as u64;
        let mut measures = Measures {
            sent: Timeline::new(in_flight),
            // The receiver sees up to one poll's worth of messages at once.
            received: Timeline::new(u64::from(self.settings.rx_depth).min(in_flight)),
            base: self.done,
            cpu: CpuMeter::default(),
        };
        let result = match self.settings.length {
            Length::Iterations(iterations) => self.messages(iterations, &mut measures),
            Length::Duration { duration, margin } => {
                self.time(nanoseconds(duration), nanoseconds(margin), &mut measures)
            }
        };
        measures.cpu.stop();
        let sent = measures.sent.bandwidth();
        let received = measures.received.bandwidth();
        outcome.iterations = match (self.settings.length, &sent, &received) {
            (Length::Duration { .. }, Some(figures), _) | (Length::Duration { .. }, None, Some(figures)) => {
                figures.messages
            }
            (Length::Duration { .. }, None, None) => 0,
            (Length::Iterations(_), _, _) if self.flows.is_empty() => self.received,
            (Length::Iterations(_), _, _) => self.done - measures.base,
        };
        (outcome.sent, outcome.received) = (sent, received);
        outcome.cpu = measures.cpu;
        result
    }

    /// Warm-up: one window of messages on each queue pair, all completed.
    fn warm_up(&mut self) -> Result<(), Failure> {
        let window = u64::from(self.pace.depth);
        self.raise(window);
        let total = window * self.flows.len() as u64;
        while self.done < total {
            self.turn()?;
        }
        Ok(())
    }

    /// Allows so many more messages on each queue pair.
    fn raise(&mut self, messages: u64) {
        for sent in &mut self.sent {
            sent.limit = sent.posted.saturating_add(messages);
        }
    }

    /// A number of messages each way.
    fn messages(&mut self, iterations: u64, measures: &mut Measures) -> Result<(), Failure> {
        let lanes = self.station.lanes.len() as u64;
        let total = iterations.saturating_mul(lanes);
        let to_send = self.done + if self.flows.is_empty() { 0 } else { total };
        let to_receive = if self.arrivals.is_empty() { 0 } else { total };
        let start = self.clock.now();
        self.raise(iterations);
        let rate = self.pacing(start);
        measures.cpu.start();
        measures.sent.start(start, self.done);
        let result = loop {
            if self.done >= to_send && self.received >= to_receive {
                break Ok(());
            }
            self.pay(rate.as_ref());
            if self.received == 0 && to_receive > 0 {
                measures.received.start(self.clock.now(), 0);
            }
            let turn = match self.turn() {
                Ok(turn) => turn,
                Err(failure) => break Err(failure),
            };
            measures.sent.note(self.clock, self.done);
            measures.received.note(self.clock, self.received);
            if !turn.idle || self.done < to_send {
                self.quiet_since = None;
            } else if self.is_quiet(turn.said) {
                break self.missing(to_receive);
            }
        };
        let end = self.clock.now();
        measures.sent.finish(end, self.done);
        measures.received.finish(end, self.received);
        result
    }

    /// A duration each way, of which `margin` at each end does not count.
    fn time(&mut self, duration: u64, margin: u64, measures: &mut Measures) -> Result<(), Failure> {
        let start = self.clock.now();
        self.raise(u64::MAX);
        let rate = self.pacing(start);
        let sends = !self.flows.is_empty();
        // An end that only receives counts from its first message, and until the peer is done.
        let mut began = sends.then_some(start);
        // Posting the first requests counts as well, since posting is what moves the data on some
        // devices.
        let mut measuring = sends && margin == 0;
        let mut measured = false;
        if measuring {
            self.begin(measures, start);
        }
        let result = loop {
            self.pay(rate.as_ref());
            let turn = match self.turn() {
                Ok(turn) => turn,
                Err(failure) => break Err(failure),
            };
            let now = self.clock.now();
            if began.is_none() && self.received > 0 {
                began = Some(now);
            }
            let elapsed = began.map_or(0, |began| now.saturating_sub(began));
            if !measuring && began.is_some() && elapsed >= margin {
                measuring = true;
                self.begin(measures, now);
            } else if measuring && !measured {
                measures.sent.note(self.clock, self.done);
                measures.received.note(self.clock, self.received);
                if elapsed >= duration - margin || (turn.said && !sends) {
                    measured = true;
                    measures.cpu.stop();
                    measures.sent.finish(now, self.done);
                    measures.received.finish(now, self.received);
                }
            }
            let over = if sends {
                elapsed >= duration
            } else {
                turn.said && turn.idle
            };
            if over {
                break Ok(());
            }
        };
        if measuring && !measured {
            let end = self.clock.now();
            measures.sent.finish(end, self.done);
            measures.received.finish(end, self.received);
        }
        result?;
        self.drain();
        Ok(())
    }

    /// Starts the measurement.
    fn begin(&self, measures: &mut Measures, now: u64) {
        measures.base = self.done;
        measures.cpu.start();
        measures.sent.start(now, self.done);
        measures.received.start(now, self.received);
    }

    /// Polls for what is still in flight, up to [`DRAIN_TIMEOUT_NS`]. None of it counts, so a
    /// failure does not matter.
    fn drain(&mut self) {
        for sent in &mut self.sent {
            sent.limit = sent.posted;
        }
        let end = self.clock.now() + DRAIN_NS;
        let open = |sent: &Sent| sent.posted - sent.retired > u64::from(sent.unsignalled);
        while self.sent.iter().any(open) && self.clock.now() < end {
            if self.turn().is_err() {
                return;
            }
        }
    }

    fn pacing(&self, now_ns: u64) -> Option<Allowance> {
        let rate = self.settings.rate.as_ref()?;
        Some(Allowance::new(rate, self.bytes, now_ns, self.posted))
    }

    /// Updates the number of messages that the rate limit allows by now.
    #[inline]
    fn pay(&mut self, rate: Option<&Allowance>) {
        if let Some(rate) = rate {
            self.allowed = rate.by(self.clock.now());
        }
    }

    /// Whether missing messages are given up: this end has sent all of its own, and nothing has
    /// arrived for [`MISSING_TIMEOUT_NS`].
    #[cold]
    fn is_quiet(&mut self, said: bool) -> bool {
        // A reliable connection delivers what is in flight as long as the peer is not done.
        let waits = said || (self.settings.transport != Transport::Rc && (self.received > 0 || !self.flows.is_empty()));
        if !waits {
            return false;
        }
        let now = self.clock.now();
        let since = *self.quiet_since.get_or_insert(now);
        now.saturating_sub(since) >= MISSING_NS
    }

    /// The result when messages are missing.
    #[cold]
    fn missing(&self, expected: u64) -> Result<(), Failure> {
        if self.settings.transport != Transport::Rc && self.received > 0 {
            // An unreliable transport may lose messages: only those that arrived count.
            return Ok(());
        }
        Err(Failure::test(format!(
            "the peer is done, and {} of {expected} messages of {} B have arrived: are both ends given the same options?",
            self.received, self.bytes
        )))
    }

    /// Fills the send queues, polls completions and the control connection.
    #[inline]
    fn turn(&mut self) -> Result<Turn, Failure> {
        self.fill()?;
        let (done, received) = (self.done, self.received);
        self.take()?;
        let idle = self.done == done && self.received == received;
        if idle {
            self.spin.nothing();
        } else {
            self.spin.found();
        }
        let said = self.watch.turn()?;
        Ok(Turn { idle, said })
    }

    /// Posts lists until the send queues are full.
    #[inline]
    fn fill(&mut self) -> Result<(), Failure> {
        let Pace {
            depth,
            list,
            signal_every,
        } = self.pace;
        let inline = self.inline.as_deref();
        for ((lane, flow), sent) in self.station.lanes.iter_mut().zip(&mut self.flows).zip(&mut self.sent) {
            loop {
                let count = u64::from(list)
                    .min(sent.limit - sent.posted)
                    .min(self.allowed - self.posted);
                if count == 0 || sent.posted - sent.retired + count > u64::from(depth) {
                    break;
                }
                let (first, last) = (sent.posted, sent.posted + count);
                let ends = last == sent.limit;
                let mut unsignalled = sent.unsignalled;
                let Lane { qp, to, .. } = &mut *lane;
                let to = &*to;
                let result = qp.post(|batch| {
                    for index in first..last {
                        unsignalled += 1;
                        let signal = unsignalled >= signal_every || (ends && index + 1 == last);
                        if signal {
                            unsignalled = 0;
                        }
                        flow.stage(batch, to, inline, index, signal);
                    }
                });
                result.map_err(|e| lane.refused(&e))?;
                sent.posted = last;
                sent.unsignalled = unsignalled;
                self.posted += count;
            }
        }
        Ok(())
    }

    /// Polls the completion queue, reclaims buffers and reposts receives.
    #[inline]
    fn take(&mut self) -> Result<(), Failure> {
        let Station { cq, lanes, shared, .. } = &mut *self.station;
        // With a rate limit there may be something to post without a completion.
        let sleeps = self.settings.events && self.settings.rate.is_none();
        let completions = if sleeps {
            cq.wait(LOOK).map_err(refused)?
        } else {
            cq.poll().map_err(refused)?
        };
        for completion in completions {
            let index = usize::try_from(completion.tag()).unwrap_or(usize::MAX);
            if let Err(failure) = completion.check() {
                return Err(match lanes.get(index) {
                    Some(lane) => lane.failed(&failure),
                    None => refused(failure),
                });
            }
            if completion.queue() == Queue::Receive {
                self.received += 1;
                // Queue pairs with a shared receive queue share one receiver.
                let last = self.arrivals.len().saturating_sub(1);
                if let Some(arrivals) = self.arrivals.get_mut(index.min(last)) {
                    arrivals.retire(completion);
                }
            } else if let (Some(flow), Some(sent)) = (self.flows.get_mut(index), self.sent.get_mut(index)) {
                let retired = completion.sequence() + 1;
                // A completion of the previous size does not count here.
                if retired > sent.retired {
                    self.done += retired - sent.retired;
                    sent.retired = retired;
                }
                flow.retire(completion);
            }
        }
        for (lane, arrivals) in lanes.iter_mut().zip(&mut *self.arrivals) {
            arrivals.post(lane, shared.as_mut())?;
        }
        if self.settings.cuda.is_some() {
            let sent = self.flows.iter_mut().find_map(Flow::failed);
            let failed = sent.or_else(|| self.arrivals.iter_mut().find_map(Arrivals::failed));
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
    fn a_full_lane_always_has_a_completion_on_its_way() {
        for depth in [1, 2, 3, 16, 100, 128] {
            for list in [1, 2, 7, 64, 100, 128] {
                for cq_mod in [1, 50, 100, 128, 4096] {
                    let pace = Pace::of(depth, list, cq_mod);
                    assert!((1..=depth).contains(&pace.list));
                    assert!((1..=depth - pace.list + 1).contains(&pace.signal_every), "{pace:?}");
                }
            }
        }
    }

    #[test]
    fn a_rate_allows_bursts_at_even_distances() {
        let rate = Rate {
            value: 1000.0,
            per_message: true,
            burst: 10,
        };
        let allowance = Allowance::new(&rate, 64, 500, 7);
        for (ms, allowed) in [(0, 10), (9, 10), (10, 20), (19, 20), (25, 30), (1000, 1010)] {
            assert_eq!(allowance.by(500 + ms * 1_000_000), 7 + allowed, "{ms}");
        }
        let bytes = Rate {
            value: 64_000.0,
            per_message: false,
            ..rate
        };
        assert_eq!(Allowance::new(&bytes, 64, 500, 7), allowance);
    }
}
