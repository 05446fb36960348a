//! Fault injection: a sending half that drops, duplicates, delays, reorders and corrupts packets.
//!
//! [`FaultModel`] decides; the half here applies that to datagrams. A packet is corrupted after it
//! was sealed: the receiver sees a wrong ICRC and not a wrong message.

mod config;
mod model;
#[cfg(test)]
mod tests;

pub use config::{FaultConfig, FaultConfigError};
pub use model::{Corruption, Delivery, FaultModel};

use super::{Transmit, TxBatch};
use doorbell_roce_proto::Instant;
use std::cmp::{Ordering, Reverse};
use std::collections::BinaryHeap;
use std::io;
use std::net::SocketAddr;

/// The most delayed packets; more are dropped, as by a switch whose buffer is full.
const MAX_DELAYED: usize = 1 << 16;

struct DelayedPacket {
    at: Instant,
    /// Keeps packets that are due together in the order they were sent.
    order: u64,
    dst: SocketAddr,
    bytes: Box<[u8]>,
    corruption: Option<Corruption>,
}

impl DelayedPacket {
    fn key(&self) -> (Instant, u64) {
        (self.at, self.order)
    }
}

impl PartialEq for DelayedPacket {
    fn eq(&self, other: &Self) -> bool {
        self.key() == other.key()
    }
}

impl Eq for DelayedPacket {}

impl PartialOrd for DelayedPacket {
    fn partial_cmp(&self, other: &Self) -> Option<Ordering> {
        Some(self.cmp(other))
    }
}

impl Ord for DelayedPacket {
    fn cmp(&self, other: &Self) -> Ordering {
        self.key().cmp(&other.key())
    }
}

/// The sending half with faults; see [`super::Link::with_faults`].
pub(super) struct FaultTx {
    inner: Box<dyn Transmit>,
    model: FaultModel,
    delayed: BinaryHeap<Reverse<DelayedPacket>>,
    order: u64,
    /// The packets for `inner`; created on first use, with the seal of the first batch.
    due: Option<TxBatch>,
}

impl FaultTx {
    pub(super) fn new(inner: Box<dyn Transmit>, config: FaultConfig) -> Self {
        Self {
            inner,
            model: FaultModel::new(config),
            delayed: BinaryHeap::new(),
            order: 0,
            due: None,
        }
    }

    /// Takes every packet of `batch` that is not dropped.
    fn delay_packets(&mut self, batch: &mut TxBatch, now: Instant) {
        for (envelope, packet) in batch.packets() {
            for delivery in self.model.decide(now, packet.len()) {
                if self.delayed.len() == MAX_DELAYED {
                    break;
                }
                self.delayed.push(Reverse(DelayedPacket {
                    at: delivery.at,
                    order: self.order,
                    dst: envelope.dst,
                    bytes: packet.into(),
                    corruption: delivery.corruption,
                }));
                self.order += 1;
            }
        }
        batch.clear();
    }
}

impl Transmit for FaultTx {
    fn transmit(&mut self, batch: &mut TxBatch, now: Instant) -> io::Result<()> {
        self.delay_packets(batch, now);
        let due = self.due.get_or_insert_with(|| batch.clone_empty());
        while let Some(Reverse(next)) = self.delayed.peek().filter(|next| next.0.at <= now) {
            let Some(mut slot) = due.slot() else {
                self.inner.transmit(due, now)?;
                if due.slot().is_none() {
                    return Ok(());
                }
                continue;
            };
            slot[..next.bytes.len()].copy_from_slice(&next.bytes);
            let packet = slot.send(next.bytes.len(), next.dst);
            if let Some(corruption) = next.corruption {
                corruption.apply(packet);
            }
            self.delayed.pop();
        }
        self.inner.transmit(due, now)
    }

    /// The earliest delayed packet; at once when the socket had no space for all that was due.
    fn due(&self) -> Option<Instant> {
        if self.due.as_ref().is_some_and(|due| !due.is_empty()) {
            return Some(Instant::ZERO);
        }
        let held = self.delayed.peek().map(|next| next.0.at);
        held.into_iter().chain(self.inner.due()).min()
    }
}
