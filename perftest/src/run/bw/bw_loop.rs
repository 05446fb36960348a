//! The client's loop of every bandwidth test.
//!
//! Each iteration posts a list, with one doorbell, to every queue pair that has room for a whole
//! one, then polls completions. It never allocates, formats or makes a system call of its own; the
//! clock is read when the timeline wants a record, and in timed tests when completions are found.
//!
//! Selective signaling: one request in [`PostParams::signal_every`] is signaled. The interval is
//! short enough that a queue pair too full for another list always has a signaled request in
//! flight: the messages in flight are then at least window − list + 1.

use doorbell_verbs::{Batch, Completion};

use super::super::meter::Meter;
use super::super::monitor::{Deadline, LoopMonitor};
use super::super::pattern::Mismatch;
use super::super::test_end::{PeerQp, QpMemory, Test, TestEnd, TestQp};
use crate::exchange::REPLY_TIMEOUT;
use crate::failure::{Failure, refused};
use crate::stats::{Clock, Pacer, Timeline};

/// The client's part of an operation, on one queue pair.
pub(crate) trait BwRequester: QpMemory {
    /// Requests that [`BwRequester::end_list`] adds to each list.
    fn requests_per_list(test: &Test<'_>) -> u32;

    /// # Errors
    /// [`Failure::Test`] when the peer's keys are unusable.
    fn attach(&mut self, test: &Test<'_>, peer: &PeerQp) -> Result<(), Failure>;

    /// Messages that may have been posted in all by now, by the peer's credits.
    fn allowance(&self) -> u64;

    /// Messages that may be staged now, by the free buffers.
    fn free(&self) -> usize;

    /// Writes the payload of message `index`, where inline messages differ.
    fn payload(&self, index: u64, into: &mut [u8]);

    /// Adds message `index` to a list, as long as there are free buffers; `inline` is its payload
    /// where messages are sent inline.
    fn stage<'d>(&mut self, batch: &mut Batch<'_, 'd>, index: u64, inline: Option<&'d [u8]>, signal: bool);

    /// Ends a list; `posted` is the number of messages posted with it, little-endian.
    fn end_list<'d>(&mut self, batch: &mut Batch<'_, 'd>, posted: &'d [u8; 8], signal: bool);

    /// Reclaims the buffer of a completed request and checks its content.
    ///
    /// # Errors
    /// The first wrong byte of a verified message.
    fn retire(&mut self, done: Completion<'_>) -> Result<(), DataError>;

    fn done(&self, retired: u64) -> u64;
}

/// An error that a requester finds in the data.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(crate) enum DataError {
    Mismatch(Mismatch),
    /// An atomic that returned a wrong value.
    Value {
        /// Number of the atomic on its queue pair, from 0.
        iteration: u64,
        expected: u64,
        found: u64,
    },
    /// The GPU's error message, when it could not fill or read a message.
    Gpu(String),
}

impl std::fmt::Display for DataError {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            DataError::Mismatch(mismatch) => mismatch.fmt(f),
            DataError::Gpu(said) => f.write_str(said),
            DataError::Value {
                iteration,
                expected,
                found,
            } => {
                write!(
                    f,
                    "wrong data: size 8 B, iteration {iteration}, offset 0: expected {expected}, found {found}"
                )
            }
        }
    }
}

/// With a rate limit, the longest interval in seconds between signaled requests, if there are
/// messages.
const REPORT_WITHIN_S: f64 = 1e-3;

/// How a send queue is filled.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct PostParams {
    /// Messages per list.
    list: u32,
    requests: u32,
    depth: u32,
    signal_every: u32,
}

impl PostParams {
    /// For a queue pair whose lists end with `extra` requests.
    pub(crate) fn new(test: &Test<'_>, extra: u32) -> PostParams {
        let window = test.window();
        // A window shortened by the memory budget shall not drain completely before more is posted.
        let cq_mod = if window < test.plan.tx_depth {
            test.plan.cq_mod.min(window.div_ceil(2))
        } else {
            test.plan.cq_mod
        };
        // Rate-limited messages shall not wait for the completion of later ones.
        let cq_mod = match test.plan.rate_per_s {
            Some(rate) => cq_mod
                .min((rate * REPORT_WITHIN_S / f64::from(test.plan.qps)) as u32)
                .max(1),
            None => cq_mod,
        };
        PostParams::of(window, test.plan.post_list, cq_mod, extra)
    }

    fn of(window: u32, post_list: u32, cq_mod: u32, extra: u32) -> PostParams {
        let list = post_list.min(window);
        let requests = list + extra;
        // Room for the extra requests of all lists in the window.
        let depth = window + extra * window.div_ceil(list);
        PostParams {
            list,
            requests,
            depth,
            signal_every: cq_mod.clamp(1, window - list + 1),
        }
    }

    pub(crate) fn depth(&self) -> u32 {
        self.depth
    }
}

#[derive(Debug, Default)]
struct QpProgress {
    posted: u64,
    retired: u64,
    done: u64,
    /// Messages to post in all: known from the start, or when the time is over.
    total: u64,
    unsignaled: u32,
}

/// The warm-up ends with its last completion. The meter holds what was measured even when it fails.
/// Returns the messages posted per queue pair.
///
/// # Errors
/// [`Failure::Interrupted`]; [`Failure::Test`] when data was wrong or the peer is lost.
pub(crate) fn run<F: BwRequester>(
    test: &Test<'_>,
    test_end: &mut TestEnd<F>,
    meter: &mut Meter<'_, Timeline>,
) -> Result<Vec<u64>, Failure> {
    for test_qp in &mut test_end.qps {
        test_qp.memory.attach(test, &test_qp.peer)?;
    }
    let post_params = PostParams::new(test, F::requests_per_list(test));
    let mut bw_loop = BwLoop {
        states: test_end.qps.iter().map(|_| QpProgress::default()).collect(),
        inline: InlineList::new(test, &post_params),
        post_params,
        monitor: LoopMonitor::of_client(test),
        done: 0,
        clock: meter.clock,
        open_loop: None,
        test_end,
    };
    let warmup = test.plan.warmup(test.bytes);
    bw_loop.until(warmup, &mut Deadline::after(None), |_| {})?;
    let total = test
        .plan
        .iterations(test.bytes)
        .map_or(u64::MAX, |iterations| warmup.saturating_add(iterations));
    let mut deadline = Deadline::after(test.plan.duration());
    let now = meter.start(bw_loop.done);
    deadline.start(now);
    bw_loop.open_loop = test.plan.rate_per_s.map(|rate| OpenLoop {
        schedule: Pacer::new(now, rate),
        before: warmup,
    });
    let (clock, timeline) = (meter.clock, &mut *meter.figures);
    let result = bw_loop.until(total, &mut deadline, |done| timeline.note(clock, done));
    meter.finish(bw_loop.done);
    result.map(|()| bw_loop.states.iter().map(|state| state.posted).collect())
}

struct BwLoop<'a, F> {
    test_end: &'a mut TestEnd<F>,
    states: Vec<QpProgress>,
    post_params: PostParams,
    inline: InlineList,
    monitor: LoopMonitor<'a>,
    done: u64,
    clock: &'a Clock,
    open_loop: Option<OpenLoop>,
}

/// The open-loop schedule, dealt to the queue pairs round-robin.
#[derive(Clone, Copy, Debug)]
struct OpenLoop {
    schedule: Pacer,
    /// Messages of each queue pair posted before the schedule started.
    before: u64,
}

impl OpenLoop {
    /// Messages that queue pair `qp` of `qps` may have posted when `due` are due in all.
    #[inline]
    fn allowance(&self, due: u64, qp_index: usize, qps: usize) -> u64 {
        let (qp_index, qps) = (qp_index as u64, qps as u64);
        self.before.saturating_add(due.saturating_sub(qp_index).div_ceil(qps))
    }
}

impl<F: BwRequester> BwLoop<'_, F> {
    /// Runs until every queue pair has done `total` messages, or the deadline has passed and
    /// everything posted by then is done.
    fn until(&mut self, total: u64, deadline: &mut Deadline, mut note: impl FnMut(u64)) -> Result<(), Failure> {
        for state in &mut self.states {
            state.total = total;
        }
        let mut unfinished = self.states.iter().filter(|state| state.done < total).count();
        while unfinished > 0 {
            let qps = self.states.len();
            let due = self
                .open_loop
                .map(|open_loop| (open_loop, open_loop.schedule.due_by(self.clock.now())));
            for (nth, (test_qp, state)) in self.test_end.qps.iter_mut().zip(&mut self.states).enumerate() {
                let paced = due.map_or(u64::MAX, |(open_loop, due)| open_loop.allowance(due, nth, qps));
                fill(test_qp, state, &self.post_params, &mut self.inline, paced)?;
            }
            let before = self.done;
            unfinished -= self.take()?;
            if self.done == before {
                self.monitor.idle()?;
                // With a rate limit, nothing may complete until after the deadline.
                if self.open_loop.is_none() {
                    continue;
                }
            } else {
                self.monitor.busy()?;
                note(self.done);
            }
            if deadline.is_over(self.clock) {
                *deadline = Deadline::after(None);
                self.open_loop = None;
                for state in &mut self.states {
                    // One more list, so that the last request is signaled and confirms everything
                    // before it.
                    state.total = state.posted + u64::from(self.post_params.list);
                }
            }
        }
        Ok(())
    }

    /// Polls completions. Returns how many queue pairs have finished.
    #[inline]
    fn take(&mut self) -> Result<usize, Failure> {
        let TestEnd { cq, qps } = &mut *self.test_end;
        for completion in cq.poll().map_err(refused)? {
            let Some((test_qp, state)) = qp_of(qps, &mut self.states, completion.tag()) else {
                continue;
            };
            if let Err(failure) = completion.result() {
                return Err(test_qp.peer.failed(&failure));
            }
            state.retired = completion.sequence() + 1;
            test_qp
                .memory
                .retire(completion)
                .map_err(|wrong| Failure::test(format!("{}: {wrong}", test_qp.peer)))?;
        }
        let mut finished = 0;
        for (test_qp, state) in qps.iter().zip(&mut self.states) {
            // A counter that the peer writes may hold anything.
            let now_done = test_qp.memory.done(state.retired).min(state.posted);
            if now_done > state.done {
                self.done += now_done - state.done;
                state.done = now_done;
                finished += usize::from(now_done == state.total);
            }
        }
        Ok(finished)
    }
}

fn qp_of<'a, F>(
    qps: &'a mut [TestQp<F>],
    states: &'a mut [QpProgress],
    tag: u64,
) -> Option<(&'a mut TestQp<F>, &'a mut QpProgress)> {
    let index = usize::try_from(tag).ok()?;
    Some((qps.get_mut(index)?, states.get_mut(index)?))
}

#[derive(Debug)]
struct InlineList {
    bytes: Vec<u8>,
    len: usize,
    differ: bool,
}

impl InlineList {
    fn new(test: &Test<'_>, post_params: &PostParams) -> InlineList {
        let len = test.len();
        let messages = match (test.is_inline(), test.plan.verify) {
            (false, _) => 0,
            (true, false) => 1,
            (true, true) => post_params.list as usize,
        };
        InlineList {
            bytes: vec![0x5a; messages * len],
            len,
            differ: test.plan.verify,
        }
    }

    #[inline]
    fn get(&self, nth: u64) -> Option<&[u8]> {
        let at = if self.differ {
            usize::try_from(nth).ok()?.checked_mul(self.len)?
        } else {
            0
        };
        self.bytes.get(at..at + self.len)
    }
}

/// Posts lists until the send queue is full, up to `paced` messages in all.
#[inline]
fn fill<F: BwRequester>(
    test_qp: &mut TestQp<F>,
    state: &mut QpProgress,
    post_params: &PostParams,
    inline: &mut InlineList,
    paced: u64,
) -> Result<(), Failure> {
    loop {
        let left = state.total - state.posted;
        let list = u64::from(post_params.list)
            .min(left)
            .min(test_qp.memory.allowance().min(paced).saturating_sub(state.posted));
        // Short lists only at the end, or where the peer's credits are short.
        if list == 0
            || test_qp.qp.free_send_slots() < post_params.requests
            || test_qp.memory.free() < post_params.list as usize
        {
            return Ok(());
        }
        let TestQp { qp, memory, peer } = test_qp;
        let (first, last) = (state.posted, state.posted + list);
        let mut unsignaled = state.unsignaled;
        let ends = last == state.total;
        if inline.differ {
            for (index, payload) in (first..last).zip(inline.bytes.chunks_exact_mut(inline.len)) {
                memory.payload(index, payload);
            }
        }
        let posted = last.to_le_bytes();
        let result = qp.post(|batch| {
            let mut due = |ends: bool| {
                unsignaled += 1;
                let due = unsignaled >= post_params.signal_every || ends;
                if due {
                    unsignaled = 0;
                }
                due
            };
            let atomic_count = post_params.requests > post_params.list;
            for index in first..last {
                let signal = due(ends && !atomic_count && index + 1 == last);
                memory.stage(batch, index, inline.get(index - first), signal);
            }
            if atomic_count {
                let signal = due(ends);
                memory.end_list(batch, &posted, signal);
            }
        });
        result.map_err(|e| peer.refused(&e))?;
        state.posted = last;
        state.unsignaled = unsignaled;
    }
}

/// How long the peer may take to check the last messages.
pub(crate) const DRAIN_TIMEOUT: std::time::Duration = REPLY_TIMEOUT;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_open_loop_schedule_is_dealt_round_robin() {
        let open_loop = OpenLoop {
            schedule: Pacer::new(0, 1.0),
            before: 7,
        };
        for qps in 1..5 {
            for due in 0..20 {
                let each: Vec<u64> = (0..qps).map(|qp| open_loop.allowance(due, qp, qps) - 7).collect();
                assert_eq!(each.iter().sum::<u64>(), due);
                assert!(
                    each.is_sorted_by(|a, b| a >= b) && each[0] - each[qps - 1] <= 1,
                    "{each:?}"
                );
            }
        }
    }

    #[test]
    fn a_full_send_queue_always_has_a_completion_in_flight() {
        for window in [1, 2, 3, 16, 100, 128] {
            for list in [1, 2, 7, 64, 100, 128] {
                for cq_mod in [1, 50, 100, 128, 4096] {
                    for extra in [0, 1] {
                        let post_params = PostParams::of(window, list, cq_mod, extra);
                        assert!(post_params.list >= 1 && post_params.requests <= post_params.depth);
                        let in_flight_when_full =
                            (window - post_params.list).min(post_params.depth - post_params.requests) + 1;
                        assert!(
                            (1..=in_flight_when_full).contains(&post_params.signal_every),
                            "{post_params:?}"
                        );
                    }
                }
            }
        }
    }
}
