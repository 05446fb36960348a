//! Collectives built directly on RC queue pairs.
//!
//! An algorithm is a pure function from a [`Shape`](plan::Shape) to a [`Plan`](plan::Plan): what each rank sends, receives and reduces, in blocks and not in bytes, so that one plan serves every
//! count. A checker proves a plan by running it symbolically; a simulator runs it over modelled fabrics; one executor runs it on queue pairs, and knows no algorithm.

pub mod kernel;
pub mod plan;
mod types;

pub use types::{DataType, Rank, ReduceOp, UnknownName};
