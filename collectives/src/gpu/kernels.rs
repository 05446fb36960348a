//! The kernel executors of a rank, of [plans](super::kernel), [short operations](super::small) and
//! [groups](super::exchange), and its cache of plans.

use std::sync::Arc;

use doorbell_cuda::collective::CollectiveKernels;
use doorbell_cuda::{Memory, Span, Stream};

use super::call::GpuCall;
use super::choice;
use super::copies::Operation;
use super::error::GpuError;
use super::exchange::ExchangeExecutor;
use super::group::Group;
use super::kernel::{KernelExecutor, Operation as Launched, Plan};
use super::lower::LowerError;
use super::options::GpuOptions;
use super::peers::{MAX_PEERS, Peers};
use super::program::{Function, LaunchShape, MAX_BLOCKS};
use super::sharing::Sharing;
use super::small::{self, SmallExecutor};
use crate::algorithm::Algorithm;
use crate::executor::Direction;
use crate::plan::Collective;
use crate::types::{Rank, ReduceOp};

const CACHED_PLANS: usize = 64;

#[derive(Clone, Copy, PartialEq, Eq)]
struct PlanKey {
    collective: Collective,
    algorithm: Algorithm,
    root: Rank,
    direct: bool,
    ll: bool,
    in_place: bool,
}

pub(super) struct Kernels {
    peers: Arc<Peers>,
    executor: KernelExecutor,
    small: SmallExecutor,
    exchange: ExchangeExecutor,
    plans: Vec<(PlanKey, Plan)>,
}

impl Kernels {
    /// Loads all kernels that operations use, as the driver may then wait for running ones.
    pub(super) fn new(
        kernels: &CollectiveKernels,
        peers: Arc<Peers>,
        options: &GpuOptions,
        sharing: &Sharing,
    ) -> Result<Self, GpuError> {
        let arenas: Vec<u64> = peers
            .arenas()
            .memories()
            .iter()
            .map(|arena| arena.device_ptr().0)
            .collect();
        let (rank, areas, stop) = (peers.rank(), peers.areas(), peers.control().device_ptr().0);
        let lines = choice::may_use_lines(options, arenas.len() as u32);
        // FIFOs are for as many blocks as there may be, so that their slots are as large as
        // possible.
        let blocks = sharing.blocks(options.blocks.unwrap_or(MAX_BLOCKS / 2));
        let threads = sharing.exchange_threads(arenas.len() as u32);
        let exchange_blocks = sharing.blocks(options.blocks.unwrap_or(MAX_BLOCKS));
        Ok(Self {
            small: SmallExecutor::new(kernels, rank, arenas.clone(), areas, stop)?,
            exchange: ExchangeExecutor::new(
                kernels,
                &peers,
                arenas.clone(),
                stop,
                (exchange_blocks, threads, sharing.ranks == 1),
            )?,
            executor: KernelExecutor::new(kernels, rank, arenas, (areas, blocks, sharing.ranks == 1), stop, lines)?,
            peers,
            plans: Vec::new(),
        })
    }

    pub(super) fn run_short(
        &self,
        call: &GpuCall<'_>,
        (input, output): (Option<Span<'_>>, Option<Span<'_>>),
        (op, scalar): (ReduceOp, u64),
        cut: small::LaunchShape,
        stream: &Stream,
    ) -> Result<(), GpuError> {
        let function = Function {
            data: call.data,
            op: call.collective.reduces().then_some(op),
            scalar,
        };
        let address = |span: Option<Span<'_>>| span.map_or(0, |span| span.device_ptr().0);
        let operation = small::Operation {
            collective: call.collective,
            root: call.root,
            input: address(input),
            output: address(output),
            count: call.count as u64,
        };
        let mut uses = [self.peers.control().all(); MAX_PEERS + 3];
        let arenas = self.peers.arenas().memories().iter().map(Memory::all);
        let mut used = 1;
        for (place, span) in uses[1..].iter_mut().zip(input.into_iter().chain(output).chain(arenas)) {
            *place = span;
            used += 1;
        }
        // SAFETY: as in `run`; and the launch shape is derived from the sizes that all ranks have
        // agreed on, with which the arenas were allocated.
        unsafe { self.small.launch(stream, &operation, function, cut, &uses[..used]) }
    }

    pub(super) fn exchange(&self, group: &Group<'_>, stream: &Stream) -> Result<(), GpuError> {
        let memories = [Direction::Send, Direction::Receive].map(|direction| group.all(direction));
        let mut uses: Vec<Span<'_>> = memories.into_iter().flatten().collect();
        uses.extend(self.peers.arenas().memories().iter().map(Memory::all));
        uses.push(self.peers.control().all());
        // SAFETY: the messages' memory, the arenas and the control page are kept. Exclusive use is
        // as in `run`.
        unsafe { self.exchange.launch(stream, group, &uses) }
    }

    pub(super) fn run(
        &mut self,
        operation: &Operation<'_>,
        (op, scalar): (ReduceOp, u64),
        cut: LaunchShape,
        stream: &Stream,
    ) -> Result<(), GpuError> {
        let function = Function {
            data: operation.data,
            op: operation.collective.reduces().then_some(op),
            scalar,
        };
        self.prepare(operation, cut.ll)?;
        let Some((key, plan)) = self.plans.last() else {
            return Ok(());
        };
        let cut = match cut.ll || plan.lowered().all.staged {
            true => LaunchShape {
                blocks: cut.blocks.min(self.executor.arena_layout().blocks(cut.ll)),
                ..cut
            },
            false => cut,
        };
        let outputs: Option<Vec<u64>> = operation.registered.filter(|_| key.direct).map(|(mapped, start)| {
            let address = |memory: &doorbell_cuda::OwnedSpan| memory.device_ptr().0 + start as u64;
            mapped.memories().iter().map(address).collect()
        });
        let address = |span: Option<Span<'_>>| span.map_or(0, |span| span.device_ptr().0);
        let launched = Launched {
            input: address(operation.input),
            output: address(operation.output),
            outputs: outputs.as_deref(),
            count: operation.count,
        };
        let mut uses: Vec<Span<'_>> = [operation.input, operation.output].into_iter().flatten().collect();
        uses.extend(self.peers.arenas().memories().iter().map(Memory::all));
        uses.push(self.peers.control().all());
        if let Some((mapped, _)) = operation.registered {
            uses.extend(mapped.memories().iter().map(Memory::all));
        }
        // SAFETY: input and output were validated to hold the operation's elements, arenas and
        // registered memory are mapped, and all of it is kept. Exclusive use meanwhile is the
        // callers' obligation on all ranks, as with copies, and concerns device memory alone, of
        // which no references exist.
        unsafe { self.executor.launch(stream, plan, function, cut, launched, &uses) }
    }

    /// Returns the program from the cache, or lowers the plan, and marks it most recent.
    fn prepare(&mut self, operation: &Operation<'_>, ll: bool) -> Result<(), GpuError> {
        let key = PlanKey {
            collective: operation.collective,
            algorithm: operation.algorithm,
            root: operation.root,
            direct: operation.registered.is_some(),
            ll,
            // For rooted collectives only the root knows, and the others are unaffected.
            in_place: operation.in_place && !operation.collective.has_root(),
        };
        if let Some(known) = self.plans.iter().rposition(|(known, _)| *known == key) {
            self.plans[known..].rotate_left(1);
            return Ok(());
        }
        let order: Vec<_> = (0..self.peers.ranks() as u32).map(Rank).collect();
        let schedule = key.algorithm.schedule(key.collective, &order, key.root)?;
        let lowered = Plan::new(&*schedule, self.peers.rank(), (key.direct, key.ll), key.in_place);
        let plan = lowered.map_err(|e: LowerError| GpuError::Misuse {
            collective: key.collective,
            what: e.to_string(),
        })?;
        if self.plans.len() >= CACHED_PLANS {
            self.plans.remove(0);
        }
        self.plans.push((key, plan));
        Ok(())
    }
}
