//! Direct requests have the effect of the packets that they replace, and keep their order with
//! those of their queue pair.

#[path = "../util/mod.rs"]
mod util;

use doorbell_roce_proto::direct::{DirectMemory, DirectPath};
use doorbell_roce_proto::memory::{AccessContext, AtomicOp, Memory, PdId, Sge};
use doorbell_roce_proto::qp::{LinkProgress, State};
use doorbell_roce_proto::work::{Operation, Payload, SendRequest, Status};
use proptest::prelude::*;

use util::memory::Regions;
use util::{
    PD, Pair, RECV_CQ, SEND_CQ, Setup, atomic_on, link_to, pattern, read_from, request, send, success, with_regions,
    write_operation, write_to,
};

const LEN: usize = 600;

/// Executes requests with the checks of both ends.
struct Both<'a> {
    ours: &'a mut Regions,
    theirs: &'a mut Regions,
}

impl Both<'_> {
    fn gather(&mut self, pd: PdId, payload: Payload<'_>) -> Option<Vec<u8>> {
        let sges = match payload {
            Payload::Inline(bytes) => return Some(bytes.to_vec()),
            Payload::Gather(sges) => sges,
        };
        let mut bytes = Vec::new();
        for sge in sges {
            let mut piece = vec![0; sge.len as usize];
            self.ours.gather(pd, sge.lkey, sge.addr, &mut piece).ok()?;
            bytes.extend(piece);
        }
        Some(bytes)
    }

    fn scatter(&mut self, pd: PdId, sges: &[Sge], mut bytes: &[u8]) -> Option<()> {
        for sge in sges {
            let (piece, rest) = bytes.split_at(sge.len as usize);
            self.ours.scatter(pd, sge.lkey, sge.addr, piece).ok()?;
            bytes = rest;
        }
        Some(())
    }

    fn run(&mut self, path: &DirectPath, operation: &Operation, payload: Payload<'_>) -> Option<()> {
        let context = AccessContext {
            pd: PD,
            qpn: path.target,
        };
        if let Operation::Write { addr, rkey, .. } = *operation {
            let bytes = self.gather(path.pd, payload)?;
            return self.theirs.remote_write(context, rkey, addr, &bytes).ok();
        }
        let Payload::Gather(sges) = payload else {
            return None;
        };
        for sge in sges {
            self.ours.check_local(path.pd, sge, true).ok()?;
        }
        let bytes = match *operation {
            Operation::Read { addr, rkey } => {
                let mut bytes = vec![0; sges.iter().map(|sge| sge.len as usize).sum()];
                self.theirs.remote_read(context, rkey, addr, &mut bytes).ok()?;
                bytes
            }
            Operation::Atomic { addr, rkey, op } if addr.is_multiple_of(8) => {
                let original = self.theirs.remote_atomic(context, rkey, addr, op).ok()?;
                original.to_ne_bytes().to_vec()
            }
            _ => return None,
        };
        self.scatter(path.pd, sges, &bytes)
    }
}

impl DirectMemory for Both<'_> {
    fn execute(&mut self, path: &DirectPath, operation: &Operation, payload: Payload<'_>) -> bool {
        self.run(path, operation, payload).is_some()
    }
}

fn post_direct(pair: &mut Pair, at: usize, request: &SendRequest<'_>) -> bool {
    let [first, second] = &mut pair.nodes;
    let (node, peer) = if at == 0 { (first, second) } else { (second, first) };
    let mut memory = Both {
        ours: &mut node.memory,
        theirs: &mut peer.memory,
    };
    let done = node.endpoint.post_send_direct(node.qpn, request, &mut memory);
    util::drain(node);
    done
}

#[derive(Clone, Copy, Debug)]
enum Kind {
    Send,
    Write(Option<u32>),
    WriteBeyond,
    Read,
    Add(u64),
}

#[derive(Clone, Copy, Debug)]
enum Act {
    Post {
        from: usize,
        kind: Kind,
        len: usize,
        inline: bool,
        signaled: bool,
    },
    Exchange,
}

fn act() -> impl Strategy<Value = Act> {
    let kind = prop_oneof![
        4 => Just(Kind::Send),
        8 => any::<Option<u32>>().prop_map(Kind::Write),
        1 => Just(Kind::WriteBeyond),
        4 => Just(Kind::Read),
        4 => any::<u64>().prop_map(Kind::Add),
    ];
    let post = (0..2usize, kind, 0..=LEN, any::<bool>(), any::<bool>());
    prop_oneof![
        3 => post.prop_map(|(from, kind, len, inline, signaled)| Act::Post { from, kind, len, inline, signaled }),
        2 => Just(Act::Exchange),
    ]
}

/// The results of a program, and how many requests were direct. Each node has memory at the other
/// that the other does not change, and each request waits for READs before it, with which it is not
/// ordered otherwise.
fn run(acts: &[Act], direct: bool, signal_all: bool) -> (String, usize) {
    let mut pair = Pair::connected(Setup {
        signal_all,
        ..Setup::default()
    });
    let memories: [[Sge; 4]; 2] = [0, 1].map(|at| [0, 1, 2, 3].map(|seed| pair.region(at, pattern(LEN, seed))));
    for (at, memory) in memories.iter().enumerate() {
        (0..60).for_each(|wr_id| pair.receive(at, wr_id, &[memory[2]]));
    }
    let mut hits = 0;
    for (number, act) in acts.iter().enumerate() {
        let Act::Post {
            from,
            kind,
            len,
            inline,
            signaled,
        } = *act
        else {
            pair.run();
            continue;
        };
        let fails = matches!(kind, Kind::WriteBeyond) && len > 0;
        if fails {
            // Which requests of the other are flushed depends on when it fails.
            pair.run();
        }
        let ([ours, ..], [_, theirs, ..]) = (memories[from], memories[1 - from]);
        let bytes = pattern(len, number as u64);
        let list = [Sge {
            len: len as u32,
            ..ours
        }];
        let results = memories[from][3];
        let read = [Sge {
            len: len as u32,
            ..results
        }];
        let word = [Sge { len: 8, ..results }];
        let mut request = match kind {
            Kind::Send => send(number as u64, &list),
            Kind::Write(imm) => request(number as u64, write_operation(theirs, imm), &list),
            Kind::WriteBeyond => {
                let addr = theirs.addr + LEN as u64;
                write_to(number as u64, &list, Sge { addr, ..theirs })
            }
            Kind::Read => read_from(number as u64, &read, theirs),
            Kind::Add(add) => atomic_on(number as u64, &word, theirs, AtomicOp::FetchAdd { add }),
        };
        if inline && matches!(kind, Kind::Send | Kind::Write(_)) {
            request.payload = Payload::Inline(&bytes);
        }
        (request.signaled, request.fence) = (signaled, true);
        if direct && post_direct(&mut pair, from, &request) {
            hits += 1;
            continue;
        }
        let node = &mut pair.nodes[from];
        // Refused after an error, or when the queue is full.
        let _ = node.endpoint.post_send(pair.now, node.qpn, &request);
        util::drain(node);
        if fails {
            break;
        }
    }
    pair.run();
    let nodes = [0, 1].map(|at| {
        let bytes = memories[at].map(|memory| pair.bytes(at, memory).to_vec());
        let state = pair.nodes[at].endpoint.query_qp(pair.nodes[at].qpn).unwrap().state;
        let completions = [SEND_CQ, RECV_CQ].map(|cq| pair.completed(at, cq));
        format!("{completions:?} {state:?} {bytes:?}")
    });
    (format!("{nodes:?}"), hits)
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 400, ..ProptestConfig::default() })]

    #[test]
    fn direct_equals_packets(acts in prop::collection::vec(act(), 0..50), signal_all in any::<bool>()) {
        let (seen, _) = run(&acts, true, signal_all);
        let (expected, hits) = run(&acts, false, signal_all);
        prop_assert_eq!(hits, 0);
        prop_assert_eq!(seen, expected);
    }
}

#[test]
fn an_idle_queue_pair_needs_no_packet() {
    let (mut pair, local, remote) = with_regions(Setup::default(), 8);
    assert!(post_direct(&mut pair, 0, &write_to(1, &[local], remote)));
    assert!(post_direct(&mut pair, 0, &read_from(2, &[local], remote)));
    let add = AtomicOp::FetchAdd { add: 3 };
    assert!(post_direct(&mut pair, 0, &atomic_on(3, &[local], remote, add)));
    assert_eq!(pair.completed(0, SEND_CQ), success([1, 2, 3]));
    assert_eq!(pair.bytes(0, local), pattern(8, 1));
    assert_eq!(pair.counters(0).direct_requests, 3);
    assert!(pair.log.is_empty());
}

#[test]
fn what_needs_the_target_or_is_behind_something_takes_packets() {
    let (mut pair, local, remote) = with_regions(Setup::default(), 8);
    pair.receive(1, 9, &[remote]);
    assert!(!post_direct(&mut pair, 0, &send(1, &[local])));
    let with_imm = [local];
    let with_imm = request(2, write_operation(remote, Some(7)), &with_imm);
    assert!(!post_direct(&mut pair, 0, &with_imm));
    pair.post(0, &send(3, &[local]));
    assert!(
        !post_direct(&mut pair, 0, &write_to(4, &[local], remote)),
        "behind a SEND"
    );
    pair.run();
    assert!(
        post_direct(&mut pair, 0, &write_to(5, &[local], remote)),
        "it is acknowledged"
    );
    pair.enter(0, State::Sqd);
    assert!(
        !post_direct(&mut pair, 0, &write_to(6, &[local], remote)),
        "the queue is stopped"
    );
    pair.enter(0, State::Rts);
    pair.enter(0, State::Err);
    assert!(!post_direct(&mut pair, 0, &write_to(7, &[local], remote)));

    let setup = Setup {
        rd_atomic: 0,
        ..Setup::default()
    };
    let (mut pair, local, remote) = with_regions(setup, 8);
    assert!(
        !post_direct(&mut pair, 0, &read_from(1, &[local], remote)),
        "none may be outstanding"
    );
}

#[test]
fn a_timeout_is_no_retry_while_the_peer_has_not_taken_the_packets() {
    let setup = Setup {
        retry_cnt: 1,
        ..Setup::default()
    };
    let (mut pair, local, remote) = with_regions(setup, 8);
    let run = |pair: &mut Pair, timeouts: usize, progress: LinkProgress| {
        for _ in 0..timeouts {
            let node = &mut pair.nodes[0];
            pair.now = node.endpoint.poll_timeout().unwrap();
            node.endpoint.handle_timeout_on_links(pair.now, |link| {
                assert_eq!(Some(link), link_to(1));
                Some(progress)
            });
            while pair.transmit_one(0).is_some() {}
        }
    };
    pair.post(0, &write_to(1, &[local], remote));
    while pair.transmit_one(0).is_some() {}
    let mut progress = LinkProgress { sent: 5, taken: 4 };
    run(&mut pair, 50, progress);
    assert_eq!(pair.counters(0).retransmits, 0, "stopped, not dead");
    // It has taken what was sent before, but others' packets keep the link busy: it did not reply.
    progress = LinkProgress { sent: 90, taken: 60 };
    run(&mut pair, 1, progress);
    assert_eq!(pair.counters(0).retransmits, 1);
    progress = LinkProgress { sent: 95, taken: 93 };
    run(&mut pair, 1, progress);
    assert_eq!(
        pair.completed(0, SEND_CQ),
        [],
        "the retransmission may not have been taken"
    );
    progress = LinkProgress { sent: 99, taken: 95 };
    run(&mut pair, 1, progress);
    assert_eq!(pair.completed(0, SEND_CQ), [(1, Status::RetryExceeded)]);
}
