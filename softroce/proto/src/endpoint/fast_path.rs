//! Fast paths on a link (decision 14): a request carried out in the peer's memory ([`direct`]),
//! a short one transmitted while it is posted, and a received WRITE ONLY. Each equals the general
//! path, and declines what is not the common case.
//!
//! [`direct`]: crate::direct

use core::time::Duration;

use crate::direct::{DirectMemory, DirectTarget};
use crate::endpoint::{Endpoint, LinkPacket};
use crate::memory::Memory;
use crate::qp::LinkId;
use crate::wire::{self, Opcode};
use crate::work::SendRequest;
use crate::{Instant, Qpn};

/// A request sent on the fast path: see [`Endpoint::post_send_fast`].
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct FastPathSend {
    /// The lossless link to send it on.
    pub link: LinkId,
    /// Headers of an ACK to send in front of it.
    pub ack: Option<[u8; wire::header_len(Opcode::RcAcknowledge)]>,
    /// Length of the headers in the buffer.
    pub header_len: usize,
    /// Bytes in the buffer: headers and payload.
    pub len: usize,
}

impl Endpoint {
    /// Fast path of [`post_send`](Self::post_send) for an RDMA WRITE without immediate data, READ
    /// or atomic of an RC queue pair on a link, none of whose requests is outstanding: carries
    /// it out, by `direct`, and completes it. False, with nothing changed, for any other request.
    #[inline(always)]
    pub fn post_send_direct<D: DirectMemory>(&mut self, qpn: Qpn, request: &SendRequest<'_>, direct: &mut D) -> bool {
        let Some((_, qp)) = self.qps.find_mut(qpn) else {
            return false;
        };
        let done = qp.post_send_direct(request, direct, &mut self.out);
        self.out.counters.direct_requests += u64::from(done);
        done
    }

    /// What a queue pair permits its peer to do directly; `None` if it executes no requests, or
    /// the first one has an event ([`CommunicationEstablished`]). Changes with state and
    /// attributes.
    ///
    /// [`CommunicationEstablished`]: crate::AsyncEvent::CommunicationEstablished
    pub fn direct_target(&self, qpn: Qpn) -> Option<DirectTarget> {
        self.qps.get(self.qps.find(qpn)?)?.direct_target()
    }

    /// Fast path of [`post_send`](Self::post_send) and
    /// [`poll_transmit_link`](Self::poll_transmit_link), for a short SEND or WRITE of an RC queue
    /// pair on a link with free slots: writes its packet into `buf`. Nothing else is to be sent
    /// before it but an ACK of the same queue pair, which is returned with it.
    ///
    /// `None`, with nothing changed, for any other request. `now` is called when the local ACK
    /// timer starts, with the timeout: the time it returns may be late in proportion to that.
    pub fn post_send_fast<M: Memory>(
        &mut self,
        now: impl FnOnce(Duration) -> Instant,
        qpn: Qpn,
        request: &SendRequest<'_>,
        memory: &mut M,
        buf: &mut [u8],
    ) -> Option<FastPathSend> {
        let others = self.gsi.has_more() || self.full_links.has_any();
        let (index, qp) = self.qps.find_mut(qpn)?;
        let ahead = self.active.queue.front();
        if others || self.active.queue.len() > 1 || ahead.is_some_and(|&ahead| ahead != index) {
            return None;
        }
        let has_ack = ahead.is_some();
        let short = qp.post_send_fast(now, request, has_ack, memory, buf)?;
        if has_ack {
            self.active.end_burst(false);
        }
        self.timers.set(index, qp.deadline());
        if let Some(ack) = &short.ack {
            self.out.counters.sent(ack.len());
        }
        self.out.counters.sent(short.len);
        Some(short)
    }

    /// Fast path of [`handle_link_packet`](Self::handle_link_packet) for a WRITE ONLY that is
    /// expected and valid. If false, call that: only bytes that the packet may write have changed.
    pub fn handle_write_fast<M: Memory>(&mut self, packet: &LinkPacket<'_>, memory: &mut M) -> bool {
        let Ok(headers) = packet.headers.try_into() else {
            return false;
        };
        let Some((bth, reth)) = wire::parse_write_only(headers) else {
            return false;
        };
        let Some((index, qp)) = self.qps.find_mut(bth.dest_qp) else {
            return false;
        };
        if !qp.handle_write_fast(packet.link, &bth, &reth, packet.len, memory) {
            return false;
        }
        self.out.counters.received(headers.len() + packet.len);
        if qp.has_more() {
            self.active.add(index);
        }
        true
    }
}
