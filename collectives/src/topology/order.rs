//! The order of ranks in rings and trees.

use super::cycle::{self, MAX_WEIGHT};
use super::{Distance, Member, NvLink};
use crate::types::Rank;

/// Maximum depth of a location: locations come from peers.
const MAX_DEPTH: usize = 64;
/// Above this number of ranks per host, NVLinks are not compared pairwise.
const MAX_GPU_RANKS: usize = 256;
/// NVLink outweighs the PCIe proximity of any number of ranks in the exhaustive search.
const NVLINK_WEIGHT: u64 = 100;

/// An order of the ranks in which each host is entered once, and on a host each NUMA node, host
/// bridge and switch; but if GPUs are connected by NVLink, the order maximises the least NVLink
/// capacity of neighbours, and then their PCIe proximity.
///
/// Hosts, nodes, bridges and switches are in the order of their lowest ranks, as launchers place
/// near ranks. All ranks with the same members compute the same order.
#[must_use]
pub fn ring(members: &[Member]) -> Vec<Rank> {
    let all: Vec<usize> = (0..members.len()).collect();
    let mut order = Vec::with_capacity(members.len());
    let hosts = groups(&all, |rank| Some(members[rank].host.as_str()));
    for host in &hosts {
        let mut near = Vec::with_capacity(host.len());
        for node in groups(host, |rank| members[rank].place.numa_node) {
            descend(&node, members, 0, &mut near);
        }
        by_nvlink(&mut near, members, hosts.len() == 1);
        order.extend(near.into_iter().map(|rank| Rank(rank as u32)));
    }
    order
}

/// Orders ranks by NVLink, if some pairs are better connected; `closed`: they are the whole ring.
fn by_nvlink(ranks: &mut Vec<usize>, members: &[Member], closed: bool) {
    let gpus = ranks.iter().filter(|rank| members[**rank].gpu.is_some()).count();
    if gpus < 2 || ranks.len() > MAX_GPU_RANKS {
        return;
    }
    let mut weight = vec![vec![0; ranks.len()]; ranks.len()];
    let mut joined = Vec::new();
    for one in 0..ranks.len() {
        for two in 0..one {
            let value = match PairWeight::of(&members[ranks[one]], &members[ranks[two]]) {
                PairWeight::OneGpu => MAX_WEIGHT,
                PairWeight::Two { nvlink, near } => {
                    joined.push(nvlink);
                    (nvlink * NVLINK_WEIGHT + near).min(MAX_WEIGHT)
                }
            };
            (weight[one][two], weight[two][one]) = (value, value);
        }
    }
    // Behind an NVSwitch, and without NVLink, the PCIe order is used.
    if joined.iter().any(|nvlink| *nvlink != joined[0]) {
        let found = cycle::best(&weight, NVLINK_WEIGHT, closed);
        *ranks = found.into_iter().map(|at| ranks[at]).collect();
    }
}

enum PairWeight {
    OneGpu,
    /// PCIe proximity is less than [`NVLINK_WEIGHT`].
    Two {
        nvlink: u64,
        near: u64,
    },
}

impl PairWeight {
    fn of(one: &Member, two: &Member) -> Self {
        let near = match one.place.distance(&two.place) {
            Distance::Same => 4,
            Distance::NvLink | Distance::Switch => 3,
            Distance::Bridge => 2,
            Distance::Node => 1,
            Distance::Cross => 0,
        };
        let nvlink = match (&one.gpu, &two.gpu) {
            (Some(gpu), Some(other)) if gpu.address == other.address => return Self::OneGpu,
            (Some(gpu), Some(other)) => gpu.nvlink(other).map_or(0, NvLink::weight),
            _ => 0,
        };
        Self::Two {
            nvlink: nvlink.min(MAX_WEIGHT / NVLINK_WEIGHT - 1),
            near,
        }
    }
}

fn descend(ranks: &[usize], members: &[Member], depth: usize, order: &mut Vec<usize>) {
    for group in groups(ranks, |rank| members[rank].place.pcie_path.get(depth)) {
        let ends = members[group[0]].place.pcie_path.len() <= depth;
        if ends || group.len() == 1 || depth == MAX_DEPTH {
            order.extend(group);
        } else {
            descend(&group, members, depth + 1, order);
        }
    }
}

fn groups<K: PartialEq>(ranks: &[usize], key: impl Fn(usize) -> K) -> Vec<Vec<usize>> {
    let mut groups: Vec<(K, Vec<usize>)> = Vec::new();
    for &rank in ranks {
        let key = key(rank);
        match groups.iter_mut().find(|(known, _)| *known == key) {
            Some((_, group)) => group.push(rank),
            None => groups.push((key, vec![rank])),
        }
    }
    groups.into_iter().map(|(_, group)| group).collect()
}
