//! Demultiplexing: which process of the group a datagram is for.

use std::net::SocketAddr;
use std::sync::Arc;

use doorbell_roce_proto::cm::{self, Route, ServiceId};
use doorbell_roce_proto::wire::Bth;
use doorbell_roce_proto::{Instant, mad_of};

use crate::cm::PendingRequests;
use crate::host::{Host, MemberId};
use crate::links::shm::Forwarded;

/// What says whose a datagram is.
pub(super) struct Demux {
    pub(super) host: Arc<Host>,
    /// The group's address with the UDP port of RoCEv2 devices, here and at all peers.
    pub(super) address: SocketAddr,
    /// Connection requests for services without a listener.
    pub(super) pending_requests: PendingRequests,
}

pub(super) enum Owner {
    Member(MemberId),
    /// A service without a listener, and the count of services when it was searched for.
    NoListener((ServiceId, u64)),
    /// No member: any process may handle and drop it.
    Unknown,
}

impl Demux {
    pub(super) fn new(host: Arc<Host>, address: SocketAddr) -> Self {
        Self {
            host,
            address,
            pending_requests: PendingRequests::new(),
        }
    }

    /// The owner of the destination queue pair; for queue pair 1 that of the management datagram.
    pub(super) fn owner(&self, packet: &[u8]) -> Owner {
        let host = &self.host;
        let Some(qpn) = Bth::dest_qp_of(packet) else {
            return Owner::Unknown;
        };
        let owner = if qpn.get() > 1 {
            host.owner_of(qpn)
        } else {
            match mad_of(packet).and_then(cm::route) {
                Some(Route::Service(service)) => {
                    // Read before the search: a service that is added meanwhile changes the count.
                    let added = host.services_added();
                    let Some(listener) = host.find_service(service.0) else {
                        return Owner::NoListener((service, added));
                    };
                    Some(listener)
                }
                Some(Route::Slot(slot)) => host.member(slot),
                None => None,
            }
        };
        owner.map_or(Owner::Unknown, Owner::Member)
    }

    /// Keeps a connection request for a service without a listener. Whether it is one, and is kept.
    pub(super) fn keep(&mut self, now: Instant, owner: &Owner, from: Forwarded, packet: &[u8]) -> bool {
        matches!(owner, Owner::NoListener(wanted) if self.pending_requests.keep(now, *wanted, from, packet))
    }

    /// The UDP port for a packet to this address: that of the process that owns the queue pair.
    pub(super) fn udp_port_of(&self, packet: &[u8]) -> u16 {
        let port = match self.owner(packet) {
            Owner::Member(owner) => self.host.udp_port(owner),
            _ => None,
        };
        port.unwrap_or(self.address.port())
    }
}
