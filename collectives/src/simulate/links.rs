//! The links between the ranks of a fabric, and the time until which each is occupied.

use std::collections::BTreeMap;

use super::{Fabric, LinkName, LinkUse, Time};
use crate::cost::{DataMover, Link as Kind, payload};
use crate::types::{Protocol, Rank};

#[derive(Clone, Copy)]
struct Link {
    name: LinkName,
    ps_per_byte: f64,
    free: u64,
    busy: u64,
    bytes: f64,
}

#[derive(Clone, Copy)]
struct RankLocation {
    host: u32,
    leaf: u32,
    adapter: u32,
}

pub(super) struct Links {
    seats: Vec<RankLocation>,
    links: Vec<Link>,
    /// The first index in `links` of each kind; `None` if there are none.
    local: Option<usize>,
    memory: Option<usize>,
    adapters: Option<usize>,
    leaves: Option<usize>,
    adapters_per_host: u32,
    rails: u32,
    /// Latency added between leaves, ps.
    climb: u64,
    jitter_ps: f64,
    random: u64,
}

impl Links {
    pub(super) fn new(fabric: &Fabric, protocol: Protocol) -> Self {
        let adapters = fabric.adapters.max(1);
        let rails = fabric.rails.clamp(1, adapters);
        let numbers: BTreeMap<u32, u32> = {
            let mut hosts = fabric.hosts.clone();
            hosts.sort_unstable();
            hosts.dedup();
            hosts.into_iter().zip(0..).collect()
        };
        let mut members = vec![0; numbers.len()];
        let seats: Vec<RankLocation> = fabric
            .hosts
            .iter()
            .map(|named| {
                let host = numbers[named];
                let member: &mut u32 = &mut members[host as usize];
                let adapter = *member * rails % adapters;
                *member += 1;
                let leaf = fabric.leaves.map_or(0, |leaves| named / leaves.hosts.max(1));
                RankLocation { host, leaf, adapter }
            })
            .collect();
        let mut links = Vec::new();
        let mut add = |names: Vec<LinkName>, ns_per_byte: f64| {
            let at = links.len();
            links.extend(names.into_iter().map(|name| Link {
                name,
                ps_per_byte: ns_per_byte * 1e3,
                free: 0,
                busy: 0,
                bytes: 0.0,
            }));
            at
        };
        let ranks = || (0..fabric.ranks()).map(Rank);
        let beta = |kind: &Kind| kind.cost(protocol).beta_ns_per_byte;
        let local = (fabric.local.data_mover == DataMover::Device).then(|| {
            add(
                ranks()
                    .flat_map(|rank| [LinkName::LocalOut(rank), LinkName::LocalIn(rank)])
                    .collect(),
                beta(&fabric.local),
            )
        });
        let memory = (fabric.host_ns_per_byte > 0.0).then(|| {
            let names = numbers.keys().map(|&host| LinkName::Memory { host }).collect();
            add(names, fabric.host_ns_per_byte / payload(protocol))
        });
        let wires = (fabric.remote.data_mover == DataMover::Device).then(|| {
            let of = |host| {
                (0..adapters).flat_map(move |adapter| {
                    [
                        LinkName::AdapterOut { host, adapter },
                        LinkName::AdapterIn { host, adapter },
                    ]
                })
            };
            add(numbers.keys().copied().flat_map(of).collect(), beta(&fabric.remote))
        });
        let leaves = fabric.leaves.map(|leaves| {
            let last = seats.iter().map(|seat| seat.leaf).max().unwrap_or(0);
            let pipes = f64::from(leaves.hosts.max(1)) * f64::from(adapters);
            let names = (0..=last)
                .flat_map(|leaf| [LinkName::LeafUp(leaf), LinkName::LeafDown(leaf)])
                .collect();
            add(names, beta(&fabric.remote) * leaves.oversubscription / pipes)
        });
        Self {
            seats,
            links,
            local,
            memory,
            adapters: wires,
            leaves,
            adapters_per_host: adapters,
            rails,
            climb: fabric.leaves.map_or(0, |leaves| Time::from_ns(leaves.latency_ns).0),
            jitter_ps: fabric.jitter_ns * 1e3,
            random: fabric.seed,
        }
    }

    pub(super) fn are_on_one_host(&self, one: u32, other: u32) -> bool {
        self.seats[one as usize].host == self.seats[other as usize].host
    }

    /// Sends a message, not before `leaves`; returns when its last byte has passed.
    pub(super) fn carry(
        &mut self,
        from: u32,
        to: u32,
        together: bool,
        connection: u32,
        leaves: u64,
        bytes: f64,
    ) -> u64 {
        let mut passage = Passage {
            begins: leaves,
            ends: leaves,
        };
        if together {
            if let Some(local) = self.local {
                passage.through(&mut self.links[local + 2 * from as usize], bytes);
                passage.through(&mut self.links[local + 2 * to as usize + 1], bytes);
            }
            if let Some(memory) = self.memory {
                passage.through(&mut self.links[memory + self.seats[from as usize].host as usize], bytes);
            }
            return passage.ends;
        }
        let (sender, receiver) = (self.seats[from as usize], self.seats[to as usize]);
        let rail = connection % self.rails;
        let port = |seat: RankLocation| {
            2 * (seat.host * self.adapters_per_host + (seat.adapter + rail) % self.adapters_per_host) as usize
        };
        if let Some(adapters) = self.adapters {
            passage.through(&mut self.links[adapters + port(sender)], bytes);
        }
        if let Some(pipes) = self.leaves.filter(|_| sender.leaf != receiver.leaf) {
            passage.through(&mut self.links[pipes + 2 * sender.leaf as usize], bytes);
            passage.through(&mut self.links[pipes + 2 * receiver.leaf as usize + 1], bytes);
            passage.begins = passage.begins.saturating_add(self.climb);
            passage.ends = passage.ends.saturating_add(self.climb);
        }
        if let Some(adapters) = self.adapters {
            passage.through(&mut self.links[adapters + port(receiver) + 1], bytes);
        }
        passage.ends
    }

    pub(super) fn jitter(&mut self) -> u64 {
        if self.jitter_ps == 0.0 {
            return 0;
        }
        // SplitMix64.
        self.random = self.random.wrapping_add(0x9E37_79B9_7F4A_7C15);
        let mut mixed = self.random;
        mixed = (mixed ^ (mixed >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
        mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
        mixed ^= mixed >> 31;
        let above_zero = ((mixed >> 11) + 1) as f64 / (1u64 << 53) as f64;
        (-above_zero.ln() * self.jitter_ps).round() as u64
    }

    /// Link utilisation. With `one`, that rank's stands for every rank's.
    pub(super) fn used(self, one: Option<u32>) -> Vec<LinkUse> {
        let as_used = |link: &Link, name: LinkName| LinkUse {
            link: name,
            bytes: link.bytes,
            busy: Time(link.busy),
        };
        let used = |link: &&Link| link.busy > 0 || link.bytes > 0.0;
        let Some(_) = one else {
            return self
                .links
                .iter()
                .filter(used)
                .map(|link| as_used(link, link.name))
                .collect();
        };
        let of_one: Vec<&Link> = self.links.iter().filter(used).collect();
        let hosts: BTreeMap<u32, u32> = self
            .links
            .iter()
            .filter_map(|link| match link.name {
                LinkName::AdapterOut { host, .. } => Some(host),
                _ => None,
            })
            .zip(0..)
            .collect();
        let ranks = self.seats.len() as u32;
        let everyone = |link: &&Link| -> Vec<LinkName> {
            match link.name {
                LinkName::LocalOut(_) => (0..ranks).map(|rank| LinkName::LocalOut(Rank(rank))).collect(),
                LinkName::LocalIn(_) => (0..ranks).map(|rank| LinkName::LocalIn(Rank(rank))).collect(),
                LinkName::AdapterOut { adapter, .. } => hosts
                    .keys()
                    .map(|&host| LinkName::AdapterOut { host, adapter })
                    .collect(),
                LinkName::AdapterIn { adapter, .. } => hosts
                    .keys()
                    .map(|&host| LinkName::AdapterIn { host, adapter })
                    .collect(),
                other => vec![other],
            }
        };
        of_one
            .iter()
            .flat_map(|link| {
                everyone(link)
                    .into_iter()
                    .map(|name| as_used(link, name))
                    .collect::<Vec<_>>()
            })
            .collect()
    }
}

struct Passage {
    /// When its first byte is forwarded.
    begins: u64,
    /// When its last byte has passed.
    ends: u64,
}

impl Passage {
    fn through(&mut self, link: &mut Link, bytes: f64) {
        let takes = (bytes * link.ps_per_byte).round() as u64;
        self.begins = self.begins.max(link.free);
        link.free = self.begins.saturating_add(takes);
        self.ends = self.ends.max(link.free);
        link.busy = link.busy.saturating_add(takes);
        link.bytes += bytes;
    }
}
