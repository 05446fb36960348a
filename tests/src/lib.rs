//! Tests that need more than one crate of the workspace: each folder beside this file is a test
//! binary or a program, and `vm/` has the scripts for the kernel guest.
//!
//! Shared here: [`interop`], both ends of a test of every operation; [`conformance`], the rules for
//! every device; [`raw`], the C verbs; [`soft`], two soft devices in one process; [`gpu`], the
//! cases of the GPU's kernels; [`program`], the common part of the programs in `src/bin`; and for
//! programs that run others [`process`], [`environment`], [`retry`], [`scratch`] and [`section`],
//! and [`built`].

pub mod attributes;
mod book;
mod built;
pub mod conformance;
pub mod environment;
pub mod gpu;
pub mod interop;
pub mod process;
pub mod program;
pub mod raw;
pub mod retry;
pub mod scratch;
pub mod section;
pub mod soft;

pub use built::built;
