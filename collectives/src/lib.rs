//! Collectives built directly on RC queue pairs.
//!
//! An algorithm is a pure function from a [`Shape`](plan::Shape) to a [`Plan`](plan::Plan): what each rank sends, receives and reduces, in blocks and not in bytes, so that one plan serves every
//! count. A checker proves a plan by running it symbolically; a simulator runs it over modelled fabrics; one executor runs it on queue pairs, and knows no algorithm.

pub mod algorithm;
pub mod bootstrap;
pub mod communicator;
pub mod cost;
pub mod executor;
pub mod failure;
pub mod kernel;
mod memory;
pub mod plan;
mod protocol;
pub mod reference;
pub mod simulate;
pub mod topology;
pub mod tune;
mod types;

pub use algorithm::{Algorithm, Unsupported};
pub use communicator::{CollectiveError, CommBuffer, Communicator, Options, PreMulSum};
pub use memory::Segment;
pub use types::{DataType, Protocol, Rank, ReduceOp, UnknownName};
