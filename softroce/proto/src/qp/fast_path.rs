//! The short ways on a lane: of a request that is sent as soon as it is posted, with the acknowledgement that waits for it; and of a WRITE that arrives. Either does what the long way does with what
//! it takes, and leaves everything else to that.

use core::time::Duration;

use crate::Instant;
use crate::endpoint::Short;
use crate::memory::Memory;
use crate::qp::{LaneId, QueuePair, State};
use crate::wire::{Bth, Reth, Transport};
use crate::work::SendRequest;

impl QueuePair {
    /// Carries out a WRITE of one packet with `len` bytes of payload: see [`Endpoint::handle_short`](crate::Endpoint::handle_short).
    pub(crate) fn handle_short<M: Memory>(
        &mut self,
        lane: LaneId,
        bth: &Bth,
        reth: &Reth,
        len: usize,
        memory: &mut M,
    ) -> bool {
        let eligible = self.init.transport == Transport::Rc && self.receives() && self.established;
        let on_link = self.connection.shm_link == Some(lane);
        eligible && on_link && self.responder.handle_short(bth, reth, len, &self.connection, memory)
    }

    /// Queues a request and writes its packet: see [`Endpoint::post_short`](crate::Endpoint::post_short). `acknowledges` when the queue pair has something to send, which must be an acknowledgement
    /// and nothing else then.
    pub(crate) fn post_short<M: Memory>(
        &mut self,
        now: impl FnOnce(Duration) -> Instant,
        request: &SendRequest<'_>,
        has_ack: bool,
        memory: &mut M,
        buf: &mut [u8],
    ) -> Option<Short> {
        let lane = self.connection.shm_link?;
        let eligible = self.init.transport == Transport::Rc && self.state == State::Rts;
        if !eligible || self.responder.has_replies() != has_ack || self.responder.has_only_ack() != has_ack {
            return None;
        }
        // Replies had the turn that a full lane cut short, so now it is the requests' turn to go first.
        if has_ack && self.burst.requests_first {
            return None;
        }
        let (headers, len) = self.requester.post_short(now, request, &self.connection, memory, buf)?;
        let acknowledgement = self.responder.take_ack(&self.connection);
        self.end_burst(false);
        Some(Short {
            lane,
            acknowledgement,
            headers,
            len,
        })
    }
}
