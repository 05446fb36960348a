//! A safe subset of the CUDA driver API for Doorbell: memory that processes can share, streams,
//! events, copies, kernels and graphs.
//!
//! [`Driver::load`] loads `libcuda.so.1` at run time, so a program starts on a machine without CUDA
//! and gets a one-line reason. Every other failure is an [`Error`] that names the driver function,
//! its object and what to do; a `Result` without an *Errors* section has the driver's errors.
//!
//! ```no_run
//! use doorbell_cuda::{DeviceMemory, Driver, HostMemory, Launch, Memory, Module, Stream};
//!
//! # const PTX: &str = "";
//! # fn main() -> Result<(), Box<dyn std::error::Error>> {
//! let device = Driver::load()?.device(0)?;
//! let context = device.context()?;
//! let stream = Stream::new(&context)?;
//!
//! let numbers = DeviceMemory::alloc(&context, 1 << 20)?;
//! let double = Module::from_ptx(&context, PTX)?.kernel("double")?;
//! // SAFETY: the kernel takes an address and an element count within this memory.
//! unsafe { double.launch(&stream, Launch::linear(1024, 256), &[&numbers.device_ptr(), &(1u32 << 18)], &[numbers.all()])? };
//! stream.synchronize()?;
//! # Ok(())
//! # }
//! ```
//!
//! # Safety model
//!
//! Work on a device is asynchronous. Each operation records the memory it uses, which is freed only
//! when that work is done: dropping neither waits nor frees too early. As devices write host memory
//! concurrently, a slice of it is given only to its last handle, when no work uses it.
//!
//! ```compile_fail,E0502
//! # fn both(stream: &doorbell_cuda::Stream, device: doorbell_cuda::DeviceMemory, mut host: doorbell_cuda::HostMemory) -> Result<(), doorbell_cuda::Error> {
//! use doorbell_cuda::Memory;
//! let bytes = host.bytes_mut()?;
//! stream.copy(host.all(), device.all())?; // It would write the borrowed bytes.
//! bytes[0] = 1;
//! # Ok(())
//! # }
//! ```
//!
//! Launching is `unsafe`: a kernel's use of its arguments cannot be checked. Calls restore the
//! thread's previous context, so this crate can be used beside PyTorch.

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

pub mod arguments;
mod capture;
pub mod collective;
mod context;
mod copy;
mod device;
mod driver;
mod error;
mod event;
mod follower;
mod graph;
#[cfg(feature = "cudarc")]
mod interop;
mod kernels;
mod loader;
mod memop;
mod memory;
mod module;
mod order;
pub mod reduce;
mod resource;
mod small;
mod stream;
mod sys;

pub use context::Context;
pub use device::{Attribute, ComputeCapability, Device, FlushOptions, Peer, PeerLink, Uuid, WritesOrdering};
pub use driver::{Driver, LoadError};
pub use error::{Error, Failure};
pub use event::{Event, EventHandle};
pub use follower::Follower;
pub use graph::{CaptureMode, Graph, GraphExec};
pub use kernels::KernelFile;
pub use memop::WaitCondition;
pub use memory::{
    DeviceMemory, DeviceMemoryOptions, DevicePtr, DmaBuf, ExportedRange, Foreign, HostMemory, IpcHandle, Memory,
    MemoryHandle, MemoryType, OwnedSpan, PointerInfo, Shareable, Span,
};
pub use module::{Argument, Kernel, KernelAttribute, Launch, MAX_ARGUMENTS, Module};
pub use order::{StreamOrder, Turn};
pub use resource::FreesDeferred;
pub use small::{SmallCopies, SmallSource};
pub use stream::{Owner, RelaxedCapture, Stream};
