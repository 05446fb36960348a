//! Double binary tree: two binary trees with half of the count each.
//!
//! Position 0, the root, is above both trees; the m = p−1 others have the labels 1 … m in each.
//! Trees are in-order: label x has as many levels below it as trailing zero bits, so odd labels are
//! leaves. The second tree's labels are shifted by one, so no rank has children in both, and none
//! but the root sends or receives more than 1·n each way. (P. Sanders, J. Speck, J. L. Träff:
//! Two-tree algorithms for full bandwidth broadcast, reduction and scan, 2009.)
//!
//! Each tree is a strand with its own block; ⌊log₂ m⌋+1 hops from the farthest leaf to the root.

use super::tree::{Node, lowest_bit};
use super::{Members, Recipe, SINGLE_RANK};
use crate::plan::{BlockForm, PlanMemory};

/// ⌊log₂ (p−1)⌋+1 steps; no rank sends more than n, each but the root receives n.
pub(super) const BROADCAST: Recipe = Recipe {
    blocks: |_| 2,
    strands: 2,
    steps: |members, tree, v| Box::new(node(members, tree, v).broadcast().into_iter()),
    ..SINGLE_RANK
};

/// ⌊log₂ (p−1)⌋+1 steps; no rank receives more than n, each but the root sends n. Each reduces (own
/// ⊕ right subtree) ⊕ left subtree. The order depends on the tree of an element.
pub(super) const REDUCE: Recipe = Recipe {
    blocks: |_| 2,
    strands: 2,
    deterministic: false,
    steps: |members, tree, v| Box::new(node(members, tree, v).reduce().into_iter()),
    partial,
    ..SINGLE_RANK
};

/// Reduce to the first of the order, then broadcast. 2·(⌊log₂ (p−1)⌋+1) steps; no rank sends or
/// receives more than 2·n. Order of reduction as in reduce.
pub(super) const ALL_REDUCE: Recipe = Recipe {
    blocks: |_| 2,
    strands: 2,
    deterministic: false,
    steps: |members, tree, v| {
        let node = node(members, tree, v);
        Box::new(node.reduce().into_iter().chain(node.send_down(PlanMemory::Output)))
    },
    partial,
    ..SINGLE_RANK
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
