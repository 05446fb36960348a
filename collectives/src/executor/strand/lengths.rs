//! ExpectedLengths: where the parts of an operation have lengths of their own, both ends of a connection say how much they mean to send and to receive, and find out when that is not the same.
//!
//! A rank says its lengths to all whom it has to do with as it begins the operation, before anything else of it, and hears theirs meanwhile. What needs no memory of the peer's leaves at once, as it lies in slots that nobody takes if it is
//! wrong; what has been granted waits until the peer has been heard, and so does whatever is received. The peer says its lengths before it sends or grants anything, so neither waits for long.
//!
//! No ranks wait for each other's slots: what is said of `fast_path` operations holds here too, with one of the lengths for each operation.

use super::cursor::{self, MessageCursor};
use super::{StrandRunner, link};
use crate::executor::error::Failed;
use crate::executor::layout::Layout;
use crate::executor::link::Link;
use crate::executor::operation::ActiveOperation;
use crate::executor::program::{CompiledProgram, message};
use crate::failure::Awaited;
use crate::kernel::Function;
use crate::plan::Step;
use crate::types::Rank;

/// What a rank means to go between it and another in one operation, in bytes.
#[derive(Clone, Copy, Debug)]
pub(in crate::executor) struct ExpectedLengths {
    rank: Rank,
    peer: Rank,
    sends: u64,
    expects: u64,
}

impl ExpectedLengths {
    /// SlotTransport strand: those with each rank that there are messages to or from, of operations laid out like this; with a root, on one of two ranks that is it alone.
    pub(in crate::executor) fn of(
        program: &CompiledProgram,
        layout: &Layout,
        function: &Function,
        (rank, root): (Rank, Option<Rank>),
    ) -> Box<[Box<[Self]>]> {
        let strand = |strand: &crate::executor::program::StrandProgram| {
            let mut all: Vec<Self> = Vec::new();
            for instruction in &strand.instructions {
                let Some((peer, form, span)) = message(&instruction.step) else {
                    continue;
                };
                if root.is_some_and(|root| root != rank && root != peer) {
                    continue;
                }
                let mut elements = 0_u64;
                let mut cursor = MessageCursor::default();
                while let Some(fragment) = cursor::next_fragment(layout, u64::MAX, instruction, span, 0, &mut cursor) {
                    elements = elements.saturating_add(fragment.len);
                    cursor::advance(&mut cursor, fragment);
                }
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

    /// What is wrong if the peer sends and expects so much.
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
    /// Nothing has been said, nor heard. Of an operation before, all was.
    pub(super) fn begin_length_exchange(&mut self, lengths: &[ExpectedLengths]) {
        self.lengths_sent = 0;
        self.awaited_lengths.clear();
        self.awaited_lengths.extend_from_slice(lengths);
    }

    /// Says what has not been said, and hears what there is. Whether that was anything.
    ///
    /// # Errors
    /// When a peer means something else.
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

    /// Whether a peer has still to say its lengths.
    #[inline]
    pub(super) fn awaits_lengths_from(&self, peer: Rank) -> bool {
        !self.awaited_lengths.is_empty() && self.awaited_lengths.iter().any(|lengths| lengths.peer == peer)
    }

    /// Whose lengths it waits for, or waits to say its own to: as a wait of the lane's, if there is no other before.
    pub(super) fn waits_for_lengths(&self, op: &ActiveOperation) -> Option<(u32, u32, Rank, Awaited)> {
        let lengths = &op.ready.lengths.as_ref()?[self.strand as usize];
        if let Some(lengths) = lengths.get(self.lengths_sent) {
            return Some((self.channel, 0, lengths.peer, Awaited::Credit));
        }
        let last = self.is_executed(op).then(|| self.awaited_lengths.first())??;
        Some((self.channel, self.sent.len() as u32, last.peer, Awaited::Message))
    }
}
