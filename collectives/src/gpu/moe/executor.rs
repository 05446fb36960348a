//! The kernels of a layer: their launches.

use doorbell_cuda::collective::CollectiveKernels;
use doorbell_cuda::{DeviceMemory, Kernel, KernelFile, Launch, Memory as _, Span, Stream};

use super::arguments::{Arguments, VERSION};
use super::memory::{Own, Window};
use super::report::REPORT;
use crate::gpu::error::GpuError;
use crate::gpu::peers::{MAX_PEERS, Mapped, Peers};
use crate::moe::{Mode, MoeOptions, Payload};

/// Threads of a thread block.
pub(super) const THREADS: u32 = 512;
/// Thread blocks of dispatch and combine, if no GPU is shared and no option says otherwise.
pub(super) const BLOCKS: u32 = 128;

/// A kernel of a layer.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Step {
    /// Low latency: counts and stores all rows.
    Send,
    /// High throughput: counts.
    Count,
    /// High throughput: waits for all counts.
    Place,
    /// High throughput: stores all rows.
    Write,
    /// Waits for all rows.
    Receive,
    /// Stores the experts' outputs.
    Return,
    /// Waits for all outputs.
    Await,
    /// Adds them up.
    Reduce,
}

impl Step {
    const ALL: [Self; 8] = [
        Self::Send,
        Self::Count,
        Self::Place,
        Self::Write,
        Self::Receive,
        Self::Return,
        Self::Await,
        Self::Reduce,
    ];

    fn kernel(self, payload: Payload) -> &'static str {
        match (self, payload) {
            (Self::Send, Payload::Bf16) => "moe_send_bf16",
            (Self::Send, Payload::Fp8) => "moe_send_fp8",
            (Self::Count, _) => "moe_count",
            (Self::Place, _) => "moe_place",
            (Self::Write, Payload::Bf16) => "moe_write_bf16",
            (Self::Write, Payload::Fp8) => "moe_write_fp8",
            (Self::Receive, _) => "moe_receive",
            (Self::Return, _) => "moe_return",
            (Self::Await, _) => "moe_await",
            (Self::Reduce, _) => "moe_reduce",
        }
    }

    /// Whether a block of its own waits for the words of all others.
    fn is_of_one_block(self) -> bool {
        matches!(self, Self::Place | Self::Receive | Self::Await)
    }
}

/// What a launch works on: addresses, and numbers of tokens and of outputs.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Work {
    pub(super) indices: u64,
    pub(super) index_bytes: u32,
    pub(super) weights: u64,
    pub(super) input: u64,
    pub(super) output: u64,
    pub(super) tokens: u32,
    pub(super) given: u32,
}

/// A rank's part of a layer.
#[derive(Debug)]
pub(super) struct Executor {
    kernels: Vec<Kernel>,
    common: Arguments,
    window: Window,
    own: Own,
    memory: DeviceMemory,
    pub(super) mapped: Mapped,
}

impl Executor {
    /// `kernels` are those that [`load`] has loaded, `mapped` the windows of all ranks, `blocks`
    /// the thread blocks of a launch, the same on all ranks.
    pub(super) fn new(
        (kernels, peers): (Vec<Kernel>, &Peers),
        options: &MoeOptions,
        (mapped, memory): (Mapped, DeviceMemory),
        blocks: u32,
    ) -> Self {
        let shape = &options.shape;
        let (window, own) = (Window::new(options), Own::new(shape));
        let mut memories = [0; MAX_PEERS];
        for (address, memory) in memories.iter_mut().zip(mapped.memories()) {
            *address = memory.device_ptr().0;
        }
        let (control, start) = (peers.control().device_ptr().0, memory.device_ptr().0);
        let at = |offset: usize| start + offset as u64;
        let common = Arguments {
            version: VERSION,
            stop: control,
            report: control + REPORT as u64,
            memories,
            rows: window.rows as u64,
            outputs: window.outputs as u64,
            ready: window.ready as u64,
            counts: window.counts as u64,
            arrived: window.arrived as u64,
            returned: window.returned as u64,
            state: at(own.state),
            order: at(own.order),
            positions: at(own.positions),
            bases: at(own.bases),
            tables: at(own.tables),
            indices: 0,
            weights: 0,
            input: 0,
            output: 0,
            rank: peers.rank().0,
            ranks: shape.ranks(),
            experts: shape.experts(),
            top_k: shape.top_k(),
            hidden: shape.hidden(),
            tokens: 0,
            pairs: shape.max_pairs() as u32,
            slots: shape.max_pairs_for_rank() as u32,
            row_bytes: options.payload.row_bytes(shape.hidden()) as u32,
            index_bytes: 0,
            blocks,
            contiguous: (options.mode == Mode::HighThroughput).into(),
            given: 0,
            capacity: options.rows() as u32,
        };
        Self {
            kernels,
            common,
            window,
            own,
            memory,
            mapped,
        }
    }

    /// The received rows.
    pub(super) fn rows(&self) -> Result<Span<'_>, GpuError> {
        let own = &self.mapped.memories()[self.common.rank as usize];
        let bytes = self.common.capacity as usize * self.common.row_bytes as usize;
        Ok(own.span(self.window.rows..self.window.rows + bytes)?)
    }

    /// Tables of what is received, of `u32` by local expert and source: counts, and first rows.
    pub(super) fn tables(&self) -> Result<(Span<'_>, Span<'_>), GpuError> {
        let bytes = self.common.experts as usize * 4;
        let table = |which: usize| {
            let start = self.own.tables + which * bytes;
            self.memory.span(start..start + bytes)
        };
        Ok((table(0)?, table(1)?))
    }

    /// Enqueues a kernel on `stream`. `uses` is kept until it is done, with this layer's memory.
    ///
    /// # Safety
    /// The addresses of `work` are of memory in `uses` that holds what it says, which nothing else
    /// writes until the kernel is done. All ranks launch the same steps in the same order.
    pub(super) unsafe fn launch(
        &self,
        step: Step,
        work: Work,
        uses: &[Span<'_>],
        (peers, stream): (&Peers, &Stream),
    ) -> Result<(), GpuError> {
        let arguments = Arguments {
            indices: work.indices,
            index_bytes: work.index_bytes,
            weights: work.weights,
            input: work.input,
            output: work.output,
            tokens: work.tokens,
            given: work.given,
            ..self.common
        };
        let mut kept = vec![self.memory.all(), peers.control().all()];
        kept.extend(self.mapped.memories().iter().map(|memory| memory.all()));
        kept.extend_from_slice(uses);
        let blocks = if step.is_of_one_block() { 1 } else { self.common.blocks };
        let launch = Launch::linear(blocks, THREADS);
        // SAFETY: the kernel's only parameter is this struct, in its version; the memory of all
        // ranks is mapped and kept; the caller vouches for the rest.
        unsafe { self.kernels[step as usize].launch(stream, launch, &[&arguments], &kept)? };
        Ok(())
    }
}

/// Loads the kernels of a payload.
pub(super) fn load(kernels: &CollectiveKernels, payload: Payload) -> Result<Vec<Kernel>, GpuError> {
    let names = Step::ALL.map(|step| step.kernel(payload));
    kernels.load(KernelFile::Moe, |name| names.contains(&name))?;
    let loaded = names.map(|name| {
        kernels.kernel(name).ok_or_else(|| GpuError::Refused {
            what: "kernels of expert parallelism",
            reason: format!("there is no kernel {name}"),
        })
    });
    loaded.into_iter().collect()
}
