//! What the core lock guards: the engine, memory, and where completions and events go.

mod copying;
mod delivery;
mod demux;
mod exposing;
mod objects;
mod receive;
mod transmit;

use std::net::SocketAddr;
use std::sync::Arc;

use doorbell_roce_proto::qp::{LinkId, Path};
use doorbell_roce_proto::{Endpoint, Instant, Qpn};

use self::copying::Copying;
use self::demux::Demux;
use self::objects::Objects;
use crate::capacity;
use crate::cm::Connections;
use crate::direct::DirectTables;
use crate::host::{Host, MemberId};
use crate::links::shm::{OutgoingRings, PathError, Wakeups, link_to};
use crate::links::udp::MAX_PACKET;
use crate::memory::{SharedBacking, Table};

const _: () = assert!(capacity::QPS <= Endpoint::MAX_QPS);

pub(crate) struct Core {
    pub(crate) endpoint: Endpoint,
    pub(crate) memory: Table,
    pub(crate) connections: Connections,
    pub(crate) objects: Objects,
    demux: Demux,
    pub(crate) rings: OutgoingRings,
    pub(crate) direct: DirectTables,
    pub(crate) copying: Copying,
    /// Scratch buffer: a packet for a shm ring, or a forwarded datagram.
    packet: Box<[u8]>,
}

impl Core {
    /// `address` is that of the group, whatever port this process has.
    pub(crate) fn new(endpoint: Endpoint, connections: Connections, host: Arc<Host>, address: SocketAddr) -> Self {
        Self {
            endpoint,
            memory: Table::new(),
            connections,
            objects: Objects::default(),
            rings: OutgoingRings::new(Arc::clone(&host), address.ip()),
            demux: Demux::new(host, address),
            direct: DirectTables::default(),
            copying: Copying::default(),
            packet: vec![0; MAX_PACKET].into_boxed_slice(),
        }
    }

    pub(crate) fn take_wakeups(&mut self) -> Wakeups {
        self.rings.finish_batch(&mut self.endpoint)
    }

    pub(crate) fn unblock_rings(&mut self) {
        self.rings.unblock(&mut self.endpoint);
    }

    /// A member is gone: what is sent to it is dropped from now on, and connections to it end,
    /// unless its slot has a new member.
    pub(crate) fn remove_member(&mut self, now: Instant, member: MemberId) {
        self.rings.close(member, &mut self.endpoint);
        self.direct.peers.remove(link_to(member));
        self.copying.copies.remove_imports(link_to(member));
        if self.demux.host.member(member.slot()).is_none_or(|now| now == member) {
            self.connections.remove_member(now, member.slot());
        }
    }

    /// The shm link to a queue pair, or `None` for UDP. Fails when there is no permitted path.
    pub(crate) fn route(&mut self, path: &Path, peer: Qpn) -> Result<Option<LinkId>, PathError> {
        self.rings.route(path, peer)
    }

    /// What the region's memory holds from now on is part of no message. `shares` is what it loses.
    pub(crate) fn revoke_region_memory(&mut self, key: u32, shares: SharedBacking) {
        self.revoke_withdrawn();
        self.revoke_region(key);
        shares
            .segment
            .into_iter()
            .for_each(|segment| self.rings.release(segment));
        let allocation = shares.allocation.into_iter();
        allocation.for_each(|allocation| self.rings.release_allocation(allocation));
    }

    fn revoke_region(&mut self, key: u32) {
        self.copying.deferred.revoke_region(key);
        self.rings.revoke_region(key);
    }

    /// Revokes what ended queue pairs and windows referred to.
    fn revoke_withdrawn(&mut self) {
        while let Some(qpn) = self.endpoint.poll_revoked() {
            self.withdraw_qp(qpn);
            self.copying.deferred.revoke_qp(qpn);
            self.rings.revoke_qp(qpn);
        }
        while let Some(key) = self.memory.poll_revoked() {
            self.revoke_region(key);
        }
    }

    pub(crate) fn handle_timeout(&mut self, now: Instant) {
        let rings = &self.rings;
        self.endpoint.handle_timeout_on_links(now, |link| rings.progress(link));
        self.connections.handle_timeout(now);
        if self.demux.pending_requests.due().is_some_and(|due| due <= now) {
            self.retry_pending_requests(now);
        }
    }

    pub(crate) fn due(&self) -> Option<Instant> {
        // No iterator: that goes through memory, and this runs for each packet.
        let earlier = |one: Option<Instant>, other: Option<Instant>| match (one, other) {
            (Some(one), Some(other)) => Some(one.min(other)),
            (one, other) => one.or(other),
        };
        earlier(
            earlier(self.endpoint.poll_timeout(), self.connections.due()),
            self.demux.pending_requests.due(),
        )
    }
}
