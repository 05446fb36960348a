//! What does an operation, and how: by its size and the number of ranks, as measured on four H200 (docs/PERFORMANCE.md).

use super::options::{Executor, GpuOptions};
use super::program::Cut;
use crate::algorithm::Algorithm;
use crate::plan::Collective;
use crate::types::DataType;

/// The most sources that a reduction has in one pass.
const MOST_SOURCES: u32 = doorbell_cuda::reduce::MAX_SOURCES as u32;
/// Up to so many bytes of a message, words with flags take less time than flags for themselves.
const LINES: u64 = 64 << 10;

/// How an operation is done.
#[derive(Clone, Copy, Debug)]
pub(super) enum Choice {
    /// By kernels.
    Kernel(Algorithm, Cut),
    /// By copy engines, in slices of so many bytes of the whole.
    Copies(Algorithm, u64),
}

impl Choice {
    /// Of an operation among so many ranks, whose outputs are registered or not.
    pub(super) fn new(
        options: &GpuOptions,
        ranks: u32,
        collective: Collective,
        data: DataType,
        count: usize,
        registered: bool,
    ) -> Self {
        let bytes = (count as u64).saturating_mul(data.bytes() as u64);
        let whole = match collective {
            Collective::AllReduce | Collective::Broadcast | Collective::Reduce | Collective::SendRecv => bytes,
            _ => bytes.saturating_mul(ranks.into()),
        };
        let executor = options
            .executor
            .unwrap_or_else(|| best(ranks, collective, whole, registered));
        match executor {
            Executor::Copies => copies(options, ranks, collective, whole),
            Executor::Kernel | Executor::Staged => kernel(ranks, collective, bytes, whole),
        }
    }
}

/// Copies move more between two GPUs than kernels store, but take longer to begin, and collide where three or more GPUs send to each other.
fn best(ranks: u32, collective: Collective, whole: u64, registered: bool) -> Executor {
    let from = match collective {
        // What is not registered is copied once more, which processors do beside.
        _ if !registered => u64::MAX,
        Collective::AllReduce if ranks > 2 => 512 << 20,
        Collective::AllGather | Collective::AllToAll => 256 << 20,
        Collective::SendRecv => 16 << 20,
        _ => u64::MAX,
    };
    if whole >= from {
        Executor::Copies
    } else {
        Executor::Kernel
    }
}

fn copies(options: &GpuOptions, ranks: u32, collective: Collective, whole: u64) -> Choice {
    let (algorithm, slice) = match collective {
        Collective::AllReduce | Collective::ReduceScatter | Collective::Reduce if ranks > MOST_SOURCES => {
            (Algorithm::Ring, 64 << 20)
        }
        // Copies to one GPU from two others are in each other's way, the more so the more often it comes to that: so one slice, of which only what is beside the reduction is cut.
        Collective::AllReduce | Collective::ReduceScatter if ranks > 2 => (Algorithm::FullMesh, u64::MAX),
        Collective::AllReduce | Collective::ReduceScatter => (Algorithm::FullMesh, (whole / 4).max(16 << 20)),
        // A copy and its word take some 6 µs beside what they move: so many slices that this and the filling of the chain are in balance.
        Collective::Broadcast | Collective::Reduce if ranks > 2 => {
            (Algorithm::Ring, whole / (whole >> 20).isqrt().max(1))
        }
        Collective::Reduce => (Algorithm::FullMesh, (whole / 4).max(16 << 20)),
        _ => (Algorithm::FullMesh, u64::MAX),
    };
    Choice::Copies(algorithm, options.slice.unwrap_or(slice).max(1))
}

fn kernel(ranks: u32, collective: Collective, bytes: u64, whole: u64) -> Choice {
    let algorithm = match collective {
        Collective::Barrier => Algorithm::RecursiveDoubling,
        Collective::AllReduce | Collective::ReduceScatter | Collective::Reduce if ranks > MOST_SOURCES => {
            Algorithm::Ring
        }
        Collective::AllReduce if whole <= LINES => Algorithm::OneShot,
        Collective::Broadcast | Collective::Reduce if ranks > 2 && whole > 2 * LINES => Algorithm::Ring,
        _ => Algorithm::FullMesh,
    };
    // What one message carries.
    let message = match (algorithm, collective) {
        (Algorithm::FullMesh, Collective::AllReduce) => bytes / u64::from(ranks),
        _ => bytes,
    };
    let lines = message <= LINES && collective != Collective::Barrier;
    let cut = if lines {
        Cut {
            blocks: message.div_ceil(4096).clamp(1, 16) as u32,
            threads: if message < 4096 { 128 } else { 512 },
            slice: 4096,
            lines,
        }
    } else {
        Cut {
            // 4 KiB for each block, at least.
            blocks: message.div_ceil(4096).clamp(1, if whole > 16 << 20 { 128 } else { 64 }) as u32,
            threads: 512,
            slice: 64 << 10,
            lines,
        }
    };
    Choice::Kernel(algorithm, cut)
}
