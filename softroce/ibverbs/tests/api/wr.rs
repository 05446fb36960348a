//! The extended posting API (ibv_wr_post(3)): every error, and batches of threads.

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
        write => wr_rdma_write(rkey: u32, addr: u64);
        read => wr_rdma_read(rkey: u32, addr: u64);
        swap => wr_atomic_cmp_swp(rkey: u32, addr: u64, compare: u64, swap: u64);
        add => wr_atomic_fetch_add(rkey: u32, addr: u64, add: u64);
        sge_of => wr_set_sge(lkey: u32, addr: u64, length: u32);
        sge_list => wr_set_sge_list(count: usize, list: *const ibv_sge);
        inline_data => wr_set_inline_data(addr: *mut core::ffi::c_void, length: usize);
        inline_list => wr_set_inline_data_list(count: usize, list: *const ibv_data_buf);
        ud_addr => wr_set_ud_addr(ah: *mut ibv_ah, qpn: u32, qkey: u32);
    }

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
fn ud_batch_requires_an_address_handle_of_its_domain() {
    let (a, b) = two(IBV_QPT_UD, SENDS);
    let wr = Wr::of(&a);
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
