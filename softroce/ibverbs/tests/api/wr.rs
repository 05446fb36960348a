//! The extended posting API (ibv_wr_post(3)): every operation and setter of each transport, and
//! every error.

use std::ptr;

use doorbell_softroce_ibverbs::api;
use doorbell_verbs_sys::*;

use super::unreliable::Ah;
use crate::common::*;

const SENDS: u32 = IBV_QP_EX_WITH_SEND | IBV_QP_EX_WITH_SEND_WITH_IMM;
const WRITES: u32 = IBV_QP_EX_WITH_RDMA_WRITE | IBV_QP_EX_WITH_RDMA_WRITE_WITH_IMM;
const RELIABLE: u32 =
    SENDS | WRITES | IBV_QP_EX_WITH_RDMA_READ | IBV_QP_EX_WITH_ATOMIC_CMP_AND_SWP | IBV_QP_EX_WITH_ATOMIC_FETCH_AND_ADD;

fn setup_of(qp_type: ibv_qp_type, operations: u32) -> Setup {
    Setup {
        qp_type,
        send_ops: Some(operations),
        ..Setup::default()
    }
}

fn two(qp_type: ibv_qp_type, operations: u32) -> (Side, Side) {
    crate::setup();
    pair(("soft0", "soft1"), &setup_of(qp_type, operations))
}

/// The calls of one queue pair, as verbs.h makes them.
struct Wr(*mut ibv_qp_ex);

/// Makes each call a method that goes through its pointer.
macro_rules! calls {
    ($($name:ident => $entry:ident($($arg:ident: $type:ty),*) $(-> $result:ty)?;)*) => {
        $(fn $name(&self, $($arg: $type),*) $(-> $result)? {
            // SAFETY: the queue pair is live, and so is what the arguments point to.
            unsafe { (*self.0).$entry.unwrap()(self.0, $($arg),*) }
        })*
    };
}

impl Wr {
    fn of(side: &Side) -> Self {
        // SAFETY: live.
        let extended = unsafe { api().qp_to_qp_ex.unwrap()(side.qp) };
        assert!(!extended.is_null());
        Self(extended)
    }

    calls! {
        start => wr_start();
        complete => wr_complete() -> i32;
        abort => wr_abort();
        send => wr_send();
        send_imm => wr_send_imm(imm: u32);
        write => wr_rdma_write(rkey: u32, addr: u64);
        write_imm => wr_rdma_write_imm(rkey: u32, addr: u64, imm: u32);
        read => wr_rdma_read(rkey: u32, addr: u64);
        swap => wr_atomic_cmp_swp(rkey: u32, addr: u64, compare: u64, swap: u64);
        add => wr_atomic_fetch_add(rkey: u32, addr: u64, add: u64);
        sge_of => wr_set_sge(lkey: u32, addr: u64, length: u32);
        sge_list => wr_set_sge_list(count: usize, list: *const ibv_sge);
        inline_data => wr_set_inline_data(addr: *mut core::ffi::c_void, length: usize);
        inline_list => wr_set_inline_data_list(count: usize, list: *const ibv_data_buf);
        ud_addr => wr_set_ud_addr(ah: *mut ibv_ah, qpn: u32, qkey: u32);
    }

    /// Sets wr_id and flags of the following request.
    fn named(&self, wr_id: u64, flags: u32) -> &Self {
        // SAFETY: live.
        unsafe {
            (*self.0).wr_id = wr_id;
            (*self.0).wr_flags = flags;
        }
        self
    }

    fn signaled(&self, wr_id: u64) -> &Self {
        self.named(wr_id, IBV_SEND_SIGNALED)
    }

    fn sge(&self, side: &Side, at: usize, len: usize) {
        let sge = side.sge(at, len);
        self.sge_of(sge.lkey, sge.addr, sge.length);
    }

    fn inline(&self, bytes: &[u8]) {
        self.inline_data(bytes.as_ptr().cast_mut().cast(), bytes.len());
    }
}

fn piece(bytes: &[u8]) -> ibv_data_buf {
    ibv_data_buf {
        addr: bytes.as_ptr().cast_mut().cast(),
        length: bytes.len(),
    }
}

#[test]
fn every_operation_of_rc_in_one_batch() {
    let (a, b) = two(IBV_QPT_RC, RELIABLE);
    let wr = Wr::of(&a);
    a.fill(0, &pattern(5000, 1));
    b.fill(20_000, &pattern(3000, 2));
    b.fill(40_000, &7_u64.to_ne_bytes());
    for id in [100, 101, 102] {
        assert_eq!(b.receive(id, &mut [b.sge(10_000, 5000)]), 0);
    }
    wr.start();
    wr.signaled(1).write(b.rkey(), b.addr());
    wr.sge(&a, 0, 5000);
    // Unsignaled, in pieces, inline.
    wr.named(2, 0).write(b.rkey(), b.addr() + 6000);
    let pieces = [piece(b"one "), piece(b""), piece(b"two ")];
    wr.inline_list(pieces.len(), pieces.as_ptr());
    wr.signaled(3).write_imm(b.rkey(), b.addr() + 7000, 30_u32.to_be());
    {
        let passing = *b"passing";
        wr.inline(&passing);
    }
    wr.signaled(4).send();
    let sges = [a.sge(10, 100), a.sge(0, 0), a.sge(200, 50)];
    wr.sge_list(sges.len(), sges.as_ptr());
    wr.named(5, IBV_SEND_SIGNALED | IBV_SEND_SOLICITED)
        .send_imm(50_u32.to_be());
    wr.signaled(6).read(b.rkey(), b.addr() + 20_000);
    wr.sge(&a, 30_000, 3000);
    wr.signaled(7).swap(b.rkey(), b.addr() + 40_000, 7, 9);
    wr.sge(&a, 50_000, 8);
    wr.named(8, IBV_SEND_SIGNALED | IBV_SEND_FENCE)
        .add(b.rkey(), b.addr() + 40_000, 3);
    wr.sge(&a, 50_008, 8);
    assert!(a.poll().is_none(), "nothing is posted before it is complete");
    assert_eq!(wr.complete(), 0);
    let done: Vec<_> = [1, 3, 4, 5, 6, 7, 8].map(|id| a.done(id).opcode).to_vec();
    assert_eq!(
        done,
        [
            IBV_WC_RDMA_WRITE,
            IBV_WC_RDMA_WRITE,
            IBV_WC_SEND,
            IBV_WC_SEND,
            IBV_WC_RDMA_READ,
            IBV_WC_COMP_SWAP,
            IBV_WC_FETCH_ADD
        ]
    );
    assert_eq!(b.bytes(0..5000), pattern(5000, 1));
    assert_eq!(b.bytes(6000..6008), b"one two ");
    assert_eq!(b.bytes(7000..7007), b"passing");
    let with_imm = |wc: ibv_wc, opcode, len, imm: u32| {
        assert_eq!((wc.opcode, wc.byte_len, wc.wc_flags), (opcode, len, IBV_WC_WITH_IMM));
        // SAFETY: the flag says so.
        assert_eq!(unsafe { wc.anon_1.imm_data }, imm.to_be());
    };
    with_imm(b.done(100), IBV_WC_RECV_RDMA_WITH_IMM, 7, 30);
    assert_eq!(b.done(101).byte_len, 150);
    let sent = pattern(5000, 1);
    assert_eq!(b.bytes(10_000..10_150), [&sent[10..110], &sent[200..250]].concat());
    with_imm(b.done(102), IBV_WC_RECV, 0, 50);
    assert_eq!(a.bytes(30_000..33_000), pattern(3000, 2));
    assert_eq!((a.word(50_000 / 8), a.word(50_008 / 8)), (7, 9));
    assert_eq!(b.word(40_000 / 8), 12);
}

#[test]
fn uc_and_ud_have_their_operations() {
    let (a, b) = two(IBV_QPT_UC, SENDS | WRITES);
    let wr = Wr::of(&a);
    assert_eq!(b.receive(10, &mut [b.sge(0, 64)]), 0);
    wr.start();
    wr.signaled(1).write(b.rkey(), b.addr() + 100);
    wr.inline(b"over UC");
    wr.signaled(2).send();
    wr.inline(b"message");
    assert_eq!(wr.complete(), 0);
    a.done(1);
    a.done(2);
    b.done(10);
    assert_eq!(
        (b.bytes(100..107), b.bytes(0..7)),
        (b"over UC".into(), b"message".into())
    );

    let (a, b) = two(IBV_QPT_UD, SENDS);
    let wr = Wr::of(&a);
    assert_eq!(b.receive(10, &mut [b.sge(0, 64)]), 0);
    let ah = Ah::to(&a, b.gid());
    wr.start();
    wr.signaled(1).send_imm(6_u32.to_be());
    wr.ud_addr(ah.0, b.qpn(), QKEY);
    wr.inline(b"datagram");
    // Staged: the handle is no longer needed.
    drop(ah);
    assert_eq!(wr.complete(), 0);
    a.done(1);
    let wc = b.done(10);
    assert_eq!((wc.byte_len, wc.wc_flags), (48, IBV_WC_GRH | IBV_WC_WITH_IMM));
    assert_eq!(b.bytes(40..48), b"datagram");
    // Each needs a destination, with an address handle of the same protection domain.
    let foreign = Ah::to(&b, b.gid());
    for set in [None, Some(ptr::null_mut()), Some(foreign.0)] {
        wr.start();
        wr.signaled(2).send();
        if let Some(ah) = set {
            wr.ud_addr(ah, b.qpn(), QKEY);
        }
        assert_eq!(wr.complete(), libc::EINVAL);
    }
}

/// An invalid batch, and the result of completing it.
type InvalidBatch = (fn(&Wr, &Side, &Side), i32);

#[test]
fn any_error_refuses_the_whole_batch() {
    let (a, b) = two(IBV_QPT_RC, RELIABLE);
    let wr = Wr::of(&a);
    let mistakes: [InvalidBatch; 10] = [
        (|wr, a, _| wr.sge_list(5, [a.sge(0, 1); 5].as_ptr()), libc::EINVAL),
        (|wr, _, _| wr.inline(&[0; 129]), libc::EINVAL),
        (
            |wr, _, _| wr.inline_list(2, [piece(&[0; 100]), piece(&[0; 29])].as_ptr()),
            libc::EINVAL,
        ),
        // More than is readable, if it were read.
        (
            |wr, _, _| {
                let endless = ibv_data_buf {
                    length: usize::MAX,
                    ..piece(b"x")
                };
                wr.inline_list(2, [endless, piece(b"y")].as_ptr());
            },
            libc::EINVAL,
        ),
        (|wr, a, _| wr.ud_addr(Ah::to(a, a.gid()).0, 1, QKEY), libc::EINVAL),
        (
            |wr, _, b| {
                wr.read(b.rkey(), b.addr());
                wr.inline(b"a READ cannot");
            },
            libc::EINVAL,
        ),
        (
            |wr, a, b| {
                wr.add(b.rkey(), b.addr(), 1);
                wr.sge(a, 0, 4);
            },
            libc::EINVAL,
        ),
        (|wr, _, b| wr.swap(b.rkey(), b.addr(), 0, 1), libc::EINVAL),
        (
            |wr, a, b| {
                let large = a.sge(0, 1 << 30);
                wr.write(b.rkey(), b.addr());
                wr.sge_list(3, [large; 3].as_ptr());
            },
            libc::EINVAL,
        ),
        (
            |wr, _, b| (0..64).for_each(|_| wr.write(b.rkey(), b.addr())),
            libc::ENOMEM,
        ),
    ];
    for (number, (mistake, expected)) in mistakes.into_iter().enumerate() {
        wr.start();
        wr.signaled(1).write(b.rkey(), b.addr());
        wr.inline(b"no");
        mistake(&wr, &a, &b);
        wr.signaled(2).send();
        assert_eq!(wr.complete(), expected, "mistake {number}");
    }
    // A setter without a request.
    wr.start();
    wr.sge(&a, 0, 8);
    assert_eq!(wr.complete(), libc::EINVAL);
    // A batch after an error is independent of it; of two payload setters the last one applies.
    wr.start();
    wr.signaled(3).write(b.rkey(), b.addr() + 8);
    wr.sge(&a, 0, 100);
    wr.inline(b"replaced");
    wr.inline(b"the last");
    assert_eq!(wr.complete(), 0);
    a.done(3);
    assert_eq!(b.bytes(0..16), [&[0; 8][..], b"the last"].concat());
    assert!(a.poll().is_none());
}

#[test]
fn batches_end_once() {
    let (a, b) = two(IBV_QPT_RC, RELIABLE);
    let wr = Wr::of(&a);
    assert_eq!(wr.complete(), libc::EINVAL, "there is no batch");
    wr.abort();
    // Outside of a batch nothing is staged.
    wr.signaled(9).write(b.rkey(), b.addr());
    wr.inline(b"lost");
    wr.start();
    assert_eq!(wr.complete(), 0, "an empty batch");
    wr.start();
    wr.signaled(1).write(b.rkey(), b.addr());
    wr.inline(b"aborted");
    wr.abort();
    assert_eq!(wr.complete(), libc::EINVAL);
    // ibv_post_send is not blocked by an open batch.
    wr.start();
    wr.signaled(2).write(b.rkey(), b.addr());
    wr.inline(b"second");
    assert_eq!(
        a.post(rdma(3, IBV_WR_RDMA_WRITE, b.addr() + 3, b.rkey()), &mut [a.sge(0, 8)]),
        0
    );
    assert_eq!(wr.complete(), 0);
    a.done(3);
    a.done(2);
    assert_eq!(b.bytes(0..7), *b"second\0");
}

#[test]
fn batch_that_exceeds_the_queue_is_refused_as_a_whole() {
    crate::setup();
    // Half a minute before a READ without a response fails.
    let setup = Setup {
        timeout: 20,
        ..setup_of(IBV_QPT_RC, RELIABLE)
    };
    let (a, b) = pair(("soft0", "soft1"), &setup);
    let wr = Wr::of(&a);
    let batch = |count: u64| {
        wr.start();
        for id in 0..count {
            wr.signaled(id).write(b.rkey(), b.addr() + 8 * id);
            wr.inline(&id.to_ne_bytes());
        }
        wr.complete()
    };
    assert_eq!(batch(64), 0, "as many as the queue takes");
    for id in 0..64 {
        a.done(id);
    }
    assert_eq!(batch(65), libc::ENOMEM);
    // A READ without a response keeps its slot. SAFETY: live.
    unsafe {
        let mut err = attr();
        err.qp_state = IBV_QPS_RESET;
        assert_eq!((api().modify_qp)(b.qp, &mut err, IBV_QP_STATE as i32), 0);
    }
    wr.start();
    wr.signaled(1).read(b.rkey(), b.addr());
    wr.sge(&a, 0, 8);
    assert_eq!(wr.complete(), 0);
    assert_eq!(batch(64), libc::ENOMEM);
    assert!(a.poll().is_none(), "nothing of it was posted");
    // In the error state requests are accepted, and flushed.
    let mut err = attr();
    err.qp_state = IBV_QPS_ERR;
    assert_eq!(a.modify(&mut err, IBV_QP_STATE), 0);
    assert_eq!(a.wait().status, IBV_WC_WR_FLUSH_ERR);
    assert_eq!(batch(2), 0);
    for id in 0..2 {
        let wc = a.wait();
        assert_eq!((wc.wr_id, wc.status), (id, IBV_WC_WR_FLUSH_ERR));
    }
    // Before RTS they are refused.
    err.qp_state = IBV_QPS_RESET;
    assert_eq!(a.modify(&mut err, IBV_QP_STATE), 0);
    assert_eq!(batch(1), libc::EINVAL);
}

#[test]
fn batches_of_threads_are_serialised() {
    let (a, b) = two(IBV_QPT_RC, RELIABLE);
    const ROUNDS: u64 = 200;
    // Send queue slots are freed on completion, polled or not: the completion queue has space for
    // all. SAFETY: live.
    assert_eq!(unsafe { (api().resize_cq)(a.cq, 6 * ROUNDS as i32) }, 0);
    std::thread::scope(|scope| {
        for thread in 0..3_u64 {
            let (wr, rkey, addr) = (Wr::of(&a), b.rkey(), b.addr());
            // The pointer is passed as an integer; the queue pair outlives the scope.
            let qp = wr.0.expose_provenance();
            scope.spawn(move || {
                let wr = Wr(ptr::with_exposed_provenance_mut(qp));
                for round in 0..ROUNDS {
                    loop {
                        wr.start();
                        for part in 0..2_u64 {
                            wr.signaled(thread << 32 | round << 1 | part)
                                .write(rkey, addr + 16 * thread + 8 * part);
                            wr.inline(&round.to_ne_bytes());
                        }
                        match wr.complete() {
                            0 => break,
                            // Full until the peer has acknowledged some.
                            error => assert_eq!(error, libc::ENOMEM),
                        }
                        std::thread::yield_now();
                    }
                }
            });
        }
        // The two of a batch are adjacent, and the batches of a thread are in order.
        let mut next = [0; 3];
        for _ in 0..3 * ROUNDS {
            let (first, second) = (a.wait(), a.wait());
            assert_eq!((first.status, second.status), (IBV_WC_SUCCESS, IBV_WC_SUCCESS));
            assert_eq!(second.wr_id, first.wr_id | 1);
            let thread = (first.wr_id >> 32) as usize;
            assert_eq!(first.wr_id & 0xffff_ffff, next[thread]);
            next[thread] += 2;
        }
    });
}

#[test]
fn creation_is_checked() {
    crate::setup();
    let side = Side::new("soft0", &Setup::default());
    let init = init_attr(side.cq, &Setup::default());
    // SAFETY: live; a queue pair that was made is destroyed.
    let create = |change: &dyn Fn(&mut ibv_qp_init_attr_ex)| unsafe {
        let mut attr = extended_attr(side.pd, &init, IBV_QP_EX_WITH_RDMA_WRITE);
        change(&mut attr);
        let qp = create_qp_ex(side.context, &mut attr);
        if qp.is_null() {
            return Err(errno());
        }
        let extended = api().qp_to_qp_ex.unwrap()(qp);
        let calls = extended
            .as_ref()
            .map(|qp| (qp.wr_rdma_write.is_some(), qp.wr_send.is_some()));
        assert_eq!((api().destroy_qp)(qp), 0);
        Ok(calls)
    };
    assert_eq!(create(&|_| {}), Ok(Some((true, false))), "only the requested calls");
    assert_eq!(create(&|attr| attr.comp_mask = IBV_QP_INIT_ATTR_PD), Ok(None));
    let flags = |flags| {
        create(&|attr| {
            attr.comp_mask |= IBV_QP_INIT_ATTR_CREATE_FLAGS;
            attr.create_flags = flags;
        })
    };
    assert!(flags(IBV_QP_CREATE_BLOCK_SELF_MCAST_LB).is_ok());
    assert_eq!(flags(IBV_QP_CREATE_SCATTER_FCS), Err(libc::EOPNOTSUPP));
    assert_eq!(
        create(&|attr| attr.comp_mask |= IBV_QP_INIT_ATTR_XRCD),
        Err(libc::EOPNOTSUPP)
    );
    assert_eq!(create(&|attr| attr.comp_mask |= 1 << 20), Err(libc::EINVAL));
    assert_eq!(
        create(&|attr| attr.comp_mask = IBV_QP_INIT_ATTR_SEND_OPS_FLAGS),
        Err(libc::EINVAL)
    );
    assert_eq!(
        create(&|attr| attr.send_ops_flags = u64::from(IBV_QP_EX_WITH_TSO)),
        Err(libc::EOPNOTSUPP)
    );
    assert_eq!(
        create(&|attr| {
            attr.qp_type = IBV_QPT_UD;
            attr.send_ops_flags = u64::from(IBV_QP_EX_WITH_RDMA_WRITE);
        }),
        Err(libc::EOPNOTSUPP)
    );
    assert_eq!(create(&|attr| attr.cap.max_send_sge = 33), Err(libc::EINVAL));
    // SAFETY: live.
    let extended = unsafe { api().qp_to_qp_ex.unwrap()(side.qp) };
    assert!(extended.is_null(), "made by ibv_create_qp");
}
