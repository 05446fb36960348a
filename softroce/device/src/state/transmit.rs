//! Sending: requests and packets of the engine, to peers' memory, shm rings and the UDP link.

use std::net::SocketAddr;
use std::time::Duration;

use doorbell_roce_proto::work::SendRequest;
use doorbell_roce_proto::{Instant, Qpn};

use super::Core;
use super::copying::{defer_packet, defer_ticket};
use crate::direct::Initiator;
use crate::links::shm::link_to;
use crate::links::udp::{TxBatch, UdpDestination};

#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub(crate) struct Filled {
    /// The batch is full; the engine may have more.
    pub(crate) full: bool,
    /// The batch has a packet that must not be reordered, though it may be an ACK.
    pub(crate) in_order: bool,
}

impl Core {
    /// Fast path: carries a request out in the memory of a peer ([`direct`](crate::direct)).
    #[inline]
    pub(crate) fn send_direct(&mut self, qpn: Qpn, request: &SendRequest<'_>) -> bool {
        if self.direct.peers.is_empty() || self.is_copying() {
            return false;
        }
        let mut initiator = Initiator {
            table: &self.memory,
            peers: &mut self.direct.peers,
            rings: &self.rings,
            me: link_to(self.demux.host.me()),
        };
        self.endpoint.post_send_direct(qpn, request, &mut initiator)
    }

    /// Fast path: posts a send request and puts its packet on the shm ring, if it needs nothing
    /// else ([`Endpoint::post_send_fast`]).
    pub(crate) fn send_fast(
        &mut self,
        now: impl FnOnce(Duration) -> Instant,
        qpn: Qpn,
        request: &SendRequest<'_>,
    ) -> bool {
        // Completions and revocations come before new packets.
        if self.endpoint.has_output() || self.memory.has_revoked() {
            return false;
        }
        let (memory, packet) = (&mut self.memory, &mut self.packet);
        let Some(fast) = self.endpoint.post_send_fast(now, qpn, request, memory, packet) else {
            return false;
        };
        let packet = &self.packet[..fast.len];
        self.rings.send_fast(qpn, &fast, packet, &mut self.endpoint);
        true
    }

    pub(crate) fn has_nothing_to_send(&self) -> bool {
        !self.endpoint.has_more()
    }

    /// Whether nothing is to be sent, completed or revoked after packets of a shm ring.
    pub(crate) fn is_idle(&self) -> bool {
        self.has_nothing_to_send()
            && !self.endpoint.has_output()
            && !self.memory.has_revoked()
            && !self.rings.is_touched()
    }

    /// Moves the engine's packets for shm links onto the rings. Whether it may have more, for UDP.
    pub(crate) fn fill_shm(&mut self, now: Instant) -> bool {
        self.connections.exchange(now, &mut self.endpoint);
        while let Some(transmit) = self
            .endpoint
            .poll_transmit_link(now, &mut self.memory, &mut self.packet)
        {
            // `None` is for UDP.
            if let Some(link) = transmit.link {
                let packet = &self.packet[..transmit.len];
                if let Some(ticket) = defer_ticket(&self.copying, &transmit, packet) {
                    defer_packet(&mut self.copying, &mut self.memory, ticket, transmit, packet);
                    continue;
                }
                self.rings
                    .send(link, &transmit, packet, &mut self.memory, &mut self.endpoint);
            }
        }
        self.endpoint.has_more()
    }

    pub(crate) fn fill(&mut self, now: Instant, batch: &mut TxBatch) -> Filled {
        self.memory.set_read_ahead(true);
        let filled = self.fill_batch(now, batch);
        self.memory.set_read_ahead(false);
        filled
    }

    fn fill_batch(&mut self, now: Instant, batch: &mut TxBatch) -> Filled {
        let mut filled = Filled::default();
        self.connections.exchange(now, &mut self.endpoint);
        let mut before = None;
        while let Some(mut slot) = batch.slot() {
            if let Some(dst) = before
                && let Some(len) = self.endpoint.poll_transmit_middle(now, &mut self.memory, &mut slot)
            {
                slot.send(len, dst);
                continue;
            }
            let Some(transmit) = self.endpoint.poll_transmit(now, &mut self.memory, &mut slot) else {
                return filled;
            };
            if let Some(link) = transmit.link {
                let packet = &slot[..transmit.len];
                if let Some(ticket) = defer_ticket(&self.copying, &transmit, packet) {
                    defer_packet(&mut self.copying, &mut self.memory, ticket, transmit, packet);
                    continue;
                }
                self.rings
                    .send(link, &transmit, packet, &mut self.memory, &mut self.endpoint);
                continue;
            }
            let port = match transmit.dst == self.demux.address.ip() {
                true => self.demux.udp_port_of(&slot),
                false => self.demux.address.port(),
            };
            let dst = UdpDestination {
                addr: SocketAddr::new(transmit.dst, port),
                traffic_class: transmit.traffic_class,
                hop_limit: transmit.hop_limit,
            };
            slot.send(transmit.len, *before.insert(dst));
            filled.in_order |= transmit.in_order;
        }
        filled.full = true;
        filled
    }
}
