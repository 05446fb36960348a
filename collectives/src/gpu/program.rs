//! The parameter of a kernel launch: a lowered plan for a count, encoded as words.
//! `gpudirect/cuda/kernels/collective.cu` decodes it.

use std::mem::offset_of;

use super::lower::{Body, Group, Location, Lowered, NO_DATA, Operand, Signal, Strand, Work};
use super::peers::{Areas, MAX_PEERS};
use crate::executor::layout::{Layout, OperationExtent};
use crate::plan::{BlockForm, PlanMemory, Shape};
use crate::types::{DataType, Rank, ReduceOp};

/// The version of the encoding and of [`Arguments`]: the kernel's `PROGRAM_VERSION`.
pub const VERSION: u64 = 3;
/// Maximum words of a program.
pub const MAX_WORDS: usize = 400;
/// Maximum threads per block.
pub const MAX_THREADS: u32 = 512;
/// Maximum thread blocks per launch.
pub const MAX_BLOCKS: u32 = 256;
/// Maximum thread blocks per launch with the LL protocol.
pub const MAX_LL_BLOCKS: u32 = 32;
/// Bytes of the flags of a thread block, per peer.
const FLAGS: u64 = 64;
/// The alignment of thread blocks' shares of data blocks, in bytes.
const GRANULE: usize = 128;
/// Bytes that the workers of a thread block of [`MAX_THREADS`] move at once: longer slices are
/// multiples of it. A warp of each block signals (`Signals` in block.cuh).
pub(super) const ROUND: u64 = (MAX_THREADS as u64 - 32) * 16 * 8;
/// Signal flag: only in the last slice.
const LAST: u64 = 1 << 4;
/// Signal flag: not sent in a turn in which a later signal of its group covers it.
const COVERED: u64 = 1 << 5;
/// The position of the slices by which a signal, and a body, is late: two bits each.
const WORD_LATE: u32 = 6;
const BODY_LATE: [u32; 2] = [45, 63];
/// The position of group flags: contains work that is late by so many slices.
const GROUP_LATE: u32 = 48;
/// The position, in counts of staged messages, of the slices by which the latest are late.
const TRAFFIC_LATE: u32 = 14;
/// Slots of a FIFO; programs with groups behind divide them in two.
pub const SLOTS: u32 = 4;
const MAX_SLOT: u64 = 256 << 10;

/// The kernels' layout of an arena, the same on all ranks.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct ArenaLayout {
    flags: u64,
    counts: u64,
    fifos: [Fifos; 2],
    scratch: u64,
    scratch_len: u64,
}

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
struct Fifos {
    at: u64,
    blocks: u32,
    slot: u32,
}

/// The launch shape of an operation.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct LaunchShape {
    /// Thread blocks, of all strands together.
    pub blocks: u32,
    /// Threads per block.
    pub threads: u32,
    /// Maximum bytes of a slice; at most a slot if messages go through FIFOs.
    pub slice: u32,
    /// Whether to use the LL protocol: each line carries its data and a flag.
    pub ll: bool,
}

/// A reduction function.
#[derive(Clone, Copy, PartialEq, Debug)]
pub struct Function {
    /// The element type.
    pub data: DataType,
    /// The operator, if it reduces.
    pub op: Option<ReduceOp>,
    /// The bits of the scalar of [`ReduceOp::PreMulSum`], in the accumulator type.
    pub scalar: u64,
}

/// The memory of an operation.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Memory<'a> {
    /// This rank's input.
    pub input: u64,
    /// This rank's output.
    pub output: u64,
    /// The device pointers of all ranks' arenas in this rank's context.
    pub arenas: &'a [u64],
    /// All ranks' outputs, if they are mapped.
    pub outputs: Option<&'a [u64]>,
    /// The address of a word that becomes nonzero when all kernels must abort; 0 if there is none.
    pub stop: u64,
}

/// Why a program cannot be encoded.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum ProgramError {
    /// The program is too long.
    #[error("the longest program has {0} words; the maximum is {MAX_WORDS}")]
    TooLong(usize),
    /// A number exceeds its field.
    #[error("the program of rank {0} has more blocks or messages than can be encoded")]
    TooMany(Rank),
    /// The LL protocol does not support partial results.
    #[error("partial results of {0} are not supported by the LL protocol")]
    PartialLl(DataType),
    /// The arena is too small.
    #[error("the arena is too small for {blocks} thread blocks with slices of {slice} bytes")]
    Arena {
        /// The requested thread blocks.
        blocks: u32,
        /// The requested slice.
        slice: u32,
    },
}

doorbell_cuda::kernel_arguments! {
    constants {
        const PROGRAM_VERSION: u64 = VERSION;
        /// Bits of words signaled only in the last slice, and only without one that covers it.
        const LAST: u64 = LAST;
        const COVERED: u64 = COVERED;
        /// Positions of the slices by which a word is late, and the latest of staged messages.
        const WORD_LATE: u32 = WORD_LATE;
        const TRAFFIC_LATE: u32 = TRAFFIC_LATE;
    }
    /// The launch argument of a collective.
    // fields: the layout of the kernel's parameter.
    #[derive(Clone, Copy, Debug)]
    pub struct Arguments as Operation in "collective" {
        version: u64,
        input: u64,
        output: u64,
        /// The address of a word that is set to nonzero to end all waits.
        stop: u64,
        /// By rank: its arena, and its output if mapped.
        arenas: [u64; MAX_PEERS],
        outputs: [u64; MAX_PEERS],
        /// Offsets in an arena: flags, counts, FIFOs, scratch memory.
        flags: u64,
        counts: u64,
        fifos: u64,
        scratch: u64,
        /// Elements of a slice, and of the longest data block.
        slice: u64,
        longest: u64,
        /// The bits of the scalar by which input is multiplied, in the accumulator type.
        scalar: u64,
        rank: u32,
        ranks: u32,
        strands: u32,
        /// Slots per FIFO, a power of two; bytes per slot; thread blocks with FIFOs.
        slots: u32,
        slot_bytes: u32,
        blocks: u32,
        /// Bytes of a scratch block, and scratch blocks per thread block.
        scratch_bytes: u32,
        scratch_blocks: u32,
        /// Shares of data blocks begin at multiples of 2 to this power elements.
        granule_log2: u32,
        divisor: u32,
        /// An `Operator`, numbered as `ReduceOp`; and padding.
        function: u32,
        reserved: u32,
        program: [u64; MAX_WORDS],
    }
}

// Within the limit of launch parameters.
const _: () = assert!(size_of::<Arguments>() <= 4096);

impl ArenaLayout {
    /// Divides the areas for launches of at most `blocks` thread blocks, up to [`MAX_BLOCKS`].
    #[must_use]
    pub fn new(areas: &Areas, ranks: u32, blocks: u32) -> Self {
        let blocks = blocks.clamp(1, MAX_BLOCKS);
        let peers = u64::from(ranks.saturating_sub(1).max(1));
        let fifos = |at: usize, len: u64, blocks: u32| {
            let slot = len / (peers * u64::from(blocks) * u64::from(SLOTS));
            Fifos {
                at: at as u64,
                blocks,
                slot: (slot.min(MAX_SLOT) / 512 * 512) as u32,
            }
        };
        let whole = areas.fifos.len() as u64;
        let staged = whole / 4 * 3 / 4096 * 4096;
        let flags = areas.flags.start as u64;
        Self {
            flags,
            counts: flags + u64::from(MAX_BLOCKS) * MAX_PEERS as u64 * FLAGS,
            fifos: [
                fifos(areas.fifos.start, staged, blocks),
                fifos(areas.slots.start, areas.slots.len() as u64, blocks.min(MAX_LL_BLOCKS)),
            ],
            scratch: areas.fifos.start as u64 + staged,
            scratch_len: whole - staged,
        }
    }

    /// Maximum data bytes of a slice, with the LL protocol or without.
    #[must_use]
    pub fn max_slice_bytes(&self, ll: bool) -> u32 {
        // An LL line is twice as long as its data.
        self.fifos[usize::from(ll)].slot / if ll { 2 } else { 1 }
    }

    /// Maximum thread blocks.
    #[must_use]
    pub fn blocks(&self, ll: bool) -> u32 {
        self.fifos[usize::from(ll)].blocks
    }
}

/// The layouts of an operation's places for a count.
#[derive(Debug)]
pub struct CountedLayouts {
    layout: Layout,
    longest: u64,
}

impl CountedLayouts {
    /// For `shape`, with `count` elements of the whole or of each part.
    #[must_use]
    pub fn new(shape: &Shape, count: u64) -> Self {
        let extent = OperationExtent {
            count,
            parts: None,
            slices: 1,
        };
        let layout = Layout::new(shape, extent, &[], &[]);
        let longest = (0..shape.blocks).map(|block| layout.longest(block)).max().unwrap_or(0);
        Self { layout, longest }
    }
}

impl Arguments {
    /// The parameter for `rank`, and its bytes up to the last word of the program: the kernel reads
    /// no others.
    ///
    /// # Errors
    /// [`ProgramError`]: on all ranks, if on one.
    pub fn new(
        rank: Rank,
        lowered: &Lowered,
        counted_layouts: &CountedLayouts,
        function: Function,
        arena_layout: &ArenaLayout,
        cut: LaunchShape,
        memory: Memory<'_>,
    ) -> Result<(Self, usize), ProgramError> {
        let bytes = function.data.bytes();
        let partial = function.data.accumulator().bytes();
        let has_partials = partial > bytes && lowered.all.partials;
        if has_partials && cut.ll {
            return Err(ProgramError::PartialLl(function.data));
        }
        let widest = if has_partials { partial } else { bytes };
        let scratch_blocks = lowered.all.scratch;
        let fifos = &arena_layout.fifos[usize::from(cut.ll)];
        let granule = GRANULE / bytes;
        // Direct stores into outputs need no slots.
        let has_slots = cut.ll || lowered.all.staged;
        // More slots have the same memory.
        let parts = lowered.all.slots.div_ceil(SLOTS);
        let (slot, blocks) = match has_slots {
            true => (arena_layout.max_slice_bytes(cut.ll) / parts / 512 * 512, fifos.blocks),
            false => (u32::MAX, MAX_BLOCKS),
        };
        let scratch = u64::from(cut.blocks) * u64::from(scratch_blocks);
        let room = arena_layout.scratch_len.checked_div(scratch).unwrap_or(u64::MAX);
        let max_slice_bytes = u64::from(cut.slice.min(slot)).min(room / 512 * 512);
        let max_slice_bytes = match cut.ll {
            false if max_slice_bytes > ROUND => max_slice_bytes / ROUND * ROUND,
            _ => max_slice_bytes,
        };
        let slice = max_slice_bytes / widest as u64 / granule as u64 * granule as u64;
        let scratch_bytes = (slice * widest as u64).next_multiple_of(512);
        let strands = lowered.strands.len() as u32;
        if slice == 0 || cut.blocks > blocks || cut.blocks < strands {
            return Err(ProgramError::Arena {
                blocks: cut.blocks,
                slice: cut.slice,
            });
        }
        if lowered.all.words > MAX_WORDS {
            return Err(ProgramError::TooLong(lowered.all.words));
        }
        let ranks = memory.arenas.len().min(MAX_PEERS);
        let mut words = Vec::with_capacity(MAX_WORDS);
        let encoder = Encoder {
            rank,
            counted_layouts,
            scaled: function.op == Some(ReduceOp::PreMulSum),
            ll: cut.ll,
        };
        words.resize(lowered.strands.len(), 0);
        for (index, strand) in lowered.strands.iter().enumerate() {
            words[index] = words.len() as u64;
            encoder.strand(strand, &mut words)?;
        }
        let mut program = [0; MAX_WORDS];
        program[..words.len()].copy_from_slice(&words);
        let addresses = |list: &[u64]| {
            let mut table = [0; MAX_PEERS];
            table[..ranks].copy_from_slice(&list[..ranks]);
            table
        };
        let used = offset_of!(Self, program) + size_of_val(&*words);
        let arguments = Self {
            version: VERSION,
            input: memory.input,
            output: memory.output,
            stop: memory.stop,
            arenas: addresses(memory.arenas),
            outputs: memory.outputs.map_or([0; MAX_PEERS], addresses),
            flags: arena_layout.flags,
            counts: arena_layout.counts,
            fifos: fifos.at,
            scratch: arena_layout.scratch,
            slice,
            longest: counted_layouts.longest,
            scalar: function.scalar,
            rank: rank.0,
            ranks: ranks as u32,
            strands,
            slots: SLOTS * parts,
            slot_bytes: fifos.slot / parts / 512 * 512,
            blocks: fifos.blocks,
            scratch_bytes: scratch_bytes as u32,
            scratch_blocks,
            granule_log2: granule.ilog2(),
            divisor: ranks as u32,
            function: function.op.map_or(0, |op| op as u32),
            reserved: 0,
            program,
        };
        Ok((arguments, used))
    }
}

struct Encoder<'a> {
    rank: Rank,
    counted_layouts: &'a CountedLayouts,
    scaled: bool,
    ll: bool,
}

impl Encoder<'_> {
    fn strand(&self, strand: &Strand, words: &mut Vec<u64>) -> Result<(), ProgramError> {
        let ahead = strand.ahead as usize;
        let groups: Vec<(usize, &Group)> = strand.groups.iter().enumerate().collect();
        let (first, rest) = groups.split_at(if strand.joined { ahead - 1 } else { 0 });
        let (joined, rest) = rest.split_at(if strand.joined { 2 } else { 0 });
        let first = first.chunks(1);
        let all = first
            .chain(Some(joined).filter(|joined| !joined.is_empty()))
            .chain(rest.chunks(1));
        words.push(self.fit(all.clone().count(), 16)? | u64::from(strand.latest()) << 16);
        for peer in &strand.peers {
            let counts = [
                (peer.sent_direct, 0),
                (peer.sent_staged, peer.sent_late),
                (peer.received_direct, 0),
                (peer.received_staged, peer.received_late),
            ];
            let mut word = 0;
            for (index, (count, late)) in counts.into_iter().enumerate() {
                let late = self.fit(late as usize, 2)? << TRAFFIC_LATE;
                word |= (self.fit(count as usize, TRAFFIC_LATE)? | late) << (16 * index);
            }
            words.push(word);
        }
        for can_group in all {
            let groups: Vec<(u32, &Group)> = can_group
                .iter()
                .map(|(index, group)| (strand.lateness(*index), *group))
                .collect();
            self.group(&groups, words)?;
        }
        Ok(())
    }

    fn group(&self, groups: &[(u32, &Group)], words: &mut Vec<u64>) -> Result<(), ProgramError> {
        let start = words.len();
        words.push(0);
        let late = |late: u32| u64::from(late) << WORD_LATE;
        let body_late = |late: u32| u64::from(late & 1) << BODY_LATE[0] | u64::from(late >> 1) << BODY_LATE[1];
        // LL lines carry their own flags.
        let signaled = |word: &&Signal| !(self.ll && matches!(word, Signal::Staged { .. }));
        for (lateness, group) in groups {
            for wait in group.waits.iter().filter(signaled) {
                words.push(self.word(*wait)? | late(*lateness));
            }
        }
        let waits = words.len() - start - 1;
        let bodies = || {
            groups
                .iter()
                .flat_map(|(lateness, group)| group.bodies.iter().map(|body| (*lateness, body)))
        };
        let mut first = 0;
        for (lateness, body) in bodies() {
            words.push(self.body(body, first)? | body_late(lateness));
            first += body.sources.len() + body.targets.len();
        }
        for (index, (_, body)) in bodies().enumerate() {
            for operand in body.sources.iter().chain(&body.targets) {
                words.push(self.operand(*operand, index)?);
            }
        }
        let before = words.len();
        // Of two signals to a peer's flag the second has the greater number.
        let covers = |signal: &Signal, groups: &[(u32, &Group)]| match *signal {
            Signal::Staged { peer: to, .. } => groups
                .iter()
                .flat_map(|(_, group)| &group.signals)
                .any(|other| matches!(*other, Signal::Staged { peer, .. } if peer == to)),
            _ => false,
        };
        for (index, (lateness, group)) in groups.iter().enumerate() {
            for signal in group.signals.iter().filter(signaled) {
                let covered = if covers(signal, &groups[index + 1..]) {
                    COVERED
                } else {
                    0
                };
                words.push(self.word(*signal)? | covered | late(*lateness));
            }
            for signal in &group.last_signals {
                words.push(self.word(*signal)? | LAST | late(*lateness));
            }
        }
        let signals = words.len() - before;
        words[start] = self.fit(waits, 8)?
            | self.fit(bodies().count(), 5)? << 8
            | self.fit(first, 7)? << 16
            | self.fit(signals, 8)? << 24
            | self.fit(words.len() - start, 16)? << 32
            | groups
                .iter()
                .fold(0, |bits, (lateness, _)| bits | 1 << (GROUP_LATE + lateness));
        Ok(())
    }

    fn word(&self, word: Signal) -> Result<u64, ProgramError> {
        let (kind, peer, number) = match word {
            Signal::Direct { peer, message } => (0, peer, message),
            Signal::Staged { peer, message } => (1, peer, message),
            Signal::Credit { peer, staged } => (2, peer, staged),
            Signal::Ready { peer } => (3, peer, 0),
        };
        Ok(kind | self.fit(peer.index(), 6)? << 8 | self.fit(number as usize, 16)? << 16)
    }

    fn body(&self, body: &Body, first: usize) -> Result<u64, ProgramError> {
        let elements = match body.data {
            NO_DATA => 0,
            data => self.counted_layouts.layout.longest(data),
        };
        let is_input = |operand: &Operand| matches!(operand.at, Location::Input(_));
        let (reduces, whole) = match body.work {
            Work::Reduce { whole } => (true, whole),
            // To be scaled, a move is encoded as a reduction of one source.
            Work::Move => (self.scaled && body.sources.iter().any(is_input), false),
        };
        let is_partial = |operand: &Operand| operand.form == BlockForm::Partial;
        let mixed = body.sources.iter().chain(&body.targets).any(is_partial);
        let partial = body.sources.first().is_some_and(is_partial);
        Ok(self.fit(elements as usize, 40)?
            | self.fit(body.sources.len(), 5)? << 40
            | self.fit(body.targets.len(), 6)? << 46
            | self.fit(first, 7)? << 52
            | u64::from(reduces) << 59
            | u64::from(whole) << 60
            | u64::from(mixed) << 61
            | u64::from(partial) << 62)
    }

    fn operand(&self, operand: Operand, body: usize) -> Result<u64, ProgramError> {
        let run = |place, block| self.counted_layouts.layout.element_range(place, block, 1, 0).offset;
        let (kind, peer, number, offset) = match operand.at {
            Location::Input(block) => (0, Rank(0), 0, run(PlanMemory::Input, block)),
            Location::Output(block) => (1, Rank(0), 0, run(PlanMemory::Output, block)),
            Location::Scratch(block) => (2, Rank(0), 0, u64::from(block)),
            Location::Received(from, message) => (3, from, message, 0),
            Location::TheirOutput(to, block) => (4, to, 0, run(PlanMemory::Output, block)),
            Location::TheirSlot(to, message) => (5, to, message, 0),
        };
        Ok(self.fit(offset as usize, 40)?
            | self.fit(body, 5)? << 40
            | u64::from(operand.form == BlockForm::Partial) << 45
            | self.fit(number as usize, 8)? << 46
            | self.fit(peer.index(), 6)? << 54
            | kind << 60)
    }

    fn fit(&self, number: usize, bits: u32) -> Result<u64, ProgramError> {
        let number = number as u64;
        if number >> bits == 0 {
            Ok(number)
        } else {
            Err(ProgramError::TooMany(self.rank))
        }
    }
}

#[cfg(test)]
mod tests {
    use doorbell_cuda::arguments::Arguments as _;

    #[test]
    fn the_kernels_header_is_committed() {
        super::Arguments::header().check(env!("CARGO_MANIFEST_DIR"));
    }
}
