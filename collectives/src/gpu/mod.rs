//! Collectives on the memory of GPUs, in the order of their streams.
//!
//! - [`lower`]: from plans to what kernels do.
//! - [`peers`]: what ranks map of each other; `descriptors`: how they get it.

mod descriptors;
mod error;
pub mod kernel;
pub mod lower;
pub mod peers;
pub mod program;

pub use error::GpuError;
pub use peers::{Areas, Mapped, Peers, Sizes};
