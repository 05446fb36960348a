//! Atomic WRITE and FLUSH, in particular what is refused (IBTA vol 1, annex A19). That they are
//! executed once, whatever is lost, is in `operations.rs` and `spec.rs`.

mod util;

use doorbell_roce_proto::LKey;
use doorbell_roce_proto::memory::{Flush, Placement, Sge};
use doorbell_roce_proto::qp::RemoteAccess;
use doorbell_roce_proto::wire::{Extension, Feth, Nak, Opcode, Reth, Syndrome};
use doorbell_roce_proto::work::{Operation, Payload, PostError, SendRequest, Status};

use util::memory::{EVERYWHERE, Rights, rkey};
use util::{Pair, SEND_CQ, Setup, atomic_write_to, flush_of, pattern, request, success, write_to};

const LEN: usize = 600;
const WORD: [u8; 8] = 0x0102_0304_0506_0708_u64.to_ne_bytes();
const PERSISTENT: Placement = Placement {
    global: false,
    persistent: true,
};

fn flush(target: Sge, change: impl FnOnce(&mut Flush)) -> SendRequest<'static> {
    let Operation::Flush(mut flush) = flush_of(1, target).operation else {
        unreachable!("it is one");
    };
    change(&mut flush);
    request(1, Operation::Flush(flush), &[])
}

/// With the region that `rights` permit to access; returns the NAK, and nothing was changed.
fn refused(setup: Setup, rights: Rights, make: impl FnOnce(Sge) -> SendRequest<'static>) -> (Status, Nak) {
    let mut pair = Pair::connected(setup);
    let target = pair.nodes[1].memory.register(pattern(LEN, 1), rights);
    pair.post(0, &make(target));
    pair.run();
    let [(1, status)] = pair.completed(0, SEND_CQ)[..] else {
        panic!("{:?}", pair.completed(0, SEND_CQ));
    };
    let Some(Syndrome::Nak(nak)) = pair.syndromes(1).last().copied() else {
        panic!("{:?}", pair.syndromes(1));
    };
    assert_eq!(pair.bytes(1, target), pattern(LEN, 1));
    assert!(pair.nodes[1].memory.flushed.is_empty());
    (status, nak)
}

const ACCESS: (Status, Nak) = (Status::RemoteAccess, Nak::RemoteAccess);
const INVALID: (Status, Nak) = (Status::RemoteInvalidRequest, Nak::InvalidRequest);

#[test]
fn the_region_must_permit_it() {
    let refused = |rights, make: &dyn Fn(Sge) -> SendRequest<'static>| refused(Setup::default(), rights, make);
    let other = |target: Sge| Sge {
        lkey: LKey(target.lkey.0 + 0x100),
        ..target
    };
    let beyond = |target: Sge| Sge {
        addr: target.addr + 1,
        ..target
    };
    let read_only = Rights {
        write: false,
        ..Rights::ALL
    };
    assert_eq!(refused(read_only, &|target| atomic_write_to(1, target, WORD)), ACCESS);
    let last = |target: Sge| Sge {
        addr: target.addr + LEN as u64,
        ..target
    };
    assert_eq!(
        refused(Rights::ALL, &|target| atomic_write_to(1, last(target), WORD)),
        ACCESS
    );
    let volatile = Rights {
        flush: Placement {
            persistent: false,
            ..EVERYWHERE
        },
        ..Rights::ALL
    };
    assert_eq!(
        refused(volatile, &|target| flush(target, |it| it.placement = PERSISTENT)),
        ACCESS
    );
    assert_eq!(
        refused(volatile, &|target| flush(target, |it| it.placement = EVERYWHERE)),
        ACCESS
    );
    assert_eq!(refused(Rights::ALL, &|target| flush_of(1, beyond(target))), ACCESS);
    assert_eq!(refused(Rights::ALL, &|target| flush_of(1, other(target))), ACCESS);
    let whole = |target| flush(other(target), |it| it.whole_region = true);
    assert_eq!(refused(Rights::ALL, &whole), ACCESS);
}

#[test]
fn the_queue_pair_must_permit_it() {
    let all = Setup::default();
    let with = |access| Setup { access, ..all };
    let no_write = with(RemoteAccess {
        write: false,
        ..all.access
    });
    let no_flush = with(RemoteAccess {
        flush: PERSISTENT,
        ..all.access
    });
    let none = Setup {
        dest_rd_atomic: 0,
        ..all
    };
    for setup in [no_write, none] {
        assert_eq!(
            refused(setup, Rights::ALL, |target| atomic_write_to(1, target, WORD)),
            INVALID
        );
    }
    for setup in [no_flush, none] {
        assert_eq!(refused(setup, Rights::ALL, |target| flush_of(1, target)), INVALID);
    }
    let unaligned = |target: Sge| Sge {
        addr: target.addr + 4,
        ..target
    };
    assert_eq!(
        refused(all, Rights::ALL, |target| atomic_write_to(1, unaligned(target), WORD)),
        INVALID
    );
}

/// What only a foreign requester sends.
#[test]
fn malformed_packets() {
    let reth = |target: Sge, len| Reth {
        va: target.addr,
        rkey: rkey(target),
        len,
    };
    let reserved = [Feth { plt: 5, sel: 0 }, Feth { plt: 1, sel: 2 }];
    let flushes = reserved.map(|feth| (Opcode::RcFlush, Some(feth), 8, 0));
    let writes = [(8, 7), (8, 0), (7, 8), (16, 16)].map(|(len, bytes)| (Opcode::RcAtomicWrite, None, len, bytes));
    for (opcode, feth, len, bytes) in flushes.into_iter().chain(writes) {
        let mut pair = Pair::connected(Setup::default());
        let target = pair.region(1, pattern(LEN, 1));
        let reth = reth(target, len);
        let extension = feth.map_or(Extension::Reth(reth), |feth| Extension::FethReth(feth, reth));
        pair.forge(1, opcode, 100, &extension, &pattern(bytes, 3));
        pair.run();
        assert_eq!(
            pair.syndromes(1),
            [Syndrome::Nak(Nak::InvalidRequest)],
            "{feth:?} {len} {bytes}"
        );
        assert_eq!(pair.bytes(1, target), pattern(LEN, 1));
    }
}

/// A duplicate that arrives late is acknowledged again, as a READ of no bytes is, and not executed.
#[test]
fn a_late_duplicate_changes_nothing() {
    let mut pair = Pair::connected(Setup::default());
    let (local, target) = (pair.region(0, pattern(LEN, 2)), pair.region(1, pattern(LEN, 1)));
    pair.post(0, &atomic_write_to(0, target, WORD));
    pair.post(0, &flush_of(1, target));
    pair.post(0, &write_to(2, &[local], target));
    pair.run();
    assert_eq!(pair.completed(0, SEND_CQ), success(0..3));
    let sent = pair.log.clone();
    for late in sent.iter().filter(|sent| sent.from == 0).take(2) {
        pair.deliver(late);
        let answer = pair.transmit_one(1).expect("a duplicate is answered");
        let packet = answer.packet();
        assert_eq!(
            (packet.bth.opcode, packet.payload.len()),
            (Opcode::RcReadResponseOnly, 0)
        );
        assert_eq!(packet.bth.psn, late.packet().bth.psn);
    }
    assert_eq!(pair.bytes(1, target), pattern(LEN, 2));
    let flushed = &pair.nodes[1].memory.flushed;
    let [(_, found)] = &flushed[..] else {
        panic!("{flushed:?}");
    };
    assert_eq!(
        found[..8],
        WORD,
        "what precedes a FLUSH is in memory when it is executed"
    );
    assert_eq!(found[8..], pattern(LEN, 1)[8..]);
}

#[test]
fn nothing_but_the_operation_is_posted() {
    let mut pair = Pair::connected(Setup::default());
    let (local, target) = (pair.region(0, pattern(8, 2)), pair.region(1, pattern(LEN, 1)));
    let node = &mut pair.nodes[0];
    let too_long = flush(target, |it| it.len = (1 << 31) + 1);
    assert_eq!(
        node.endpoint.post_send(pair.now, node.qpn, &too_long),
        Err(PostError::Invalid)
    );
    for made in [atomic_write_to(1, target, WORD), flush_of(1, target)] {
        for payload in [Payload::Gather(&[local]), Payload::Inline(&WORD)] {
            let posted = node
                .endpoint
                .post_send(pair.now, node.qpn, &SendRequest { payload, ..made });
            assert_eq!(posted, Err(PostError::Invalid));
        }
    }
}
