//! Two threads in place of two processes: random records arrive whole and in order while both ends
//! sleep and wake, and revoked memory is never taken for its former content.

use std::mem;
use std::thread;

use parking_lot::{Condvar, Mutex};
use proptest::prelude::*;

use super::*;

#[derive(Clone, Copy, Debug)]
enum Piece {
    Segment(usize, usize),
    Bulk(usize, usize),
}

impl Piece {
    fn range(self) -> std::ops::Range<usize> {
        let (Self::Segment(at, len) | Self::Bulk(at, len)) = self;
        at..at + len
    }
}

#[derive(Clone, Debug)]
enum PayloadSpec {
    Inline(usize, usize),
    Pieces(Vec<Piece>),
}

#[derive(Clone, Debug)]
struct Sent {
    datagram: bool,
    header: usize,
    payload: PayloadSpec,
    /// Where the receiver cuts the payload to copy it in parts.
    cuts: Vec<usize>,
}

const MEMORY: usize = 64 << 10;

fn piece() -> impl Strategy<Value = Piece> {
    let range = (0..MEMORY / 2, prop_oneof![0..20_usize, 0..8000_usize]);
    (any::<bool>(), range).prop_map(|(segment, (at, len))| match segment {
        true => Piece::Segment(at, len),
        false => Piece::Bulk(at, len),
    })
}

fn sent() -> impl Strategy<Value = Sent> {
    let payload = prop_oneof![
        (0..MEMORY / 2, prop_oneof![0..300_usize, 0..MEMORY / 2]).prop_map(|(at, len)| PayloadSpec::Inline(at, len)),
        proptest::collection::vec(piece(), 0..=REFERENCES).prop_map(PayloadSpec::Pieces),
    ];
    let cuts = proptest::collection::vec(0..100_usize, 0..4);
    (any::<bool>(), 0..=HEADER, payload, cuts).prop_map(|(datagram, header, payload, cuts)| Sent {
        datagram,
        header,
        payload,
        cuts,
    })
}

impl Sent {
    fn kind(&self) -> RecordKind {
        if self.datagram {
            RecordKind::Datagram
        } else {
            RecordKind::Packet
        }
    }

    fn payload(&self, memory: &[u8]) -> Vec<u8> {
        match &self.payload {
            PayloadSpec::Inline(at, len) => memory[*at..at + len].to_vec(),
            PayloadSpec::Pieces(pieces) => pieces.iter().flat_map(|piece| memory[piece.range()].to_vec()).collect(),
        }
    }
}

/// Wakes an end that sleeps, as a byte on a socket does.
#[derive(Default)]
struct Event {
    is_set: Mutex<bool>,
    condvar: Condvar,
}

impl Event {
    fn set(&self) {
        *self.is_set.lock() = true;
        self.condvar.notify_one();
    }

    fn wait(&self) {
        let mut is_set = self.is_set.lock();
        while !mem::take(&mut *is_set) {
            self.condvar.wait(&mut is_set);
        }
    }
}

struct Sending<'a> {
    sender: Sender,
    id: SegmentId,
    receiver_event: &'a Event,
    sender_event: &'a Event,
}

impl Sending<'_> {
    fn send(&mut self, sent: &Sent, memory: &[u8]) {
        while !self.sender.has_space().unwrap() {
            if !self.sender.request_credit_wakeup().unwrap() {
                self.sender_event.wait();
            }
        }
        let header = &memory[..sent.header];
        let mut references = Vec::new();
        let payload = match &sent.payload {
            PayloadSpec::Inline(at, len) => Payload::Inline(&memory[*at..at + len]),
            PayloadSpec::Pieces(pieces) => {
                references.extend(pieces.iter().map(|piece| self.refer(*piece, memory)));
                Payload::Referred(&references)
            }
        };
        let kind = sent.kind();
        self.sender.push(&Record { kind, header, payload }, REFERRER).unwrap();
        if self.sender.needs_wake() {
            self.receiver_event.set();
        }
    }

    fn refer(&mut self, piece: Piece, memory: &[u8]) -> Reference {
        let bytes = &memory[piece.range()];
        match piece {
            Piece::Segment(at, len) => Reference::Segment {
                id: self.id,
                offset: at as u64,
                len: len as u32,
            },
            Piece::Bulk(..) => {
                let (reference, at) = self.sender.copy_in(bytes.len()).unwrap();
                // SAFETY: as many bytes, which are the record's.
                unsafe { std::ptr::copy_nonoverlapping(bytes.as_ptr(), at, bytes.len()) };
                reference
            }
        }
    }
}

/// Copies a payload in the parts that the cuts make, the last part first.
fn copy(body: &RecordBody<'_>, cuts: &[usize]) -> Vec<u8> {
    let mut payload = vec![0; body.len()];
    let mut ends: Vec<_> = cuts.iter().map(|cut| body.len() * cut / 100).collect();
    ends.push(body.len());
    ends.sort_unstable();
    for index in (0..ends.len()).rev() {
        let start = if index == 0 { 0 } else { ends[index - 1] };
        body.copy_to_slice(start, &mut payload[start..ends[index]]).unwrap();
    }
    payload
}

fn exchange(records: &[Sent]) {
    let memory = numbers(MEMORY);
    let mut shared = Shared::new(MEMORY);
    shared.write(&memory);
    let bulk = 600 << 10;
    let (mut sender, fd) = Sender::with_geometry(RingGeometry { slots: 4, bulk }).unwrap();
    let mut receiver = Receiver::attach(fd).unwrap();
    let id = shared.give(&mut sender, &mut receiver);
    let [receiver_event, sender_event] = [Event::default(), Event::default()];
    thread::scope(|scope| {
        let ending = scope.spawn(|| {
            let mut sending = Sending {
                sender,
                id,
                receiver_event: &receiver_event,
                sender_event: &sender_event,
            };
            for sent in records {
                sending.send(sent, &memory);
            }
            // It lives until all is received: references to a dead process are unavailable.
            sending
        });
        for sent in records {
            let received = loop {
                let received = receiver.pop(|received| {
                    let payload = copy(&received.body, &sent.cuts);
                    (received.kind, received.header.to_vec(), payload)
                });
                if receiver.credit_wakeup_pending() {
                    sender_event.set();
                }
                if let Some(received) = received.unwrap() {
                    break received;
                }
                if receiver.sleep() {
                    receiver_event.wait();
                    receiver.awake();
                }
            };
            assert_eq!(received.0, sent.kind());
            assert_eq!(received.1, memory[..sent.header]);
            assert!(received.2 == sent.payload(&memory), "the payload of {sent:?}");
        }
        ending.join().unwrap();
    });
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(32))]

    #[test]
    fn random_records_arrive(records in proptest::collection::vec(sent(), 1..100)) {
        exchange(&records);
    }
}

/// The owner fills its memory, sends a record that refers to it, revokes it and refills it, again
/// and again. The receiver copies the right filling, or fails.
#[test]
fn memory_written_again_is_not_taken_for_the_message() {
    const LEN: usize = 64 << 10;
    const ROUNDS: u8 = 250;
    let (mut sender, mut receiver) = ring();
    let mut shared = Shared::new(LEN);
    let id = shared.give(&mut sender, &mut receiver);
    let referrer = Referrer { qpn: 1, keys: &[5] };
    thread::scope(|scope| {
        let ending = scope.spawn(move || {
            for round in 0..ROUNDS {
                shared.fill(round);
                let len = LEN as u32;
                let reference = Reference::Segment { id, offset: 0, len };
                while !sender.has_space().unwrap() {
                    thread::yield_now();
                }
                let (header, references) = ([round], [reference]);
                sender
                    .push(&packet(&header, Payload::Referred(&references)), referrer)
                    .unwrap();
                // Sometimes at once, sometimes after the receiver has started or finished.
                for _ in 0..u32::from(round % 16) * 100 {
                    std::hint::spin_loop();
                }
                sender.revoke_region(5).unwrap();
                shared.fill(u8::MAX);
            }
            (sender, shared)
        });
        let mut received_count = 0;
        while received_count < ROUNDS {
            let Some((_, header, payload)) = take(&mut receiver) else {
                thread::yield_now();
                continue;
            };
            assert_eq!(header, [received_count]);
            if let Ok(payload) = payload {
                assert!(
                    payload.iter().all(|byte| *byte == received_count),
                    "record {received_count}"
                );
            }
            received_count += 1;
        }
        ending.join().unwrap();
    });
}
