//! Random programs in both directions over a lossy link, compared with a perfect link's result.

mod util;

use doorbell_roce_proto::Mtu;
use doorbell_roce_proto::memory::{AtomicOp, Sge};
use doorbell_roce_proto::work::{Operation, Payload, SendRequest, Status};
use proptest::prelude::*;

use util::memory::rkey;
use util::{Fate, Pair, RECV_CQ, SEND_CQ, Setup, pattern, write_operation};

const WORDS: usize = 2;

#[derive(Clone, Copy, Debug)]
struct Step {
    kind: Kind,
    len: usize,
    /// Where its SGE is split in two.
    split: usize,
    inline: bool,
    signaled: bool,
    fence: bool,
}

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Kind {
    Send(Option<u32>),
    Write(Option<u32>),
    Read,
    Add(u64),
    Swap(bool, u64),
}

impl Kind {
    fn receives(self) -> bool {
        matches!(self, Self::Send(_) | Self::Write(Some(_)))
    }

    fn is_atomic(self) -> bool {
        matches!(self, Self::Add(_) | Self::Swap(..))
    }
}

fn step() -> impl Strategy<Value = Step> {
    let kind = prop_oneof![
        3 => any::<Option<u32>>().prop_map(Kind::Send),
        3 => any::<Option<u32>>().prop_map(Kind::Write),
        2 => Just(Kind::Read),
        1 => any::<u64>().prop_map(Kind::Add),
        1 => (any::<bool>(), any::<u64>()).prop_map(|(hit, to)| Kind::Swap(hit, to)),
    ];
    let len = prop_oneof![0..20usize, 200..600usize, 1500..4000usize];
    (
        kind,
        len,
        0..4000usize,
        any::<bool>(),
        any::<bool>(),
        prop::bool::weighted(0.1),
    )
        .prop_map(|(kind, len, split, inline, signaled, fence)| {
            let len = if kind.is_atomic() { 8 } else { len };
            let inline = inline && len <= 600 && matches!(kind, Kind::Send(_) | Kind::Write(_));
            Step {
                kind,
                len,
                split: split.min(len),
                inline,
                signaled,
                fence,
            }
        })
}

/// Loss, duplication and delay in percent.
#[derive(Clone, Copy, Debug)]
struct Wire {
    drop: u64,
    duplicate: u64,
    delay: u64,
    seed: u64,
}

fn wire() -> impl Strategy<Value = Wire> {
    (0..16u64, 0..16u64, 0..16u64, any::<u64>()).prop_map(|(drop, duplicate, delay, seed)| Wire {
        drop,
        duplicate,
        delay,
        seed,
    })
}

fn setup() -> impl Strategy<Value = Setup> {
    let psn = prop_oneof![0..0x100_0000u32, 0xff_ffe0..0x100_0000u32];
    let mtu = prop_oneof![Just(Mtu::Mtu256), Just(Mtu::Mtu512), Just(Mtu::Mtu1024)];
    let rd_atomic = 1..5u8;
    let batch = prop_oneof![Just(1usize), Just(4), Just(64)];
    let flags = any::<[bool; 3]>();
    (mtu, 1..40u32, [psn.clone(), psn], rd_atomic, batch, flags).prop_map(
        |(mtu, window, psns, rd_atomic, batch, [v6, tail_loss_probes, selective_repeat])| Setup {
            mtu,
            window,
            psns,
            rd_atomic,
            dest_rd_atomic: rd_atomic,
            batch,
            v6,
            tail_loss_probes,
            selective_repeat: [selective_repeat; 2],
            ..Setup::default()
        },
    )
}

struct Placed {
    step: Step,
    local: Sge,
    remote: Sge,
    ours: Vec<u8>,
    theirs: Vec<u8>,
}

struct Program {
    from: usize,
    placed: Vec<Placed>,
    words: Vec<Sge>,
    inboxes: Vec<Sge>,
}

impl Program {
    fn new(pair: &mut Pair, from: usize, steps: &[Step]) -> Self {
        let words = (0..WORDS)
            .map(|word| pair.region(1 - from, (word as u64).to_ne_bytes().to_vec()))
            .collect();
        let place = |(at, step): (usize, &Step)| {
            let seed = (at * 4 + from) as u64;
            let (ours, theirs) = (pattern(step.len, seed), pattern(step.len, seed + 2));
            let (local, remote) = (pair.region(from, ours.clone()), pair.region(1 - from, theirs.clone()));
            Placed {
                step: *step,
                local,
                remote,
                ours,
                theirs,
            }
        };
        let placed = steps.iter().enumerate().map(place).collect();
        Self {
            from,
            placed,
            words,
            inboxes: Vec::new(),
        }
    }

    fn post(&self, pair: &mut Pair) {
        for (at, placed) in self.placed.iter().enumerate() {
            let Placed {
                step,
                local,
                remote,
                ours,
                ..
            } = placed;
            let head = Sge {
                len: step.split as u32,
                ..*local
            };
            let tail = Sge {
                addr: local.addr + step.split as u64,
                len: (step.len - step.split) as u32,
                ..*local
            };
            let whole = [*local];
            let split = [head, tail];
            let word = self.words[at % WORDS];
            let atomic = |op| Operation::Atomic {
                addr: word.addr,
                rkey: rkey(word),
                op,
            };
            let request = SendRequest {
                wr_id: at as u64,
                operation: match step.kind {
                    Kind::Send(imm) => Operation::Send { imm },
                    Kind::Write(imm) => write_operation(*remote, imm),
                    Kind::Read => Operation::Read {
                        addr: remote.addr,
                        rkey: rkey(*remote),
                    },
                    Kind::Add(add) => atomic(AtomicOp::FetchAdd { add }),
                    Kind::Swap(hit, swap) => {
                        let now = self.word_before(at);
                        let compare = if hit { now } else { !now };
                        atomic(AtomicOp::CompareSwap { compare, swap })
                    }
                },
                payload: match step.inline {
                    true => Payload::Inline(ours),
                    false if step.kind.is_atomic() => Payload::Gather(&whole),
                    false => Payload::Gather(&split),
                },
                signaled: step.signaled,
                fence: step.fence,
                solicited: false,
            };
            pair.post(self.from, &request);
        }
    }

    fn word_before(&self, at: usize) -> u64 {
        let earlier = self.placed[..at]
            .iter()
            .enumerate()
            .filter(|(other, _)| other % WORDS == at % WORDS);
        earlier.fold((at % WORDS) as u64, |word, (_, placed)| match placed.step.kind {
            Kind::Add(add) => word.wrapping_add(add),
            Kind::Swap(true, to) => to,
            _ => word,
        })
    }

    fn receivers(&self) -> impl Iterator<Item = &Placed> {
        self.placed.iter().filter(|placed| placed.step.kind.receives())
    }

    fn receive(&mut self, pair: &mut Pair, count: usize) {
        let to = 1 - self.from;
        let posted = self.inboxes.len();
        let more: Vec<_> = self
            .receivers()
            .skip(posted)
            .take(count)
            .map(|placed| placed.step.len)
            .collect();
        for len in more {
            let inbox = pair.region(to, vec![0; len + 3]);
            pair.receive(to, self.inboxes.len() as u64, &[inbox]);
            self.inboxes.push(inbox);
        }
    }

    /// Checks everything, or that it ended in a reported error. True when all arrived.
    fn check(&self, pair: &Pair) -> bool {
        let completed = pair.completed(self.from, SEND_CQ);
        if let Some(failed) = completed.iter().position(|(_, status)| *status != Status::Success) {
            assert_eq!(completed[failed].1, Status::RetryExceeded);
            assert!(
                completed[failed + 1..]
                    .iter()
                    .all(|(_, status)| *status == Status::Flushed)
            );
            let in_order = completed.windows(2).all(|pair| pair[0].0 < pair[1].0);
            assert!(in_order && completed.last().unwrap().0 as usize == self.placed.len() - 1);
            return false;
        }
        let signaled = self
            .placed
            .iter()
            .enumerate()
            .filter(|(_, placed)| placed.step.signaled);
        let expected: Vec<_> = signaled.map(|(at, _)| (at as u64, Status::Success)).collect();
        assert_eq!(completed, expected);
        self.check_memory(pair);
        true
    }

    fn check_memory(&self, pair: &Pair) {
        let to = 1 - self.from;
        for (at, placed) in self.placed.iter().enumerate() {
            let Placed {
                step,
                local,
                remote,
                ours,
                theirs,
            } = placed;
            let before = self.word_before(at).to_ne_bytes().to_vec();
            let (here, there) = match step.kind {
                Kind::Send(_) => (ours, theirs),
                Kind::Write(_) => (ours, ours),
                Kind::Read => (theirs, theirs),
                Kind::Add(_) | Kind::Swap(..) => (&before, theirs),
            };
            assert_eq!(pair.bytes(self.from, *local), *here, "request {at}");
            assert_eq!(pair.bytes(to, *remote), *there, "request {at}");
        }
        let received = pair.nodes[to].completions.iter().filter(|(cq, _)| *cq == RECV_CQ);
        let receivers: Vec<_> = self.receivers().collect();
        assert_eq!(received.clone().count(), receivers.len());
        for ((at, (_, completion)), placed) in received.enumerate().zip(receivers) {
            let imm = match placed.step.kind {
                Kind::Send(imm) | Kind::Write(imm) => imm,
                _ => None,
            };
            let len = placed.step.len;
            assert_eq!((completion.wr_id, completion.status), (at as u64, Status::Success));
            assert_eq!((completion.byte_len as usize, completion.imm), (len, imm));
            if matches!(placed.step.kind, Kind::Send(_)) {
                assert_eq!(pair.bytes(to, self.inboxes[at])[..len], placed.ours);
            }
            assert_eq!(pair.bytes(to, self.inboxes[at])[len..], [0; 3]);
        }
    }
}

fn converse(setup: Setup, wire: Wire, steps: &[Vec<Step>; 2], late: [usize; 2]) -> Vec<(usize, Vec<u8>)> {
    let mut pair = Pair::connected(setup);
    let [left, right] = steps;
    let mut programs = [Program::new(&mut pair, 0, left), Program::new(&mut pair, 1, right)];
    let mut state = wire.seed | 1;
    let mut roll = move || {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        state.wrapping_mul(0x2545_f491_4f6c_dd1d) >> 32
    };
    let mut fate = |_: usize, _: &util::Sent| match roll() % 100 {
        dice if dice < wire.drop => Fate::Drop,
        dice if dice < wire.drop + wire.duplicate => Fate::Duplicate,
        dice if dice < wire.drop + wire.duplicate + wire.delay => Fate::Delay(roll() as usize % 6 + 1),
        _ => Fate::Deliver,
    };
    for (program, late) in programs.iter_mut().zip(late) {
        program.receive(&mut pair, late);
        program.post(&mut pair);
    }
    // The other receives are posted after the first packets got RNR NAKs.
    pair.exchange(&mut fate);
    programs
        .iter_mut()
        .for_each(|program| program.receive(&mut pair, usize::MAX));
    pair.run_with(&mut fate);
    let arrived = programs
        .iter()
        .map(|program| program.check(&pair))
        .filter(|arrived| *arrived)
        .count();
    // With few losses, eight retries in a row do not fail.
    assert!(arrived == 2 || wire.drop + wire.delay > 5, "{wire:?}");
    pair.log.into_iter().map(|sent| (sent.from, sent.bytes)).collect()
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 400, ..ProptestConfig::default() })]

    #[test]
    fn random_programs_arrive_once_and_in_order(
        setup in setup(),
        wire in wire(),
        left in prop::collection::vec(step(), 0..20),
        right in prop::collection::vec(step(), 0..20),
        late in [0..20usize, 0..20usize],
    ) {
        let steps = [left, right];
        let log = converse(setup, wire, &steps, late);
        // The fast path for MIDDLE packets equals the general path.
        let long_way = Setup { fast_path: false, ..setup };
        prop_assert!(log == converse(long_way, wire, &steps, late));
    }
}
