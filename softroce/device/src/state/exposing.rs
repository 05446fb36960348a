//! What this process publishes to its peers, for direct operations (see [`direct`](crate::direct)).

use std::io;
use std::sync::Arc;

use doorbell_roce_proto::Qpn;
use doorbell_roce_proto::qp::State;
use doorbell_roce_proto::wire::Transport;

use super::Core;
use crate::direct::{DirectRights, Published, PublishedQp};
use crate::host::MemberId;
use crate::shm::CopyMode;
use crate::shm_ring::Receiver;

impl Core {
    /// See [`OutgoingRings::enable`](crate::shm::OutgoingRings::enable).
    pub(crate) fn enable_shm(&mut self, only: bool, forced: Option<CopyMode>) -> io::Result<(MemberId, Receiver)> {
        let published = Arc::new(Published::create()?);
        self.memory.publish_in(Arc::clone(&published));
        self.published = Some(Arc::clone(&published));
        self.rings.enable(only, forced, published)
    }

    /// Gives the memory of a region to the peers, if they may access it directly.
    pub(crate) fn expose(&mut self, key: u32) {
        if let Some((segment, writable)) = self.memory.exposed_segment(key) {
            self.rings.expose(&segment, writable);
        }
    }

    /// Publishes a queue pair that receives over a shm link; it was [withdrawn](Self::withdraw_qp).
    /// Before RTS its first message has an event, which only the ring reports.
    pub(crate) fn publish_qp(&self, qpn: Qpn) {
        let (Some(published), Some(qp)) = (&self.published, self.endpoint.query_qp(qpn)) else {
            return;
        };
        let receives = qp.init.transport == Transport::Rc && matches!(qp.state, State::Rts | State::Sqd);
        let link = qp.set.path.and_then(|path| path.shm_link);
        let (Some(link), Some(peer), true) = (link, qp.set.dest_qpn, receives) else {
            return;
        };
        let access = qp.set.access.unwrap_or_default();
        let rd_atomic = qp.set.max_dest_rd_atomic.unwrap_or(0) > 0;
        let rights = DirectRights::new(access.read && rd_atomic, access.write, access.atomic && rd_atomic);
        if rights.any() {
            let pd = qp.init.pd;
            published.publish_qp(qpn, &PublishedQp { pd, rights, peer, link });
        }
    }

    /// Peers begin no direct access through the queue pair from here on. Whether some may be in
    /// progress.
    pub(crate) fn withdraw_qp(&self, qpn: Qpn) -> bool {
        self.published
            .as_ref()
            .is_some_and(|published| published.withdraw_qp(qpn))
    }
}
