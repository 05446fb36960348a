//! The client of every bandwidth test: a warm-up, then a number of messages or a time.

use doorbell_verbs::ReliableConnection;

use super::super::meter::Meter;
use super::super::monitor::{Deadline, LoopMonitor};
use super::super::test_end::{QpMemory, Test, TestEnd};
use crate::engine::bw::{BwLoop, InlineList, PostParams};
use crate::engine::lat::Monitor;
use crate::engine::requester::Requester;
use crate::exchange::REPLY_TIMEOUT;
use crate::failure::Failure;
use crate::plan::{Kind, Verb};
use crate::stats::{Clock, Pacer};

/// With a rate limit, the longest interval in seconds between signaled requests, if there are
/// messages.
const REPORT_WITHIN_S: f64 = 1e-3;

/// How long the peer may take to check the last messages.
pub(crate) const DRAIN_TIMEOUT: std::time::Duration = REPLY_TIMEOUT;

/// Whether each list ends with a WRITE of the number of messages.
pub(crate) fn ends_with_count(test: &Test<'_>) -> bool {
    test.plan.verify && test.plan.kind == Kind::Bw && test.plan.verb == Verb::Write
}

/// How the client fills its send queues.
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

/// The warm-up ends with its last completion. The meter holds what was measured even when it fails.
/// Returns the messages posted per queue pair.
///
/// # Errors
/// [`Failure::Interrupted`]; [`Failure::Test`] when data was wrong or the peer is lost.
pub(crate) fn run<O>(
    test: &Test<'_>,
    test_end: &mut TestEnd<ReliableConnection, O>,
    meter: &mut Meter<'_>,
) -> Result<Vec<u64>, Failure>
where
    O: QpMemory<Connected: Requester<ReliableConnection>>,
{
    let (plan, params) = (test.plan, post_params(test));
    let inline = test
        .is_inline()
        .then(|| InlineList::new(&params, test.len(), test.plan.verify));
    let TestEnd { end, memory } = test_end;
    let mut client = Client {
        bw: BwLoop::new(end, memory, &mut [], params, inline, plan.events),
        monitor: LoopMonitor::of_client(test),
        clock: meter.clock,
    };
    client.bw.add(test.plan.warmup(test.bytes));
    client.finish(&mut Deadline::after(None), |_| {})?;
    client.bw.add(test.plan.iterations(test.bytes).unwrap_or(u64::MAX));
    let mut deadline = Deadline::after(test.plan.duration());
    let now = meter.start(client.bw.done());
    deadline.start(now);
    if let Some(rate) = test.plan.rate_per_s {
        client.bw.pace(Pacer::new(now, rate));
    }
    let (clock, timeline) = (meter.clock, &mut *meter.figures);
    let result = client.finish(&mut deadline, |done| timeline.note(clock, done));
    meter.finish(client.bw.done());
    result.map(|()| client.bw.posted())
}

struct Client<'a, F> {
    bw: BwLoop<'a, ReliableConnection, F>,
    monitor: LoopMonitor<'a>,
    clock: &'a Clock,
}

impl<F: Requester<ReliableConnection>> Client<'_, F> {
    /// Runs until all messages are done, or the deadline has passed and everything posted by then
    /// is done.
    fn finish(&mut self, deadline: &mut Deadline, mut note: impl FnMut(u64)) -> Result<(), Failure> {
        while !self.bw.is_done() {
            if self.bw.step(self.clock)? {
                self.monitor.busy()?;
                note(self.bw.done());
            } else {
                self.monitor.idle()?;
                // With a rate limit, nothing may complete until after the deadline.
                if !self.bw.is_paced() {
                    continue;
                }
            }
            if deadline.is_over(self.clock) {
                *deadline = Deadline::after(None);
                self.bw.end_by_list();
            }
        }
        Ok(())
    }
}
