//! The loop of every bandwidth test: fills the send queues, polls completions and reposts receives.
//!
//! Each step posts lists, with one doorbell each, to every queue pair that has room for one, then
//! polls completions. It never allocates, formats or makes a system call of its own, and reads the
//! clock only with a rate limit.
//!
//! Selective signaling: one request in [`PostParams::signal_every`] is signaled. The interval is
//! short enough that a queue pair too full for another list always has a signaled request in
//! flight: the requests in flight are then at least window − list + 1.

use doorbell_verbs::QueueKind;

use super::receiver::Receiver;
use super::requester::{Message, Requester};
use super::test_end::{TestEnd, TestQp, completions};
use super::transport::TestTransport;
use crate::failure::{Failure, refused};
use crate::stats::{Clock, Pacer};

/// How a send queue is filled.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct PostParams {
    /// Messages per list.
    list: u32,
    /// Requests that end each list.
    extra: u32,
    depth: u32,
    /// Slots of the send queue for the requests of others.
    reserved: u32,
    signal_every: u32,
}

impl PostParams {
    /// For up to `window` messages in flight, lists of `list` messages and `extra` requests, and
    /// one signaled request in `cq_mod`.
    pub(crate) fn new(window: u32, list: u32, cq_mod: u32, extra: u32) -> PostParams {
        let window = window.max(1);
        let list = list.clamp(1, window);
        PostParams {
            list,
            extra,
            // Room for the extra requests of all lists in the window.
            depth: window + extra * window.div_ceil(list),
            reserved: 0,
            signal_every: cq_mod.clamp(1, window - list + 1),
        }
    }

    /// The same in a send queue that has so many more slots, which are not for these messages.
    pub(crate) fn reserving(self, slots: u32) -> PostParams {
        PostParams {
            reserved: slots,
            ..self
        }
    }

    /// The depth that the send queue must have, without reserved slots.
    pub(crate) fn depth(&self) -> u32 {
        self.depth
    }
}

/// The payloads of a list of messages that are sent inline.
#[derive(Debug)]
pub(crate) struct InlineList {
    bytes: Vec<u8>,
    len: usize,
    differ: bool,
}

impl InlineList {
    /// For messages of `len` bytes, which `differ` from one another or not.
    pub(crate) fn new(params: &PostParams, len: usize, differ: bool) -> InlineList {
        let messages = if differ { params.list as usize } else { 1 };
        InlineList {
            bytes: vec![0x5a; messages * len],
            len,
            differ,
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

#[derive(Debug)]
struct QpProgress {
    posted: u64,
    retired: u64,
    confirmed: u64,
    /// Messages to post in all.
    total: u64,
    unsignaled: u32,
    /// Messages posted before the schedule started.
    unpaced: u64,
}

/// The state of the loop. The messages of a queue pair are numbered from its first request on.
#[derive(Debug)]
// fields: the state of the hot loop, borrowed and counted separately
pub(crate) struct BwLoop<'a, T: TestTransport, F> {
    end: &'a mut TestEnd<T>,
    /// One per queue pair; none where this end does not send.
    requesters: &'a mut [F],
    /// One per queue pair, or one for all with a shared receive queue, or none where nothing
    /// arrives here.
    receivers: &'a mut [Receiver],
    progress: Vec<QpProgress>,
    params: PostParams,
    inline: Option<InlineList>,
    /// Whether to sleep on the completion channel instead of polling.
    sleeps: bool,
    confirm: bool,
    pacer: Option<Pacer>,
    /// Messages that `done` shall reach.
    target: u64,
    posted: u64,
    done: u64,
    received: u64,
}

impl<'a, T: TestTransport, F: Requester<T>> BwLoop<'a, T, F> {
    pub(crate) fn new(
        end: &'a mut TestEnd<T>,
        requesters: &'a mut [F],
        receivers: &'a mut [Receiver],
        params: PostParams,
        inline: Option<InlineList>,
        sleeps: bool,
    ) -> BwLoop<'a, T, F> {
        let progress = |test_qp: &TestQp<T>| {
            let posted = test_qp.qp.next_send();
            // Unsignaled requests of an earlier loop still hold their send queue slots.
            let left = u64::from(params.depth.saturating_sub(test_qp.qp.free_send_slots()));
            QpProgress {
                posted,
                retired: posted - left.min(posted),
                confirmed: 0,
                total: posted,
                unsignaled: 0,
                unpaced: 0,
            }
        };
        BwLoop {
            progress: end.qps.iter().take(requesters.len()).map(progress).collect(),
            confirm: requesters
                .first()
                .is_some_and(|requester| requester.confirmed().is_some()),
            end,
            requesters,
            receivers,
            params,
            inline,
            sleeps,
            pacer: None,
            target: 0,
            posted: 0,
            done: 0,
            received: 0,
        }
    }

    /// Messages that are done.
    #[inline]
    pub(crate) fn done(&self) -> u64 {
        self.done
    }

    #[inline]
    pub(crate) fn received(&self) -> u64 {
        self.received
    }

    /// The queue pairs with their receivers, where they have some.
    #[inline]
    pub(crate) fn parts(&mut self) -> impl Iterator<Item = (&mut TestQp<T>, Option<&Receiver>)> {
        let receivers = &*self.receivers;
        let qps = self.end.qps.iter_mut().enumerate();
        qps.map(|(index, test_qp)| (test_qp, receivers.get(index)))
    }

    /// Whether messages are posted and not done.
    pub(crate) fn is_in_flight(&self) -> bool {
        self.done < self.posted
    }

    /// Whether all messages so far added are done.
    #[inline]
    pub(crate) fn is_done(&self) -> bool {
        self.done >= self.target
    }

    /// The numbers of the next messages of the queue pairs.
    pub(crate) fn posted(&self) -> Vec<u64> {
        self.progress.iter().map(|qp| qp.posted).collect()
    }

    /// Adds messages to send on each queue pair, in place of those that are not posted yet.
    pub(crate) fn add(&mut self, messages: u64) {
        self.target = self.posted;
        for qp in &mut self.progress {
            qp.total = qp.posted.saturating_add(messages);
            self.target = self.target.saturating_add(qp.total - qp.posted);
        }
    }

    /// Posts no more than one list on each queue pair, so that the last request is signaled and
    /// confirms everything before it.
    pub(crate) fn end_by_list(&mut self) {
        self.pacer = None;
        self.add(self.params.list.into());
    }

    /// Posts from now on by a schedule, the bursts of which go to the queue pairs round-robin.
    pub(crate) fn pace(&mut self, pacer: Pacer) {
        self.pacer = Some(pacer);
        for qp in &mut self.progress {
            qp.unpaced = qp.posted;
        }
    }

    #[inline]
    pub(crate) fn is_paced(&self) -> bool {
        self.pacer.is_some()
    }

    /// Posts no more.
    pub(crate) fn stop(&mut self) {
        self.add(0);
    }

    /// Whether a signaled request is in flight.
    pub(crate) fn awaits_completion(&self) -> bool {
        // Requests that end lists, and those of others, are retired as well.
        let awaits = |qp: &QpProgress| qp.posted.saturating_sub(qp.retired) > u64::from(qp.unsignaled);
        self.progress.iter().any(awaits)
    }

    /// Posts what there is room for, and polls once. Returns whether anything is done or received.
    ///
    /// # Errors
    /// [`Failure::Test`] when a request failed or was refused, or data was wrong.
    #[inline]
    pub(crate) fn step(&mut self, clock: &Clock) -> Result<bool, Failure> {
        self.fill(clock)?;
        self.poll()
    }

    #[inline]
    fn fill(&mut self, clock: &Clock) -> Result<(), Failure> {
        let PostParams {
            list,
            extra,
            signal_every,
            reserved,
            ..
        } = self.params;
        let besides = u64::from(extra) + u64::from(reserved);
        let due = self.pacer.map(|pacer| (pacer, pacer.due_by(clock.now())));
        let qps = self.requesters.len();
        for (qp_index, ((test_qp, requester), progress)) in self
            .end
            .qps
            .iter_mut()
            .zip(&mut *self.requesters)
            .zip(&mut self.progress)
            .enumerate()
        {
            let paced = due.map_or(u64::MAX, |(pacer, due)| {
                progress.unpaced.saturating_add(pacer.share(due, qp_index, qps))
            });
            loop {
                let first = progress.posted;
                // Short lists only at the end, or where the peer's credits or the schedule are
                // short.
                let count = u64::from(list)
                    .min(progress.total - first)
                    .min(requester.allowance().min(paced).saturating_sub(first));
                if count == 0 || u64::from(test_qp.qp.free_send_slots()) < count + besides {
                    break;
                }
                let last = first + count;
                let ends = last == progress.total;
                if let Some(inline) = self.inline.as_mut().filter(|inline| inline.differ) {
                    for (index, payload) in (first..last).zip(inline.bytes.chunks_exact_mut(inline.len)) {
                        requester.payload(index, payload);
                    }
                }
                let inline = self.inline.as_ref();
                let posted = last.to_le_bytes();
                let mut unsignaled = progress.unsignaled;
                let mut signal = |ends: bool| {
                    unsignaled += 1;
                    let signal = unsignaled >= signal_every || ends;
                    if signal {
                        unsignaled = 0;
                    }
                    signal
                };
                let TestQp { qp, to, .. } = &mut *test_qp;
                let to = &*to;
                let result = qp.post(|batch| {
                    for index in first..last {
                        let message = Message {
                            to,
                            index,
                            inline: inline.and_then(|inline| inline.get(index - first)),
                            signal: signal(ends && extra == 0 && index + 1 == last),
                        };
                        requester.stage(batch, message);
                    }
                    if extra > 0 {
                        requester.end_list(batch, &posted, signal(ends));
                    }
                });
                result.map_err(|e| test_qp.refused(&e))?;
                progress.posted = last;
                progress.unsignaled = unsignaled;
                self.posted += count;
            }
        }
        Ok(())
    }

    /// Whether an event will end a sleep: with a rate limit, or where an end that only sends is
    /// short of credits, there may be something to post without one.
    #[inline(never)]
    fn has_event_to_come(&self) -> bool {
        self.pacer.is_none() && (!self.receivers.is_empty() || self.awaits_completion())
    }

    /// Polls completions once and reposts receives. Returns whether anything is done or received.
    ///
    /// # Errors
    /// [`Failure::Test`] when a request failed or was refused, or data was wrong.
    #[inline]
    pub(crate) fn poll(&mut self) -> Result<bool, Failure> {
        let (done, received) = (self.done, self.received);
        let sleeps = self.sleeps && self.has_event_to_come();
        let TestEnd { cq, qps, shared, .. } = &mut *self.end;
        for completion in completions(cq, sleeps)? {
            let index = usize::try_from(completion.tag()).unwrap_or(usize::MAX);
            if let Err(failure) = completion.check() {
                return Err(match qps.get(index) {
                    Some(test_qp) => test_qp.failed(&failure),
                    None => refused(failure),
                });
            }
            let result = if completion.queue() == QueueKind::Receive {
                self.received += 1;
                // Queue pairs with a shared receive queue share one receiver.
                let last = self.receivers.len().saturating_sub(1);
                match self.receivers.get_mut(index.min(last)) {
                    Some(receiver) => receiver.retire(completion),
                    None => Ok(()),
                }
            } else if let (Some(requester), Some(qp)) = (self.requesters.get_mut(index), self.progress.get_mut(index)) {
                let retired = completion.sequence() + 1;
                if retired > qp.retired {
                    if !self.confirm {
                        self.done += retired - qp.retired;
                    }
                    qp.retired = retired;
                }
                requester.retire(completion)
            } else {
                Ok(())
            };
            if let Err(error) = result {
                return Err(match qps.get(index) {
                    Some(test_qp) => error.into_failure(&test_qp.peer),
                    None => error.into_failure("the peer"),
                });
            }
        }
        for (test_qp, receiver) in qps.iter_mut().zip(&mut *self.receivers) {
            receiver.post(test_qp, shared.as_mut())?;
        }
        if self.confirm {
            self.count_confirmed();
        }
        Ok(self.done > done || self.received > received)
    }

    #[inline]
    fn count_confirmed(&mut self) {
        for (requester, qp) in self.requesters.iter().zip(&mut self.progress) {
            // A counter that the peer writes may hold anything.
            let confirmed = requester.confirmed().unwrap_or(0).min(qp.posted);
            if confirmed > qp.confirmed {
                self.done += confirmed - qp.confirmed;
                qp.confirmed = confirmed;
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_full_send_queue_always_has_a_completion_in_flight() {
        for window in [1, 2, 3, 16, 100, 128] {
            for list in [1, 2, 7, 64, 100, 128] {
                for cq_mod in [1, 50, 100, 128, 4096] {
                    for extra in [0, 1] {
                        let params = PostParams::new(window, list, cq_mod, extra);
                        let requests = params.list + extra;
                        assert!(params.list >= 1 && requests <= params.depth);
                        let in_flight_when_full = (window - params.list).min(params.depth - requests) + 1;
                        assert!((1..=in_flight_when_full).contains(&params.signal_every), "{params:?}");
                    }
                }
            }
        }
    }
}
