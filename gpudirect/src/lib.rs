//! GPU memory on queue pairs (GPUDirect RDMA): connects `doorbell-verbs` and `doorbell-cuda`.
//!
//! [`register`] registers [`GpuMemory`] by the best path that works and returns a [`GpuBuffer`]: an
//! ordinary verbs buffer, and the [`GpuRegion`] with its ordering requirements. Paths, best first:
//!
//! 1. *dma-buf*: the CUDA driver exports the memory, the adapter imports it.
//! 2. *peermem*: the nvidia_peermem kernel module translates the GPU's addresses for the adapter.
//! 3. *device-copy*: a software device has the GPU copy.
//! 4. *staged*: pinned memory is registered, and copied to and from ([`GpuRegion::push`], `pull`).
//!
//! Refused paths keep the exact reason ([`GpuRegion::refused`]); [`survey()`] tries all of them;
//! `DOORBELL_GPU_PATH` forces one.
//!
//! [`cuda`] is the CUDA driver's contexts, streams and memory; the feature `cudarc` takes those of
//! that crate (`SliceLoan`). [`stream`] posts in stream order, [`proxy`] for kernels, and [`heap`]
//! is a symmetric heap.
//!
//! ```no_run
//! use doorbell_gpudirect::{Arrivals, GpuMemory, Scope, register};
//! use doorbell_verbs::{ProtectionDomain, QueuePair, Remote, PeerWrite, WriteAccess};
//!
//! /// Sends the results of the work in `stream`, by whatever path the memory is registered.
//! fn send(pd: &ProtectionDomain, qp: &mut QueuePair, stream: &doorbell_cuda::Stream, to: Remote<WriteAccess>) -> Result<(), Box<dyn std::error::Error>> {
//!     let memory = GpuMemory::alloc(stream.context(), 1 << 20)?;
//!     let (buffer, region) = register(pd, &memory, PeerWrite)?.into_parts();
//!     // ... kernels are launched on `stream` ...
//!     region.push(.., stream)?.wait()?;
//!     qp.post(|batch| {
//!         batch.write(buffer, to).signaled();
//!     })?;
//!     Ok(())
//! }
//!
//! /// Makes data visible to kernels after its completion has been polled.
//! fn arrived(arrivals: &mut Arrivals, stream: &doorbell_cuda::Stream) -> Result<(), doorbell_gpudirect::Error> {
//!     arrivals.publish(.., stream)
//!     // ... and kernels launched on `stream` from now on see it.
//! }
//! # let _ = Scope::Owner;
//! ```
#![deny(unsafe_code)]

/// Implements `Debug` by the named values, as the type has others that are long or have none.
macro_rules! debug_fields {
    ($name:ident, $self:ident, $($field:ident = $value:expr),*) => {
        impl core::fmt::Debug for $name {
            fn fmt(&$self, f: &mut core::fmt::Formatter<'_>) -> core::fmt::Result {
                f.debug_struct(stringify!($name))$(.field(stringify!($field), &$value))*.finish_non_exhaustive()
            }
        }
    };
}

mod error;
pub mod heap;
#[cfg(feature = "cudarc")]
mod loan;
mod memory;
mod ordering;
mod path;
pub mod proxy;
mod region;
mod register;
mod small;
pub mod storage;
pub mod stream;
mod survey;
mod transfer;
mod words;

pub use doorbell_cuda as cuda;
pub use error::Error;
#[cfg(feature = "cudarc")]
pub use loan::{Lendable, SliceLoan};
pub use memory::GpuMemory;
pub use ordering::{Arrivals, Flush, Scope};
pub use path::{InvalidPath, NoPath, Path, Refusal, Refused};
pub use region::{GpuBuffer, GpuRegion};
pub use register::{GpuRegistration, register, register_chunks};
pub use small::{MAX_SMALL_COPY, SmallWindow, WindowUnavailable};
pub use survey::{PathSurvey, survey};
pub use transfer::Transfer;
