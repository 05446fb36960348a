//! All raw accesses to registered memory: the copies between packets and the application's memory.
//!
//! The application may access the same bytes concurrently, as with DMA, and may unmap them. So
//! nothing here makes a reference to registered memory, or branches on what it reads there: each
//! access is made by a routine of [`fault`](super::fault), which the compiler can neither split nor
//! omit, and for which memory that is not mapped is an error. A byte that changes meanwhile is
//! never used as a bound or an address. The application may rely on the order of
//! [`to_peer_visible`].

use std::sync::atomic::{Ordering, fence};

use super::fault::{self, Fault};

pub(crate) use fault::{atomic, copy as unordered, probe};

/// How many bytes become visible last.
pub(crate) const WORD: usize = size_of::<u64>();

/// # Safety
/// `src` is a range of the application's memory as long as `dst`, without overlap.
pub(super) unsafe fn from(src: *const u8, dst: &mut [u8]) -> Result<(), Fault> {
    // SAFETY: `src` by contract; `dst` is unique.
    unsafe { unordered(src, dst.as_mut_ptr(), dst.len()) }
}

/// Copies so that the last eight bytes become visible last: an application that polls them finds
/// the rest. An aligned word is stored at once, otherwise its bytes in ascending order.
///
/// # Safety
/// `dst` is a range of the application's memory as long as `src`, without overlap.
pub(crate) unsafe fn to_peer_visible(src: &[u8], dst: *mut u8) -> Result<(), Fault> {
    let (head, tail) = src.split_at(src.len().saturating_sub(WORD));
    // Of a word there is none: no call.
    if !head.is_empty() {
        // SAFETY: `head` begins `src`, which is as long as the range of `dst`.
        unsafe { unordered(head.as_ptr(), dst, head.len())? };
    }
    // SAFETY: the tail follows the head within the same range.
    unsafe { tail_to_peer_visible(tail, dst.wrapping_add(head.len())) }
}

/// The second half of [`to_peer_visible`]: stores the last bytes, eight at most, after everything
/// that this thread has stored.
///
/// # Safety
/// As [`to_peer_visible`].
pub(crate) unsafe fn tail_to_peer_visible(tail: &[u8], end: *mut u8) -> Result<(), Fault> {
    // Orders the copies before the stores below.
    fence(Ordering::Release);
    match <[u8; WORD]>::try_from(tail) {
        // SAFETY: eight bytes of the range, aligned; concurrent accesses are polls of them.
        Ok(word) if end.addr().is_multiple_of(WORD) => unsafe { fault::store_word(end, u64::from_ne_bytes(word)) },
        // SAFETY: as many bytes of the range.
        _ => unsafe { fault::store_bytes(tail, end) },
    }
}

/// As [`to_peer_visible`], between registered memory and a peer's.
///
/// # Safety
/// `src` and `dst` are ranges of applications' memory of `len` bytes.
pub(crate) unsafe fn between(src: *const u8, dst: *mut u8, len: usize) -> Result<(), Fault> {
    let head = len.saturating_sub(WORD);
    let mut tail = [0; WORD];
    let tail = &mut tail[..len - head];
    // SAFETY: the first `head` bytes of both, the rest of `src` into bytes of our own, and these
    // into the rest of `dst`.
    unsafe {
        unordered(src, dst, head)?;
        from(src.wrapping_add(head), tail)?;
        tail_to_peer_visible(tail, dst.wrapping_add(head))
    }
}
