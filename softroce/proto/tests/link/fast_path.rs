//! The fast path for short requests equals the general path, and is taken for what it is meant for.

#[path = "../util/mod.rs"]
mod util;

use doorbell_roce_proto::memory::{AtomicOp, Sge};
use doorbell_roce_proto::qp::State;
use doorbell_roce_proto::wire::Opcode;
use doorbell_roce_proto::work::{Operation, Payload, PostError, SendRequest};
use proptest::prelude::*;

use util::{
    Fate, LINK_INLINE, Pair, RECV_CQ, SEND_CQ, Setup, atomic_on, link_to, pattern, read_from, request, send, success,
    with_regions, write_operation, write_to,
};

const LEN: usize = 2 * LINK_INLINE;

fn deliver(_: usize, _: &util::Sent) -> Fate {
    Fate::Deliver
}

#[derive(Clone, Copy, Debug)]
enum Kind {
    Send(Option<u32>),
    Write(Option<u32>),
    WriteBeyond,
    WriteFromNowhere,
    Read,
    Add,
}

#[derive(Clone, Copy, Debug)]
enum Act {
    Post {
        from: usize,
        kind: Kind,
        len: usize,
        inline: bool,
        signaled: bool,
        fence: bool,
        solicited: bool,
    },
    Receive(usize),
    /// Packets in flight arrive, without replies yet.
    Arrive,
    Exchange,
    Modify(usize, State),
    Full(usize),
    Ready(usize),
    Wait,
}

fn act() -> impl Strategy<Value = Act> {
    let kind = prop_oneof![
        10 => any::<Option<u32>>().prop_map(Kind::Send),
        20 => any::<Option<u32>>().prop_map(Kind::Write),
        1 => Just(Kind::WriteBeyond),
        1 => Just(Kind::WriteFromNowhere),
        3 => Just(Kind::Read),
        3 => Just(Kind::Add),
    ];
    let len = prop_oneof![0..20usize, LINK_INLINE - 2..LINK_INLINE + 3, Just(LEN)];
    let flags = (any::<bool>(), any::<bool>(), prop::bool::weighted(0.1), any::<bool>());
    let post = (0..2usize, kind, len, flags).prop_map(|(from, kind, len, flags)| {
        let (inline, signaled, fence, solicited) = flags;
        Act::Post {
            from,
            kind,
            len,
            inline,
            signaled,
            fence,
            solicited,
        }
    });
    let state = prop_oneof![3 => Just(State::Sqd), 3 => Just(State::Rts), 1 => Just(State::Err)];
    prop_oneof![
        40 => post,
        20 => (0..2usize).prop_map(Act::Receive),
        20 => Just(Act::Arrive),
        15 => Just(Act::Exchange),
        1 => (0..2usize, state).prop_map(|(at, state)| Act::Modify(at, state)),
        2 => (0..2usize).prop_map(Act::Full),
        4 => (0..2usize).prop_map(Act::Ready),
        2 => Just(Act::Wait),
    ]
}

fn run(setup: Setup, acts: &[Act], losses: u64) -> (Vec<Vec<u8>>, String, usize) {
    let mut pair = Pair::connected(setup);
    let memories: [[Sge; 3]; 2] = [0, 1].map(|at| [0, 1, 2].map(|seed| pair.region(at, pattern(LEN, seed))));
    // A packet's fate depends on its number only.
    let mut fate = |number: usize, _: &util::Sent| {
        let dice = (number as u64 + 1)
            .wrapping_mul(losses | 1)
            .wrapping_mul(0x9e37_79b9_7f4a_7c15)
            >> 58;
        match dice {
            0 if losses > 0 => Fate::Drop,
            1 if losses > 0 => Fate::Duplicate,
            _ => Fate::Deliver,
        }
    };
    let (mut posted, mut fast_path_hits) = (Vec::new(), 0);
    let mut full = [false; 2];
    for (number, act) in acts.iter().enumerate() {
        match *act {
            Act::Post {
                from,
                kind,
                len,
                inline,
                signaled,
                fence,
                solicited,
            } => {
                let ([ours, ..], [_, theirs, _]) = (memories[from], memories[1 - from]);
                let bytes = pattern(len, number as u64);
                let list = [Sge {
                    len: len as u32,
                    ..ours
                }];
                let beyond = Sge {
                    addr: theirs.addr + LEN as u64,
                    ..theirs
                };
                let nowhere = [Sge { addr: 1, ..list[0] }];
                let mut request = match kind {
                    Kind::Send(imm) => request(number as u64, Operation::Send { imm }, &list),
                    Kind::Write(imm) => request(number as u64, write_operation(theirs, imm), &list),
                    Kind::WriteBeyond => write_to(number as u64, &list, beyond),
                    Kind::WriteFromNowhere => write_to(number as u64, &nowhere, theirs),
                    Kind::Read => read_from(number as u64, &list, theirs),
                    Kind::Add => {
                        let result = [Sge { len: 8, ..ours }];
                        let add = atomic_on(number as u64, &result, theirs, AtomicOp::FetchAdd { add: 3 });
                        posted.push(pair.post_now(from, &add, &mut fate).map(|_| ()));
                        continue;
                    }
                };
                if inline && matches!(kind, Kind::Send(_) | Kind::Write(_)) {
                    request.payload = Payload::Inline(&bytes);
                }
                (request.signaled, request.fence, request.solicited) = (signaled, fence, solicited);
                let result = pair.post_now(from, &request, &mut fate);
                fast_path_hits += usize::from(result == Ok(true));
                posted.push(result.map(|_| ()));
            }
            Act::Receive(at) => {
                let (node, inbox) = (&mut pair.nodes[at], [memories[at][2]]);
                let receive = doorbell_roce_proto::work::ReceiveRequest {
                    wr_id: number as u64,
                    sges: &inbox,
                };
                posted.push(node.endpoint.post_receive(node.qpn, &receive));
            }
            Act::Arrive => pair.arrive(),
            Act::Exchange => pair.exchange(&mut fate),
            Act::Modify(at, state) => {
                let node = &mut pair.nodes[at];
                let modify = doorbell_roce_proto::qp::Modify {
                    state: Some(state),
                    ..Default::default()
                };
                // The current state may not allow it.
                let _ = node.endpoint.modify_qp(pair.now, node.qpn, &modify);
            }
            Act::Full(at) => full[at] = true,
            Act::Ready(at) => full[at] = false,
            Act::Wait => pair.run_with(&mut fate),
        }
        for (at, full) in full.iter().enumerate() {
            let link = link_to(1 - at).unwrap();
            match full {
                true => pair.nodes[at].endpoint.link_full(link),
                false => pair.nodes[at].endpoint.link_ready(link),
            }
        }
    }
    for at in 0..2 {
        pair.nodes[at].endpoint.link_ready(link_to(1 - at).unwrap());
    }
    pair.run_with(&mut fate);
    let nodes = [0, 1].map(|at| {
        let bytes = memories[at].map(|memory| pair.bytes(at, memory).to_vec());
        let node = &pair.nodes[at];
        let attributes = node.endpoint.query_qp(node.qpn);
        let counters = node.endpoint.counters();
        format!(
            "{:?} {:?} {attributes:?} {counters:?} {bytes:?}",
            node.completions, node.events
        )
    });
    let log = pair.log.into_iter().map(|sent| sent.bytes).collect();
    (log, format!("{posted:?} {nodes:?}"), fast_path_hits)
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 400, ..ProptestConfig::default() })]

    #[test]
    fn fast_path_equals_general_path(
        acts in prop::collection::vec(act(), 0..80),
        window in prop_oneof![1..5u32, Just(64)],
        psn in prop_oneof![Just(100u32), Just(0xff_fffe)],
        signal_all in prop::bool::weighted(0.2),
        losses in prop_oneof![Just(0u64), any::<u64>()],
    ) {
        // With infinite RNR retries a SEND without a receive would never end.
        let setup = Setup { window, psns: [psn, 9000], signal_all, rnr_retry: 3, ..Setup::default() };
        let (log, seen, _) = run(setup, &acts, losses);
        let (long_log, long_seen, fast_path_hits) = run(Setup { fast_path: false, ..setup }, &acts, losses);
        prop_assert_eq!(fast_path_hits, 0);
        prop_assert_eq!(log, long_log);
        prop_assert_eq!(seen, long_seen);
    }
}

/// An ACK delayed by a full link lets requests go first, on either path.
#[test]
fn after_a_full_link_requests_go_first() {
    let post = |from, kind| Act::Post {
        from,
        kind,
        len: 0,
        inline: false,
        signaled: false,
        fence: false,
        solicited: false,
    };
    let acts = [
        Act::Full(0),
        post(1, Kind::Write(None)),
        Act::Exchange,
        Act::Ready(0),
        post(0, Kind::Send(None)),
    ];
    let setup = Setup {
        window: 1,
        rnr_retry: 3,
        ..Setup::default()
    };
    let (log, seen, fast_path_hits) = run(setup, &acts, 0);
    let (long_log, long_seen, _) = run(
        Setup {
            fast_path: false,
            ..setup
        },
        &acts,
        0,
    );
    assert_eq!((log, seen), (long_log, long_seen));
    assert_eq!(fast_path_hits, 1, "only the WRITE");
}

fn post(pair: &mut Pair, at: usize, request: &SendRequest<'_>) -> bool {
    pair.post_now(at, request, &mut deliver).unwrap()
}

#[test]
fn short_messages_take_the_fast_path() {
    let (mut pair, local, remote) = with_regions(Setup::default(), LINK_INLINE);
    assert!(post(&mut pair, 0, &write_to(1, &[local], remote)));
    // The fast path does not depend on earlier ones being acknowledged.
    assert!(post(&mut pair, 0, &write_to(2, &[local], remote)));
    pair.receive(1, 9, &[remote]);
    assert!(post(&mut pair, 0, &send(3, &[local])));
    pair.run();
    assert_eq!(pair.fast_path_hits, 2, "the WRITEs were received by it as well");
    assert_eq!(pair.completed(0, SEND_CQ), success([1, 2, 3]));
    assert_eq!(pair.completed(1, RECV_CQ), success([9]));
    assert_eq!(pair.bytes(1, remote), pattern(LINK_INLINE, 1));
}

#[test]
fn pending_ack_is_sent_with_the_request() {
    let (mut pair, local, remote) = with_regions(Setup::default(), 8);
    post(&mut pair, 0, &write_to(1, &[local], remote));
    pair.arrive();
    assert!(post(&mut pair, 1, &write_to(2, &[remote], local)));
    assert_eq!(pair.opcodes(1), [Opcode::RcAcknowledge, Opcode::RcWriteOnly]);
    pair.run();
    assert_eq!(pair.completed(0, SEND_CQ), success([1]));
    assert_eq!(pair.completed(1, SEND_CQ), success([2]));
}

#[test]
fn full_send_queue_is_refused() {
    let (mut pair, local, remote) = with_regions(Setup::default(), 8);
    for wr_id in 0..64 {
        assert!(post(&mut pair, 0, &write_to(wr_id, &[local], remote)));
    }
    let result = pair.post_now(0, &write_to(64, &[local], remote), &mut deliver);
    assert_eq!(result, Err(PostError::Full));
}

#[test]
fn ineligible_requests_take_the_general_path() {
    let (mut pair, local, remote) = with_regions(Setup::default(), LINK_INLINE + 1);
    assert!(!post(&mut pair, 0, &write_to(1, &[local], remote)), "it is too long");
    let (local, remote) = (Sge { len: 8, ..local }, Sge { len: 8, ..remote });
    assert!(!post(&mut pair, 0, &read_from(2, &[local], remote)));
    let list = [local];
    let fenced = SendRequest {
        fence: true,
        ..write_to(3, &list, remote)
    };
    assert!(!post(&mut pair, 0, &fenced), "a READ is not answered");
    assert!(!post(&mut pair, 0, &write_to(4, &[local], remote)), "one is before it");
    pair.run();
    pair.nodes[0].endpoint.link_full(link_to(1).unwrap());
    assert!(!post(&mut pair, 0, &write_to(5, &[local], remote)), "the link is full");
    pair.nodes[0].endpoint.link_ready(link_to(1).unwrap());
    pair.run();
    pair.enter(0, State::Sqd);
    assert!(
        !post(&mut pair, 0, &write_to(6, &[local], remote)),
        "the queue is stopped"
    );
    pair.enter(0, State::Rts);
    pair.run();
    assert_eq!(pair.completed(0, SEND_CQ), success(1..=6));
    assert!(post(&mut pair, 0, &write_to(7, &[local], remote)));
}
