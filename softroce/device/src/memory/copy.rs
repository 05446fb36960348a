//! All raw accesses to registered memory: the copies between packets and the application's memory.
//!
//! The application may access the same bytes concurrently, as with DMA. So nothing here makes a
//! reference to registered memory, branches on what it reads there, or reads a byte twice: a copy
//! is one memcpy between raw pointers, which the compiler can neither split nor omit (its other
//! side goes to the socket, or to the region's owner). A byte that changes meanwhile is never used
//! as a bound or an address. The language's memory model gives such a race no meaning; the
//! application may rely on the order of [`to_peer_visible`].

use std::ptr;
use std::sync::atomic::{AtomicU8, AtomicU64, Ordering, fence};

use doorbell_roce_proto::memory::AtomicOp;

/// How many bytes become visible last.
pub(crate) const WORD: usize = size_of::<u64>();

/// # Safety
/// `src` is readable for the length of `dst` without overlap; it may be written concurrently.
pub(super) unsafe fn from(src: *const u8, dst: &mut [u8]) {
    // SAFETY: `src` is readable for that length and does not overlap by contract; `dst` is unique.
    unsafe { ptr::copy_nonoverlapping(src, dst.as_mut_ptr(), dst.len()) }
}

/// Copies so that the last eight bytes become visible last: an application that polls them finds
/// the rest. An aligned word is stored at once, otherwise its bytes in ascending order.
///
/// # Safety
/// `dst` is writable for the length of `src` without overlap; it may be accessed concurrently.
pub(crate) unsafe fn to_peer_visible(src: &[u8], dst: *mut u8) {
    let (head, tail) = src.split_at(src.len().saturating_sub(WORD));
    // Of a word there is none: no call.
    if !head.is_empty() {
        // SAFETY: `head` begins `src`, for all of which `dst` is writable without overlap.
        unsafe { ptr::copy_nonoverlapping(head.as_ptr(), dst, head.len()) };
    }
    // SAFETY: the tail follows the head within the same range.
    unsafe { tail_to_peer_visible(tail, dst.add(head.len())) };
}

/// The second half of [`to_peer_visible`]: stores the last bytes, eight at most, after everything
/// that this thread has stored.
///
/// # Safety
/// As [`to_peer_visible`].
pub(crate) unsafe fn tail_to_peer_visible(tail: &[u8], end: *mut u8) {
    // Orders the copies before the atomic stores below.
    fence(Ordering::Release);
    let aligned = end.addr().is_multiple_of(WORD);
    match <[u8; WORD]>::try_from(tail) {
        Ok(word) if aligned => {
            // SAFETY: eight writable bytes, aligned; concurrent accesses are polls of them.
            unsafe { AtomicU64::from_ptr(end.cast()) }.store(u64::from_ne_bytes(word), Ordering::Release);
        }
        _ => {
            for (index, byte) in tail.iter().enumerate() {
                // SAFETY: `index` is below the length of the tail; a byte needs no alignment.
                unsafe { AtomicU8::from_ptr(end.add(index)) }.store(*byte, Ordering::Release);
            }
        }
    }
}

/// As [`to_peer_visible`], between registered memory and a peer's.
///
/// # Safety
/// `src` is readable and `dst` writable for `len` bytes; both may be accessed concurrently.
pub(crate) unsafe fn between(src: *const u8, dst: *mut u8, len: usize) {
    let head = len.saturating_sub(WORD);
    let mut tail = [0; WORD];
    let tail = &mut tail[..len - head];
    // SAFETY: the first `head` bytes of both; `copy` as one may be a mapping of the other.
    unsafe { ptr::copy(src, dst, head) };
    // SAFETY: the rest of `src`, into bytes of our own.
    unsafe { from(src.add(head), tail) };
    // SAFETY: the rest of `dst`.
    unsafe { tail_to_peer_visible(tail, dst.add(head)) };
}

/// Performs an atomic and returns the previous word, in host order.
///
/// # Safety
/// `word` is readable and writable for 8 bytes, and aligned to them.
pub(crate) unsafe fn atomic(word: *mut u8, op: AtomicOp) -> u64 {
    // SAFETY: readable, writable and aligned by contract.
    let word = unsafe { AtomicU64::from_ptr(word.cast()) };
    match op {
        AtomicOp::FetchAdd { add } => word.fetch_add(add, Ordering::AcqRel),
        AtomicOp::CompareSwap { compare, swap } => word
            .compare_exchange(compare, swap, Ordering::AcqRel, Ordering::Acquire)
            .unwrap_or_else(|before| before),
    }
}
