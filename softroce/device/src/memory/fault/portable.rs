//! The routines where there are none in assembly: a fault is a signal.

use std::ptr;
use std::sync::atomic::{AtomicU8, AtomicU64, Ordering};

pub(in crate::memory) fn install() {}

/// # Safety
/// Both ranges are mapped and permit the access.
pub(super) unsafe fn copy(dst: *mut u8, src: *const u8, len: usize) -> u32 {
    // SAFETY: the same contract.
    unsafe { ptr::copy(src, dst, len) };
    0
}

/// # Safety
/// Mapped, writable and aligned.
pub(super) unsafe fn store_word(word: *mut u8, value: u64) -> u32 {
    // SAFETY: the same contract.
    unsafe { AtomicU64::from_ptr(word.cast()) }.store(value, Ordering::Release);
    0
}

/// # Safety
/// As [`copy`].
pub(super) unsafe fn store_bytes(dst: *mut u8, src: *const u8, len: usize) -> u32 {
    for index in 0..len {
        // SAFETY: within the ranges; a byte needs no alignment.
        unsafe { AtomicU8::from_ptr(dst.add(index)).store(*src.add(index), Ordering::Release) };
    }
    0
}

/// # Safety
/// As [`store_word`].
pub(super) unsafe fn fetch_add(word: *mut u8, add: u64, before: &mut u64) -> u32 {
    // SAFETY: the same contract.
    *before = unsafe { AtomicU64::from_ptr(word.cast()) }.fetch_add(add, Ordering::AcqRel);
    0
}

/// # Safety
/// As [`store_word`].
pub(super) unsafe fn compare_swap(word: *mut u8, compare: u64, swap: u64, before: &mut u64) -> u32 {
    // SAFETY: the same contract.
    let word = unsafe { AtomicU64::from_ptr(word.cast()) };
    *before = word
        .compare_exchange(compare, swap, Ordering::AcqRel, Ordering::Acquire)
        .unwrap_or_else(|before| before);
    0
}

/// # Safety
/// None: it reads nothing.
pub(super) unsafe fn probe(_first: *const u8, _last: *const u8) -> u32 {
    0
}
