//! GPU memory on queue pairs: what `doorbell-verbs` posts and `doorbell-cuda` allocates, brought together.
//!
//! [`GpuMemory`] is memory of a GPU: allocated here, so that it can be shared and registered, or somebody else's (PyTorch's). [`register`] registers it by the best path that works and gives a
//! [`GpuBuffer`]: a buffer of verbs as any other, which is posted, cut up and handed to peers as a [`Remote`](doorbell_verbs::Remote), and the [`GpuRegion`] that says how it was registered and
//! what that asks for. Paths, the best first:
//!
//! 1. *dma-buf*: the GPU's driver exports the memory, the adapter imports it.
//! 2. *peermem*: the kernel's module nvidia_peermem tells the adapter where the GPU's addresses lead.
//! 3. *device-copy*: a device in software has the GPU copy.
//! 4. *staged*: a mirror in pinned memory of the host is registered instead, and copied to and from ([`GpuRegion::push`], [`GpuRegion::pull`]).
//!
//! What was tried in vain is kept with its exact reason ([`GpuRegion::refused`]), and [`survey()`] tries all of them. `DOORBELL_GPU_PATH` forces one.
//!
//! Above that, [`stream`] has posts wait for work of a GPU and such work for completions, [`proxy`] has kernels ask for puts by themselves, and [`heap`] is memory that all ranks put to and get from.
//!
//! ```no_run
//! use doorbell_gpudirect::{Arrivals, GpuMemory, Scope, register};
//! use doorbell_verbs::{ProtectionDomain, QueuePair, Remote, RemoteWrite, Write};
//!
//! /// Sends what the work in `stream` makes of the memory, by whatever path it is registered.
//! fn send(pd: &ProtectionDomain, qp: &mut QueuePair, stream: &doorbell_cuda::Stream, to: Remote<Write>) -> Result<(), Box<dyn std::error::Error>> {
//!     let memory = GpuMemory::alloc(stream.context(), 1 << 20)?;
//!     let (buffer, region) = register(pd, &memory, RemoteWrite)?.into_parts();
//!     // ... kernels are launched into `stream` ...
//!     region.push(.., stream)?.wait()?;
//!     qp.post(|batch| {
//!         batch.write(buffer, to).signalled();
//!     })?;
//!     Ok(())
//! }
//!
//! /// Lets kernels see what a completion, which has been polled, says has arrived.
//! fn arrived(arrivals: &mut Arrivals, stream: &doorbell_cuda::Stream) -> Result<(), doorbell_gpudirect::Error> {
//!     arrivals.publish(.., stream)
//!     // ... and kernels launched into `stream` from now on see it.
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
pub use path::{BadPath, NoPath, Path, Refusal, Refused};
pub use region::{GpuBuffer, GpuRegion};
pub use register::{GpuRegistration, register, register_chunks};
pub use small::{NoWindow, SMALL, SmallWindow};
pub use survey::{Survey, survey};
pub use transfer::Transfer;
