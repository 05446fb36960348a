//! Each reason to refuse an access, and the copies.

use doorbell_roce_proto::Qpn;
use doorbell_roce_proto::memory::Placement;

use super::*;
use crate::capacity;
use crate::memory::WindowKind;

const PD: PdId = PdId(3);
const ALL: Rights = Rights {
    local_write: true,
    remote_write: true,
    remote_read: true,
    remote_atomic: true,
    bind: true,
    on_demand: false,
    flush_global: true,
};
/// The queue pair through which peers access memory.
const VIA: AccessContext = AccessContext {
    pd: PD,
    qpn: Qpn::new(5),
};

fn table_of(bytes: &mut [u8], iova: u64, rights: Rights) -> (Table, u32) {
    let mut table = Table::new();
    let region = Region::new(bytes.as_mut_ptr(), bytes.len() as u64, iova, PD, rights);
    let key = table.add_region(region).unwrap();
    (table, key)
}

#[test]
fn ranges_are_exact_and_do_not_overflow() {
    let mut bytes = [7_u8; 64];
    for iova in [0, 0x1000, u64::MAX - 64] {
        let (mut table, key) = table_of(&mut bytes, iova, ALL);
        let mut check = |addr: u64, len: u64| table.check_remote(VIA, RKey(key), addr, len, RemoteRight::Read);
        assert_eq!(check(iova, 64), Ok(()));
        assert_eq!(check(iova + 63, 1), Ok(()));
        assert_eq!(check(iova + 64, 1), Err(AccessError));
        assert_eq!(check(iova, 65), Err(AccessError));
        assert_eq!(check(iova.wrapping_sub(1), 2), Err(AccessError));
        assert_eq!(check(iova + 1, u64::MAX), Err(AccessError));
        assert_eq!(
            check(iova.wrapping_add(1000), 0),
            Ok(()),
            "a range of length 0 is always granted"
        );
    }
}

#[test]
fn a_key_is_valid_for_one_registration_in_one_domain() {
    let mut bytes = [7_u8; 64];
    let (mut table, key) = table_of(&mut bytes, 0, ALL);
    let mut out = [0; 8];
    assert_eq!(table.gather(PD, LKey(key), 0, &mut out), Ok(()));
    assert_eq!(out, [7; 8]);
    assert_eq!(table.gather(PdId(4), LKey(key), 0, &mut out), Err(AccessError));
    assert_eq!(table.gather(PD, LKey(key ^ 1), 0, &mut out), Err(AccessError));
    assert_eq!(
        table.gather(PD, LKey(key.wrapping_add(1 << 16)), 0, &mut out),
        Err(AccessError)
    );
    table.remove(key);
    assert_eq!(table.gather(PD, LKey(key), 0, &mut out), Err(AccessError));
    // Until both the slot and the position of the key are used again.
    let mut again = key;
    while again == key || again >> 16 != key >> 16 {
        table.remove(again);
        let region = Region::new(bytes.as_mut_ptr(), 64, 0, PD, ALL);
        again = table.add_region(region).unwrap();
    }
    assert_eq!(table.slots.len(), 1);
    assert_eq!(table.gather(PD, LKey(key), 0, &mut out), Err(AccessError));
    assert_eq!(table.gather(PD, LKey(again), 0, &mut out), Ok(()));
}

/// A key is as hard to guess as a random number of 32 bits, and there is one for each object.
#[test]
fn keys_are_random_in_all_bits() {
    let mut table = Table::new();
    let mut add = || table.add_region(Region::null(PD)).unwrap();
    let mut keys: Vec<u32> = (0..capacity::REGIONS).map(|_| add()).collect();
    for bit in 0..32 {
        let set = keys[..4096].iter().filter(|key| **key >> bit & 1 != 0).count();
        // Eight standard deviations of the binomial.
        assert!(set.abs_diff(2048) < 256, "bit {bit}: {set} of 4096");
    }
    let mut add = || table.add_window(PD, WindowKind::Two).unwrap();
    keys.extend((0..capacity::WINDOWS).map(|_| add()));
    keys.iter_mut().for_each(|key| *key >>= 8);
    keys.sort_unstable();
    keys.dedup();
    assert_eq!(
        (keys.len(), keys[0] == 0),
        (capacity::REGIONS + capacity::WINDOWS, false)
    );
}

#[test]
fn every_right_is_needed_and_enough() {
    let mut bytes = [0_u8; 64];
    let none = Rights::default();
    let cases = [
        (
            RemoteRight::Read,
            Rights {
                remote_read: true,
                ..none
            },
        ),
        (
            RemoteRight::Write,
            Rights {
                remote_write: true,
                ..none
            },
        ),
        (
            RemoteRight::Atomic,
            Rights {
                remote_atomic: true,
                ..none
            },
        ),
    ];
    for (right, rights) in cases {
        let (mut table, key) = table_of(&mut bytes, 0, rights);
        for (other, _) in cases {
            let wanted = if other == right { Ok(()) } else { Err(AccessError) };
            assert_eq!(
                table.check_remote(VIA, RKey(key), 0, 8, other),
                wanted,
                "{other:?} with {rights:?}"
            );
        }
    }
    let (mut table, key) = table_of(&mut bytes, 0, none);
    let sge = Sge {
        addr: 0,
        len: 8,
        lkey: LKey(key),
    };
    assert_eq!(table.check_local(PD, &sge, false), Ok(()));
    assert_eq!(table.check_local(PD, &sge, true), Err(AccessError));
    assert_eq!(table.scatter(PD, LKey(key), 0, &[1; 8]), Err(AccessError));
    assert_eq!(table.remote_write(VIA, RKey(key), 0, &[1; 8]), Err(AccessError));
    assert_eq!(
        table.remote_atomic(VIA, RKey(key), 0, AtomicOp::FetchAdd { add: 1 }),
        Err(AccessError)
    );
    assert_eq!(bytes, [0; 64]);
}

#[test]
fn copies_of_every_length_and_alignment() {
    let (lens, offsets) = if cfg!(miri) { (13, 4) } else { (1, 1) };
    for len in (0..40_usize).step_by(lens) {
        for at in (0..9_usize).step_by(offsets) {
            let mut bytes = [0xee_u8; 64];
            let (mut table, key) = table_of(&mut bytes, 0x100, ALL);
            let src: Vec<u8> = (1..=len as u8).collect();
            table.remote_write(VIA, RKey(key), 0x100 + at as u64, &src).unwrap();
            let mut back = vec![0; len];
            table.remote_read(VIA, RKey(key), 0x100 + at as u64, &mut back).unwrap();
            assert_eq!(back, src);
            assert_eq!(&bytes[at..at + len], &src[..]);
            assert!(bytes[..at].iter().chain(&bytes[at + len..]).all(|&byte| byte == 0xee));
        }
    }
}

#[test]
fn atomics_work_on_aligned_words_of_memory() {
    let mut words = [5_u64, 0];
    let base = words.as_mut_ptr().cast::<u8>();
    let mut table = Table::new();
    let key = RKey(table.add_region(Region::new(base, 16, 0, PD, ALL)).unwrap());
    let skewed = RKey(
        table
            .add_region(Region::new(base.wrapping_add(4), 12, 0, PD, ALL))
            .unwrap(),
    );
    let mut atomic = |key, op| table.remote_atomic(VIA, key, 0, op);
    assert_eq!(atomic(key, AtomicOp::FetchAdd { add: u64::MAX }), Ok(5));
    assert_eq!(atomic(key, AtomicOp::CompareSwap { compare: 5, swap: 9 }), Ok(4));
    assert_eq!(atomic(key, AtomicOp::CompareSwap { compare: 4, swap: 9 }), Ok(4));
    assert_eq!(atomic(skewed, AtomicOp::FetchAdd { add: 1 }), Err(AccessError));
    assert_eq!(words, [9, 0]);
}

#[test]
fn tags_do_not_repeat_predictably() {
    let mut bytes = [0_u8; 8];
    let mut table = Table::new();
    let mut tags = std::collections::HashSet::new();
    for _ in 0..64 {
        let key = table
            .add_region(Region::new(bytes.as_mut_ptr(), 8, 0, PD, ALL))
            .unwrap();
        tags.insert(key as u16);
        table.remove(key);
    }
    assert!(tags.len() > 32, "64 random tags of 16 bits: {}", tags.len());
}

#[test]
fn an_atomic_write_is_one_store_or_none() {
    #[repr(align(8))]
    struct Aligned([u8; 32]);
    let mut bytes = Aligned([0; 32]);
    let word = [1, 2, 3, 4, 5, 6, 7, 8];
    for (start, possible) in [(0, Ok(())), (8, Ok(())), (4, Err(AccessError))] {
        // The I/O virtual address is aligned in any case.
        let (mut table, key) = table_of(&mut bytes.0[start..start + 16], 0x1000, ALL);
        assert_eq!(table.remote_atomic_write(VIA, RKey(key), 0x1000, word), possible);
        assert_eq!(
            table.remote_atomic_write(VIA, RKey(key), 0x1010, word),
            Err(AccessError)
        );
    }
    assert_eq!((&bytes.0[..8], &bytes.0[8..16]), (&word[..], &word[..]));
    assert_eq!(bytes.0[16..], [0; 16]);
    let read_only = Rights {
        remote_write: false,
        ..ALL
    };
    let (mut table, key) = table_of(&mut bytes.0, 0, read_only);
    assert_eq!(table.remote_atomic_write(VIA, RKey(key), 0, [0; 8]), Err(AccessError));
}

#[test]
fn a_flush_needs_its_right_on_its_range() {
    let mut bytes = [0; 64];
    let global = |key, addr, len| Flush {
        addr,
        rkey: RKey(key),
        len,
        whole_region: false,
        placement: Placement {
            global: true,
            persistent: false,
        },
    };
    let (mut table, key) = table_of(&mut bytes, 0x1000, ALL);
    assert_eq!(table.remote_flush(VIA, &global(key, 0x1000, 64)), Ok(()));
    let mut refused = |flush| assert_eq!(table.remote_flush(VIA, &flush), Err(AccessError), "{flush:?}");
    refused(global(key, 0x1000, 65));
    refused(global(key, 0x1041, 0));
    refused(global(key + 0x100, 0x1000, 1));
    refused(Flush {
        placement: Placement {
            global: false,
            persistent: true,
        },
        ..global(key, 0x1000, 64)
    });
    let whole = Flush {
        whole_region: true,
        ..global(key, 0, u32::MAX)
    };
    assert_eq!(table.remote_flush(VIA, &whole), Ok(()));
    let none = Rights {
        flush_global: false,
        ..ALL
    };
    let (mut table, key) = table_of(&mut bytes, 0, none);
    assert_eq!(table.remote_flush(VIA, &global(key, 0, 1)), Err(AccessError));
}
