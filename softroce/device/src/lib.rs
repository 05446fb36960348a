//! The userspace RoCEv2 device: drives the sans-IO engine of `doorbell-roce-proto` over UDP sockets.

pub mod limits;
pub mod link;
