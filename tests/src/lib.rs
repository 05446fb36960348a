//! Tests that need more than one crate of the workspace. Each folder beside this file is one test
//! binary:
//!
//! - `abi/`: the bindings of verbs-sys against the C headers, the system's library and `rdma-sys`.
//! - `sim/`: the protocol engine on a simulated network with a virtual clock: lossy conversations,
//!   throughput, hostile input.
//! - `errors/`: the messages of the most common failures.
//! - `transports/`: UC, UD and the SQ-drained state by the safe API.
//! - `dropin/`: `doorbell run` and the drop-in libraries.
//! - `conformance/`: the conformance suite on the soft device; and interop of two processes over
//!   real sockets.
//! - `gpu/`: the GPU's reduction kernels, compiled for the host; and the program `gpu-reduce`,
//!   which runs and measures them on a GPU.
//! - the programs `stock` and `pairings`: stock programs on the drop-in libraries, and the classic
//!   tools paired with the C tools.
//! - `vm/`: scripts for the kernel guest: the soft device against the kernel's rxe and stock
//!   programs.
//!
//! Shared here: [`interop`], both ends of a test of every operation; [`conformance`], the suite of
//! rules for every device; [`raw`], the C verbs; [`soft`], two soft devices in one process;
//! [`gpu`], the test cases of the reduction kernels; [`program`], the common part of the programs
//! in `src/bin`; and for programs that run other programs [`process`], [`environment`], [`retry`]
//! and [`section`], which edits their reports.

pub mod attributes;
mod book;
pub mod conformance;
pub mod environment;
pub mod gpu;
pub mod interop;
pub mod process;
pub mod program;
pub mod raw;
pub mod retry;
pub mod section;
pub mod soft;
