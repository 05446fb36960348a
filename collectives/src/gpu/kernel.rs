//! The plan-executing kernels: one launch per operation, in which every thread block executes the
//! lowered plan. Of its peers a rank's kernels need only the arenas' addresses.

use doorbell_cuda::collective::CollectiveKernels;
use doorbell_cuda::{Kernel, KernelFile, Span, Stream};

use super::error::GpuError;
use super::lower::{self, LowerError, Lowered, Options};
use super::peers::Areas;
use super::program::{ArenaLayout, Arguments, CountedLayouts, Function, LaunchShape, MAX_THREADS, Memory, SLOTS};
use super::sharing::{self, Blocks};
use crate::plan::{Schedule, Shape};
use crate::types::{DataType, Rank, ReduceOp};

/// Reductions by type, and moves of elements of 1, 2, 4 and 8 bytes; each also with the LL
/// protocol.
const FUNCTIONS: usize = 2 * (DataType::ALL.len() + 4);

/// The kernel executor of a rank.
#[derive(Debug)]
pub struct KernelExecutor {
    kernels: [Option<Kernel>; FUNCTIONS],
    arena_layout: ArenaLayout,
    is_alone: bool,
    rank: Rank,
    arenas: Vec<u64>,
    stop: u64,
}

/// The lowered plan of a rank.
#[derive(Debug)]
pub struct Plan {
    shape: Shape,
    lowered: Lowered,
    /// Whether outputs must be mapped by peers.
    direct: bool,
}

/// The memory of an operation.
#[derive(Debug, Clone, Copy)]
pub struct Operation<'a> {
    /// The input's address.
    pub input: u64,
    /// The output's address.
    pub output: u64,
    /// All ranks' outputs, if they are mapped.
    pub outputs: Option<&'a [u64]>,
    /// Elements of the whole or of each part, as the collective counts.
    pub count: u64,
}

impl Plan {
    /// Lowers `schedule` for `rank`; `direct`: outputs are mapped by all ranks. `ll`: for the LL
    /// protocol, in which messages have few slices.
    ///
    /// # Errors
    /// [`LowerError`], the same on all ranks.
    pub fn new(
        schedule: &dyn Schedule,
        rank: Rank,
        (direct, ll): (bool, bool),
        in_place: bool,
    ) -> Result<Self, LowerError> {
        let options = Options {
            in_place,
            direct,
            slots: SLOTS,
            pipelined: !ll,
        };
        let mut all = lower::lower(schedule, options)?;
        Ok(Self {
            shape: schedule.shape().clone(),
            lowered: all.swap_remove(rank.index()),
            direct,
        })
    }

    /// The lowered program of the rank.
    #[must_use]
    pub fn lowered(&self) -> &Lowered {
        &self.lowered
    }
}

impl KernelExecutor {
    /// The kernels of `rank`, of which it loads those that are not loaded; those of the LL protocol
    /// only with `lines`. `arenas` are the device pointers of all ranks' arenas in their context,
    /// `areas` their layout; kernels abort once the word at `stop` is nonzero. Launches have at
    /// most `blocks` thread blocks, the same on all ranks. `is_alone`: no other rank has this GPU.
    pub fn new(
        kernels: &CollectiveKernels,
        rank: Rank,
        arenas: Vec<u64>,
        (areas, blocks, is_alone): (&Areas, u32, bool),
        stop: u64,
        lines: bool,
    ) -> Result<Self, GpuError> {
        kernels.load(KernelFile::Collective, |name| lines || !name.starts_with(LINES))?;
        let mut known = [const { None }; FUNCTIONS];
        let reductions = DataType::ALL.iter().map(|data| Function::reduce(*data, ReduceOp::Sum));
        let moves = DataType::ALL.iter().map(|data| Function::moves(*data));
        for function in reductions.chain(moves) {
            for ll in [false, true] {
                known[index(function, ll)] = kernels.kernel(&name(function, ll));
            }
        }
        Ok(Self {
            kernels: known,
            arena_layout: ArenaLayout::new(areas, arenas.len() as u32, blocks),
            is_alone,
            rank,
            arenas,
            stop,
        })
    }

    /// The kernels' layout of an arena.
    #[must_use]
    pub fn arena_layout(&self) -> &ArenaLayout {
        &self.arena_layout
    }

    fn kernel(&self, function: Function, ll: bool) -> Result<&Kernel, GpuError> {
        let kernel = self.kernels[index(function, ll)].as_ref();
        kernel.ok_or_else(|| GpuError::Refused {
            what: "kernels of collectives",
            reason: format!("there is no kernel {}", name(function, ll)),
        })
    }

    /// Enqueues an operation on `stream`. Collective: all ranks use the same plan, count, function
    /// and launch shape, in the same order. `uses` is kept until it is done.
    ///
    /// # Safety
    /// The addresses must be those of memory with `count` elements, in the plan's layout,
    /// accessible to the device until the operation is done on all ranks. While it executes,
    /// nothing else may write its sources or access its targets.
    ///
    /// # Errors
    /// [`GpuError`]; nothing was enqueued.
    pub unsafe fn launch(
        &self,
        stream: &Stream,
        plan: &Plan,
        function: Function,
        cut: LaunchShape,
        operation: Operation<'_>,
        uses: &[Span<'_>],
    ) -> Result<(), GpuError> {
        let misuse = |what: String| GpuError::Misuse {
            collective: plan.shape.collective,
            what,
        };
        if plan.direct
            && !cut.ll
            && operation
                .outputs
                .is_none_or(|outputs| outputs.len() != self.arenas.len())
        {
            return Err(misuse(
                "the plan writes to outputs, of which not all are mapped".to_owned(),
            ));
        }
        if cut.ll && plan.shape.collective == crate::plan::Collective::Barrier {
            return Err(misuse(
                "messages without content are not supported by the LL protocol".to_owned(),
            ));
        }
        if cut.threads == 0 || cut.threads > MAX_THREADS || !cut.threads.is_multiple_of(32) {
            return Err(misuse(format!(
                "blocks of {} threads: multiples of 32 up to {MAX_THREADS}",
                cut.threads
            )));
        }
        let op = function.op.filter(|_| plan.shape.collective.reduces());
        let function = Function { op, ..function };
        let counted_layouts = CountedLayouts::new(&plan.shape, operation.count);
        let memory = Memory {
            input: operation.input,
            output: operation.output,
            arenas: &self.arenas,
            outputs: operation.outputs,
            stop: self.stop,
        };
        let strands = plan.lowered.strands.len() as u32;
        let cut = LaunchShape {
            blocks: (cut.blocks / strands * strands).max(strands),
            ..cut
        };
        let (arguments, bytes) = Arguments::new(
            self.rank,
            &plan.lowered,
            &counted_layouts,
            function,
            &self.arena_layout,
            cut,
            memory,
        )
        .map_err(|error| misuse(error.to_string()))?;
        let kernel = self.kernel(function, cut.ll)?;
        let launch = sharing::launch(Blocks::waiting(cut.blocks), cut.threads, bytes, self.is_alone);
        // SAFETY: the kernel's only parameter is this struct, in its version, of which it reads the
        // words of this rank's program and what precedes them: these bytes. The caller vouches for
        // its contents.
        unsafe { kernel.launch(stream, launch, &[&arguments], uses)? };
        Ok(())
    }
}

const LINES: &str = "lines";

fn name(function: Function, ll: bool) -> String {
    let kind = if ll { LINES } else { "collective" };
    match function.op {
        Some(_) => format!("{kind}_{}", function.data.name()),
        None => format!("{kind}_move_{}", function.data.bytes()),
    }
}

fn index(function: Function, ll: bool) -> usize {
    let place = match function.op {
        Some(_) => function.data as usize,
        None => DataType::ALL.len() + function.data.bytes().ilog2() as usize,
    };
    2 * place + usize::from(ll)
}

impl Function {
    /// A reduction of `data`.
    #[must_use]
    pub fn reduce(data: DataType, op: ReduceOp) -> Self {
        Self {
            op: Some(op),
            ..Self::moves(data)
        }
    }

    /// No reduction.
    #[must_use]
    pub fn moves(data: DataType) -> Self {
        Self {
            data,
            op: None,
            scalar: 0,
        }
    }
}
