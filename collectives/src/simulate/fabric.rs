//! Fabrics: which hosts the ranks are on, and what lies between them.

use crate::cost::{Compute, Link};

/// What the ranks run on.
#[derive(Clone, PartialEq, Debug)]
pub struct Fabric {
    /// The host of each rank, in any numbers.
    pub hosts: Vec<u32>,
    /// Between ranks of one host.
    pub local: Link,
    /// Between hosts: one adapter to one adapter.
    pub remote: Link,
    /// What a rank's own work costs.
    pub compute: Compute,
    /// Adapters of a host. The *i*-th rank of a host uses `rails` of them from the (*i* × `rails`)-th on, wrapped around.
    pub adapters: u32,
    /// Adapters of a rank: connection *c* goes by the (*c* mod `rails`)-th.
    pub rails: u32,
    /// ns per byte of what all messages within a host share, its memory; 0: nothing.
    pub host_ns_per_byte: f64,
    /// The switches of the leaves, if what is above them can be full.
    pub leaves: Option<Leaves>,
    /// Ranks that are slower than the others, or begin later.
    pub stragglers: Vec<Straggler>,
    /// The mean of what is added to a message's latency, ns, exponentially distributed; 0: nothing.
    pub jitter_ns: f64,
    /// What makes the jitter's numbers.
    pub seed: u64,
}

/// Switches with hosts below them and a network above them.
#[derive(Clone, Copy, PartialEq, Debug)]
pub struct Leaves {
    /// Hosts of a leaf: those whose numbers, divided by this, are the same.
    pub hosts: u32,
    /// What its hosts' adapters can send together, divided by what its uplinks can carry.
    pub oversubscription: f64,
    /// What is added to the latency of a message between leaves, ns.
    pub latency_ns: f64,
}

/// A rank that is not as the others.
#[derive(Clone, Copy, PartialEq, Debug)]
pub struct Straggler {
    /// Which.
    pub rank: u32,
    /// What its processor's times are multiplied by.
    pub slowness: f64,
    /// How much later it begins, ns.
    pub late_ns: f64,
}

impl Fabric {
    /// `ranks` ranks, each on a host of its own with one adapter, and nothing shared between them.
    #[must_use]
    pub fn uniform(ranks: u32, link: Link, compute: Compute) -> Self {
        Self::grouped(ranks, 1, link, link, compute)
    }

    /// `ranks` ranks on one host.
    #[must_use]
    pub fn one_host(ranks: u32, link: Link, compute: Compute) -> Self {
        Self::grouped(ranks, ranks.max(1), link, link, compute)
    }

    /// `ranks` ranks, `per_host` on each host, with one adapter for each.
    #[must_use]
    pub fn grouped(ranks: u32, per_host: u32, local: Link, remote: Link, compute: Compute) -> Self {
        let per_host = per_host.max(1);
        Self {
            hosts: (0..ranks).map(|rank| rank / per_host).collect(),
            local,
            remote,
            compute,
            adapters: per_host,
            rails: 1,
            host_ns_per_byte: 0.0,
            leaves: None,
            stragglers: Vec::new(),
            jitter_ns: 0.0,
            seed: 0,
        }
    }

    /// How many ranks.
    #[must_use]
    pub fn ranks(&self) -> u32 {
        self.hosts.len() as u32
    }

    /// Whether every rank sees the same: its links are its own, every peer is as far as any other, and nobody is slow.
    #[must_use]
    pub fn is_uniform(&self) -> bool {
        let quiet = self.stragglers.is_empty() && self.jitter_ns == 0.0;
        let mut hosts = self.hosts.clone();
        hosts.sort_unstable();
        hosts.dedup();
        let apart = hosts.len() == self.hosts.len() && self.leaves.is_none();
        let together = hosts.len() == 1 && self.host_ns_per_byte == 0.0;
        quiet && (apart || together)
    }
}
