//! Tests that need more than one crate of the workspace. They live in folders beside this file, one test binary each:
//!
//! - `abi/`: the bindings of verbs-sys against the C headers, the system's library and `rdma-sys`.
//! - `sim/`: the protocol engine on a simulated network with a virtual clock: lossy conversations, throughput, hostile input.
