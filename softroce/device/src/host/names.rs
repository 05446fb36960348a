//! The abstract socket names of a group.

use std::net::SocketAddr;

use super::registry::VERSION;

#[derive(Clone, Copy, Debug)]
pub(super) struct GroupNames {
    address: SocketAddr,
}

impl GroupNames {
    pub(super) fn new(address: SocketAddr) -> Self {
        Self { address }
    }

    pub(super) fn address(&self) -> SocketAddr {
        self.address
    }

    /// Held by the member of a slot for as long as it lives.
    pub(super) fn slot(&self, slot: u16) -> String {
        format!("doorbell{VERSION}/{}/{slot}", self.address)
    }

    /// Held while a process joins.
    pub(super) fn join_lock(&self) -> String {
        format!("doorbell{VERSION}/{}/door", self.address)
    }

    /// Held while a member adds a service.
    pub(super) fn services_lock(&self) -> String {
        format!("doorbell{VERSION}/{}/services", self.address)
    }
}
