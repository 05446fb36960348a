//! A lane runs one strand of the operations on one channel: their slices one after another, each step by step, as far as it comes without waiting.
//!
//! Three things go on at their own pace: *execution*, which does the steps in order; *sends*, which execution only begins, and which leave as the peer grants memory or empties slots; and *grants*, which go ahead of execution
//! as far as memory is free. A send never holds up what does not write the memory it reads.

use doorbell_verbs::{Alias, MemoryError, ProtectionDomain};

use super::code::{Edge, Instruction, Strand, message};
use super::error::Failed;
use super::layout::Run;
use super::link::Link;
use super::operation::{Data, Running};
use crate::failure::Awaited;
use crate::memory::Segment;
use crate::plan::{Form, Place, Span, Step};
use crate::protocol::Lines;
use crate::types::Rank;

/// Staging slots: messages granted and not yet reduced; and as many copied and not yet confirmed.
const STAGING: u64 = 4;
/// A send that has not left.
const PENDING: u64 = u64::MAX;
/// Operands of a reduction that are told without allocating.
const OPERANDS: usize = 16;

/// How far something has come in a lane's slices.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Default, Debug)]
struct At {
    /// The slice: which of the lane's, counted from 0.
    turn: u32,
    step: u32,
}

/// How far a step has come in its message.
#[derive(Clone, Copy, Default, Debug)]
struct Walk {
    piece: u32,
    /// Elements of the piece.
    at: u64,
}

/// A send under way.
#[derive(Clone, Copy, Debug)]
struct Pending {
    at: At,
    to: Rank,
    walk: Walk,
    /// The requests that have to be confirmed until what has left of it is out of the way.
    last: u64,
}

/// A part of a message.
#[derive(Clone, Copy, Debug)]
struct Fragment {
    piece: u32,
    /// Elements from the piece's beginning.
    at: u64,
    /// Elements.
    len: u64,
}

/// Slots of one length, taken in turn.
#[derive(Default)]
struct Slots {
    memory: Option<Segment>,
    /// Bytes of a slot.
    len: usize,
    taken: u64,
    given: u64,
}

impl Slots {
    /// Makes the slots at least so long. None is taken.
    fn fit(&mut self, domain: &ProtectionDomain, len: usize) -> Result<(), MemoryError> {
        if self.len < len {
            self.memory = None;
            self.memory = Some(Segment::new([domain], len * STAGING as usize)?);
            self.len = len;
        }
        Ok(())
    }

    fn offset(&self, number: u64) -> usize {
        (number % STAGING) as usize * self.len
    }

    fn start(&self, number: u64) -> *mut u8 {
        let start = self.memory.as_ref().map_or(core::ptr::null_mut(), Segment::start);
        start.wrapping_add(self.offset(number))
    }
}

/// What came of driving a lane.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Drive {
    /// It has done something, and waits now.
    Moved,
    /// It waits.
    Idle,
    /// It is done with the operation.
    Done,
}

/// One strand of one channel.
pub(super) struct Lane {
    pub(super) channel: u32,
    pub(super) strand: u32,
    pub(super) rail: usize,
    /// The operation that is run, or comes next.
    pub(super) next: u64,
    running: bool,
    execution: At,
    walk: Walk,
    /// Where grants are: at the `receive`th receiving step of a slice.
    grants: At,
    receive: usize,
    grant_walk: Walk,
    sends: Vec<Pending>,
    /// For each step, the requests that have to be confirmed until its message is out of the way.
    sent: Vec<u64>,
    /// Scratch, then partial results.
    private: Option<Segment>,
    partial_at: usize,
    /// Messages on their way to be reduced or copied.
    staging: Slots,
    /// Copies of messages from plain memory: their targets, and the requests that free them.
    copies: Slots,
    copied: [(Rank, u64); STAGING as usize],
    /// Lines taken apart.
    lines: Vec<u64>,
}

// SAFETY: what it holds pointers into are segments of its own.
unsafe impl Send for Lane {}

/// What a lane works on: the operation, and the ends of this lane's connections by rank.
struct Scene<'a> {
    op: &'a Running,
    links: &'a mut [Option<Link>],
}

/// The connection to a rank: plans are checked to name no other.
fn link(links: &mut [Option<Link>], rank: Rank) -> Result<&mut Link, Failed> {
    links
        .get_mut(rank.index())
        .and_then(Option::as_mut)
        .ok_or_else(|| Failed::Refused {
            peer: rank,
            what: "there is no connection to it".to_owned(),
        })
}

/// Whether so many requests to a rank are confirmed.
fn has_confirmed(links: &[Option<Link>], to: Rank, requests: u64) -> bool {
    links[to.index()]
        .as_ref()
        .is_some_and(|link| link.completed >= requests)
}

impl Lane {
    pub(super) fn new(channel: u32, strand: u32, rail: usize) -> Self {
        Self {
            channel,
            strand,
            rail,
            next: 0,
            running: false,
            execution: At::default(),
            walk: Walk::default(),
            grants: At::default(),
            receive: 0,
            grant_walk: Walk::default(),
            sends: Vec::new(),
            sent: Vec::new(),
            private: None,
            partial_at: 0,
            staging: Slots::default(),
            copies: Slots::default(),
            copied: [(Rank(0), 0); STAGING as usize],
            lines: vec![0; Lines::Ll128.slot() / 8],
        }
    }

    /// Begins an operation. Its memory is what it needs; nothing of an operation before is under way.
    fn begin(&mut self, op: &Running, domain: &ProtectionDomain) -> Result<(), MemoryError> {
        self.running = true;
        (self.execution, self.walk) = (At::default(), Walk::default());
        (self.grants, self.receive, self.grant_walk) = (At::default(), 0, Walk::default());
        let steps = op.code.strands[self.strand as usize].instructions.len();
        self.sends.clear();
        self.sends.reserve(steps);
        self.sent.clear();
        self.sent.resize(steps, 0);
        let layout = &op.layout;
        if layout.scratch_len + layout.partial_len > 0 {
            let scratch = layout.scratch_len as usize * op.function.bytes(Form::Element);
            self.partial_at = scratch.next_multiple_of(64);
            let len = self.partial_at + layout.partial_len as usize * op.function.bytes(Form::Partial);
            if self.private.as_ref().is_none_or(|private| private.len() < len) {
                self.private = None;
                self.private = Some(Segment::new([domain], len.next_multiple_of(4096))?);
            }
        }
        if op.lines.is_none() {
            self.staging.fit(domain, op.fragment)?;
            let plain = |data: &Data| matches!(data, Data::Plain(_));
            if plain(&op.input) || plain(&op.output) {
                self.copies.fit(domain, op.fragment)?;
            }
        }
        Ok(())
    }

    /// Runs the operation as far as it goes.
    ///
    /// # Errors
    /// What the devices say, as the engine's failure.
    pub(super) fn drive(
        &mut self,
        op: &Running,
        links: &mut [Option<Link>],
        domain: &ProtectionDomain,
    ) -> Result<Drive, Failed> {
        if !self.running {
            self.begin(op, domain)
                .map_err(|error| Failed::Device(error.to_string()))?;
        }
        let mut scene = Scene { op, links };
        let mut moved = false;
        loop {
            let mut further = false;
            if op.lines.is_none() {
                further |= self.grant(&mut scene)?;
            }
            further |= self.execute(&mut scene)?;
            further |= self.send_pending(&mut scene)?;
            if !further {
                break;
            }
            moved = true;
        }
        for to in scene.links.iter_mut().flatten() {
            to.send_notes()?;
        }
        if self.is_over(op) && self.sends.is_empty() && self.unconfirmed(op, scene.links).is_none() {
            self.running = false;
            return Ok(Drive::Done);
        }
        Ok(if moved { Drive::Moved } else { Drive::Idle })
    }

    /// How many slices are the lane's.
    fn turns(&self, op: &Running) -> u32 {
        let slices = op.layout.extent.slices;
        (slices - self.channel.min(slices)).div_ceil(op.channels)
    }

    fn is_over(&self, op: &Running) -> bool {
        self.execution.turn >= self.turns(op)
    }

    fn slice(&self, op: &Running, turn: u32) -> u32 {
        self.channel + turn * op.channels
    }

    /// A rank that has not confirmed all that was sent to it.
    fn unconfirmed(&self, op: &Running, links: &[Option<Link>]) -> Option<Rank> {
        let strand = &op.code.strands[self.strand as usize];
        let copies = (self.copies.given..self.copies.taken).map(|copy| self.copied[(copy % STAGING) as usize]);
        let sent = strand
            .instructions
            .iter()
            .zip(&self.sent)
            .filter_map(|(instruction, &sent)| {
                let (to, ..) = message(&instruction.step)?;
                Some((to, sent))
            });
        copies
            .chain(sent)
            .find(|(to, sent)| *sent > 0 && links[to.index()].as_ref().is_some_and(|link| link.completed < *sent))
            .map(|(to, _)| to)
    }

    /// What the lane waits for: at which slice and step, from whom, and what.
    pub(super) fn waits_for(&self, op: &Running, links: &[Option<Link>]) -> Option<(u32, u32, Rank, Awaited)> {
        if !self.running {
            return None;
        }
        let of_send = |send: &Pending| (self.slice(op, send.at.turn), send.at.step, send.to, Awaited::Room);
        if self.is_over(op) {
            let acknowledgement = || {
                let last = self.turns(op).saturating_sub(1);
                Some((
                    self.slice(op, last),
                    self.sent.len() as u32,
                    self.unconfirmed(op, links)?,
                    Awaited::Acknowledgement,
                ))
            };
            return self.sends.first().map(of_send).or_else(acknowledgement);
        }
        let turn = self.execution.turn;
        let strand = &op.code.strands[self.strand as usize];
        let instruction = strand.instructions.get(self.execution.step as usize)?;
        let behind = instruction
            .sends
            .iter()
            .find(|edge| !self.is_sent(**edge, turn, strand, links));
        if let Some(edge) = behind {
            let (to, ..) = message(&strand.instructions[edge.step as usize].step)?;
            let room = self.sends.iter().find(|send| send.to == to).map(of_send);
            return room.or(Some((
                self.slice(op, turn),
                self.execution.step,
                to,
                Awaited::Acknowledgement,
            )));
        }
        let (peer, ..) = message(&instruction.step)?;
        let awaited = match instruction.step {
            Step::Send { .. } => Awaited::Room,
            _ => Awaited::Message,
        };
        Some((self.slice(op, turn), self.execution.step, peer, awaited))
    }

    /// Whether the message of an earlier send is out of the way.
    fn is_sent(&self, edge: Edge, turn: u32, strand: &Strand, links: &[Option<Link>]) -> bool {
        if edge.back > turn {
            return true;
        }
        let sent = self.sent[edge.step as usize];
        if sent == 0 {
            return true;
        }
        let to = message(&strand.instructions[edge.step as usize].step).map(|(to, ..)| to);
        sent != PENDING && to.is_some_and(|to| has_confirmed(links, to, sent))
    }

    /// Whether a part of what a step writes is out of the way of all sends that read it. A send that has not left yet is, if it is of the very same span, and what has left of it is beyond the part and has arrived: two
    /// ranks that exchange more than there is memory for on the way would else wait for each other.
    fn is_free(
        &self,
        instruction: &Instruction,
        into: Span,
        part: Option<Fragment>,
        turn: u32,
        strand: &Strand,
        links: &[Option<Link>],
    ) -> bool {
        instruction.sends.iter().all(|edge| {
            if self.is_sent(*edge, turn, strand, links) {
                return true;
            }
            let Some(part) = part else { return false };
            let at = At {
                turn: turn.wrapping_sub(edge.back),
                step: edge.step,
            };
            self.sends.iter().any(|send| {
                let behind = (send.walk.piece, send.walk.at) >= (part.piece, part.at + part.len);
                let of = message(&strand.instructions[edge.step as usize].step);
                send.at == at
                    && behind
                    && of.is_some_and(|(.., span)| span == into)
                    && has_confirmed(links, send.to, send.last)
            })
        })
    }

    /// The next part of a message that `walk` has come to, at most as many elements as a fragment has; `None` when it is through.
    fn fragment(
        op: &Running,
        instruction: &Instruction,
        span: Span,
        slice: u32,
        form: Form,
        walk: &mut Walk,
    ) -> Option<Fragment> {
        if span.blocks == 0 {
            return (walk.piece == 0).then_some(Fragment {
                piece: 0,
                at: 0,
                len: 0,
            });
        }
        while let Some(&(first, blocks)) = instruction.pieces.get(walk.piece as usize) {
            let run = op.layout.run(span.place, span.first + first, blocks, slice);
            if walk.at < run.len {
                let len = op.fragment(form).min(run.len - walk.at);
                return Some(Fragment {
                    piece: walk.piece,
                    at: walk.at,
                    len,
                });
            }
            *walk = Walk {
                piece: walk.piece + 1,
                at: 0,
            };
        }
        None
    }

    /// Goes on behind a fragment.
    fn pass(walk: &mut Walk, fragment: Fragment) {
        if fragment.len == 0 {
            walk.piece += 1;
        } else {
            walk.at += fragment.len;
        }
    }

    /// Where the elements of a fragment lie that belongs to this span: bytes from the beginning of its place.
    fn bytes_at(op: &Running, instruction: &Instruction, span: Span, slice: u32, fragment: Fragment) -> usize {
        let Some(&(first, blocks)) = instruction.pieces.get(fragment.piece as usize) else {
            return 0;
        };
        let Run { offset, .. } = op.layout.run(span.place, span.first + first, blocks, slice);
        (offset + fragment.at) as usize * op.function.bytes(span.place.form())
    }

    /// The first byte of a place.
    fn place(&self, op: &Running, place: Place) -> *mut u8 {
        let private = || self.private.as_ref().map_or(core::ptr::null_mut(), Segment::start);
        match place {
            Place::Input => op.input.start(),
            Place::Output => op.output.start(),
            Place::Scratch => private(),
            Place::Partial => private().wrapping_add(self.partial_at),
        }
    }

    /// The segment that a place lies in, which device of it is the lane's, and where it begins there; `None` for plain memory.
    fn registered<'s>(&'s self, op: &'s Running, place: Place) -> Option<(&'s Segment, usize, usize)> {
        let of = |data: &'s Data| data.segment().map(|(segment, offset)| (segment, self.rail, offset));
        match place {
            Place::Input => of(&op.input),
            Place::Output => of(&op.output),
            Place::Scratch => Some((self.private.as_ref()?, 0, 0)),
            Place::Partial => Some((self.private.as_ref()?, 0, self.partial_at)),
        }
    }

    /// Grants memory for what is to be received, as far ahead as memory is free.
    fn grant(&mut self, scene: &mut Scene<'_>) -> Result<bool, Failed> {
        let op = scene.op;
        let strand = &op.code.strands[self.strand as usize];
        let mut moved = false;
        while self.grants.turn < self.turns(op) {
            let Some(&step) = strand.receives.get(self.receive) else {
                if strand.receives.is_empty() {
                    self.grants.turn = u32::MAX;
                    break;
                }
                self.receive = 0;
                self.grants.turn += 1;
                continue;
            };
            self.grants.step = step;
            let instruction = &strand.instructions[step as usize];
            let Some((from, form, span)) = message(&instruction.step) else {
                break;
            };
            let slice = self.slice(op, self.grants.turn);
            let mut walk = self.grant_walk;
            let Some(fragment) = Self::fragment(op, instruction, span, slice, form, &mut walk) else {
                self.receive += 1;
                self.grant_walk = Walk::default();
                continue;
            };
            let peer = link(scene.links, from)?;
            if !peer.may_grant() {
                break;
            }
            let len = fragment.len as usize * op.function.bytes(form);
            let direct = match instruction.step {
                Step::Recv { into, .. } if len > 0 => self.registered(op, into.place),
                _ => None,
            };
            if len == 0 {
                peer.grant(0, 0, 0);
            } else if let Some((segment, rail, offset)) = direct {
                if !self.has_passed(instruction.free_after, self.grants.turn)
                    || !self.is_free(instruction, span, Some(fragment), self.grants.turn, strand, scene.links)
                {
                    break;
                }
                let at = offset + Self::bytes_at(op, instruction, span, slice, fragment);
                let addr = segment.start().addr() as u64 + at as u64;
                let rkey = segment.rkey(rail);
                link(scene.links, from)?.grant(addr, rkey, len as u32);
            } else {
                if self.staging.taken - self.staging.given == STAGING {
                    break;
                }
                let addr = self.staging.start(self.staging.taken).addr() as u64;
                let rkey = self.staging.memory.as_ref().map_or(0, |memory| memory.rkey(0));
                peer.grant(addr, rkey, len as u32);
                self.staging.taken += 1;
            }
            Self::pass(&mut walk, fragment);
            self.grant_walk = walk;
            moved = true;
        }
        Ok(moved)
    }

    /// Whether execution is behind a step.
    fn has_passed(&self, edge: Option<Edge>, turn: u32) -> bool {
        let Some(edge) = edge else { return true };
        if edge.back > turn {
            return true;
        }
        self.execution
            > At {
                turn: turn - edge.back,
                step: edge.step,
            }
    }

    /// Executes steps, until one has to wait.
    fn execute(&mut self, scene: &mut Scene<'_>) -> Result<bool, Failed> {
        let op = scene.op;
        let strand = &op.code.strands[self.strand as usize];
        let turns = self.turns(op);
        let mut moved = false;
        while self.execution.turn < turns {
            let Some(instruction) = strand.instructions.get(self.execution.step as usize) else {
                self.execution = At {
                    turn: self.execution.turn + 1,
                    step: 0,
                };
                moved = true;
                continue;
            };
            let slice = self.slice(op, self.execution.turn);
            let done = match &instruction.step {
                Step::Send { to, .. } => self.begin_send(scene, *to)?,
                Step::Recv { .. } | Step::RecvReduce { .. } => {
                    self.receive_message(scene, instruction, slice, &mut moved)?
                }
                Step::Reduce { sources, into } => {
                    let turn = self.execution.turn;
                    let free = self.is_free(instruction, *into, None, turn, strand, scene.links);
                    if free {
                        self.reduce(op, instruction, sources, *into, slice);
                    }
                    free
                }
                Step::Copy { from, into } => {
                    let turn = self.execution.turn;
                    let free = self.is_free(instruction, *into, None, turn, strand, scene.links);
                    if free {
                        self.copy(op, instruction, *from, *into, slice);
                    }
                    free
                }
            };
            if !done {
                break;
            }
            self.execution.step += 1;
            self.walk = Walk::default();
            moved = true;
        }
        Ok(moved)
    }

    /// Begins a send, and lets it go as far as it can. False if the send of this step in the slice before has not left.
    fn begin_send(&mut self, scene: &mut Scene<'_>, to: Rank) -> Result<bool, Failed> {
        let step = self.execution.step as usize;
        if self.sent[step] == PENDING {
            return Ok(false);
        }
        let mut send = Pending {
            at: self.execution,
            to,
            walk: Walk::default(),
            last: 0,
        };
        self.sent[step] = PENDING;
        let waits = self.sends.iter().any(|before| before.to == to);
        if waits || !self.send(scene, &mut send)?.1 {
            self.sends.push(send);
        }
        Ok(true)
    }

    /// Goes on with the sends under way; those to one rank in their order.
    fn send_pending(&mut self, scene: &mut Scene<'_>) -> Result<bool, Failed> {
        let mut moved = false;
        let mut index = 0;
        while index < self.sends.len() {
            let mut send = self.sends[index];
            if self.sends[..index].iter().any(|before| before.to == send.to) {
                index += 1;
                continue;
            }
            let (further, done) = self.send(scene, &mut send)?;
            moved |= further;
            if done {
                self.sends.remove(index);
            } else {
                self.sends[index] = send;
                index += 1;
            }
        }
        Ok(moved)
    }

    /// Sends of a message what can be sent. Gives whether that was anything, and whether it was the last.
    fn send(&mut self, scene: &mut Scene<'_>, send: &mut Pending) -> Result<(bool, bool), Failed> {
        let op = scene.op;
        let instruction = &op.code.strands[self.strand as usize].instructions[send.at.step as usize];
        let Some((_, form, span)) = message(&instruction.step) else {
            return Ok((false, true));
        };
        let slice = self.slice(op, send.at.turn);
        let mut moved = false;
        while let Some(fragment) = Self::fragment(op, instruction, span, slice, form, &mut send.walk) {
            let to = link(scene.links, send.to)?;
            let len = fragment.len as usize * op.function.bytes(form);
            let at = Self::bytes_at(op, instruction, span, slice, fragment);
            if let Some(lines) = op.lines {
                if !to.may_send_lines(lines) {
                    return Ok((moved, false));
                }
                let from = self.place(op, span.place).wrapping_add(at);
                // SAFETY: a fragment lies in its place, which the operation has; what this rank writes there waits for the send, and it is granted to nobody.
                unsafe { to.send_lines(lines, from, len) }?;
            } else {
                if !to.is_granted() {
                    return Ok((moved, false));
                }
                let message = if len == 0 {
                    None
                } else {
                    let Some(source) = self.source(scene, span.place, at, len, send.to) else {
                        return Ok((moved, false));
                    };
                    Some((source, len))
                };
                let number = link(scene.links, send.to)?.send(message)?;
                if self.registered(op, span.place).is_some() {
                    send.last = number;
                } else if len > 0 {
                    self.copied[((self.copies.taken - 1) % STAGING) as usize] = (send.to, number);
                }
            }
            Self::pass(&mut send.walk, fragment);
            moved = true;
        }
        self.sent[send.at.step as usize] = send.last;
        Ok((true, true))
    }

    /// What a message of Simple is sent from: where it lies, or a copy of it. `None` while there is no memory for a copy.
    fn source(&mut self, scene: &mut Scene<'_>, place: Place, at: usize, len: usize, to: Rank) -> Option<Alias> {
        let op = scene.op;
        if let Some((segment, rail, offset)) = self.registered(op, place) {
            return segment.alias(rail, offset + at, len);
        }
        while self.copies.given < self.copies.taken {
            let (of, number) = self.copied[(self.copies.given % STAGING) as usize];
            if scene.links[of.index()]
                .as_ref()
                .is_some_and(|link| link.completed < number)
            {
                break;
            }
            self.copies.given += 1;
        }
        if self.copies.taken - self.copies.given == STAGING {
            return None;
        }
        let (number, from) = (self.copies.taken, self.place(op, place).wrapping_add(at));
        // SAFETY: the message lies in its place, which the operation has and nobody writes; a slot is as long as a fragment, and its last message has been confirmed.
        unsafe { core::ptr::copy_nonoverlapping(from, self.copies.start(number), len) };
        let alias = self.copies.memory.as_ref()?.alias(0, self.copies.offset(number), len)?;
        self.copied[(number % STAGING) as usize] = (to, PENDING);
        self.copies.taken += 1;
        Some(alias)
    }

    /// Receives what is there of a message. True when that was the last.
    fn receive_message(
        &mut self,
        scene: &mut Scene<'_>,
        instruction: &Instruction,
        slice: u32,
        moved: &mut bool,
    ) -> Result<bool, Failed> {
        let op = scene.op;
        let strand = &op.code.strands[self.strand as usize];
        let Some((from, form, span)) = message(&instruction.step) else {
            return Ok(true);
        };
        let mut walk = self.walk;
        while let Some(fragment) = Self::fragment(op, instruction, span, slice, form, &mut walk) {
            let len = fragment.len as usize * op.function.bytes(form);
            let lands = match instruction.step {
                Step::Recv { into, .. } => op.lines.is_none() && self.registered(op, into.place).is_some(),
                _ => false,
            };
            // What was granted where it belongs was free then.
            if !lands
                && !self.is_free(
                    instruction,
                    span,
                    Some(fragment),
                    self.execution.turn,
                    strand,
                    scene.links,
                )
            {
                return Ok(false);
            }
            let into = self
                .place(op, span.place)
                .wrapping_add(Self::bytes_at(op, instruction, span, slice, fragment));
            let peer = link(scene.links, from)?;
            let received: *mut u8 = match op.lines {
                Some(lines) => {
                    let direct = matches!(instruction.step, Step::Recv { .. }) && len >= 4;
                    let target = if direct { into } else { self.lines.as_mut_ptr().cast() };
                    // SAFETY: the fragment lies in its place, where nothing is sent from; or in the memory for a slot's lines, which takes four bytes at least.
                    if !unsafe { peer.receive_lines(lines, target, len) } {
                        return Ok(false);
                    }
                    target
                }
                None => {
                    if !peer.has_arrived() {
                        return Ok(false);
                    }
                    peer.receive();
                    if lands || len == 0 {
                        into
                    } else {
                        self.staging.start(self.staging.given)
                    }
                }
            };
            if len > 0 {
                match &instruction.step {
                    // SAFETY: the fragment lies in its place, which nobody else touches now, and was received as a whole into memory apart from it.
                    Step::Recv { .. } if received != into => unsafe {
                        core::ptr::copy_nonoverlapping(received, into, len);
                    },
                    Step::RecvReduce { with, .. } => {
                        let with_at = Self::bytes_at(op, instruction, *with, slice, fragment);
                        let operand = self.place(op, with.place).wrapping_add(with_at);
                        let sources = [(form, received.cast_const()), (with.place.form(), operand.cast_const())];
                        // SAFETY: all are as long as the fragment; the two in places of the operation are the same or apart, and nobody else writes them now; what was received is complete.
                        unsafe {
                            op.function
                                .reduce(&sources, (span.place.form(), into), fragment.len as usize)
                        };
                    }
                    _ => {}
                }
                if op.lines.is_none() && !lands {
                    self.staging.given += 1;
                }
            }
            Self::pass(&mut walk, fragment);
            self.walk = walk;
            *moved = true;
        }
        Ok(true)
    }

    /// Reduces spans of this rank's.
    fn reduce(&self, op: &Running, instruction: &Instruction, sources: &[Span], into: Span, slice: u32) {
        let mut few = [(Form::Element, core::ptr::null()); OPERANDS];
        let mut many = Vec::new();
        let operands: &mut [(Form, *const u8)] = if sources.len() <= OPERANDS {
            &mut few[..sources.len()]
        } else {
            many.resize(sources.len(), (Form::Element, core::ptr::null()));
            &mut many
        };
        for (piece, &(first, blocks)) in instruction.pieces.iter().enumerate() {
            let run = op.layout.run(into.place, into.first + first, blocks, slice);
            let whole = Fragment {
                piece: piece as u32,
                at: 0,
                len: run.len,
            };
            let at = |span: Span| {
                self.place(op, span.place)
                    .wrapping_add(Self::bytes_at(op, instruction, span, slice, whole))
            };
            for (operand, source) in operands.iter_mut().zip(sources) {
                *operand = (source.place.form(), at(*source).cast_const());
            }
            // SAFETY: all pieces hold the same data blocks, so are of one length; they are the same or apart, and nobody else writes them now.
            unsafe {
                op.function
                    .reduce(operands, (into.place.form(), at(into)), run.len as usize)
            };
        }
    }

    /// Copies a span of this rank's.
    fn copy(&self, op: &Running, instruction: &Instruction, from: Span, into: Span, slice: u32) {
        for (piece, &(first, blocks)) in instruction.pieces.iter().enumerate() {
            let run = op.layout.run(into.place, into.first + first, blocks, slice);
            let whole = Fragment {
                piece: piece as u32,
                at: 0,
                len: run.len,
            };
            let at = |span: Span| {
                self.place(op, span.place)
                    .wrapping_add(Self::bytes_at(op, instruction, span, slice, whole))
            };
            let bytes = run.len as usize * op.function.bytes(into.place.form());
            // In place they may be one.
            if at(from) != at(into) {
                // SAFETY: both hold data blocks of one length, are apart, and nobody else writes them now.
                unsafe { core::ptr::copy_nonoverlapping(at(from), at(into), bytes) };
            }
        }
    }
}
