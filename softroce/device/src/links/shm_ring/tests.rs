//! Both ends of a ring in one process: transfer, revocation, and a hostile end.

use std::fs::File;
use std::num::NonZeroUsize;
use std::os::fd::AsFd;
use std::ptr::NonNull;

use doorbell_roce_proto::memory::CopyError;
use nix::fcntl::{FcntlArg, SealFlag, fcntl};
use nix::sys::memfd::{MFdFlags, memfd_create};
use nix::sys::mman::{MapFlags, ProtFlags, mmap, munmap};

use super::segment::SegmentId;
use super::*;

mod hostile;
mod random;

const REFERRER: Referrer<'static> = Referrer { qpn: 0, keys: &[] };

fn ring() -> (Sender, Receiver) {
    let (sender, fd) = Sender::create().unwrap();
    (sender, Receiver::attach(fd).unwrap())
}

fn packet<'a>(header: &'a [u8], payload: Payload<'a>) -> Record<'a> {
    Record {
        kind: RecordKind::Packet,
        header,
        payload,
    }
}

type Whole = (RecordKind, Vec<u8>, Result<Vec<u8>, CopyError>);

fn take(receiver: &mut Receiver) -> Option<Whole> {
    let whole = |received: Received<'_>| {
        let mut payload = vec![0; received.body.len()];
        let copied = received.body.copy_to_slice(0, &mut payload);
        (received.kind, received.header.to_vec(), copied.map(|()| payload))
    };
    receiver.pop(whole).unwrap()
}

#[test]
fn small_and_large_payloads_arrive() {
    let (mut sender, mut receiver) = ring();
    for len in [0, 1, 8, 64, 200, 232, 233, 1024, 4200, LARGEST] {
        let payload: Vec<u8> = (0..len).map(|n| n as u8).collect();
        assert_eq!(sender.has_space(), Ok(true));
        let record = packet(b"header", Payload::Inline(&payload));
        sender.push(&record, REFERRER).unwrap();
        assert_eq!(
            take(&mut receiver),
            Some((RecordKind::Packet, b"header".to_vec(), Ok(payload)))
        );
    }
    assert_eq!(take(&mut receiver), None);
}

#[test]
fn an_inline_record_is_detected_before_it_is_received() {
    let (mut sender, mut receiver) = ring();
    assert!(!receiver.next_is_inline(), "no record");
    for (len, short) in [(0, true), (200, true), (1024, false), (8, true)] {
        let payload = vec![7; len];
        sender
            .push(&packet(b"header", Payload::Inline(&payload)), REFERRER)
            .unwrap();
        assert_eq!(receiver.next_is_inline(), short, "{len} bytes");
        assert_eq!(take(&mut receiver).unwrap().2, Ok(payload));
    }
    assert!(!receiver.next_is_inline(), "all were received");
}

/// Whose progress the sender waits for before it counts a timeout as a retry.
#[test]
fn a_sleeping_receiver_has_published_what_it_took() {
    let (mut sender, mut receiver) = ring();
    let record = packet(b"header", Payload::Inline(&[7; 8]));
    for taken in 1..=3 {
        sender.push(&record, REFERRER).unwrap();
        assert!(take(&mut receiver).is_some());
        assert!(receiver.sleep());
        assert_eq!(sender.progress(), (taken, taken));
        receiver.awake();
    }
}

/// Memory that others can map, and its file.
struct Shared {
    file: File,
    start: NonNull<u8>,
    len: NonZeroUsize,
}

// SAFETY: it owns a mapping, which is of the whole process, and its methods take exclusive access.
unsafe impl Send for Shared {}

impl Shared {
    fn new(len: usize) -> Self {
        let file = File::from(memfd_create(c"test", MFdFlags::MFD_CLOEXEC | MFdFlags::MFD_ALLOW_SEALING).unwrap());
        file.set_len(len as u64).unwrap();
        fcntl(&file, FcntlArg::F_ADD_SEALS(SealFlag::F_SEAL_SHRINK)).unwrap();
        let rights = ProtFlags::PROT_READ | ProtFlags::PROT_WRITE;
        let len = NonZeroUsize::new(len).unwrap();
        // SAFETY: a new mapping, wherever the kernel has space.
        let start = unsafe { mmap(None, len, rights, MapFlags::MAP_SHARED, &file, 0) }
            .unwrap()
            .cast();
        Self { file, start, len }
    }

    fn addr(&self) -> usize {
        self.start.as_ptr().expose_provenance()
    }

    fn fill(&mut self, byte: u8) {
        // SAFETY: all of the mapping, to which there is no reference.
        unsafe { self.start.write_bytes(byte, self.len.get()) };
    }

    fn write(&mut self, bytes: &[u8]) {
        assert!(bytes.len() <= self.len.get());
        // SAFETY: within the mapping, to which there is no reference.
        unsafe { std::ptr::copy_nonoverlapping(bytes.as_ptr(), self.start.as_ptr(), bytes.len()) };
    }

    fn give(&self, sender: &mut Sender, receiver: &mut Receiver) -> SegmentId {
        let segment = segment::of(self.file.as_fd()).unwrap();
        let id = segment.id();
        sender.announce(id);
        assert!(sender.is_announced(id) && !sender.can_reference(id), "not mapped yet");
        receiver
            .add_segment(id, segment.fd().try_clone_to_owned().unwrap())
            .unwrap();
        assert!(sender.can_reference(id));
        id
    }
}

impl Drop for Shared {
    fn drop(&mut self) {
        // SAFETY: mapped in `new`, and unmapped once.
        unsafe { munmap(self.start.cast(), self.len.get()) }.unwrap();
    }
}

fn process(bytes: &[u8]) -> Reference {
    let addr = bytes.as_ptr().expose_provenance() as u64;
    let len = bytes.len() as u32;
    Reference::Process { addr, len }
}

fn numbers(len: usize) -> Vec<u8> {
    (0..len).map(|n| (n % 251) as u8).collect()
}

#[test]
fn a_ring_to_itself_copies_by_address() {
    let (mut sender, fd) = Sender::create().unwrap();
    // SAFETY: the memory referred to lives until the record is taken.
    let mut receiver = unsafe { Receiver::attach_own(fd) }.unwrap();
    let memory = numbers(1000);
    sender
        .push(&packet(b"", Payload::Referred(&[process(&memory)])), REFERRER)
        .unwrap();
    assert_eq!(take(&mut receiver), Some((RecordKind::Packet, vec![], Ok(memory))));

    // A process may write to where it reads.
    let mut memory = numbers(1000);
    sender
        .push(&packet(b"", Payload::Referred(&[process(&memory)])), REFERRER)
        .unwrap();
    let at = memory.as_mut_ptr();
    // SAFETY: 900 bytes of `memory` from its hundredth on, to which there is no reference.
    let copied = receiver.pop(|received| unsafe { received.body.copy_to(0, 900, at.add(100)) });
    assert_eq!(copied, Ok(Some(Ok(()))));
}

#[test]
fn segments_are_read_where_they_are_mapped() {
    let (mut sender, mut receiver) = ring();
    let memory = numbers(50_000);
    let mut shared = Shared::new(memory.len());
    shared.write(&memory);
    let id = shared.give(&mut sender, &mut receiver);
    let reference = |offset: u64, len| Reference::Segment { id, offset, len };
    let references = [reference(10, 40_000), reference(0, 5)];
    sender
        .push(&packet(b"", Payload::Referred(&references)), REFERRER)
        .unwrap();
    let expected = [&memory[10..40_010], &memory[..5]].concat();
    assert_eq!(take(&mut receiver).unwrap().2, Ok(expected));

    // References outside the segment, or to a withdrawn one, are lost packets.
    for (offset, len) in [(49_999, 2_000_000 % LARGEST as u32), (u64::MAX - 1, 4), (1 << 40, 1)] {
        sender
            .push(&packet(b"", Payload::Referred(&[reference(offset, len)])), REFERRER)
            .unwrap();
        assert_eq!(take(&mut receiver).unwrap().2, Err(CopyError::Gone));
    }
    receiver.remove_segment(id);
    sender
        .push(&packet(b"", Payload::Referred(&[reference(0, 1)])), REFERRER)
        .unwrap();
    assert_eq!(take(&mut receiver).unwrap().2, Err(CopyError::Gone));
}

#[test]
fn long_lists_of_references_arrive() {
    let (mut sender, mut receiver) = ring();
    let memory = numbers(32 * 4096);
    let mut shared = Shared::new(memory.len());
    shared.write(&memory);
    let id = shared.give(&mut sender, &mut receiver);
    let header = [9; HEADER];
    for count in [1, 8, 9, REFERENCES] {
        let references: Vec<_> = (0..count)
            .map(|n| Reference::Segment {
                id,
                offset: (n * 4096) as u64,
                len: n as u32,
            })
            .collect();
        let expected = (0..count).flat_map(|n| memory[n * 4096..][..n].to_vec()).collect();
        sender
            .push(&packet(&header, Payload::Referred(&references)), REFERRER)
            .unwrap();
        assert_eq!(
            take(&mut receiver),
            Some((RecordKind::Packet, header.to_vec(), Ok(expected)))
        );
    }
}

#[test]
fn kinds_of_memory_may_be_mixed_in_one_record() {
    let (mut sender, mut receiver) = ring();
    let memory = numbers(3000);
    let mut shared = Shared::new(1000);
    shared.write(&memory[..1000]);
    let id = shared.give(&mut sender, &mut receiver);
    let mut references = vec![Reference::Segment {
        id,
        offset: 0,
        len: 1000,
    }];
    let (bulk, at) = sender.copy_in(1000).unwrap();
    // SAFETY: as many bytes, which are the record's.
    unsafe { std::ptr::copy_nonoverlapping(memory[1000..].as_ptr(), at, 1000) };
    references.push(bulk);
    sender
        .push(&packet(b"", Payload::Referred(&references)), REFERRER)
        .unwrap();
    assert_eq!(take(&mut receiver).unwrap().2, Ok(memory[..2000].to_vec()));
    // Addresses mean nothing to another process.
    references.push(process(&memory[2000..]));
    sender
        .push(&packet(b"", Payload::Referred(&references)), REFERRER)
        .unwrap();
    assert_eq!(take(&mut receiver).unwrap().2, Err(CopyError::Gone));
}

#[test]
fn a_full_ring_refuses_until_credits_return() {
    let (mut sender, mut receiver) = ring();
    let mut pushed = 0;
    let record = packet(b"h", Payload::Inline(&[1; 4000]));
    while sender.has_space().unwrap() {
        sender.push(&record, REFERRER).unwrap();
        pushed += 1;
    }
    assert_eq!(sender.push(&record, REFERRER), Err(RingFull));
    assert!(sender.copy_in(1).is_err());
    assert_eq!(sender.request_credit_wakeup(), Ok(false));
    assert!(!receiver.credit_wakeup_pending());
    assert!(take(&mut receiver).is_some());
    assert!(
        receiver.credit_wakeup_pending(),
        "it waits, and bulk credits were returned"
    );
    assert!(!receiver.credit_wakeup_pending(), "reported once");
    for _ in 1..pushed {
        assert_eq!(take(&mut receiver).unwrap().2.unwrap().len(), 4000);
    }
    assert_eq!(take(&mut receiver), None);
    assert_eq!(sender.has_space(), Ok(true));
    sender.push(&record, REFERRER).unwrap();
    assert!(take(&mut receiver).is_some());
}

/// Long payloads by reference take neither bulk space nor many slots.
#[test]
fn long_payloads_in_flight_are_limited_and_their_credits_wake_a_sender_that_waits() {
    let (mut sender, mut receiver) = ring();
    let mut memory = Shared::new(64 << 10);
    memory.fill(3);
    sender.announce(SegmentId(1));
    receiver
        .add_segment(SegmentId(1), memory.file.try_clone().unwrap().into())
        .unwrap();
    let references = [Reference::Segment {
        id: SegmentId(1),
        offset: 0,
        len: 64 << 10,
    }];
    let record = packet(b"h", Payload::Referred(&references));
    for round in 1..=3 {
        let mut pushed = 0;
        while sender.has_space().unwrap() {
            sender.push(&record, REFERRER).unwrap();
            pushed += 1;
        }
        assert_eq!(pushed, IN_FLIGHT >> 16, "in round {round}");
        assert_eq!(sender.request_credit_wakeup(), Ok(false));
        let mut woken_after = None;
        for taken in 1..=pushed {
            assert_eq!(take(&mut receiver).unwrap().2.unwrap().len(), 64 << 10);
            if receiver.credit_wakeup_pending() {
                woken_after.get_or_insert(taken);
            }
        }
        assert_eq!(woken_after, Some(ring::CREDIT >> 16), "not for each record");
    }
}

#[test]
fn every_slot_can_be_filled() {
    let (mut sender, mut receiver) = ring();
    for round in 0..3 {
        for n in 0..RingGeometry::default().slots {
            assert_eq!(sender.has_space(), Ok(true));
            let bytes = (round * 10_000 + n).to_ne_bytes();
            sender.push(&packet(&bytes, Payload::Inline(&[])), REFERRER).unwrap();
        }
        assert_eq!(sender.has_space(), Ok(false));
        for n in 0..RingGeometry::default().slots {
            assert_eq!(take(&mut receiver).unwrap().1, (round * 10_000 + n).to_ne_bytes());
        }
        assert_eq!(take(&mut receiver), None);
    }
}

#[test]
fn a_sleeping_receiver_is_woken_once() {
    let (mut sender, mut receiver) = ring();
    let record = packet(b"", Payload::Inline(&[]));
    sender.push(&record, REFERRER).unwrap();
    assert!(!sender.needs_wake(), "it is awake");
    assert!(!receiver.sleep(), "a record is queued");
    assert!(take(&mut receiver).is_some());
    assert!(receiver.sleep());
    sender.push(&record, REFERRER).unwrap();
    assert!(sender.needs_wake());
    assert!(!sender.needs_wake(), "reported once");
    receiver.awake();
    sender.push(&record, REFERRER).unwrap();
    assert!(!sender.needs_wake());
}

#[test]
fn discarded_bulk_space_is_reused() {
    let (mut sender, mut receiver) = ring();
    for _ in 0..100 {
        assert_eq!(sender.has_space(), Ok(true));
        sender.copy_in(LARGEST).unwrap();
        assert!(sender.copy_in(LARGEST).is_err(), "more than a record may use");
        sender.discard();
    }
    sender.push(&packet(b"", Payload::Inline(&[5; 500])), REFERRER).unwrap();
    assert_eq!(take(&mut receiver).unwrap().2, Ok(vec![5; 500]));
}

#[test]
fn revoked_records_are_lost() {
    let (mut sender, mut receiver) = ring();
    let mut shared = Shared::new(4096);
    shared.fill(3);
    let id = shared.give(&mut sender, &mut receiver);
    let reference = [Reference::Segment { id, offset: 0, len: 64 }];
    let (bulk, at) = sender.copy_in(64).unwrap();
    // SAFETY: as many bytes, which are the record's.
    unsafe { at.write_bytes(3, 64) };
    let of = |qpn, keys| Referrer { qpn, keys };
    let referred = packet(b"", Payload::Referred(&reference));
    sender
        .push(&packet(b"", Payload::Referred(&[bulk])), of(1, &[10]))
        .unwrap();
    sender.push(&referred, of(1, &[10])).unwrap();
    sender.push(&referred, of(1, &[11, 10])).unwrap();
    sender.push(&referred, of(2, &[11])).unwrap();
    sender.push(&referred, of(3, &[12])).unwrap();
    sender
        .push(&packet(b"", Payload::Inline(&[3; 64])), of(1, &[10]))
        .unwrap();
    sender.revoke_region(10).unwrap();
    sender.revoke_qp(3).unwrap();
    let all = Ok(vec![3; 64]);
    for expected in [
        all.clone(),
        Err(CopyError::Gone),
        Err(CopyError::Gone),
        all.clone(),
        Err(CopyError::Gone),
        all.clone(),
    ] {
        assert_eq!(take(&mut receiver).unwrap().2, expected);
    }
    for _ in 0..2 * RingGeometry::default().slots {
        assert_eq!(sender.has_space(), Ok(true));
        sender.push(&referred, of(1, &[10])).unwrap();
        assert_eq!(take(&mut receiver).unwrap().2, all);
    }
}

#[test]
fn a_process_does_not_read_its_own_revoked_record() {
    let (mut sender, fd) = Sender::create().unwrap();
    // SAFETY: the memory stays until the record is revoked, and nothing is received meanwhile.
    let mut receiver = unsafe { Receiver::attach_own(fd) }.unwrap();
    let shared = Shared::new(4096);
    let addr = shared.addr() as u64;
    let reference = [Reference::Process { addr, len: 4096 }];
    let of = Referrer { qpn: 1, keys: &[10] };
    sender.push(&packet(b"", Payload::Referred(&reference)), of).unwrap();
    sender.revoke_region(10).unwrap();
    drop(shared);
    assert_eq!(take(&mut receiver).unwrap().2, Err(CopyError::Gone));
}
