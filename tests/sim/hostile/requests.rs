//! Requests that the responder refuses: the NAK on the wire, the completions at both ends, the
//! states, and unchanged memory.

use std::net::Ipv4Addr;
use std::time::Duration;

use doorbell_roce_proto::memory::{AtomicOp, PdId, Sge};
use doorbell_roce_proto::qp::{Modify, Path, QpInit, RemoteAccess, State};
use doorbell_roce_proto::wire::{Nak, Packet, Syndrome, Transport};
use doorbell_roce_proto::work::{Completion, CqId, Operation, Payload, ReceiveRequest, SendRequest, Status};
use doorbell_roce_proto::{AsyncEvent, Endpoint, LKey, Mtu, Psn, Qpn, RKey};
use doorbell_softroce::link::fault::FaultConfig;

use crate::memory::{RegionId, Rights};
use crate::net::{Idents, LinkConfig, Network, Step};
use crate::trace::Trace;

const LINK: LinkConfig = LinkConfig {
    bits_per_second: 100_000_000_000,
    latency: Duration::from_micros(2),
    backlog: Duration::from_micros(10),
    faults: FaultConfig {
        drop: 0.0,
        duplicate: 0.0,
        reorder: 0.0,
        corrupt: 0.0,
        delay: Duration::ZERO,
        seed: 0,
    },
    idents: Idents::Known,
    socket: None,
};
const TARGET_LEN: usize = 8192;
/// The initial words of the target region.
const UNTOUCHED: u64 = 0xeeee_eeee_eeee_eeee;
const TARGET_BASE: u64 = 0x7000_0000;
const SOURCE_BASE: u64 = 0x1000_0000;
const MTU: Mtu = Mtu::Mtu1024;
const PD: PdId = PdId(1);
const EVERYTHING: RemoteAccess = RemoteAccess {
    read: true,
    write: true,
    atomic: true,
};

/// The operation.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Kind {
    Send,
    Write,
    WriteImm,
    Read,
    FetchAdd,
    CompareSwap,
}

impl Kind {
    const REMOTE: [Self; 5] = [
        Self::Write,
        Self::WriteImm,
        Self::Read,
        Self::FetchAdd,
        Self::CompareSwap,
    ];

    fn is_atomic(self) -> bool {
        matches!(self, Self::FetchAdd | Self::CompareSwap)
    }

    fn operation(self, addr: u64, rkey: RKey) -> Operation {
        match self {
            Self::Send => Operation::Send { imm: None },
            Self::Write => Operation::Write { addr, rkey, imm: None },
            Self::WriteImm => Operation::Write {
                addr,
                rkey,
                imm: Some(7),
            },
            Self::Read => Operation::Read { addr, rkey },
            Self::FetchAdd => Operation::Atomic {
                addr,
                rkey,
                op: AtomicOp::FetchAdd { add: 1 },
            },
            Self::CompareSwap => Operation::Atomic {
                addr,
                rkey,
                op: AtomicOp::CompareSwap {
                    compare: UNTOUCHED,
                    swap: 1,
                },
            },
        }
    }
}

/// A request, and the parameters of the two ends. [`Case::new`] is one that succeeds.
#[derive(Clone, Copy, Debug)]
struct Case {
    kind: Kind,
    len: u32,
    addr: u64,
    /// The target region's rights.
    rights: Rights,
    /// The responder's queue pair rights.
    access: RemoteAccess,
    /// The target region's protection domain; the queue pair's is [`PD`].
    target_pd: PdId,
    /// Added to the right rkey.
    rkey_error: u32,
    /// The length of the one receive posted; `None` posts none.
    receive: Option<u32>,
    /// Added to the receive's right lkey.
    receive_lkey_error: u32,
    /// Added to the request's right lkey.
    lkey_error: u32,
    /// The rights of the requester's own region.
    source_rights: Rights,
}

impl Case {
    fn new(kind: Kind, len: u32) -> Self {
        Self {
            kind,
            len: if kind.is_atomic() { 8 } else { len },
            addr: TARGET_BASE + 64,
            rights: Rights {
                local_write: true,
                read: true,
                write: true,
                atomic: true,
            },
            access: EVERYTHING,
            target_pd: PD,
            rkey_error: 0,
            receive: matches!(kind, Kind::Send | Kind::WriteImm).then_some(len),
            receive_lkey_error: 0,
            lkey_error: 0,
            source_rights: Rights::LOCAL,
        }
    }
}

/// The observed result.
struct Observed {
    /// The status of the request, and of one posted after it.
    requester: Vec<Status>,
    responder: Vec<Completion>,
    /// Every NAK of the responder.
    naks: Vec<Nak>,
    states: [State; 2],
    events: Vec<AsyncEvent>,
    /// The target region is unchanged.
    unchanged: bool,
    /// The requester sent nothing of the first request.
    sent_nothing: bool,
}

/// Runs one case on two nodes.
fn attempt(case: &Case) -> Observed {
    let mut net = Network::new(LINK, Trace::default());
    net.capture = Some(Vec::new());
    let addresses = [1, 2].map(|host| Ipv4Addr::new(10, 9, 0, host).into());
    let mut qpns = [Qpn::new(0); 2];
    for i in 0..2 {
        let node = net.add(Endpoint::new(40 + i as u64), addresses[i]);
        qpns[i] = net.nodes[node].endpoint.create_qp(QpInit {
            transport: Transport::Rc,
            pd: PD,
            send_cq: CqId(0),
            recv_cq: CqId(1),
            max_send_wr: 4,
            max_recv_wr: 4,
            max_send_sge: 1,
            max_recv_sge: 1,
            max_inline: 0,
            signal_all: true,
            srq: None,
            acknowledges_first: false,
        });
    }
    for i in 0..2 {
        let path = Path {
            local: addresses[i],
            remote: addresses[1 - i],
            traffic_class: 0,
            hop_limit: 64,
            flow_label: 0,
            lane: None,
        };
        for modify in to_rts(path, qpns[1 - i], case.access) {
            net.nodes[i].endpoint.modify_qp(net.now, qpns[i], &modify).unwrap();
        }
    }
    let source = net.nodes[0]
        .memory
        .register(PD, SOURCE_BASE, case.source_rights, vec![0x5a; 1 << 16]);
    let memory = &mut net.nodes[1].memory;
    let target = memory.register(case.target_pd, TARGET_BASE, case.rights, vec![0xee; TARGET_LEN]);
    let before = memory.region(target).clone();
    let rkey = RKey(memory.rkey(target).0.wrapping_add(case.rkey_error));
    if let Some(len) = case.receive {
        let lkey = LKey(memory.lkey(target).0.wrapping_add(case.receive_lkey_error));
        let sges = [Sge {
            addr: TARGET_BASE,
            len,
            lkey,
        }];
        net.nodes[1]
            .endpoint
            .post_receive(qpns[1], &ReceiveRequest { wr_id: 70, sges: &sges })
            .unwrap();
        net.nodes[1]
            .endpoint
            .post_receive(qpns[1], &ReceiveRequest { wr_id: 71, sges: &[] })
            .unwrap();
    }
    let sge = |source: RegionId, net: &Network, len, error| Sge {
        addr: SOURCE_BASE,
        len,
        lkey: LKey(net.nodes[0].memory.lkey(source).0.wrapping_add(error)),
    };
    let sges = [sge(source, &net, case.len, case.lkey_error)];
    let harmless = [sge(source, &net, 0, 0)];
    for (wr_id, operation, sges) in [
        (1, case.kind.operation(case.addr, rkey), &sges),
        (
            2,
            Operation::Write {
                addr: 0,
                rkey: RKey(0),
                imm: None,
            },
            &harmless,
        ),
    ] {
        let payload = Payload::Gather(sges);
        let request = SendRequest {
            wr_id,
            operation,
            payload,
            signalled: true,
            fence: false,
            solicited: false,
        };
        net.nodes[0].endpoint.post_send(net.now, qpns[0], &request).unwrap();
    }
    net.service(0).unwrap();
    while net.step().unwrap() != Step::Idle {}
    observe(net, qpns, target, &before)
}

fn to_rts(path: Path, peer: Qpn, access: RemoteAccess) -> [Modify; 3] {
    let none = Modify::default();
    [
        Modify {
            state: Some(State::Init),
            pkey_index: Some(0),
            port: Some(1),
            access: Some(access),
            ..none
        },
        Modify {
            state: Some(State::Rtr),
            path: Some(path),
            path_mtu: Some(MTU),
            dest_qpn: Some(peer),
            rq_psn: Some(Psn::new(0xff_fffe)),
            max_dest_rd_atomic: Some(4),
            min_rnr_timer: Some(1),
            ..none
        },
        Modify {
            state: Some(State::Rts),
            sq_psn: Some(Psn::new(0xff_fffe)),
            timeout: Some(10),
            retry_cnt: Some(3),
            rnr_retry: Some(3),
            max_rd_atomic: Some(4),
            ..none
        },
    ]
}

fn observe(mut net: Network, qpns: [Qpn; 2], target: RegionId, before: &crate::memory::Region) -> Observed {
    let requester: Vec<_> = net.nodes[0].completions.drain(..).collect();
    let wr_ids: Vec<_> = requester.iter().map(|(_, c)| c.wr_id).collect();
    assert_eq!(wr_ids, [1, 2], "both requests complete, in order");
    let sent = net.capture.take().unwrap();
    let aeth = |payload: &[u8]| {
        Packet::parse(payload)
            .ok()
            .and_then(|packet| packet.extension.aeth().copied())
    };
    let from_responder = sent.iter().filter(|(node, _)| *node == 1);
    Observed {
        requester: requester.iter().map(|(_, c)| c.status).collect(),
        responder: net.nodes[1].completions.drain(..).map(|(_, c)| c).collect(),
        naks: from_responder
            .filter_map(|(_, payload)| match aeth(payload)?.syndrome {
                Syndrome::Nak(nak) => Some(nak),
                _ => None,
            })
            .collect(),
        states: [0, 1].map(|i| net.nodes[i].endpoint.query_qp(qpns[i]).unwrap().state),
        events: std::mem::take(&mut net.nodes[1].events),
        unchanged: net.nodes[1].memory.region(target) == before,
        sent_nothing: sent.iter().all(|(node, _)| *node == 1),
    }
}

/// The request fails with `status` because of one NAK; both queue pairs end in ERR; no byte of the
/// target changes.
fn assert_refused(case: &Case, status: Status, nak: Nak) -> Observed {
    let observed = attempt(case);
    assert_eq!(observed.requester, [status, Status::Flushed], "{case:?}");
    assert_eq!(observed.naks, [nak], "{case:?}");
    assert_eq!(observed.states, [State::Err; 2], "{case:?}");
    assert!(observed.unchanged, "{case:?}");
    observed
}

fn assert_access_refused(case: &Case) {
    let observed = assert_refused(case, Status::RemoteAccess, Nak::RemoteAccess);
    assert!(
        observed.events
            .iter()
            .any(|event| matches!(event, AsyncEvent::QpAccessError(_))),
        "{case:?}: {:?}",
        observed.events
    );
    assert!(
        observed.responder.iter().all(|c| c.status == Status::Flushed),
        "{case:?}: {:?}",
        observed.responder
    );
}

/// Sizes of less than one packet, exactly one, and several.
const SIZES: [u32; 3] = [8, 1024, 3000];

#[test]
fn the_cases_succeed_without_their_faults() {
    for kind in Kind::REMOTE.into_iter().chain([Kind::Send]) {
        for len in SIZES {
            let observed = attempt(&Case::new(kind, len));
            assert_eq!(observed.requester, [Status::Success; 2], "{kind:?} {len}");
            assert_eq!((observed.states, observed.naks), ([State::Rts; 2], vec![]), "{kind:?} {len}");
            assert_eq!(observed.unchanged, kind == Kind::Read, "{kind:?} {len}");
        }
    }
}

#[test]
fn wrong_keys_are_refused() {
    for kind in Kind::REMOTE {
        for len in SIZES {
            let right = Case::new(kind, len);
            // A tag with one wrong bit, an lkey, and an unknown region.
            for rkey_error in [1, 0x1du32.wrapping_sub(0xa7), 0x100, u32::MAX] {
                assert_access_refused(&Case { rkey_error, ..right });
            }
            assert_access_refused(&Case {
                target_pd: PdId(2),
                ..right
            });
        }
    }
}

#[test]
fn ranges_that_leave_the_region_are_refused() {
    for kind in Kind::REMOTE {
        for len in SIZES {
            let right = Case::new(kind, len);
            let end = TARGET_BASE + TARGET_LEN as u64;
            let over = (end - u64::from(right.len) + 1).next_multiple_of(8);
            for addr in [over, end, TARGET_BASE - 8, 0, u64::MAX - 7] {
                assert_access_refused(&Case { addr, ..right });
            }
        }
    }
}

#[test]
fn rights_the_region_lacks_are_refused() {
    for kind in Kind::REMOTE {
        for len in SIZES {
            let right = Case::new(kind, len);
            let rights = match kind {
                Kind::Read => Rights {
                    read: false,
                    ..right.rights
                },
                Kind::FetchAdd | Kind::CompareSwap => Rights {
                    atomic: false,
                    ..right.rights
                },
                _ => Rights {
                    write: false,
                    ..right.rights
                },
            };
            assert_access_refused(&Case { rights, ..right });
        }
    }
}

/// An operation that the queue pair does not allow is an invalid request, whatever the key (IBTA
/// vol 1, 9.7.4.1.3).
#[test]
fn operations_the_queue_pair_does_not_allow_are_refused() {
    for kind in Kind::REMOTE {
        for len in SIZES {
            let right = Case::new(kind, len);
            let access = match kind {
                Kind::Read => RemoteAccess {
                    read: false,
                    ..EVERYTHING
                },
                Kind::FetchAdd | Kind::CompareSwap => RemoteAccess {
                    atomic: false,
                    ..EVERYTHING
                },
                _ => RemoteAccess {
                    write: false,
                    ..EVERYTHING
                },
            };
            assert_refused(
                &Case { access, ..right },
                Status::RemoteInvalidRequest,
                Nak::InvalidRequest,
            );
        }
    }
}

#[test]
fn a_message_longer_than_its_receive_is_refused() {
    for (len, room) in [(9, 8), (8, 0), (1024, 1023), (3000, 2999), (3000, 1500)] {
        let case = Case {
            receive: Some(room),
            ..Case::new(Kind::Send, len)
        };
        let observed = attempt(&case);
        assert_eq!(
            observed.requester,
            [Status::RemoteInvalidRequest, Status::Flushed],
            "{case:?}"
        );
        assert_eq!(observed.naks, [Nak::InvalidRequest], "{case:?}");
        assert_eq!(observed.states, [State::Err; 2], "{case:?}");
        let responder: Vec<_> = observed.responder.iter().map(|c| (c.wr_id, c.status)).collect();
        assert_eq!(
            responder,
            [(70, Status::LocalLength), (71, Status::Flushed)],
            "{case:?}"
        );
    }
}

#[test]
fn a_receive_that_may_not_be_written_fails_at_both_ends() {
    for len in SIZES {
        let right = Case::new(Kind::Send, len);
        let read_only = Rights {
            local_write: false,
            read: true,
            write: false,
            atomic: false,
        };
        for case in [
            Case {
                receive_lkey_error: 1,
                ..right
            },
            Case {
                rights: read_only,
                ..right
            },
        ] {
            let observed = assert_refused(&case, Status::RemoteOperational, Nak::RemoteOperational);
            let responder: Vec<_> = observed.responder.iter().map(|c| (c.wr_id, c.status)).collect();
            assert_eq!(
                responder,
                [(70, Status::LocalProtection), (71, Status::Flushed)],
                "{case:?}"
            );
        }
    }
}

#[test]
fn local_memory_is_checked_before_anything_is_sent() {
    for kind in [Kind::Send, Kind::Write, Kind::WriteImm] {
        for len in SIZES {
            let case = Case {
                lkey_error: 1,
                ..Case::new(kind, len)
            };
            let observed = attempt(&case);
            assert_eq!(observed.requester, [Status::LocalProtection, Status::Flushed], "{case:?}");
            assert!(
                observed.sent_nothing && observed.unchanged && observed.states == [State::Err, State::Rts],
                "{case:?}"
            );
        }
    }
    for kind in [Kind::Read, Kind::FetchAdd] {
        for case in [
            Case {
                lkey_error: 1,
                ..Case::new(kind, 3000)
            },
            Case {
                source_rights: Rights::default(),
                ..Case::new(kind, 3000)
            },
        ] {
            let observed = attempt(&case);
            assert_eq!(observed.requester, [Status::LocalProtection, Status::Flushed], "{case:?}");
            assert_eq!(observed.states[0], State::Err, "{case:?}");
        }
    }
}

#[test]
fn nothing_is_checked_for_no_bytes() {
    for kind in [Kind::Write, Kind::Read] {
        let case = Case {
            rkey_error: 1,
            addr: 3,
            rights: Rights::default(),
            ..Case::new(kind, 0)
        };
        let observed = attempt(&case);
        assert_eq!(
            (observed.requester, observed.unchanged),
            (vec![Status::Success; 2], true),
            "{case:?}"
        );
    }
}

#[test]
fn a_receive_that_never_comes_ends_in_rnr() {
    for kind in [Kind::Send, Kind::WriteImm] {
        for len in SIZES {
            let case = Case {
                receive: None,
                ..Case::new(kind, len)
            };
            let observed = attempt(&case);
            assert_eq!(observed.requester, [Status::RnrRetryExceeded, Status::Flushed], "{case:?}");
            assert_eq!(observed.states, [State::Err, State::Rts], "{case:?}");
            assert!(kind == Kind::WriteImm || observed.unchanged, "{case:?}");
        }
    }
}
