//! Collectives on the memory of GPUs, in the order of their streams.
//!
//! A [`GpuCommunicator`] is made of a [`Communicator`](crate::Communicator) and a GPU on each rank. Where the GPUs reach each other, they do operations among themselves, by the same plans as the processors'; where not, the host has a part in it.
//!
//! - `communicator` and `operations`: what programs call; `call`: whether it fits; `options`: how it is made; `choice`: what does what.
//! - [`peers`]: what ranks map of each other; `offer`: what they are told of it; `descriptors`: how they get it.
//! - [`lower`]: from plans to what kernels do; [`program`] and [`kernel`]: the executor that they are run by; `kernels`: one communicator's.
//! - [`small`]: the executor of short operations, by a kernel without a plan.
//! - `copies`: the executor by copy engines; `split`: both executors beside each other; `staged`: through memory of the host.
//! - `watch`: what is done when a rank is gone.

mod call;
mod choice;
mod communicator;
mod copies;
mod descriptors;
mod error;
pub mod kernel;
mod kernels;
pub mod lower;
mod offer;
mod operations;
mod options;
pub mod peers;
pub mod program;
pub mod small;
mod split;
mod staged;
mod types;
mod watch;

pub use call::GpuCall;
pub use communicator::GpuCommunicator;
pub use error::GpuError;
pub use options::{Executor, GpuOptions};
pub use peers::{Areas, Mapped, Peers, Sizes};
pub use types::{as_bytes, as_bytes_mut};
