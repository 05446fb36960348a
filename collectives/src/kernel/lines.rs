//! The layouts of the protocols LL and LL128: data between flags, so that what a WRITE brings can be told to be there without a completion.
//!
//! - **LL**: words of 8 bytes, 4 of data and then 4 of flag. A word is read as one, so its data came with its flag, in whatever order words are written.
//! - **LL128**: lines of 128 bytes, 120 of data and then 8 of flag. The last line's flag is the last 8 bytes of the WRITE, which a device writes last; the others are checked after it.
//!
//! Slots are read by atomic loads, and by volatile ones of vectors where they are aligned to 16 bytes: what a peer writes meanwhile, against the protocol, may be torn, but is nothing that is relied on.
//!
//! Flags and data are in the machine's byte order. The last word's or line's data is filled up with what is not specified. What a slot held before must not have flags equal to those of what is awaited: that is the caller's to see to.

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

/// Lays `bytes` of data out between flags. Words are stored whole, so that who waits for them may look meanwhile.
///
/// # Safety
/// `from` can be read for `bytes`, at any alignment, and nobody writes it meanwhile; `slot` can be written for [`ll_bytes`] of them, is aligned to 8 bytes and does not overlap `from`. Nobody else writes it meanwhile, and whoever reads it does so as [`try_unpack_ll`].
pub unsafe fn pack_ll(flag: u32, from: *const u8, bytes: usize, slot: *mut u8) {
    let (whole, rest) = (bytes / LL_DATA, bytes % LL_DATA);
    // SAFETY: the whole words are within `bytes` and in the slot, by contract.
    let first = unsafe { pack_vectors(flag, from, whole, slot) };
    let slot = slot.cast::<AtomicU64>();
    // SAFETY: a word of the slot, aligned by contract and accessed atomically.
    let put = |i: usize, data: u32| unsafe { (*slot.add(i)).store(join(data, flag), Relaxed) };
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

/// Lays some of the first `words` out by vectors, where they are aligned: how many.
///
/// # Safety
/// As [`pack_ll`], for that many words.
#[inline(always)]
unsafe fn pack_vectors(flag: u32, from: *const u8, words: usize, slot: *mut u8) -> usize {
    #[cfg(all(target_arch = "x86_64", not(miri)))]
    if slot.addr().is_multiple_of(16) {
        // Two words in a register: each half is stored as one.
        let slot = slot.cast::<__m128i>();
        // SAFETY: every processor of this architecture has these; four words from `i` on are within `words`.
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

/// Takes `bytes` of data out of a slot, if all of it is there: if every word has the flag. Else what is at `into` is not specified.
///
/// # Safety
/// `slot` can be read for [`ll_bytes`] of `bytes`, is aligned to 8 bytes, and whoever writes it meanwhile does so by device or by atomic stores; `into` can be written for `bytes`, at any alignment, does not overlap the slot, and nobody else touches it.
#[must_use]
pub unsafe fn try_unpack_ll(flag: u32, slot: *const u8, bytes: usize, into: *mut u8) -> bool {
    let (whole, rest) = (bytes / LL_DATA, bytes % LL_DATA);
    let slot = slot.cast::<AtomicU64>();
    // The last word comes last as a rule: while it is not there, one look is all that waiting costs.
    let Some(last) = bytes.div_ceil(LL_DATA).checked_sub(1) else {
        return true;
    };
    // SAFETY: a word of the slot, aligned by contract and accessed atomically.
    let word = |i: usize| split(unsafe { (*slot.add(i)).load(Acquire) });
    let (data, seen) = word(last);
    if seen != flag {
        return false;
    }
    // SAFETY: the words before the rest's are in the slot, and their data within `bytes`, by contract.
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

/// Takes the data out of some of the first `words` by vectors, where they are aligned: how many, and what is not zero if a flag was not there.
///
/// # Safety
/// As [`try_unpack_ll`], for that many words.
#[inline(always)]
unsafe fn unpack_vectors(flag: u32, slot: *const u8, words: usize, into: *mut u8) -> (usize, u32) {
    #[cfg(all(target_arch = "x86_64", not(miri)))]
    if slot.addr().is_multiple_of(16) {
        // Two words in a register: each half is read as one, and has its own flag.
        let slot = slot.cast::<__m128i>();
        // SAFETY: every processor of this architecture has these; four words from `i` on are within `words`.
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

/// A word of data and flag.
#[inline(always)]
fn join(data: u32, flag: u32) -> u64 {
    let ([a, b, c, d], [e, f, g, h]) = (data.to_ne_bytes(), flag.to_ne_bytes());
    u64::from_ne_bytes([a, b, c, d, e, f, g, h])
}

/// The data and the flag of a word.
#[inline(always)]
fn split(word: u64) -> (u32, u32) {
    let [a, b, c, d, e, f, g, h] = word.to_ne_bytes();
    (u32::from_ne_bytes([a, b, c, d]), u32::from_ne_bytes([e, f, g, h]))
}

/// Lays `bytes` of data out in lines, each with the flag at its end, which is stored behind the line's data.
///
/// # Safety
/// `from` can be read for `bytes`, at any alignment, and nobody writes it meanwhile; `slot` can be written for [`ll128_bytes`] of them, is aligned to 8 bytes and does not overlap `from`. Nobody else writes it meanwhile, and whoever reads it does so as [`try_unpack_ll128`], of a line
/// that does not have the flag yet the flag alone.
pub unsafe fn pack_ll128(flag: u64, from: *const u8, bytes: usize, slot: *mut u8) {
    // SAFETY: `len` bytes of the line's data are left of `from`, and the slot has a line for them, aligned by contract.
    let pack = |line: usize, len: usize| unsafe {
        let slot = slot.add(line * LL128_LINE);
        core::ptr::copy_nonoverlapping(from.add(line * LL128_DATA), slot, len);
        (*slot.add(LL128_DATA).cast::<AtomicU64>()).store(flag, Release);
    };
    let (whole, rest) = (bytes / LL128_DATA, bytes % LL128_DATA);
    // Here the length is a constant, and the copy a few moves.
    for line in 0..whole {
        pack(line, LL128_DATA);
    }
    if rest != 0 {
        pack(whole, rest);
    }
}

/// Takes `bytes` of data out of a slot's lines, if all of it is there: if every line has the flag. Else what is at `into` is not specified.
///
/// # Safety
/// As [`try_unpack_ll`], with [`ll128_bytes`] of the slot.
#[must_use]
pub unsafe fn try_unpack_ll128(flag: u64, slot: *const u8, bytes: usize, into: *mut u8) -> bool {
    let lines = bytes.div_ceil(LL128_DATA);
    // SAFETY: the flag of a line of the slot, aligned by contract and accessed atomically.
    let there =
        |line: usize| unsafe { (*slot.add(line * LL128_LINE + LL128_DATA).cast::<AtomicU64>()).load(Acquire) } == flag;
    // The last flag is written last: while it is not there, one look is all that waiting costs.
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
        // SAFETY: the data of a line of the slot, aligned by contract, and as much that is left of `into`.
        unsafe { load_line(slot.add(line * LL128_LINE), into.add(line * LL128_DATA)) };
    }
    // SAFETY: the rest, in the last line, whose flag was looked at; or nothing.
    unsafe {
        load(
            slot.add(whole * LL128_LINE),
            into.add(whole * LL128_DATA),
            bytes % LL128_DATA,
        )
    };
    true
}

/// Copies a whole line's data: by vectors where they are aligned.
///
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
        // SAFETY: what is left.
        return unsafe { load(from.add(DONE), into.add(DONE), LL128_DATA - DONE) };
    }
    // SAFETY: the caller's contract is the same.
    unsafe { load(from, into, LL128_DATA) };
}

/// Copies out of a line.
///
/// # Safety
/// `from` is aligned to 8 bytes, can be read for `bytes` rounded up to 8, and is only written by device or atomically; `into` can be written for `bytes` and nobody else touches it.
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
        // SAFETY: the word's first `rest` bytes are within `bytes`, all of it within `bytes` rounded up.
        unsafe {
            let word = (*from.cast::<AtomicU64>().add(whole)).load(Relaxed).to_ne_bytes();
            core::ptr::copy_nonoverlapping(word.as_ptr(), into.add(whole * 8), rest);
        }
    }
}
