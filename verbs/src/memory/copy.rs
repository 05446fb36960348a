//! Copies to and from memory that a device may touch meanwhile, by relaxed atomics of eight bytes
//! where the shared side is aligned. Each byte is read once; concurrent writes may tear.
//!
//! Device accesses are DMA, outside the language's memory model; the soft device's are raw copies,
//! without references. Threads of this process do not race here: stores need `&mut`.

use core::sync::atomic::{AtomicU8, AtomicU64, Ordering::Relaxed};

const WORD: usize = size_of::<u64>();

/// The number of bytes before the first word boundary, at most `len`.
fn head(at: *const u8, len: usize) -> usize {
    at.align_offset(WORD).min(len)
}

/// # Safety
/// `from` is valid for `into.len()` bytes, meanwhile accessed only atomically, or not written.
pub(super) unsafe fn load(from: *mut u8, into: &mut [u8]) {
    let (first, rest) = into.split_at_mut(head(from, into.len()));
    let (words, last) = rest.as_chunks_mut::<WORD>();
    let mut at = from;
    // SAFETY (all below): `at` advances by what was copied, so it stays in the range valid by
    // contract; it is at a word boundary for the words.
    for byte in first {
        // SAFETY: see above.
        *byte = unsafe { (*at.cast::<AtomicU8>()).load(Relaxed) };
        at = at.wrapping_add(1);
    }
    for word in words {
        // SAFETY: see above.
        *word = unsafe { (*at.cast::<AtomicU64>()).load(Relaxed) }.to_ne_bytes();
        at = at.wrapping_add(WORD);
    }
    for byte in last {
        // SAFETY: see above.
        *byte = unsafe { (*at.cast::<AtomicU8>()).load(Relaxed) };
        at = at.wrapping_add(1);
    }
}

/// # Safety
/// `into` is valid for `from.len()` bytes, which are only accessed atomically meanwhile.
pub(super) unsafe fn store(into: *mut u8, from: &[u8]) {
    let (first, rest) = from.split_at(head(into, from.len()));
    let (words, last) = rest.as_chunks::<WORD>();
    let mut at = into;
    // SAFETY (all below): as in `load`.
    for &byte in first {
        // SAFETY: see above.
        unsafe { (*at.cast::<AtomicU8>()).store(byte, Relaxed) };
        at = at.wrapping_add(1);
    }
    for &word in words {
        // SAFETY: see above.
        unsafe { (*at.cast::<AtomicU64>()).store(u64::from_ne_bytes(word), Relaxed) };
        at = at.wrapping_add(WORD);
    }
    for &byte in last {
        // SAFETY: see above.
        unsafe { (*at.cast::<AtomicU8>()).store(byte, Relaxed) };
        at = at.wrapping_add(1);
    }
}

/// # Safety
/// `into` is valid for `len` bytes, which are only accessed atomically meanwhile.
pub(super) unsafe fn fill(into: *mut u8, len: usize, byte: u8) {
    let pattern = [byte; 512];
    let mut done = 0;
    while done < len {
        let step = pattern.len().min(len - done);
        // SAFETY: `done + step` is at most `len`.
        unsafe { store(into.wrapping_add(done), &pattern[..step]) };
        done += step;
    }
}
