//! The library as programs in C use it: its symbols, and clients on the CUDA stand-in whose ranks
//! are processes.

mod clients;
mod symbols;
mod vllm;

use std::path::PathBuf;

/// The library, which cargo has built for this test.
fn library() -> PathBuf {
    let test = std::env::current_exe().expect("the path of this program");
    test.with_file_name("libdoorbell_nccl.so")
}
