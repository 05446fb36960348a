//! The memory of a test in a GPU (`--use_cuda`): what the peer accesses, and the send and receive
//! buffers.
//!
//! Unlike host buffers ([`super::memory`]), each message in flight has its own GPU buffer, so
//! memory grows with the window.

use doorbell_gpudirect::GpuMemory;
use doorbell_verbs::{Buffer, Opaque, ProtectionDomain, Rights};

use super::super::settings::Settings;
use super::{Target, memory};
use crate::device::Gpu;
use crate::engine::gpu::GpuPool;
use crate::failure::{Failure, refused};

/// Memory for the peer, at least `len` bytes per queue pair: one memory region, or with
/// `--mr_per_qp` one each.
pub(super) fn pieces<R: Rights>(
    settings: &Settings,
    gpu: &Gpu,
    pd: &ProtectionDomain,
    len: u64,
    rights: R,
    target: fn(Buffer<Opaque<R>>) -> Target,
) -> Result<Vec<Target>, Failure> {
    let (piece, regions, each) = memory::layout(settings, len)?;
    let mut pieces = Vec::with_capacity(settings.qps as usize);
    for _ in 0..regions {
        let memory = GpuMemory::alloc(&gpu.context, each).map_err(refused)?;
        let mut registration = gpu.registration(pd)?;
        if settings.relaxed_ordering {
            registration = registration.relaxed_ordering();
        }
        let (chunks, _) = registration.register_chunks(&memory, piece, rights).map_err(refused)?;
        pieces.extend(chunks.map(target));
    }
    Ok(pieces)
}

pub(crate) fn slots(gpu: &Gpu, pd: &ProtectionDomain, bytes: u64, count: u32) -> Result<GpuPool, Failure> {
    let len = usize::try_from(bytes).map_err(|_| Failure::test(format!("{bytes} B exceed the address space")))?;
    GpuPool::new(gpu, pd, len, count as usize)
}
