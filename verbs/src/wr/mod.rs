//! Work requests and work completions.

pub(crate) mod completion;
pub(crate) mod datagram;
pub mod op;
pub mod payload;
pub(crate) mod status;
