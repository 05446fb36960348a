//! Exchange of lengths: where parts have different lengths, both ends of a connection send how many
//! bytes they send and expect, and a mismatch fails the operation.
//!
//! A rank sends its lengths to all its peers before anything else of the operation. Eager and LL
//! messages leave at once, as they go into slots that are not consumed after a mismatch; granted
//! messages and consumption wait for the peer's lengths.
//!
//! No cycle of ranks waits for slots of lengths. Of those that wait for one, consider a rank in the
//! earliest operation: its receiver has received those of all earlier operations, and holds back
//! credits for less than half a ring of them; this operation has one.

use super::{StrandRunner, link};
use crate::executor::error::Failed;
use crate::executor::layout::Layout;
use crate::executor::link::Link;
use crate::executor::operation::ActiveOperation;
use crate::executor::program::CompiledProgram;
use crate::failure::Awaited;
use crate::kernel::Function;
use crate::plan::Step;
use crate::types::Rank;

/// The bytes that a rank sends to a peer and expects from it in one operation.
#[derive(Clone, Copy, Debug)]
pub(in crate::executor) struct ExpectedLengths {
    rank: Rank,
    peer: Rank,
    sends: u64,
    expects: u64,
}

impl ExpectedLengths {
    /// The lengths by strand and peer; with a root, only between the root and another rank.
    pub(in crate::executor) fn of(
        program: &CompiledProgram,
        layout: &Layout,
        function: &Function,
        (rank, root): (Rank, Option<Rank>),
    ) -> Box<[Box<[Self]>]> {
        let strand = |strand: &crate::executor::program::StrandProgram| {
            let mut all: Vec<Self> = Vec::new();
            for instruction in &strand.instructions {
                let Some((peer, form, span)) = instruction.step.message() else {
                    continue;
                };
                if root.is_some_and(|root| root != rank && root != peer) {
                    continue;
                }
                let pieces = instruction.pieces.iter().filter(|_| span.blocks > 0);
                let elements = pieces
                    .map(|&(block, blocks)| layout.element_range(span.place, span.first + block, blocks, 0).len)
                    .fold(0, u64::saturating_add);
                let bytes = elements.saturating_mul(function.bytes(form) as u64);
                let index = all.iter().position(|lengths| lengths.peer == peer).unwrap_or(all.len());
                if index == all.len() {
                    all.push(Self {
                        rank,
                        peer,
                        sends: 0,
                        expects: 0,
                    });
                }
                let lengths = &mut all[index];
                let sum = match instruction.step {
                    Step::Send { .. } => &mut lengths.sends,
                    _ => &mut lengths.expects,
                };
                *sum = sum.saturating_add(bytes);
            }
            all.into()
        };
        program.strands.iter().map(strand).collect()
    }

    fn check_against(&self, (sends, expects): (u64, u64), op: &ActiveOperation, operation: u64) -> Result<(), Failed> {
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

impl StrandRunner {
    pub(super) fn begin_length_exchange(&mut self, lengths: &[ExpectedLengths]) {
        self.lengths_sent = 0;
        self.awaited_lengths.clear();
        self.awaited_lengths.extend_from_slice(lengths);
    }

    /// Returns whether there was progress.
    ///
    /// # Errors
    /// When a peer's lengths differ.
    pub(super) fn exchange_lengths(
        &mut self,
        op: &ActiveOperation,
        lengths: &[ExpectedLengths],
        links: &mut [Option<Link>],
    ) -> Result<bool, Failed> {
        let mut moved = false;
        while let Some(lengths) = lengths.get(self.lengths_sent) {
            let peer = link(links, lengths.peer)?;
            if !peer.may_send_lengths() {
                break;
            }
            peer.send_lengths(lengths.sends, lengths.expects);
            self.lengths_sent += 1;
            moved = true;
        }
        let mut index = 0;
        while let Some(lengths) = self.awaited_lengths.get(index) {
            match link(links, lengths.peer)?.receive_lengths() {
                Some(theirs) => {
                    lengths.check_against(theirs, op, self.next)?;
                    self.awaited_lengths.swap_remove(index);
                    moved = true;
                }
                None => index += 1,
            }
        }
        Ok(moved)
    }

    #[inline]
    pub(super) fn awaits_lengths_from(&self, peer: Rank) -> bool {
        !self.awaited_lengths.is_empty() && self.awaited_lengths.iter().any(|lengths| lengths.peer == peer)
    }

    pub(super) fn waits_for_lengths(&self, op: &ActiveOperation) -> Option<(u32, u32, Rank, Awaited)> {
        let lengths = &op.ready.lengths.as_ref()?[self.strand as usize];
        if let Some(lengths) = lengths.get(self.lengths_sent) {
            return Some((self.channel, 0, lengths.peer, Awaited::Credit));
        }
        let last = self.is_executed().then(|| self.awaited_lengths.first())??;
        let steps = op.ready.program.strands[self.strand as usize].instructions.len();
        Some((self.channel, steps as u32, last.peer, Awaited::Message))
    }
}
