//! Costs of a link in the simulation: a [`MessageCost`] in picoseconds.

use crate::cost::{DataMover, MessageCost};
use crate::simulate::Time;
use crate::types::Protocol;

#[derive(Clone, Copy)]
pub(super) struct LinkCosts {
    pub(super) send: f64,
    pub(super) receive: f64,
    pub(super) latency: f64,
    /// Added if the receiver has sent at the same time.
    pub(super) both: f64,
    pub(super) grant: u64,
    pub(super) lone: f64,
    pub(super) confirm: u64,
    pub(super) quiet: u64,
    data_mover: DataMover,
    protocol: Protocol,
    pub(super) cost: MessageCost,
}

impl LinkCosts {
    pub(super) fn of(data_mover: DataMover, cost: &MessageCost, protocol: Protocol) -> Self {
        Self {
            send: cost.send_ns * 1e3,
            receive: cost.receive_ns * 1e3,
            latency: cost.latency_ns() * 1e3,
            both: cost.bidirectional_ns * 1e3,
            grant: Time::from_ns(cost.grant_ns).0,
            lone: cost.receive_only_ns * 1e3,
            confirm: Time::from_ns(cost.confirm_ns).0,
            quiet: Time::from_ns(cost.send_only_ns).0,
            data_mover,
            protocol,
            cost: *cost,
        }
    }

    /// Fractions of β in the sender's and the receiver's processor; the rest occupies links.
    pub(super) fn parts(&self, bytes: f64) -> (f64, f64) {
        self.data_mover.shares(self.protocol, bytes)
    }

    /// The sender's wait for the acknowledgement of a message of so many bytes, ps.
    pub(super) fn confirm(&self, bytes: f64) -> u64 {
        if self.cost.is_copied(bytes) { 0 } else { self.confirm }
    }

    /// Time of both processors for the bytes of a message, ps.
    pub(super) fn moving(&self, bytes: f64, whole: f64, forwarded: bool, others: f64) -> f64 {
        bytes * self.cost.beta(bytes, whole, forwarded, others) * 1e3
    }
}
