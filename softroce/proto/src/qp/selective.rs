//! Selective repeat (decision 111): with whom a queue pair uses it.

use crate::outbox::Outbox;
use crate::qp::QueuePair;
use crate::qp::peer_port::PeerPort;
use crate::wire::SelectiveEth;

impl QueuePair {
    /// An adapter or rxe sends from other ports than a socket's: it is offered nothing that is not
    /// in the standard.
    pub(crate) fn pin_peer_port(&mut self, port: u16) {
        self.connection.peer_port = PeerPort::pinned(port);
        self.connection.selective = self.selective_repeat && self.connection.peer_port.is_socket();
        self.limit_to_selective();
    }

    pub(super) fn limit_to_selective(&mut self) {
        if self.connection.selective {
            self.requester.shrink_window(self.max_window().into());
        }
    }

    /// With selective repeat no more is in flight than a responder keeps: what it drops beyond that
    /// would wait for a probe.
    pub(super) fn max_window(&self) -> u32 {
        if self.connection.selective {
            self.window.min(SelectiveEth::PACKETS as u32)
        } else {
            self.window
        }
    }

    pub(crate) fn discard_kept(&mut self, out: &mut Outbox) {
        self.responder.disable_selective_repeat(out);
    }
}
