//! The client's loop of every bandwidth test.
//!
//! Each turn gives every lane that has room for a whole post list one, with one doorbell, then takes what has completed. Nothing in it
//! allocates, formats or makes a system call of its own; the clock is read when the timeline wants a record, and in timed tests once per
//! turn that finds completions.
//!
//! A completion is asked for once in [`Pace::signal_every`] requests. That interval is kept so short that a lane too full for another list
//! always has a completion on its way: the messages in flight are then at least window − list + 1.

use doorbell_verbs::{Batch, Completion};

use super::super::meter::Meter;
use super::super::pattern::Mismatch;
use super::super::station::{Lane, Own, Station, Test, Theirs, refused};
use super::super::watch::{Deadline, Watch};
use crate::exchange::ANSWER;
use crate::failure::Failure;
use crate::stats::{Clock, Pacer, Timeline};

/// The client's part of an operation, on one lane.
pub(crate) trait Flow: Own {
    /// Requests that [`Flow::end_list`] adds to each list.
    fn requests_per_list(test: &Test<'_>) -> u32;

    /// Takes what it needs from the other side's half of the lane.
    ///
    /// # Errors
    /// [`Failure::Test`] when the peer's keys are of no use.
    fn attach(&mut self, test: &Test<'_>, theirs: &Theirs) -> Result<(), Failure>;

    /// How many messages may have been posted in all by now, for the peer's sake.
    fn allowance(&self) -> u64;

    /// How many messages may be staged now, for want of buffers.
    fn free(&self) -> usize;

    /// Writes the payload of message `index`, where messages travel inline and differ.
    fn payload(&self, index: u64, into: &mut [u8]);

    /// Adds message `index` to a list, as long as there are free buffers; `inline` is its payload where messages travel inline.
    fn stage<'d>(&mut self, batch: &mut Batch<'_, 'd>, index: u64, inline: Option<&'d [u8]>, signal: bool);

    /// Ends a list; `posted` is the number of messages posted with it, little-endian.
    fn end_list<'d>(&mut self, batch: &mut Batch<'_, 'd>, posted: &'d [u8; 8], signal: bool);

    /// Takes a completed request's buffer back, and judges what is in it.
    ///
    /// # Errors
    /// The first wrong byte of a verified message.
    fn retire(&mut self, done: Completion<'_>) -> Result<(), Wrong>;

    /// How many messages are done, given how many requests have been retired.
    fn done(&self, retired: u64) -> u64;
}

/// Wrong data, as a flow finds it, or none.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(crate) enum Wrong {
    /// A wrong byte.
    Byte(Mismatch),
    /// An atomic that returned a wrong value.
    Value {
        /// Which on its queue pair, from 0.
        iteration: u64,
        /// What the word had to hold.
        expected: u64,
        /// What it held.
        found: u64,
    },
    /// A GPU that did not fill a message, or give it to be looked at: what it said.
    Gpu(String),
}

impl std::fmt::Display for Wrong {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Wrong::Byte(mismatch) => mismatch.fmt(f),
            Wrong::Gpu(said) => f.write_str(said),
            Wrong::Value {
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

/// By a timetable, a completion is asked for so often, in seconds, if there are messages.
const REPORT_WITHIN_S: f64 = 1e-3;

/// How a lane is filled.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct Pace {
    /// Messages per list.
    list: u32,
    /// Requests per full list.
    requests: u32,
    /// Requests in flight at most.
    depth: u32,
    /// A completion is asked for once in so many requests.
    signal_every: u32,
}

impl Pace {
    /// For a lane with a window of so many messages, whose lists end with `extra` requests.
    pub(crate) fn new(test: &Test<'_>, extra: u32) -> Pace {
        let window = test.window();
        // A window that memory made short is not to be empty each time before more is posted.
        let cq_mod = if window < test.plan.tx_depth {
            test.plan.cq_mod.min(window.div_ceil(2))
        } else {
            test.plan.cq_mod
        };
        // Messages that come one by one are not to wait for the completion of later ones.
        let cq_mod = match test.plan.rate_per_s {
            Some(rate) => cq_mod
                .min((rate * REPORT_WITHIN_S / f64::from(test.plan.qps)) as u32)
                .max(1),
            None => cq_mod,
        };
        Pace::of(window, test.plan.post_list, cq_mod, extra)
    }

    fn of(window: u32, post_list: u32, cq_mod: u32, extra: u32) -> Pace {
        let list = post_list.min(window);
        let requests = list + extra;
        // Room for the extra requests of as many lists as the window holds.
        let depth = window + extra * window.div_ceil(list);
        Pace {
            list,
            requests,
            depth,
            signal_every: cq_mod.clamp(1, window - list + 1),
        }
    }

    /// The send queue's depth.
    pub(crate) fn depth(&self) -> u32 {
        self.depth
    }
}

#[derive(Debug, Default)]
struct State {
    posted: u64,
    retired: u64,
    done: u64,
    /// Messages to post in all: known at the start, or when the time is over.
    total: u64,
    unsignalled: u32,
}

/// Runs the test at one size: the warm-up, to its last message, then what is measured. What was measured is in the meter even when it fails.
/// Returns the messages posted per lane.
///
/// # Errors
/// [`Failure::Interrupted`]; [`Failure::Test`] when data was wrong or the peer is lost.
pub(crate) fn run<F: Flow>(
    test: &Test<'_>,
    station: &mut Station<F>,
    meter: &mut Meter<'_, Timeline>,
) -> Result<Vec<u64>, Failure> {
    for lane in &mut station.lanes {
        lane.own.attach(test, &lane.theirs)?;
    }
    let pace = Pace::new(test, F::requests_per_list(test));
    let mut stream = Stream {
        states: station.lanes.iter().map(|_| State::default()).collect(),
        inline: InlineList::new(test, &pace),
        pace,
        watch: Watch::of_client(test.control),
        done: 0,
        clock: meter.clock,
        pacing: None,
        station,
    };
    let warmup = test.plan.warmup(test.bytes);
    stream.until(warmup, &mut Deadline::after(None), |_| {})?;
    let total = test
        .plan
        .iterations(test.bytes)
        .map_or(u64::MAX, |iterations| warmup.saturating_add(iterations));
    let mut deadline = Deadline::after(test.plan.duration());
    let now = meter.start(stream.done);
    deadline.start(now);
    stream.pacing = test.plan.rate_per_s.map(|rate| Pacing {
        timetable: Pacer::new(now, rate),
        before: warmup,
    });
    let (clock, timeline) = (meter.clock, &mut *meter.figures);
    let result = stream.until(total, &mut deadline, |done| timeline.note(clock, done));
    meter.finish(stream.done);
    result.map(|()| stream.states.iter().map(|state| state.posted).collect())
}

/// A test under way.
struct Stream<'a, F> {
    station: &'a mut Station<F>,
    states: Vec<State>,
    pace: Pace,
    inline: InlineList,
    watch: Watch<'a>,
    /// Messages done, on all lanes.
    done: u64,
    clock: &'a Clock,
    pacing: Option<Pacing>,
}

/// A timetable of all lanes' messages, dealt out in turn.
#[derive(Clone, Copy, Debug)]
struct Pacing {
    timetable: Pacer,
    /// Messages of each lane that were not by it.
    before: u64,
}

impl Pacing {
    /// How many messages a lane, of so many, may have posted when so many are due.
    #[inline]
    fn allowance(&self, due: u64, lane: usize, lanes: usize) -> u64 {
        let (lane, lanes) = (lane as u64, lanes as u64);
        self.before.saturating_add(due.saturating_sub(lane).div_ceil(lanes))
    }
}

impl<F: Flow> Stream<'_, F> {
    /// Goes on until every lane has done so many messages in all, or the deadline has passed and what was posted by then is done.
    fn until(&mut self, total: u64, deadline: &mut Deadline, mut note: impl FnMut(u64)) -> Result<(), Failure> {
        for state in &mut self.states {
            state.total = total;
        }
        let mut unfinished = self.states.iter().filter(|state| state.done < total).count();
        while unfinished > 0 {
            let lanes = self.states.len();
            let due = self
                .pacing
                .map(|pacing| (pacing, pacing.timetable.due_by(self.clock.now())));
            for (nth, (lane, state)) in self.station.lanes.iter_mut().zip(&mut self.states).enumerate() {
                let paced = due.map_or(u64::MAX, |(pacing, due)| pacing.allowance(due, nth, lanes));
                fill(lane, state, &self.pace, &mut self.inline, paced)?;
            }
            let before = self.done;
            unfinished -= self.take()?;
            if self.done == before {
                self.watch.idle()?;
                // By a timetable there may be nothing to wait for until after the end.
                if self.pacing.is_none() {
                    continue;
                }
            } else {
                self.watch.turn()?;
                note(self.done);
            }
            if deadline.is_over(self.clock) {
                *deadline = Deadline::after(None);
                self.pacing = None;
                for state in &mut self.states {
                    // One more list, so that the last request asks for a completion and everything before it is confirmed.
                    state.total = state.posted + u64::from(self.pace.list);
                }
            }
        }
        Ok(())
    }

    /// Takes what has completed. Returns how many lanes have finished with it.
    #[inline]
    fn take(&mut self) -> Result<usize, Failure> {
        let Station { cq, lanes } = &mut *self.station;
        for completion in cq.poll().map_err(refused)? {
            let Some((lane, state)) = lane_of(lanes, &mut self.states, completion.tag()) else {
                continue;
            };
            if let Err(failure) = completion.result() {
                return Err(lane.theirs.failed(&failure));
            }
            state.retired = completion.sequence() + 1;
            lane.own
                .retire(completion)
                .map_err(|wrong| Failure::test(format!("{}: {wrong}", lane.theirs)))?;
        }
        let mut finished = 0;
        for (lane, state) in lanes.iter().zip(&mut self.states) {
            // A counter that the peer writes may hold anything.
            let now_done = lane.own.done(state.retired).min(state.posted);
            if now_done > state.done {
                self.done += now_done - state.done;
                state.done = now_done;
                finished += usize::from(now_done == state.total);
            }
        }
        Ok(finished)
    }
}

fn lane_of<'a, F>(
    lanes: &'a mut [Lane<F>],
    states: &'a mut [State],
    tag: u64,
) -> Option<(&'a mut Lane<F>, &'a mut State)> {
    let index = usize::try_from(tag).ok()?;
    Some((lanes.get_mut(index)?, states.get_mut(index)?))
}

/// The payloads of one list, where messages travel inline.
#[derive(Debug)]
struct InlineList {
    /// Empty where they do not.
    bytes: Vec<u8>,
    /// Length of one.
    len: usize,
    /// Whether each is different.
    differ: bool,
}

impl InlineList {
    fn new(test: &Test<'_>, pace: &Pace) -> InlineList {
        let len = test.len();
        let messages = match (test.is_inline(), test.plan.verify) {
            (false, _) => 0,
            (true, false) => 1,
            (true, true) => pace.list as usize,
        };
        InlineList {
            bytes: vec![0x5a; messages * len],
            len,
            differ: test.plan.verify,
        }
    }

    /// The payload of the n-th message of a list.
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

/// Posts lists as long as there is room for them, up to `paced` messages in all.
#[inline]
fn fill<F: Flow>(
    lane: &mut Lane<F>,
    state: &mut State,
    pace: &Pace,
    inline: &mut InlineList,
    paced: u64,
) -> Result<(), Failure> {
    loop {
        let left = state.total - state.posted;
        let list = u64::from(pace.list)
            .min(left)
            .min(lane.own.allowance().min(paced).saturating_sub(state.posted));
        // Short lists only at the end, or where the peer has no room for more.
        if list == 0 || lane.qp.send_room() < pace.requests || lane.own.free() < pace.list as usize {
            return Ok(());
        }
        let Lane { qp, own, theirs } = lane;
        let (first, last) = (state.posted, state.posted + list);
        let mut unsignalled = state.unsignalled;
        let ends = last == state.total;
        if inline.differ {
            for (index, payload) in (first..last).zip(inline.bytes.chunks_exact_mut(inline.len)) {
                own.payload(index, payload);
            }
        }
        let posted = last.to_le_bytes();
        let result = qp.post(|batch| {
            let mut due = |ends: bool| {
                unsignalled += 1;
                let due = unsignalled >= pace.signal_every || ends;
                if due {
                    unsignalled = 0;
                }
                due
            };
            let counted = pace.requests > pace.list;
            for index in first..last {
                let signal = due(ends && !counted && index + 1 == last);
                own.stage(batch, index, inline.get(index - first), signal);
            }
            if counted {
                let signal = due(ends);
                own.end_list(batch, &posted, signal);
            }
        });
        result.map_err(|e| theirs.refused(&e))?;
        state.posted = last;
        state.unsignalled = unsignalled;
    }
}

/// How long the peer may take to look at the last messages.
pub(crate) const LAST_LOOK: std::time::Duration = ANSWER;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_timetable_is_dealt_out_in_turn() {
        let pacing = Pacing {
            timetable: Pacer::new(0, 1.0),
            before: 7,
        };
        for lanes in 1..5 {
            for due in 0..20 {
                let each: Vec<u64> = (0..lanes).map(|lane| pacing.allowance(due, lane, lanes) - 7).collect();
                assert_eq!(each.iter().sum::<u64>(), due);
                assert!(
                    each.is_sorted_by(|a, b| a >= b) && each[0] - each[lanes - 1] <= 1,
                    "{each:?}"
                );
            }
        }
    }

    #[test]
    fn a_full_lane_always_has_a_completion_on_its_way() {
        for window in [1, 2, 3, 16, 100, 128] {
            for list in [1, 2, 7, 64, 100, 128] {
                for cq_mod in [1, 50, 100, 128, 4096] {
                    for extra in [0, 1] {
                        let pace = Pace::of(window, list, cq_mod, extra);
                        assert!(pace.list >= 1 && pace.requests <= pace.depth);
                        let in_flight_when_full = (window - pace.list).min(pace.depth - pace.requests) + 1;
                        assert!((1..=in_flight_when_full).contains(&pace.signal_every), "{pace:?}");
                    }
                }
            }
        }
    }
}
