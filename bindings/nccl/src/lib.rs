//! `libnccl.so.2`: NCCL's C API over `doorbell-collectives` on GPU memory (decision 106).
//!
//! The library exports every function of NCCL 2.32.3, and nothing else. What it does not do yet
//! returns `ncclInvalidUsage`, with a sentence in `ncclGetLastError`; it never calls another NCCL.
//!
//! - `exports`: the functions by name, from which the symbols follow.
//! - `abi`: NCCL's types; `failure`: results, texts, and the boundary that no panic crosses.
//! - `unique_id`: the rendezvous of `ncclGetUniqueId`; `communicator` and `handles`: communicators,
//!   their initialisation in threads, and their end; `derivation`: those made of others.
//! - `group`: groups per thread; `operations` and `reduction`: what is enqueued by them; `memory`:
//!   what `ncclMemAlloc` allocates; `window`: what all ranks register.

mod abi;
mod communicator;
mod derivation;
mod exports;
mod failure;
mod group;
mod handles;
mod memory;
mod operations;
mod reduction;
mod unique_id;
mod window;
