//! The requester: sends requests, completes them by their responses (IBTA vol 1, 9.7.2 to 9.7.8).
//!
//! Packets are numbered in 64 bits from the first PSN on, so nothing here wraps; a PSN is the low
//! 24 bits of the starting PSN plus that number. Three numbers are the state:
//!
//! ```text
//!            head            cursor          begun            tail      requests, oldest first
//!   ...done   |  partly acknowledged, in flight     |  queued   |
//!                 una           next          max                       packets
//! ```
//!
//! `una` is the oldest unacknowledged packet, `next` the next to send, `max` the first never sent.
//! Go-back-N retransmission is `next = una`; the progress of a READ follows from `una` alone.
//!
//! [`transmit`] writes packets and sets AckReq, [`fast_path`] the most frequent ones; [`response`]
//! handles responses, [`selective`] those that report what arrived after a gap, [`probe`] their
//! absence; [`unreliable`] sends for UC and UD; [`local`] executes local operations.

mod fast_path;
mod local;
mod probe;
mod response;
mod selective;
mod transmit;
mod unreliable;

use core::time::Duration;

use crate::outbox::Outbox;
use crate::qp::requester::probe::Probe;
use crate::qp::requester::selective::Holes;
use crate::qp::send_queue::{SendQueue, Wqe};
use crate::qp::{Connection, LinkProgress, Modify, QpInit, ack_timeout};
use crate::work::{Completion, CompletionOpcode, CqId, Destination, Operation, PostError, SendRequest, Status};
use crate::{Instant, Psn};

/// `rnr_retry` 7 retries indefinitely (IBTA vol 1, 9.7.5.2.8). `retry_cnt` has no such value.
const RNR_RETRY_INFINITE: u8 = 7;

/// Packets between AckReq bits: at most this, and a quarter of the window, so that it never fills.
const ACK_REQ_INTERVAL: u32 = 64;
const ACK_REQS_PER_WINDOW: u32 = 4;

#[derive(Debug)]
// fields: grouped by blank lines: configuration, transmission state, timers; all in the hot path
pub(crate) struct Requester {
    queue: SendQueue,
    cq: CqId,
    signal_all: bool,
    window: u64,
    ack_req_interval: u32,
    limits: Limits,

    start: Psn,
    una: u64,
    next: u64,
    max: u64,
    /// The request that contains `next`.
    cursor: u64,
    /// The first request that has no PSNs yet.
    begun: u64,
    /// Maximum packets of the response to one READ request. A longer READ is requested in parts,
    /// each after the previous one: its flow control, which bounds what the link must buffer.
    read_part: u64,
    /// READ requests (parts of READs) and atomics in flight, retransmissions not counted.
    rd_atomic_outstanding: u32,
    unacked_since_req: u32,
    /// One past the last packet with AckReq, or whose response is data. Up to `una`, no response is
    /// missing.
    ack_requested: u64,
    /// One past the last local request executed; it completes after those before it.
    local_end: u64,

    retries_left: u8,
    rnr_retries_left: u8,
    /// Go-back-N was already done for this packet: other evidence of the same loss is ignored.
    recovering: Option<u64>,
    /// Lossless link: packets sent on it when a timeout found some that the peer had not taken.
    undelivered: Option<u64>,
    timer: Timer,
    probe: Probe,
    holes: Holes,
}

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Timer {
    Idle,
    LocalAck(Instant),
    /// RNR NAK received: nothing is sent until then.
    Rnr(Instant),
}

#[derive(Clone, Copy, Debug, Default)]
struct Limits {
    timeout: Option<Duration>,
    retry_cnt: u8,
    rnr_retry: u8,
    max_rd_atomic: u32,
}

impl Requester {
    pub(crate) fn new(init: &QpInit, window: u32) -> Self {
        Self {
            queue: SendQueue::new(init),
            cq: init.send_cq,
            signal_all: init.signal_all,
            window: u64::from(window),
            ack_req_interval: (window / ACK_REQS_PER_WINDOW).clamp(1, ACK_REQ_INTERVAL),
            limits: Limits::default(),
            start: Psn::new(0),
            una: 0,
            next: 0,
            max: 0,
            cursor: 0,
            begun: 0,
            read_part: u64::from(window / 2).max(1),
            rd_atomic_outstanding: 0,
            unacked_since_req: 0,
            ack_requested: 0,
            local_end: 0,
            retries_left: 0,
            rnr_retries_left: 0,
            recovering: None,
            undelivered: None,
            timer: Timer::Idle,
            probe: Probe::default(),
            holes: Holes::default(),
        }
    }

    /// Whether it sends tail-loss probes; not on a lossless link.
    pub(crate) fn set_probes(&mut self, enabled: bool) {
        self.probe.set_enabled(enabled);
    }

    pub(crate) fn set_window(&mut self, window: u32) {
        self.window = u64::from(window);
        self.ack_req_interval = (window / ACK_REQS_PER_WINDOW).clamp(1, ACK_REQ_INTERVAL);
        self.read_part = u64::from(window / 2).max(1);
    }

    /// A smaller window; the parts of READs in flight keep their length.
    pub(crate) fn limit_window(&mut self, most: u64) {
        self.window = self.window.min(most);
    }

    /// Applies attributes; a running ACK timer restarts at `now`.
    pub(crate) fn configure(&mut self, now: Instant, set: &Modify) {
        self.limits = Limits {
            timeout: set.timeout.and_then(ack_timeout),
            retry_cnt: set.retry_cnt.unwrap_or(0),
            rnr_retry: set.rnr_retry.unwrap_or(0),
            max_rd_atomic: u32::from(set.max_rd_atomic.unwrap_or(0)),
        };
        self.retries_left = self.limits.retry_cnt;
        self.rnr_retries_left = self.limits.rnr_retry;
        if !matches!(self.timer, Timer::Rnr(_)) {
            self.restart_ack_timer(now);
        }
    }

    pub(crate) fn start(&mut self, psn: Psn) {
        self.start = psn;
    }

    pub(crate) fn reset(&mut self) {
        self.queue.clear();
        self.una = 0;
        self.next = 0;
        self.max = 0;
        self.cursor = 0;
        self.begun = 0;
        self.rd_atomic_outstanding = 0;
        self.unacked_since_req = 0;
        self.ack_requested = 0;
        self.local_end = 0;
        self.recovering = None;
        self.undelivered = None;
        self.timer = Timer::Idle;
        self.probe.reset();
        self.holes.clear();
    }

    pub(crate) fn post(&mut self, request: &SendRequest<'_>) -> Result<(), PostError> {
        self.queue.post(request, self.signal_all)
    }

    pub(crate) fn check_post(&self, request: &SendRequest<'_>, ahead: u32) -> Result<(), PostError> {
        self.queue.check_post(request, ahead).map(drop)
    }

    pub(crate) const fn first_psn(&self) -> Psn {
        self.start
    }

    pub(crate) fn next_psn(&self) -> Psn {
        self.psn(self.max)
    }

    /// The number of the oldest unacknowledged packet.
    pub(crate) const fn acked(&self) -> u64 {
        self.una
    }

    pub(crate) fn is_busy(&self) -> bool {
        self.queue.head < self.begun
    }

    pub(crate) fn has_more(&self) -> bool {
        self.cursor < self.queue.tail || self.resends()
    }

    /// Whether packets in flight are to be sent again, besides by go-back-N.
    fn resends(&self) -> bool {
        self.probe.is_pending() || !self.holes.is_empty()
    }

    pub(crate) fn next_destination(&self) -> Option<Destination> {
        self.has_more().then(|| self.queue.destination(self.cursor)).flatten()
    }

    pub(crate) fn deadline(&self) -> Option<Instant> {
        match self.timer {
            Timer::Idle => None,
            Timer::LocalAck(at) => Some(self.probe.deadline().map_or(at, |probe| probe.min(at))),
            Timer::Rnr(at) => Some(at),
        }
    }

    /// Local ACK timeout, end of an RNR wait (IBTA vol 1, 9.7.6.1.3 and 9.7.5.2.8), or a tail-loss
    /// probe. `link`: the progress of its lossless link.
    ///
    /// # Errors
    /// The status with which the oldest request fails.
    pub(crate) fn handle_timeout(
        &mut self,
        now: Instant,
        link: Option<LinkProgress>,
        out: &mut Outbox,
    ) -> Result<(), Status> {
        self.handle_probe_timeout(now);
        let timer = self.timer;
        match timer {
            Timer::Rnr(at) if at <= now => {
                self.restart_ack_timer(now);
                Ok(())
            }
            // No ACK was requested, so none is missing (IBTA vol 1, 9.7.6.1.3).
            Timer::LocalAck(at) if at <= now && self.ack_requested <= self.una => {
                self.request_ack();
                // Missing at the next timeout, even if the link has been full until then.
                self.ack_requested = self.una + 1;
                self.restart_ack_timer(now);
                Ok(())
            }
            Timer::LocalAck(at) if at <= now && link.is_some_and(|link| self.awaits_delivery(link)) => {
                self.restart_ack_timer(now);
                Ok(())
            }
            Timer::LocalAck(at) if at <= now => {
                out.counters.timeouts += 1;
                self.recovering = None;
                self.retry(now)
            }
            _ => Ok(()),
        }
    }

    /// Whether the peer's process may not have taken the packets in flight from the lossless link:
    /// it is stopped or slow, and nothing is lost. A timeout counts as a retry only after it has
    /// taken everything that was sent before the timeout that preceded.
    fn awaits_delivery(&mut self, link: LinkProgress) -> bool {
        let mark = *self.undelivered.get_or_insert(link.sent);
        let awaits = link.taken < mark;
        if !awaits {
            self.undelivered = None;
        }
        awaits
    }

    /// On a lossless link, an unsignaled request that nothing waits for goes without
    /// AckReq, as an ACK costs as much as a short message. The ACK is requested when something
    /// waits, when the send queue is half full, or at the local ACK timeout, to detect a dead peer.
    fn may_suppress_ack(&self, wqe: &Wqe, connection: &Connection) -> bool {
        let waited_for = wqe.signaled || wqe.awaits_data() || self.local_end > self.queue.head;
        connection.link.is_some() && !waited_for && !self.queue.is_half_full() && self.next == self.max
    }

    /// Admission: whether a packet may be sent now.
    #[inline]
    fn may_send(&self) -> bool {
        self.next - self.una < self.window && !matches!(self.timer, Timer::Rnr(_))
    }

    /// Whether a packet that takes `numbers` PSNs has AckReq; the last packet of a request (`ends`)
    /// unless its ACK is suppressed.
    #[inline]
    fn ack_request(&self, numbers: u64, ends: bool, suppress: bool) -> bool {
        let last_admitted = self.next + numbers - self.una >= self.window;
        ends && !suppress || last_admitted || self.unacked_since_req + 1 >= self.ack_req_interval
    }

    /// Packet `next` has been written. Whether it was a retransmission.
    #[inline]
    fn commit(&mut self, numbers: u64, ack_req: bool, awaits_data: bool) -> bool {
        self.unacked_since_req = if ack_req { 0 } else { self.unacked_since_req + 1 };
        let retransmission = self.next < self.max;
        self.next += numbers;
        if ack_req || awaits_data {
            self.ack_requested = self.ack_requested.max(self.next);
        }
        self.max = self.max.max(self.next);
        retransmission
    }

    /// Requests an ACK of what was sent, unless that is requested: with the next packet if there is
    /// one, otherwise by resending the last, which is true.
    pub(crate) fn request_ack(&mut self) -> bool {
        if self.ack_requested >= self.max || self.una == self.max {
            return false;
        }
        let last = self.max - 1;
        let number = (self.queue.head..self.begun)
            .rev()
            .find(|number| self.queue.get(*number).first <= last);
        match number {
            Some(number) if self.next == self.max && self.queue.get(number).end() == self.max => {
                (self.next, self.cursor) = (last, number);
                true
            }
            _ => {
                self.unacked_since_req = self.ack_req_interval;
                false
            }
        }
    }

    pub(crate) fn fail(&mut self, status: Status, connection: &Connection, out: &mut Outbox) {
        if self.queue.head < self.queue.tail {
            self.complete(status, connection, out);
        }
    }

    pub(crate) fn flush(&mut self, connection: &Connection, out: &mut Outbox) {
        while self.queue.head < self.queue.tail {
            self.complete(Status::Flushed, connection, out);
        }
        self.begun = self.queue.tail;
        self.cursor = self.queue.tail;
        self.una = self.max;
        self.next = self.max;
        self.rd_atomic_outstanding = 0;
        self.timer = Timer::Idle;
        self.probe.disarm();
        self.holes.clear();
    }

    /// Selective signaling: success is reported only if signaled (IBTA vol 1, 10.7.3.1).
    fn complete(&mut self, status: Status, connection: &Connection, out: &mut Outbox) {
        let wqe = self.queue.get(self.queue.head);
        if wqe.signaled || status != Status::Success {
            self.report(
                wqe.wr_id,
                status,
                wqe.operation.completion_opcode(),
                wqe.len,
                connection,
                out,
            );
        }
        self.queue.head += 1;
    }

    fn report(
        &self,
        wr_id: u64,
        status: Status,
        opcode: CompletionOpcode,
        len: u32,
        connection: &Connection,
        out: &mut Outbox,
    ) {
        let completion = Completion {
            wr_id,
            status,
            opcode,
            byte_len: len,
            imm: None,
            invalidated: None,
            qpn: connection.qpn,
            src_qpn: connection.peer,
            solicited: false,
            grh: None,
        };
        out.complete(self.cq, completion);
    }

    /// One past the last packet of the READ part, or other request, that contains packet `number`.
    fn part_end(&self, wqe: &Wqe, number: u64) -> u64 {
        match wqe.operation {
            Operation::Read { .. } => wqe
                .end()
                .min(number + self.read_part - (number - wqe.first) % self.read_part),
            _ => wqe.end(),
        }
    }

    fn psn(&self, number: u64) -> Psn {
        self.start.add(number as u32)
    }

    /// The packet number of a PSN within half the PSN space of `una`; `None` if negative.
    fn number(&self, psn: Psn) -> Option<u64> {
        self.una.checked_add_signed(i64::from(psn.since(self.psn(self.una))))
    }

    /// Go-back-N to the oldest unacknowledged packet, if a retry is left.
    fn retry(&mut self, now: Instant) -> Result<(), Status> {
        self.retries_left = self.retries_left.checked_sub(1).ok_or(Status::RetryExceeded)?;
        self.go_back_n();
        self.restart_ack_timer(now);
        Ok(())
    }

    fn go_back_n(&mut self) {
        self.next = self.una;
        self.cursor = self.queue.head;
        self.probe.discard_sample();
        self.holes.clear();
    }

    fn restart_ack_timer(&mut self, now: Instant) {
        match self.limits.timeout {
            Some(timeout) if self.una < self.max => {
                self.timer = Timer::LocalAck(now + timeout);
                if self.probe.is_enabled() {
                    self.probe.arm(now, timeout);
                }
            }
            _ => {
                self.timer = Timer::Idle;
                self.probe.disarm();
            }
        }
    }
}
