//! A plan for the copy engines: messages, their placement at the receivers, and slices.

use super::script::{DoesNotFit, READY, ScriptParams};
use super::tasks::{ALIGN, Access, MemorySpace, Task, TaskKind};
use crate::executor::layout::{Layout, MemoryContents, OperationExtent};
use crate::plan::walk::{StepVisitor, StrandId, visit_steps};
use crate::plan::{BlockForm, Collective, PlanMemory, Program, Schedule, Step};
use crate::types::Rank;

const MAX_SLICES: u64 = 512;

#[derive(Clone, Copy, Debug)]
pub(super) struct Message {
    pub(super) from: Rank,
    pub(super) to: Rank,
    /// Its number between the two ranks within a slice: that of its first part.
    pub(super) number: u32,
    /// The number of parts, each with a flag word of its own.
    pub(super) parts: u32,
    pub(super) strand: u32,
    pub(super) send: u32,
    pub(super) receive: u32,
    /// Its offset in the receiver's staging memory, unless it goes directly to its destination.
    pub(super) staged: Option<u64>,
    /// Whether it overwrites other data of the same slice.
    pub(super) replaces: bool,
}

// fields: a table of the plan each; both this module and `tasks` read most of them.
pub(super) struct Plan {
    pub(super) params: ScriptParams,
    pub(super) programs: Vec<Program>,
    pub(super) layouts: Vec<Layout>,
    pub(super) contents: Vec<MemoryContents>,
    /// By rank, strand and step.
    pub(super) depths: Vec<Vec<Vec<u32>>>,
    pub(super) messages: Vec<Message>,
    pub(super) message_of_step: Vec<Vec<Vec<Option<u32>>>>,
    pub(super) counts: Vec<Vec<u32>>,
    pub(super) is_barrier: bool,
    pub(super) slices: u64,
    /// The number of slices with staging memory of their own, and its length for each.
    pub(super) staging_slots: u64,
    pub(super) staging_slot_bytes: u64,
    /// In place: by rank, the shifts that map bytes of input and of output to the same memory.
    pub(super) shifts: Vec<(u64, u64)>,
}

struct Depths {
    now: Vec<Vec<u32>>,
    all: Vec<Vec<Vec<u32>>>,
}

impl StepVisitor for Depths {
    type Message = u32;

    fn send(&mut self, who: StrandId, step: &Step) -> u32 {
        self.local(who, step);
        self.now[who.rank.index()][who.strand as usize]
    }

    fn receive(&mut self, who: StrandId, _: &Step, message: u32) {
        let now = &mut self.now[who.rank.index()][who.strand as usize];
        *now = (*now).max(message + 1);
        self.all[who.rank.index()][who.strand as usize].push(*now);
    }

    fn local(&mut self, who: StrandId, _: &Step) {
        let now = self.now[who.rank.index()][who.strand as usize];
        self.all[who.rank.index()][who.strand as usize].push(now);
    }
}

impl Plan {
    pub(super) fn new(schedule: &dyn Schedule, params: ScriptParams) -> Result<Self, DoesNotFit> {
        let shape = schedule.shape();
        let (ranks, strands) = (shape.ranks(), schedule.strands());
        let all = || (0..ranks).map(Rank);
        let programs: Vec<_> = all().map(|rank| Program::of(schedule, rank)).collect();
        let contents = all()
            .zip(&programs)
            .map(|(rank, program)| MemoryContents::new(shape, rank, &program.scratch, &program.partial))
            .collect();
        let none = vec![vec![Vec::new(); strands as usize]; ranks as usize];
        let mut depths = Depths {
            now: vec![vec![0; strands as usize]; ranks as usize],
            all: none,
        };
        visit_steps(schedule, &mut depths);
        let es = params.data.bytes() as u64;
        let shift = |rank| match (params.in_place, shape.shared(rank)) {
            (true, Some(shared)) => {
                let part = |blocks: u32| u64::from(blocks / shape.blocks.max(1)) * params.count * es;
                (part(shared.output), part(shared.input))
            }
            _ => (0, 0),
        };
        let mut plan = Self {
            params,
            layouts: Vec::new(),
            contents,
            depths: depths.all,
            messages: Vec::new(),
            message_of_step: Vec::new(),
            counts: Vec::new(),
            is_barrier: shape.collective == Collective::Barrier,
            slices: 1,
            staging_slots: 1,
            staging_slot_bytes: 0,
            shifts: all().map(shift).collect(),
            programs,
        };
        plan.match_messages();
        let parts = match shape.collective {
            Collective::AllReduce | Collective::Broadcast | Collective::Reduce => 1,
            _ => u64::from(ranks),
        };
        let whole = params.count.saturating_mul(es).saturating_mul(parts);
        // Each message of each slice has a word of its own.
        let most = u64::from(plan.counts.iter().flatten().copied().max().unwrap_or(0));
        let at_most = (u64::from(READY) / most.max(1)).clamp(1, MAX_SLICES);
        let too_large = DoesNotFit {
            staging: params.staging,
        };
        if most >= u64::from(READY) {
            return Err(too_large);
        }
        let mut slices = whole.div_ceil(params.slice.max(1)).clamp(1, at_most);
        loop {
            plan.cut(schedule, slices);
            if plan.staging_slot_bytes * plan.staging_slots <= params.staging {
                return Ok(plan);
            }
            if slices >= at_most || slices >= params.count {
                return Err(too_large);
            }
            slices = (slices * 2).min(at_most);
        }
    }

    fn match_messages(&mut self) {
        let ranks = self.programs.len();
        self.counts = vec![vec![0; ranks]; ranks];
        self.message_of_step = self
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
                        self.message_of_step[from][strand][send as usize] = id;
                        self.message_of_step[to][strand][receive as usize] = id;
                        let number = self.counts[from][to];
                        let parts = if self.is_beside_reduction((from, send), (to, receive), strand) {
                            self.params.tail_parts.max(1)
                        } else {
                            1
                        };
                        self.counts[from][to] += parts;
                        self.messages.push(Message {
                            from: Rank(from as u32),
                            to: Rank(to as u32),
                            number,
                            parts,
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

    /// Whether a message is the last one received before a reduction, or the first one sent of its
    /// result: if both are divided alike they hide most of the reduction.
    fn is_beside_reduction(&self, (from, send): (usize, u32), (to, receive): (usize, u32), strand: usize) -> bool {
        let (sent, received) = (&self.programs[from].strands[strand], &self.programs[to].strands[strand]);
        let (Step::Send { span, .. }, Step::Recv { into, .. }) = (&sent[send as usize], &received[receive as usize])
        else {
            return false;
        };
        let is_reduced_next =
            matches!(received.get(receive as usize + 1), Some(Step::Reduce { sources, .. }) if sources.contains(into));
        let before = send.checked_sub(1).map(|before| &sent[before as usize]);
        is_reduced_next || matches!(before, Some(Step::Reduce { into, .. }) if into == span)
    }

    fn cut(&mut self, schedule: &dyn Schedule, slices: u64) {
        let shape = schedule.shape();
        let extent = || OperationExtent {
            count: self.params.count,
            parts: None,
            slices: slices as u32,
        };
        self.layouts = self
            .programs
            .iter()
            .map(|program| Layout::new(shape, extent(), &program.scratch, &program.partial))
            .collect();
        self.slices = slices;
        (self.staging_slots, self.staging_slot_bytes) = (1, 0);
        let mut ends: Vec<u64> = (0..self.programs.len())
            .map(|rank| self.partial_at(rank) + self.layouts[rank].partial_len * self.unit(BlockForm::Partial))
            .collect();
        for id in 0..self.messages.len() {
            let message = self.messages[id];
            let step = self.receiving(message);
            let is_staged = match step {
                Step::RecvReduce { .. } => true,
                Step::Recv { into, .. } => into.place == PlanMemory::Output && !self.params.direct,
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
        self.staging_slot_bytes = ends.into_iter().max().unwrap_or(0).next_multiple_of(ALIGN);
        self.find_replaced();
    }

    /// Finds messages that overwrite data whose last use the sender cannot infer, and how long
    /// staging memory is in use.
    fn find_replaced(&mut self) {
        let mut replaced = Vec::new();
        let mut staging_slots = 1;
        let tasks: Vec<_> = (0..self.programs.len()).map(|rank| self.tasks(rank, 0)).collect();
        for (rank, own) in tasks.iter().enumerate() {
            for (at, task) in own.iter().enumerate() {
                for before in &own[..at] {
                    let conflicts = |space: Option<MemorySpace>| {
                        let of = |access: &&Access| space.is_none_or(|space| access.space == space);
                        task.accesses
                            .iter()
                            .filter(of)
                            .any(|access| before.accesses.iter().any(|other| other.conflicts(access)))
                    };
                    if !conflicts(None) {
                        continue;
                    }
                    if matches!(task.kind, TaskKind::Receive { .. }) && !self.is_implied(rank, task, before, &tasks) {
                        replaced.extend(self.message_of(rank, task));
                    }
                    if conflicts(Some(MemorySpace::Staging)) {
                        staging_slots = staging_slots.max(u64::from(task.depth.saturating_sub(before.depth)) + 1);
                    }
                }
            }
        }
        for id in replaced {
            self.messages[id as usize].replaces = true;
        }
        self.staging_slots = staging_slots;
    }

    /// The sender sends it only after receiving, from this rank, what was sent `before`: in an
    /// in-place all-reduce each rank gets the results of what it has sent.
    fn is_implied(&self, rank: usize, receive: &Task, before: &Task, tasks: &[Vec<Task>]) -> bool {
        let both = self.message_of(rank, receive).zip(self.message_of(rank, before));
        let Some((given, got)) = both.map(|(given, got)| (self.messages[given as usize], self.messages[got as usize]))
        else {
            return false;
        };
        if !matches!(before.kind, TaskKind::Send { .. }) || got.to != given.from {
            return false;
        }
        let sender = &tasks[given.from.index()];
        let at = |strand, step, part| sender.iter().position(|task| task.place == (0, strand, step, part));
        let (Some(sent), Some(came)) = (
            at(given.strand, given.send, receive.place.3),
            at(got.strand, got.receive, before.place.3),
        ) else {
            return false;
        };
        let mut comes_before = vec![false; sender.len()];
        comes_before[sent] = true;
        // Predecessors of a task precede it in the plan's order.
        for later in (came..=sent).rev() {
            if comes_before[later] {
                for earlier in came..later {
                    comes_before[earlier] |= sender[later].follows(&sender[earlier]);
                }
            }
        }
        came < sent && comes_before[came]
    }

    fn message_of(&self, rank: usize, task: &Task) -> Option<u32> {
        let (_, strand, step, _) = task.place;
        self.message_of_step[rank][strand as usize][step as usize]
    }

    pub(super) fn sending(&self, message: Message) -> &Step {
        &self.programs[message.from.index()].strands[message.strand as usize][message.send as usize]
    }

    pub(super) fn receiving(&self, message: Message) -> &Step {
        &self.programs[message.to.index()].strands[message.strand as usize][message.receive as usize]
    }
}
