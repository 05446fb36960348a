//! Work requests and payloads of the tests.

use doorbell_roce_proto::LKey;
use doorbell_roce_proto::memory::{AtomicOp, Flush, Placement, Sge};
use doorbell_roce_proto::qp::State;
use doorbell_roce_proto::wire::Transport;
use doorbell_roce_proto::work::{Operation, Payload, SendRequest, Status};

use super::{Pair, memory};

pub(crate) fn request<'a>(wr_id: u64, operation: Operation, sges: &'a [Sge]) -> SendRequest<'a> {
    SendRequest {
        wr_id,
        operation,
        payload: Payload::Gather(sges),
        signaled: true,
        fence: false,
        solicited: false,
    }
}

pub(crate) fn send<'a>(wr_id: u64, sges: &'a [Sge]) -> SendRequest<'a> {
    request(wr_id, Operation::Send { imm: None }, sges)
}

pub(crate) fn write_to<'a>(wr_id: u64, sges: &'a [Sge], target: Sge) -> SendRequest<'a> {
    request(wr_id, write_operation(target, None), sges)
}

pub(crate) fn write_operation(target: Sge, imm: Option<u32>) -> Operation {
    Operation::Write {
        addr: target.addr,
        rkey: memory::rkey(target),
        imm,
    }
}

pub(crate) fn read_from<'a>(wr_id: u64, sges: &'a [Sge], source: Sge) -> SendRequest<'a> {
    let operation = Operation::Read {
        addr: source.addr,
        rkey: memory::rkey(source),
    };
    request(wr_id, operation, sges)
}

pub(crate) fn atomic_on<'a>(wr_id: u64, result: &'a [Sge], target: Sge, op: AtomicOp) -> SendRequest<'a> {
    let operation = Operation::Atomic {
        addr: target.addr,
        rkey: memory::rkey(target),
        op,
    };
    request(wr_id, operation, result)
}

pub(crate) fn atomic_write_to(wr_id: u64, target: Sge, word: [u8; 8]) -> SendRequest<'static> {
    let operation = Operation::AtomicWrite {
        addr: target.addr,
        rkey: memory::rkey(target),
        word,
    };
    request(wr_id, operation, &[])
}

pub(crate) fn flush_of(wr_id: u64, target: Sge) -> SendRequest<'static> {
    let flush = Flush {
        addr: target.addr,
        rkey: memory::rkey(target),
        len: target.len,
        whole_region: false,
        placement: Placement {
            global: true,
            persistent: false,
        },
    };
    request(wr_id, Operation::Flush(flush), &[])
}

pub(crate) fn pattern(len: usize, seed: u64) -> Vec<u8> {
    let mut state = seed.wrapping_mul(2).wrapping_add(1);
    let byte = |_| {
        state = state
            .wrapping_mul(6_364_136_223_846_793_005)
            .wrapping_add(1_442_695_040_888_963_407);
        (state >> 56) as u8
    };
    (0..len).map(byte).collect()
}

pub(crate) fn fail_sending(pair: &mut Pair) {
    let nowhere = Sge {
        addr: 0,
        len: 8,
        lkey: LKey(0),
    };
    let to = pair.destination(0);
    match pair.setup.transport {
        Transport::Ud => pair.post_datagram(0, &send(77, &[nowhere]), &to),
        _ => pair.post(0, &send(77, &[nowhere])),
    }
    assert!(pair.transmit_one(0).is_none());
    assert_eq!(
        pair.nodes[0].completions.pop().unwrap().1.status,
        Status::LocalProtection
    );
    assert_eq!(pair.state(0), State::Sqe);
}
