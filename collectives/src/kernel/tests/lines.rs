//! Slots of LL and LL128: packed data is unpacked unchanged, and incomplete slots are not unpacked.

use super::{Memory, Random};
use crate::kernel::lines::{
    LL_WORD, LL128_DATA, LL128_LINE, ll_bytes, ll128_bytes, pack_ll, pack_ll128, try_unpack_ll, try_unpack_ll128,
};

fn lengths() -> impl Iterator<Item = usize> {
    (0..=if cfg!(miri) { 9 } else { 260 })
        .chain([LL128_DATA - 1, LL128_DATA, LL128_DATA + 1])
        .chain(if cfg!(miri) { 200..202 } else { 4090..4100 })
}

struct Layout {
    slot_bytes: fn(usize) -> usize,
    pack: unsafe fn(u64, *const u8, usize, *mut u8),
    try_unpack: unsafe fn(u64, *const u8, usize, *mut u8) -> bool,
    every: usize,
    flag: usize,
}

const LL: Layout = Layout {
    slot_bytes: ll_bytes,
    // SAFETY: the contracts are the same.
    pack: |flag, from, bytes, slot| unsafe { pack_ll(flag as u32, from, bytes, slot) },
    // SAFETY: the contracts are the same.
    try_unpack: |flag, slot, bytes, into| unsafe { try_unpack_ll(flag as u32, slot, bytes, into) },
    every: LL_WORD,
    flag: 4,
};

const LL128: Layout = Layout {
    slot_bytes: ll128_bytes,
    pack: pack_ll128,
    try_unpack: try_unpack_ll128,
    every: LL128_LINE,
    flag: LL128_DATA,
};

impl Layout {
    fn round_trips(&self) {
        let mut random = Random::new(9);
        for bytes in lengths() {
            let data: Vec<u8> = (0..bytes).map(|_| random.next() as u8).collect();
            let mut from = Memory::new(&data, random.below(64));
            let mut slot = Memory::new(&vec![0xee; (self.slot_bytes)(bytes)], 8 * random.below(8));
            let mut into = Memory::new(&vec![0; bytes + 8], random.below(64));
            // SAFETY: the memories are as long as the contract says, and the slot is aligned to 8
            // bytes.
            unsafe {
                (self.pack)(0x1234_5678, from.at(), bytes, slot.at());
                assert!(
                    (self.try_unpack)(0x1234_5678, slot.at(), bytes, into.at()),
                    "{bytes} bytes"
                );
                assert!(bytes == 0 || !(self.try_unpack)(0x1234_5679, slot.at(), bytes, into.at()));
            }
            assert_eq!(into.content(bytes), data);
            assert_eq!(
                &into.content(bytes + 8)[bytes..],
                [0; 8],
                "written beyond the end of {bytes}"
            );
        }
    }

    fn misses_every_flag(&self) {
        for bytes in [1, 4, 5, 119, 120, 121, 500, 1000] {
            let mut from = Memory::new(&vec![3; bytes], 0);
            let size = (self.slot_bytes)(bytes);
            let mut slot = Memory::new(&vec![0; size], 0);
            let mut into = Memory::new(&vec![0; bytes], 0);
            for at in (self.flag..size).step_by(self.every) {
                // SAFETY: the memories are as long as the contract says; a flag is within the slot.
                unsafe {
                    (self.pack)(7, from.at(), bytes, slot.at());
                    // The flag of the previous message: only its lowest byte differs.
                    let least = slot.at().add(
                        at + if cfg!(target_endian = "big") {
                            self.every - self.flag - 1
                        } else {
                            0
                        },
                    );
                    least.write(6);
                    assert!(
                        !(self.try_unpack)(7, slot.at(), bytes, into.at()),
                        "{bytes} bytes without the flag at {at}"
                    );
                    least.write(7);
                    assert!((self.try_unpack)(7, slot.at(), bytes, into.at()));
                }
            }
        }
    }
}

#[test]
fn packed_data_is_unpacked() {
    LL.round_trips();
    LL128.round_trips();
}

#[test]
fn one_missing_flag_is_detected() {
    LL.misses_every_flag();
    LL128.misses_every_flag();
}

#[test]
fn slots_are_whole_words_and_lines() {
    assert_eq!([0, 1, 4, 5].map(ll_bytes), [0, 8, 8, 16]);
    assert_eq!([0, 1, 120, 121].map(ll128_bytes), [0, 128, 128, 256]);
}

/// The writer stores words in order, as a device may.
#[test]
fn a_message_is_received_complete_while_it_is_written() {
    use core::sync::atomic::{AtomicU64, Ordering::Release};

    const BYTES: usize = 1000;
    let rounds = if cfg!(miri) { 3 } else { 2000u64 };
    for layout in [LL, LL128] {
        let words = (layout.slot_bytes)(BYTES) / 8;
        let slot: Vec<AtomicU64> = (0..words).map(|_| AtomicU64::new(0)).collect();
        let seen = AtomicU64::new(0);
        std::thread::scope(|scope| {
            scope.spawn(|| {
                let mut staged = vec![0u64; words];
                for round in 1..=rounds {
                    let data = [round as u8; BYTES];
                    // SAFETY: `staged` is as long as the slot, and aligned.
                    unsafe { (layout.pack)(round, data.as_ptr(), BYTES, staged.as_mut_ptr().cast()) };
                    for (word, &value) in slot.iter().zip(&staged) {
                        word.store(value, Release);
                    }
                    while seen.load(core::sync::atomic::Ordering::Acquire) != round {
                        std::thread::yield_now();
                    }
                }
            });
            for round in 1..=rounds {
                let mut into = [0; BYTES];
                // SAFETY: the slot is written by atomic stores single; `into` is as long as the
                // message.
                while !unsafe { (layout.try_unpack)(round, slot.as_ptr().cast(), BYTES, into.as_mut_ptr()) } {
                    std::thread::yield_now();
                }
                assert!(into.iter().all(|&byte| byte == round as u8), "round {round}");
                seen.store(round, Release);
            }
        });
    }
}
