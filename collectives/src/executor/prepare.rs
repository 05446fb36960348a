//! Preparation of plans, and submission of operations.

use std::sync::Arc;

use super::Engine;
use super::connect::Rail;
use super::error::EngineError;
use super::layout::{Coalescing, Layout, OperationExtent};
use super::operation::{ActiveOperation, CompiledOperation, Data, Operation, PlanId, Ticket, Transport};
use super::p2p::Direction;
use super::program::CompiledProgram;
use super::strand::{ExpectedLengths, SliceActions, SliceOf};
use super::window::Puts;
use crate::kernel::{Function, Scalar};
use crate::memory::{Lent, Segment};
use crate::plan::{Collective, PlanMemory, Program, Schedule, Shape, Span, Step};
use crate::types::{DataType, Rank};

pub(super) struct Prepared {
    shape: Shape,
    program: Program,
    in_place: bool,
    /// Blocks of input and output on this rank; 0 for what it does not have.
    inputs: u64,
    outputs: u64,
    /// Whether messages are sent from input and output.
    sends: [bool; 2],
    /// Compiled programs: by how messages are cut, in place or not, and equal parts or not.
    programs: Vec<((Coalescing, bool, bool), Arc<CompiledProgram>)>,
    ready: Option<(ProgramKey, Arc<CompiledOperation>)>,
}

#[derive(PartialEq, Eq)]
struct ProgramKey {
    extent: OperationExtent,
    data: DataType,
    transport: Transport,
    channels: u32,
    in_place: bool,
}

type Bytes = core::ops::Range<usize>;

/// Plain memory of as many eager messages at least is lent to devices in software: to register it
/// takes as long as to copy a part of it.
const LENT_MESSAGES: usize = 8;

fn sends(program: &Program) -> [bool; 2] {
    let steps = program.strands.iter().flatten();
    [PlanMemory::Input, PlanMemory::Output].map(|place| {
        steps
            .clone()
            .any(|step| matches!(step, Step::Send { span, .. } if span.place == place))
    })
}

fn overlap(a: &Bytes, b: &Bytes) -> bool {
    a.start < b.end && b.start < a.end
}

impl Prepared {
    /// One end of messages between two ranks, of so many blocks: one, or none of empty messages.
    pub(super) fn message((rank, ranks): (Rank, u32), (peer, direction): (Rank, Direction), blocks: u32) -> Self {
        let span = |place| Span {
            place,
            first: 0,
            blocks,
        };
        let (from, into) = (span(PlanMemory::Input), span(PlanMemory::Output));
        let step = match direction {
            _ if peer == rank => Step::Copy { from, into },
            Direction::Send => Step::Send { to: peer, span: from },
            Direction::Receive => Step::Recv { from: peer, into },
        };
        let blocks_of = |end| if direction == end { u64::from(blocks) } else { 0 };
        let program = Program {
            strands: vec![vec![step]],
            ..Program::default()
        };
        Self {
            shape: Shape {
                collective: Collective::SendRecv,
                order: (0..ranks).map(Rank).collect(),
                root: Rank(0),
                blocks: 1,
            },
            sends: sends(&program),
            program,
            in_place: false,
            inputs: blocks_of(Direction::Send),
            outputs: blocks_of(Direction::Receive),
            programs: Vec::new(),
            ready: None,
        }
    }

    fn refuse(&self, what: &'static str) -> EngineError {
        EngineError::Operation {
            collective: self.shape.collective,
            what,
        }
    }

    #[inline]
    fn compile(
        &mut self,
        rank: Rank,
        strands: u32,
        key: ProgramKey,
        function: &Function,
    ) -> Result<Arc<CompiledOperation>, EngineError> {
        match &self.ready {
            Some((of, ready)) if *of == key => Ok(Arc::clone(ready)),
            _ => self.compile_new(rank, strands, key, function),
        }
    }

    #[cold]
    fn compile_new(
        &mut self,
        rank: Rank,
        strands: u32,
        key: ProgramKey,
        function: &Function,
    ) -> Result<Arc<CompiledOperation>, EngineError> {
        let layout = Layout::new(
            &self.shape,
            key.extent.clone(),
            &self.program.scratch,
            &self.program.partial,
        );
        let program = self.program(rank, (layout.joins(), key.in_place, key.extent.parts.is_some()))?;
        let parts = key.extent.parts.as_ref();
        let first = SliceOf {
            layout: &layout,
            function,
            transport: key.transport,
            slice: 0,
        };
        // No slice has longer messages than the first one.
        let first = SliceActions::of(&program, first);
        let mut ready = CompiledOperation {
            has_granted: first.iter().any(|strand| strand.has_granted(key.transport)),
            only_slice: (key.extent.slices == 1).then_some(first),
            lengths: parts.map(|parts| ExpectedLengths::of(&program, &layout, function, (rank, parts.root))),
            program,
            layout,
            runners: 0,
            active_runners: 0,
        };
        for channel in 0..key.channels {
            for strand in 0..strands {
                if ready.uses(key.channels, channel, strand) {
                    ready.runners += 1;
                    ready.active_runners = channel * strands + strand + 1;
                }
            }
        }
        let ready = Arc::new(ready);
        self.ready = Some((key, Arc::clone(&ready)));
        Ok(ready)
    }

    fn program(&mut self, rank: Rank, variant: (Coalescing, bool, bool)) -> Result<Arc<CompiledProgram>, EngineError> {
        let found = self.programs.iter().find(|(found, _)| *found == variant);
        if let Some((_, program)) = found {
            return Ok(Arc::clone(program));
        }
        let (coalescing, in_place, varied) = variant;
        let program = Arc::new(CompiledProgram::new(
            &self.shape,
            rank,
            &self.program,
            coalescing,
            in_place,
            varied,
        )?);
        self.programs.push((variant, Arc::clone(&program)));
        Ok(program)
    }

    fn elements(&self, op: &Operation, place: PlanMemory) -> Option<u64> {
        let (blocks, input) = if place == PlanMemory::Input {
            (self.inputs, true)
        } else {
            (self.outputs, false)
        };
        match (&op.parts, self.shape.collective) {
            (Some(parts), _) => {
                let parts = if input { &parts.send } else { &parts.receive };
                parts
                    .iter()
                    .map(|(start, len)| start.checked_add(*len))
                    .try_fold(0, |most, end| Some(most.max(end?)))
            }
            (None, Collective::AllReduce | Collective::Broadcast | Collective::Reduce | Collective::Barrier) => {
                Some(if blocks == 0 { 0 } else { op.count })
            }
            (None, _) => (blocks / u64::from(self.shape.blocks.max(1))).checked_mul(op.count),
        }
    }

    fn bytes(&self, data: &Data, elements: Option<u64>, function: &Function) -> Result<Bytes, EngineError> {
        let bytes = elements
            .and_then(|elements| usize::try_from(elements).ok()?.checked_mul(function.data().bytes()))
            .filter(|&bytes| isize::try_from(bytes).is_ok())
            .ok_or_else(|| self.refuse("more elements than there can be"))?;
        if bytes == 0 {
            return Ok(0..0);
        }
        match data {
            Data::None => return Err(self.refuse("a rank that has input or output gave none")),
            Data::Registered(segment, offset) => {
                if offset.checked_add(bytes).is_none_or(|end| end > segment.len()) {
                    return Err(self.refuse("input or output goes beyond its segment"));
                }
            }
            Data::Plain(_) => {}
        }
        let start = data.start().addr();
        start
            .checked_add(bytes)
            .map(|end| start..end)
            .ok_or_else(|| self.refuse("plain memory beyond the address space"))
    }

    /// Registers plain memory that is sent from. What a device refuses is copied.
    ///
    /// # Safety
    /// As of `submit`, for as long as the operation has it.
    unsafe fn lend(&self, op: &mut ActiveOperation, [input, output]: [Bytes; 2], rails: &[Rail]) {
        let Transport::Simple { granted_from, .. } = op.transport else {
            return;
        };
        let least = LENT_MESSAGES * granted_from.saturating_sub(1);
        let lend = |data: &Data, bytes: &Bytes| match *data {
            Data::Plain(start) if bytes.len() >= least => {
                // SAFETY: by contract.
                unsafe { Lent::new(rails.iter().map(|rail| &rail.domain), start, bytes.len()) }.ok()
            }
            _ => None,
        };
        if output.start <= input.start && input.end <= output.end {
            op.lent = [None, lend(&op.output, &output)];
        } else {
            let [inputs, outputs] = self.sends;
            op.lent = [
                inputs.then(|| lend(&op.input, &input)).flatten(),
                outputs.then(|| lend(&op.output, &output)).flatten(),
            ];
        }
    }

    /// The operation as it is queued, and the bytes of its input if that is copied first. Plain
    /// memory is lent to the devices of `lenders`.
    pub(super) fn activate(
        &mut self,
        mut op: Operation,
        transport: Transport,
        (rank, strands): (Rank, u32),
        lenders: &[Rail],
    ) -> Result<(ActiveOperation, Option<usize>), EngineError> {
        let (collective, ranks) = (self.shape.collective, self.shape.ranks());
        let may_have_parts = matches!(collective, Collective::AllToAllV | Collective::ReduceScatter);
        if op.parts.is_some() && !may_have_parts
            || op.parts.is_none() && collective == Collective::AllToAllV
            || op
                .parts
                .as_ref()
                .is_some_and(|parts| parts.send.len() != ranks as usize || parts.receive.len() != ranks as usize)
        {
            return Err(self.refuse(
                "each part has a length of its own in alltoallv, may have one in reduce-scatter, and nowhere else",
            ));
        }
        let inputs = self.bytes(&op.input, self.elements(&op, PlanMemory::Input), &op.function)?;
        let outputs = self.bytes(&op.output, self.elements(&op, PlanMemory::Output), &op.function)?;
        let overlaps = overlap(&inputs, &outputs);
        let in_place = overlaps
            && op.scale.is_none()
            && op.parts.is_none()
            && self.in_place
            && is_in_place(&self.shape, rank, &op, &inputs, &outputs);
        let slices = if op.parts.is_some() || collective == Collective::Barrier {
            1
        } else {
            let block = op.count.div_ceil(u64::from(self.shape.blocks.max(1)));
            let bytes = block.saturating_mul(op.function.data().bytes() as u64);
            u32::try_from(bytes.div_ceil(op.tuning.slice as u64).max(1))
                .map_err(|_| self.refuse("more slices than can be counted: make them longer"))?
        };
        let key = ProgramKey {
            extent: OperationExtent {
                count: op.count,
                parts: op.parts.take(),
                slices,
            },
            data: op.function.data(),
            transport,
            channels: op.tuning.channels,
            in_place,
        };
        let ready = self.compile(rank, strands, key, &op.function)?;
        let input_copied = op.scale.is_some() || overlaps && !in_place;
        let runners_left = ready.runners;
        let mut active = ActiveOperation {
            collective,
            ready,
            function: op.function,
            input: op.input,
            output: op.output,
            lent: [None, None],
            puts: None,
            transport,
            channels: op.tuning.channels,
            began: None,
            deadline: op.deadline,
            runners_left,
            result: (runners_left == 0).then_some(Ok(())),
            input_copied,
            taken: false,
        };
        let copied = input_copied.then_some(inputs.len());
        if active.ready.has_granted && !lenders.is_empty() && self.sends.contains(&true) {
            let read = if input_copied { 0..0 } else { inputs };
            // SAFETY: the operation is submitted, or dropped at once.
            unsafe { self.lend(&mut active, [read, outputs], lenders) };
        }
        Ok((active, copied))
    }
}

impl Engine {
    /// Prepares this rank's part of a schedule, to be run any number of times with any count.
    ///
    /// # Errors
    /// When the schedule is for another number of ranks, or has more strands than the engine has
    /// connections for.
    pub fn prepare(&mut self, schedule: &dyn Schedule) -> Result<PlanId, EngineError> {
        let shape = schedule.shape().clone();
        let (collective, given) = (shape.collective, shape.ranks());
        if given != self.ranks {
            return Err(EngineError::OtherRanks {
                collective,
                given,
                ranks: self.ranks,
            });
        }
        if schedule.strands() > self.config.strands {
            return Err(EngineError::Strands {
                given: schedule.strands(),
                max: self.config.strands,
            });
        }
        let program = Program::of(schedule, self.rank);
        self.plans.push(Prepared {
            inputs: shape.input(self.rank).len() as u64,
            outputs: shape.output(self.rank).len() as u64,
            shape,
            sends: sends(&program),
            program,
            in_place: schedule.in_place(),
            programs: Vec::new(),
            ready: None,
        });
        Ok(PlanId(self.plans.len() - 1))
    }

    /// Submits an operation, to be driven by [`progress`](Self::progress). Operations run in
    /// submission order, which is the same on all ranks.
    ///
    /// # Errors
    /// When the engine has failed, or the operation is invalid; then it was not submitted.
    ///
    /// # Safety
    /// Input and output are valid for the lengths that the plan and the count imply, until the
    /// operation's result is taken or the engine is dropped. Until then no other code writes
    /// either, or reads the output; other operations in flight have other outputs.
    pub unsafe fn submit(&mut self, op: Operation) -> Result<Ticket, EngineError> {
        let config = self.config;
        let transport = match op.tuning.protocol.lines() {
            Some(lines) => Transport::Lines(lines),
            None => Transport::Simple {
                granted_from: config.eager + 1,
                fragment: config.fragment(),
            },
        };
        self.submit_by(op, transport, None)
    }

    /// Submits a put exchange: `op` is of its blocks, by a plan of all-to-all.
    ///
    /// # Errors
    /// As [`submit`](Self::submit).
    ///
    /// # Safety
    /// As of `submit`; and nothing writes the source of the puts, or accesses their targets, until
    /// the result is taken or the engine is dropped.
    pub(crate) unsafe fn submit_puts(&mut self, op: Operation, puts: Arc<Puts>) -> Result<Ticket, EngineError> {
        self.submit_by(op, Transport::Window, Some(puts))
    }

    fn submit_by(
        &mut self,
        op: Operation,
        transport: Transport,
        puts: Option<Arc<Puts>>,
    ) -> Result<Ticket, EngineError> {
        if let Some(broken) = &self.failed {
            return Err(broken.why.clone().into());
        }
        let (rank, config) = (self.rank, self.config);
        let Some(plan) = self.plans.get_mut(op.plan.0) else {
            return Err(EngineError::Operation {
                collective: Collective::Barrier,
                what: "no plan of this engine",
            });
        };
        if !(1..=config.channels).contains(&op.tuning.channels) || op.tuning.slice == 0 {
            return Err(plan.refuse("more channels than there are, or none, or slices of nothing"));
        }
        let scale = op.scale;
        let lenders = if self.lends { &self.rails[..] } else { &[] };
        let (mut op, copied) = plan.activate(op, transport, (rank, config.strands), lenders)?;
        if let Some(bytes) = copied {
            self.copy_input(&mut op, scale, bytes)?;
        }
        op.puts = puts;
        self.active_runners = self.active_runners.max(op.ready.active_runners);
        Ok(Ticket::operation(self.operations.push(op)))
    }

    fn copy_input(&mut self, op: &mut ActiveOperation, scale: Option<Scalar>, bytes: usize) -> Result<(), EngineError> {
        if bytes == 0 {
            return Ok(());
        }
        let input_copies = self
            .input_copies
            .iter()
            .position(|input_copies| input_copies.len() >= bytes && Arc::strong_count(input_copies) == 1);
        let segment = match input_copies {
            Some(index) => Arc::clone(&self.input_copies[index]),
            None => {
                self.input_copies
                    .retain(|input_copies| Arc::strong_count(input_copies) > 1);
                let domains = self.rails.iter().map(|rail| &rail.domain);
                let segment = Arc::new(Segment::new(domains, bytes.next_multiple_of(4096))?);
                self.input_copies.push(Arc::clone(&segment));
                segment
            }
        };
        let (from, into) = (op.input.start(), segment.start());
        // SAFETY: the input is as long by `submit`'s contract; the segment is long enough, and
        // owned by this operation alone.
        unsafe {
            match scale {
                Some(scalar) => {
                    let elements = bytes / op.function.data().bytes();
                    op.function.scale(scalar, from, into, elements)?;
                }
                None => core::ptr::copy_nonoverlapping(from, into, bytes),
            }
        }
        op.input = Data::Registered(segment, 0);
        Ok(())
    }
}

fn is_in_place(shape: &Shape, rank: Rank, op: &Operation, inputs: &Bytes, outputs: &Bytes) -> bool {
    let Some(shared) = shape.shared(rank) else { return false };
    let parts = (i64::from(shared.output) - i64::from(shared.input)) / i64::from(shape.blocks.max(1));
    let part = i128::from(op.count) * op.function.data().bytes() as i128;
    inputs.start as i128 == outputs.start as i128 + i128::from(parts) * part
}
