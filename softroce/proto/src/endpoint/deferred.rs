//! Copies on lossless links that the [`Memory`](crate::memory::Memory) defers.

use crate::Qpn;
use crate::endpoint::{Endpoint, LinkPacket};

impl Endpoint {
    /// Undoes the count of the last packet of a link, which changed nothing, as its payload
    /// cannot be copied yet: the caller handles it again later.
    pub fn defer(&mut self, packet: &LinkPacket<'_>) {
        let counters = &mut self.out.counters;
        counters.rx_packets -= 1;
        counters.rx_bytes -= (packet.headers.len() + packet.len) as u64;
    }

    /// The deferred copies of a queue pair have finished: it may have packets to send. See
    /// [`has_pending_copies`](crate::memory::Memory::has_pending_copies).
    pub fn handle_copies_complete(&mut self, qpn: Qpn) {
        if let Some(index) = self.qps.find(qpn) {
            self.reschedule(index);
        }
    }
}
