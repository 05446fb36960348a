//! Invalid registries, and arbitrary content of a valid one.

use std::fs::File;
use std::io::{Seek, SeekFrom, Write};
use std::os::fd::AsFd;

use super::*;

fn again(registry: &Registry) -> Registry {
    Registry::attach(registry.fd().try_clone().unwrap()).unwrap()
}

fn overwrite(registry: &Registry, bytes: &[u8]) {
    let mut file = File::from(registry.fd().try_clone().unwrap());
    file.seek(SeekFrom::Start(8)).unwrap();
    file.write_all(&bytes[..LEN.get() - 8]).unwrap();
}

fn use_all(registry: &Registry, number: u32) {
    let me = registry.add_member((number % SLOTS as u32) as u16, Flags(number), number as u16);
    assert!(registry.is_alive(me));
    assert_eq!(registry.flags(me), Some(Flags(number)));
    let others = [MemberId::new(number as u16, number), MemberId::new(u16::MAX, number)];
    for other in others
        .into_iter()
        .chain(registry.port_holder())
        .chain(registry.member(number as u16))
    {
        assert!(registry.udp_port(other) != Some(0));
        let (_, _) = (registry.is_alive(other), registry.flags(other));
    }
    assert_eq!(registry.member(u16::MAX), None);
    for qpn in [number, 0, 1, 0x00ff_ffff] {
        if let Some(owner) = registry.owner_of(Qpn::new(qpn)) {
            assert!(usize::from(owner.slot()) < SLOTS);
        }
    }
    if let Some(block) = registry.claim(me, number as u16) {
        assert_eq!(registry.owner_of(Qpn::new((block.index() as u32) << 10 | 5)), Some(me));
    }
    if registry.find_service(number.into()).is_none() && registry.add_service(number.into(), me) {
        assert_eq!(registry.find_service(number.into()), Some(me));
        registry.remove_service(number.into(), me);
    }
    registry.set_port_holder(me);
    assert_eq!(registry.port_holder(), Some(me));
    registry.mark_gone(MemberId::new(number as u16, number));
    registry.leave(me);
    assert!(!registry.is_alive(me) && registry.port_holder() != Some(me));
}

/// Random words, and words that resemble members, owners and services.
fn word(random: &mut impl FnMut() -> u64) -> u64 {
    match random() % 4 {
        0 => random(),
        1 => MemberId::new((random() % (2 * SLOTS as u64)) as u16, (random() % 4) as u32).pack(),
        2 => random() % 8,
        _ => u64::MAX,
    }
}

#[test]
fn arbitrary_content_is_harmless() {
    for seed in 1..=40_u64 {
        let mut state = seed.wrapping_mul(0x9e37_79b9_7f4a_7c15);
        let mut random = || {
            state ^= state << 13;
            state ^= state >> 7;
            state ^= state << 17;
            state
        };
        let registry = Registry::create().unwrap();
        let words = std::iter::repeat_with(|| word(&mut random)).take(LEN.get() / 8);
        overwrite(&registry, &words.flat_map(u64::to_ne_bytes).collect::<Vec<u8>>());
        use_all(&again(&registry), random() as u32);
    }
}

#[test]
fn invalid_registries_are_refused() {
    let mut file = tempfile::tempfile().unwrap();
    file.set_len(LEN.get() as u64).unwrap();
    let refused = |fd: OwnedFd| Registry::attach(fd).is_err();
    assert!(refused(file.try_clone().unwrap().into()), "a file could shrink");
    file.write_all(&MAGIC.to_ne_bytes()).unwrap();
    assert!(refused(file.into()));
    assert!(
        refused(std::net::UdpSocket::bind("127.0.0.1:0").unwrap().into()),
        "a socket"
    );
    let memfd = |len: usize, seals| {
        let fd = memfd_create(c"test", MFdFlags::MFD_CLOEXEC | MFdFlags::MFD_ALLOW_SEALING).unwrap();
        ftruncate(&fd, len as libc::off_t).unwrap();
        fcntl(&fd, FcntlArg::F_ADD_SEALS(seals)).unwrap();
        let mut file = File::from(fd.try_clone().unwrap());
        file.write_all(&MAGIC.to_ne_bytes()).unwrap();
        fd
    };
    let all = SealFlag::F_SEAL_SHRINK | SealFlag::F_SEAL_GROW;
    assert!(refused(memfd(LEN.get(), SealFlag::F_SEAL_GROW)), "it could shrink");
    assert!(
        refused(memfd(LEN.get() - 4096, all)) || refused(memfd(4096, SealFlag::F_SEAL_SHRINK)),
        "too short"
    );
    assert!(!refused(memfd(LEN.get(), all)));
    let zeroes = memfd_create(c"test", MFdFlags::MFD_CLOEXEC | MFdFlags::MFD_ALLOW_SEALING).unwrap();
    ftruncate(&zeroes, LEN.get() as libc::off_t).unwrap();
    fcntl(&zeroes, FcntlArg::F_ADD_SEALS(all)).unwrap();
    assert!(refused(zeroes), "nothing in it");
}

#[test]
fn a_new_generation_replaces_a_dead_member() {
    let registry = Registry::create().unwrap();
    let other = again(&registry);
    let first = registry.add_member(7, Flags::default(), 100);
    let block = registry.claim(first, 0).unwrap();
    let qpn = Qpn::new((block.index() as u32) << 10 | 9);
    assert!(registry.add_service(5, first));
    assert_eq!((other.owner_of(qpn), other.find_service(5)), (Some(first), Some(first)));
    // It dies undetected, and its slot has a new member.
    let second = other.add_member(7, Flags::UDP_ONLY, 200);
    assert_ne!(first, second);
    assert!(!registry.is_alive(first) && registry.is_alive(second));
    assert_eq!((registry.udp_port(first), registry.udp_port(second)), (None, Some(200)));
    assert_eq!((registry.owner_of(qpn), registry.find_service(5)), (None, None));
    // Marking the first one gone does not affect the second.
    registry.mark_gone(first);
    assert!(registry.is_alive(second));
    // What the first had can be claimed again, last of all.
    for other in 1..QpnBlock::COUNT {
        assert_ne!(registry.claim(second, other as u16), Some(block));
    }
    assert_eq!(registry.claim(second, 0), Some(block));
    assert_eq!(registry.claim(second, 0), None);
    assert!(registry.add_service(5, second));
    registry.leave(second);
    assert_eq!(
        (registry.find_service(5), registry.owner_of(qpn), registry.member(7)),
        (None, None, None)
    );
}

#[test]
fn blocks_are_reused_in_release_order() {
    let registry = Registry::create().unwrap();
    let [a, b, c] = [1, 2, 3].map(|slot| registry.add_member(slot, Flags::default(), 1));
    let (of_a, of_b) = (registry.claim(a, 0).unwrap(), registry.claim(b, 0).unwrap());
    for other in 2..QpnBlock::COUNT {
        assert!(registry.claim(c, other as u16).is_some());
    }
    assert_eq!(registry.claim(c, 0), None);
    registry.leave(b);
    registry.leave(a);
    assert_eq!([registry.claim(c, 0), registry.claim(c, 0)], [Some(of_b), Some(of_a)]);
}

#[test]
fn the_service_table_is_finite() {
    let registry = Registry::create().unwrap();
    let me = registry.add_member(0, Flags::default(), 1);
    for id in 0..SERVICES as u64 {
        assert!(registry.add_service(id, me));
    }
    assert!(!registry.add_service(SERVICES as u64, me));
    assert_eq!(registry.find_service(SERVICES as u64 - 1), Some(me));
}

#[test]
fn the_registry_is_shared() {
    let registry = Registry::create().unwrap();
    let seals = fcntl(registry.fd().as_fd(), FcntlArg::F_GET_SEALS).unwrap();
    assert!(SealFlag::from_bits_truncate(seals).contains(SealFlag::F_SEAL_SHRINK | SealFlag::F_SEAL_SEAL));
    let me = registry.add_member(0, Flags::default(), 1);
    registry.set_port_holder(me);
    assert_eq!(again(&registry).port_holder(), Some(me));
}
