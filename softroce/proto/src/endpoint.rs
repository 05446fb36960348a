//! All the queue pairs of one device, and the demultiplexing of datagrams to them.

use core::net::IpAddr;

use crate::memory::Memory;
use crate::qp::{Attributes, Modify, ModifyError, QpInit};
use crate::work::{Completion, CqId, PostError, ReceiveRequest, SendRequest};
use crate::{Instant, Qpn};

/// What the receiver knows of the IPv4 Identification of a datagram, which the ICRC covers.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Ident {
    /// Its value.
    Known(u16),
    /// A UDP socket does not tell; the datagram was number `segment` of its receive batch (0 unless coalesced).
    Unknown {
        /// Its place in a coalesced receive.
        segment: u16,
    },
}

/// A datagram that arrived on the RoCEv2 port, and what its IP and UDP headers said.
#[derive(Clone, Copy, Debug)]
pub struct Datagram<'a> {
    /// Source address.
    pub src: IpAddr,
    /// Destination address.
    pub dst: IpAddr,
    /// Source UDP port.
    pub src_port: u16,
    /// Destination UDP port.
    pub dst_port: u16,
    /// IPv4 Identification; ignored for IPv6.
    pub ident: Ident,
    /// The UDP payload: BTH up to and with the ICRC.
    pub payload: &'a [u8],
}

/// A packet to send.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Transmit {
    /// Source address.
    pub src: IpAddr,
    /// Destination address.
    pub dst: IpAddr,
    /// IPv4 TOS or IPv6 traffic class.
    pub traffic_class: u8,
    /// TTL or hop limit.
    pub hop_limit: u8,
    /// Its length in the buffer, the 4 bytes of the ICRC included, which are not yet filled in: whoever knows the Identification seals it.
    pub len: usize,
    /// Which queue pair sends it.
    pub qpn: Qpn,
}

/// What a device tells its owner unasked (ibv_get_async_event(3)).
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum AsyncEvent {
    /// IBV_EVENT_QP_FATAL: an error that no completion of its own reports put the queue pair into the error state.
    QpFatal(Qpn),
    /// IBV_EVENT_QP_REQ_ERR: the peer sent a malformed request.
    QpRequestError(Qpn),
    /// IBV_EVENT_QP_ACCESS_ERR: the peer's request was refused access.
    QpAccessError(Qpn),
    /// IBV_EVENT_COMM_EST: the first message came while still in RTR.
    CommunicationEstablished(Qpn),
    /// IBV_EVENT_SQ_DRAINED.
    SendQueueDrained(Qpn),
}

/// The protocol state of one device: its queue pairs.
///
/// Order of calls, as quinn-proto has it: after any of `post_*`, `modify`, `destroy_qp`, `handle_*`, drain `poll_completion` and
/// `poll_event`, call `poll_transmit` until it gives `None` (or the link is full), then ask `poll_timeout` when to call `handle_timeout`.
#[derive(Debug)]
pub struct Endpoint {}

impl Endpoint {
    /// An endpoint without queue pairs. `seed` chooses the first QP number, so that a restarted device does not reuse the old ones.
    pub fn new(seed: u64) -> Self {
        let _ = seed;
        Self {}
    }

    // Objects

    /// Creates a queue pair in [`State::Reset`](crate::qp::State::Reset).
    pub fn create_qp(&mut self, init: QpInit) -> Qpn {
        let _ = init;
        unimplemented!()
    }

    /// Changes attributes and state. Into RESET: everything queued is forgotten without completions. Into ERR: everything is flushed.
    ///
    /// # Errors
    /// When the table of ibv_modify_qp(3) refuses it; nothing changed then.
    pub fn modify_qp(&mut self, now: Instant, qpn: Qpn, modify: &Modify) -> Result<(), ModifyError> {
        let _ = (now, qpn, modify);
        unimplemented!()
    }

    /// The attributes, `None` for an unknown queue pair.
    pub fn query_qp(&self, qpn: Qpn) -> Option<Attributes> {
        let _ = qpn;
        unimplemented!()
    }

    /// Forgets a queue pair and what is queued on it, without completions; false when there is none.
    pub fn destroy_qp(&mut self, qpn: Qpn) -> bool {
        let _ = qpn;
        unimplemented!()
    }

    // Work

    /// Queues a send request.
    ///
    /// # Errors
    /// When it is refused; nothing was queued.
    pub fn post_send(&mut self, now: Instant, qpn: Qpn, request: &SendRequest<'_>) -> Result<(), PostError> {
        let _ = (now, qpn, request);
        unimplemented!()
    }

    /// Queues a receive request.
    ///
    /// # Errors
    /// When it is refused; nothing was queued.
    pub fn post_receive(&mut self, qpn: Qpn, request: &ReceiveRequest<'_>) -> Result<(), PostError> {
        let _ = (qpn, request);
        unimplemented!()
    }

    // Wire and time

    /// Takes a datagram from the wire. Anything may be in it: what is malformed, fails its ICRC, or belongs to no queue pair changes nothing but counters.
    pub fn handle_datagram<M: Memory>(&mut self, now: Instant, datagram: &Datagram<'_>, memory: &mut M) {
        let _ = (now, datagram, memory);
        unimplemented!()
    }

    /// Does what is due at `now`: retransmission, RNR waits, delayed acknowledgements.
    pub fn handle_timeout(&mut self, now: Instant) {
        let _ = now;
        unimplemented!()
    }

    /// Writes the next packet into `buf`, which has room for 4096 + 128 bytes at least, up to the ICRC; `None` when nothing is to be sent.
    ///
    /// Consecutive packets of one message are given one after another, so that runs of equal size can be batched.
    pub fn poll_transmit<M: Memory>(&mut self, now: Instant, memory: &mut M, buf: &mut [u8]) -> Option<Transmit> {
        let _ = (now, memory, buf);
        unimplemented!()
    }

    /// When to call [`handle_timeout`](Self::handle_timeout) next.
    pub fn poll_timeout(&self) -> Option<Instant> {
        unimplemented!()
    }

    /// The next work completion, in the order in which the requests of a queue complete.
    pub fn poll_completion(&mut self) -> Option<(CqId, Completion)> {
        unimplemented!()
    }

    /// The next asynchronous event.
    pub fn poll_event(&mut self) -> Option<AsyncEvent> {
        unimplemented!()
    }
}
