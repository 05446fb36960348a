//! Refused requests, and their effects on both sides.

use std::net::UdpSocket;

use doorbell_softroce_ibverbs::{api, last_open_error};
use doorbell_verbs_sys::*;

use crate::common::*;

const READ_ONLY: u32 = IBV_ACCESS_LOCAL_WRITE | IBV_ACCESS_REMOTE_READ;

fn two(setup: &Setup) -> (Side, Side) {
    crate::setup();
    pair(("soft0", "soft1"), setup)
}

/// A request of `a` fails with `status`, leaves `b`'s memory unchanged, and both queue pairs in
/// ERR.
fn refused(setup: &Setup, request: impl FnOnce(&Side, &Side) -> ibv_send_wr, status: ibv_wc_status) {
    let (a, b) = two(setup);
    let before = pattern(b.len(), 9);
    b.fill(0, &before);
    let wr = request(&a, &b);
    assert_eq!(a.post(wr, &mut [a.sge(0, 8)]), 0);
    let wc = a.wait();
    assert_eq!((wc.wr_id, wc.status, wc.qp_num), (wr.wr_id, status, a.qpn()));
    assert_eq!((wc.opcode, wc.byte_len), (0, 0), "nothing else means anything");
    assert!(b.bytes(0..b.len()) == before, "target memory is unchanged");
    assert_eq!(a.state(), IBV_QPS_ERR);
    // Later requests are flushed.
    assert_eq!(
        a.post(rdma(77, IBV_WR_RDMA_WRITE, b.addr(), b.rkey()), &mut [a.sge(0, 8)]),
        0
    );
    let wc = a.wait();
    assert_eq!((wc.wr_id, wc.status), (77, IBV_WC_WR_FLUSH_ERR));
    assert_eq!(a.receive(78, &mut []), 0);
    let wc = a.wait();
    assert_eq!((wc.wr_id, wc.status), (78, IBV_WC_WR_FLUSH_ERR));
}

#[test]
fn wrong_key() {
    for opcode in [IBV_WR_RDMA_WRITE, IBV_WR_RDMA_READ] {
        refused(
            &Setup::default(),
            |_, b| rdma(1, opcode, b.addr(), b.rkey() ^ 1),
            IBV_WC_REM_ACCESS_ERR,
        );
    }
}

#[test]
fn out_of_bounds() {
    for at in [-1, (1 << 16) - 7] {
        let outside = |_: &Side, b: &Side| rdma(1, IBV_WR_RDMA_WRITE, b.addr().wrapping_add_signed(at), b.rkey());
        refused(&Setup::default(), outside, IBV_WC_REM_ACCESS_ERR);
    }
}

#[test]
fn missing_right_of_the_region() {
    let setup = Setup {
        rights: READ_ONLY,
        ..Setup::default()
    };
    refused(
        &setup,
        |_, b| rdma(1, IBV_WR_RDMA_WRITE, b.addr(), b.rkey()),
        IBV_WC_REM_ACCESS_ERR,
    );
    let atomic = |_: &Side, b: &Side| {
        let mut wr = request(1, IBV_WR_ATOMIC_FETCH_AND_ADD);
        wr.wr.atomic = ibv_send_wr_atomic {
            remote_addr: b.addr(),
            compare_add: 1,
            swap: 0,
            rkey: b.rkey(),
        };
        wr
    };
    refused(&setup, atomic, IBV_WC_REM_ACCESS_ERR);
}

#[test]
fn missing_right_of_the_queue_pair() {
    let setup = Setup {
        access: READ_ONLY,
        ..Setup::default()
    };
    let (a, b) = two(&setup);
    assert_eq!(
        a.post(rdma(1, IBV_WR_RDMA_WRITE, b.addr(), b.rkey()), &mut [a.sge(0, 8)]),
        0
    );
    assert_ne!(a.wait().status, IBV_WC_SUCCESS);
    assert_eq!(b.bytes(0..8), [0; 8]);
}

#[test]
fn unaligned_atomic() {
    let (a, b) = two(&Setup::default());
    let mut wr = request(1, IBV_WR_ATOMIC_FETCH_AND_ADD);
    wr.wr.atomic = ibv_send_wr_atomic {
        remote_addr: b.addr() + 4,
        compare_add: 1,
        swap: 0,
        rkey: b.rkey(),
    };
    assert_eq!(a.post(wr, &mut [a.sge(0, 8)]), 0);
    assert_eq!(a.wait().status, IBV_WC_REM_INV_REQ_ERR);
    assert_eq!(b.bytes(0..16), [0; 16]);
}

#[test]
fn local_protection() {
    let (a, b) = two(&Setup::default());
    let mut foreign = a.sge(0, 8);
    foreign.lkey ^= 1;
    assert_eq!(
        a.post(rdma(1, IBV_WR_RDMA_WRITE, b.addr(), b.rkey()), &mut [foreign]),
        0
    );
    assert_eq!(a.wait().status, IBV_WC_LOC_PROT_ERR);
}

#[test]
fn message_longer_than_the_receive() {
    let (a, b) = two(&Setup::default());
    b.fill(0, &[0xee; 64]);
    assert_eq!(b.receive(5, &mut [b.sge(0, 16)]), 0);
    assert_eq!(a.post(request(1, IBV_WR_SEND), &mut [a.sge(0, 17)]), 0);
    assert_eq!(a.wait().status, IBV_WC_REM_INV_REQ_ERR);
    let wc = b.wait();
    assert_eq!((wc.wr_id, wc.status), (5, IBV_WC_LOC_LEN_ERR));
    assert_eq!(b.bytes(16..64), [0xee; 48]);
}

#[test]
fn rnr_nak_is_retried() {
    let (a, b) = two(&Setup::default());
    a.fill(0, b"rnrretry");
    assert_eq!(a.post(request(1, IBV_WR_SEND), &mut [a.sge(0, 8)]), 0);
    assert!(a.poll().is_none());
    std::thread::sleep(std::time::Duration::from_millis(5));
    assert_eq!(b.receive(5, &mut [b.sge(0, 8)]), 0);
    b.done(5);
    a.done(1);
    assert_eq!(b.bytes(0..8), b"rnrretry");
}

#[test]
fn rnr_retry_exceeded() {
    let setup = Setup {
        rnr_retry: 2,
        ..Setup::default()
    };
    let (a, _b) = two(&setup);
    assert_eq!(a.post(request(1, IBV_WR_SEND), &mut [a.sge(0, 8)]), 0);
    assert_eq!(a.wait().status, IBV_WC_RNR_RETRY_EXC_ERR);
}

#[test]
fn dead_peer() {
    let setup = Setup {
        timeout: 10,
        retry_cnt: 2,
        ..Setup::default()
    };
    let (a, mut b) = two(&setup);
    // SAFETY: live, destroyed once.
    assert_eq!(unsafe { (api().destroy_qp)(b.qp) }, 0);
    b.qp_gone = true;
    for id in 1..=3 {
        assert_eq!(
            a.post(rdma(id, IBV_WR_RDMA_WRITE, b.addr(), b.rkey()), &mut [a.sge(0, 8)]),
            0
        );
    }
    // Three times 4.2 ms: only that it is not immediate is checked.
    let since = std::time::Instant::now();
    assert_eq!(a.wait().status, IBV_WC_RETRY_EXC_ERR);
    assert!(
        since.elapsed() >= std::time::Duration::from_millis(8),
        "{:?}",
        since.elapsed()
    );
    for id in [2, 3] {
        let wc = a.wait();
        assert_eq!((wc.wr_id, wc.status), (id, IBV_WC_WR_FLUSH_ERR));
    }
}

#[test]
fn going_into_err_flushes() {
    let (a, _b) = two(&Setup::default());
    for id in 1..=3 {
        assert_eq!(a.receive(id, &mut [a.sge(0, 8)]), 0);
    }
    let mut err = attr();
    err.qp_state = IBV_QPS_ERR;
    assert_eq!(a.modify(&mut err, IBV_QP_STATE), 0);
    for id in 1..=3 {
        let wc = a.wait();
        assert_eq!((wc.wr_id, wc.status), (id, IBV_WC_WR_FLUSH_ERR));
    }
    // Back to RESET, from where it can be reconnected.
    let mut reset = attr();
    reset.qp_state = IBV_QPS_RESET;
    assert_eq!(a.modify(&mut reset, IBV_QP_STATE), 0);
    assert_eq!(a.state(), IBV_QPS_RESET);
    assert_eq!(a.receive(4, &mut []), libc::EINVAL);
}

#[test]
fn deregistered_memory_is_inaccessible() {
    let (a, b) = two(&Setup::default());
    let mut other = vec![0_u64; 64].into_boxed_slice();
    // SAFETY: a live PD; the memory outlives the registration.
    let mr = unsafe { (api().reg_mr)(b.pd, other.as_mut_ptr().cast(), 512, ALL_RIGHTS as i32) };
    // SAFETY: just made.
    let (rkey, addr) = unsafe { ((*mr).rkey, (*mr).addr as u64) };
    a.fill(0, &[1; 8]);
    assert_eq!(a.post(rdma(1, IBV_WR_RDMA_WRITE, addr, rkey), &mut [a.sge(0, 8)]), 0);
    a.done(1);
    // SAFETY: live, destroyed once.
    assert_eq!(unsafe { (api().dereg_mr)(mr) }, 0);
    assert_eq!(
        a.post(rdma(2, IBV_WR_RDMA_WRITE, addr + 8, rkey), &mut [a.sge(0, 8)]),
        0
    );
    assert_eq!(a.wait().status, IBV_WC_REM_ACCESS_ERR);
    assert_eq!((other[0], other[1]), (0x0101_0101_0101_0101, 0));
}

#[test]
fn address_in_use() {
    crate::setup();
    let address = own_address(6).to_string();
    let held = UdpSocket::bind((own_address(6), 4791)).unwrap();
    assert_eq!(open("taken"), Err(libc::EADDRINUSE));
    let reason = last_open_error().unwrap();
    assert!(
        reason.contains("taken") && reason.contains(&address) && !reason.contains('\n'),
        "{reason}"
    );
    drop(held);
    let context = open("taken").unwrap();
    // SAFETY: live, closed once.
    assert_eq!(unsafe { (api().close_device)(context) }, 0);
}
