//! Collectives on the memory of GPUs, in the order of their streams.
//!
//! - [`peers`]: what ranks map of each other; `descriptors`: how they get it.

mod copies;
mod descriptors;
mod error;
pub mod peers;

pub use error::GpuError;
pub use peers::{Areas, Mapped, Peers, Sizes};
