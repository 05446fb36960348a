//! No descriptor by which safe code could change bytes behind a reference to them.
use std::os::fd::BorrowedFd;

use doorbell_verbs::Memory;

fn misuse(memory: &Memory) -> (&[u8], Option<BorrowedFd<'_>>) {
    (&memory[..], memory.file())
}

fn main() {}
