//! A port: the queue of its egress and the link behind it.

use std::collections::VecDeque;
use std::time::Duration;

use doorbell_roce_proto::Instant;

use crate::packet::{Class, Packet};

/// A host or a switch, by its index.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Node {
    /// A host.
    Host(usize),
    /// A switch.
    Switch(usize),
}

/// One direction of a link.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Link {
    /// Rate in bits/s.
    pub rate: u64,
    /// Propagation delay, with that of the switch behind.
    pub delay: Duration,
}

impl Link {
    /// The time that `bytes` take.
    pub(crate) fn time(&self, bytes: u64) -> Duration {
        Duration::from_nanos((bytes * 8 * 1_000_000_000).div_ceil(self.rate))
    }
}

/// A port of a node.
#[derive(Debug)]
pub struct Port {
    pub(crate) link: Link,
    /// The node at the other end, and its port.
    pub(crate) peer: (Node, usize),
    /// A packet is being sent.
    pub(crate) busy: bool,
    /// Since when the peer pauses the data class (PFC).
    pub(crate) paused: Option<Instant>,
    queues: [VecDeque<Packet>; Class::COUNT],
    bytes: [u64; Class::COUNT],
    /// Counters.
    pub stats: PortStats,
}

/// Counters of a port's egress.
#[derive(Clone, Copy, Debug, Default)]
pub struct PortStats {
    /// Bytes sent.
    pub sent: u64,
    /// Packets lost, or dropped as their queue or the buffer was full.
    pub dropped: u64,
    /// Packets marked.
    pub marked: u64,
    /// ECN-capable packets queued.
    pub capable: u64,
    /// PAUSE frames received from the peer, without those that resume.
    pub pauses: u64,
    /// The time for which the data class was paused.
    pub paused: Duration,
    /// The longest queue of the data class in bytes.
    pub longest: u64,
}

impl Port {
    pub(crate) fn new(link: Link, peer: (Node, usize)) -> Self {
        Self {
            link,
            peer,
            busy: false,
            paused: None,
            queues: Default::default(),
            bytes: [0; Class::COUNT],
            stats: PortStats::default(),
        }
    }

    /// Bytes of data in the queue.
    pub fn queued(&self) -> u64 {
        self.bytes[Class::Data as usize]
    }

    pub(crate) fn push(&mut self, packet: Packet) {
        let class = packet.class as usize;
        self.bytes[class] += packet.bytes();
        self.stats.longest = self.stats.longest.max(self.queued());
        self.queues[class].push_back(packet);
    }

    /// The next packet to send: of control first, of data unless it is paused.
    pub(crate) fn pop(&mut self) -> Option<Packet> {
        let next = self.queues[Class::Control as usize].pop_front();
        let packet = match next {
            Some(packet) => packet,
            None if self.paused.is_some() => return None,
            None => self.queues[Class::Data as usize].pop_front()?,
        };
        self.bytes[packet.class as usize] -= packet.bytes();
        Some(packet)
    }

    /// A PFC frame arrived.
    pub(crate) fn pause(&mut self, now: Instant, stop: bool) {
        match (stop, self.paused) {
            (true, None) => {
                self.paused = Some(now);
                self.stats.pauses += 1;
            }
            (false, Some(since)) => {
                self.paused = None;
                self.stats.paused += now - since;
            }
            _ => {}
        }
    }
}
