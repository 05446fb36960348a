//! Lowering: from a plan to what one rank's kernel does, in *groups* of moves and reductions with what they wait for and tell.
//!
//! A kernel's blocks each do all of a rank's program, on a share of every data block, so nothing here is about blocks of threads. All ranks' steps are computed on every rank, and so alike: a `Send` is a store into the memory of the
//! rank that receives it. That is its output, where all outputs are mapped ([`Options::direct`]), or the next slot of a FIFO that it has for each sender; of slots there are [`Options::slots`], and who has read one gives it back. What was received
//! into scratch memory is read where it lies in its slot, as long as nothing else is to come from the same rank meanwhile.
//!
//! Steps that follow each other are *fused*: what is reduced or copied is stored to all who get it while it is at hand. Bodies that only send are *grouped*: they wait and tell together.
//!
//! What is told is also waited for: where nobody does before its kernel ends, it is told once, with the last slice ([`Group::last`]), as telling takes until all that was stored has come.
//!
//! A group's order of doing is fixed: it waits for all that it needs, then works, then tells. So ranks are a network of processes with bounded queues, whose end does not depend on who is faster: `check` runs it once, for as many slices as
//! there are slots and more, and finds whether it gets stuck, and whether a store into an output could come before its owner has read what was there. A message that could is staged instead.
//!
//! Groups at the beginning that only send input are a slice ahead of the others, and the last of them is done together with the first of the others ([`Strand::joined`]): so that stores to peers are under way while what has come is reduced.

mod check;
mod fuse;
#[cfg(test)]
mod tests;

use std::collections::HashMap;

use crate::plan::{Form, Place, Schedule, Shape, Span, Step};
use crate::types::Rank;

/// How a schedule is lowered. The same on all ranks.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub struct Options {
    /// Input and output are one memory ([`Shape::shared`]).
    pub in_place: bool,
    /// Every rank's output is mapped by all others.
    pub direct: bool,
    /// Slots of a FIFO, 2 at least.
    pub slots: u32,
    /// Slices by which a rank that only sends at first is ahead with that: 0 or 1.
    pub ahead: u32,
}

/// Why a schedule cannot be lowered.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum LowerError {
    /// A message is not received, or is not sent, or the two ends do not fit.
    #[error("the plan's messages from rank {from} to rank {to} in strand {strand} do not match")]
    Messages {
        /// The strand.
        strand: u32,
        /// The sender.
        from: Rank,
        /// The receiver.
        to: Rank,
    },
    /// Ranks would wait for each other.
    #[error("with {slots} slots for messages rank {rank} would wait for ever in strand {strand}")]
    Stuck {
        /// The strand.
        strand: u32,
        /// A rank that waits.
        rank: Rank,
        /// How many slots there are.
        slots: u32,
    },
    /// A span is not within its place.
    #[error("the plan of rank {rank} names blocks that are not there")]
    Span {
        /// The rank.
        rank: Rank,
    },
}

/// What a rank does.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Lowered {
    /// By strand. Strands share nothing.
    pub strands: Vec<Strand>,
    /// What all ranks' programs together are like.
    pub all: Whole,
}

/// What all ranks' programs together are like, so that all ranks decide alike by it.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct Whole {
    /// Whether any has partial results.
    pub partials: bool,
    /// Whether any message goes by a FIFO.
    pub staged: bool,
    /// The most blocks of own memory that one needs: the most of [`Strand::scratch`].
    pub scratch: u32,
    /// The most words that one is written in.
    pub words: usize,
}

/// What a rank does in a strand, slice by slice.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct Strand {
    /// In their order.
    pub groups: Vec<Group>,
    /// Groups at the beginning that may be a slice ahead of the others: they wait for no data, and read input alone.
    pub ahead: u32,
    /// Whether the last of these is done together with the first of the others, which is a slice behind.
    pub joined: bool,
    /// What goes to and comes from each rank in a slice, by rank.
    pub peers: Vec<Traffic>,
    /// Blocks of memory of its own that each block of threads needs.
    pub scratch: u32,
}

/// Messages between this rank and another in a slice.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct Traffic {
    /// Into its output.
    pub sent_direct: u32,
    /// Into its FIFO.
    pub sent_staged: u32,
    /// From it, into this rank's output.
    pub received_direct: u32,
    /// From it, into the FIFO.
    pub received_staged: u32,
}

/// What is waited for, done and told together.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct Group {
    /// All of these must be so before anything is done.
    pub waits: Vec<Word>,
    /// The work. No body reads or writes what another one of the group writes.
    pub bodies: Vec<Body>,
    /// What is told when all is done.
    pub tells: Vec<Word>,
    /// What is told when all is done in the last slice: nobody waits for it before its kernel ends.
    pub last: Vec<Word>,
}

/// A word that ranks tell each other by. Messages are counted within a slice, those into outputs and those into FIFOs apart, so that either may be ahead of the other.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Word {
    /// Message `message` from this peer into an output has come; or is told this peer.
    Direct {
        /// Whose, or to whom.
        peer: Rank,
        /// Which.
        message: u32,
    },
    /// The same of a message into a FIFO.
    Staged {
        /// Whose, or to whom.
        peer: Rank,
        /// Which.
        message: u32,
    },
    /// There is a slot for staged message `staged` to this peer; or that message of the peer's has been read.
    Credit {
        /// Whose, or to whom.
        peer: Rank,
        /// Which.
        staged: u32,
    },
    /// This peer's output may be written.
    Ready {
        /// Whose.
        peer: Rank,
    },
}

impl Word {
    /// Whether it tells that a message is there.
    #[must_use]
    pub fn is_data(self) -> bool {
        matches!(self, Self::Direct { .. } | Self::Staged { .. })
    }
}

/// One pass over a data block.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Body {
    /// The data block: it says how many elements.
    pub data: u32,
    /// What is done.
    pub work: Work,
    /// What is read.
    pub sources: Vec<Operand>,
    /// What is written, all alike.
    pub targets: Vec<Operand>,
}

/// What a body does.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Work {
    /// Copies its one source.
    Move,
    /// Reduces its sources in their order. `whole`: the result has all contributions.
    Reduce {
        /// Whether it is a result, or one of parts.
        whole: bool,
    },
}

/// Memory that a body reads or writes.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub struct Operand {
    /// Where.
    pub at: At,
    /// What it is made of.
    pub form: Form,
}

/// Where memory is.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub enum At {
    /// This block of the rank's input.
    Input(u32),
    /// This block of the rank's output.
    Output(u32),
    /// This block of memory of its own.
    Scratch(u32),
    /// The slot of this staged message from that rank.
    Received(Rank, u32),
    /// This block of that rank's output.
    TheirOutput(Rank, u32),
    /// That rank's slot for this staged message.
    TheirSlot(Rank, u32),
}

/// Lowers `schedule`: what each rank does, by rank.
///
/// # Errors
/// Where the schedule is none that a checker would prove, or there are too few slots for it.
pub fn lower(schedule: &dyn Schedule, options: Options) -> Result<Vec<Lowered>, LowerError> {
    let ranks = schedule.shape().ranks();
    let mut lowered = vec![
        Lowered {
            strands: Vec::new(),
            all: Whole::default(),
        };
        ranks as usize
    ];
    for strand in 0..schedule.strands() {
        let plan = Plan::new(schedule, strand, options)?;
        for (rank, done) in plan.lower()?.into_iter().enumerate() {
            lowered[rank].strands.push(done);
        }
    }
    let strands = || lowered.iter().flat_map(|rank| &rank.strands);
    let all = Whole {
        partials: strands().any(Strand::has_partials),
        staged: strands().any(|strand| strand.peers.iter().any(|peer| peer.sent_staged > 0)),
        scratch: strands().map(|strand| strand.scratch).max().unwrap_or(0),
        words: lowered
            .iter()
            .map(|rank| rank.strands.iter().map(Strand::words).sum())
            .max()
            .unwrap_or(0),
    };
    for rank in &mut lowered {
        rank.all = all;
    }
    Ok(lowered)
}

impl Strand {
    fn has_partials(&self) -> bool {
        let is_partial = |operand: &Operand| operand.form == Form::Partial;
        let bodies = self.groups.iter().flat_map(|group| &group.bodies);
        bodies
            .flat_map(|body| body.sources.iter().chain(&body.targets))
            .any(is_partial)
    }

    /// How many words it is written in, its place among the strands included.
    fn words(&self) -> usize {
        let operands = |body: &Body| 1 + body.sources.len() + body.targets.len();
        let group = |group: &Group| {
            let told = group.tells.len() + group.last.len();
            1 + group.waits.len() + group.bodies.iter().map(operands).sum::<usize>() + told
        };
        2 + self.peers.len() + self.groups.iter().map(group).sum::<usize>()
    }
}

/// A block of a place.
type Block = (Place, u32);

/// A step on one data block.
#[derive(Clone, PartialEq, Eq, Debug)]
struct Micro {
    data: u32,
    work: Work,
    sources: Vec<Block>,
    into: Option<Block>,
    /// Sends its source as this message, in order.
    sends: Option<(Rank, u32)>,
    /// Has this message as its first source; of this form.
    takes: Option<(Rank, u32, Form)>,
}

/// A message between two ranks.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
struct Message {
    /// The block of the receiver's output where it belongs.
    output: Option<u32>,
    /// Stored there at once.
    is_direct: bool,
    /// Its number among those of its kind.
    number: u32,
}

/// The messages from one rank to another.
type Messages = HashMap<(Rank, Rank), Vec<Message>>;

/// A strand of all ranks.
struct Plan<'a> {
    shape: &'a Shape,
    strand: u32,
    options: Options,
    /// By rank.
    steps: Vec<Vec<Micro>>,
    messages: Messages,
}

impl<'a> Plan<'a> {
    fn new(schedule: &'a dyn Schedule, strand: u32, options: Options) -> Result<Self, LowerError> {
        let shape = schedule.shape();
        let ranks = shape.ranks();
        let mut sent: HashMap<(Rank, Rank), u32> = HashMap::new();
        let mut messages: Messages = HashMap::new();
        let mut steps = Vec::new();
        for rank in (0..ranks).map(Rank) {
            let contents = Blocks {
                input: shape.input(rank),
                output: shape.output(rank),
                scratch: schedule.scratch(rank),
                partial: schedule.partial(rank),
            };
            let mut micros = Vec::new();
            for step in schedule.steps(strand, rank) {
                for micro in contents.split(&step).ok_or(LowerError::Span { rank })? {
                    let mut micro = micro;
                    if let Some((to, number)) = &mut micro.sends {
                        let count = sent.entry((rank, *to)).or_default();
                        *number = *count;
                        *count += 1;
                    }
                    if let Some((from, number, _)) = &mut micro.takes {
                        let list = messages.entry((*from, rank)).or_default();
                        *number = list.len() as u32;
                        let output = match (micro.work, micro.into) {
                            (Work::Move, Some((Place::Output, block))) => Some(block),
                            _ => None,
                        };
                        list.push(Message {
                            output,
                            is_direct: options.direct && output.is_some(),
                            number: 0,
                        });
                    }
                    if !contents.is_idle(shape, rank, &micro, options.in_place) {
                        micros.push(micro);
                    }
                }
            }
            steps.push(micros);
        }
        for (from, to) in (0..ranks).flat_map(|a| (0..ranks).map(move |b| (Rank(a), Rank(b)))) {
            let received = messages.get(&(from, to)).map_or(0, Vec::len);
            if received != sent.get(&(from, to)).map_or(0, |count| *count as usize) || from == to && received > 0 {
                return Err(LowerError::Messages { strand, from, to });
            }
        }
        Ok(Self {
            shape,
            strand,
            options,
            steps,
            messages,
        })
    }

    /// Lowers, and stages what may not be stored at once, until nothing is left of that kind.
    fn lower(mut self) -> Result<Vec<Strand>, LowerError> {
        loop {
            for list in self.messages.values_mut() {
                let mut next = [0; 2];
                for message in list {
                    let count = &mut next[usize::from(message.is_direct)];
                    message.number = *count;
                    *count += 1;
                }
            }
            let mut strands: Vec<Strand> = (0..self.shape.ranks()).map(|rank| self.rank(Rank(rank))).collect();
            let history = check::run(&strands, self.options.slots).map_err(|rank| LowerError::Stuck {
                strand: self.strand,
                rank,
                slots: self.options.slots,
            })?;
            let shift = |rank: Rank| {
                let shared = self.shape.shared(rank).filter(|_| self.options.in_place)?;
                Some(i64::from(shared.output) - i64::from(shared.input))
            };
            let early = check::too_early(&strands, &history, &self.messages, shift);
            if early.is_empty() {
                self.join(&mut strands, shift);
                tell_late(&mut strands);
                return Ok(strands);
            }
            for (from, to, number) in early {
                if let Some(list) = self.messages.get_mut(&(from, to)) {
                    list[number as usize].is_direct = false;
                }
            }
        }
    }

    /// Has groups done together that follow each other in different slices, if that is right for all ranks.
    fn join(&self, strands: &mut [Strand], shift: impl Fn(Rank) -> Option<i64>) {
        for strand in &mut *strands {
            strand.joined = fuse::joins_next(&strand.groups, strand.ahead as usize);
        }
        let is_right = check::run(strands, self.options.slots)
            .is_ok_and(|history| check::too_early(strands, &history, &self.messages, shift).is_empty());
        if !is_right {
            for strand in strands {
                strand.joined = false;
            }
        }
    }

    /// What goes between `rank` and each other.
    fn traffic(&self, rank: Rank) -> Vec<Traffic> {
        let count = |from, to, direct| {
            let list = self.messages.get(&(from, to)).map_or(&[][..], Vec::as_slice);
            list.iter().filter(|message| message.is_direct == direct).count() as u32
        };
        (0..self.shape.ranks())
            .map(Rank)
            .map(|peer| Traffic {
                sent_direct: count(rank, peer, true),
                sent_staged: count(rank, peer, false),
                received_direct: count(peer, rank, true),
                received_staged: count(peer, rank, false),
            })
            .collect()
    }

    /// What `rank` does.
    fn rank(&self, rank: Rank) -> Strand {
        let (raw, scratch) = fuse::bind(&self.steps[rank.index()], rank, &self.messages);
        let shared = self.shape.shared(rank).filter(|_| self.options.in_place);
        let shift = shared.map(|shared| i64::from(shared.output) - i64::from(shared.input));
        let groups = fuse::group(fuse::fuse(raw), shift);
        let ahead = if self.options.ahead > 0 {
            fuse::leading(&groups)
        } else {
            0
        };
        Strand {
            groups,
            ahead,
            joined: false,
            peers: self.traffic(rank),
            scratch,
        }
    }
}

/// Has what nobody waits for in a slice told with the last one: whoever has its output written waits for all of that at the end.
fn tell_late(strands: &mut [Strand]) {
    let waited: Vec<Vec<Rank>> = strands
        .iter()
        .map(|strand| {
            let waits = strand.groups.iter().flat_map(|group| &group.waits);
            waits
                .filter_map(|wait| match *wait {
                    Word::Direct { peer, .. } => Some(peer),
                    _ => None,
                })
                .collect()
        })
        .collect();
    for (rank, strand) in strands.iter_mut().enumerate() {
        let is_late = |word: &Word| match *word {
            Word::Direct { peer, .. } => !waited[peer.index()].contains(&Rank(rank as u32)),
            _ => false,
        };
        for group in &mut strand.groups {
            let (last, tells) = group.tells.iter().partition(|word| is_late(word));
            group.last = last;
            group.tells = tells;
        }
    }
}

/// The data blocks of a rank's places.
struct Blocks {
    input: Vec<u32>,
    output: Vec<u32>,
    scratch: Vec<u32>,
    partial: Vec<u32>,
}

impl Blocks {
    fn data(&self, (place, block): Block) -> Option<u32> {
        let list = match place {
            Place::Input => &self.input,
            Place::Output => &self.output,
            Place::Scratch => &self.scratch,
            Place::Partial => &self.partial,
        };
        list.get(block as usize).copied()
    }

    /// A step block by block; none if it names blocks that are not there.
    fn split(&self, step: &Step) -> Option<Vec<Micro>> {
        let blocks = |span: &Span| span.range().map(|block| (span.place, block)).collect::<Vec<_>>();
        let micro = |sources: Vec<Block>, into: Option<Block>, work| {
            let first = sources.first().copied().or(into);
            Some(Micro {
                data: match first {
                    Some(block) => self.data(block)?,
                    None => NOTHING,
                },
                work,
                sources,
                into,
                sends: None,
                takes: None,
            })
        };
        let mut split = Vec::new();
        match step {
            Step::Send { to, span } => {
                let spans = blocks(span);
                for block in spans
                    .iter()
                    .map(|block| vec![*block])
                    .chain(spans.is_empty().then(Vec::new))
                {
                    let mut one = micro(block, None, Work::Move)?;
                    one.sends = Some((*to, 0));
                    split.push(one);
                }
            }
            Step::Recv { from, into } => {
                let spans = blocks(into);
                for block in spans
                    .iter()
                    .map(|block| Some(*block))
                    .chain(spans.is_empty().then_some(None))
                {
                    let mut one = micro(Vec::new(), block, Work::Move)?;
                    one.takes = Some((*from, 0, into.place.form()));
                    split.push(one);
                }
            }
            Step::RecvReduce { from, form, with, into } => {
                let whole = into.place == Place::Output;
                for (with, into) in blocks(with).into_iter().zip(blocks(into)) {
                    let mut one = micro(vec![with], Some(into), Work::Reduce { whole })?;
                    one.takes = Some((*from, 0, *form));
                    split.push(one);
                }
            }
            Step::Reduce { sources, into } => {
                let whole = into.place == Place::Output;
                let columns: Vec<Vec<Block>> = sources.iter().map(blocks).collect();
                for (index, into) in blocks(into).into_iter().enumerate() {
                    let row = columns
                        .iter()
                        .map(|column| column.get(index).copied())
                        .collect::<Option<Vec<_>>>()?;
                    split.push(micro(row, Some(into), Work::Reduce { whole })?);
                }
            }
            Step::Copy { from, into } => {
                for (from, into) in blocks(from).into_iter().zip(blocks(into)) {
                    split.push(micro(vec![from], Some(into), Work::Move)?);
                }
            }
        }
        Some(split)
    }

    /// Whether a step copies a block onto itself, in place.
    fn is_idle(&self, shape: &Shape, rank: Rank, micro: &Micro, in_place: bool) -> bool {
        let Some(shared) = shape.shared(rank).filter(|_| in_place) else {
            return false;
        };
        matches!(
            (micro.work, micro.sources.as_slice(), micro.into, micro.takes),
            (Work::Move, [(Place::Input, from)], Some((Place::Output, into)), None)
                if from.wrapping_sub(shared.input) == into.wrapping_sub(shared.output)
        )
    }
}

/// The data block of a message without content.
pub const NOTHING: u32 = u32::MAX;
