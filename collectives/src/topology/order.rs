//! The order in which rings and trees go through the ranks.

use serde::{Deserialize, Serialize};

use super::Place;
use crate::types::Rank;

/// How far down a way is looked at: peers say what it is.
const DEEPEST: usize = 64;

/// Where a rank is: what ranks tell each other at the start.
#[derive(Clone, PartialEq, Eq, Debug, Default, Serialize, Deserialize)]
pub struct Member {
    /// What names its host, and no other.
    pub host: String,
    /// Where it is on it: its GPU's or adapter's place, or its processor's NUMA node.
    pub place: Place,
}

/// An order of the ranks, whose places these are, in which each host is entered once, and on a host each NUMA node, host bridge and switch is entered once.
///
/// Hosts come in the order of their lowest ranks, which is how launchers place ranks that are near in the network; so do nodes, bridges and switches. All ranks that give the same members get the same order.
#[must_use]
pub fn ring(members: &[Member]) -> Vec<Rank> {
    let all: Vec<usize> = (0..members.len()).collect();
    let mut order = Vec::with_capacity(members.len());
    for host in groups(&all, |rank| Some(members[rank].host.as_str())) {
        for node in groups(&host, |rank| members[rank].place.numa_node) {
            descend(&node, members, 0, &mut order);
        }
    }
    order
}

/// Goes through ranks by what is at `depth` of the way to them, and further down.
fn descend(ranks: &[usize], members: &[Member], depth: usize, order: &mut Vec<Rank>) {
    for group in groups(ranks, |rank| members[rank].place.pcie_path.get(depth)) {
        let ends = members[group[0]].place.pcie_path.len() <= depth;
        if ends || group.len() == 1 || depth == DEEPEST {
            order.extend(group.iter().map(|&rank| Rank(rank as u32)));
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
