//! Tests that need more than one crate of the workspace. They live in folders beside this file, one test binary each:
//!
//! - `abi/`: the bindings of verbs-sys against the C headers, the system's library and `rdma-sys`.
//! - `sim/`: the protocol engine on a simulated network with a virtual clock: lossy conversations, throughput, hostile input.
//! - `errors/`: what new users are told of their commonest failures.
//! - `transports/`: UC, UD and the drained state by the safe API.
//! - `dropin/`: `doorbell run` and the libraries that it puts under programs.
//! - `conformance/`: the conformance suite on the soft device; and two processes, over real sockets.
//! - `gpu/`: the GPU's reduction kernels, compiled for the processor; and the program `gpu-reduce`, which runs and measures them on a GPU.
//! - the programs `stock` and `pairings`: stock programs on the drop-in libraries, and the classic tools beside those that they stand for.
//! - `vm/`: scripts for the kernel guest: the soft device against the kernel's rxe and stock programs.
//!
//! Here is what several of them use: [`interop`], both ends of a conversation of every operation; [`conformance`], the suite of rules that every device is held to; [`raw`], the
//! verbs as C calls them; [`gpu`], the cases of the reduction kernels; [`program`], what the programs of `src/bin` have in common; and for programs that are run as users run them [`process`], [`surroundings`] and
//! [`section`], where what they came to is written.

pub mod book;
pub mod conformance;
pub mod gpu;
pub mod interop;
pub mod process;
pub mod program;
pub mod raw;
pub mod second;
pub mod section;
pub mod surroundings;
