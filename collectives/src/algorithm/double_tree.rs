//! Double binary tree: two binary trees with half of the count each.
//!
//! The root, position 0, is above both trees; the m = p−1 others have the labels 1 … m in each. A
//! tree is in-order: label x has as many levels below it as x has trailing zero bits, its left
//! child is the middle of the labels on its left, and its right child that of the existing labels
//! on its right. So odd labels are leaves. The second tree's labels are shifted by one: an even
//! label in one tree is odd in the other, so each rank has children in at most one tree. Hence no
//! rank but the root sends or receives more than 1·n each way, whereas inner ranks of a single
//! binary tree send 2·n. (P. Sanders, J. Speck, J. L. Träff: Two-tree algorithms for full bandwidth
//! broadcast, reduction and scan, 2009.)
//!
//! Each tree is a strand with a block of its own. ⌊log₂ m⌋+1 hops from the farthest leaf to the
//! root. Slices are pipelined through the trees.

use super::tree::{Node, lowest_bit};
use super::{Members, Recipe, no_blocks};
use crate::plan::{BlockForm, PlanMemory};

/// Broadcast.
///
/// ⌊log₂ (p−1)⌋+1 steps; no rank sends more than n, each but the root receives n.
pub(super) const BROADCAST: Recipe = Recipe {
    blocks: |_| 2,
    strands: 2,
    in_place: true,
    deterministic: true,
    steps: |members, tree, v| Box::new(node(members, tree, v).broadcast().into_iter()),
    scratch: no_blocks,
    partial: no_blocks,
};

/// Reduce: the reverse of broadcast.
///
/// ⌊log₂ (p−1)⌋+1 steps; no rank receives more than n, each but the root sends n. Each reduces its
/// own contribution with its right subtree, then with its left: (x ⊕ right) ⊕ left. The order
/// depends on the tree of an element.
pub(super) const REDUCE: Recipe = Recipe {
    blocks: |_| 2,
    strands: 2,
    in_place: true,
    deterministic: false,
    steps: |members, tree, v| Box::new(node(members, tree, v).reduce().into_iter()),
    scratch: no_blocks,
    partial,
};

/// All-reduce: reduce to the first of the order, and broadcast from it.
///
/// 2·(⌊log₂ (p−1)⌋+1) steps; no rank sends or receives more than 2·n. Order of reduction as in
/// reduce.
pub(super) const ALL_REDUCE: Recipe = Recipe {
    blocks: |_| 2,
    strands: 2,
    in_place: true,
    deterministic: false,
    steps: |members, tree, v| {
        let node = node(members, tree, v);
        Box::new(node.reduce().into_iter().chain(node.send_down(PlanMemory::Output)))
    },
    scratch: no_blocks,
    partial,
};

/// A block for the tree in which the member has children.
fn partial(members: &Members, v: u32) -> Vec<u32> {
    let u = members.distance_from_root(v);
    let inner = |&tree: &u32| u > 0 && label(members.ranks() - 1, tree, u).is_multiple_of(2);
    (0..2).find(inner).into_iter().collect()
}

/// The label in `tree` of the `u`th member after the root, of `m`.
const fn label(m: u32, tree: u32, u: u32) -> u32 {
    match (tree, u) {
        (0, u) => u,
        (_, 1) => m,
        (_, u) => u - 1,
    }
}

const fn member_with_label(m: u32, tree: u32, label: u32) -> u32 {
    match tree {
        0 => label,
        _ if label == m => 1,
        _ => label + 1,
    }
}

fn node(members: &Members, tree: u32, v: u32) -> Node {
    let m = members.ranks() - 1;
    let top = 1 << m.ilog2();
    let who = |label| members.rank_at_distance(member_with_label(m, tree, label));
    let child = |label: u32| {
        (
            who(label),
            if label.is_multiple_of(2) {
                BlockForm::Partial
            } else {
                BlockForm::Element
            },
        )
    };
    let block = tree;
    let u = members.distance_from_root(v);
    if u == 0 {
        let children = vec![child(top)];
        return Node {
            parent: None,
            children,
            block,
        };
    }
    let x = label(m, tree, u);
    let parent = if x == top {
        members.rank_at_distance(0)
    } else {
        who(parent_label(x, m))
    };
    let half = lowest_bit(x) / 2;
    // A missing right child is replaced by the root of its left subtree.
    let right = std::iter::successors(Some(half), |distance| Some(distance / 2)).take_while(|&distance| distance > 0);
    let right = right.map(|distance| x + distance).find(|&label| label <= m);
    let left = (half > 0).then(|| x - half);
    Node {
        parent: Some(parent),
        children: right.into_iter().chain(left).map(child).collect(),
        block,
    }
}

/// The parent of label `x`, which is not the top, among 1 … `m`: the nearest existing label.
fn parent_label(x: u32, m: u32) -> u32 {
    let mut label = x;
    loop {
        let bit = lowest_bit(label);
        label = if label & bit << 1 != 0 {
            label - bit
        } else {
            label + bit
        };
        if label <= m {
            return label;
        }
    }
}
