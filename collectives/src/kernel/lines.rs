//! The layouts of the protocols LL and LL128: data between flags, so that what a WRITE brings can be told to be there without a completion.
//!
//! - **LL**: words of 8 bytes, 4 of data and then 4 of flag. A word is read as one, so its data came with its flag, in whatever order words are written.
//! - **LL128**: lines of 128 bytes, 120 of data and then 8 of flag. The last line's flag is the last 8 bytes of the WRITE, which a device writes last; the others are checked after it.
//!
//! Flags and data are in the machine's byte order. The last word's or line's data is filled up with what is not specified. What a slot held before must not have flags equal to those of what is awaited: that is the caller's to see to.

use core::sync::atomic::{AtomicU64, Ordering::Acquire, Ordering::Relaxed};

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

/// Lays `bytes` of data out between flags.
///
/// # Safety
/// `from` can be read for `bytes`, at any alignment; `slot` can be written for [`ll_bytes`] of them, is aligned to 8 bytes and does not overlap `from`. Nobody else touches them meanwhile.
pub unsafe fn pack_ll(flag: u32, from: *const u8, bytes: usize, slot: *mut u8) {
    let (whole, rest) = (bytes / LL_DATA, bytes % LL_DATA);
    let slot = slot.cast::<[u32; 2]>();
    for i in 0..whole {
        // SAFETY: the word is within `bytes` and so in the slot, by contract.
        unsafe { slot.add(i).write([from.cast::<u32>().add(i).read_unaligned(), flag]) };
    }
    if rest != 0 {
        let mut data = [0; LL_DATA];
        // SAFETY: `rest` bytes are left of `from`, and less than a word; the slot has a word for them.
        unsafe {
            core::ptr::copy_nonoverlapping(from.add(whole * LL_DATA), data.as_mut_ptr(), rest);
            slot.add(whole).write([u32::from_ne_bytes(data), flag]);
        }
    }
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
    let mut differs = 0;
    for i in 0..whole {
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

/// The data and the flag of a word.
#[inline(always)]
fn split(word: u64) -> (u32, u32) {
    let [a, b, c, d, e, f, g, h] = word.to_ne_bytes();
    (u32::from_ne_bytes([a, b, c, d]), u32::from_ne_bytes([e, f, g, h]))
}

/// Lays `bytes` of data out in lines, each with the flag at its end.
///
/// # Safety
/// `from` can be read for `bytes`, at any alignment; `slot` can be written for [`ll128_bytes`] of them, is aligned to 8 bytes and does not overlap `from`. Nobody else touches them meanwhile.
pub unsafe fn pack_ll128(flag: u64, from: *const u8, bytes: usize, slot: *mut u8) {
    let mut left = bytes;
    let (mut from, mut line) = (from, slot);
    while left > 0 {
        let data = left.min(LL128_DATA);
        // SAFETY: `data` bytes are left of `from`, and the slot has a line for them, aligned by contract.
        unsafe {
            core::ptr::copy_nonoverlapping(from, line, data);
            line.add(LL128_DATA).cast::<u64>().write(flag);
            from = from.add(data);
            line = line.add(LL128_LINE);
        }
        left -= data;
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
    for line in 0..lines {
        if !there(line) {
            return false;
        }
        let data = LL128_DATA.min(bytes - line * LL128_DATA);
        // SAFETY: `data` bytes of a line of the slot, aligned by contract, and as many that are left of `into`.
        unsafe { load(slot.add(line * LL128_LINE), into.add(line * LL128_DATA), data) };
    }
    true
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
