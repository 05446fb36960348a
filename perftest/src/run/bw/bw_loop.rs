//! One end of every bandwidth test. An end that sends has a warm-up, then a number of messages or a
//! time; an end that serves does so until its peer has finished.

use std::time::Instant;

use super::super::meter::{Arrivals, Meter};
use super::super::monitor::{Deadline, LoopMonitor};
use super::super::test_end::{QpMemory, Test, TestEnd};
use super::memory::{BwMemory, Served, Service, reserved};
use crate::engine::bw::{BwLoop, InlineList, PostParams};
use crate::engine::lat::{LoopState, Monitor};
use crate::engine::requester::Requester;
use crate::engine::transport::TestTransport;
use crate::exchange::{Finish, Message, Outcome, REPLY_TIMEOUT};
use crate::failure::Failure;
use crate::plan::{Kind, Verb};
use crate::stats::{Bandwidth, Pacer};

/// With a rate limit, the longest interval in seconds between signaled requests, if there are
/// messages.
const REPORT_WITHIN_S: f64 = 1e-3;

/// How long the peer may take to check the last messages.
const DRAIN_TIMEOUT: std::time::Duration = REPLY_TIMEOUT;

/// Whether each list ends with a WRITE of the number of messages.
pub(crate) fn ends_with_count(test: &Test<'_>) -> bool {
    test.plan.verify && test.plan.kind == Kind::Bw && test.plan.verb == Verb::Write
}

/// How an end that sends fills its send queues.
pub(crate) fn post_params(test: &Test<'_>) -> PostParams {
    let plan = test.plan;
    let window = test.window();
    // A window shortened by the memory budget shall not drain completely before more is posted.
    let cq_mod = if window < plan.tx_depth {
        plan.cq_mod.min(window.div_ceil(2))
    } else {
        plan.cq_mod
    };
    // Rate-limited messages shall not wait for the completion of later ones.
    let cq_mod = match plan.rate_per_s {
        Some(rate) => cq_mod.min((rate * REPORT_WITHIN_S / f64::from(plan.qps)) as u32),
        None => cq_mod,
    };
    let extra = u32::from(ends_with_count(test));
    PostParams::new(window, plan.post_list, cq_mod, extra)
}

/// What both ends of a test have measured and counted.
#[derive(Debug, Default)]
pub(crate) struct Ended {
    /// The figures that count, of all directions.
    pub(crate) figures: Option<Bandwidth>,
    /// Messages that have not arrived, where the receivers see that.
    pub(crate) lost: Option<u64>,
}

/// Runs one end of a test, to the outcomes that the ends exchange. The meter holds what was
/// measured even when it fails.
///
/// # Errors
/// [`Failure::Interrupted`]; [`Failure::Test`] when data was wrong or the peer is lost.
pub(crate) fn run<T, R, M, S>(
    test: &Test<'_>,
    test_end: &mut TestEnd<T, BwMemory<R, M>>,
    meter: &mut Meter<'_>,
) -> Result<Ended, Failure>
where
    T: TestTransport,
    R: QpMemory<Connected: Requester<T>>,
    M: QpMemory<Connected = Served<S>>,
    S: Service<T>,
{
    if !test.sends() && S::IS_PASSIVE {
        return wait::<T, _, S>(test, &test_end.memory).map(|()| Ended::default());
    }
    let TestEnd { end, memory } = test_end;
    let (requesters, served): (Vec<_>, Vec<_>) = std::mem::take(memory).into_iter().unzip();
    let mut requesters: Vec<R::Connected> = requesters.into_iter().flatten().collect();
    let (receivers, mut services): (Vec<_>, Vec<S>) = served.into_iter().flatten().unzip();
    let mut receivers: Vec<_> = receivers.into_iter().flatten().collect();
    let params = if test.sends() {
        post_params(test).reserving(reserved::<M>(test))
    } else {
        PostParams::new(1, 1, 1, 0)
    };
    let inline = (test.sends() && test.is_inline()).then(|| InlineList::new(&params, test.len(), test.plan.verify));
    let bw = BwLoop::new(end, &mut requesters, &mut receivers, params, inline, test.plan.events);
    let mut bw_end = BwEnd {
        test,
        bw,
        services: &mut services,
        monitor: LoopMonitor::new(test),
        arrivals: (test.serves() && test.counts_arrivals()).then(|| {
            let warmup = test.plan.warmup(test.bytes) * u64::from(test.plan.qps);
            Arrivals::new(test.clock, test.window(), warmup)
        }),
    };
    bw_end.run(meter)
}

/// A passive server, until its client has finished.
pub(crate) fn wait<T: TestTransport, R, S: Service<T>>(
    test: &Test<'_>,
    memory: &[(Option<R>, Option<Served<S>>)],
) -> Result<(), Failure> {
    match test.control.receive(None, "its finish")? {
        Message::Finish(_) => {}
        other => return Err(test.control.unexpected(&other, "finish")),
    }
    let served = memory.iter().filter_map(|(_, served)| served.as_ref());
    let messages = served.filter_map(|(_, service)| service.done()).collect();
    test.control.send(&Message::Outcome(Outcome {
        messages,
        ..Outcome::default()
    }))
}

/// Reports to the peer what this end has sent, and checks the peer's outcome.
///
/// # Errors
/// [`Failure::Test`] when the peer has other counts, or is lost.
pub(crate) fn conclude(test: &Test<'_>, sent: &[u64]) -> Result<(), Failure> {
    finish(test, sent)?;
    check_outcome(test, sent, &outcome(test)?)
}

fn finish(test: &Test<'_>, sent: &[u64]) -> Result<(), Failure> {
    let messages = sent.to_vec();
    test.control.send(&Message::Finish(Finish { messages }))
}

fn outcome(test: &Test<'_>) -> Result<Outcome, Failure> {
    match test
        .control
        .receive(Some(REPLY_TIMEOUT + REPLY_TIMEOUT), "its outcome")?
    {
        Message::Outcome(outcome) => Ok(outcome),
        other => Err(test.control.unexpected(&other, "outcome")),
    }
}

struct BwEnd<'a, T: TestTransport, F, S> {
    test: &'a Test<'a>,
    bw: BwLoop<'a, T, F>,
    /// One per queue pair; none where this end only sends.
    services: &'a mut [S],
    monitor: LoopMonitor<'a>,
    arrivals: Option<Arrivals>,
}

impl<T: TestTransport, F: Requester<T>, S: Service<T>> BwEnd<'_, T, F, S> {
    fn run(&mut self, meter: &mut Meter<'_>) -> Result<Ended, Failure> {
        let test = self.test;
        let mut sent = Vec::new();
        if test.sends() {
            sent = self.send(meter)?;
            finish(test, &sent)?;
        }
        let mut lost = None;
        let (mut ours, mut theirs) = (Outcome::default(), None);
        if test.serves() {
            let sent = self.serve()?;
            ours.messages = self.services.iter().filter_map(Service::done).collect();
            lost = test.counts_arrivals().then(|| missing(&sent, &ours.messages));
            ours.checked = if test.plan.verify { sum(&ours.messages) } else { 0 };
        }
        ours.measured = match &mut self.arrivals {
            Some(arrivals) => arrivals.bandwidth(),
            None if test.counts_arrivals() || !test.sends() => None,
            None => meter.figures.bandwidth(),
        };
        let measured = ours.measured;
        if test.serves() {
            test.control.send(&Message::Outcome(ours))?;
        }
        if test.sends() {
            let outcome = self.monitor.take_outcome().map_or_else(|| outcome(test), Ok)?;
            check_outcome(test, &sent, &outcome)?;
            if test.counts_arrivals() {
                lost = Some(lost.unwrap_or(0) + missing(&sent, &outcome.messages));
            }
            theirs = outcome.measured.filter(Bandwidth::is_plausible);
        }
        let figures = match (measured, theirs) {
            (Some(ours), Some(theirs)) => Some(ours.and(theirs)),
            // Only one end measures; of a test of two, both must have.
            (ours, theirs) if !test.plan.mode.bidirectional => ours.or(theirs),
            _ => None,
        };
        Ok(Ended { figures, lost })
    }

    /// The warm-up ends with its last completion. Returns the messages posted per queue pair.
    fn send(&mut self, meter: &mut Meter<'_>) -> Result<Vec<u64>, Failure> {
        let plan = self.test.plan;
        self.bw.add(plan.warmup(self.test.bytes));
        self.send_all(&mut Deadline::after(None), |_| {})?;
        self.bw.add(plan.iterations(self.test.bytes).unwrap_or(u64::MAX));
        let mut deadline = Deadline::after(plan.duration());
        let now = meter.start(self.bw.done());
        deadline.start(now);
        if let Some(rate) = plan.rate_per_s {
            self.bw.pace(Pacer::new(now, rate));
        }
        let result = self.send_all(&mut deadline, |done| meter.note(done));
        meter.finish(self.bw.done());
        result.map(|()| self.bw.posted())
    }

    /// Runs until all messages are done, or the deadline has passed and everything posted by then
    /// is done.
    fn send_all(&mut self, deadline: &mut Deadline, mut note: impl FnMut(u64)) -> Result<(), Failure> {
        while !self.bw.is_done() {
            match self.step()? {
                None => note(self.bw.done()),
                Some(state) => {
                    if state == LoopState::Quiet && !self.test.counts_arrivals() && self.bw.is_in_flight() {
                        return Err(self.lost());
                    }
                    // With a rate limit, nothing may complete until after the deadline.
                    if !self.bw.is_paced() {
                        continue;
                    }
                }
            }
            if deadline.is_over(self.test.clock) {
                *deadline = Deadline::after(None);
                self.bw.end_by_list();
            }
        }
        Ok(())
    }

    #[cold]
    fn lost(&self) -> Failure {
        Failure::test(format!(
            "peer {}: messages, or what it said of them, were lost: this transport repeats nothing",
            self.test.control.peer()
        ))
    }

    /// Polls once and takes what has arrived. Returns how the loop goes on where there was nothing.
    #[inline]
    fn step(&mut self) -> Result<Option<LoopState>, Failure> {
        let mut has_moved = self.bw.step(self.test.clock)?;
        let is_idle = !has_moved || self.test.plan.events;
        for ((test_qp, receiver), service) in self.bw.parts().zip(&mut *self.services) {
            has_moved |= service.step(self.test, test_qp, receiver, is_idle)?;
        }
        if let Some(arrivals) = &mut self.arrivals {
            arrivals.note(self.test.clock, self.bw.received());
        }
        if !has_moved {
            return self.monitor.idle().map(Some);
        }
        self.monitor.busy().map(|()| None)
    }

    /// Serves until the peer has finished and this end is done with all of its messages, as far as
    /// they are not lost. Returns what the peer has sent, per queue pair.
    fn serve(&mut self) -> Result<Vec<u64>, Failure> {
        let mut since = None;
        loop {
            let Some(state) = self.step()? else { continue };
            let Some(sent) = self.monitor.finished() else { continue };
            let is_done = |(service, sent): (&S, &u64)| service.is_done(*sent);
            let all = sent.len() == self.services.len() && self.services.iter().zip(sent).all(is_done);
            if all || (self.arrivals.is_some() && state == LoopState::Quiet) {
                return Ok(sent.to_vec());
            }
            // The last messages may still be in flight.
            if since.get_or_insert_with(Instant::now).elapsed() > DRAIN_TIMEOUT {
                let (peer, verb) = (self.test.control.peer(), self.test.plan.verb);
                let has_sent = if verb == Verb::Write { "wrote" } else { "sent" };
                return Err(Failure::test(format!("peer {peer}: not all it {has_sent} has arrived")));
            }
        }
    }
}

/// The sum of a peer's counts, which may be anything.
fn sum(counts: &[u64]) -> u64 {
    counts.iter().fold(0, |sum, count| sum.saturating_add(*count))
}

fn missing(sent: &[u64], arrived: &[u64]) -> u64 {
    sum(sent).saturating_sub(sum(arrived))
}

fn check_outcome(test: &Test<'_>, sent: &[u64], outcome: &Outcome) -> Result<(), Failure> {
    let is_seen = match (test.plan.verb, test.plan.kind) {
        (Verb::Atomic(_) | Verb::Send, _) | (Verb::Write, Kind::Lat) => true,
        (Verb::Write, Kind::Bw) => test.plan.verify,
        (Verb::Read, _) => false,
    };
    let arrived: &[u64] = if test.counts_arrivals() {
        &outcome.messages
    } else {
        sent
    };
    if is_seen && outcome.messages != arrived {
        return Err(Failure::test(format!(
            "wrong data: size {} B: {sent:?} messages sent per queue pair, the peer {} counts {:?}",
            test.bytes,
            test.control.peer(),
            outcome.messages
        )));
    }
    let is_checked = test.plan.verify && matches!(test.plan.verb, Verb::Write | Verb::Send);
    if is_checked && outcome.checked != sum(arrived) {
        return Err(Failure::test(format!(
            "not verified: size {} B: the peer {} has checked {} messages of {sent:?}",
            test.bytes,
            test.control.peer(),
            outcome.checked
        )));
    }
    Ok(())
}
