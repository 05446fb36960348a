//! Terms: where the parts of an operation have lengths of their own, both ends of a connection say how much they mean to send and to receive, and find out when that is not the same.
//!
//! A rank says its terms to all whom it has to do with as it begins the operation, before anything else of it, and hears theirs meanwhile. What needs no memory of the peer's leaves at once, as it lies in slots that nobody takes if it is
//! wrong; what has been granted waits until the peer has been heard, and so does whatever is received. The peer says its terms before it sends or grants anything, so neither waits for long.
//!
//! No ranks wait for each other's slots: what is said of `short` operations holds here too, with one of the terms for each operation.

use super::walk::{self, Walk};
use super::{Lane, link};
use crate::executor::code::{Code, message};
use crate::executor::error::Failed;
use crate::executor::layout::Layout;
use crate::executor::link::Link;
use crate::executor::operation::Running;
use crate::failure::Awaited;
use crate::kernel::Function;
use crate::plan::Step;
use crate::types::Rank;

/// What a rank means to go between it and another in one operation, in bytes.
#[derive(Clone, Copy, Debug)]
pub(in crate::executor) struct Terms {
    rank: Rank,
    peer: Rank,
    sends: u64,
    expects: u64,
}

impl Terms {
    /// By strand: those with each rank that there are messages to or from, of operations laid out like this; with a root, on one of two ranks that is it alone.
    pub(in crate::executor) fn of(
        code: &Code,
        layout: &Layout,
        function: &Function,
        (rank, root): (Rank, Option<Rank>),
    ) -> Box<[Box<[Self]>]> {
        let strand = |strand: &crate::executor::code::Strand| {
            let mut all: Vec<Self> = Vec::new();
            for instruction in &strand.instructions {
                let Some((peer, form, span)) = message(&instruction.step) else {
                    continue;
                };
                if root.is_some_and(|root| root != rank && root != peer) {
                    continue;
                }
                let mut elements = 0_u64;
                let mut walk = Walk::default();
                while let Some(fragment) = walk::next(layout, u64::MAX, instruction, span, 0, &mut walk) {
                    elements = elements.saturating_add(fragment.len);
                    walk::pass(&mut walk, fragment);
                }
                let bytes = elements.saturating_mul(function.bytes(form) as u64);
                let index = all.iter().position(|terms| terms.peer == peer).unwrap_or(all.len());
                if index == all.len() {
                    all.push(Self {
                        rank,
                        peer,
                        sends: 0,
                        expects: 0,
                    });
                }
                let terms = &mut all[index];
                let sum = match instruction.step {
                    Step::Send { .. } => &mut terms.sends,
                    _ => &mut terms.expects,
                };
                *sum = sum.saturating_add(bytes);
            }
            all.into()
        };
        code.strands.iter().map(strand).collect()
    }

    /// What is wrong if the peer sends and expects so much.
    fn compare(&self, (sends, expects): (u64, u64), op: &Running, operation: u64) -> Result<(), Failed> {
        let wrong = |from, to, bytes, expected| Failed::Parts {
            operation,
            collective: op.collective,
            from,
            to,
            bytes,
            expected,
        };
        if sends != self.expects {
            return Err(wrong(self.peer, self.rank, sends, self.expects));
        }
        if self.sends != expects {
            return Err(wrong(self.rank, self.peer, self.sends, expects));
        }
        Ok(())
    }
}

impl Lane {
    /// Nothing has been said, nor heard. Of an operation before, all was.
    pub(super) fn begin_terms(&mut self, terms: &[Terms]) {
        self.said = 0;
        self.unheard.clear();
        self.unheard.extend_from_slice(terms);
    }

    /// Says what has not been said, and hears what there is. Whether that was anything.
    ///
    /// # Errors
    /// When a peer means something else.
    pub(super) fn come_to_terms(
        &mut self,
        op: &Running,
        terms: &[Terms],
        links: &mut [Option<Link>],
    ) -> Result<bool, Failed> {
        let mut moved = false;
        while let Some(terms) = terms.get(self.said) {
            let peer = link(links, terms.peer)?;
            if !peer.may_say_terms() {
                break;
            }
            peer.say_terms(terms.sends, terms.expects);
            self.said += 1;
            moved = true;
        }
        let mut index = 0;
        while let Some(terms) = self.unheard.get(index) {
            match link(links, terms.peer)?.hear_terms() {
                Some(theirs) => {
                    terms.compare(theirs, op, self.next)?;
                    self.unheard.swap_remove(index);
                    moved = true;
                }
                None => index += 1,
            }
        }
        Ok(moved)
    }

    /// Whether a peer has still to say its terms.
    #[inline]
    pub(super) fn is_unheard(&self, peer: Rank) -> bool {
        !self.unheard.is_empty() && self.unheard.iter().any(|terms| terms.peer == peer)
    }

    /// Whose terms it waits for, or waits to say its own to: as a wait of the lane's, if there is no other before.
    pub(super) fn waits_for_terms(&self, op: &Running) -> Option<(u32, u32, Rank, Awaited)> {
        let terms = &op.ready.terms.as_ref()?[self.strand as usize];
        if let Some(terms) = terms.get(self.said) {
            return Some((self.channel, 0, terms.peer, Awaited::Credit));
        }
        let last = self.is_over(op).then(|| self.unheard.first())??;
        Some((self.channel, self.sent.len() as u32, last.peer, Awaited::Message))
    }
}
