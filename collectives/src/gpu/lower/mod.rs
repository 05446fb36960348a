//! Lowering: from a plan to one rank's kernel program, as *groups* of moves and reductions with
//! their waits and signals.
//!
//! Each thread block executes the whole program of a rank, on its share of every data block. A
//! `Send` is a store into the receiver's memory: its output, if all are mapped
//! ([`Options::direct`]), or the next of [`Options::slots`] slots of its FIFO for this sender, for
//! which the receiver returns a credit. Data for scratch memory is read in its slot, unless another
//! message is due meanwhile.
//!
//! Consecutive steps are *fused*: a value is stored to all its receivers while it is in registers.
//! Bodies that only send are *grouped*: they wait and signal together. Signals for which no rank
//! waits before its kernel ends are sent once, in the last slice ([`Group::last_signals`]), as
//! signaling takes until all earlier stores have arrived.
//!
//! A group's order is fixed: all waits, then work, then signals. So termination does not depend on
//! timing: `check` simulates it once, for more slices than there are slots, and detects deadlock,
//! and stores that may come before an output's owner has read the old data. Such a message is
//! staged.
//!
//! Slices are pipelined, so that a signal is on its way while other work is done: leading groups
//! that only send input are one slice ahead, and trailing groups that only receive one slice behind
//! ([`Strand::lateness`]). The last leading group is executed together with its successor
//! ([`Strand::joined`]): stores to peers overlap with reductions.
//!
//! A FIFO's messages are numbered in the order in which they are sent: those of a group that is
//! late by *n* slices have the numbers of *n* slices later, and some numbers are of no message.
//! Credits are returned by the number that a message would have without that: at this point all
//! messages below it have been read.

mod blocks;
mod check;
mod fuse;
#[cfg(test)]
mod tests;

use std::collections::HashMap;

use blocks::Blocks;

use crate::plan::{BlockForm, PlanMemory, Schedule, Shape};
use crate::types::Rank;

/// Lowering options, the same on all ranks.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub struct Options {
    /// Input and output are one memory ([`Shape::shared`]).
    pub in_place: bool,
    /// Every rank's output is mapped by all others.
    pub direct: bool,
    /// Slots of a FIFO, at least 2; twice as many where groups are behind.
    pub slots: u32,
    /// Whether slices are pipelined.
    pub pipelined: bool,
}

/// Why a schedule cannot be lowered.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum LowerError {
    /// Sends and receives do not match.
    #[error("the plan's messages from rank {from} to rank {to} in strand {strand} do not match")]
    Messages {
        /// The strand.
        strand: u32,
        /// The sender.
        from: Rank,
        /// The receiver.
        to: Rank,
    },
    /// The ranks would deadlock.
    #[error("with {slots} slots for messages rank {rank} would deadlock in strand {strand}")]
    Deadlock {
        /// The strand.
        strand: u32,
        /// A deadlocked rank.
        rank: Rank,
        /// The number of slots.
        slots: u32,
    },
    /// A span exceeds its place.
    #[error("the plan of rank {rank} names blocks that do not exist")]
    Span {
        /// The rank.
        rank: Rank,
    },
}

/// A rank's lowered program.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Lowered {
    /// By strand. Strands are independent.
    pub strands: Vec<Strand>,
    /// Properties of all ranks' programs.
    pub all: ProgramSummary,
}

/// Properties of all ranks' programs together, so that all ranks make the same decisions.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct ProgramSummary {
    /// Whether any has partial results.
    pub partials: bool,
    /// Whether any message uses a FIFO.
    pub staged: bool,
    /// The maximum of [`Strand::scratch`].
    pub scratch: u32,
    /// The maximum encoded length in words.
    pub words: usize,
    /// Slots of a FIFO.
    pub slots: u32,
}

/// A rank's program in a strand, executed slice by slice.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct Strand {
    /// In execution order.
    pub groups: Vec<Group>,
    /// Leading groups that are ahead of the others: they wait for no data, and read only input.
    pub ahead: u32,
    /// Trailing groups that are behind the others: they only receive.
    pub behind: u32,
    /// Whether the last leading group is executed together with its successor, one slice behind.
    pub joined: bool,
    /// Messages per slice to and from each rank.
    pub peers: Vec<Traffic>,
    /// Scratch blocks that each thread block needs.
    pub scratch: u32,
}

/// Messages between this rank and another in a slice.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct Traffic {
    /// Sent into its output.
    pub sent_direct: u32,
    /// Sent into its FIFO.
    pub sent_staged: u32,
    /// Received from it into this rank's output.
    pub received_direct: u32,
    /// Received from it into the FIFO.
    pub received_staged: u32,
    /// Slices by which the latest of the staged messages sent are later than the first.
    pub sent_late: u32,
    /// The same of those received.
    pub received_late: u32,
}

/// Waits, work and signals that are executed together.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct Group {
    /// All must be satisfied before the work.
    pub waits: Vec<Signal>,
    /// The work. No body reads or writes what another one of the group writes.
    pub bodies: Vec<Body>,
    /// Sent when the work is done.
    pub signals: Vec<Signal>,
    /// Sent when the work of the last slice is done: no rank waits for them before its kernel ends.
    pub last_signals: Vec<Signal>,
}

/// A synchronization signal between ranks. Messages are counted within a slice, separately for
/// outputs and FIFOs, so that either kind may be ahead of the other.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Signal {
    /// Waits for message `message` from this peer into an output; or signals it to this peer.
    Direct {
        /// The peer.
        peer: Rank,
        /// The message number.
        message: u32,
    },
    /// The same for a message into a FIFO.
    Staged {
        /// The peer.
        peer: Rank,
        /// The message number.
        message: u32,
    },
    /// A credit: waits for a slot for staged message `staged` to this peer; or returns the peer's.
    Credit {
        /// The peer.
        peer: Rank,
        /// The message number.
        staged: u32,
    },
    /// This peer's output may be written.
    Ready {
        /// The peer.
        peer: Rank,
    },
}

impl Signal {
    /// Whether it signals a message.
    #[must_use]
    pub fn is_data(self) -> bool {
        matches!(self, Self::Direct { .. } | Self::Staged { .. })
    }
}

/// One pass over a data block.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Body {
    /// The data block, which determines the number of elements.
    pub data: u32,
    /// The work.
    pub work: Work,
    /// The operands read.
    pub sources: Vec<Operand>,
    /// The operands written, all with the same values.
    pub targets: Vec<Operand>,
}

/// The work of a body.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Work {
    /// Copies its single source.
    Move,
    /// Reduces its sources in order. `whole`: the result has all contributions.
    Reduce {
        /// Whether it is a final result, or a partial one.
        whole: bool,
    },
}

/// An operand of a body.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub struct Operand {
    /// Its location.
    pub at: Location,
    /// Elements or partial results.
    pub form: BlockForm,
}

/// A memory location.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub enum Location {
    /// A block of the rank's input.
    Input(u32),
    /// A block of the rank's output.
    Output(u32),
    /// A block of scratch memory.
    Scratch(u32),
    /// The local slot of a staged message from that rank.
    Received(Rank, u32),
    /// A block of that rank's output.
    TheirOutput(Rank, u32),
    /// That rank's slot for a staged message.
    TheirSlot(Rank, u32),
}

/// Lowers `schedule`; returns each rank's program.
///
/// # Errors
/// If the schedule would not pass the plan checker, or there are too few slots for it.
pub fn lower(schedule: &dyn Schedule, options: Options) -> Result<Vec<Lowered>, LowerError> {
    let ranks = schedule.shape().ranks();
    let mut lowered = vec![
        Lowered {
            strands: Vec::new(),
            all: ProgramSummary::default(),
        };
        ranks as usize
    ];
    let mut slots = options.slots;
    for strand in 0..schedule.strands() {
        let plan = Plan::new(schedule, strand, options)?;
        let (strands, needed) = plan.lower()?;
        slots = slots.max(needed);
        for (rank, done) in strands.into_iter().enumerate() {
            lowered[rank].strands.push(done);
        }
    }
    let strands = || lowered.iter().flat_map(|rank| &rank.strands);
    let all = ProgramSummary {
        partials: strands().any(Strand::has_partials),
        staged: strands().any(|strand| strand.peers.iter().any(|peer| peer.sent_staged > 0)),
        scratch: strands().map(|strand| strand.scratch).max().unwrap_or(0),
        words: lowered
            .iter()
            .map(|rank| rank.strands.iter().map(Strand::words).sum())
            .max()
            .unwrap_or(0),
        slots,
    };
    for rank in &mut lowered {
        rank.all = all;
    }
    Ok(lowered)
}

impl Strand {
    /// Slices by which a group is late.
    #[must_use]
    pub fn lateness(&self, group: usize) -> u32 {
        u32::from(self.ahead > 0 && group >= self.ahead as usize)
            + u32::from(self.behind > 0 && group >= self.groups.len() - self.behind as usize)
    }

    /// That of the latest group.
    #[must_use]
    pub fn latest(&self) -> u32 {
        self.groups.len().checked_sub(1).map_or(0, |last| self.lateness(last))
    }

    fn has_partials(&self) -> bool {
        let is_partial = |operand: &Operand| operand.form == BlockForm::Partial;
        let bodies = self.groups.iter().flat_map(|group| &group.bodies);
        bodies
            .flat_map(|body| body.sources.iter().chain(&body.targets))
            .any(is_partial)
    }

    fn words(&self) -> usize {
        let operands = |body: &Body| 1 + body.sources.len() + body.targets.len();
        let group = |group: &Group| {
            let signaled = group.signals.len() + group.last_signals.len();
            1 + group.waits.len() + group.bodies.iter().map(operands).sum::<usize>() + signaled
        };
        2 + self.peers.len() + self.groups.iter().map(group).sum::<usize>()
    }
}

type Block = (PlanMemory, u32);

#[derive(Clone, PartialEq, Eq, Debug)]
struct BlockStep {
    data: u32,
    work: Work,
    sources: Vec<Block>,
    into: Option<Block>,
    sends: Option<(Rank, u32)>,
    /// Takes this message, in this form, as its first source.
    takes: Option<(Rank, u32, BlockForm)>,
}

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
struct Message {
    output: Option<u32>,
    is_direct: bool,
    /// Among the messages of its kind between two ranks in a slice, in the order of the plan.
    index: u32,
    /// Slices by which the group that sends it is late.
    late: u32,
    /// Of all staged ones, its number in the order in which they are sent.
    number: u32,
}

type Messages = HashMap<(Rank, Rank), Vec<Message>>;

struct Plan<'a> {
    shape: &'a Shape,
    strand: u32,
    options: Options,
    steps: Vec<Vec<BlockStep>>,
    messages: Messages,
    /// Whether staged messages may be sent in another order than that of their slices.
    mixes: bool,
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
                for block_step in contents.split(&step).ok_or(LowerError::Span { rank })? {
                    let mut block_step = block_step;
                    if let Some((to, number)) = &mut block_step.sends {
                        let count = sent.entry((rank, *to)).or_default();
                        *number = *count;
                        *count += 1;
                    }
                    if let Some((from, number, _)) = &mut block_step.takes {
                        let list = messages.entry((*from, rank)).or_default();
                        *number = list.len() as u32;
                        let output = match (block_step.work, block_step.into) {
                            (Work::Move, Some((PlanMemory::Output, block))) => Some(block),
                            _ => None,
                        };
                        list.push(Message {
                            output,
                            is_direct: options.direct && output.is_some(),
                            index: 0,
                            late: 0,
                            number: 0,
                        });
                    }
                    if !contents.is_self_copy(shape, rank, &block_step, options.in_place) {
                        micros.push(block_step);
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
            mixes: true,
        })
    }

    /// Stages messages whose direct store would be premature, until there are none left.
    /// With the slots that they need.
    fn lower(mut self) -> Result<(Vec<Strand>, u32), LowerError> {
        loop {
            let mut strands = self.number();
            let has_behind = strands.iter().any(|strand| strand.behind > 0);
            let slots = self.options.slots * if has_behind { 2 } else { 1 };
            let history = match check::run(&strands, slots) {
                // That needs more slots, and messages that are read in the order of numbers.
                found if self.mixes && (found.is_err() || !strands.iter().all(check::credits_are_true)) => {
                    self.mixes = false;
                    continue;
                }
                Ok(history) => history,
                Err(rank) => {
                    return Err(LowerError::Deadlock {
                        strand: self.strand,
                        rank,
                        slots,
                    });
                }
            };
            let shift = |rank: Rank| {
                let shared = self.shape.shared(rank).filter(|_| self.options.in_place)?;
                Some(i64::from(shared.output) - i64::from(shared.input))
            };
            let early = check::premature_stores(&strands, &history, &self.messages, shift);
            if early.is_empty() {
                self.join(&mut strands, slots, shift);
                defer_signals(&mut strands);
                return Ok((strands, slots));
            }
            for (from, to, number) in early {
                if let Some(list) = self.messages.get_mut(&(from, to)) {
                    list[number as usize].is_direct = false;
                }
            }
        }
    }

    /// Numbers the messages: first by slices, which shows the groups that send them, then by these
    /// groups' lateness.
    fn number(&mut self) -> Vec<Strand> {
        for list in self.messages.values_mut() {
            let mut next = [0; 2];
            for message in list {
                let count = &mut next[usize::from(message.is_direct)];
                message.index = *count;
                message.number = *count;
                message.late = 0;
                *count += 1;
            }
        }
        let strands: Vec<Strand> = (0..self.shape.ranks()).map(|rank| self.rank(Rank(rank))).collect();
        for ((from, to), list) in &mut self.messages {
            let strand = &strands[from.index()];
            let each = strand.peers[to.index()].sent_staged;
            let sent = |message: &Message, group: &Group| {
                let is_it = |signal: &Signal| matches!(*signal, Signal::Staged { peer, message: last } if peer == *to && last >= message.index);
                group.signals.iter().any(is_it)
            };
            for message in list.iter_mut().filter(|message| !message.is_direct) {
                let group = strand.groups.iter().position(|group| sent(message, group));
                message.late = group.map_or(0, |group| strand.lateness(group));
            }
            let first = list
                .iter()
                .filter(|message| !message.is_direct)
                .map(|message| message.late)
                .min();
            for message in list.iter_mut().filter(|message| !message.is_direct) {
                message.late -= first.unwrap_or(0);
                message.number = message.index + message.late * each;
            }
        }
        (0..self.shape.ranks()).map(|rank| self.rank(Rank(rank))).collect()
    }

    fn join(&self, strands: &mut [Strand], slots: u32, shift: impl Fn(Rank) -> Option<i64>) {
        for strand in &mut *strands {
            strand.joined = fuse::joins_next(&strand.groups, strand.ahead as usize);
        }
        let is_right = check::run(strands, slots)
            .is_ok_and(|history| check::premature_stores(strands, &history, &self.messages, shift).is_empty());
        if !is_right {
            for strand in strands {
                strand.joined = false;
            }
        }
    }

    fn traffic(&self, rank: Rank) -> Vec<Traffic> {
        let of = |from, to, direct| {
            let list = self.messages.get(&(from, to)).map_or(&[][..], Vec::as_slice);
            list.iter().filter(move |message| message.is_direct == direct)
        };
        let count = |from, to, direct| of(from, to, direct).count() as u32;
        let late = |from, to| of(from, to, false).map(|message| message.late).max().unwrap_or(0);
        (0..self.shape.ranks())
            .map(Rank)
            .map(|peer| Traffic {
                sent_direct: count(rank, peer, true),
                sent_staged: count(rank, peer, false),
                received_direct: count(peer, rank, true),
                received_staged: count(peer, rank, false),
                sent_late: late(rank, peer),
                received_late: late(peer, rank),
            })
            .collect()
    }

    fn rank(&self, rank: Rank) -> Strand {
        let (raw, scratch) = fuse::bind(&self.steps[rank.index()], rank, &self.messages);
        let shared = self.shape.shared(rank).filter(|_| self.options.in_place);
        let shift = shared.map(|shared| i64::from(shared.output) - i64::from(shared.input));
        let mut groups = fuse::group(fuse::fuse(raw), shift);
        let peers = self.traffic(rank);
        let (ahead, behind) = match self.options.pipelined {
            true => fuse::stages(&groups, self.mixes),
            false => (0, 0),
        };
        // Numbers of no message are not waited for.
        if let Some(last) = groups.last_mut() {
            let late = peers.iter().enumerate().filter(|(_, peer)| peer.received_late > 0);
            last.last_signals.extend(late.map(|(from, peer)| Signal::Credit {
                peer: Rank(from as u32),
                staged: (1 + peer.received_late) * peer.received_staged - 1,
            }));
        }
        Strand {
            groups,
            ahead,
            behind,
            joined: false,
            peers,
            scratch,
        }
    }
}

/// Defers signals without a waiting rank within a slice: an output's owner waits at the end.
fn defer_signals(strands: &mut [Strand]) {
    let waited: Vec<Vec<Rank>> = strands
        .iter()
        .map(|strand| {
            let waits = strand.groups.iter().flat_map(|group| &group.waits);
            waits
                .filter_map(|wait| match *wait {
                    Signal::Direct { peer, .. } => Some(peer),
                    _ => None,
                })
                .collect()
        })
        .collect();
    for (rank, strand) in strands.iter_mut().enumerate() {
        let is_late = |word: &Signal| match *word {
            Signal::Direct { peer, .. } => !waited[peer.index()].contains(&Rank(rank as u32)),
            _ => false,
        };
        for group in &mut strand.groups {
            let (last_signals, signals): (Vec<_>, Vec<_>) = group.signals.iter().partition(|word| is_late(word));
            group.last_signals.extend(last_signals);
            group.signals = signals;
        }
    }
}

/// The data block of a message without content.
pub const NO_DATA: u32 = u32::MAX;
