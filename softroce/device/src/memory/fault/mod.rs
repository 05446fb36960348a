//! Accesses to memory that may not be mapped: a fault is an error, and no signal (decision 072).
//!
//! The application may unmap registered memory, or truncate its file, at any time. So every access
//! is made by a routine in assembly, whose instructions have addresses that a handler of SIGSEGV
//! and SIGBUS recognizes: it continues at `resume`, which returns 1, as the kernel's exception
//! table does for copies from user space. A routine has no stack frame, calls nothing and holds
//! nothing, so that it can be left at any instruction. Every other fault goes to the handler that
//! was installed before (`handler`).
//!
//! On processors without routines, and under Miri, such a fault is a signal.

#[cfg(all(target_arch = "aarch64", not(miri)))]
#[path = "aarch64.rs"]
mod arch;
#[cfg(any(miri, not(any(target_arch = "x86_64", target_arch = "aarch64"))))]
#[path = "portable.rs"]
mod arch;
#[cfg(all(target_arch = "x86_64", not(miri)))]
#[path = "x86_64.rs"]
mod arch;
#[cfg(all(any(target_arch = "x86_64", target_arch = "aarch64"), not(miri)))]
mod handler;
#[cfg(all(any(target_arch = "x86_64", target_arch = "aarch64"), not(miri)))]
mod routines;

use doorbell_roce_proto::memory::{AccessError, AtomicOp};

pub(super) use arch::install;

/// The memory is not mapped, or does not permit the access. Part of a copy may have been made.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct Fault;

impl From<Fault> for AccessError {
    fn from(Fault: Fault) -> Self {
        Self
    }
}

fn result(fault: u32) -> Result<(), Fault> {
    if fault == 0 { Ok(()) } else { Err(Fault) }
}

/// Copies bytes in any order. Where the ranges overlap the result is unspecified.
///
/// # Safety
/// Both ranges are memory that the caller may access, or not mapped; no reference covers them.
#[inline]
pub(crate) unsafe fn copy(src: *const u8, dst: *mut u8, len: usize) -> Result<(), Fault> {
    // SAFETY: the routine accesses these ranges alone; faults are handled.
    result(unsafe { arch::copy(dst, src, len) })
}

/// Stores a word at once, after everything that this thread has stored.
///
/// # Safety
/// As [`copy`]; `word` is aligned.
#[inline]
pub(super) unsafe fn store_word(word: *mut u8, value: u64) -> Result<(), Fault> {
    // SAFETY: as in `copy`.
    result(unsafe { arch::store_word(word, value) })
}

/// Stores bytes one by one in ascending order.
///
/// # Safety
/// As [`copy`].
pub(super) unsafe fn store_bytes(src: &[u8], dst: *mut u8) -> Result<(), Fault> {
    // SAFETY: as in `copy`.
    result(unsafe { arch::store_bytes(dst, src.as_ptr(), src.len()) })
}

/// Performs an atomic and returns the previous word.
///
/// # Safety
/// As [`copy`]; `word` is aligned.
pub(crate) unsafe fn atomic(word: *mut u8, op: AtomicOp) -> Result<u64, Fault> {
    let mut before = 0;
    // SAFETY: as in `copy`; the routine stores the previous word to `before`.
    let fault = unsafe {
        match op {
            AtomicOp::FetchAdd { add } => arch::fetch_add(word, add, &mut before),
            AtomicOp::CompareSwap { compare, swap } => arch::compare_swap(word, compare, swap, &mut before),
        }
    };
    result(fault).map(|()| before)
}

/// Reads a byte of every page of a range that is not empty.
///
/// # Safety
/// As [`copy`].
pub(crate) unsafe fn probe(start: *const u8, len: usize) -> Result<(), Fault> {
    // SAFETY: as in `copy`; the range does not wrap around, as one byte after it is an address.
    result(unsafe { arch::probe(start, start.wrapping_add(len - 1)) })
}

#[cfg(test)]
mod tests;
