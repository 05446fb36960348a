//! Packets of lanes whose bytes are not copied while they are handled: the [`Memory`](crate::memory::Memory) does that in its own time.

use crate::Qpn;
use crate::endpoint::Endpoint;

impl Endpoint {
    /// The packet of a lane that was handed in last changed nothing, as the [`Memory`](crate::memory::Memory) could not take its bytes then: it will be handed in again, and is not counted twice.
    pub fn put_off(&mut self) {
        self.out.counters.rx_packets -= 1;
    }

    /// What a queue pair was given has come to where it belongs ([`is_unsettled`](crate::memory::Memory::is_unsettled)): it may have something to send.
    pub fn settled(&mut self, qpn: Qpn) {
        if let Some(index) = self.qps.find(qpn) {
            self.reschedule(index);
        }
    }
}
