//! Fabrics: hosts of the ranks, and the network between them.

use crate::cost::{Compute, Link};

/// A fabric.
#[derive(Clone, PartialEq, Debug)]
pub struct Fabric {
    /// The host of each rank, arbitrary numbers.
    pub hosts: Vec<u32>,
    /// Between ranks of one host.
    pub local: Link,
    /// Between hosts: from one adapter to another.
    pub remote: Link,
    /// Cost of local work.
    pub compute: Compute,
    /// Adapters of a host. The *i*-th rank of a host uses `rails` of them from the (*i* ×
    /// `rails`)-th on, wrapped around.
    pub adapters: u32,
    /// Adapters (rails) of a rank: connection *c* uses the (*c* mod `rails`)-th.
    pub rails: u32,
    /// ns per byte of the memory that all messages within a host share; 0: unlimited.
    pub host_ns_per_byte: f64,
    /// Leaf switches, if their uplinks can be saturated.
    pub leaves: Option<Leaves>,
    /// Stragglers: ranks that are slower, or begin later.
    pub stragglers: Vec<Straggler>,
    /// Mean of the exponentially distributed jitter of a message's latency, ns; 0: none.
    pub jitter_ns: f64,
    /// Seed of the jitter.
    pub seed: u64,
}

/// Leaf switches below a network.
#[derive(Clone, Copy, PartialEq, Debug)]
pub struct Leaves {
    /// Hosts per leaf: those with equal quotients of host number and this.
    pub hosts: u32,
    /// Total rate of its hosts' adapters, divided by that of its uplinks.
    pub oversubscription: f64,
    /// Latency added to messages between leaves, ns.
    pub latency_ns: f64,
}

/// A straggler.
#[derive(Clone, Copy, PartialEq, Debug)]
pub struct Straggler {
    /// The rank.
    pub rank: u32,
    /// Factor of its processor times.
    pub slowness: f64,
    /// Delay of its beginning, ns.
    pub late_ns: f64,
}

impl Fabric {
    /// `ranks` ranks, each on a host of its own with one adapter, and nothing shared.
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

    /// The number of ranks.
    #[must_use]
    pub fn ranks(&self) -> u32 {
        self.hosts.len() as u32
    }

    /// Whether links are not shared, all peers are equally far, and no rank is slow.
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
