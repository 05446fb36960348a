//! The requester: sends what is in the send queue, and completes it by what comes back (IBTA vol 1, 9.7.2 to 9.7.8).
//!
//! Packets are numbered in 64 bits from the first PSN on, so that nothing here wraps: a PSN on the wire is the low 24 bits of one such number plus the
//! starting PSN. Three of them are the whole of the transmission state:
//!
//! ```text
//!            head            cursor          begun            tail      requests, oldest first
//!   ...done   |  acknowledged in part, on their way |  to come  |
//!                 una           next          max                       packets
//! ```
//!
//! `una` is the oldest one not acknowledged, `next` the one sent next, `max` the first never sent. Going back is `next = una`; what a READ has
//! received follows from `una` alone. [`transmit`] is the half that writes packets ([`short`] the commonest of them, when they are posted), [`response`] the half that reads the answers; [`unreliable`] writes those
//! of UC and UD, which have no answers; [`local`] carries out what needs no packets.

mod fast_path;
mod local;
mod response;
mod transmit;
mod unreliable;

use core::time::Duration;

use crate::outbox::Outbox;
use crate::qp::send_queue::{SendQueue, Wqe};
use crate::qp::{Connection, Modify, QpInit, ack_timeout};
use crate::work::{Completion, CqId, Destination, Operation, PostError, SendRequest, Status};
use crate::{Instant, Psn};

/// `rnr_retry` of this value tries for ever (IBTA vol 1, 9.7.5.2.8). `retry_cnt` has no such value.
const RNR_RETRY_INFINITE: u8 = 7;

/// An acknowledgement is asked for at least this often, in packets, and four times a window: by the time that it is used up, there shall be answers.
const ACK_REQ_INTERVAL: u32 = 64;
const ACK_REQS_PER_WINDOW: u32 = 4;

/// The requester of one queue pair.
#[derive(Debug)]
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
    /// The request that holds `next`.
    cursor: u64,
    /// The first request that has no sequence numbers yet.
    begun: u64,
    /// Packets that one READ request asks for at most. A responder sends them all at once, so a longer READ is asked for in parts, the next when one has
    /// come: that is its flow control, and keeps it within what our link can take.
    read_part: u64,
    /// READ requests (parts of READs) and atomics sent for the first time and not answered in full.
    rd_atomic_outstanding: u32,
    /// Packets since one asked for an acknowledgement.
    unacked_since_req: u32,
    /// The last packet of a request has gone out, and none since has asked: see [`is_quiet`](Self::is_quiet).
    ack_suppressed: bool,
    /// The number after that of the last local request that was carried out: it completes when those before it have been acknowledged.
    local_end: u64,

    retries_left: u8,
    rnr_retries_left: u8,
    /// We have already gone back to this one: what else says that it is missing was sent before that.
    recovering: Option<u64>,
    timer: Timer,
}

/// What the requester waits for.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Timer {
    /// Nothing with a time limit.
    Idle,
    /// An acknowledgement, until then.
    LocalAck(Instant),
    /// The peer to post a receive: silence until then.
    Rnr(Instant),
}

/// The attributes of the queue pair that matter here.
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
            ack_suppressed: false,
            local_end: 0,
            retries_left: 0,
            rnr_retries_left: 0,
            recovering: None,
            timer: Timer::Idle,
        }
    }

    /// Sets how many packets may be unacknowledged.
    pub(crate) fn set_window(&mut self, window: u32) {
        self.window = u64::from(window);
        self.ack_req_interval = (window / ACK_REQS_PER_WINDOW).clamp(1, ACK_REQ_INTERVAL);
        self.read_part = u64::from(window / 2).max(1);
    }

    /// Takes over attributes as they are set; what is being waited for counts from `now` again.
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

    /// Into RTS from RTR: the first packet has this PSN.
    pub(crate) fn start(&mut self, psn: Psn) {
        self.start = psn;
    }

    /// Forgets everything but the attributes.
    pub(crate) fn reset(&mut self) {
        self.queue.clear();
        self.una = 0;
        self.next = 0;
        self.max = 0;
        self.cursor = 0;
        self.begun = 0;
        self.rd_atomic_outstanding = 0;
        self.unacked_since_req = 0;
        self.ack_suppressed = false;
        self.local_end = 0;
        self.recovering = None;
        self.timer = Timer::Idle;
    }

    pub(crate) fn post(&mut self, request: &SendRequest<'_>) -> Result<(), PostError> {
        self.queue.post(request, self.signal_all)
    }

    /// Whether a request would be taken after `ahead` others.
    pub(crate) fn check_post(&self, request: &SendRequest<'_>, ahead: u32) -> Result<(), PostError> {
        self.queue.check_post(request, ahead)
    }

    /// The PSN of the next new packet.
    pub(crate) fn next_psn(&self) -> Psn {
        self.psn(self.max)
    }

    /// Whether requests that have begun are still going on.
    pub(crate) fn is_busy(&self) -> bool {
        self.queue.head < self.begun
    }

    /// Whether there are packets to send, now or when what it waits for has come.
    pub(crate) fn has_more(&self) -> bool {
        self.cursor < self.queue.tail
    }

    /// Where the next datagram goes.
    pub(crate) fn next_destination(&self) -> Option<Destination> {
        self.has_more().then(|| self.queue.destination(self.cursor)).flatten()
    }

    /// When [`handle_timeout`](Self::handle_timeout) is due.
    pub(crate) fn deadline(&self) -> Option<Instant> {
        match self.timer {
            Timer::Idle => None,
            Timer::LocalAck(at) | Timer::Rnr(at) => Some(at),
        }
    }

    /// The local ACK timeout, or the end of an RNR wait (IBTA vol 1, 9.7.6.1.3 and 9.7.5.2.8).
    ///
    /// # Errors
    /// The status with which the oldest request fails.
    pub(crate) fn handle_timeout(&mut self, now: Instant, out: &mut Outbox) -> Result<(), Status> {
        let timer = self.timer;
        match timer {
            Timer::Rnr(at) if at <= now => {
                self.restart_ack_timer(now);
                Ok(())
            }
            // Nobody was asked.
            Timer::LocalAck(at) if at <= now && self.request_ack() => {
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

    /// Whether the last packet of a request need not ask for an acknowledgement, as nobody waits for it: on a lane, which loses nothing, a request that is not signalled. An acknowledgement takes as long as a short message.
    /// It is asked for when somebody begins to wait, as long as there is plenty of room in the queue; otherwise when the local ACK timeout is over, so that a peer that is gone is noticed.
    fn may_suppress_ack(&self, wqe: &Wqe, connection: &Connection) -> bool {
        let waited_for = wqe.signalled || wqe.awaits_data() || self.local_end > self.queue.head;
        connection.shm_link.is_some() && !waited_for && !self.queue.is_half_full() && self.next == self.max
    }

    /// Sends the last packet again, to be acknowledged, if none has asked since the last request ended. False when there is nothing to ask for.
    pub(crate) fn request_ack(&mut self) -> bool {
        if !self.ack_suppressed || self.next != self.max || self.una == self.max {
            return false;
        }
        let last = self.max - 1;
        let holds = |number: &u64| {
            let wqe = self.queue.get(*number);
            (wqe.first..wqe.end()).contains(&last)
        };
        let Some(number) = (self.queue.head..self.begun).rev().find(holds) else {
            return false;
        };
        (self.next, self.cursor, self.ack_suppressed) = (last, number, false);
        true
    }

    /// Ends the oldest request with an error.
    pub(crate) fn fail(&mut self, status: Status, connection: &Connection, out: &mut Outbox) {
        if self.queue.head < self.queue.tail {
            self.complete(status, connection, out);
        }
    }

    /// Completes everything queued as flushed.
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
    }

    /// Completes the oldest request. An error always shows, success only when asked for (IBTA vol 1, 10.7.3.1).
    fn complete(&mut self, status: Status, connection: &Connection, out: &mut Outbox) {
        let wqe = self.queue.get(self.queue.head);
        if wqe.signalled || status != Status::Success {
            let completion = Completion {
                wr_id: wqe.wr_id,
                status,
                opcode: wqe.completion_opcode(),
                byte_len: wqe.len,
                imm: None,
                invalidated: None,
                qpn: connection.qpn,
                src_qpn: connection.peer,
                solicited: false,
                grh: false,
            };
            out.complete(self.cq, completion);
        }
        self.queue.head += 1;
    }

    /// The number after the part of a request that holds packet `number`: after the request, but for a long READ.
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

    /// The number of a packet by its PSN: within half the circle of `una`, `None` where that is before the first packet of all.
    fn number(&self, psn: Psn) -> Option<u64> {
        self.una.checked_add_signed(i64::from(psn.since(self.psn(self.una))))
    }

    /// Goes back to the oldest packet that is not acknowledged, if a retry is left.
    fn retry(&mut self, now: Instant) -> Result<(), Status> {
        self.retries_left = self.retries_left.checked_sub(1).ok_or(Status::RetryExceeded)?;
        self.go_back_n();
        self.restart_ack_timer(now);
        Ok(())
    }

    fn go_back_n(&mut self) {
        self.next = self.una;
        self.cursor = self.queue.head;
    }

    /// Starts the local ACK timer where something is on its way.
    fn restart_ack_timer(&mut self, now: Instant) {
        self.timer = match self.limits.timeout {
            Some(timeout) if self.una < self.max => Timer::LocalAck(now + timeout),
            _ => Timer::Idle,
        };
    }
}
