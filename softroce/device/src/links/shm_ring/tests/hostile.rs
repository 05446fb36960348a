//! A hostile peer causes an error, or a wrong byte in what it sent itself.

use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::fs::FileExt;
use std::sync::atomic::Ordering;

use nix::fcntl::{FcntlArg, SealFlag, fcntl};
use proptest::prelude::*;

use super::super::layout::{CONTENT_LEN, Field, Mapping};
use super::super::ring::RingWords;
use super::*;

/// A ring that this test holds three times: as sender, as receiver, and as shared memory.
fn exposed() -> (Sender, Receiver, Mapping) {
    let (sender, fd) = Sender::create().unwrap();
    let raw = Mapping::attach(fd.try_clone().unwrap()).unwrap();
    (sender, Receiver::attach(fd).unwrap(), raw)
}

fn genuine() -> Vec<u8> {
    let (_sender, fd) = Sender::create().unwrap();
    let mut header = vec![0; 4096];
    File::from(fd).read_exact_at(&mut header, 0).unwrap();
    header
}

fn forged(header: &[u8], len: u64, seals: SealFlag) -> OwnedFd {
    let file = File::from(memfd_create(c"forged", MFdFlags::MFD_CLOEXEC | MFdFlags::MFD_ALLOW_SEALING).unwrap());
    file.write_all_at(header, 0).unwrap();
    file.set_len(len).unwrap();
    fcntl(&file, FcntlArg::F_ADD_SEALS(seals)).unwrap();
    file.into()
}

const ALL: SealFlag = SealFlag::F_SEAL_SHRINK
    .union(SealFlag::F_SEAL_GROW)
    .union(SealFlag::F_SEAL_SEAL);
/// A page of header, 512 slots of 256 bytes, 1 MiB.
const LEN: u64 = 4096 + 512 * 256 + (1 << 20);

#[test]
fn descriptors_that_are_no_ring_are_refused() {
    let attach = |fd: OwnedFd| Receiver::attach(fd).map(drop);
    let header = genuine();
    attach(forged(&header, LEN, ALL)).unwrap();
    for seals in [SealFlag::empty(), SealFlag::F_SEAL_GROW, SealFlag::F_SEAL_SHRINK] {
        assert!(attach(forged(&header, LEN, seals)).is_err(), "{seals:?}");
    }
    for len in [0, 1, 4095, 4096, 4097, LEN - 1, LEN + 1, LEN + 4096] {
        assert!(attach(forged(&header, len, ALL)).is_err(), "{len} bytes");
    }
    for at in 0..8 {
        let mut header = header.clone();
        header[at] ^= 1;
        assert!(
            attach(forged(&header, LEN, ALL)).is_err(),
            "byte {at} of the magic number"
        );
    }
    for (field, value) in [
        (Field::Slots, 0),
        (Field::Slots, 511),
        (Field::Slots, 1024),
        (Field::Slots, u64::MAX),
        (Field::Slots, 1 << 63),
        (Field::Bulk, 0),
        (Field::Bulk, (1 << 20) + 1),
        (Field::Bulk, u64::MAX - 4095),
        (Field::Bulk, 1 << 40),
    ] {
        let mut header = header.clone();
        header[field as usize..][..8].copy_from_slice(&value.to_ne_bytes());
        assert!(attach(forged(&header, LEN, ALL)).is_err(), "{field:?} {value}");
    }
    assert!(attach(File::open("/dev/null").unwrap().into()).is_err());
    assert!(attach(std::io::pipe().unwrap().0.into()).is_err());
    assert!(attach(tempfile::tempfile().unwrap().into()).is_err());
}

#[test]
fn descriptors_that_are_no_segments_are_refused() {
    let (mut sender, mut receiver, _) = exposed();
    let id = SegmentId(7);
    let sealed = |len| forged(&[], len, SealFlag::F_SEAL_SHRINK);
    receiver.add_segment(id, sealed(4096)).unwrap();
    assert!(matches!(
        receiver.add_segment(id, sealed(4096)),
        Err(UnfitSegment::Refused(_))
    ));
    for fd in [
        sealed(0),
        forged(&[], 4096, SealFlag::F_SEAL_GROW),
        File::open("/dev/null").unwrap().into(),
        tempfile::tempfile().unwrap().as_fd().try_clone_to_owned().unwrap(),
    ] {
        assert!(matches!(
            receiver.add_segment(SegmentId(8), fd),
            Err(UnfitSegment::RecordKind(_))
        ));
    }
    // The sender sees the lost capability.
    sender.announce(id);
    assert!(!sender.can_reference(id));
}

#[test]
fn an_impossible_head_is_detected() {
    for head in [2, u64::MAX, 1 << 63] {
        let (mut sender, _receiver, raw) = exposed();
        sender.push(&packet(b"", Payload::Inline(&[])), REFERRER).unwrap();
        raw.set(Field::Head, head);
        assert!(sender.request_credit_wakeup().is_err(), "{head}");
        assert!(
            sender.push(&packet(b"", Payload::Inline(&[])), REFERRER).is_ok(),
            "its own counts are unchanged"
        );
    }
    // A head that goes back.
    let (mut sender, mut receiver, raw) = exposed();
    for _ in 0..2 {
        sender.push(&packet(b"", Payload::Inline(&[])), REFERRER).unwrap();
        assert!(take(&mut receiver).is_some());
    }
    assert_eq!(take(&mut receiver), None);
    assert_eq!(sender.request_credit_wakeup(), Ok(true));
    raw.set(Field::Head, 1);
    assert!(sender.request_credit_wakeup().is_err());
    // More segments mapped than announced.
    raw.set(Field::Mapped, u64::MAX);
    assert!(!sender.can_reference(SegmentId(1)));
}

fn publish(raw: &Mapping, control: u64, content: &[u8]) {
    // SAFETY: within the slot's content, which is not being read yet.
    unsafe { std::ptr::copy_nonoverlapping(content.as_ptr(), raw.content(0), content.len().min(CONTENT_LEN)) };
    raw.control(0).store(control, Ordering::Relaxed);
    raw.tag(0).store(1, Ordering::Release);
}

fn receive_and_copy(receiver: &mut Receiver) -> Result<(), CorruptRing> {
    let copied = receiver.pop(|received| {
        assert!(received.header.len() <= HEADER && received.body.len() <= LARGEST);
        let mut payload = vec![0; received.body.len()];
        received.body.copy_to_slice(0, &mut payload)
    });
    copied.map(|copied| assert!(copied.is_some()))
}

#[test]
fn impossible_records_break_the_ring() {
    let control = |kind: u64, location: u64, header: u64, references: u64, payload: u64| {
        kind | location << 8 | header << 16 | references << 24 | payload << 32
    };
    let segment = |len: u32| {
        let id = SegmentId(1);
        Reference::Segment { id, offset: 0, len }.encode().to_vec()
    };
    let bulk = |offset: u64, len: u32| Reference::Bulk { offset, len }.encode().to_vec();
    let largest = LARGEST as u64;
    for (what, control, content) in [
        ("no kind", control(0, 1, 0, 0, 0), vec![]),
        ("another kind", control(3, 1, 0, 0, 0), vec![]),
        ("no location", control(1, 0, 0, 0, 0), vec![]),
        ("another location", control(1, 5, 0, 0, 0), vec![]),
        ("a long header", control(1, 1, 97, 0, 0), vec![]),
        ("a payload longer than the slot", control(1, 1, 0, 0, 233), vec![]),
        (
            "a header and a payload longer than the slot",
            control(1, 1, 96, 0, 137),
            vec![],
        ),
        (
            "more than the largest payload",
            control(1, 2, 0, 0, largest + 1),
            vec![0; 8],
        ),
        (
            "a payload that begins outside",
            control(1, 2, 0, 0, 1),
            (1_u64 << 20).to_ne_bytes().to_vec(),
        ),
        (
            "a payload that ends outside",
            control(1, 2, 0, 0, 2),
            ((1_u64 << 20) - 1).to_ne_bytes().to_vec(),
        ),
        (
            "a payload far outside",
            control(1, 2, 0, 0, 2),
            u64::MAX.to_ne_bytes().to_vec(),
        ),
        ("many references", control(1, 4, 0, 33, 0), vec![0; 8]),
        ("more references than fit in the slot", control(1, 3, 0, 15, 0), vec![]),
        (
            "a list outside",
            control(1, 4, 0, 1, 0),
            ((1_u64 << 20) - 15).to_ne_bytes().to_vec(),
        ),
        ("a reference to nothing", control(1, 3, 0, 1, 0), vec![0; 16]),
        ("less than the references say", control(1, 3, 0, 1, 9), segment(10)),
        ("more than the references say", control(1, 3, 0, 1, 11), segment(10)),
        (
            "a reference that ends outside",
            control(1, 3, 0, 1, 2),
            bulk((1 << 20) - 1, 2),
        ),
        ("a reference far outside", control(1, 3, 0, 1, 2), bulk(u64::MAX, 2)),
    ] {
        let (_sender, mut receiver, raw) = exposed();
        publish(&raw, control, &content);
        assert!(receive_and_copy(&mut receiver).is_err(), "{what}");
    }
}

proptest! {
    #[test]
    fn any_slot_content_is_a_record_or_breaks_the_ring(
        kind in 0..4_u64,
        location in 0..6_u64,
        header in prop_oneof![0..=96_u64, any::<u8>().prop_map(u64::from)],
        references in prop_oneof![0..=32_u64, any::<u8>().prop_map(u64::from)],
        payload in prop_oneof![0..300_u64, 0..=LARGEST as u64, any::<u32>().prop_map(u64::from)],
        content in proptest::collection::vec(prop_oneof![Just(0_u8), any::<u8>()], CONTENT_LEN),
    ) {
        let (_sender, mut receiver, raw) = exposed();
        publish(&raw, kind | location << 8 | header << 16 | references << 24 | payload << 32, &content);
        let _ = receive_and_copy(&mut receiver);
    }

    /// A valid record with one byte of the slot changed.
    #[test]
    fn a_changed_record_is_a_record_or_breaks_the_ring(
        long in any::<bool>(),
        count in 0..=REFERENCES,
        at in 0..256_usize,
        flip in 1..=u8::MAX,
    ) {
        let (mut sender, mut receiver, raw) = exposed();
        let references = vec![Reference::Bulk { offset: 64, len: 100 }; count];
        let inline = [1; 1000];
        let payload = if long { Payload::Inline(&inline) } else { Payload::Referred(&references) };
        sender.push(&packet(b"some header", payload), REFERRER).unwrap();
        // SAFETY: in the first slot, whose content begins 24 bytes after it; not being read yet.
        unsafe { *raw.content(0).sub(24).add(at) ^= flip };
        if raw.tag(0).load(Ordering::Relaxed) == 1 {
            let _ = receive_and_copy(&mut receiver);
        } else {
            prop_assert!(receiver.pop(|_| ()).unwrap().is_none());
        }
    }
}
