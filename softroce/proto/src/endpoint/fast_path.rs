//! The short ways of the commonest packets on a lane: sent as they are posted, and received without a look at anything else.

use core::time::Duration;

use crate::endpoint::{Endpoint, LanePacket, find};
use crate::memory::Memory;
use crate::qp::LaneId;
use crate::wire::{self, Opcode};
use crate::work::SendRequest;
use crate::{Instant, Qpn};

/// A request that took the short way: see [`Endpoint::post_short`].
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Short {
    /// The lane that its packet takes.
    pub lane: LaneId,
    /// The headers of an acknowledgement that goes in front of it.
    pub acknowledgement: Option<[u8; wire::header_len(Opcode::RcAcknowledge)]>,
    /// Bytes of headers in the buffer.
    pub headers: usize,
    /// Bytes in the buffer: those of the headers and of the payload behind them.
    pub len: usize,
}

impl Endpoint {
    /// Queues a send request and writes its packet into `buf`, when that is all there is to send: a short SEND or WRITE of an RC queue pair on a lane that has room, with nothing in front of
    /// it anywhere but an acknowledgement of this queue pair's, which is given along. This is the short way of most requests of programs that wait for each message; what it gives is what [`post_send`](Self::post_send) and
    /// [`poll_lanes`](Self::poll_lanes) would give. `None` when the request is any other, or is to be refused: nothing was changed then. `now` is asked for the time when a deadline begins, and told
    /// how far away that is: such a time may be late in proportion.
    pub fn post_short<M: Memory>(
        &mut self,
        now: impl FnOnce(Duration) -> Instant,
        qpn: Qpn,
        request: &SendRequest<'_>,
        memory: &mut M,
        buf: &mut [u8],
    ) -> Option<Short> {
        let others = self.gsi.has_more() || self.full_shm_links.has_any();
        let (index, qp) = find(&mut self.qps, qpn)?;
        let ahead = self.active.queue.front();
        if others || self.active.queue.len() > 1 || ahead.is_some_and(|&ahead| ahead != index) {
            return None;
        }
        let has_ack = ahead.is_some();
        let short = qp.post_short(now, request, has_ack, memory, buf)?;
        if has_ack {
            self.active.end_burst(false);
        }
        self.timers.set(index, qp.deadline());
        self.out.counters.tx_packets += 1 + u64::from(has_ack);
        Some(short)
    }

    /// Takes a packet from a lane if it is the commonest of all and nothing about it is out of the ordinary: a WRITE of one packet, the next of its connection, that may be carried out. Says whether it was;
    /// otherwise nothing but bytes that it may write has changed, and [`handle_lane`](Self::handle_lane) is for it, which does the same with such a packet.
    pub fn handle_short<M: Memory>(&mut self, packet: &LanePacket<'_>, memory: &mut M) -> bool {
        let Ok(headers) = packet.headers.try_into() else {
            return false;
        };
        let Some((bth, reth)) = wire::parse_write_only(headers) else {
            return false;
        };
        let Some((index, qp)) = find(&mut self.qps, bth.dest_qp) else {
            return false;
        };
        if !qp.handle_short(packet.lane, &bth, &reth, packet.len, memory) {
            return false;
        }
        self.out.counters.rx_packets += 1;
        if qp.has_more() {
            self.active.add(index);
        }
        true
    }
}
