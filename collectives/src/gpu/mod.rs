//! Stream-ordered collectives on GPU memory.
//!
//! A [`GpuCommunicator`] is created from a [`Communicator`](crate::Communicator) and a GPU on each
//! rank. With peer access the GPUs execute operations among themselves, by the same plans as the
//! host executor; without, operations are staged through the host.
//!
//! - [`peers`]: memory that the ranks map of each other.
//! - [`lower`]: from plans to kernel programs; [`program`] and [`kernel`]: the kernel executor.
//! - [`small`]: the executor of short operations, by a kernel without a plan.
//! - `sharing`: what ranks that share a GPU agree on.
//! - `group`: groups of sends and receives, and all-to-all-v; `exchange`: their executor.
//! - `moe`: dispatch and combine of expert parallelism.
//! - `control`: the pages by which kernels are stopped; `watch`: the thread that stops them.
//! - `copies`: the copy-engine executor; `split`: both executors concurrently; `staged`: through
//!   host memory.

mod agree;
mod call;
mod choice;
mod communicator;
mod control;
mod copies;
mod descriptors;
mod error;
mod exchange;
mod group;
pub mod kernel;
mod kernels;
pub mod lower;
mod moe;
mod offer;
mod operations;
mod options;
pub mod peers;
pub mod program;
mod sharing;
pub mod small;
mod split;
mod staged;
mod types;
mod watch;

pub use call::GpuCall;
pub use communicator::GpuCommunicator;
pub use error::GpuError;
pub use group::GpuMessage;
pub use moe::{GpuCombining, GpuDispatching, GpuExpertParallel, GpuReceived, GpuRouting};
pub use options::{Executor, GpuOptions};
pub use peers::{Areas, Mapped, Peers, Sizes};
pub use types::{as_bytes, as_bytes_mut};
