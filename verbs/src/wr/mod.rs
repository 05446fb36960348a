//! Work requests and their completions: what can be asked of a queue pair, and what comes of it.

pub(crate) mod completion;
pub(crate) mod datagram;
pub mod op;
pub mod payload;
pub(crate) mod status;
