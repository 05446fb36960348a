//! The short way of a request that is sent as soon as it is posted, with the acknowledgement that waits for it.

use crate::Instant;
use crate::endpoint::Short;
use crate::memory::Memory;
use crate::qp::{QueuePair, State};
use crate::wire::Transport;
use crate::work::SendRequest;

impl QueuePair {
    /// Queues a request and writes its packet: see [`Endpoint::post_short`](crate::Endpoint::post_short). `acknowledges` when the queue pair has something to send, which must be an acknowledgement
    /// and nothing else then.
    pub(crate) fn post_short<M: Memory>(
        &mut self,
        now: impl FnOnce() -> Instant,
        request: &SendRequest<'_>,
        acknowledges: bool,
        memory: &mut M,
        buf: &mut [u8],
    ) -> Option<Short> {
        let lane = self.connection.lane?;
        let ordinary = self.init.transport == Transport::Rc && self.state == State::Rts;
        if !ordinary || self.responder.has_replies() != acknowledges || self.responder.acknowledges() != acknowledges {
            return None;
        }
        let (headers, len) = self.requester.post_short(now, request, &self.connection, memory, buf)?;
        let acknowledgement = self.responder.take_acknowledgement(&self.connection);
        self.end_turn(false);
        Some(Short {
            lane,
            acknowledgement,
            headers,
            len,
        })
    }
}
