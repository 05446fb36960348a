//! What a transport offers, requests with a remote end of their own (UD, XRC), and the two ends of
//! XRC (IBTA vol 1, annex A14): the initiator sends, the target receives for all shared receive
//! queues of its domain, and has the protection domain of the one that a request names.

use super::QueuePair;
use crate::Instant;
use crate::memory::Memory;
use crate::outbox::Outbox;
use crate::qp::State;
use crate::qp::packet::InboundPacket;
use crate::wire::Transport;
use crate::work::{Operation, PostError, Remote, SendRequest, SrqId};

impl QueuePair {
    /// Whether the transport offers the operation (IBTA vol 1, table 36), with a `remote` end
    /// given.
    pub(super) const fn offers(&self, operation: &Operation, remote: bool) -> bool {
        match self.init.transport {
            Transport::Rc => !remote,
            Transport::Uc => {
                let offered = matches!(
                    operation,
                    Operation::Send { .. }
                        | Operation::Write { .. }
                        | Operation::Bind(_)
                        | Operation::Invalidate { .. }
                );
                offered && !remote
            }
            Transport::Ud => matches!(operation, Operation::Send { .. }) && remote,
            Transport::Xrc => remote && self.init.xrc_domain.is_none(),
        }
    }

    pub(crate) fn post_to(
        &mut self,
        request: &SendRequest<'_>,
        to: &Remote,
        out: &mut Outbox,
    ) -> Result<(), PostError> {
        if self.state < State::Rts {
            return Err(PostError::State);
        }
        let is_datagram = matches!(to, Remote::Datagram(_));
        if !self.offers(&request.operation, true) || is_datagram != (self.init.transport == Transport::Ud) {
            return Err(PostError::Invalid);
        }
        self.requester.post_to(request, to)?;
        if matches!(self.state, State::Sqe | State::Err) {
            self.requester.flush(&self.connection, out);
        }
        Ok(())
    }

    /// Responses are for the initiator, requests for the target, which selects the queue that they
    /// name.
    pub(super) fn handle_xrc<M: Memory>(
        &mut self,
        now: Instant,
        packet: &InboundPacket<'_>,
        memory: &mut M,
        out: &mut Outbox,
    ) {
        match (self.init.xrc_domain, packet.bth.xrc) {
            (None, None) => {}
            (Some(domain), Some(named)) => self.responder.select_srq(named, domain, out),
            _ => {
                out.counters.malformed += 1;
                return;
            }
        }
        self.handle_packet(now, packet, memory, out);
    }

    /// The queue's receives are discarded, also one that is held for a message.
    pub(crate) fn discard_receives_of(&mut self, srq: SrqId) {
        if self.init.xrc_domain.is_some() {
            self.responder.discard_receives_of(srq);
        }
    }
}
