//! Shared receive queues: ibv_create_srq(3), ibv_modify_srq(3), ibv_post_srq_recv(3).

use std::ffi::c_int;
use std::mem::MaybeUninit;
use std::ptr;

use doorbell_softroce_ibverbs::api;
use doorbell_verbs_sys::*;

use crate::common::*;

const DEPTH: u32 = 16;

fn create(pd: *mut ibv_pd, max_wr: u32, max_sge: u32) -> *mut ibv_srq {
    let mut init = ibv_srq_init_attr {
        srq_context: ptr::without_provenance_mut(77),
        attr: ibv_srq_attr {
            max_wr,
            max_sge,
            // Ignored (ibv_create_srq(3)).
            srq_limit: 99,
        },
    };
    // SAFETY: the domain is live by the caller.
    unsafe { (api().create_srq.unwrap())(pd, &mut init) }
}

fn query(srq: *mut ibv_srq) -> (u32, u32, u32) {
    let mut attr = MaybeUninit::<ibv_srq_attr>::uninit();
    // SAFETY: live; filled on success.
    unsafe {
        assert_eq!((api().query_srq.unwrap())(srq, attr.as_mut_ptr()), 0);
        let attr = attr.assume_init();
        (attr.max_wr, attr.max_sge, attr.srq_limit)
    }
}

fn modify(srq: *mut ibv_srq, mask: u32, max_wr: u32, srq_limit: u32) -> c_int {
    let mut attr = ibv_srq_attr {
        max_wr,
        max_sge: 0,
        srq_limit,
    };
    // SAFETY: live.
    unsafe { (api().modify_srq.unwrap())(srq, &mut attr, mask as c_int) }
}

fn destroy(srq: *mut ibv_srq) -> c_int {
    // SAFETY: live, and not used again if destroyed.
    unsafe { (api().destroy_srq.unwrap())(srq) }
}

fn post(srq: *mut ibv_srq, receives: &mut [(u64, ibv_sge)]) -> Result<(), (c_int, u64)> {
    let mut list: Vec<_> = receives
        .iter_mut()
        .map(|(wr_id, sge)| ibv_recv_wr {
            wr_id: *wr_id,
            next: ptr::null_mut(),
            sg_list: sge,
            num_sge: 1,
        })
        .collect();
    for at in 1..list.len() {
        list[at - 1].next = &raw mut list[at];
    }
    let mut bad = ptr::null_mut();
    // SAFETY: live; the list is whole, and `bad` points into it when there is an error.
    unsafe {
        match inline::post_srq_recv(srq, list.as_mut_ptr(), &mut bad) {
            0 => Ok(()),
            error => Err((error, (*bad).wr_id)),
        }
    }
}

/// `side.qp` is the selected one of the two, and its own before and after.
struct Shared {
    side: Side,
    srq: *mut ibv_srq,
    own: *mut ibv_qp,
    qps: [*mut ibv_qp; 2],
}

impl Shared {
    fn new(device: &str, setup: &Setup) -> Self {
        let side = Side::new(device, setup);
        let srq = create(side.pd, DEPTH, 2);
        assert!(!srq.is_null(), "errno {}", errno());
        let qps = [(); 2].map(|()| {
            let mut init = init_attr(side.cq, setup);
            init.srq = srq;
            // Ignored (ibv_create_qp(3)).
            (init.cap.max_recv_wr, init.cap.max_recv_sge) = (u32::MAX, u32::MAX);
            // SAFETY: live.
            let qp = unsafe { (api().create_qp)(side.pd, &mut init) };
            assert!(!qp.is_null(), "errno {}", errno());
            qp
        });
        let own = side.qp;
        Self { side, srq, own, qps }
    }

    fn select(&mut self, which: usize) -> &Side {
        self.side.qp = self.qps[which];
        &self.side
    }
}

impl Drop for Shared {
    fn drop(&mut self) {
        self.side.qp = self.own;
        if std::thread::panicking() {
            return;
        }
        for qp in self.qps {
            assert_eq!(destroy(self.srq), libc::EBUSY);
            // SAFETY: live, destroyed once.
            assert_eq!(unsafe { (api().destroy_qp)(qp) }, 0);
        }
        assert_eq!(destroy(self.srq), 0);
    }
}

#[test]
fn posting_to_the_wrong_queue_and_too_much() {
    crate::setup();
    let mut shared = Shared::new("soft0", &Setup::default());
    let sge = shared.side.sge(0, 8);
    // In every state, RESET included, only the shared queue accepts receives.
    assert_eq!(shared.select(0).receive(1, &mut [sge]), libc::EINVAL);
    shared.select(1).init(&Setup::default());
    assert_eq!(shared.side.receive(1, &mut [sge]), libc::EINVAL);
    let mut receives: Vec<_> = (0..u64::from(DEPTH) + 2).map(|id| (id, sge)).collect();
    assert_eq!(post(shared.srq, &mut receives), Err((libc::ENOMEM, u64::from(DEPTH))));
    assert_eq!(modify(shared.srq, IBV_SRQ_MAX_WR, DEPTH - 1, 0), libc::EINVAL);
    assert_eq!(modify(shared.srq, IBV_SRQ_MAX_WR, 1 << 20, 0), libc::EINVAL);
    assert_eq!(modify(shared.srq, IBV_SRQ_MAX_WR, DEPTH + 1, 0), 0);
    assert_eq!(post(shared.srq, &mut receives[..2]), Err((libc::ENOMEM, 1)));
    assert_eq!(modify(shared.srq, IBV_SRQ_LIMIT, 0, DEPTH + 2), libc::EINVAL);
    assert_eq!(modify(shared.srq, 4, 0, 0), libc::EINVAL);
    assert_eq!(query(shared.srq), (DEPTH + 1, 2, 0));
    let (mut attr, mut init) = (attr(), MaybeUninit::uninit());
    // SAFETY: live, both to be written.
    let init = unsafe {
        assert_eq!((api().query_qp)(shared.side.qp, &mut attr, 0, init.as_mut_ptr()), 0);
        init.assume_init()
    };
    assert_eq!((init.srq, init.cap.max_recv_wr), (shared.srq, 0));
    // SAFETY: live.
    assert_eq!(unsafe { (*shared.srq).srq_context }.addr(), 77);
}

#[test]
fn sizes_types_and_what_keeps_it() {
    crate::setup();
    let side = Side::new("soft0", &Setup::default());
    let mut device = MaybeUninit::<ibv_device_attr>::uninit();
    // SAFETY: live; filled on success.
    let device = unsafe {
        assert_eq!((api().query_device)(side.context, device.as_mut_ptr()), 0);
        device.assume_init()
    };
    assert_ne!(device.device_cap_flags & IBV_DEVICE_SRQ_RESIZE, 0);
    assert!(device.max_srq > 0);
    let (max_wr, max_sge) = (device.max_srq_wr as u32, device.max_srq_sge as u32);
    for (wr, sge) in [(0, 1), (max_wr + 1, 1), (1, max_sge + 1)] {
        assert!(create(side.pd, wr, sge).is_null());
        assert_eq!(errno(), libc::EINVAL);
    }
    let largest = create(side.pd, max_wr, max_sge);
    assert_eq!(query(largest), (max_wr, max_sge, 0));
    assert_eq!(destroy(largest), 0);
    // SAFETY: zero is the basic type, no object and no flag; the objects given are live.
    unsafe {
        let create_ex = (*inline::verbs_get_ctx(side.context)).create_srq_ex.unwrap();
        let mut init: ibv_srq_init_attr_ex = MaybeUninit::zeroed().assume_init();
        init.attr.max_wr = 4;
        init.comp_mask = IBV_SRQ_INIT_ATTR_TYPE;
        assert!(create_ex(side.context, &mut init).is_null());
        assert_eq!(errno(), libc::EINVAL, "no domain");
        init.comp_mask |= IBV_SRQ_INIT_ATTR_PD;
        init.pd = side.pd;
        init.srq_type = IBV_SRQT_XRC;
        assert!(create_ex(side.context, &mut init).is_null());
        assert_eq!(errno(), libc::EINVAL, "no XRC domain");
        init.srq_type = IBV_SRQT_TM;
        assert!(create_ex(side.context, &mut init).is_null());
        assert_eq!(errno(), libc::EOPNOTSUPP);
        init.srq_type = IBV_SRQT_BASIC;
        let srq = create_ex(side.context, &mut init);
        assert_eq!(query(srq), (4, 0, 0));
        assert_eq!(destroy(srq), 0);
    }
}
