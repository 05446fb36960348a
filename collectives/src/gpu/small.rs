//! The executor of short operations: one launch of a kernel without a plan, which takes one
//! exchange, or two for some all-reduces and broadcasts. The protocol is in
//! `gpudirect/cuda/kernels/small.cu`; it uses the area [`Areas::small`].

use doorbell_cuda::collective::CollectiveKernels;
use doorbell_cuda::{Kernel, KernelFile, Launch, Span, Stream};

use super::error::GpuError;
use super::peers::{Areas, MAX_PEERS};
use super::program::Function;
use crate::algorithm::Algorithm;
use crate::plan::Collective;
use crate::types::{DataType, Rank};

/// The version of [`Arguments`].
const VERSION: u64 = 1;
/// Maximum thread blocks per launch.
pub const MAX_BLOCKS: u32 = 128;
/// Slots of a block per peer.
const DEPTH: u64 = 4;
/// Bytes of a block's state: the kernel's `State`.
const STATE: u64 = 128;
const MOVE: usize = DataType::ALL.len();
const LL_DATA_BYTES: u32 = 8;
const LL_LINE_BYTES: u32 = 16;

/// The kernels' layout of an arena, the same on all ranks.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct SlotLayout {
    states: u64,
    slots: u64,
    len: u32,
}

/// The launch shape of an operation, the same on all ranks.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct LaunchShape {
    blocks: u32,
    threads: u32,
    /// LL lines of each message per block.
    share: u32,
    /// LL lines of each rank's part in two steps; 0 in one.
    part: u32,
}

/// The kernel executor of a rank.
#[derive(Debug)]
pub struct SmallExecutor {
    /// Reductions by type, and moves.
    kernels: [Option<Kernel>; DataType::ALL.len() + 1],
    slots: SlotLayout,
    rank: Rank,
    arenas: Vec<u64>,
    stop: u64,
}

/// An operation with its memory.
#[derive(Debug, Clone, Copy)]
pub struct Operation {
    /// The collective: any but [`Collective::AllToAllV`].
    pub collective: Collective,
    /// The root, if the collective has one.
    pub root: Rank,
    /// The input's address; ignored if the rank has none.
    pub input: u64,
    /// The output's address; ignored if the rank has none.
    pub output: u64,
    /// Elements of the whole or of each part, as the collective counts.
    pub count: u64,
}

doorbell_cuda::kernel_arguments! {
    constants {
        const SMALL_VERSION: u64 = VERSION;
        /// Slots of a block per other rank: a power of two.
        const DEPTH: u32 = DEPTH as u32;
        /// Bytes of data of a line.
        const LINE_BYTES: u32 = LL_DATA_BYTES;
    }
    /// The launch argument of a short collective.
    // fields: the layout of the kernel's parameter.
    #[derive(Clone, Copy, Debug)]
    struct Arguments as Small in "small" {
        version: u64,
        input: u64,
        output: u64,
        /// The address of a word that is set to nonzero to end all waits.
        stop: u64,
        arenas: [u64; MAX_PEERS],
        /// Offsets in an arena: the blocks' states, and their slots.
        states: u64,
        slots: u64,
        /// Bytes from the data for, and from, one rank to that of the next.
        input_step: u64,
        output_step: u64,
        /// The bits of the scalar by which input is multiplied, in the accumulator type.
        scalar: u64,
        /// Bytes of a message, or with `part`, of the whole.
        bytes: u32,
        rank: u32,
        ranks: u32,
        /// Bit sets of the ranks that this one sends to, and uses data of (possibly its own).
        sends: u32,
        gets: u32,
        /// Bit set of the ranks to which this one forwards its part, and whose parts it receives.
        forwards: u32,
        /// Whether this rank receives from every other one.
        receives_from_all: u32,
        slot_bytes: u32,
        /// Lines per block, and of each rank's part if there are two exchanges.
        share: u32,
        part: u32,
        /// The rank without a part, as it has the whole (none if beyond all ranks); whether it
        /// copies.
        without: u32,
        copies: u32,
        divisor: u32,
        /// An `Operator`, numbered as `ReduceOp`.
        function: u32,
    }
}

/// The communication pattern, as bit masks of ranks.
struct Pattern {
    sends: u32,
    /// Ranks whose data this rank uses, possibly its own.
    gets: u32,
    forwards: u32,
    without: Option<Rank>,
    /// Whether each receiver gets, and each sender's data goes to, a part of its own.
    parts: (bool, bool),
}

impl SlotLayout {
    /// The layout for arenas with these areas, among `ranks` ranks.
    #[must_use]
    pub fn new(areas: &Areas, ranks: u32) -> Self {
        let start = areas.small.start as u64;
        let states = u64::from(MAX_BLOCKS) * STATE;
        Self {
            states: start,
            slots: start + states,
            len: Self::len(areas.small.len(), ranks),
        }
    }

    fn len(area: usize, ranks: u32) -> u32 {
        let peers = u64::from(ranks.saturating_sub(1).max(1));
        let room = (area as u64).saturating_sub(u64::from(MAX_BLOCKS) * STATE);
        let len = room / (u64::from(MAX_BLOCKS) * DEPTH * peers);
        (len.min(1 << 20) / 128 * 128) as u32
    }
}

impl LaunchShape {
    /// For messages of `bytes` bytes in an area of `area` bytes
    /// ([`Sizes::small`](super::Sizes::small)); `None` if they are too long for it. An all-reduce,
    /// or a broadcast to more than one rank, may take two steps.
    #[must_use]
    pub fn new(collective: Collective, ranks: u32, bytes: u64, area: usize, two_steps: bool) -> Option<Self> {
        Self::within(MAX_BLOCKS, collective, ranks, (bytes, area), two_steps)
    }

    /// The same with so many thread blocks at most.
    pub(super) fn within(
        blocks: u32,
        collective: Collective,
        ranks: u32,
        (bytes, area): (u64, usize),
        two_steps: bool,
    ) -> Option<Self> {
        let parts = match collective {
            Collective::AllReduce if two_steps => ranks,
            Collective::Broadcast if two_steps => ranks - 1,
            _ => 1,
        };
        // One line per thread while there are enough blocks: smaller blocks start sooner.
        let lines = bytes.div_ceil(u64::from(LL_DATA_BYTES * parts.max(1)));
        let most: &[u32] = match lines.saturating_mul(MAX_BLOCKS.into()) / u64::from(blocks) {
            0..=0x1000 => &[128],
            0x1001..=0x4000 => &[256, 128],
            _ => &[512, 256, 128],
        };
        most.iter()
            .find_map(|threads| Self::with(blocks, ranks, (bytes, area), parts, *threads))
    }

    /// Takes two steps if `parts` is more than one; blocks have at most `most_threads` threads.
    fn with(most_blocks: u32, ranks: u32, (bytes, area): (u64, usize), parts: u32, most_threads: u32) -> Option<Self> {
        if ranks as usize > MAX_PEERS {
            return None;
        }
        // An empty message takes one line, too.
        let lines = u32::try_from(bytes.div_ceil(LL_DATA_BYTES.into()).max(1)).ok()?;
        let two_steps = parts > 1;
        let each = lines.div_ceil(parts.max(1));
        let threads = each.checked_next_multiple_of(32)?.min(most_threads);
        let share = each.min(threads * each.div_ceil(most_blocks * threads));
        let blocks = each.div_ceil(share);
        // Every block needs data of every part: it signals that the other rank has started.
        if two_steps && u64::from(lines) <= u64::from(parts - 1) * u64::from(each) + u64::from((blocks - 1) * share) {
            return Self::with(most_blocks, ranks, (bytes, area), 1, most_threads);
        }
        let needed = u64::from(share) * u64::from(LL_LINE_BYTES) * if two_steps { 2 } else { 1 };
        (needed <= SlotLayout::len(area, ranks).into()).then_some(Self {
            blocks,
            threads,
            share,
            part: if two_steps { each } else { 0 },
        })
    }

    #[cfg(test)]
    pub(super) fn blocks(&self) -> u32 {
        self.blocks
    }

    /// The corresponding algorithm.
    #[must_use]
    pub fn algorithm(&self, collective: Collective) -> Algorithm {
        match collective {
            Collective::AllReduce if self.part == 0 => Algorithm::OneShot,
            _ => Algorithm::FullMesh,
        }
    }
}

impl Pattern {
    fn new(collective: Collective, rank: Rank, ranks: u32, root: Rank, two_steps: bool) -> Self {
        let all = ((1u64 << ranks) - 1) as u32;
        let bit = |rank: u32| 1u32 << rank;
        let others = all & !bit(rank.0);
        let is_root = rank == root;
        let (mut forwards, mut without) = (0, None);
        let (sends, gets, parts) = match collective {
            Collective::AllReduce if two_steps => {
                forwards = others;
                (others, all, (true, false))
            }
            Collective::Broadcast if two_steps => {
                without = Some(root);
                if is_root {
                    (others, 0, (true, false))
                } else {
                    forwards = others & !bit(root.0);
                    (0, bit(root.0), (true, false))
                }
            }
            Collective::AllReduce | Collective::Barrier => (others, all, (false, false)),
            Collective::AllGather => (others, all, (false, true)),
            Collective::ReduceScatter => (others, all, (true, false)),
            Collective::AllToAll | Collective::AllToAllV => (others, all, (true, true)),
            Collective::Broadcast if is_root => (others, bit(rank.0), (false, false)),
            Collective::Scatter if is_root => (others, bit(rank.0), (true, false)),
            Collective::Broadcast | Collective::Scatter => (0, bit(root.0), (false, false)),
            Collective::Reduce if is_root => (0, all, (false, false)),
            Collective::Gather if is_root => (0, all, (false, true)),
            Collective::Reduce | Collective::Gather => (bit(root.0), 0, (false, false)),
            Collective::SendRecv => {
                let (next, before) = ((rank.0 + 1) % ranks, (rank.0 + ranks - 1) % ranks);
                (bit(next) & others, bit(before), (false, false))
            }
        };
        Self {
            sends,
            gets,
            forwards,
            without,
            parts,
        }
    }
}

impl SmallExecutor {
    /// The kernels of `rank`, of which it loads those that are not loaded. `arenas` are the device
    /// pointers of all ranks' arenas in their context, `areas` their layout; kernels abort once the
    /// word at `stop` is nonzero.
    pub fn new(
        kernels: &CollectiveKernels,
        rank: Rank,
        arenas: Vec<u64>,
        areas: &Areas,
        stop: u64,
    ) -> Result<Self, GpuError> {
        kernels.load(KernelFile::Small, |_| true)?;
        let mut known = [const { None }; _];
        for (place, data) in known.iter_mut().zip(DataType::ALL) {
            *place = kernels.kernel(&format!("small_{}", data.name()));
        }
        known[MOVE] = kernels.kernel("small_move");
        Ok(Self {
            kernels: known,
            slots: SlotLayout::new(areas, arenas.len() as u32),
            rank,
            arenas,
            stop,
        })
    }

    fn kernel(&self, function: Function) -> Result<&Kernel, GpuError> {
        let place = function.op.map_or(MOVE, |_| function.data as usize);
        self.kernels[place].as_ref().ok_or_else(|| GpuError::Refused {
            what: "kernels of short collectives",
            reason: format!("there is none for {}", function.data),
        })
    }

    /// Enqueues an operation on `stream`. Collective: all ranks use the same collective, root,
    /// count, function and launch shape, in the same order. `uses` is kept until it is done.
    ///
    /// # Safety
    /// The addresses must be those of memory with `count` elements, in the collective's layout,
    /// accessible to the device until the operation is done on all ranks. While it executes,
    /// nothing else may write its sources or access its targets. Input and output are disjoint, or
    /// located as [in-place operations](crate::plan::Shape::shared) require. The launch shape must
    /// be for an area not longer than the arenas'.
    ///
    /// # Errors
    /// [`GpuError`]; nothing was enqueued.
    pub unsafe fn launch(
        &self,
        stream: &Stream,
        operation: &Operation,
        function: Function,
        cut: LaunchShape,
        uses: &[Span<'_>],
    ) -> Result<(), GpuError> {
        let op = function.op.filter(|_| operation.collective.reduces());
        let function = Function { op, ..function };
        let kernel = self.kernel(function)?;
        let arguments = self.arguments(operation, function, cut);
        let launch = Launch::linear(cut.blocks, cut.threads);
        // SAFETY: the kernel's only parameter is this struct, in its version; the caller vouches
        // for its contents.
        unsafe { kernel.launch(stream, launch, &[&arguments], uses)? };
        Ok(())
    }

    fn arguments(&self, operation: &Operation, function: Function, cut: LaunchShape) -> Arguments {
        let ranks = self.arenas.len() as u32;
        let two_steps = cut.part != 0;
        let mut pattern = Pattern::new(operation.collective, self.rank, ranks, operation.root, two_steps);
        // A barrier has a count of 0.
        let bytes = operation.count * function.data.bytes() as u64;
        let each = if two_steps {
            u64::from(cut.part * LL_DATA_BYTES)
        } else {
            bytes
        };
        let step = |is_parted: bool| if is_parted { each } else { 0 };
        let (input_step, output_step) = (step(pattern.parts.0), step(pattern.parts.1));
        let others = ((1u64 << ranks) - 1) as u32 & !(1 << self.rank.0);
        let receives_from_all = (pattern.gets | pattern.forwards) & others == others;
        // Data already at its destination is not copied. The root of a two-step broadcast copies
        // its data while it sends it.
        let own = |step: u64| u64::from(self.rank.0) * step;
        let is_root = pattern.without == Some(self.rank);
        let (from, into) = match is_root {
            true => (operation.input, operation.output),
            false => (
                operation.input.wrapping_add(own(input_step)),
                operation.output.wrapping_add(own(output_step)),
            ),
        };
        if function.op.is_none() && from == into {
            pattern.gets &= others;
        }
        let mut arenas = [0; MAX_PEERS];
        arenas[..self.arenas.len()].copy_from_slice(&self.arenas);
        Arguments {
            version: VERSION,
            input: operation.input,
            output: operation.output,
            stop: self.stop,
            arenas,
            states: self.slots.states,
            slots: self.slots.slots,
            input_step,
            output_step,
            scalar: function.scalar,
            bytes: bytes as u32,
            rank: self.rank.0,
            ranks,
            sends: pattern.sends,
            gets: pattern.gets,
            forwards: pattern.forwards,
            receives_from_all: receives_from_all.into(),
            slot_bytes: self.slots.len,
            share: cut.share,
            part: cut.part,
            without: pattern.without.map_or(u32::MAX, |rank| rank.0),
            copies: (is_root && from != into).into(),
            divisor: ranks,
            function: function.op.map_or(0, |op| op as u32),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const AREA: usize = 32 << 20;

    #[test]
    fn the_kernels_header_is_committed() {
        <Arguments as doorbell_cuda::arguments::Arguments>::header().check(env!("CARGO_MANIFEST_DIR"));
    }

    #[test]
    fn launch_shapes_cover_every_line_once_and_fit_slots() {
        let mut parted = 0;
        for ranks in 1..=16 {
            for bytes in (0..4096).chain([65_536, 65_537, 131_000, 262_144, 524_287]) {
                for (collective, parts) in [
                    (Collective::AllGather, 1),
                    (Collective::AllReduce, ranks),
                    (Collective::Broadcast, ranks - 1),
                ] {
                    let Some(cut) = LaunchShape::new(collective, ranks, bytes, AREA, true) else {
                        assert!(bytes > 200_000, "{bytes} bytes among {ranks}");
                        continue;
                    };
                    let lines = (bytes as u32).div_ceil(LL_DATA_BYTES).max(1);
                    let (each, last) = match cut.part {
                        0 => (lines, lines),
                        part => (part, lines - (parts - 1) * part),
                    };
                    assert!(cut.blocks <= MAX_BLOCKS && cut.blocks * cut.share >= each && last <= each);
                    assert!((cut.blocks - 1) * cut.share < last, "a block without lines: {cut:?}");
                    let steps = if cut.part == 0 { 1 } else { 2 };
                    assert!(cut.share * LL_LINE_BYTES * steps <= SlotLayout::len(AREA, ranks));
                    assert!(cut.threads.is_multiple_of(32) && cut.threads <= 512);
                    parted += u32::from(cut.part != 0);
                }
            }
        }
        assert!(parted > 1000, "{parted} in two steps");
        let cut = |bytes, area| LaunchShape::new(Collective::AllGather, 2, bytes, area, false);
        assert_eq!(cut(1 << 30, AREA), None);
        assert_eq!(cut(1 << 40, AREA), None);
        assert_eq!(cut(8, 0), None, "an area for nothing");
    }

    #[test]
    fn sends_match_receives_in_the_pattern() {
        for &collective in Collective::ALL {
            for ranks in 1..=8 {
                for two_steps in [false, true] {
                    let of = |rank| Pattern::new(collective, Rank(rank), ranks, Rank(ranks / 2), two_steps);
                    for from in 0..ranks {
                        for to in (0..ranks).filter(|to| *to != from) {
                            let (sends, gets) = (of(from).sends >> to & 1, of(to).gets >> from & 1);
                            assert_eq!(sends, gets, "{collective} of {ranks}: {from} to {to}");
                            let (forwards, back) = (of(from).forwards >> to & 1, of(to).forwards >> from & 1);
                            assert_eq!(forwards, back, "{collective} of {ranks}, forwarded: {from} to {to}");
                        }
                        let own = (of(from).sends | of(from).forwards) >> from & 1;
                        assert_eq!(own, 0, "{collective}: no rank sends to itself");
                    }
                }
            }
        }
    }
}
