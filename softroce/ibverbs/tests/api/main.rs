//! The soft devices through the C calls of libibverbs: two devices of one process over real sockets.

mod common;
mod operations;
