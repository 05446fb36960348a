//! Data layouts of the protocols LL and LL128: flags between the data, so that the receiver detects
//! the arrival of a WRITE without a completion.
//!
//! - **LL**: words of 8 bytes, 4 of data and then 4 of flag. A word is read atomically, so its data
//!   arrives with its flag, in whatever order words are written.
//! - **LL128**: lines of 128 bytes, 120 of data and then 8 of flag. The last line's flag is the
//!   last 8 bytes of the WRITE, which a device writes last; the others are checked after it.
//!
//! Slots are read by atomic loads, or by volatile vector loads where they are aligned to 16 bytes.
//! A peer that writes meanwhile, against the protocol, may cause torn data, on which nothing
//! relies. Flags and data are in host byte order, padding is unspecified. The caller ensures that
//! the previous content of a slot has no flags equal to the awaited ones.

#[cfg(all(target_arch = "x86_64", not(miri)))]
use core::arch::x86_64::*;
use core::sync::atomic::{AtomicU64, Ordering::Acquire, Ordering::Relaxed, Ordering::Release};

/// Bytes of a word of LL.
pub const LL_WORD: usize = 8;
/// Bytes of data in a word of LL.
pub const LL_DATA: usize = 4;
/// Bytes of a line of LL128.
pub const LL128_LINE: usize = 128;
/// Bytes of data in a line of LL128.
pub const LL128_DATA: usize = 120;

/// Bytes that `bytes` of data take in a slot of LL.
#[must_use]
pub const fn ll_bytes(bytes: usize) -> usize {
    bytes.div_ceil(LL_DATA) * LL_WORD
}

/// Bytes that `bytes` of data take in a slot of LL128.
#[must_use]
pub const fn ll128_bytes(bytes: usize) -> usize {
    bytes.div_ceil(LL128_DATA) * LL128_LINE
}

/// Packs `bytes` of data between flags; the receiver may poll meanwhile.
///
/// # Safety
/// `from` is valid for reads of `bytes`, at any alignment, and not written meanwhile; `slot` is
/// valid for writes of [`ll_bytes`] of them, aligned to 8 bytes and disjoint from `from`. It has no
/// other writer meanwhile, and is read only as [`try_unpack_ll`] does.
pub unsafe fn pack_ll(flag: u32, from: *const u8, bytes: usize, slot: *mut u8) {
    let (whole, rest) = (bytes / LL_DATA, bytes % LL_DATA);
    // SAFETY: the whole words are within `bytes` and in the slot, by contract.
    let first = unsafe { pack_vectors(flag, from, whole, slot) };
    let slot = slot.cast::<AtomicU64>();
    // SAFETY: a word of the slot, aligned by contract and accessed atomically.
    let put = |i: usize, data: u32| unsafe { (*slot.add(i)).store(ll_word(data, flag), Relaxed) };
    for i in first..whole {
        // SAFETY: the word is within `bytes`, by contract.
        put(i, unsafe { from.cast::<u32>().add(i).read_unaligned() });
    }
    if rest != 0 {
        let mut data = [0; LL_DATA];
        // SAFETY: `rest` bytes are left of `from`, and less than a word.
        unsafe { core::ptr::copy_nonoverlapping(from.add(whole * LL_DATA), data.as_mut_ptr(), rest) };
        put(whole, u32::from_ne_bytes(data));
    }
}

/// Packs some of the first `words` by vectors, where they are aligned. Returns how many.
///
/// # Safety
/// As [`pack_ll`], for that many words.
#[inline(always)]
unsafe fn pack_vectors(flag: u32, from: *const u8, words: usize, slot: *mut u8) -> usize {
    #[cfg(all(target_arch = "x86_64", not(miri)))]
    if slot.addr().is_multiple_of(16) {
        // Two words per register: each half is stored atomically.
        let slot = slot.cast::<__m128i>();
        // SAFETY: every processor of this architecture has these; four words from `i` on are within
        // `words`.
        unsafe {
            let flags = _mm_set1_epi32(flag.cast_signed());
            for i in 0..words / 4 {
                let data = _mm_loadu_si128(from.cast::<__m128i>().add(i));
                slot.add(2 * i).write_volatile(_mm_unpacklo_epi32(data, flags));
                slot.add(2 * i + 1).write_volatile(_mm_unpackhi_epi32(data, flags));
            }
        }
        return words / 4 * 4;
    }
    let _ = (flag, from, words, slot);
    0
}

/// Unpacks `bytes` of data if every word has the flag; else the content of `into` is unspecified.
///
/// # Safety
/// `slot` is valid for reads of [`ll_bytes`] of `bytes`, aligned to 8 bytes, and written meanwhile
/// only by a device or by atomic stores; `into` is valid for writes of `bytes`, at any alignment,
/// disjoint from the slot, and not accessed by others.
#[must_use]
pub unsafe fn try_unpack_ll(flag: u32, slot: *const u8, bytes: usize, into: *mut u8) -> bool {
    let (whole, rest) = (bytes / LL_DATA, bytes % LL_DATA);
    let slot = slot.cast::<AtomicU64>();
    // The last word usually arrives last, so polling it single suffices while waiting.
    let Some(last) = bytes.div_ceil(LL_DATA).checked_sub(1) else {
        return true;
    };
    // SAFETY: a word of the slot, aligned by contract and accessed atomically.
    let word = |i: usize| ll_parts(unsafe { (*slot.add(i)).load(Acquire) });
    let (data, seen) = word(last);
    if seen != flag {
        return false;
    }
    // SAFETY: the words before the rest's are in the slot, and their data within `bytes`, by
    // contract.
    let (first, mut differs) = unsafe { unpack_vectors(flag, slot.cast(), whole, into) };
    for i in first..whole {
        let (data, seen) = word(i);
        differs |= seen ^ flag;
        // SAFETY: the word is within `bytes`, by contract.
        unsafe { into.cast::<u32>().add(i).write_unaligned(data) };
    }
    if rest != 0 {
        // SAFETY: `rest` bytes are left of `into`, and less than a word.
        unsafe { core::ptr::copy_nonoverlapping(data.to_ne_bytes().as_ptr(), into.add(whole * LL_DATA), rest) };
    }
    differs == 0
}

/// Returns the number of words, and a value that is not zero if a flag was missing.
///
/// # Safety
/// As [`try_unpack_ll`], for that many words.
#[inline(always)]
unsafe fn unpack_vectors(flag: u32, slot: *const u8, words: usize, into: *mut u8) -> (usize, u32) {
    #[cfg(all(target_arch = "x86_64", not(miri)))]
    if slot.addr().is_multiple_of(16) {
        // Two words per register: each half is read atomically and has its own flag.
        let slot = slot.cast::<__m128i>();
        // SAFETY: every processor of this architecture has these; four words from `i` on are within
        // `words`.
        return unsafe {
            let flags = _mm_set1_epi32(flag.cast_signed());
            let mut differs = _mm_setzero_si128();
            let vectors = words / 4;
            for i in 0..vectors {
                let a = _mm_castsi128_ps(slot.add(2 * i).read_volatile());
                let b = _mm_castsi128_ps(slot.add(2 * i + 1).read_volatile());
                let data = _mm_castps_si128(_mm_shuffle_ps::<0b10_00_10_00>(a, b));
                let seen = _mm_castps_si128(_mm_shuffle_ps::<0b11_01_11_01>(a, b));
                differs = _mm_or_si128(differs, _mm_xor_si128(seen, flags));
                _mm_storeu_si128(into.cast::<__m128i>().add(i), data);
            }
            let equal = _mm_movemask_epi8(_mm_cmpeq_epi32(differs, _mm_setzero_si128()));
            (vectors * 4, u32::from(equal != 0xffff))
        };
    }
    let _ = (flag, slot, words, into);
    (0, 0)
}

#[inline(always)]
pub(crate) fn ll_word(data: u32, flag: u32) -> u64 {
    let ([a, b, c, d], [e, f, g, h]) = (data.to_ne_bytes(), flag.to_ne_bytes());
    u64::from_ne_bytes([a, b, c, d, e, f, g, h])
}

#[inline(always)]
pub(crate) fn ll_parts(word: u64) -> (u32, u32) {
    let [a, b, c, d, e, f, g, h] = word.to_ne_bytes();
    (u32::from_ne_bytes([a, b, c, d]), u32::from_ne_bytes([e, f, g, h]))
}

/// Packs `bytes` of data into lines; each flag is stored after its line's data.
///
/// # Safety
/// `from` is valid for reads of `bytes`, at any alignment, and not written meanwhile; `slot` is
/// valid for writes of [`ll128_bytes`] of them, aligned to 8 bytes and disjoint from `from`. It has
/// no other writer meanwhile, and is read only as [`try_unpack_ll128`] does: only the flag of a
/// line that has no flag yet.
pub unsafe fn pack_ll128(flag: u64, from: *const u8, bytes: usize, slot: *mut u8) {
    // SAFETY: `len` bytes of the line's data are left of `from`, and the slot has a line for them,
    // aligned by contract.
    let pack = |line: usize, len: usize| unsafe {
        let slot = slot.add(line * LL128_LINE);
        core::ptr::copy_nonoverlapping(from.add(line * LL128_DATA), slot, len);
        (*slot.add(LL128_DATA).cast::<AtomicU64>()).store(flag, Release);
    };
    let (whole, rest) = (bytes / LL128_DATA, bytes % LL128_DATA);
    for line in 0..whole {
        pack(line, LL128_DATA);
    }
    if rest != 0 {
        pack(whole, rest);
    }
}

/// Unpacks `bytes` of data if every line has the flag; else the content of `into` is unspecified.
///
/// # Safety
/// As [`try_unpack_ll`], with [`ll128_bytes`] of the slot.
#[must_use]
pub unsafe fn try_unpack_ll128(flag: u64, slot: *const u8, bytes: usize, into: *mut u8) -> bool {
    let lines = bytes.div_ceil(LL128_DATA);
    // SAFETY: the flag of a line of the slot, aligned by contract and accessed atomically.
    let there =
        |line: usize| unsafe { (*slot.add(line * LL128_LINE + LL128_DATA).cast::<AtomicU64>()).load(Acquire) } == flag;
    // The last flag is written last, so polling it single suffices while waiting.
    if lines == 0 {
        return true;
    }
    if !there(lines - 1) {
        return false;
    }
    let whole = bytes / LL128_DATA;
    for line in 0..whole {
        if !there(line) {
            return false;
        }
        // SAFETY: the data of a line of the slot, aligned by contract, and as much that is left of
        // `into`.
        unsafe { load_line(slot.add(line * LL128_LINE), into.add(line * LL128_DATA)) };
    }
    // SAFETY: the rest, in the last line, whose flag was checked; or nothing.
    unsafe {
        load(
            slot.add(whole * LL128_LINE),
            into.add(whole * LL128_DATA),
            bytes % LL128_DATA,
        )
    };
    true
}

/// # Safety
/// As [`load`], with [`LL128_DATA`] bytes.
#[inline(always)]
unsafe fn load_line(from: *const u8, into: *mut u8) {
    #[cfg(all(target_arch = "x86_64", not(miri)))]
    if from.addr().is_multiple_of(16) {
        for i in 0..LL128_DATA / 16 {
            // SAFETY: within the line, by contract, and aligned.
            unsafe {
                _mm_storeu_si128(
                    into.cast::<__m128i>().add(i),
                    from.cast::<__m128i>().add(i).read_volatile(),
                )
            };
        }
        const DONE: usize = LL128_DATA / 16 * 16;
        // SAFETY: the rest of the line.
        return unsafe { load(from.add(DONE), into.add(DONE), LL128_DATA - DONE) };
    }
    // SAFETY: the caller's contract is the same.
    unsafe { load(from, into, LL128_DATA) };
}

/// # Safety
/// `from` is aligned to 8 bytes, valid for reads of `bytes` rounded up to 8, and only written by a
/// device or atomically; `into` is valid for writes of `bytes` and not accessed by others.
#[inline(always)]
unsafe fn load(from: *const u8, into: *mut u8, bytes: usize) {
    let (whole, rest) = (bytes / 8, bytes % 8);
    for i in 0..whole {
        // SAFETY: within `bytes`, by contract.
        unsafe {
            into.cast::<u64>()
                .add(i)
                .write_unaligned((*from.cast::<AtomicU64>().add(i)).load(Relaxed))
        };
    }
    if rest != 0 {
        // SAFETY: the word's first `rest` bytes are within `bytes`, all of it within `bytes`
        // rounded up.
        unsafe {
            let word = (*from.cast::<AtomicU64>().add(whole)).load(Relaxed).to_ne_bytes();
            core::ptr::copy_nonoverlapping(word.as_ptr(), into.add(whole * 8), rest);
        }
    }
}
