//! GPU memory on queue pairs (GPUDirect RDMA): connects `doorbell-verbs` and `doorbell-cuda`.
//!
//! [`GpuMemory`] is GPU memory, allocated here or elsewhere (PyTorch). [`register`] registers it by
//! the best path that works and returns a [`GpuBuffer`]: an ordinary verbs buffer that can be
//! posted, split and handed to peers as a [`Remote`](doorbell_verbs::Remote), plus the
//! [`GpuRegion`] that describes the registration and its ordering requirements. Paths, best first:
//!
//! 1. *dma-buf*: the CUDA driver exports the memory, the adapter imports it.
//! 2. *peermem*: the nvidia_peermem kernel module translates the GPU's addresses for the adapter.
//! 3. *device-copy*: a software device has the GPU copy.
//! 4. *staged*: a staging buffer in pinned host memory is registered instead, and copied to and
//!    from ([`GpuRegion::push`], [`GpuRegion::pull`]).
//!
//! Failed paths are kept with the exact reason ([`GpuRegion::refused`]), and [`survey()`] tries all
//! of them. `DOORBELL_GPU_PATH` forces one.
//!
//! On top of that, [`stream`] posts work requests in stream order, [`proxy`] posts requests
//! submitted by kernels, and [`heap`] is a symmetric heap.
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

mod error;
pub mod heap;
mod memory;
mod ordering;
mod path;
pub mod proxy;
mod region;
mod register;
mod small;
pub mod stream;
mod survey;
mod transfer;
mod words;

pub use error::Error;
pub use memory::GpuMemory;
pub use ordering::{Arrivals, Flush, Scope};
pub use path::{InvalidPath, NoPath, Path, Refusal, Refused};
pub use region::{GpuBuffer, GpuRegion};
pub use register::{GpuRegistration, register, register_chunks};
pub use small::{MAX_SMALL_COPY, SmallWindow, WindowUnavailable};
pub use survey::{PathSurvey, survey};
pub use transfer::Transfer;
