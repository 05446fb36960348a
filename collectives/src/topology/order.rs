//! The order in which rings and trees go through the ranks.

use super::cycle::{self, MOST};
use super::{Distance, Member, NvLink};
use crate::types::Rank;

/// How far down a way is looked at: peers say what it is.
const DEEPEST: usize = 64;
/// More ranks of a host than have a GPU each: their links are not looked at, two by two.
const MANY: usize = 256;
/// How much more NVLink counts than being near by PCIe: so much that no number of ranks that are looked at exactly makes up for it.
const NEAREST: u64 = 100;

/// An order of the ranks, whose places these are, in which each host is entered once. On a host each NUMA node, host bridge and switch is entered once; but where GPUs are joined by NVLink, neighbours are those that have most of it
/// between them, in the first place where there is least, and then those that are near by PCIe.
///
/// Hosts come in the order of their lowest ranks, which is how launchers place ranks that are near in the network; so do nodes, bridges and switches, and of ways through NVLinks that are equally good it is the first. All ranks that
/// give the same members get the same order.
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

/// Orders ranks of one host by what joins them, where NVLink joins some better than others; `closed` when they are the whole ring.
fn by_nvlink(ranks: &mut Vec<usize>, members: &[Member], closed: bool) {
    let gpus = ranks.iter().filter(|rank| members[**rank].gpu.is_some()).count();
    if gpus < 2 || ranks.len() > MANY {
        return;
    }
    let mut worth = vec![vec![0; ranks.len()]; ranks.len()];
    let mut joined = Vec::new();
    for one in 0..ranks.len() {
        for two in 0..one {
            let value = match Neighbours::of(&members[ranks[one]], &members[ranks[two]]) {
                Neighbours::OneGpu => MOST,
                Neighbours::Two { nvlink, near } => {
                    joined.push(nvlink);
                    (nvlink * NEAREST + near).min(MOST)
                }
            };
            (worth[one][two], worth[two][one]) = (value, value);
        }
    }
    // Behind an NVSwitch, and without any NVLink, the order by PCIe will do.
    if joined.iter().any(|nvlink| *nvlink != joined[0]) {
        let found = cycle::best(&worth, NEAREST, closed);
        *ranks = found.into_iter().map(|at| ranks[at]).collect();
    }
}

/// What two ranks of a host are to one another.
enum Neighbours {
    /// They have one GPU.
    OneGpu,
    /// What NVLink between them is worth, and how near they are by PCIe: less than [`NEAREST`].
    Two { nvlink: u64, near: u64 },
}

impl Neighbours {
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
            (Some(gpu), Some(other)) => gpu.nvlink(other).map_or(0, NvLink::worth),
            _ => 0,
        };
        Self::Two {
            nvlink: nvlink.min(MOST / NEAREST - 1),
            near,
        }
    }
}

/// Goes through ranks by what is at `depth` of the way to them, and further down.
fn descend(ranks: &[usize], members: &[Member], depth: usize, order: &mut Vec<usize>) {
    for group in groups(ranks, |rank| members[rank].place.pcie_path.get(depth)) {
        let ends = members[group[0]].place.pcie_path.len() <= depth;
        if ends || group.len() == 1 || depth == DEEPEST {
            order.extend(group);
        } else {
            descend(&group, members, depth + 1, order);
        }
    }
}

/// Ranks with the same key together, in the order of the first of each.
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
