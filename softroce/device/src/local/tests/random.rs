//! Two threads in place of two processes: random records through a small ring arrive whole and in
//! order while both ends sleep and wake; and memory that is revoked and rewritten is never taken
//! for its former content.

use std::mem;
use std::thread;

use parking_lot::{Condvar, Mutex};
use proptest::prelude::*;

use super::*;

/// A piece of a record's payload.
#[derive(Clone, Copy, Debug)]
enum Piece {
    Segment(usize, usize),
    Process(usize, usize),
    Bulk(usize, usize),
}

impl Piece {
    fn range(self) -> std::ops::Range<usize> {
        let (Self::Segment(at, len) | Self::Process(at, len) | Self::Bulk(at, len)) = self;
        at..at + len
    }
}

#[derive(Clone, Debug)]
enum What {
    Inline(usize, usize),
    Pieces(Vec<Piece>),
}

#[derive(Clone, Debug)]
struct Sent {
    datagram: bool,
    header: usize,
    what: What,
    /// Where the receiver cuts the payload to copy it in parts.
    cuts: Vec<usize>,
}

/// Bytes of the memory that payloads are taken from.
const MEMORY: usize = 64 << 10;

fn piece() -> impl Strategy<Value = Piece> {
    let range = (0..MEMORY / 2, prop_oneof![0..20_usize, 0..8000_usize]);
    (0..3, range).prop_map(|(kind, (at, len))| match kind {
        0 => Piece::Segment(at, len),
        1 => Piece::Process(at, len),
        _ => Piece::Bulk(at, len),
    })
}

fn sent() -> impl Strategy<Value = Sent> {
    let what = prop_oneof![
        (0..MEMORY / 2, prop_oneof![0..300_usize, 0..MEMORY / 2]).prop_map(|(at, len)| What::Inline(at, len)),
        proptest::collection::vec(piece(), 0..=REFERENCES).prop_map(What::Pieces),
    ];
    let cuts = proptest::collection::vec(0..100_usize, 0..4);
    (any::<bool>(), 0..=HEADER, what, cuts).prop_map(|(datagram, header, what, cuts)| Sent {
        datagram,
        header,
        what,
        cuts,
    })
}

impl Sent {
    fn kind(&self) -> Kind {
        if self.datagram { Kind::Datagram } else { Kind::Packet }
    }

    fn payload(&self, memory: &[u8]) -> Vec<u8> {
        match &self.what {
            What::Inline(at, len) => memory[*at..at + len].to_vec(),
            What::Pieces(pieces) => pieces.iter().flat_map(|piece| memory[piece.range()].to_vec()).collect(),
        }
    }
}

/// Wakes an end that sleeps, as a byte on a socket does.
#[derive(Default)]
struct Bell {
    rung: Mutex<bool>,
    ringing: Condvar,
}

impl Bell {
    fn ring(&self) {
        *self.rung.lock() = true;
        self.ringing.notify_one();
    }

    fn wait(&self) {
        let mut rung = self.rung.lock();
        while !mem::take(&mut *rung) {
            self.ringing.wait(&mut rung);
        }
    }
}

/// The sending thread.
struct Sending<'a> {
    sender: Sender,
    id: SegmentId,
    /// Wakes the receiver.
    receivers: &'a Bell,
    /// Wakes this thread.
    own: &'a Bell,
}

impl Sending<'_> {
    fn send(&mut self, sent: &Sent, memory: &[u8]) {
        while !self.sender.room().unwrap() {
            if !self.sender.wait_for_room().unwrap() {
                self.own.wait();
            }
        }
        let header = &memory[..sent.header];
        let mut references = Vec::new();
        let payload = match &sent.what {
            What::Inline(at, len) => Payload::Inline(&memory[*at..at + len]),
            What::Pieces(pieces) => {
                references.extend(pieces.iter().map(|piece| self.refer(*piece, memory)));
                Payload::Referred(&references)
            }
        };
        let kind = sent.kind();
        self.sender.push(&Record { kind, header, payload }, NOBODY).unwrap();
        if self.sender.needs_wake() {
            self.receivers.ring();
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
            Piece::Process(..) if self.sender.peer_reads_memory() => process(bytes),
            Piece::Process(..) | Piece::Bulk(..) => {
                let (reference, at) = self.sender.copy_in(bytes.len()).unwrap();
                // SAFETY: as many bytes, which are the record's.
                unsafe { std::ptr::copy_nonoverlapping(bytes.as_ptr(), at, bytes.len()) };
                reference
            }
        }
    }
}

/// Copies a payload in the parts that the cuts make, the last part first.
fn copy(body: &Body<'_>, cuts: &[usize]) -> Vec<u8> {
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
    let (mut sender, fd) = Sender::with_shape(Shape { slots: 4, bulk }).unwrap();
    let mut receiver = Receiver::attach(fd, Some(std::process::id() as i32)).unwrap();
    let id = shared.give(&mut sender, &mut receiver);
    let [receivers, senders] = [Bell::default(), Bell::default()];
    thread::scope(|scope| {
        let ending = scope.spawn(|| {
            let mut sending = Sending {
                sender,
                id,
                receivers: &receivers,
                own: &senders,
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
                if receiver.owes_call() {
                    senders.ring();
                }
                if let Some(received) = received.unwrap() {
                    break received;
                }
                if receiver.sleep() {
                    receivers.wait();
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
    fn random_records_come_over(records in proptest::collection::vec(sent(), 1..100)) {
        exchange(&records);
    }
}

/// The owner fills its memory, sends a record that refers to it, revokes it and refills it, again
/// and again. The receiver copies the right filling, or fails.
#[test]
fn memory_written_again_is_not_taken_for_the_message() {
    const LEN: usize = 64 << 10;
    const ROUNDS: u8 = 250;
    let (mut sender, mut receiver) = lane();
    let mut shared = Shared::new(LEN);
    let id = shared.give(&mut sender, &mut receiver);
    let referrer = Referrer { qpn: 1, keys: &[5] };
    let by_address = sender.peer_reads_memory();
    thread::scope(|scope| {
        let ending = scope.spawn(move || {
            for round in 0..ROUNDS {
                shared.fill(round);
                let len = LEN as u32;
                let reference = if by_address && round % 2 == 0 {
                    let addr = shared.addr() as u64;
                    Reference::Process { addr, len }
                } else {
                    Reference::Segment { id, offset: 0, len }
                };
                while !sender.room().unwrap() {
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
        let mut came = 0;
        while came < ROUNDS {
            let Some((_, header, payload)) = take(&mut receiver) else {
                thread::yield_now();
                continue;
            };
            assert_eq!(header, [came]);
            if let Ok(payload) = payload {
                assert!(payload.iter().all(|byte| *byte == came), "record {came}");
            }
            came += 1;
        }
        ending.join().unwrap();
    });
}
