//! What one rank's streams do for an operation: a plan, lowered to copies, words, reductions and events.
//!
//! A [`Script`] is made of a schedule by arithmetic alone, of all ranks' programs, so that each rank knows where what it sends belongs at its receiver. It is constant: nothing in it depends on how often it was done before, so that a graph
//! that was captured of it can be launched again and again.
//!
//! # Words
//! All that ranks tell each other is that a word is no longer zero. Who waits for one sets it to zero again before it goes on, and it is written again only after that is known:
//! - *ready*, at the beginning: the receiver is done with what came before, and its memory may be written. Each sender waits for the words of those that it sends to.
//! - *room*, for a message to memory that was used before in the same operation: it may be written again.
//! - *full*: the message is there.
//!
//! # Order
//! An operation is cut into slices, which use staging memory by turns. A step's *depth* is how many messages must have come one after another before it. Tasks are put into streams by slice and depth together, so that the first sends of a slice come
//! before the later ones of the slice before it, and reductions hide behind them. All ranks do so: whatever a task waits for, on any rank, comes before it in this order. So operations end even where a driver has the streams' work done in the very order in
//! which it was put into them.

use core::ops::Range;

use crate::executor::layout::{Contents, Extent, Layout, pieces};
use crate::gpu::peers::WORDS;
use crate::plan::walk::{Walker, Who, walk};
use crate::plan::{Collective, Form, Place, Program, Schedule, Span, Step};
use crate::types::{DataType, Rank};

/// What staging memory is divided by.
const ALIGN: u64 = 256;
/// Slices of an operation at most.
const MAX_SLICES: u64 = 512;
/// The word that says that a rank is ready.
const READY: u32 = WORDS as u32 - 1;

/// The stream of the caller, where reductions are done.
pub(super) const CALLER: u8 = 0;

/// What an operation is, as far as it decides what is done.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub(super) struct Terms {
    pub(super) data: DataType,
    /// Elements of the whole, or of each part.
    pub(super) count: u64,
    /// Whether messages may be put where they belong in the others' outputs.
    pub(super) direct: bool,
    /// Whether input and output are the same memory.
    pub(super) in_place: bool,
    /// Bytes of staging memory.
    pub(super) staging: u64,
    /// Bytes of a slice of the whole.
    pub(super) slice: u64,
    /// Streams for copies to others.
    pub(super) copiers: u8,
}

/// Where bytes lie: so many bytes behind the beginning of what.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum At {
    Input(u64),
    Output(u64),
    Staging(u64),
    /// Another rank's.
    TheirOutput(Rank, u64),
    TheirStaging(Rank, u64),
}

/// A word: by whom it is written or read at the other end, and which of theirs.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) struct Word {
    pub(super) peer: Rank,
    /// Whether it says that there is room, and not that a message is there.
    pub(super) is_room: bool,
    pub(super) index: u32,
}

/// Work for a stream.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(super) enum Act {
    /// Writes a word of the peer's.
    Signal(Word),
    /// Waits for a word that the peer writes, and makes it zero.
    Await(Word),
    Copy {
        from: At,
        into: At,
        bytes: u64,
    },
    Reduce {
        sources: Box<[(At, Form)]>,
        into: (At, Form),
        elements: u64,
    },
    /// Records an event.
    Record(u32),
    /// Waits for an event.
    Wait(u32),
}

/// What one rank does, in the order in which it is put into its streams.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub(super) struct Script {
    /// Each with the number of its stream.
    pub(super) acts: Vec<(u8, Act)>,
    /// How many events there are.
    pub(super) events: u32,
    /// How many streams there are: the caller's, those for copies, and one to wait for what nobody here waits for.
    pub(super) streams: u8,
}

/// Why there is no script.
#[derive(Clone, Copy, PartialEq, Eq, Debug, thiserror::Error)]
#[error("the operation does not fit {staging} bytes of staging memory and {WORDS} words, however it is cut")]
pub(super) struct TooLarge {
    staging: u64,
}

/// Memory of a rank that is its own to look after.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Space {
    Input,
    Output,
    Staging,
}

/// Bytes that a task reads or writes.
#[derive(Clone, Debug)]
struct Touch {
    space: Space,
    bytes: Range<u64>,
    writes: bool,
}

impl Touch {
    fn meets(&self, other: &Self) -> bool {
        (self.writes || other.writes)
            && self.space == other.space
            && self.bytes.start < other.bytes.end
            && other.bytes.start < self.bytes.end
    }
}

#[derive(Clone, Debug)]
enum What {
    Send { to: Rank, word: u32, has_to_ask: bool },
    Receive { from: Rank, word: u32, has_to_ask: bool },
    Work,
}

/// Something that is done in one stream.
#[derive(Clone, Debug)]
struct Task {
    /// Slice, strand, step, and which of the step's: what comes before in this order comes before in the plan.
    place: (u64, u32, u32, u8),
    depth: u32,
    what: What,
    acts: Vec<Act>,
    touches: Vec<Touch>,
}

/// A message, as its sender and its receiver have it.
#[derive(Clone, Copy, Debug)]
struct Message {
    from: Rank,
    to: Rank,
    /// Which of those between the two in a slice.
    number: u32,
    strand: u32,
    send: u32,
    receive: u32,
    /// Where in the receiver's part of staging memory it is put, if not where it belongs.
    staged: Option<u64>,
    /// Whether it is put where something else has been in the same slice.
    replaces: bool,
}

/// A plan with all that is known of it.
struct Plan {
    terms: Terms,
    programs: Vec<Program>,
    layouts: Vec<Layout>,
    contents: Vec<Contents>,
    /// By rank and strand, of each step.
    depths: Vec<Vec<Vec<u32>>>,
    messages: Vec<Message>,
    /// By rank and strand, the message of each step.
    of_step: Vec<Vec<Vec<Option<u32>>>>,
    /// By sender and receiver, how many messages a slice has.
    counts: Vec<Vec<u32>>,
    is_barrier: bool,
    slices: u64,
    /// How many slices have staging memory of their own, and how much.
    turns: u64,
    turn: u64,
    /// In place, what is to be added to bytes of the input and of the output, by rank, for them to be the same bytes of one memory.
    shifts: Vec<(u64, u64)>,
}

impl Script {
    /// What `rank` does.
    pub(super) fn new(schedule: &dyn Schedule, rank: Rank, terms: Terms) -> Result<Self, TooLarge> {
        let plan = Plan::new(schedule, terms)?;
        Ok(plan.script(rank))
    }
}

/// Notes the depths of steps.
struct Depths {
    now: Vec<Vec<u32>>,
    all: Vec<Vec<Vec<u32>>>,
}

impl Walker for Depths {
    type Message = u32;

    fn send(&mut self, who: Who, step: &Step) -> u32 {
        self.alone(who, step);
        self.now[who.rank.index()][who.strand as usize]
    }

    fn receive(&mut self, who: Who, _: &Step, message: u32) {
        let now = &mut self.now[who.rank.index()][who.strand as usize];
        *now = (*now).max(message + 1);
        self.all[who.rank.index()][who.strand as usize].push(*now);
    }

    fn alone(&mut self, who: Who, _: &Step) {
        let now = self.now[who.rank.index()][who.strand as usize];
        self.all[who.rank.index()][who.strand as usize].push(now);
    }
}

impl Plan {
    fn new(schedule: &dyn Schedule, terms: Terms) -> Result<Self, TooLarge> {
        let shape = schedule.shape();
        let (ranks, strands) = (shape.ranks(), schedule.strands());
        let all = || (0..ranks).map(Rank);
        let programs: Vec<_> = all().map(|rank| Program::of(schedule, rank)).collect();
        let contents = all()
            .zip(&programs)
            .map(|(rank, program)| Contents::new(shape, rank, &program.scratch, &program.partial))
            .collect();
        let none = vec![vec![Vec::new(); strands as usize]; ranks as usize];
        let mut depths = Depths {
            now: vec![vec![0; strands as usize]; ranks as usize],
            all: none,
        };
        walk(schedule, &mut depths);
        let es = terms.data.bytes() as u64;
        let shift = |rank| match (terms.in_place, shape.shared(rank)) {
            (true, Some(shared)) => {
                let part = |blocks: u32| u64::from(blocks / shape.blocks.max(1)) * terms.count * es;
                (part(shared.output), part(shared.input))
            }
            _ => (0, 0),
        };
        let mut plan = Self {
            terms,
            layouts: Vec::new(),
            contents,
            depths: depths.all,
            messages: Vec::new(),
            of_step: Vec::new(),
            counts: Vec::new(),
            is_barrier: shape.collective == Collective::Barrier,
            slices: 1,
            turns: 1,
            turn: 0,
            shifts: all().map(shift).collect(),
            programs,
        };
        plan.match_messages();
        let parts = match shape.collective {
            Collective::AllReduce | Collective::Broadcast | Collective::Reduce => 1,
            _ => u64::from(ranks),
        };
        let whole = terms.count.saturating_mul(es).saturating_mul(parts);
        // Each message of each slice has a word of its own.
        let most = u64::from(plan.counts.iter().flatten().copied().max().unwrap_or(0));
        let at_most = (u64::from(READY) / most.max(1)).clamp(1, MAX_SLICES);
        let too_large = TooLarge { staging: terms.staging };
        if most >= u64::from(READY) {
            return Err(too_large);
        }
        let mut slices = whole.div_ceil(terms.slice.max(1)).clamp(1, at_most);
        loop {
            plan.cut(schedule, slices);
            if plan.turn * plan.turns <= terms.staging {
                return Ok(plan);
            }
            if slices >= at_most || slices >= terms.count {
                return Err(too_large);
            }
            slices = (slices * 2).min(at_most);
        }
    }

    fn match_messages(&mut self) {
        let ranks = self.programs.len();
        self.counts = vec![vec![0; ranks]; ranks];
        self.of_step = self
            .programs
            .iter()
            .map(|program| program.strands.iter().map(|steps| vec![None; steps.len()]).collect())
            .collect();
        for strand in 0..self.programs.first().map_or(0, |program| program.strands.len()) {
            let steps = |rank: usize| (0u32..).zip(&self.programs[rank].strands[strand]);
            for from in 0..ranks {
                for to in 0..ranks {
                    let sends = steps(from)
                        .filter(|(_, step)| matches!(step, Step::Send { to: peer, .. } if peer.index() == to));
                    let receives = steps(to).filter(|(_, step)| {
                        matches!(step, Step::Recv { from: peer, .. } | Step::RecvReduce { from: peer, .. } if peer.index() == from)
                    });
                    for ((send, _), (receive, _)) in sends.zip(receives) {
                        let id = Some(self.messages.len() as u32);
                        self.of_step[from][strand][send as usize] = id;
                        self.of_step[to][strand][receive as usize] = id;
                        let number = self.counts[from][to];
                        self.counts[from][to] += 1;
                        self.messages.push(Message {
                            from: Rank(from as u32),
                            to: Rank(to as u32),
                            number,
                            strand: strand as u32,
                            send,
                            receive,
                            staged: None,
                            replaces: false,
                        });
                    }
                }
            }
        }
    }

    /// Lays everything out for so many slices.
    fn cut(&mut self, schedule: &dyn Schedule, slices: u64) {
        let shape = schedule.shape();
        let extent = || Extent {
            count: self.terms.count,
            parts: None,
            slices: slices as u32,
        };
        self.layouts = self
            .programs
            .iter()
            .map(|program| Layout::new(shape, extent(), &program.scratch, &program.partial))
            .collect();
        self.slices = slices;
        (self.turns, self.turn) = (1, 0);
        let mut ends: Vec<u64> = (0..self.programs.len())
            .map(|rank| self.partial_at(rank) + self.layouts[rank].partial_len * self.unit(Form::Partial))
            .collect();
        for id in 0..self.messages.len() {
            let message = self.messages[id];
            let step = self.receiving(message);
            let is_staged = match step {
                Step::RecvReduce { .. } => true,
                Step::Recv { into, .. } => into.place == Place::Output && !self.terms.direct,
                _ => false,
            };
            self.messages[id].replaces = false;
            self.messages[id].staged = is_staged.then(|| {
                let end = &mut ends[message.to.index()];
                let start = end.next_multiple_of(ALIGN);
                *end = start + self.message_bytes(message, 0);
                start
            });
        }
        self.turn = ends.into_iter().max().unwrap_or(0).next_multiple_of(ALIGN);
        self.look_for_replaced();
    }

    /// Finds messages that take the place of something else, and how long staging memory is in use.
    fn look_for_replaced(&mut self) {
        let mut replaced = Vec::new();
        let mut turns = 1;
        for rank in 0..self.programs.len() {
            let tasks = self.tasks(rank, 0);
            for (at, task) in tasks.iter().enumerate() {
                for before in &tasks[..at] {
                    let meets = |space: Option<Space>| {
                        let of = |touch: &&Touch| space.is_none_or(|space| touch.space == space);
                        task.touches
                            .iter()
                            .filter(of)
                            .any(|touch| before.touches.iter().any(|other| other.meets(touch)))
                    };
                    if !meets(None) {
                        continue;
                    }
                    if matches!(task.what, What::Receive { .. }) {
                        let (_, strand, step, _) = task.place;
                        replaced.extend(self.of_step[rank][strand as usize][step as usize]);
                    }
                    if meets(Some(Space::Staging)) {
                        turns = turns.max(u64::from(task.depth.saturating_sub(before.depth)) + 1);
                    }
                }
            }
        }
        for id in replaced {
            self.messages[id as usize].replaces = true;
        }
        self.turns = turns;
    }

    fn sending(&self, message: Message) -> &Step {
        &self.programs[message.from.index()].strands[message.strand as usize][message.send as usize]
    }

    fn receiving(&self, message: Message) -> &Step {
        &self.programs[message.to.index()].strands[message.strand as usize][message.receive as usize]
    }

    /// Bytes of an element in a form.
    fn unit(&self, form: Form) -> u64 {
        match form {
            Form::Element => self.terms.data.bytes() as u64,
            Form::Partial => self.terms.data.accumulator().bytes() as u64,
        }
    }

    /// Where partial results are in a slice's part of staging memory.
    fn partial_at(&self, rank: usize) -> u64 {
        (self.layouts[rank].scratch_len * self.unit(Form::Element)).next_multiple_of(ALIGN)
    }

    /// The pieces of a span of `rank`'s: where each is, in bytes, and its elements.
    fn span(&self, rank: usize, span: Span, slice: u64) -> Vec<(Place, u64, u64)> {
        let layout = &self.layouts[rank];
        let Some(data) = self.contents[rank].of(span) else {
            return Vec::new();
        };
        let unit = self.unit(span.place.form());
        let each = pieces(data, layout.joins());
        let run = |&(at, blocks): &(u32, u32)| {
            let run = layout.run(span.place, span.first + at, blocks, slice as u32);
            let base = match span.place {
                Place::Input | Place::Output => 0,
                Place::Scratch => self.base(slice),
                Place::Partial => self.base(slice) + self.partial_at(rank),
            };
            (span.place, base + run.offset * unit, run.len)
        };
        each.iter().map(run).collect()
    }

    /// Where a slice's part of staging memory begins.
    fn base(&self, slice: u64) -> u64 {
        slice % self.turns * self.turn
    }

    fn message_bytes(&self, message: Message, slice: u64) -> u64 {
        let Step::Send { span, .. } = self.sending(message) else {
            return 0;
        };
        let elements: u64 = self
            .span(message.from.index(), *span, slice)
            .iter()
            .map(|(_, _, len)| len)
            .sum();
        elements * self.unit(span.place.form())
    }

    /// Where the pieces of a message are put, at its receiver.
    fn target(&self, message: Message, slice: u64) -> Vec<(Place, u64)> {
        if let Some(staged) = message.staged {
            let mut next = self.base(slice) + staged;
            let Step::Send { span, .. } = self.sending(message) else {
                return Vec::new();
            };
            let unit = self.unit(span.place.form());
            let pieces = self.span(message.from.index(), *span, slice);
            let place = |(_, _, len): &(Place, u64, u64)| {
                let at = next;
                next += len * unit;
                (Place::Scratch, at)
            };
            return pieces.iter().map(place).collect();
        }
        match self.receiving(message) {
            Step::Recv { into, .. } => self
                .span(message.to.index(), *into, slice)
                .into_iter()
                .map(|(place, at, _)| (place, at))
                .collect(),
            _ => Vec::new(),
        }
    }

    fn touch(&self, rank: usize, (place, at): (Place, u64), bytes: u64, writes: bool) -> Touch {
        let (input, output) = self.shifts[rank];
        let (space, start) = match place {
            Place::Input if self.terms.in_place => (Space::Output, at + input),
            Place::Input => (Space::Input, at),
            Place::Output => (Space::Output, at + output),
            Place::Scratch | Place::Partial => (Space::Staging, at),
        };
        Touch {
            space,
            bytes: start..start + bytes,
            writes,
        }
    }

    /// The tasks of a slice, in the plan's order.
    fn tasks(&self, rank: usize, slice: u64) -> Vec<Task> {
        let mut tasks = Vec::new();
        for (strand, steps) in self.programs[rank].strands.iter().enumerate() {
            for (at, step) in steps.iter().enumerate() {
                let depth = self.depths[rank][strand][at];
                let message = self.of_step[rank][strand][at].map(|id| self.messages[id as usize]);
                let mut task = Task {
                    place: (slice, strand as u32, at as u32, 0),
                    depth,
                    what: What::Work,
                    acts: Vec::new(),
                    touches: Vec::new(),
                };
                match (step, message) {
                    (Step::Send { span, .. }, Some(message)) => {
                        let pieces = self.span(rank, *span, slice);
                        let unit = self.unit(span.place.form());
                        for ((place, from, len), into) in pieces.into_iter().zip(self.target(message, slice)) {
                            task.copy(here((place, from)), there(message.to, into), len * unit);
                            task.touches.push(self.touch(rank, (place, from), len * unit, false));
                        }
                        task.what = What::Send {
                            to: message.to,
                            word: self.word(message, slice),
                            has_to_ask: self.has_to_ask(message, slice),
                        };
                        tasks.extend(task.some());
                    }
                    (Step::Recv { into, .. }, Some(message)) => {
                        self.receive(&mut tasks, task.clone(), message, slice);
                        if message.staged.is_some() {
                            let unit = self.unit(into.place.form());
                            task.place.3 = 1;
                            let sources = self.target(message, slice);
                            for ((place, to, len), from) in self.span(rank, *into, slice).into_iter().zip(sources) {
                                task.copy(here(from), here((place, to)), len * unit);
                                task.touches.push(self.touch(rank, from, len * unit, false));
                                task.touches.push(self.touch(rank, (place, to), len * unit, true));
                            }
                            tasks.extend(task.some());
                        }
                    }
                    (Step::RecvReduce { form, with, into, .. }, Some(message)) => {
                        self.receive(&mut tasks, task.clone(), message, slice);
                        task.place.3 = 1;
                        let received = self
                            .target(message, slice)
                            .into_iter()
                            .map(|from| (from, *form))
                            .collect();
                        self.reduce(
                            rank,
                            &mut task,
                            vec![received, self.operand(rank, *with, slice)],
                            *into,
                            slice,
                        );
                        tasks.extend(task.some());
                    }
                    (Step::Reduce { sources, into }, _) => {
                        let sources = sources
                            .iter()
                            .map(|source| self.operand(rank, *source, slice))
                            .collect();
                        self.reduce(rank, &mut task, sources, *into, slice);
                        tasks.extend(task.some());
                    }
                    (Step::Copy { from, into }, _) => {
                        let unit = self.unit(into.place.form());
                        for ((source, at, _), (place, to, len)) in self
                            .span(rank, *from, slice)
                            .into_iter()
                            .zip(self.span(rank, *into, slice))
                        {
                            let (read, written) = (
                                self.touch(rank, (source, at), len * unit, false),
                                self.touch(rank, (place, to), len * unit, true),
                            );
                            if read.space == written.space && read.bytes == written.bytes {
                                continue;
                            }
                            task.copy(here((source, at)), here((place, to)), len * unit);
                            task.touches.extend([read, written]);
                        }
                        tasks.extend(task.some());
                    }
                    // A message that nobody sends: the checker proves that there is none.
                    _ => {}
                }
            }
        }
        tasks
    }

    fn receive(&self, tasks: &mut Vec<Task>, mut task: Task, message: Message, slice: u64) {
        let Step::Send { span, .. } = self.sending(message) else {
            return;
        };
        let unit = self.unit(span.place.form());
        let pieces = self.span(message.from.index(), *span, slice);
        for (into, (_, _, len)) in self.target(message, slice).into_iter().zip(pieces) {
            if len > 0 {
                task.touches
                    .push(self.touch(message.to.index(), into, len * unit, true));
            }
        }
        if task.touches.is_empty() {
            return;
        }
        // It comes when it was sent.
        task.depth = self.depths[message.from.index()][message.strand as usize][message.send as usize];
        task.what = What::Receive {
            from: message.from,
            word: self.word(message, slice),
            has_to_ask: self.has_to_ask(message, slice),
        };
        tasks.push(task);
    }

    fn operand(&self, rank: usize, span: Span, slice: u64) -> Vec<((Place, u64), Form)> {
        self.span(rank, span, slice)
            .into_iter()
            .map(|(place, at, _)| ((place, at), place.form()))
            .collect()
    }

    fn reduce(&self, rank: usize, task: &mut Task, sources: Vec<Vec<((Place, u64), Form)>>, into: Span, slice: u64) {
        for (at, (place, to, len)) in self.span(rank, into, slice).into_iter().enumerate() {
            if len == 0 {
                continue;
            }
            let of_piece: Vec<_> = sources.iter().filter_map(|source| source.get(at).copied()).collect();
            for (from, form) in &of_piece {
                task.touches
                    .push(self.touch(rank, *from, len * self.unit(*form), false));
            }
            task.touches
                .push(self.touch(rank, (place, to), len * self.unit(place.form()), true));
            task.acts.push(Act::Reduce {
                sources: of_piece.into_iter().map(|(from, form)| (here(from), form)).collect(),
                into: (here((place, to)), place.form()),
                elements: len,
            });
        }
    }

    fn word(&self, message: Message, slice: u64) -> u32 {
        slice as u32 * self.counts[message.from.index()][message.to.index()] + message.number
    }

    /// Whether a message waits for a word of its own before it is sent: if what it replaces was there in the same operation.
    fn has_to_ask(&self, message: Message, slice: u64) -> bool {
        let is_staging = match (message.staged, self.receiving(message)) {
            (Some(_), _) => true,
            (None, Step::Recv { into, .. }) => matches!(into.place, Place::Scratch | Place::Partial),
            _ => false,
        };
        message.replaces || (is_staging && slice >= self.turns)
    }
}

impl Task {
    fn copy(&mut self, from: At, into: At, bytes: u64) {
        if bytes > 0 {
            self.acts.push(Act::Copy { from, into, bytes });
        }
    }

    /// Itself, unless there is nothing to do.
    fn some(self) -> Option<Self> {
        (!self.acts.is_empty()).then_some(self)
    }

    /// Whether it has to come after another one that comes before it in the plan.
    fn follows(&self, other: &Self) -> bool {
        other.place < self.place
            && self
                .touches
                .iter()
                .any(|touch| other.touches.iter().any(|before| before.meets(touch)))
    }
}

fn here((place, at): (Place, u64)) -> At {
    match place {
        Place::Input => At::Input(at),
        Place::Output => At::Output(at),
        Place::Scratch | Place::Partial => At::Staging(at),
    }
}

fn there(rank: Rank, (place, at): (Place, u64)) -> At {
    match place {
        Place::Input | Place::Output => At::TheirOutput(rank, at),
        Place::Scratch | Place::Partial => At::TheirStaging(rank, at),
    }
}

/// What is put into a stream at a time.
struct Item {
    stream: u8,
    acts: Vec<Act>,
    /// Items before it that it waits for.
    after: Vec<usize>,
}

impl Plan {
    fn script(&self, rank: Rank) -> Script {
        let me = rank.index();
        let mut script = Script {
            streams: self.terms.copiers + 2,
            ..Script::default()
        };
        self.begin(me, &mut script);
        let mut tasks: Vec<Task> = (0..self.slices).flat_map(|slice| self.tasks(me, slice)).collect();
        tasks.sort_by_key(|task| {
            let (slice, strand, step, part) = task.place;
            (slice + u64::from(task.depth), task.depth, strand, step, part)
        });
        let items = self.items(tasks);
        emit(&items, &mut script);
        script
    }

    /// Tells the senders that this rank is ready, and waits for the receivers. A barrier is no more, with an answer, as a word must not be written twice before it was read.
    fn begin(&self, me: usize, script: &mut Script) {
        let ranks = self.programs.len();
        // Whoever is next first, so that nobody is everybody's first.
        let others = (1..ranks).map(|distance| (me + distance) % ranks);
        let sends = |from: usize, to: usize| {
            let between = |message: &&Message| message.from.index() == from && message.to.index() == to;
            self.is_barrier
                || self
                    .messages
                    .iter()
                    .filter(between)
                    .any(|message| self.message_bytes(*message, 0) > 0)
        };
        let word = |peer: usize, is_room: bool| Word {
            peer: Rank(peer as u32),
            is_room,
            index: if is_room { READY } else { 0 },
        };
        let senders: Vec<_> = others.clone().filter(|peer| sends(*peer, me)).collect();
        let receivers: Vec<_> = others.filter(|peer| sends(me, *peer)).collect();
        let mut put = |act| script.acts.push((CALLER, act));
        senders.iter().for_each(|peer| put(Act::Signal(word(*peer, true))));
        receivers.iter().for_each(|peer| put(Act::Await(word(*peer, true))));
        if self.is_barrier {
            receivers.iter().for_each(|peer| put(Act::Signal(word(*peer, false))));
            senders.iter().for_each(|peer| put(Act::Await(word(*peer, false))));
        }
    }

    /// Gives tasks their streams, and receives their places: right before what needs them.
    fn items(&self, tasks: Vec<Task>) -> Vec<Item> {
        let last = self.terms.copiers + 1;
        let mut streams = vec![CALLER; tasks.len()];
        let mut copier = 0;
        for (task, stream) in tasks.iter().zip(&mut streams) {
            if matches!(task.what, What::Send { .. }) {
                *stream = 1 + copier;
                copier = (copier + 1) % self.terms.copiers.max(1);
            }
        }
        // In which order tasks are put into streams.
        let mut before: Vec<Vec<usize>> = vec![Vec::new(); tasks.len()];
        let mut is_moved = vec![false; tasks.len()];
        for at in 0..tasks.len() {
            if !matches!(tasks[at].what, What::Receive { .. }) {
                continue;
            }
            let user = (at + 1..tasks.len()).find(|&user| {
                tasks[user].place.0 == tasks[at].place.0
                    && !matches!(tasks[user].what, What::Receive { .. })
                    && tasks[user].follows(&tasks[at])
            });
            match user {
                Some(user) => {
                    streams[at] = streams[user];
                    before[user].push(at);
                    is_moved[at] = true;
                }
                None => streams[at] = last,
            }
        }
        let mut order = Vec::with_capacity(tasks.len());
        for at in (0..tasks.len()).filter(|at| !is_moved[*at]) {
            order.append(&mut before[at]);
            order.push(at);
        }
        self.with_room(&tasks, &streams, &order)
    }

    /// Adds what tells senders that there is room, behind the last task that used it.
    fn with_room(&self, tasks: &[Task], streams: &[u8], order: &[usize]) -> Vec<Item> {
        let follows: Vec<Vec<usize>> = order
            .iter()
            .map(|&at| {
                (0..order.len())
                    .filter(|&other| tasks[at].follows(&tasks[order[other]]))
                    .collect()
            })
            .collect();
        let mut rooms: Vec<Vec<usize>> = vec![Vec::new(); order.len() + 1];
        for (position, &at) in order.iter().enumerate() {
            if let What::Receive { has_to_ask: true, .. } = tasks[at].what {
                let behind = follows[position].iter().max().map_or(0, |last| last + 1);
                rooms[behind].push(position);
            }
        }
        let mut items: Vec<Item> = Vec::new();
        let mut item_of = vec![0; order.len()];
        for position in 0..=order.len() {
            for &receive in &rooms[position] {
                let What::Receive { from, word, .. } = tasks[order[receive]].what else {
                    continue;
                };
                let after: Vec<usize> = follows[receive].iter().map(|&other| item_of[other]).collect();
                items.push(Item {
                    stream: after.iter().max().map_or(CALLER, |&last| items[last].stream),
                    acts: vec![Act::Signal(Word {
                        peer: from,
                        is_room: true,
                        index: word,
                    })],
                    after,
                });
            }
            let Some(&at) = order.get(position) else { break };
            let task = &tasks[at];
            let full = |peer, index| Word {
                peer,
                is_room: false,
                index,
            };
            let (acts, after) = match task.what {
                What::Send { to, word, has_to_ask } => {
                    let room = Word {
                        peer: to,
                        is_room: true,
                        index: word,
                    };
                    let asks = has_to_ask.then_some(Act::Await(room));
                    let told = Act::Signal(full(to, word));
                    (
                        asks.into_iter()
                            .chain(task.acts.iter().cloned())
                            .chain([told])
                            .collect(),
                        &follows[position][..],
                    )
                }
                What::Receive { from, word, .. } => (vec![Act::Await(full(from, word))], &[][..]),
                What::Work => (task.acts.clone(), &follows[position][..]),
            };
            item_of[position] = items.len();
            items.push(Item {
                stream: streams[at],
                acts,
                after: after.iter().map(|&other| item_of[other]).collect(),
            });
        }
        items
    }
}

/// Puts items into streams, with events where one stream has to wait for another.
fn emit(items: &[Item], script: &mut Script) {
    let streams = usize::from(script.streams);
    // How far each stream is known to be behind each other one: the last item that it has waited for, and one more.
    let mut known = vec![vec![0; streams]; streams];
    let mut waits: Vec<Vec<usize>> = vec![Vec::new(); items.len()];
    let mut events: Vec<Option<u32>> = vec![None; items.len()];
    let mut next = 1;
    for (at, item) in items.iter().enumerate() {
        let own = usize::from(item.stream);
        for &before in item.after.iter().rev() {
            let other = usize::from(items[before].stream);
            if other == own || known[own][other] > before {
                continue;
            }
            // `after` is in order, so this is the last that is waited for on that stream.
            known[own][other] = before + 1;
            events[before].get_or_insert_with(|| {
                next += 1;
                next - 1
            });
            waits[at].push(before);
        }
    }
    let mut is_used = vec![false; streams];
    is_used[usize::from(CALLER)] = true;
    // The first event is the beginning.
    if items.iter().any(|item| item.stream != CALLER) {
        script.acts.push((CALLER, Act::Record(0)));
    }
    for (at, item) in items.iter().enumerate() {
        let used = &mut is_used[usize::from(item.stream)];
        if !*used {
            *used = true;
            script.acts.push((item.stream, Act::Wait(0)));
        }
        for &before in &waits[at] {
            script
                .acts
                .extend(events[before].map(|event| (item.stream, Act::Wait(event))));
        }
        script
            .acts
            .extend(item.acts.iter().map(|act| (item.stream, act.clone())));
        script
            .acts
            .extend(events[at].map(|event| (item.stream, Act::Record(event))));
    }
    for stream in (1..script.streams).filter(|stream| is_used[usize::from(*stream)]) {
        script.acts.push((stream, Act::Record(next)));
        script.acts.push((CALLER, Act::Wait(next)));
        next += 1;
    }
    script.events = next;
}

#[cfg(test)]
#[path = "script_tests.rs"]
mod tests;
