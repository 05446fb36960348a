//! How to do the common tasks, a page each: a whole program's worth of code, its units, what goes wrong, and where the rules are.
//!
//! | task | page | a program that does it |
//! |---|---|---|
//! | connect two programs | [`connect`] | `examples/04_exchange` |
//! | stream WRITEs into a peer's memory | [`stream_writes`] | `examples/06_stream_writes` |
//! | let peers READ from one's memory | [`serve_reads`] | `examples/07_serve_reads` |
//! | send datagrams | [`datagrams`] | `examples/05_datagrams` |
//! | go on after a failure | [`recover`] | `examples/08_recover` |
//! | sleep instead of poll | [`sleep`] | `examples/02_sleeping_receiver`, `examples/03_tokio` |
//! | share receives among queue pairs | [`share_receives`] | `examples/09_shared_receives` |
//! | register the memory of a GPU | [`gpu_memory`] | `examples/13_gpu_write` |
//!
//! Each example runs on the userspace device, both ends in one process: `cargo run --release -p doorbell-examples --bin 06_stream_writes`.
//!
//! Clauses are those of the InfiniBand Architecture Specification, volume 1 ("IBTA vol 1"); `name(3)` is the man page of rdma-core.

pub mod connect;
pub mod datagrams;
pub mod gpu_memory;
pub mod recover;
pub mod serve_reads;
pub mod share_receives;
pub mod sleep;
pub mod stream_writes;
