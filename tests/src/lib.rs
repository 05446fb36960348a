//! Tests that need more than one crate of the workspace. They live in folders beside this file, one test binary each:
//!
//! - `abi/`: the bindings of verbs-sys against the C headers, the system's library and `rdma-sys`.
//! - `sim/`: the protocol engine on a simulated network with a virtual clock: lossy conversations, throughput, hostile input.
//! - `conformance/`: two processes on the soft device, over real sockets.
//! - `transports/`: UC, UD and the drained state by the safe API.
//! - `vm/`: scripts for the kernel guest: the soft device against the kernel's rxe and stock programs.
//!
//! Here is what several of them use: [`interop`], both ends of a conversation of every operation, and [`raw`], the verbs as C calls them.

pub mod interop;
pub mod raw;
