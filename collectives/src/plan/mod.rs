//! Plans: what each rank sends, receives and reduces, step by step.
//!
//! A plan is about *data blocks*, never about bytes: [`Shape`] numbers the blocks of a collective, and says which of them each rank has at first and must have in the end. How many elements a block has
//! is the executor's to know, so a plan is proved once for every count, ragged ones included.
//!
//! A rank's memory has four [`Place`]s of blocks. A [`Span`] is consecutive blocks of a place. A [`Step`] of a [`Program`] works on spans. A rank runs the steps of one *strand* in their order:
//! a `Send` is done when it is on its way, a `Recv` when the data is there. Strands of a plan run beside each other, each with queues of its own between the ranks, and share no block that any of them writes. Messages of one strand
//! from one rank to another arrive in the order in which they were sent.
//!
//! What an executor must be able to do is little, and [`check`] proves that a plan needs no more: between two ranks one message of a strand can be on its way before the next `Send` has to wait; a message for a `RecvReduce` leaves its
//! sender's memory once the receiver has done all receives before that one, for it is staged; a message for a `Recv` need not leave before the receiver has come to that step, for it goes straight to its destination. A step
//! that writes blocks of a message that has not left waits until it has. Plans that are run one after another, as slices are, need no more than each of them.
//!
//! Messages are as long as the count makes them, and memory to stage them in is not. So a message for a `RecvReduce` need not leave before its receiver has come to that step either, if it is a long one, and then leaves part by part; a step that
//! writes the very blocks that are being sent, as in place, writes each part when it has left.

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
    /// What a collective does.
    Collective, "collective" {
        /// All ranks get the reduction of all inputs.
        AllReduce = "allreduce",
        /// All ranks get all inputs, one after another.
        AllGather = "allgather",
        /// Each rank gets its part of the reduction of all inputs.
        ReduceScatter = "reduce-scatter",
        /// All ranks get the root's input.
        Broadcast = "broadcast",
        /// The root gets the reduction of all inputs.
        Reduce = "reduce",
        /// The root gets all inputs, one after another.
        Gather = "gather",
        /// Each rank gets its part of the root's input.
        Scatter = "scatter",
        /// Each rank gets its part of every rank's input; parts are of one length.
        AllToAll = "alltoall",
        /// Each rank gets its part of every rank's input; every part has a length of its own.
        AllToAllV = "alltoallv",
        /// Each rank sends to the next one and gets what the one before has sent.
        SendRecv = "sendrecv",
        /// No rank leaves before all have come.
        Barrier = "barrier",
    }
}

impl Collective {
    /// Whether contributions are reduced.
    #[must_use]
    pub const fn reduces(self) -> bool {
        matches!(self, Self::AllReduce | Self::ReduceScatter | Self::Reduce)
    }

    /// Whether a rank's input and output can be the same memory: see [`Shape::shared`].
    #[must_use]
    pub const fn runs_in_place(self) -> bool {
        !matches!(self, Self::AllToAll | Self::AllToAllV | Self::SendRecv | Self::Barrier)
    }

    /// Whether one rank is unlike the others.
    #[must_use]
    pub const fn has_root(self) -> bool {
        matches!(self, Self::Broadcast | Self::Reduce | Self::Gather | Self::Scatter)
    }
}

named! {
    /// Memory of a rank.
    Place, "place" {
        /// What the rank gives. Nothing writes it. Elements.
        Input = "input",
        /// What the rank gets. Elements, and only whole results: what is reduced into it has all contributions, and is not reduced further.
        Output = "output",
        /// Other ranks' contributions or results, as they came. Elements.
        Scratch = "scratch",
        /// Partial results, in the type that accumulates ([`DataType::accumulator`](crate::DataType::accumulator)).
        Partial = "partial",
    }
}

impl Place {
    /// What its blocks are made of, and so what travels when they are sent.
    #[must_use]
    pub const fn form(self) -> Form {
        match self {
            Self::Input | Self::Output | Self::Scratch => Form::Element,
            Self::Partial => Form::Partial,
        }
    }
}

/// What a block is made of.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub enum Form {
    /// Elements, of the collective's data type.
    Element,
    /// Partial results, of the type that accumulates.
    Partial,
}

/// Consecutive blocks of a place. None at all is a message without content, as a barrier's.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub struct Span {
    /// The place.
    pub place: Place,
    /// The first block, counted from the place's beginning.
    pub first: u32,
    /// How many.
    pub blocks: u32,
}

impl Span {
    /// `blocks` blocks of `place` from `first` on.
    #[must_use]
    pub const fn new(place: Place, first: u32, blocks: u32) -> Self {
        Self { place, first, blocks }
    }

    /// One block of `place`.
    #[must_use]
    pub const fn block(place: Place, block: u32) -> Self {
        Self::new(place, block, 1)
    }

    /// A message without content.
    #[must_use]
    pub const fn empty() -> Self {
        Self::new(Place::Input, 0, 0)
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
    /// Sends a span. What is sent is what the span holds now: a later step that writes it waits for the message to be out of the way.
    Send {
        /// To whom.
        to: Rank,
        /// What.
        span: Span,
    },
    /// Receives a message into a span of `Output`, `Scratch` or `Partial`; its sender's has the same form.
    Recv {
        /// From whom.
        from: Rank,
        /// Where to.
        into: Span,
    },
    /// Receives a message and reduces it: `into` = received ⊕ `with`. `with` and `into` may be the same span.
    RecvReduce {
        /// From whom.
        from: Rank,
        /// What the message is made of.
        form: Form,
        /// This rank's operand.
        with: Span,
        /// The result: in `Output`, if it has all contributions; else in `Partial`.
        into: Span,
    },
    /// Reduces spans of one length in the order given: `into` = ((s₀ ⊕ s₁) ⊕ s₂) …, accumulating in [`DataType::accumulator`](crate::DataType::accumulator) and rounded once.
    Reduce {
        /// The operands: one or more, of any places.
        sources: Box<[Span]>,
        /// The result: in `Output`, if it has all contributions; else in `Partial`. May be one of the sources.
        into: Span,
    },
    /// Copies a span to another of the same form. Where both are the same memory, as in place, there is nothing to do.
    Copy {
        /// What.
        from: Span,
        /// Where to.
        into: Span,
    },
}

/// What a collective is between, as far as plans are concerned.
#[derive(Clone, PartialEq, Eq, Hash, Debug)]
pub struct Shape {
    /// What it does.
    pub collective: Collective,
    /// The members, in the order in which rings and trees go through them: a permutation of `0..ranks`.
    pub order: Box<[Rank]>,
    /// The root of those that have one.
    pub root: Rank,
    /// Into how many data blocks the algorithm divides what it divides: the whole of all-reduce, broadcast and reduce; each rank's part of the others.
    pub blocks: u32,
}

impl Shape {
    /// How many members.
    #[must_use]
    pub fn ranks(&self) -> u32 {
        self.order.len() as u32
    }

    /// How many blocks n is, which nccl-tests calls the size: all of what is reduced or broadcast, what a rank gives to send-receive, and all ranks' parts together of the others.
    #[must_use]
    pub fn whole(&self) -> u64 {
        let parts = match self.collective {
            Collective::AllReduce | Collective::Broadcast | Collective::Reduce | Collective::SendRecv => 1,
            Collective::Barrier => 0,
            _ => u64::from(self.ranks()),
        };
        parts * u64::from(self.blocks)
    }

    /// How many data blocks there are in all.
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

    /// The data blocks that `rank`'s input is made of, in order.
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

    /// The data blocks that `rank`'s output is made of, in order.
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

    /// The blocks of `rank` that are the same memory when the collective runs in place: whole buffers of all-reduce, broadcast and reduce; the input of all-gather and gather is its part of the
    /// output, and the output of reduce-scatter and scatter its part of the input. `None` where nothing is shared, because the rank has only one of both or the collective does not run in place.
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

    /// What data blocks of one length have in common: two with the same value here have as many elements as each other, whatever the count.
    #[must_use]
    pub const fn length_class(&self, block: u32) -> u32 {
        match self.collective {
            Collective::AllReduce | Collective::Broadcast | Collective::Reduce | Collective::AllToAllV => block,
            _ => block % self.blocks,
        }
    }

    /// The rank whose input has data block `block`, where only one has it.
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

/// Blocks of a rank's input and output that are the same memory, in place.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Shared {
    /// The first of them, of the input's blocks.
    pub input: u32,
    /// The first of them, of the output's blocks.
    pub output: u32,
    /// How many.
    pub blocks: u32,
}

/// An algorithm, applied to a shape. Steps are made one after another, so that a simulator can run more of them than fit in memory.
pub trait Schedule: Send + Sync {
    /// What it is for.
    fn shape(&self) -> &Shape;

    /// How many strands.
    fn strands(&self) -> u32;

    /// The steps of `rank` in `strand`.
    fn steps(&self, strand: u32, rank: Rank) -> Box<dyn Iterator<Item = Step> + Send + '_>;

    /// The blocks of `rank`'s [`Place::Scratch`]: each is as long as this data block.
    fn scratch(&self, rank: Rank) -> Vec<u32>;

    /// The blocks of `rank`'s [`Place::Partial`]: each is as long as this data block.
    fn partial(&self, rank: Rank) -> Vec<u32>;

    /// Whether input and output may be the same memory ([`Shape::shared`]). Where not, an executor that is asked to run in place copies the input first.
    fn in_place(&self) -> bool {
        false
    }
}

/// What one rank does, and the memory it takes.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct Program {
    /// The steps, by strand.
    pub strands: Vec<Vec<Step>>,
    /// The blocks of [`Place::Scratch`]: each is as long as this data block.
    pub scratch: Vec<u32>,
    /// The blocks of [`Place::Partial`]: each is as long as this data block.
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

/// What all ranks do.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Plan {
    /// What it is for.
    pub shape: Shape,
    /// Whether input and output may be the same memory ([`Shape::shared`]).
    pub in_place: bool,
    /// By rank.
    pub programs: Vec<Program>,
}

impl Plan {
    /// The whole of `schedule`.
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

/// A plan is a schedule, too: what was read from text or made by hand runs wherever an algorithm does.
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
