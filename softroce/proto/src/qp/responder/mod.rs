//! The responder: carries out the peer's requests in the order of their PSNs, each once, and answers (IBTA vol 1, 9.7.3 to 9.7.5).
//!
//! [`request`] decides what a packet is (next, gap or seen before) and carries it out; [`replies`] keeps what is to be said; [`transmit`] writes it. [`unreliable`] is what UC
//! and UD do instead.

mod replies;
mod request;
mod transmit;
mod unreliable;

pub(crate) use unreliable::LocalFault;

use crate::memory::PdId;
use crate::outbox::Outbox;
use crate::qp::receive_queue::ReceiveQueue;
use crate::qp::responder::replies::{Replies, ReplyKind};
use crate::qp::{Connection, Modify, QpInit, RemoteAccess};
use crate::srq::SharedQueue;
use crate::wire::{Nak, RnrTimer};
use crate::work::{Completion, CompletionOpcode, CqId, PostError, ReceiveRequest, SrqId, Status};
use crate::{Psn, Qpn, RKey};

/// The responder of one queue pair.
#[derive(Debug)]
pub(crate) struct Responder {
    /// Its own receives, or the one that it holds of the shared receive queue.
    queue: ReceiveQueue,
    srq: Option<SrqId>,
    /// The protection domain of its receives: a shared queue has one of its own (IBTA vol 1, 10.2.9).
    receive_pd: PdId,
    cq: CqId,
    limits: Limits,

    /// The PSN of the next request.
    expected: Psn,
    /// Messages completed, modulo 2^24.
    msn: u32,
    /// A NAK was sent for the packet expected: silence until it comes.
    nak_sent: bool,
    message: InboundMessage,
    replies: Replies,
    atomic_replay: AtomicReplay,
}

/// The attributes of the queue pair that matter here.
#[derive(Clone, Copy, Debug, Default)]
struct Limits {
    access: RemoteAccess,
    max_dest_rd_atomic: usize,
    rnr_timer: u8,
}

/// The message of several packets that is under way.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum InboundMessage {
    /// None: the next packet starts one.
    None,
    /// A SEND of which so many bytes are in the oldest receive.
    Send { done: u64 },
    /// A WRITE.
    Write(WriteTarget),
}

/// Where a WRITE goes on.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
struct WriteTarget {
    rkey: RKey,
    /// Where the next packet's bytes go.
    addr: u64,
    /// How many are to come.
    left: u32,
    /// The length of the whole.
    len: u32,
}

/// A request that cannot be carried out: the peer is told, and the queue pair goes into the error state.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct FatalNak {
    pub(crate) nak: Nak,
    /// A receive has completed with the error, so that no event is needed.
    pub(crate) reported: bool,
}

impl FatalNak {
    const INVALID_REQUEST: Self = Self {
        nak: Nak::InvalidRequest,
        reported: false,
    };
    const REMOTE_ACCESS: Self = Self {
        nak: Nak::RemoteAccess,
        reported: false,
    };
}

/// The results of the last atomics, for requests that come again (IBTA vol 1, 9.4.5 and 9.7.5.1.4): as many as the peer may have outstanding.
#[derive(Debug, Default)]
struct AtomicReplay {
    results: Vec<(Psn, u64)>,
    oldest: usize,
    depth: usize,
}

impl AtomicReplay {
    fn clear(&mut self, depth: usize) {
        self.results.clear();
        self.results.reserve(depth);
        self.oldest = 0;
        self.depth = depth;
    }

    fn store(&mut self, psn: Psn, original: u64) {
        if self.results.len() < self.depth {
            self.results.push((psn, original));
        } else if let Some(slot) = self.results.get_mut(self.oldest) {
            *slot = (psn, original);
            self.oldest = (self.oldest + 1) % self.depth;
        }
    }

    fn find(&self, psn: Psn) -> Option<u64> {
        self.results
            .iter()
            .find(|(at, _)| *at == psn)
            .map(|(_, original)| *original)
    }
}

impl Responder {
    pub(crate) fn new(init: &QpInit, srq: Option<&SharedQueue>) -> Self {
        Self {
            queue: srq.map_or_else(
                || ReceiveQueue::new(init.max_recv_wr, init.max_recv_sge),
                SharedQueue::holding_queue,
            ),
            srq: init.srq,
            receive_pd: srq.map_or(init.pd, SharedQueue::pd),
            cq: init.recv_cq,
            limits: Limits::default(),
            expected: Psn::new(0),
            msn: 0,
            nak_sent: false,
            message: InboundMessage::None,
            replies: Replies::default(),
            atomic_replay: AtomicReplay::default(),
        }
    }

    /// Takes over attributes as they are set.
    pub(crate) fn configure(&mut self, set: &Modify) {
        let depth = usize::from(set.max_dest_rd_atomic.unwrap_or(0));
        if depth != self.limits.max_dest_rd_atomic {
            self.replies.reserve(depth);
            self.atomic_replay.clear(depth);
        }
        self.limits = Limits {
            access: set.access.unwrap_or_default(),
            max_dest_rd_atomic: depth,
            rnr_timer: set.min_rnr_timer.unwrap_or(0),
        };
    }

    /// Into RTR: the first request has this PSN.
    pub(crate) fn start(&mut self, psn: Psn) {
        self.expected = psn;
    }

    /// Forgets everything but the attributes.
    pub(crate) fn reset(&mut self) {
        self.queue.clear();
        self.expected = Psn::new(0);
        self.msn = 0;
        self.nak_sent = false;
        self.message = InboundMessage::None;
        self.replies.clear();
        self.atomic_replay.clear(self.limits.max_dest_rd_atomic);
    }

    pub(crate) fn post(&mut self, request: &ReceiveRequest<'_>) -> Result<(), PostError> {
        self.queue.post(request)
    }

    /// Whether there is a receive for a message that begins: one of its own, or one that it takes of the shared queue and holds from now on.
    fn has_receive(&mut self, out: &mut Outbox) -> bool {
        if let Some(srq) = self.srq
            && self.queue.len() == 0
        {
            return out.take_receive(srq, &mut self.queue);
        }
        self.queue.len() > 0
    }

    /// Whether what it says next is an acknowledgement, behind which nothing waits.
    pub(crate) fn has_only_ack(&self) -> bool {
        self.replies.has_only_ack()
    }

    pub(crate) fn has_replies(&self) -> bool {
        !self.replies.is_empty()
    }

    pub(crate) const fn expected_psn(&self) -> Psn {
        self.expected
    }

    /// Completes everything queued as flushed.
    pub(crate) fn flush(&mut self, connection: &Connection, out: &mut Outbox) {
        while self.complete(connection, Outcome::error(Status::Flushed), out) {}
    }

    /// Says nothing more.
    pub(crate) fn clear_replies(&mut self) {
        self.replies.clear();
    }

    /// The last thing to be said before the error state.
    pub(crate) fn queue_fatal_nak(&mut self, nak: Nak, out: &mut Outbox) {
        let counter = match nak {
            Nak::RemoteAccess => &mut out.counters.remote_access_naks_sent,
            Nak::RemoteOperational => &mut out.counters.remote_operational_naks_sent,
            _ => &mut out.counters.invalid_request_naks_sent,
        };
        *counter += 1;
        self.replies.nak(self.expected, self.msn, ReplyKind::Nak(nak));
    }

    /// Asks the peer to wait until a receive is posted.
    fn queue_rnr_nak(&mut self, out: &mut Outbox) {
        out.counters.rnr_naks_sent += 1;
        self.nak_sent = true;
        let timer = RnrTimer::from_code(self.limits.rnr_timer);
        self.replies.nak(self.expected, self.msn, ReplyKind::Rnr(timer));
    }

    /// Completes the oldest receive; false when there is none.
    fn complete(&mut self, connection: &Connection, outcome: Outcome, out: &mut Outbox) -> bool {
        let Some(receive) = self.queue.pop() else {
            return false;
        };
        let completion = Completion {
            wr_id: receive.wr_id,
            status: outcome.status,
            opcode: outcome.opcode,
            byte_len: outcome.byte_len,
            imm: outcome.imm,
            invalidated: outcome.invalidated,
            qpn: connection.qpn,
            src_qpn: outcome.datagram_from.unwrap_or(connection.peer),
            solicited: outcome.solicited,
            grh: outcome.datagram_from.is_some(),
        };
        out.complete(self.cq, completion);
        true
    }
}

/// How a receive ends.
#[derive(Clone, Copy, Debug)]
struct Outcome {
    status: Status,
    opcode: CompletionOpcode,
    byte_len: u32,
    imm: Option<u32>,
    invalidated: Option<RKey>,
    solicited: bool,
    /// UD: the sender's queue pair. The IP header is in front then.
    datagram_from: Option<Qpn>,
}

impl Outcome {
    const fn error(status: Status) -> Self {
        Self {
            status,
            opcode: CompletionOpcode::Receive,
            byte_len: 0,
            imm: None,
            invalidated: None,
            solicited: false,
            datagram_from: None,
        }
    }
}
