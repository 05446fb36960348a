//! CUDA as Doorbell needs it: memory that can be shared between processes, streams, events, copies, kernels and graphs of a GPU, by the driver's API.
//!
//! Nothing of CUDA is linked. [`Driver::load`] opens the driver at run time, so that a program starts where there is none, and is told in one line what is missing; whatever fails later is an
//! [`Error`] that names the driver's function, what it was called for and what to do. Nothing here knows of verbs.
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
//! // SAFETY: the kernel takes an address and a count of numbers, which are there.
//! unsafe { double.launch(&stream, Launch::linear(1024, 256), &[&numbers.device_ptr(), &(1u32 << 18)], &[numbers.all()])? };
//! stream.synchronize()?;
//! # Ok(())
//! # }
//! ```
//!
//! # What is safe, and how
//!
//! Work of a device goes on after the call that began it has returned. What it uses is remembered with the stream, and dropped memory is freed only when the work is done that uses it: dropping does not wait for it and
//! never frees too early. A device writes host memory beside the processor, so that memory is given as a slice only to its last handle when no work uses it. Ranges are checked.
//!
//! ```compile_fail,E0502
//! # fn both(stream: &doorbell_cuda::Stream, device: doorbell_cuda::DeviceMemory, mut host: doorbell_cuda::HostMemory) -> Result<(), doorbell_cuda::Error> {
//! use doorbell_cuda::Memory;
//! let bytes = host.bytes_mut()?;
//! stream.copy(host.all(), device.all())?; // It would write what is borrowed.
//! bytes[0] = 1;
//! # Ok(())
//! # }
//! ```
//!
//! What cannot be checked is `unsafe`: what a kernel does with its arguments.
//!
//! Each call enters the context of what it is called on and leaves the thread as it was, so that this can be used beside PyTorch.

pub mod collective;
mod context;
mod copy;
mod device;
mod driver;
mod error;
mod event;
mod graph;
mod kernels;
mod memop;
mod memory;
mod module;
pub mod reduce;
mod resource;
mod small;
mod stream;
mod sys;

pub use context::Context;
pub use device::{Attribute, ComputeCapability, Device, FlushOptions, Peer, PeerLink, Uuid, WritesOrdering};
pub use driver::{Absent, Driver};
pub use error::{Error, Failure};
pub use event::{Event, EventHandle};
pub use graph::{CaptureMode, Graph, GraphExec};
pub use kernels::KernelFile;
pub use memop::Until;
pub use memory::{
    DeviceMemory, DeviceMemoryOptions, DevicePtr, DmaBuf, Foreign, Handle, HostMemory, IpcHandle, Memory, MemoryType,
    Part, PointerInfo, Shareable, Shared, Span,
};
pub use module::{Argument, Kernel, KernelAttribute, Launch, MAX_ARGUMENTS, Module};
pub use small::{SmallCopies, SmallSource};
pub use stream::{Owner, Stream};
