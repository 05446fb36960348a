//! Fast paths of a queue pair on a lossless link.

use core::time::Duration;

use crate::Instant;
use crate::direct::{DirectMemory, DirectPath, DirectTarget};
use crate::endpoint::FastPathSend;
use crate::memory::{Memory, Placement};
use crate::outbox::Outbox;
use crate::qp::{LinkId, QueuePair, RemoteAccess, State};
use crate::wire::{Bth, Reth, Transport};
use crate::work::SendRequest;

impl QueuePair {
    /// See [`Endpoint::handle_write_fast`](crate::Endpoint::handle_write_fast).
    pub(crate) fn handle_write_fast<M: Memory>(
        &mut self,
        link: LinkId,
        bth: &Bth,
        reth: &Reth,
        len: usize,
        memory: &mut M,
    ) -> bool {
        let eligible = self.init.transport == Transport::Rc && self.receives() && self.established;
        let on_link = self.connection.link == Some(link);
        eligible
            && on_link
            && self
                .responder
                .handle_write_fast(bth, reth, len, &self.connection, memory)
    }

    /// See [`Endpoint::post_send_direct`](crate::Endpoint::post_send_direct).
    #[inline(always)]
    pub(crate) fn post_send_direct<D: DirectMemory>(
        &mut self,
        request: &SendRequest<'_>,
        direct: &mut D,
        out: &mut Outbox,
    ) -> bool {
        let Some(link) = self.connection.link else {
            return false;
        };
        let path = DirectPath {
            link,
            target: self.connection.peer,
            initiator: self.connection.qpn,
            pd: self.connection.pd,
            first_psn: self.requester.first_psn(),
        };
        self.init.transport == Transport::Rc
            && self.state == State::Rts
            && self
                .requester
                .post_send_direct(request, &path, &self.connection, direct, out)
    }

    /// See [`Endpoint::direct_target`](crate::Endpoint::direct_target).
    pub(crate) fn direct_target(&self) -> Option<DirectTarget> {
        let executes = self.init.transport == Transport::Rc && self.receives() && self.established;
        let access = self.set.access.filter(|_| executes)?;
        let rd_atomic = self.set.max_dest_rd_atomic.is_some_and(|most| most > 0);
        Some(DirectTarget {
            pd: self.connection.pd,
            link: self.connection.link?,
            initiator: self.connection.peer,
            access: RemoteAccess {
                read: access.read && rd_atomic,
                write: access.write,
                atomic: access.atomic && rd_atomic,
                // Never direct.
                flush: Placement::NONE,
            },
            first_psn: self.set.rq_psn?,
        })
    }

    /// See [`Endpoint::post_send_fast`](crate::Endpoint::post_send_fast). `has_ack`: the queue pair
    /// has something to send, which must be a single ACK.
    pub(crate) fn post_send_fast<M: Memory>(
        &mut self,
        now: impl FnOnce(Duration) -> Instant,
        request: &SendRequest<'_>,
        has_ack: bool,
        memory: &mut M,
        buf: &mut [u8],
    ) -> Option<FastPathSend> {
        let link = self.connection.link?;
        let eligible = self.init.transport == Transport::Rc && self.state == State::Rts;
        if !eligible || self.responder.has_replies() != has_ack || self.responder.has_only_ack() != has_ack {
            return None;
        }
        // A full link cut the replies' burst short: requests go first in this one.
        if has_ack && self.burst.requests_first {
            return None;
        }
        let (headers, len) = self
            .requester
            .post_send_fast(now, request, &self.connection, memory, buf)?;
        let acknowledgement = self.responder.take_ack(&self.connection);
        self.end_burst(false);
        Some(FastPathSend {
            link,
            ack: acknowledgement,
            header_len: headers,
            len,
        })
    }
}
