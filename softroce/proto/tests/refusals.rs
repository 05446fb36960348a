//! Requests that must be refused: the right NAK, the right statuses, and memory unchanged.

mod util;

use doorbell_roce_proto::memory::{AtomicOp, Sge};
use doorbell_roce_proto::qp::{RemoteAccess, State};
use doorbell_roce_proto::wire::{Aeth, AtomicEth, Credits, Extension, ImmDt, Nak, Opcode, Reth, Syndrome};
use doorbell_roce_proto::work::{Operation, SendRequest, Status};
use doorbell_roce_proto::{AsyncEvent, LKey, RKey};

use util::memory::{Rights, rkey};
use util::{Pair, RECV_CQ, SEND_CQ, Setup, atomic_on, pattern, read_from, request, send, write_operation, write_to};

const LEN: usize = 600;

/// A SEND that succeeds, what `make` builds from local SGEs and a remote region, a flushed SEND.
fn refused(
    setup: Setup,
    rights: Rights,
    make: impl for<'a> Fn(&'a [Sge], Sge) -> SendRequest<'a>,
    nak: Nak,
    status: Status,
) -> Pair {
    let mut pair = Pair::connected(setup);
    let local = pair.region(0, pattern(LEN, 1));
    let remote = pair.nodes[1].memory.register(pattern(LEN, 2), rights);
    let inbox = pair.region(1, vec![0; LEN]);
    (10..14).for_each(|wr_id| pair.receive(1, wr_id, &[inbox]));
    let word = [Sge { len: 8, ..local }];
    pair.post(0, &send(1, &word));
    let whole = [local];
    let middle = make(&whole, remote);
    let list = if matches!(middle.operation, Operation::Atomic { .. }) {
        &word
    } else {
        &whole
    };
    pair.post(
        0,
        &SendRequest {
            wr_id: 2,
            ..make(list, remote)
        },
    );
    pair.post(0, &send(3, &word));
    pair.run();

    assert_eq!(
        pair.completed(0, SEND_CQ),
        [(1, Status::Success), (2, status), (3, Status::Flushed)]
    );
    assert_eq!((pair.state(0), pair.state(1)), (State::Err, State::Err));
    assert_eq!(pair.syndromes(1).last(), Some(&Syndrome::Nak(nak)));
    assert_eq!(pair.completed(1, RECV_CQ)[0], (10, Status::Success));
    assert_eq!(pair.bytes(1, remote), pattern(LEN, 2));
    assert_eq!(pair.bytes(0, local), pattern(LEN, 1));
    pair
}

/// Refused without a completion on the responder's side: the event, and every receive flushed.
fn refused_with_event(
    setup: Setup,
    rights: Rights,
    make: impl for<'a> Fn(&'a [Sge], Sge) -> SendRequest<'a>,
    nak: Nak,
    status: Status,
) {
    let pair = refused(setup, rights, make, nak, status);
    let qpn = pair.nodes[1].qpn;
    let event = if nak == Nak::RemoteAccess {
        AsyncEvent::QpAccessError(qpn)
    } else {
        AsyncEvent::QpRequestError(qpn)
    };
    assert_eq!(pair.nodes[1].events, [event]);
    let flushed = [11, 12, 13].map(|wr_id| (wr_id, Status::Flushed));
    assert_eq!(pair.completed(1, RECV_CQ)[1..], flushed);
}

fn access_refused(rights: Rights, make: impl for<'a> Fn(&'a [Sge], Sge) -> SendRequest<'a>) {
    refused_with_event(Setup::default(), rights, make, Nak::RemoteAccess, Status::RemoteAccess);
}

fn shifted(sge: Sge, by: i64) -> Sge {
    Sge {
        addr: sge.addr.wrapping_add_signed(by),
        ..sge
    }
}

fn other_key(sge: Sge) -> Sge {
    Sge {
        lkey: LKey(sge.lkey.0 + 0x100),
        ..sge
    }
}

const ADD: AtomicOp = AtomicOp::FetchAdd { add: 1 };
const SWAP: AtomicOp = AtomicOp::CompareSwap { compare: 0, swap: 1 };

#[test]
fn wrong_key() {
    access_refused(Rights::ALL, |local, remote| write_to(2, local, other_key(remote)));
    access_refused(Rights::ALL, |local, remote| {
        request(2, write_operation(other_key(remote), Some(1)), local)
    });
    access_refused(Rights::ALL, |local, remote| read_from(2, local, other_key(remote)));
    access_refused(Rights::ALL, |local, remote| atomic_on(2, local, other_key(remote), ADD));
    access_refused(Rights::ALL, |local, remote| {
        atomic_on(2, local, other_key(remote), SWAP)
    });
}

#[test]
fn out_of_range() {
    // The first packets of each would be inside.
    for by in [1, -1, 400, i64::MIN] {
        access_refused(Rights::ALL, |local, remote| write_to(2, local, shifted(remote, by)));
        access_refused(Rights::ALL, |local, remote| read_from(2, local, shifted(remote, by)));
    }
    access_refused(Rights::ALL, |local, remote| {
        atomic_on(2, local, shifted(remote, 600), ADD)
    });
    access_refused(Rights::ALL, |local, remote| {
        atomic_on(2, local, shifted(remote, -8), SWAP)
    });
}

#[test]
fn past_the_end_of_the_address_space() {
    let last = |remote| Sge {
        addr: u64::MAX - 10,
        ..remote
    };
    access_refused(Rights::ALL, |local, remote| write_to(2, local, last(remote)));
    access_refused(Rights::ALL, |local, remote| read_from(2, local, last(remote)));
}

#[test]
fn region_without_the_right() {
    access_refused(
        Rights {
            write: false,
            ..Rights::ALL
        },
        |local, remote| write_to(2, local, remote),
    );
    access_refused(
        Rights {
            read: false,
            ..Rights::ALL
        },
        |local, remote| read_from(2, local, remote),
    );
    access_refused(
        Rights {
            atomic: false,
            ..Rights::ALL
        },
        |local, remote| atomic_on(2, local, remote, ADD),
    );
    access_refused(
        Rights {
            atomic: false,
            ..Rights::ALL
        },
        |local, remote| atomic_on(2, local, remote, SWAP),
    );
}

#[test]
fn queue_pair_without_the_right() {
    let all = Setup::default();
    let without = |access| Setup { access, ..all };
    let (nak, status) = (Nak::InvalidRequest, Status::RemoteInvalidRequest);
    let no_write = without(RemoteAccess {
        write: false,
        ..all.access
    });
    refused_with_event(
        no_write,
        Rights::ALL,
        |local, remote| write_to(2, local, remote),
        nak,
        status,
    );
    let no_read = without(RemoteAccess {
        read: false,
        ..all.access
    });
    refused_with_event(
        no_read,
        Rights::ALL,
        |local, remote| read_from(2, local, remote),
        nak,
        status,
    );
    let no_atomic = without(RemoteAccess {
        atomic: false,
        ..all.access
    });
    refused_with_event(
        no_atomic,
        Rights::ALL,
        |local, remote| atomic_on(2, local, remote, ADD),
        nak,
        status,
    );
}

#[test]
fn unaligned_atomic() {
    let (nak, status) = (Nak::InvalidRequest, Status::RemoteInvalidRequest);
    for op in [ADD, SWAP] {
        refused_with_event(
            Setup::default(),
            Rights::ALL,
            |local, remote| atomic_on(2, local, shifted(remote, 4), op),
            nak,
            status,
        );
    }
}

#[test]
fn reads_and_atomics_without_dest_rd_atomic() {
    let setup = Setup {
        dest_rd_atomic: 0,
        ..Setup::default()
    };
    let (nak, status) = (Nak::InvalidRequest, Status::RemoteInvalidRequest);
    refused_with_event(
        setup,
        Rights::ALL,
        |local, remote| read_from(2, local, remote),
        nak,
        status,
    );
    refused_with_event(
        setup,
        Rights::ALL,
        |local, remote| atomic_on(2, local, remote, ADD),
        nak,
        status,
    );
}

#[test]
fn more_reads_than_agreed() {
    let mut pair = Pair::connected(Setup {
        dest_rd_atomic: 2,
        ..Setup::default()
    });
    let remote = pair.region(1, pattern(LEN, 2));
    let reth = |len| {
        Extension::Reth(Reth {
            va: remote.addr,
            rkey: rkey(remote),
            len,
        })
    };
    // The first two are not answered yet when the third one arrives.
    pair.forge(1, Opcode::RcReadRequest, 100, &reth(600), &[]);
    pair.forge(1, Opcode::RcReadRequest, 103, &reth(1), &[]);
    assert_eq!(pair.state(1), State::Rts);
    pair.forge(1, Opcode::RcReadRequest, 104, &reth(1), &[]);
    assert_eq!(pair.state(1), State::Err);
    // Earlier requests are answered before the NAK.
    pair.transmit(1, &mut |_, _| util::Fate::Drop);
    assert_eq!(
        pair.opcodes(1),
        [
            Opcode::RcReadResponseFirst,
            Opcode::RcReadResponseMiddle,
            Opcode::RcReadResponseLast,
            Opcode::RcReadResponseOnly,
            Opcode::RcAcknowledge
        ]
    );
    assert_eq!(pair.syndromes(1), [Syndrome::Nak(Nak::InvalidRequest)]);
}

#[test]
fn message_longer_than_the_receive() {
    for room in [0, 255, 256, 300, 599] {
        let mut pair = Pair::connected(Setup::default());
        let local = pair.region(0, pattern(LEN, 1));
        let inbox = pair.region(1, vec![0; LEN]);
        pair.receive(1, 10, &[Sge { len: room, ..inbox }]);
        pair.receive(1, 11, &[inbox]);
        pair.post(0, &send(1, &[local]));
        pair.run();
        assert_eq!(pair.completed(0, SEND_CQ), [(1, Status::RemoteInvalidRequest)]);
        assert_eq!(
            pair.completed(1, RECV_CQ),
            [(10, Status::LocalLength), (11, Status::Flushed)]
        );
        assert_eq!(pair.syndromes(1), [Syndrome::Nak(Nak::InvalidRequest)]);
        assert!(pair.bytes(1, inbox)[room as usize..].iter().all(|byte| *byte == 0));
    }
}

#[test]
fn receive_into_memory_that_is_not_writable() {
    let mut pair = Pair::connected(Setup::default());
    let local = pair.region(0, pattern(LEN, 1));
    let inbox = pair.nodes[1].memory.register(vec![0; LEN], Rights::NONE);
    pair.receive(1, 10, &[inbox]);
    pair.post(0, &send(1, &[local]));
    pair.run();
    assert_eq!(pair.completed(0, SEND_CQ), [(1, Status::RemoteOperational)]);
    assert_eq!(pair.completed(1, RECV_CQ), [(10, Status::LocalProtection)]);
    assert_eq!(pair.bytes(1, inbox), vec![0; LEN]);
}

/// A request with invalid local memory: earlier ones complete, nothing of it is sent.
fn locally_refused(bad: impl Fn(&mut Pair) -> Sge, make: impl for<'a> Fn(&'a [Sge], Sge) -> SendRequest<'a>) {
    let mut pair = Pair::connected(Setup::default());
    let good = pair.region(0, pattern(LEN, 1));
    let bad = bad(&mut pair);
    let remote = pair.region(1, pattern(LEN, 2));
    pair.post(0, &write_to(1, &[good], remote));
    pair.post(0, &make(&[bad], remote));
    pair.post(0, &write_to(3, &[good], remote));
    pair.run();
    let expected = [(1, Status::Success), (2, Status::LocalProtection), (3, Status::Flushed)];
    assert_eq!(pair.completed(0, SEND_CQ), expected);
    assert_eq!(pair.opcodes(0).len(), 3);
    assert_eq!(pair.bytes(1, remote), pattern(LEN, 1));
    assert_eq!(pair.state(0), State::Err);
}

#[test]
fn local_memory_that_is_not_there() {
    for len in [1, 600] {
        locally_refused(
            |pair| {
                let sge = pair.region(0, vec![0; len]);
                pair.nodes[0].memory.deregister(sge);
                sge
            },
            |local, remote| write_to(2, local, remote),
        );
    }
}

#[test]
fn local_memory_that_is_not_writable() {
    let read_only = |len| move |pair: &mut Pair| pair.nodes[0].memory.register(vec![0; len], Rights::NONE);
    locally_refused(read_only(LEN), |local, remote| read_from(2, local, remote));
    locally_refused(read_only(8), |local, remote| atomic_on(2, local, remote, ADD));
}

#[test]
fn memory_deregistered_during_read_responses() {
    let mut pair = Pair::connected(Setup::default());
    let local = pair.region(0, pattern(LEN, 1));
    let remote = pair.region(1, pattern(LEN, 2));
    pair.post(0, &read_from(1, &[local], remote));
    pair.transmit(0, &mut |_, _| util::Fate::Drop);
    let read_request = pair.log[0].clone();
    pair.deliver(&read_request);
    pair.nodes[1].memory.deregister(remote);
    pair.run();
    assert_eq!(pair.completed(0, SEND_CQ), [(1, Status::RemoteAccess)]);
    assert_eq!(pair.nodes[1].events, [AsyncEvent::QpAccessError(pair.nodes[1].qpn)]);
    assert_eq!(pair.bytes(0, local), pattern(LEN, 1));
}

/// Forges packets from PSN 100 on: all but the last are accepted, the last is an invalid request.
fn invalid(packets: &[(Opcode, Extension, usize)]) {
    let mut pair = Pair::connected(Setup::default());
    let inbox = pair.region(1, vec![0; 2000]);
    pair.receive(1, 10, &[inbox]);
    for (at, (opcode, extension, len)) in packets.iter().enumerate() {
        assert_eq!(pair.state(1), State::Rts, "{packets:?}");
        pair.forge(1, *opcode, 100 + at as u32, extension, &vec![1; *len]);
    }
    assert_eq!(pair.state(1), State::Err, "{packets:?}");
    pair.transmit(1, &mut |_, _| util::Fate::Drop);
    assert_eq!(pair.syndromes(1), [Syndrome::Nak(Nak::InvalidRequest)], "{packets:?}");
    let last = pair.log.last().unwrap();
    assert_eq!(last.packet().bth.psn.get(), 99 + packets.len() as u32);
    assert_eq!(pair.nodes[1].endpoint.counters().invalid_request_naks_sent, 1);
}

#[test]
fn wrong_order_of_opcodes() {
    use Opcode::{
        RcReadRequest, RcSendFirst, RcSendLast, RcSendLastImm, RcSendMiddle, RcSendOnly, RcWriteFirst, RcWriteLast,
        RcWriteMiddle, RcWriteOnly,
    };
    let bare = Extension::Bare;
    let imm = Extension::Imm(ImmDt(1));
    let nothing = Extension::Reth(Reth {
        va: 0,
        rkey: RKey(0),
        len: 0,
    });
    for opcode in [RcSendMiddle, RcSendLast, RcWriteMiddle, RcWriteLast] {
        invalid(&[(opcode, bare, 256)]);
    }
    invalid(&[(RcSendLastImm, imm, 1)]);
    let first = (RcSendFirst, bare, 256);
    for opcode in [RcSendFirst, RcSendOnly, RcWriteMiddle, RcWriteLast] {
        invalid(&[first, (opcode, bare, 256)]);
    }
    for opcode in [RcWriteFirst, RcWriteOnly] {
        invalid(&[first, (opcode, nothing, 0)]);
    }
    invalid(&[first, (RcReadRequest, nothing, 0)]);
    let atomic = AtomicEth {
        va: 0,
        rkey: RKey(0),
        swap_add: 0,
        compare: 0,
    };
    invalid(&[first, (Opcode::RcFetchAdd, Extension::Atomic(atomic), 0)]);
    invalid(&[(RcSendOnly, bare, 0), (RcSendLast, bare, 1)]);
}

#[test]
fn wrong_lengths() {
    use Opcode::{RcSendFirst, RcSendLast, RcSendMiddle, RcSendOnly, RcWriteOnly};
    let bare = Extension::Bare;
    for len in [0, 255, 257] {
        invalid(&[(RcSendFirst, bare, len)]);
        invalid(&[(RcSendFirst, bare, 256), (RcSendMiddle, bare, len)]);
    }
    for len in [0, 257] {
        invalid(&[(RcSendFirst, bare, 256), (RcSendLast, bare, len)]);
    }
    invalid(&[(RcSendOnly, bare, 257)]);
    for (declared, len) in [(1, 0), (0, 1), (300, 256), (5, 6), (u32::MAX, 256)] {
        let reth = Extension::Reth(Reth {
            va: 0,
            rkey: RKey(0),
            len: declared,
        });
        invalid(&[(RcWriteOnly, reth, len)]);
    }
}

#[test]
fn write_that_does_not_have_its_length() {
    use Opcode::{RcWriteFirst, RcWriteLast, RcWriteMiddle};
    for (declared, rest) in [
        (256, &[][..]),
        (100, &[][..]),
        (512, &[(RcWriteMiddle, 256)][..]),
        (600, &[(RcWriteLast, 256)]),
        (300, &[(RcWriteLast, 45)]),
    ] {
        let mut pair = Pair::connected(Setup::default());
        let remote = pair.region(1, vec![0; LEN]);
        let reth = Extension::Reth(Reth {
            va: remote.addr,
            rkey: rkey(remote),
            len: declared,
        });
        pair.forge(1, RcWriteFirst, 100, &reth, &[1; 256]);
        for (opcode, len) in rest {
            assert_eq!(pair.state(1), State::Rts);
            pair.forge(1, *opcode, 101, &Extension::Bare, &vec![1; *len]);
        }
        assert_eq!(pair.state(1), State::Err);
        let written = if rest.is_empty() { 0 } else { 256 };
        assert!(pair.bytes(1, remote)[written..].iter().all(|byte| *byte == 0));
    }
}

#[test]
fn responses_that_do_not_fit() {
    let good = Extension::Aeth(Aeth {
        syndrome: Syndrome::Ack(Credits::UNLIMITED),
        msn: 0,
    });
    for (opcode, extension, len) in [
        (Opcode::RcReadResponseOnly, good, 256),
        (Opcode::RcReadResponseFirst, good, 255),
        (Opcode::RcReadResponseMiddle, Extension::Bare, 0),
        (Opcode::RcReadResponseLast, good, 88),
    ] {
        let mut pair = Pair::connected(Setup::default());
        let local = pair.region(0, pattern(LEN, 1));
        let remote = pair.region(1, pattern(LEN, 2));
        pair.post(0, &read_from(1, &[local], remote));
        pair.transmit(0, &mut |_, _| util::Fate::Drop);
        pair.forge(0, opcode, 100, &extension, &vec![9; len]);
        pair.run();
        assert_eq!(pair.completed(0, SEND_CQ), [(1, Status::BadResponse)]);
        assert_eq!(pair.bytes(0, local), pattern(LEN, 1));
    }
}

#[test]
fn responses_to_nothing_change_nothing() {
    let syndromes = [
        Syndrome::Ack(Credits::UNLIMITED),
        Syndrome::Nak(Nak::PsnSequence),
        Syndrome::Nak(Nak::RemoteAccess),
        Syndrome::RnrNak(doorbell_roce_proto::wire::RnrTimer::from_code(1)),
    ];
    let mut pair = Pair::connected(Setup::default());
    let (local, remote) = (pair.region(0, pattern(LEN, 1)), pair.region(1, pattern(LEN, 2)));
    pair.post(0, &write_to(1, &[local], remote));
    pair.transmit(0, &mut |_, _| util::Fate::Deliver);
    // Three packets are in flight: other PSNs are ghosts.
    for psn in [99, 98, 103, 104, 5000, 0x80_0000, 0xff_ffff] {
        for syndrome in syndromes {
            pair.forge(
                0,
                Opcode::RcAcknowledge,
                psn,
                &Extension::Aeth(Aeth { syndrome, msn: 1 }),
                &[],
            );
        }
    }
    // READ responses to a WRITE are unexpected too.
    let ack = Extension::Aeth(Aeth {
        syndrome: syndromes[0],
        msn: 1,
    });
    (100..103).for_each(|psn| pair.forge(0, Opcode::RcReadResponseOnly, psn, &ack, &[1; 8]));
    assert_eq!(pair.completed(0, SEND_CQ), []);
    pair.run();
    assert_eq!(pair.completed(0, SEND_CQ), [(1, Status::Success)]);
    let counters = pair.nodes[0].endpoint.counters();
    assert_eq!(
        (counters.retransmits, counters.duplicates, counters.unexpected_responses),
        (0, 12, 19)
    );
}

#[test]
fn pending_nak_survives_modify_to_err() {
    let mut pair = Pair::connected(Setup::default());
    pair.forge(1, Opcode::RcSendLast, 100, &Extension::Bare, &[1]);
    pair.enter(1, State::Err);
    pair.transmit(1, &mut util::drop_all);
    assert_eq!(pair.syndromes(1), [Syndrome::Nak(Nak::InvalidRequest)]);
}

#[test]
fn modify_to_err_drops_replies() {
    let mut pair = Pair::connected(Setup::default());
    let remote = pair.region(1, pattern(LEN, 2));
    let reth = Reth {
        va: remote.addr,
        rkey: rkey(remote),
        len: 600,
    };
    pair.forge(1, Opcode::RcReadRequest, 100, &Extension::Reth(reth), &[]);
    pair.enter(1, State::Err);
    pair.transmit(1, &mut util::drop_all);
    assert_eq!(pair.log.len(), 0);
}

#[test]
fn requester_failure_drops_replies() {
    let mut pair = Pair::connected(Setup {
        rd_atomic: 0,
        ..Setup::default()
    });
    let (local, remote) = (pair.region(0, pattern(LEN, 1)), pair.region(1, pattern(LEN, 2)));
    let reth = Reth {
        va: local.addr,
        rkey: rkey(local),
        len: 600,
    };
    pair.post(0, &write_to(1, &[local], remote));
    pair.transmit(0, &mut util::drop_all);
    pair.log.clear();
    pair.forge(0, Opcode::RcReadRequest, 9000, &Extension::Reth(reth), &[]);
    let syndrome = Syndrome::Nak(Nak::RemoteOperational);
    pair.forge(
        0,
        Opcode::RcAcknowledge,
        100,
        &Extension::Aeth(Aeth { syndrome, msn: 0 }),
        &[],
    );
    pair.transmit(0, &mut util::drop_all);
    assert_eq!(pair.completed(0, SEND_CQ), [(1, Status::RemoteOperational)]);
    assert_eq!(pair.log.len(), 0);
}
