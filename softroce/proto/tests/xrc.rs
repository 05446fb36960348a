//! XRC: an initiator at the first node, a target and shared receive queues at the second one (IBTA
//! vol 1, annex A14).

mod util;

use doorbell_roce_proto::memory::{AtomicOp, PdId, Sge};
use doorbell_roce_proto::qp::{Modify, ModifyError};
use doorbell_roce_proto::wire::{Opcode, Transport};
use doorbell_roce_proto::work::{CqId, Operation, PostError, ReceiveRequest, Remote, Status, XrcDomain};
use doorbell_roce_proto::{SrqInit, XrcSrq};

use util::memory::Rights;
use util::{
    Fate, PD, Pair, SEND_CQ, Setup, XRC_DOMAIN, atomic_on, pattern, read_from, receive_of, request, send, success,
    write_operation, write_to,
};

const CQ: CqId = CqId(9);

const SRQ: SrqInit = SrqInit {
    pd: PD,
    max_wr: 8,
    max_sge: 2,
    xrc: Some(XrcSrq {
        domain: XRC_DOMAIN,
        cq: CQ,
    }),
};

fn setup() -> Setup {
    Setup {
        transport: Transport::Xrc,
        srq: Some(SRQ),
        ..Setup::default()
    }
}

/// All operations, some of several packets, while packets are lost and overtake each other.
#[test]
fn every_operation_reaches_the_queue_that_it_names() {
    let mut pair = Pair::connected(setup());
    let srq = pair.nodes[1].srq.unwrap();
    let from = pair.region(0, pattern(700, 1));
    let into = [1, 2].map(|seed| pair.region(1, pattern(700, seed + 2)));
    let back = pair.region(0, vec![0; 700]);
    pair.receive_shared(1, &into[..1]).unwrap();
    pair.receive_shared(2, &[]).unwrap();
    let result = pair.region(0, vec![0; 8]);
    let word = pair.region(1, 41_u64.to_ne_bytes().to_vec());
    let (from_list, back_list, result_list) = ([from], [back], [result]);
    let requests = [
        send(1, &from_list),
        request(2, write_operation(into[1], Some(77)), &from_list),
        read_from(3, &back_list, into[1]),
        atomic_on(4, &result_list, word, AtomicOp::FetchAdd { add: 1 }),
    ];
    for request in &requests {
        pair.post_to_srq(request, srq).unwrap();
    }
    pair.run_with(|number, _| match number % 5 {
        1 => Fate::Drop,
        3 => Fate::Delay(2),
        _ => Fate::Deliver,
    });
    assert_eq!(pair.completed(0, SEND_CQ), success(1..5));
    assert_eq!(pair.completed(1, CQ), success(1..3));
    let received: Vec<_> = pair.nodes[1].completions.iter().map(|(_, done)| *done).collect();
    assert!(received.iter().all(|done| done.qpn == pair.nodes[1].qpn));
    assert_eq!((received[0].byte_len, receive_of(&received[1]).2), (700, Some(77)));
    for at in into {
        assert_eq!(pair.bytes(1, at), pattern(700, 1));
    }
    assert_eq!(pair.bytes(0, back), pattern(700, 1));
    assert_eq!(pair.bytes(1, word), 42_u64.to_ne_bytes());
    assert!(pair.log.iter().all(|sent| sent.opcode().transport() == Transport::Xrc));
    let requests = pair.log.iter().filter(|sent| sent.from == 0);
    assert!(requests.clone().count() > 0);
    assert!(
        requests
            .into_iter()
            .all(|sent| sent.packet().bth.xrc == Some(srq.number()))
    );
    assert!(pair.opcodes(1).contains(&Opcode::XrcReadResponseMiddle));
}

/// The keys of requests and receives are of the named queue's protection domain.
#[test]
fn the_protection_domain_is_that_of_the_queue() {
    let mut pair = Pair::connected(setup());
    let (other, first) = (PdId(PD.0 + 1), pair.nodes[1].srq.unwrap());
    let second = pair.nodes[1].endpoint.create_srq(SrqInit {
        pd: other,
        max_sge: 4,
        ..SRQ
    });
    let (from, back) = (pair.region(0, pattern(600, 1)), pair.region(0, vec![0; 600]));
    let theirs = pair.nodes[1].memory.register_in(other, vec![0; 600], Rights::ALL);
    let parts = [0, 150, 300, 450].map(|at| Sge {
        addr: theirs.addr + at,
        len: 150,
        ..theirs
    });
    let receive = ReceiveRequest { wr_id: 5, sges: &parts };
    pair.nodes[1].endpoint.post_shared_receive(second, &receive).unwrap();
    pair.post_to_srq(&send(1, &[from]), second).unwrap();
    pair.post_to_srq(&read_from(2, &[back], theirs), second).unwrap();
    // Its responses are read from memory when they are sent, after the next request is handled.
    pair.receive_shared(6, &[]).unwrap();
    pair.post_to_srq(&send(3, &[]), first).unwrap();
    pair.run();
    assert_eq!(pair.completed(0, SEND_CQ), success(1..4));
    assert_eq!(pair.completed(1, CQ), success([5, 6]));
    assert_eq!(pair.bytes(1, theirs), pattern(600, 1));
    assert_eq!(pair.bytes(0, back), pattern(600, 1));
    pair.post_to_srq(&write_to(4, &[from], theirs), first).unwrap();
    pair.run();
    assert_eq!(pair.completed(0, SEND_CQ)[3..], [(4, Status::RemoteAccess)]);
}

#[test]
fn a_queue_of_no_or_another_domain_is_refused() {
    let elsewhere = XrcSrq {
        domain: XrcDomain(XRC_DOMAIN.0 + 1),
        cq: CQ,
    };
    for (xrc, exists) in [(None, true), (Some(elsewhere), true), (SRQ.xrc, false)] {
        let mut pair = Pair::connected(setup());
        let endpoint = &mut pair.nodes[1].endpoint;
        let other = endpoint.create_srq(SrqInit { xrc, ..SRQ });
        let receive = ReceiveRequest { wr_id: 1, sges: &[] };
        endpoint.post_shared_receive(other, &receive).unwrap();
        if !exists {
            endpoint.destroy_srq(other).unwrap();
        }
        pair.post_to_srq(&send(1, &[]), other).unwrap();
        pair.run();
        assert_eq!(pair.completed(0, SEND_CQ), [(1, Status::RemoteInvalidRequest)]);
        assert!(pair.nodes[1].completions.is_empty());
    }
}

/// Its receives are discarded, also one that a message began to fill.
#[test]
fn a_queue_can_be_destroyed_during_a_message() {
    let mut pair = Pair::connected(setup());
    let srq = pair.nodes[1].srq.unwrap();
    let (from, into) = (pair.region(0, pattern(600, 1)), pair.region(1, vec![0; 600]));
    pair.receive_shared(1, &[into]).unwrap();
    pair.post_to_srq(&send(1, &[from]), srq).unwrap();
    let first = pair.transmit_one(0).unwrap();
    pair.deliver(&first);
    pair.nodes[1].endpoint.destroy_srq(srq).unwrap();
    pair.run();
    assert_eq!(pair.completed(0, SEND_CQ), [(1, Status::RemoteInvalidRequest)]);
    assert!(pair.nodes[1].completions.is_empty());
}

/// Each end has its own half of the attributes and requests of RC.
#[test]
fn the_initiator_sends_and_the_target_receives() {
    let mut pair = Pair::connected(setup());
    let srq = pair.nodes[1].srq.unwrap();
    let (now, initiator, target) = (pair.now, pair.nodes[0].qpn, pair.nodes[1].qpn);
    let receive = ReceiveRequest { wr_id: 1, sges: &[] };
    for (at, qpn) in [(0, initiator), (1, target)] {
        let endpoint = &mut pair.nodes[at].endpoint;
        assert_eq!(endpoint.post_send(now, qpn, &send(1, &[])), Err(PostError::Invalid));
        assert_eq!(endpoint.post_receive(qpn, &receive), Err(PostError::Invalid));
        let rnr = Modify {
            min_rnr_timer: Some(1),
            ..Modify::default()
        };
        let expected = if at == 0 {
            Err(ModifyError::NotAllowed(1 << 15))
        } else {
            Ok(())
        };
        assert_eq!(endpoint.modify_qp(now, qpn, &rnr), expected);
    }
    let endpoint = &mut pair.nodes[1].endpoint;
    let by_target = endpoint.post_to(target, &send(1, &[]), &Remote::Srq(srq.number()));
    assert_eq!(by_target, Err(PostError::Invalid));
    // A request to the initiator, and a response to the target.
    let request = request(1, Operation::Send { imm: None }, &[]);
    pair.receive_shared(1, &[]).unwrap();
    pair.post_to_srq(&request, srq).unwrap();
    let mut sent = pair.transmit_one(0).unwrap();
    pair.deliver(&sent);
    let reply = pair.transmit_one(1).unwrap();
    for (bytes, from) in [(sent.bytes.clone(), 1), (reply.bytes.clone(), 0)] {
        let dest = pair.nodes[1 - from].qpn.get().to_be_bytes();
        (sent.bytes, sent.from) = (bytes, from);
        sent.bytes[5..8].copy_from_slice(&dest[1..]);
        let malformed = pair.counters(1 - from).malformed;
        pair.deliver_sealed(&mut sent);
        assert_eq!(pair.counters(1 - from).malformed, malformed + 1);
    }
    pair.deliver(&reply);
    assert_eq!(pair.completed(0, SEND_CQ), success([1]));
}
