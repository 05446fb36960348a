//! Send queue drain: RTS → SQD → RTS (IBTA vol 1, 10.3.1; ibv_modify_qp(3)).

use std::mem::MaybeUninit;

use doorbell_softroce_ibverbs::api;
use doorbell_verbs_sys::*;

use crate::common::*;

fn queried(side: &Side) -> ibv_qp_attr {
    let (mut found, mut init) = (attr(), MaybeUninit::uninit());
    // SAFETY: live, both to be written.
    let result = unsafe { (api().query_qp)(side.qp, &mut found, 0, init.as_mut_ptr()) };
    assert_eq!(result, 0);
    found
}

fn draining(side: &Side) -> (ibv_qp_state, u8) {
    let found = queried(side);
    (found.qp_state, found.sq_draining)
}

fn into(side: &Side, state: ibv_qp_state, notify: Option<u8>) -> i32 {
    let mut attr = attr();
    attr.qp_state = state;
    attr.en_sqd_async_notify = notify.unwrap_or(0);
    let also = notify.map_or(0, |_| IBV_QP_EN_SQD_ASYNC_NOTIFY);
    side.modify(&mut attr, IBV_QP_STATE | also)
}

/// Expects the send queue drained event of this side.
fn drained(side: &Side) {
    let mut event = MaybeUninit::<ibv_async_event>::uninit();
    // SAFETY: live; filled on success; of a queue pair's event the element is one.
    unsafe {
        assert_eq!((api().get_async_event)(side.context, event.as_mut_ptr()), 0);
        let event = event.assume_init();
        assert_eq!((event.event_type, event.element.qp), (IBV_EVENT_SQ_DRAINED, side.qp));
        (api().ack_async_event)(&mut { event });
    }
}

#[test]
fn sqd_finishes_requests_in_flight_and_holds_new_ones() {
    crate::setup();
    let (a, b) = pair(("soft0", "soft1"), &Setup::default());
    // The request stays in flight until the peer posts a receive.
    a.fill(0, b"begun...later...");
    let first = queried(&a).sq_psn;
    assert_eq!(a.post(request(1, IBV_WR_SEND), &mut [a.sge(0, 8)]), 0);
    // Another thread that is transmitting may begin it.
    while queried(&a).sq_psn == first {
        std::thread::yield_now();
    }
    assert_eq!(into(&a, IBV_QPS_SQD, Some(1)), 0);
    assert_eq!(draining(&a), (IBV_QPS_SQD, 1));
    assert_eq!(
        a.post(rdma(2, IBV_WR_RDMA_WRITE, b.addr() + 8, b.rkey()), &mut [a.sge(8, 8)]),
        0
    );
    assert_eq!(b.receive(10, &mut [b.sge(0, 8)]), 0);
    drained(&a);
    assert_eq!(draining(&a), (IBV_QPS_SQD, 0));
    b.done(10);
    a.done(1);
    // The peer's requests are served meanwhile: its SEND would complete after the WRITE, if that
    // were in flight.
    assert_eq!(a.receive(11, &mut [a.sge(100, 8)]), 0);
    assert_eq!(b.post(request(3, IBV_WR_SEND), &mut [b.sge(0, 8)]), 0);
    a.done(11);
    b.done(3);
    assert!(a.poll().is_none());
    assert_eq!(b.bytes(0..16), *b"begun...\0\0\0\0\0\0\0\0");
    // Modifications that RTS does not allow, and back.
    let mut slower = attr();
    slower.timeout = 15;
    assert_eq!(a.modify(&mut slower, IBV_QP_TIMEOUT), 0);
    assert_eq!(into(&a, IBV_QPS_RTS, None), 0);
    a.done(2);
    assert_eq!(b.bytes(8..16), *b"later...");
    // An idle queue drains at once; without the attribute no event is reported.
    assert_eq!(into(&a, IBV_QPS_SQD, Some(1)), 0);
    drained(&a);
    assert_eq!(into(&a, IBV_QPS_RTS, None), 0);
    assert_eq!(into(&a, IBV_QPS_SQD, Some(0)), 0);
    assert_eq!(draining(&a), (IBV_QPS_SQD, 0));
    // SAFETY: of an open descriptor; live.
    unsafe {
        let fd = (*a.context).async_fd;
        libc::fcntl(fd, libc::F_SETFL, libc::fcntl(fd, libc::F_GETFL) | libc::O_NONBLOCK);
        let mut event = MaybeUninit::<ibv_async_event>::uninit();
        assert_eq!((api().get_async_event)(a.context, event.as_mut_ptr()), -1);
    }
    assert_eq!(errno(), libc::EAGAIN);
}
