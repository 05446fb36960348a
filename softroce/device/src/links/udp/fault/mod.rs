//! Fault injection: a sending half that drops, duplicates, delays, reorders, corrupts, marks (ECN)
//! and paces packets, and halves that pass none while the port is down.
//!
//! [`FaultModel`] decides; the half here applies that to datagrams. A packet is corrupted after it
//! was sealed: the receiver sees a wrong ICRC and not a wrong message.

mod config;
mod model;
mod outage;
#[cfg(test)]
mod tests;

pub use config::{FaultConfig, FaultConfigError, Outage};
pub(crate) use config::{rate, time};
pub use model::{Corruption, Delivery, FaultModel};
pub(crate) use outage::OutageClock;
pub(super) use outage::OutageRx;

use super::{Transmit, TxBatch, UdpDestination};
use doorbell_roce_proto::Instant;
use doorbell_roce_proto::congestion::ecn;
use std::cmp::{Ordering, Reverse};
use std::collections::BinaryHeap;
use std::io;
use std::time::Duration;

/// How far ahead a port with a rate takes packets: longer than the progress thread oversleeps, and
/// short beside the local ACK timeouts, which run meanwhile.
const MAX_BACKLOG: Duration = Duration::from_millis(1);

/// The most delayed packets; more are dropped, as by a switch whose buffer is full.
const MAX_DELAYED: usize = 1 << 16;

struct DelayedPacket {
    at: Instant,
    /// Keeps packets that are due together in the order they were sent.
    order: u64,
    dst: UdpDestination,
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
    outage: OutageClock,
    /// When the rate permits to take the rest of the batch.
    resume: Option<Instant>,
    /// The packets for `inner`; created on first use, with the seal of the first batch.
    due: Option<TxBatch>,
}

impl FaultTx {
    pub(super) fn new(inner: Box<dyn Transmit>, config: FaultConfig, outage: OutageClock) -> Self {
        Self {
            inner,
            model: FaultModel::new(config),
            delayed: BinaryHeap::new(),
            order: 0,
            outage,
            resume: None,
            due: None,
        }
    }

    /// Takes the packets of `batch` that are not dropped, as far as the rate permits.
    fn delay_packets(&mut self, batch: &mut TxBatch, now: Instant) {
        let mut taken = 0;
        self.resume = None;
        for run in batch.runs() {
            let backlog = self.model.backlog(now);
            if backlog > MAX_BACKLOG {
                self.resume = Some(now + (backlog - MAX_BACKLOG));
                break;
            }
            for packet in run.bytes.chunks(run.segment) {
                self.delay_packet(run.dst, packet, now);
            }
            taken += 1;
        }
        batch.consume(taken);
    }

    fn delay_packet(&mut self, dst: UdpDestination, packet: &[u8], now: Instant) {
        for delivery in self.model.decide(now, packet.len()) {
            if self.delayed.len() == MAX_DELAYED {
                break;
            }
            let traffic_class = match delivery.marked {
                true => ecn::mark(dst.traffic_class),
                false => dst.traffic_class,
            };
            self.delayed.push(Reverse(DelayedPacket {
                at: delivery.at,
                order: self.order,
                dst: UdpDestination { traffic_class, ..dst },
                bytes: packet.into(),
                corruption: delivery.corruption,
            }));
            self.order += 1;
        }
    }

    fn lose_all(&mut self, batch: &mut TxBatch) {
        batch.clear();
        self.delayed.clear();
        self.resume = None;
        if let Some(due) = &mut self.due {
            due.clear();
        }
    }
}

impl Transmit for FaultTx {
    fn transmit(&mut self, batch: &mut TxBatch, now: Instant) -> io::Result<()> {
        if self.outage.is_down() {
            self.lose_all(batch);
            return Ok(());
        }
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

    /// The earliest delayed packet, or when the rate permits more; at once when the socket had no
    /// space for all that was due.
    fn due(&self) -> Option<Instant> {
        if self.due.as_ref().is_some_and(|due| !due.is_empty()) {
            return Some(Instant::ZERO);
        }
        let held = self.delayed.peek().map(|next| next.0.at);
        held.into_iter().chain(self.resume).chain(self.inner.due()).min()
    }
}
