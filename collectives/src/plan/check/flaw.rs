//! What can be wrong with a plan.

use core::fmt;

use crate::plan::{Collective, Form, Place};
use crate::types::Rank;

/// What is wrong with a plan, and where.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{at}: {fault}")]
pub struct Flaw {
    /// Where.
    pub at: At,
    /// What.
    pub fault: Fault,
}

/// A place in a plan.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum At {
    /// The plan as a whole.
    Plan,
    /// What a rank has in the end.
    End {
        /// The rank.
        rank: Rank,
    },
    /// A step, counted from 0.
    Step {
        /// The rank.
        rank: Rank,
        /// Of which strand.
        strand: u32,
        /// Which one.
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

/// What is wrong.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum Fault {
    /// The shape says what no collective is.
    #[error("{0}")]
    Shape(&'static str),
    /// A program is missing, or one of its strands.
    #[error("every rank needs a program, all of as many strands")]
    Programs,
    /// A block that the place doesn't have.
    #[error("{place} has no block {block}, it has {blocks}")]
    NoBlock {
        /// The place.
        place: Place,
        /// The block.
        block: u32,
        /// How many there are.
        blocks: u32,
    },
    /// A rank that is no member, or the rank itself.
    #[error("rank {0} is nobody to exchange messages with")]
    Peer(Rank),
    /// Messages that nobody receives, or receives that nobody serves.
    #[error("rank {from} sends rank {to} {sent} messages in this strand, and that one receives {received}")]
    Unmatched {
        /// The sender.
        from: Rank,
        /// The receiver.
        to: Rank,
        /// How many are sent.
        sent: u32,
        /// How many are received.
        received: u32,
    },
    /// A message that is not what its receiver takes it for.
    #[error("rank {from} has sent {sent:?}s, and {expected:?}s are expected")]
    Forms {
        /// The sender.
        from: Rank,
        /// What was sent.
        sent: Form,
        /// What was expected.
        expected: Form,
    },
    /// Spans of different numbers of blocks.
    #[error("{from} blocks do not go into {into}")]
    Blocks {
        /// How many there are.
        from: u32,
        /// How many there should be.
        into: u32,
    },
    /// A block that is not as long as what it is to hold.
    #[error(
        "data block {data} does not fit block {block} of {place} whatever the count: that is as long as data block {like}"
    )]
    Length {
        /// What it is to hold.
        data: u32,
        /// The place.
        place: Place,
        /// The block.
        block: u32,
        /// Which data block it is as long as.
        like: u32,
    },
    /// A block that nothing has been written to.
    #[error("nothing is in block {block} of {place} yet")]
    Undefined {
        /// The place.
        place: Place,
        /// The block.
        block: u32,
    },
    /// A block was written where nothing of this kind belongs.
    #[error("{place} is no place for {what}")]
    Place {
        /// The place.
        place: Place,
        /// What does not belong there.
        what: &'static str,
    },
    /// A reduction of blocks that are not the same one.
    #[error("data block {0} is reduced with data block {1}")]
    Apples(u32, u32),
    /// A contribution twice.
    #[error("rank {contributor}'s contribution to data block {data} is reduced twice")]
    Twice {
        /// Whose.
        contributor: Rank,
        /// To which block.
        data: u32,
    },
    /// A whole result is reduced further.
    #[error("data block {0} has all contributions already, and is reduced further")]
    Whole(u32),
    /// A result that is not whole.
    #[error("data block {data} lacks the contribution of rank {contributor}")]
    Lacks {
        /// The block.
        data: u32,
        /// Whose is missing.
        contributor: Rank,
    },
    /// A reduction in a collective that reduces nothing.
    #[error("{0} reduces nothing")]
    Reduces(Collective),
    /// A reduction of nothing.
    #[error("there is nothing to reduce")]
    NoSources,
    /// What is read and what is written overlap without being the same.
    #[error("what is read and what is written are neither the same blocks nor apart")]
    Overlap,
    /// Two strands use a block that one of them writes.
    #[error("strands {0} and {1} both use block {2} of {3}, and it is written", strands.0, strands.1, block, place)]
    Shared {
        /// The strands; the first is the writer, or one of them.
        strands: (u32, u32),
        /// The block.
        block: u32,
        /// The place.
        place: Place,
    },
    /// A wrong block of the output.
    #[error("block {block} of output has data block {found}, where {expected} belongs")]
    Wrong {
        /// The block of the output.
        block: u32,
        /// What it has.
        found: u32,
        /// What it should have.
        expected: u32,
    },
    /// The ranks wait for one another: the chain of steps that do.
    #[error("waits in a cycle: {}", .0.iter().map(ToString::to_string).collect::<Vec<_>>().join("; "))]
    Cycle(Vec<Wait>),
    /// The ranks wait for one another if messages are longer than the memory for them on their way.
    #[error("waits in a cycle where messages are long: {}", .0.iter().map(ToString::to_string).collect::<Vec<_>>().join("; "))]
    LongCycle(Vec<Wait>),
    /// A barrier that a rank leaves before another has come.
    #[error("leaves the barrier and does not know that rank {0} has come")]
    NotCome(Rank),
}

/// A step that waits.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Wait {
    /// Whose step.
    pub rank: Rank,
    /// Of which strand.
    pub strand: u32,
    /// Which one.
    pub step: u32,
    /// For whom.
    pub peer: Rank,
    /// For what.
    pub why: Why,
}

/// What a step waits for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Why {
    /// A message.
    Message,
    /// The message before to be received.
    Room,
    /// A message to be out of the blocks that the step writes.
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
            Why::Room => "to receive the message before",
            Why::Overwrite => "to receive what this step overwrites",
        })
    }
}
