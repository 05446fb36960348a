//! Plans: schedules of sends, receives and reductions of each rank, step by step.
//!
//! A plan is about *data blocks*, never about bytes: [`Shape`] numbers the blocks of a collective
//! and defines which of them each rank has at the start and must have at the end. So one proof of a
//! plan holds for every count, including ragged ones.
//!
//! A [`Step`] of a [`Program`] works on [`Span`]s of a rank's four memories ([`PlanMemory`]). A
//! rank runs the steps of one *strand* (in NCCL terms the work of one thread block) in order: a
//! `Send` completes when the message is in flight, a `Recv` when the data has arrived. Strands run
//! concurrently, have message queues of their own, and share no block that any of them writes.
//! Messages of one strand between two ranks are ordered.
//!
//! The executor model is minimal, and [`check`] proves that a plan needs no more: per strand one
//! message between two ranks can be in flight before the next `Send` blocks; a message for a
//! `RecvReduce` is staged, and leaves its sender's memory once the receiver has done all receives
//! before it; a message for a `Recv` goes straight to its destination and need not leave before the
//! receiver is at that step. A step that writes blocks of a message that has not left waits for it.
//! Plans that run one after another, as slices do, need no more than each of them.
//!
//! A message for a `RecvReduce` that is longer than staging memory leaves only while its receiver
//! is at that step, part by part (rendezvous); a step that writes the very blocks that are being
//! sent writes each part once it has left.

pub mod census;
pub mod check;
pub mod draw;
mod text;
#[cfg(test)]
mod text_tests;
pub(crate) mod walk;

pub use text::TextError;

use crate::types::{Rank, named};

named! {
    /// A collective operation.
    Collective, "collective" {
        /// All ranks get the reduction of all inputs.
        AllReduce = "allreduce",
        /// All ranks get all inputs, concatenated by rank.
        AllGather = "allgather",
        /// Each rank gets its part of the reduction of all inputs.
        ReduceScatter = "reduce-scatter",
        /// All ranks get the root's input.
        Broadcast = "broadcast",
        /// The root gets the reduction of all inputs.
        Reduce = "reduce",
        /// The root gets all inputs, concatenated by rank.
        Gather = "gather",
        /// Each rank gets its part of the root's input.
        Scatter = "scatter",
        /// Each rank gets its part of every rank's input; all parts have one length.
        AllToAll = "alltoall",
        /// Each rank gets its part of every rank's input; parts have different lengths.
        AllToAllV = "alltoallv",
        /// Each rank sends to the next one and receives from the previous one.
        SendRecv = "sendrecv",
        /// No rank leaves before all have entered.
        Barrier = "barrier",
    }
}

impl Collective {
    /// Whether it is a reduction.
    #[must_use]
    pub const fn reduces(self) -> bool {
        matches!(self, Self::AllReduce | Self::ReduceScatter | Self::Reduce)
    }

    /// Whether a rank's input and output can be the same memory: see [`Shape::shared`].
    #[must_use]
    pub const fn runs_in_place(self) -> bool {
        !matches!(self, Self::AllToAll | Self::AllToAllV | Self::SendRecv | Self::Barrier)
    }

    /// Whether it has a root.
    #[must_use]
    pub const fn has_root(self) -> bool {
        matches!(self, Self::Broadcast | Self::Reduce | Self::Gather | Self::Scatter)
    }
}

named! {
    /// A memory of a rank.
    PlanMemory, "place" {
        /// The rank's input: read-only elements.
        Input = "input",
        /// The rank's output: elements, and only complete results, not reduced further.
        Output = "output",
        /// Received contributions or results of other ranks: elements.
        Scratch = "scratch",
        /// Partial results, in the [accumulator type](crate::DataType::accumulator).
        Partial = "partial",
    }
}

impl PlanMemory {
    /// The form of its blocks, which is that of messages sent from it.
    #[must_use]
    pub const fn form(self) -> BlockForm {
        match self {
            Self::Input | Self::Output | Self::Scratch => BlockForm::Element,
            Self::Partial => BlockForm::Partial,
        }
    }
}

/// The form of a block.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub enum BlockForm {
    /// Elements, of the collective's data type.
    Element,
    /// Partial results, of the accumulator type.
    Partial,
}

/// A range of blocks. An empty one is a message without content, as a barrier's.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub struct Span {
    /// The memory.
    pub place: PlanMemory,
    /// The first block.
    pub first: u32,
    /// The number of blocks.
    pub blocks: u32,
}

impl Span {
    /// `blocks` blocks of `place` from `first` on.
    #[must_use]
    pub const fn new(place: PlanMemory, first: u32, blocks: u32) -> Self {
        Self { place, first, blocks }
    }

    /// One block of `place`.
    #[must_use]
    pub const fn block(place: PlanMemory, block: u32) -> Self {
        Self::new(place, block, 1)
    }

    /// A message without content.
    #[must_use]
    pub const fn empty() -> Self {
        Self::new(PlanMemory::Input, 0, 0)
    }

    /// The blocks' indices.
    #[must_use]
    pub fn range(self) -> core::ops::Range<u32> {
        self.first..self.first + self.blocks
    }
}

/// One step of a rank.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum Step {
    /// Sends a span as it is at this step: a later step that writes the span waits for the message.
    Send {
        /// The destination.
        to: Rank,
        /// The source span.
        span: Span,
    },
    /// Receives a message into a span of `Output`, `Scratch` or `Partial`, in the same form.
    Recv {
        /// The source.
        from: Rank,
        /// The target span.
        into: Span,
    },
    /// Receives a message and reduces it: `into` = received ⊕ `with`, which may be the same span.
    RecvReduce {
        /// The source.
        from: Rank,
        /// The form of the message.
        form: BlockForm,
        /// This rank's operand.
        with: Span,
        /// The result: in `Output`, if it is complete; else in `Partial`.
        into: Span,
    },
    /// Reduces spans of one length in the given order: `into` = ((s₀ ⊕ s₁) ⊕ s₂) …, in
    /// [`DataType::accumulator`](crate::DataType::accumulator), rounded once.
    Reduce {
        /// The operands: one or more.
        sources: Box<[Span]>,
        /// The result: in `Output`, if complete; else in `Partial`. It may be a source.
        into: Span,
    },
    /// Copies a span to another of the same form; no effect if both are the same memory.
    Copy {
        /// The source span.
        from: Span,
        /// The target span.
        into: Span,
    },
}

impl Step {
    /// The peer, form and span of its message, if it sends or receives one.
    #[inline]
    pub(crate) fn message(&self) -> Option<(Rank, BlockForm, Span)> {
        match self {
            Self::Send { to, span } => Some((*to, span.place.form(), *span)),
            Self::Recv { from, into } => Some((*from, into.place.form(), *into)),
            Self::RecvReduce { from, form, into, .. } => Some((*from, *form, *into)),
            Self::Reduce { .. } | Self::Copy { .. } => None,
        }
    }
}

/// The parameters of a collective that determine a plan.
#[derive(Clone, PartialEq, Eq, Hash, Debug)]
pub struct Shape {
    /// The collective.
    pub collective: Collective,
    /// The members, in the order of rings and trees: a permutation of `0..ranks`.
    pub order: Box<[Rank]>,
    /// The root, of collectives that have one.
    pub root: Rank,
    /// Data blocks of the whole of all-reduce, broadcast and reduce; else of each rank's part.
    pub blocks: u32,
}

impl Shape {
    /// The number of ranks.
    #[must_use]
    pub fn ranks(&self) -> u32 {
        self.order.len() as u32
    }

    /// The blocks of n, the size in nccl-tests: the whole of what is reduced or broadcast, one
    /// rank's input of send-receive, and all ranks' parts together of the others.
    #[must_use]
    pub fn whole(&self) -> u64 {
        let parts = match self.collective {
            Collective::AllReduce | Collective::Broadcast | Collective::Reduce | Collective::SendRecv => 1,
            Collective::Barrier => 0,
            _ => u64::from(self.ranks()),
        };
        parts * u64::from(self.blocks)
    }

    /// The number of data blocks.
    #[must_use]
    pub fn data_blocks(&self) -> u32 {
        let ranks = self.ranks();
        match self.collective {
            Collective::AllReduce | Collective::Broadcast | Collective::Reduce => self.blocks,
            Collective::AllGather
            | Collective::ReduceScatter
            | Collective::Gather
            | Collective::Scatter
            | Collective::SendRecv => ranks * self.blocks,
            Collective::AllToAll | Collective::AllToAllV => ranks * ranks * self.blocks,
            Collective::Barrier => 0,
        }
    }

    /// The data blocks of `rank`'s input, in order.
    #[must_use]
    pub fn input(&self, rank: Rank) -> Vec<u32> {
        let (n, p, r) = (self.blocks, self.ranks(), rank.0);
        match self.collective {
            Collective::AllReduce | Collective::Reduce => (0..n).collect(),
            Collective::Broadcast if rank == self.root => (0..n).collect(),
            Collective::Scatter if rank == self.root => (0..p * n).collect(),
            Collective::ReduceScatter => (0..p * n).collect(),
            Collective::AllGather | Collective::Gather | Collective::SendRecv => (r * n..(r + 1) * n).collect(),
            Collective::AllToAll | Collective::AllToAllV => (r * p * n..(r + 1) * p * n).collect(),
            Collective::Broadcast | Collective::Scatter | Collective::Barrier => Vec::new(),
        }
    }

    /// The data blocks of `rank`'s output, in order.
    #[must_use]
    pub fn output(&self, rank: Rank) -> Vec<u32> {
        let (n, p, r) = (self.blocks, self.ranks(), rank.0);
        match self.collective {
            Collective::AllReduce | Collective::Broadcast => (0..n).collect(),
            Collective::Reduce if rank == self.root => (0..n).collect(),
            Collective::Gather if rank == self.root => (0..p * n).collect(),
            Collective::AllGather => (0..p * n).collect(),
            Collective::ReduceScatter | Collective::Scatter => (r * n..(r + 1) * n).collect(),
            Collective::AllToAll | Collective::AllToAllV => {
                (0..p).flat_map(|s| (s * p + r) * n..(s * p + r + 1) * n).collect()
            }
            Collective::SendRecv => {
                let before = (r + p - 1) % p;
                (before * n..(before + 1) * n).collect()
            }
            Collective::Reduce | Collective::Gather | Collective::Barrier => Vec::new(),
        }
    }

    /// The blocks of `rank` that are the same memory in place: whole buffers of all-reduce,
    /// broadcast and reduce; the input of all-gather and gather is its part of the output, and the
    /// output of reduce-scatter and scatter its part of the input. `None` where nothing is shared.
    #[must_use]
    pub fn shared(&self, rank: Rank) -> Option<Shared> {
        let (n, own) = (self.blocks, rank.0 * self.blocks);
        let (input, output) = match self.collective {
            Collective::AllReduce => (0, 0),
            Collective::Broadcast | Collective::Reduce if rank == self.root => (0, 0),
            Collective::AllGather => (0, own),
            Collective::Gather if rank == self.root => (0, own),
            Collective::ReduceScatter => (own, 0),
            Collective::Scatter if rank == self.root => (own, 0),
            _ => return None,
        };
        Some(Shared {
            input,
            output,
            blocks: n,
        })
    }

    /// The length class of a data block: blocks of one class have equal lengths for any count.
    #[must_use]
    pub const fn length_class(&self, block: u32) -> u32 {
        match self.collective {
            Collective::AllReduce | Collective::Broadcast | Collective::Reduce | Collective::AllToAllV => block,
            _ => block % self.blocks,
        }
    }

    /// The rank whose input contains data block `block`, if there is only one.
    #[must_use]
    pub fn owner(&self, block: u32) -> Option<Rank> {
        let (n, p) = (self.blocks, self.ranks());
        match self.collective {
            Collective::AllReduce | Collective::Reduce | Collective::ReduceScatter | Collective::Barrier => None,
            Collective::Broadcast | Collective::Scatter => Some(self.root),
            Collective::AllGather | Collective::Gather | Collective::SendRecv => Some(Rank(block / n)),
            Collective::AllToAll | Collective::AllToAllV => Some(Rank(block / (p * n))),
        }
    }
}

/// Blocks of input and output that are the same memory, in place.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Shared {
    /// The first block in the input.
    pub input: u32,
    /// The first block in the output.
    pub output: u32,
    /// The number of blocks.
    pub blocks: u32,
}

/// An algorithm applied to a shape. Steps are generated lazily, so they need not fit in memory.
pub trait Schedule: Send + Sync {
    /// The shape.
    fn shape(&self) -> &Shape;

    /// The number of strands.
    fn strands(&self) -> u32;

    /// The steps of `rank` in `strand`.
    fn steps(&self, strand: u32, rank: Rank) -> Box<dyn Iterator<Item = Step> + Send + '_>;

    /// The blocks of `rank`'s [`PlanMemory::Scratch`], each by the data block whose length it has.
    fn scratch(&self, rank: Rank) -> Vec<u32>;

    /// The blocks of `rank`'s [`PlanMemory::Partial`], each by the data block whose length it has.
    fn partial(&self, rank: Rank) -> Vec<u32>;

    /// Whether input and output may share memory ([`Shape::shared`]). If not, an executor copies
    /// the input first when they do.
    fn in_place(&self) -> bool {
        false
    }
}

/// One rank's steps and memory.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct Program {
    /// The steps, by strand.
    pub strands: Vec<Vec<Step>>,
    /// The blocks of [`PlanMemory::Scratch`], each by the data block whose length it has.
    pub scratch: Vec<u32>,
    /// The blocks of [`PlanMemory::Partial`], each by the data block whose length it has.
    pub partial: Vec<u32>,
}

impl Program {
    /// `rank`'s part of `schedule`.
    #[must_use]
    pub fn of(schedule: &dyn Schedule, rank: Rank) -> Self {
        Self {
            strands: (0..schedule.strands())
                .map(|strand| schedule.steps(strand, rank).collect())
                .collect(),
            scratch: schedule.scratch(rank),
            partial: schedule.partial(rank),
        }
    }
}

/// The programs of all ranks.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Plan {
    /// The shape.
    pub shape: Shape,
    /// Whether input and output may share memory ([`Shape::shared`]).
    pub in_place: bool,
    /// By rank.
    pub programs: Vec<Program>,
}

impl Plan {
    /// Materialises `schedule`.
    #[must_use]
    pub fn of(schedule: &dyn Schedule) -> Self {
        let shape = schedule.shape().clone();
        let programs = (0..shape.ranks())
            .map(|rank| Program::of(schedule, Rank(rank)))
            .collect();
        Self {
            shape,
            in_place: schedule.in_place(),
            programs,
        }
    }
}

/// A plan is a schedule, too: one that was parsed or built by hand runs wherever an algorithm does.
impl Schedule for Plan {
    fn shape(&self) -> &Shape {
        &self.shape
    }

    fn strands(&self) -> u32 {
        self.programs.first().map_or(0, |program| program.strands.len() as u32)
    }

    fn steps(&self, strand: u32, rank: Rank) -> Box<dyn Iterator<Item = Step> + Send + '_> {
        let steps = self.programs[rank.index()].strands.get(strand as usize);
        Box::new(steps.into_iter().flatten().cloned())
    }

    fn scratch(&self, rank: Rank) -> Vec<u32> {
        self.programs[rank.index()].scratch.clone()
    }

    fn partial(&self, rank: Rank) -> Vec<u32> {
        self.programs[rank.index()].partial.clone()
    }

    fn in_place(&self) -> bool {
        self.in_place
    }
}
