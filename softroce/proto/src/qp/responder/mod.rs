//! The responder: executes requests in PSN order, each once (IBTA vol 1, 9.7.3 to 9.7.5).
//!
//! [`request`] classifies a packet by its PSN and executes it; [`replies`] queues ACKs, NAKs, RNR
//! NAKs and READ responses; [`transmit`] writes them; [`kept`] has packets that arrived after a
//! gap; [`unreliable`] serves UC and UD.

mod kept;
mod replies;
mod request;
mod transmit;
mod unreliable;

pub(crate) use unreliable::LocalFault;

use crate::memory::PdId;
use crate::outbox::Outbox;
use crate::qp::receive_queue::ReceiveQueue;
use crate::qp::responder::kept::KeptPackets;
use crate::qp::responder::replies::{Replies, ReplyKind};
use crate::qp::{Connection, Modify, QpInit, RemoteAccess};
use crate::srq::SharedQueue;
use crate::wire::{Nak, RnrTimer, XrcEth};
use crate::work::{Completion, CompletionOpcode, CqId, IpVersion, PostError, ReceiveRequest, SrqId, Status, XrcDomain};
use crate::{Psn, Qpn, RKey};

#[derive(Debug)]
// fields: grouped by blank lines: queue, limits, and the state of the next request
pub(crate) struct Responder {
    /// Its own receive queue, or the one receive that it holds of the shared receive queue.
    queue: ReceiveQueue,
    srq: Option<SrqId>,
    /// The protection domain of its receives: the SRQ's, if any (IBTA vol 1, 10.2.9).
    receive_pd: PdId,
    cq: CqId,
    /// XRC: whether the current request names no queue of the domain.
    is_unselected: bool,
    limits: Limits,

    expected: Psn,
    /// Message sequence number (MSN): messages completed, modulo 2^24.
    msn: u32,
    /// A NAK or RNR NAK was sent for the expected packet: no other NAK until it arrives.
    nak_sent: bool,
    message: InboundMessage,
    replies: Replies,
    atomic_replay: AtomicReplay,
    kept: KeptPackets,
}

#[derive(Clone, Copy, Debug, Default)]
struct Limits {
    access: RemoteAccess,
    max_dest_rd_atomic: usize,
    rnr_timer: u8,
}

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum InboundMessage {
    None,
    /// A SEND, of which `done` bytes are in the oldest receive.
    Send {
        done: u64,
    },
    Write(WriteTarget),
}

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
struct WriteTarget {
    rkey: RKey,
    addr: u64,
    left: u32,
    len: u32,
}

/// A request that cannot be executed: a NAK is sent and the queue pair enters the error state.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct FatalNak {
    pub(crate) nak: Nak,
    /// A receive completed with the error, so no asynchronous event is reported.
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

/// Results for duplicates (IBTA vol 1, 9.4.5 and 9.7.5.1.4), as many as may be outstanding.
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
            is_unselected: false,
            limits: Limits::default(),
            expected: Psn::new(0),
            msn: 0,
            nak_sent: false,
            message: InboundMessage::None,
            replies: Replies::default(),
            atomic_replay: AtomicReplay::default(),
            kept: KeptPackets::default(),
        }
    }

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

    pub(crate) fn start(&mut self, psn: Psn) {
        self.expected = psn;
    }

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

    /// Whether there is a receive for a new message: its own, or one now taken from the SRQ.
    fn has_receive(&mut self, out: &mut Outbox) -> bool {
        if let Some(srq) = self.srq
            && self.queue.len() == 0
        {
            return out.take_receive(srq, &mut self.queue);
        }
        self.queue.len() > 0
    }

    /// XRC: selects the queue that a request names, with its protection domain and CQ. One that is
    /// held for a message keeps its own.
    pub(crate) fn select_srq(&mut self, named: XrcEth, domain: XrcDomain, out: &Outbox) {
        let found = out.srqs.find_xrc(named, domain);
        self.is_unselected = found.is_none();
        if self.queue.len() > 0 {
            return;
        }
        self.srq = found.map(|(id, _, _)| id);
        if let Some((_, srq, cq)) = found {
            (self.receive_pd, self.cq) = (srq.pd(), cq);
            if !srq.fits(&self.queue) {
                self.queue = srq.holding_queue();
            }
        }
    }

    pub(crate) const fn receive_pd(&self) -> PdId {
        self.receive_pd
    }

    pub(crate) fn discard_receives_of(&mut self, srq: SrqId) {
        if self.srq == Some(srq) {
            self.queue.clear();
            self.srq = None;
        }
    }

    pub(crate) fn has_only_ack(&self) -> bool {
        self.replies.has_only_ack()
    }

    pub(crate) fn has_replies(&self) -> bool {
        !self.replies.is_empty()
    }

    /// Whether the next reply is a READ response.
    pub(crate) fn sends_data(&self) -> bool {
        self.replies.sends_data()
    }

    pub(crate) const fn expected_psn(&self) -> Psn {
        self.expected
    }

    pub(crate) fn flush(&mut self, connection: &Connection, out: &mut Outbox) {
        self.kept.clear(out);
        while self.complete(connection, Outcome::error(Status::Flushed), out) {}
    }

    pub(crate) fn clear_replies(&mut self) {
        self.replies.clear();
    }

    pub(crate) fn queue_fatal_nak(&mut self, nak: Nak, out: &mut Outbox) {
        let counter = match nak {
            Nak::RemoteAccess => &mut out.counters.remote_access_naks_sent,
            Nak::RemoteOperational => &mut out.counters.remote_operational_naks_sent,
            _ => &mut out.counters.invalid_request_naks_sent,
        };
        *counter += 1;
        self.replies.nak(self.expected, self.msn, ReplyKind::Nak(nak));
    }

    fn queue_rnr_nak(&mut self, out: &mut Outbox) {
        out.counters.rnr_naks_sent += 1;
        self.nak_sent = true;
        let timer = RnrTimer::from_code(self.limits.rnr_timer);
        self.replies.nak(self.expected, self.msn, ReplyKind::Rnr(timer));
    }

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
            src_qpn: outcome.datagram_from.map_or(connection.peer, |(qpn, _)| qpn),
            solicited: outcome.solicited,
            grh: outcome.datagram_from.map(|(_, version)| version),
        };
        out.complete(self.cq, completion);
        true
    }
}

#[derive(Clone, Copy, Debug)]
struct Outcome {
    status: Status,
    opcode: CompletionOpcode,
    byte_len: u32,
    imm: Option<u32>,
    invalidated: Option<RKey>,
    solicited: bool,
    /// UD: the sending queue pair; the payload is then preceded by an IP header of this version.
    datagram_from: Option<(Qpn, IpVersion)>,
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
