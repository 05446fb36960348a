//! What a loss costs that no later packet reveals: with tail-loss probes a few round trips, without
//! them the local ACK timeout, which programs set to seconds. Each case is one such loss.

use std::time::Duration;

use doorbell_roce_proto::memory::{AtomicOp, Sge};
use doorbell_roce_proto::wire::{Nak, Opcode, Packet, Syndrome};
use doorbell_roce_proto::work::{Operation, Payload, ReceiveRequest, SendRequest, Status};
use doorbell_roce_proto::{Instant, Mtu, Qpn};
use doorbell_softroce::links::udp::fault::FaultConfig;

use crate::memory::{RegionId, Rights};
use crate::net::{Idents, LinkConfig, Network, Step};
use crate::pair::{PD, PairConfig, connect};
use crate::trace::Trace;

/// 4.3 s, as NCCL sets.
const TIMEOUT: u8 = 20;
const ACK_TIMEOUT: Duration = Duration::from_nanos(4096 << TIMEOUT);

const LATENCY: Duration = Duration::from_micros(500);
const ROUND_TRIP: Duration = Duration::from_millis(1);

const MTU: Mtu = Mtu::Mtu1024;
/// Packets of each message.
const PACKETS: usize = 8;
const LEN: usize = PACKETS * 1024;

/// Messages of one packet before the loss, by which the requester measures the round trip.
const MEASURED: usize = 16;
const FIRST_PSN: u32 = MEASURED as u32;

/// Whether a packet of a node is lost.
type Lose = Box<dyn FnMut(usize, &Packet<'_>) -> bool>;

struct Case {
    name: &'static str,
    operation: fn(&Rig) -> Operation,
    /// Whether the receive is posted only after the request has arrived once.
    late_receive: bool,
    lose: fn() -> Lose,
}

fn write(rig: &Rig) -> Operation {
    let (addr, rkey) = rig.remote();
    Operation::Write { addr, rkey, imm: None }
}

fn read(rig: &Rig) -> Operation {
    let (addr, rkey) = rig.remote();
    Operation::Read { addr, rkey }
}

fn fetch_add(rig: &Rig) -> Operation {
    let (addr, rkey) = rig.remote();
    let op = AtomicOp::FetchAdd { add: 1 };
    Operation::Atomic { addr, rkey, op }
}

fn send(_: &Rig) -> Operation {
    Operation::Send { imm: None }
}

/// The first `times` packets of a node that match are lost.
fn first(times: usize, node: usize, matches: fn(&Packet<'_>) -> bool) -> Lose {
    let mut left = times;
    Box::new(move |from, packet| {
        let lost = left > 0 && from == node && matches(packet);
        left -= usize::from(lost);
        lost
    })
}

fn has_index(packet: &Packet<'_>, index: u32) -> bool {
    packet.bth.psn.get() == FIRST_PSN + index
}

fn syndrome(packet: &Packet<'_>) -> Option<Syndrome> {
    packet.extension.aeth().map(|aeth| aeth.syndrome)
}

fn is_sequence_nak(packet: &Packet<'_>) -> bool {
    syndrome(packet) == Some(Syndrome::Nak(Nak::PsnSequence))
}

const CASES: [Case; 11] = [
    Case {
        name: "the last packet",
        operation: write,
        late_receive: false,
        lose: || first(1, 0, |packet| has_index(packet, PACKETS as u32 - 1)),
    },
    Case {
        name: "the last packets",
        operation: write,
        late_receive: false,
        lose: || first(5, 0, |packet| packet.bth.psn.get() > FIRST_PSN + 2),
    },
    Case {
        name: "the only ACK",
        operation: write,
        late_receive: false,
        lose: || first(1, 1, |_| true),
    },
    Case {
        name: "a packet, and its NAK",
        operation: write,
        late_receive: false,
        lose: || {
            let mut packet = first(1, 0, |packet| has_index(packet, 3));
            let mut nak = first(1, 1, is_sequence_nak);
            Box::new(move |from, sent| packet(from, sent) || nak(from, sent))
        },
    },
    Case {
        name: "a packet, and its retransmission",
        operation: write,
        late_receive: false,
        lose: || first(2, 0, |packet| has_index(packet, 3)),
    },
    Case {
        name: "a READ request",
        operation: read,
        late_receive: false,
        lose: || first(1, 0, |packet| packet.bth.opcode == Opcode::RcReadRequest),
    },
    Case {
        name: "the last response of a READ",
        operation: read,
        late_receive: false,
        lose: || first(1, 1, |packet| packet.bth.opcode == Opcode::RcReadResponseLast),
    },
    Case {
        name: "all responses of a READ",
        operation: read,
        late_receive: false,
        lose: || first(PACKETS, 1, |_| true),
    },
    Case {
        name: "the response of an atomic",
        operation: fetch_add,
        late_receive: false,
        lose: || first(1, 1, |packet| packet.bth.opcode == Opcode::RcAtomicAcknowledge),
    },
    Case {
        name: "the last packet of a SEND",
        operation: send,
        late_receive: false,
        lose: || first(1, 0, |packet| packet.bth.opcode == Opcode::RcSendLast),
    },
    Case {
        name: "an RNR NAK",
        operation: send,
        late_receive: true,
        lose: || first(1, 1, |packet| matches!(syndrome(packet), Some(Syndrome::RnrNak(_)))),
    },
];

struct Rig {
    net: Network,
    qpns: [Qpn; 2],
    regions: [RegionId; 2],
}

impl Rig {
    fn new(timeout: u8, tail_loss_probes: bool) -> Self {
        let link = LinkConfig {
            bits_per_second: 100_000_000_000,
            latency: LATENCY,
            backlog: Duration::from_micros(100),
            faults: FaultConfig::default(),
            idents: Idents::Zero,
            socket: None,
        };
        let mut net = Network::new(link, Trace::default());
        let config = PairConfig {
            window: 64,
            mtu: MTU,
            timeout,
            tail_loss_probes,
            selective_repeat: false,
        };
        let qpns = connect(&mut net, config);
        let rights = Rights {
            read: true,
            write: true,
            atomic: true,
            ..Rights::LOCAL
        };
        let regions = [0, 1].map(|node| {
            let bytes = (0..LEN).map(|i| (i * 7 + node * 31) as u8).collect();
            net.nodes[node].memory.register(PD, 0x1000_0000, rights, bytes)
        });
        let mut rig = Self { net, qpns, regions };
        for _ in 0..MEASURED {
            let operation = write(&rig);
            rig.post(operation, 8);
            rig.run();
        }
        rig.net.nodes[0].completions.clear();
        rig
    }

    fn remote(&self) -> (u64, doorbell_roce_proto::RKey) {
        let memory = &self.net.nodes[1].memory;
        (memory.region(self.regions[1]).base, memory.rkey(self.regions[1]))
    }

    fn post(&mut self, operation: Operation, len: usize) {
        let memory = &self.net.nodes[0].memory;
        let sges = [Sge {
            addr: memory.region(self.regions[0]).base,
            len: len as u32,
            lkey: memory.lkey(self.regions[0]),
        }];
        let request = SendRequest {
            wr_id: 0,
            operation,
            payload: Payload::Gather(&sges),
            signaled: true,
            fence: false,
            solicited: false,
        };
        let (now, qpn) = (self.net.now, self.qpns[0]);
        self.net.nodes[0]
            .endpoint
            .post_send(now, qpn, &request)
            .expect("the queue has room");
        self.net.service(0).expect("the wire's rules hold");
    }

    fn post_receive(&mut self) {
        let memory = &self.net.nodes[1].memory;
        let sges = [Sge {
            addr: memory.region(self.regions[1]).base,
            len: LEN as u32,
            lkey: memory.lkey(self.regions[1]),
        }];
        let request = ReceiveRequest { wr_id: 0, sges: &sges };
        self.net.nodes[1]
            .endpoint
            .post_receive(self.qpns[1], &request)
            .expect("the queue has room");
    }

    /// Until nothing is in flight; a wake-up posts the receive.
    fn run(&mut self) {
        while self.step() != Step::Idle {}
    }

    fn step(&mut self) -> Step {
        let step = self.net.step().expect("the wire's rules hold");
        if let Step::Wake(_) = step {
            self.post_receive();
        }
        step
    }

    fn bytes(&self, node: usize) -> &[u8] {
        &self.net.nodes[node].memory.region(self.regions[node]).bytes
    }
}

/// How long the request takes that meets the loss; it is executed once, as without.
fn duration(case: &Case, tail_loss_probes: bool) -> Duration {
    let mut rig = Rig::new(TIMEOUT, tail_loss_probes);
    let mut lose = (case.lose)();
    rig.net.lose = Some(Box::new(move |from, payload| {
        lose(from, &Packet::parse(payload).expect("a valid packet"))
    }));
    let word_before = rig.bytes(1)[..8].to_vec();
    let since = rig.net.now;
    if case.late_receive {
        rig.net.wake_at(since + ROUND_TRIP, 0);
    } else {
        rig.post_receive();
    }
    let operation = (case.operation)(&rig);
    let is_atomic = matches!(operation, Operation::Atomic { .. });
    rig.post(operation, if is_atomic { 8 } else { LEN });
    while rig.net.nodes[0].completions.is_empty() {
        rig.step();
    }
    let took = rig.net.now - since;
    rig.run();
    let statuses: Vec<_> = rig.net.nodes[0]
        .completions
        .iter()
        .map(|(_, completion)| completion.status)
        .collect();
    assert_eq!(statuses, [Status::Success], "{}", case.name);
    if is_atomic {
        let word = |bytes: &[u8]| u64::from_ne_bytes(bytes.try_into().expect("eight bytes"));
        assert_eq!(
            word(&rig.bytes(1)[..8]),
            word(&word_before).wrapping_add(1),
            "{}",
            case.name
        );
        assert_eq!(rig.bytes(0)[..8], word_before, "{}", case.name);
    } else {
        assert!(rig.bytes(0) == rig.bytes(1), "{}", case.name);
    }
    took
}

#[test]
fn a_loss_that_nothing_reveals_costs_round_trips_and_not_the_timeout() {
    for case in &CASES {
        let (without, with) = (duration(case, false), duration(case, true));
        println!("{}: {without:?} without probes, {with:?} with them", case.name);
        assert!(without > ACK_TIMEOUT, "{}: {without:?}", case.name);
        assert!(with < 7 * ROUND_TRIP, "{}: {with:?}", case.name);
    }
}

/// The packets to a peer that answers nothing any more, and the time until its request fails.
fn to_a_silent_peer(tail_loss_probes: bool) -> (u64, Duration, u64) {
    // 67 ms: eight times within a second.
    let mut rig = Rig::new(14, tail_loss_probes);
    rig.net.lose = Some(Box::new(|_, _| true));
    let before = rig.net.nodes[0].endpoint.counters().tx_packets;
    let since: Instant = rig.net.now;
    let operation = write(&rig);
    rig.post(operation, LEN);
    rig.run();
    let completions: Vec<_> = rig.net.nodes[0].completions.drain(..).collect();
    assert_eq!(completions[0].1.status, Status::RetryExceeded);
    let counters = rig.net.nodes[0].endpoint.counters();
    (
        counters.tx_packets - before,
        rig.net.now - since,
        counters.tail_loss_probes,
    )
}

#[test]
fn probes_to_a_silent_peer_are_few_and_cost_no_retry() {
    let (packets, until, probes) = to_a_silent_peer(false);
    assert_eq!((packets, probes), (8 * PACKETS as u64, 0));
    let (with, until_with, probes) = to_a_silent_peer(true);
    assert_eq!(until_with, until);
    // Doublings from a round trip to the local ACK timeout, once for all retries.
    assert!((5..=7).contains(&probes), "{probes}");
    assert_eq!(with, packets + 2 * probes);
}

#[test]
fn nothing_is_probed_where_nothing_is_lost() {
    let mut rig = Rig::new(TIMEOUT, true);
    for operation in [write, read, fetch_add] {
        let operation = operation(&rig);
        let is_atomic = matches!(operation, Operation::Atomic { .. });
        rig.post(operation, if is_atomic { 8 } else { LEN });
    }
    rig.run();
    assert_eq!(rig.net.nodes[0].completions.len(), 3);
    let counters = rig.net.nodes[0].endpoint.counters();
    assert_eq!((counters.tail_loss_probes, counters.retransmits), (0, 0));
}
