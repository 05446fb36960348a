//! Flaws of plans.

use core::fmt;

use crate::plan::{BlockForm, Collective, PlanMemory};
use crate::types::Rank;

/// A flaw and its position.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{at}: {fault}")]
pub struct Flaw {
    /// The position.
    pub at: At,
    /// The fault.
    pub fault: Fault,
}

/// A position in a plan.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum At {
    /// The plan as a whole.
    Plan,
    /// The final contents of a rank.
    End {
        /// The rank.
        rank: Rank,
    },
    /// A step, counted from 0.
    Step {
        /// The rank.
        rank: Rank,
        /// The strand.
        strand: u32,
        /// The step.
        step: u32,
    },
}

impl fmt::Display for At {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Plan => write!(f, "the plan"),
            Self::End { rank } => write!(f, "rank {rank}, in the end"),
            Self::Step { rank, strand, step } => write!(f, "rank {rank}, strand {strand}, step {step}"),
        }
    }
}

/// A fault.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum Fault {
    /// The shape is invalid.
    #[error("{0}")]
    Shape(&'static str),
    /// A program or a strand is missing.
    #[error("every rank needs a program, all of as many strands")]
    Programs,
    /// A block out of bounds.
    #[error("{place} has no block {block}, it has {blocks}")]
    NoBlock {
        /// The memory.
        place: PlanMemory,
        /// The block.
        block: u32,
        /// The number of blocks.
        blocks: u32,
    },
    /// The peer is not a member, or the rank itself.
    #[error("rank {0} is not a peer to exchange messages with")]
    Peer(Rank),
    /// Numbers of sends and receives that do not match.
    #[error("rank {from} sends rank {to} {sent} messages in this strand, and that one receives {received}")]
    Unmatched {
        /// The sender.
        from: Rank,
        /// The receiver.
        to: Rank,
        /// Messages sent.
        sent: u32,
        /// Messages received.
        received: u32,
    },
    /// A message in another form than expected.
    #[error("rank {from} has sent {sent:?}s, and {expected:?}s are expected")]
    FormMismatch {
        /// The sender.
        from: Rank,
        /// The form sent.
        sent: BlockForm,
        /// The form expected.
        expected: BlockForm,
    },
    /// Spans of different numbers of blocks.
    #[error("{from} blocks do not go into {into}")]
    Blocks {
        /// Blocks of the source.
        from: u32,
        /// Blocks of the target.
        into: u32,
    },
    /// A block whose length differs from that of the data written to it.
    #[error(
        "data block {data} does not fit block {block} of {place} whatever the count: that is as long as data block {length_of}"
    )]
    Length {
        /// The data block written.
        data: u32,
        /// The memory.
        place: PlanMemory,
        /// The block.
        block: u32,
        /// The data block whose length it has.
        length_of: u32,
    },
    /// A read of a block that was never written.
    #[error("nothing is in block {block} of {place} yet")]
    Undefined {
        /// The memory.
        place: PlanMemory,
        /// The block.
        block: u32,
    },
    /// A write to a memory that does not permit it.
    #[error("{place} is no place for {what}")]
    Place {
        /// The memory.
        place: PlanMemory,
        /// The data written.
        what: &'static str,
    },
    /// A reduction of different data blocks.
    #[error("data block {0} is reduced with data block {1}")]
    DifferentBlocks(u32, u32),
    /// A duplicate contribution.
    #[error("rank {contributor}'s contribution to data block {data} is reduced twice")]
    Twice {
        /// The contributor.
        contributor: Rank,
        /// The data block.
        data: u32,
    },
    /// A complete result is reduced further.
    #[error("data block {0} has all contributions already, and is reduced further")]
    Whole(u32),
    /// An incomplete result.
    #[error("data block {data} lacks the contribution of rank {contributor}")]
    Lacks {
        /// The data block.
        data: u32,
        /// The missing contributor.
        contributor: Rank,
    },
    /// A reduction in a collective that is no reduction.
    #[error("{0} reduces nothing")]
    Reduces(Collective),
    /// A reduction without sources.
    #[error("there is nothing to reduce")]
    NoSources,
    /// Source and target overlap partly.
    #[error("what is read and what is written are neither the same blocks nor disjoint")]
    Overlap,
    /// Two strands use a block that one of them writes.
    #[error("strands {0} and {1} both use block {2} of {3}, and it is written", strands.0, strands.1, block, place)]
    Shared {
        /// The strands; the first is a writer.
        strands: (u32, u32),
        /// The block.
        block: u32,
        /// The memory.
        place: PlanMemory,
    },
    /// A wrong data block in the output.
    #[error("block {block} of output has data block {found}, where {expected} belongs")]
    Wrong {
        /// The block of the output.
        block: u32,
        /// The data block found.
        found: u32,
        /// The data block expected.
        expected: u32,
    },
    /// A cycle of waits: the waiting steps.
    #[error("waits in a cycle: {}", .0.iter().map(ToString::to_string).collect::<Vec<_>>().join("; "))]
    Cycle(Vec<Wait>),
    /// A cycle of waits if messages exceed the staging memory.
    #[error("waits in a cycle where messages are long: {}", .0.iter().map(ToString::to_string).collect::<Vec<_>>().join("; "))]
    LongCycle(Vec<Wait>),
    /// A rank leaves a barrier before another has entered.
    #[error("leaves the barrier and does not know that rank {0} has entered")]
    NotEntered(Rank),
}

/// A waiting step.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Wait {
    /// The rank.
    pub rank: Rank,
    /// The strand.
    pub strand: u32,
    /// The step.
    pub step: u32,
    /// The peer.
    pub peer: Rank,
    /// The reason.
    pub why: Why,
}

/// Why a step waits.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Why {
    /// A message.
    Message,
    /// Receipt of the previous message.
    QueueSlot,
    /// A message that has not left the blocks that the step writes.
    Overwrite,
}

impl fmt::Display for Wait {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self {
            rank,
            strand,
            step,
            peer,
            ..
        } = self;
        write!(f, "rank {rank}, strand {strand}, step {step} waits for rank {peer} ")?;
        f.write_str(match self.why {
            Why::Message => "to send",
            Why::QueueSlot => "to receive the message before",
            Why::Overwrite => "to receive what this step overwrites",
        })
    }
}
