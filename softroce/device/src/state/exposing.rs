//! What this process publishes to its peers, for direct operations (see [`direct`](crate::direct)).

use std::io;
use std::os::fd::OwnedFd;
use std::sync::Arc;

use doorbell_roce_proto::Qpn;
use doorbell_roce_proto::qp::LinkId;

use super::Core;
use crate::direct::Published;
use crate::host::MemberId;
use crate::links::shm::CopyMode;
use crate::links::shm_ring::Receiver;

impl Core {
    /// See [`OutgoingRings::enable`](crate::links::shm::OutgoingRings::enable).
    pub(crate) fn enable_shm(&mut self, only: bool, forced: Option<CopyMode>) -> io::Result<(MemberId, Receiver)> {
        // Who forces a copy mode wants no other, in neither direction.
        let published = Arc::new(Published::create(forced.is_none())?);
        self.memory.publish_in(Arc::clone(&published));
        self.direct.published = Some(Arc::clone(&published));
        self.rings.enable(only, forced, published)
    }

    /// A peer's tables have arrived; its PID is the kernel's.
    pub(crate) fn add_direct_peer(&mut self, link: LinkId, pid: Option<i32>, tables: OwnedFd) {
        let by_process = self
            .direct
            .published
            .as_ref()
            .is_some_and(|published| published.by_process());
        self.direct.peers.add(link, pid.filter(|_| by_process), tables);
    }

    /// Gives the memory of a region to the peers, if they may access it directly.
    pub(crate) fn expose(&mut self, key: u32) {
        if let Some((segment, writable)) = self.memory.exposed_segment(key) {
            self.rings.expose(&segment, writable);
        }
    }

    /// Publishes a queue pair that executes requests; it was [withdrawn](Self::withdraw_qp).
    pub(crate) fn publish_qp(&self, qpn: Qpn) {
        if let Some(published) = &self.direct.published
            && let Some(target) = self.endpoint.direct_target(qpn)
        {
            published.publish_qp(qpn, &target);
        }
    }

    /// Peers begin no direct access through the queue pair from here on. Whether some may be in
    /// progress.
    pub(crate) fn withdraw_qp(&self, qpn: Qpn) -> bool {
        self.direct
            .published
            .as_ref()
            .is_some_and(|published| published.withdraw_qp(qpn))
    }
}
