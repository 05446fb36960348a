//! Shared receive queues: ibv_create_srq(3), ibv_modify_srq(3), ibv_query_srq(3),
//! ibv_post_srq_recv(3).

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

/// Posts a list of receives with one SGE each; returns the errno value and the wr_id refused.
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

/// A receiving side with two queue pairs on one shared receive queue; `side.qp` is the selected
/// one, and its own before and after.
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

    /// Moves the selected queue pair to ERR; expects the last WQE event.
    fn fail(&self) {
        let mut attr = attr();
        attr.qp_state = IBV_QPS_ERR;
        assert_eq!(self.side.modify(&mut attr, IBV_QP_STATE), 0);
        let event = async_event(self.side.context);
        assert_eq!(event.event_type, IBV_EVENT_QP_LAST_WQE_REACHED);
        // SAFETY: of a queue pair's event the element is one.
        assert_eq!(unsafe { event.element.qp }, self.side.qp);
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

/// Two senders and the receiving side, connected.
fn connected_to_srq(setup: &Setup) -> (Shared, [Side; 2]) {
    let mut shared = Shared::new("soft1", setup);
    let senders = [0, 1].map(|which| {
        let sender = Side::new("soft0", setup);
        connect(&sender, shared.select(which), setup);
        sender
    });
    (shared, senders)
}

#[test]
fn messages_of_two_queue_pairs() {
    crate::setup();
    for qp_type in [IBV_QPT_RC, IBV_QPT_UC] {
        let setup = Setup {
            qp_type,
            ..Setup::default()
        };
        let (shared, senders) = connected_to_srq(&setup);
        let mut receives: Vec<_> = (0..8_u64)
            .map(|id| (id, shared.side.sge(id as usize * 4096, 4096)))
            .collect();
        assert_eq!(post(shared.srq, &mut receives), Ok(()));
        for (which, sender) in senders.iter().enumerate() {
            for message in 0..4 {
                let at = message * 4096;
                sender.fill(at, &pattern(3000, (which * 4 + message) as u32));
                assert_eq!(
                    sender.post(request(message as u64, IBV_WR_SEND), &mut [sender.sge(at, 3000)]),
                    0
                );
            }
        }
        let mut next = [0; 2];
        let mut taken = Vec::new();
        for _ in 0..8 {
            let wc = shared.side.wait();
            assert_eq!((wc.status, wc.byte_len), (IBV_WC_SUCCESS, 3000));
            // SAFETY: live.
            let which = shared
                .qps
                .iter()
                .position(|&qp| unsafe { (*qp).qp_num } == wc.qp_num)
                .unwrap();
            let at = wc.wr_id as usize * 4096;
            let expected = pattern(3000, (which * 4 + next[which]) as u32);
            assert!(
                shared.side.bytes(at..at + 3000) == expected,
                "in the order of its queue pair"
            );
            next[which] += 1;
            taken.push(wc.wr_id);
        }
        taken.sort_unstable();
        assert_eq!(taken, (0..8).collect::<Vec<_>>());
        for sender in &senders {
            for id in 0..4 {
                sender.done(id);
            }
        }
    }
}

#[test]
fn datagrams_of_two_queue_pairs() {
    crate::setup();
    let setup = Setup {
        qp_type: IBV_QPT_UD,
        ..Setup::default()
    };
    let (mut shared, senders) = connected_to_srq(&setup);
    for (round, which) in [0, 1, 1, 0].into_iter().enumerate() {
        let id = round as u64;
        assert_eq!(post(shared.srq, &mut [(id, shared.side.sge(0, 140))]), Ok(()));
        let to = shared.select(which);
        let mut ah = rtr_attr(&setup, to.gid(), 0, 0).ah_attr;
        senders[which].fill(0, &pattern(100, round as u32));
        let mut wr = request(id, IBV_WR_SEND);
        // SAFETY: live.
        let ah = unsafe { (api().create_ah.unwrap())(senders[which].pd, &mut ah) };
        assert!(!ah.is_null());
        wr.wr.ud = ibv_send_wr_ud {
            ah,
            remote_qpn: to.qpn(),
            remote_qkey: QKEY,
        };
        assert_eq!(senders[which].post(wr, &mut [senders[which].sge(0, 100)]), 0);
        let wc = to.done(id);
        assert_eq!((wc.byte_len, wc.qp_num), (140, to.qpn()));
        assert!(to.bytes(40..140) == pattern(100, round as u32));
        senders[which].done(id);
        // SAFETY: live, destroyed once.
        assert_eq!(unsafe { (api().destroy_ah.unwrap())(ah) }, 0);
    }
}

/// A message without a receive waits for one (RNR NAK): the limit event reports that few are left,
/// and a receive posted late is still in time.
#[test]
fn limit_event_and_rnr_retry() {
    crate::setup();
    let (shared, senders) = connected_to_srq(&Setup::default());
    let mut receives: Vec<_> = (0..3).map(|id| (id, shared.side.sge(0, 64))).collect();
    assert_eq!(post(shared.srq, &mut receives), Ok(()));
    assert_eq!(modify(shared.srq, IBV_SRQ_LIMIT, 0, 2), 0);
    assert_eq!(query(shared.srq), (DEPTH, 2, 2));
    for id in 0..5 {
        let sender = &senders[id as usize % 2];
        assert_eq!(sender.post(request(id, IBV_WR_SEND), &mut [sender.sge(0, 64)]), 0);
    }
    (0..3).for_each(|_| assert_eq!(shared.side.wait().status, IBV_WC_SUCCESS));
    let event = async_event(shared.side.context);
    // SAFETY: of a shared receive queue's event the element is one.
    let named = unsafe { event.element.srq };
    assert_eq!((event.event_type, named), (IBV_EVENT_SRQ_LIMIT_REACHED, shared.srq));
    assert_eq!(query(shared.srq), (DEPTH, 2, 0));
    let mut receives: Vec<_> = (3..5).map(|id| (id, shared.side.sge(0, 64))).collect();
    assert_eq!(post(shared.srq, &mut receives), Ok(()));
    (0..2).for_each(|_| assert_eq!(shared.side.wait().status, IBV_WC_SUCCESS));
    for id in 0..5 {
        senders[id as usize % 2].done(id);
    }
}

/// A failing queue pair leaves the shared receives to the others.
#[test]
fn failed_queue_pair_leaves_the_others() {
    crate::setup();
    let (mut shared, senders) = connected_to_srq(&Setup::default());
    assert_eq!(post(shared.srq, &mut [(5, shared.side.sge(0, 64))]), Ok(()));
    shared.select(0);
    shared.fail();
    assert!(shared.side.poll().is_none(), "it held none");
    assert_eq!(
        senders[1].post(request(1, IBV_WR_SEND), &mut [senders[1].sge(0, 64)]),
        0
    );
    assert_eq!(shared.side.done(5).qp_num, shared.select(1).qpn());
    senders[1].done(1);
    shared.fail();
}

#[test]
fn posting_to_the_wrong_queue_and_too_much() {
    crate::setup();
    let mut shared = Shared::new("soft0", &Setup::default());
    let sge = shared.side.sge(0, 8);
    // In every state, including RESET, the shared queue accepts receives and the queue pair does
    // not.
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
        assert_eq!(errno(), libc::EOPNOTSUPP);
        init.srq_type = IBV_SRQT_BASIC;
        let srq = create_ex(side.context, &mut init);
        assert_eq!(query(srq), (4, 0, 0));
        assert_eq!(destroy(srq), 0);
    }
}
