//! Binomial tree: member u, counted from the root in the order, has the children u+1, u+2, u+4 …
//! below its own lowest bit, and so a subtree of consecutive members. ⌈log₂ p⌉ hops, and as many
//! messages of the root: for small counts.

use super::{Members, Recipe, SINGLE_RANK, copy, recv, send};
use crate::plan::{BlockForm, PlanMemory, Span, Step};
use crate::types::Rank;

/// The largest subtrees first. ⌈log₂ p⌉ steps; the root sends ⌈log₂ p⌉·n, each other receives n.
pub(super) const BROADCAST: Recipe = Recipe {
    steps: |members, _, v| Box::new(Binomial::new(members, v).node().broadcast().into_iter()),
    ..SINGLE_RANK
};

/// ⌈log₂ p⌉ steps; the root receives ⌈log₂ p⌉·n, each other rank sends n. Each reduces its own
/// contribution with its children's, the smallest subtrees first: ((u ⊕ s₁) ⊕ s₂) ⊕ s₄ …
pub(super) const REDUCE: Recipe = Recipe {
    steps: |members, _, v| Box::new(Binomial::new(members, v).node().reduce().into_iter()),
    partial,
    ..SINGLE_RANK
};

/// Reduce to the first of the order, then broadcast. 2·⌈log₂ p⌉ steps; the first rank sends and
/// receives ⌈log₂ p⌉·n, each other exchanges n with its parent and each child, each way. Order as
/// in reduce.
pub(super) const ALL_REDUCE: Recipe = Recipe {
    steps: |members, _, v| {
        let node = Binomial::new(members, v).node();
        Box::new(node.reduce().into_iter().chain(node.send_down(PlanMemory::Output)))
    },
    partial,
    ..SINGLE_RANK
};

/// The block of partial results of a rank that has children and a parent, or several children.
fn partial(members: &Members, v: u32) -> Vec<u32> {
    let at = Binomial::new(members, v);
    let neighbours = at.children().count() + usize::from(at.u > 0);
    (at.size(at.u) > 1 && neighbours > 1).then_some(0).into_iter().collect()
}

/// Each collects its subtree's parts, and sends them as one message; if the ranks are not
/// consecutive, the root sorts by copying. ⌈log₂ p⌉ steps; the root receives (p−1)/p·n.
pub(super) const GATHER: Recipe = Recipe {
    steps: |members, _, v| Box::new(Binomial::new(members, v).gather().into_iter()),
    scratch: subtree_parts,
    ..SINGLE_RANK
};

/// The reverse of gather: ⌈log₂ p⌉ steps; the root sends (p−1)/p·n.
pub(super) const SCATTER: Recipe = Recipe {
    steps: |members, _, v| Box::new(Binomial::new(members, v).scatter().into_iter()),
    scratch: subtree_parts,
    ..SINGLE_RANK
};

fn subtree_parts(members: &Members, v: u32) -> Vec<u32> {
    let at = Binomial::new(members, v);
    let part = |u| members.rank_at_distance(u).0;
    if at.u == 0 {
        let unsorted = at.children().filter(|&child| at.run(child).is_none());
        return unsorted
            .flat_map(|child| (child..child + at.size(child)).map(part))
            .collect();
    }
    let size = at.size(at.u);
    let parts = if size > 1 { size } else { 0 };
    (0..parts).map(|index| part(at.u + index)).collect()
}

/// A message from each up to the first of the order, and one back. 2·⌈log₂ p⌉ steps, no bytes.
pub(super) const BARRIER: Recipe = Recipe {
    in_place: false,
    steps: |members, _, v| {
        let Node { parent, children, .. } = Binomial::new(members, v).node();
        let below: Vec<_> = children.into_iter().map(|(child, _)| child).collect();
        let come = below.clone().into_iter().map(|child| recv(child, Span::empty()));
        let through = parent
            .into_iter()
            .flat_map(|parent| [send(parent, Span::empty()), recv(parent, Span::empty())]);
        let go = below.into_iter().rev().map(|child| send(child, Span::empty()));
        Box::new(come.chain(through).chain(go))
    },
    ..SINGLE_RANK
};

struct Binomial<'a> {
    members: &'a Members,
    /// Distance from the root.
    u: u32,
}

impl<'a> Binomial<'a> {
    fn new(members: &'a Members, v: u32) -> Self {
        let u = members.distance_from_root(v);
        Self { members, u }
    }

    fn size(&self, u: u32) -> u32 {
        let p = self.members.ranks();
        if u == 0 { p } else { (p - u).min(lowest_bit(u)) }
    }

    /// The children, the smallest subtrees first.
    fn children(&self) -> impl DoubleEndedIterator<Item = u32> + use<> {
        let (u, size) = (self.u, self.size(self.u));
        (0..u32::BITS - (size - 1).leading_zeros()).map(move |bit| u + (1 << bit))
    }

    fn parent(&self) -> Option<Rank> {
        (self.u > 0).then(|| self.members.rank_at_distance(self.u - lowest_bit(self.u)))
    }

    fn node(&self) -> Node {
        let form = |child| {
            if self.size(child) > 1 {
                BlockForm::Partial
            } else {
                BlockForm::Element
            }
        };
        Node {
            parent: self.parent(),
            children: self
                .children()
                .map(|child| (self.members.rank_at_distance(child), form(child)))
                .collect(),
            block: 0,
        }
    }

    fn run(&self, child: u32) -> Option<(u32, u32)> {
        let size = self.size(child);
        let run = self.members.runs(self.members.root_position + child, size).next()?;
        (run.ranks == size).then_some((run.rank, size))
    }

    /// The parts of `child`'s subtree in this member's scratch.
    fn parts(&self, child: u32) -> Span {
        let before = if self.u == 0 {
            let unsorted = self
                .children()
                .filter(|&other| other < child && self.run(other).is_none());
            unsorted.map(|other| self.size(other)).sum()
        } else {
            child - self.u
        };
        Span::new(PlanMemory::Scratch, before, self.size(child))
    }

    /// For each run of the parts of `child`'s subtree: in the root's scratch, and in its `place`.
    fn sorted(&self, child: u32, place: PlanMemory) -> impl Iterator<Item = (Span, Span)> {
        let parts = self.parts(child);
        let runs = self.members.runs(self.members.root_position + child, parts.blocks);
        runs.map(move |run| {
            let scratch = Span::new(PlanMemory::Scratch, parts.first + run.at, run.ranks);
            (scratch, Span::new(place, run.rank, run.ranks))
        })
    }

    fn gather(&self) -> Vec<Step> {
        let input = Span::block(PlanMemory::Input, 0);
        let who = |child| self.members.rank_at_distance(child);
        let Some(parent) = self.parent() else {
            let mut steps = vec![copy(input, Span::block(PlanMemory::Output, self.members.shape.root.0))];
            for child in self.children() {
                if let Some((first, parts)) = self.run(child) {
                    steps.push(recv(who(child), Span::new(PlanMemory::Output, first, parts)));
                } else {
                    steps.push(recv(who(child), self.parts(child)));
                    steps.extend(
                        self.sorted(child, PlanMemory::Output)
                            .map(|(scratch, output)| copy(scratch, output)),
                    );
                }
            }
            return steps;
        };
        let size = self.size(self.u);
        if size == 1 {
            return vec![send(parent, input)];
        }
        let mut steps = vec![copy(input, Span::block(PlanMemory::Scratch, 0))];
        steps.extend(self.children().map(|child| recv(who(child), self.parts(child))));
        steps.push(send(parent, Span::new(PlanMemory::Scratch, 0, size)));
        steps
    }

    fn scatter(&self) -> Vec<Step> {
        let output = Span::block(PlanMemory::Output, 0);
        let who = |child| self.members.rank_at_distance(child);
        let Some(parent) = self.parent() else {
            let mut steps = Vec::new();
            for child in self.children().rev() {
                if let Some((first, parts)) = self.run(child) {
                    steps.push(send(who(child), Span::new(PlanMemory::Input, first, parts)));
                } else {
                    steps.extend(
                        self.sorted(child, PlanMemory::Input)
                            .map(|(scratch, input)| copy(input, scratch)),
                    );
                    steps.push(send(who(child), self.parts(child)));
                }
            }
            steps.push(copy(Span::block(PlanMemory::Input, self.members.shape.root.0), output));
            return steps;
        };
        let size = self.size(self.u);
        if size == 1 {
            return vec![recv(parent, output)];
        }
        let mut steps = vec![recv(parent, Span::new(PlanMemory::Scratch, 0, size))];
        steps.extend(self.children().rev().map(|child| send(who(child), self.parts(child))));
        steps.push(copy(Span::block(PlanMemory::Scratch, 0), output));
        steps
    }
}

pub(super) const fn lowest_bit(u: u32) -> u32 {
    u & u.wrapping_neg()
}

pub(super) struct Node {
    pub(super) parent: Option<Rank>,
    /// Its children, the smallest subtrees first, and the form of what they send.
    pub(super) children: Vec<(Rank, BlockForm)>,
    pub(super) block: u32,
}

impl Node {
    pub(super) fn reduce(&self) -> Vec<Step> {
        let mut steps = Vec::with_capacity(self.children.len() + 1);
        let mut with = Span::block(PlanMemory::Input, self.block);
        for (index, &(from, form)) in self.children.iter().enumerate() {
            let whole = self.parent.is_none() && index + 1 == self.children.len();
            let into = if whole {
                Span::block(PlanMemory::Output, self.block)
            } else {
                Span::block(PlanMemory::Partial, 0)
            };
            steps.push(Step::RecvReduce { from, form, with, into });
            with = into;
        }
        steps.extend(self.parent.map(|parent| send(parent, with)));
        steps
    }

    /// The root has the block in `place`.
    pub(super) fn send_down(&self, place: PlanMemory) -> Vec<Step> {
        let output = Span::block(PlanMemory::Output, self.block);
        let source = if self.parent.is_some() {
            output
        } else {
            Span::block(place, self.block)
        };
        let parent_label = self.parent.map(|parent| recv(parent, output));
        let below = self.children.iter().rev().map(|&(child, _)| send(child, source));
        parent_label.into_iter().chain(below).collect()
    }

    pub(super) fn broadcast(&self) -> Vec<Step> {
        let mut steps = self.send_down(PlanMemory::Input);
        if self.parent.is_none() {
            let (input, output) = (
                Span::block(PlanMemory::Input, self.block),
                Span::block(PlanMemory::Output, self.block),
            );
            steps.push(copy(input, output));
        }
        steps
    }
}
