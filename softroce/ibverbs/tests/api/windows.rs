//! Memory windows of types 1 and 2: keys in use again, refused binds and their effects.

use std::ptr;

use doorbell_softroce_ibverbs::api;
use doorbell_verbs_sys::*;

use crate::common::*;

const BINDABLE: u32 = IBV_ACCESS_LOCAL_WRITE | IBV_ACCESS_MW_BIND;
const REMOTE: u32 = IBV_ACCESS_REMOTE_WRITE | IBV_ACCESS_REMOTE_READ | IBV_ACCESS_REMOTE_ATOMIC;

/// Two connected sides whose regions grant no remote rights, but allow windows.
fn two() -> (Side, Side) {
    crate::setup();
    let setup = Setup {
        rights: BINDABLE,
        bytes: 1 << 12,
        ..Setup::default()
    };
    pair(("soft0", "soft1"), &setup)
}

struct Window(*mut ibv_mw);

impl Window {
    fn new(of: &Side, kind: ibv_mw_type) -> Self {
        // SAFETY: live.
        let mw = unsafe { inline::alloc_mw(of.pd, kind) };
        assert!(!mw.is_null(), "errno {}", errno());
        Self(mw)
    }

    fn rkey(&self) -> u32 {
        // SAFETY: live.
        unsafe { (*self.0).rkey }
    }

    fn rename(&self, rkey: u32) {
        // SAFETY: live, and writable by the application (ibv_bind_mw(3)).
        unsafe { (*self.0).rkey = rkey };
    }
}

impl Drop for Window {
    fn drop(&mut self) {
        // SAFETY: live, and not used again.
        assert_eq!(unsafe { inline::dealloc_mw(self.0) }, 0);
    }
}

fn range(of: &Side, at: usize, len: usize) -> ibv_mw_bind_info {
    ibv_mw_bind_info {
        mr: of.mr,
        addr: of.addr() + at as u64,
        length: len as u64,
        mw_access_flags: REMOTE,
    }
}

fn bind_1(of: &Side, window: &Window, wr_id: u64, bind_info: ibv_mw_bind_info) -> i32 {
    let mut bind = ibv_mw_bind {
        wr_id,
        send_flags: IBV_SEND_SIGNALED,
        bind_info,
    };
    // SAFETY: all live.
    unsafe { inline::bind_mw(of.qp, window.0, &mut bind) }
}

fn binding(window: &Window, wr_id: u64, rkey: u32, bind_info: ibv_mw_bind_info) -> ibv_send_wr {
    let mut wr = request(wr_id, IBV_WR_BIND_MW);
    wr.anon_2.bind_mw = ibv_send_wr_bind_mw {
        mw: window.0,
        rkey,
        bind_info,
    };
    wr
}

fn bind_2(of: &Side, window: &Window, bind_info: ibv_mw_bind_info) {
    let rkey = inline::inc_rkey(window.rkey());
    assert_eq!(of.post(binding(window, 90, rkey, bind_info), &mut []), 0);
    assert_eq!(of.done(90).opcode, IBV_WC_BIND_MW);
    window.rename(rkey);
}

fn bind(of: &Side, window: &Window, bind_info: ibv_mw_bind_info) {
    // SAFETY: live.
    if unsafe { (*window.0).type_ } == IBV_MW_TYPE_2 {
        return bind_2(of, window, bind_info);
    }
    let before = window.rkey();
    assert_eq!(bind_1(of, window, 90, bind_info), 0);
    assert_eq!(window.rkey(), inline::inc_rkey(before));
    assert_eq!(of.done(90).opcode, IBV_WC_BIND_MW);
}

fn invalidating(wr_id: u64, opcode: ibv_wr_opcode, rkey: u32) -> ibv_send_wr {
    let mut wr = request(wr_id, opcode);
    wr.anon_1.invalidate_rkey = rkey;
    wr
}

/// The peer's request fails and both queue pairs are in ERR.
fn refused(a: &Side, b: &Side, wr: ibv_send_wr) {
    let before = b.bytes(0..b.len());
    assert_eq!(a.post(wr, &mut [a.sge(0, 8)]), 0);
    let wc = a.wait();
    assert_eq!((wc.wr_id, wc.status), (wr.wr_id, IBV_WC_REM_ACCESS_ERR));
    assert_eq!((a.state(), b.state()), (IBV_QPS_ERR, IBV_QPS_ERR));
    assert_eq!(b.bytes(0..b.len()), before, "target memory is unchanged");
}

#[test]
fn a_window_of_type_2_can_be_bound_anew() {
    let (a, b) = two();
    let window = Window::new(&b, IBV_MW_TYPE_2);
    for round in 0..300_u64 {
        bind_2(&b, &window, range(&b, 8 * (round as usize % 100), 8));
        a.fill(0, &round.to_ne_bytes());
        let at = b.addr() + 8 * (round % 100);
        assert_eq!(
            a.post(rdma(round, IBV_WR_RDMA_WRITE, at, window.rkey()), &mut [a.sge(0, 8)]),
            0
        );
        a.done(round);
        assert_eq!(b.word(round as usize % 100), round);
        assert_eq!(b.post(invalidating(91, IBV_WR_LOCAL_INV, window.rkey()), &mut []), 0);
        b.done(91);
    }
}

/// Creates a key that the peer may not invalidate, and its window, if any.
type MakeKey = fn(&Side) -> (Option<Window>, u32);

#[test]
fn keys_that_a_peer_may_not_invalidate() {
    let keys: [MakeKey; 4] = [
        |b| (None, b.rkey()),
        |_| (None, 0xdead_beef),
        |b| {
            let window = Window::new(b, IBV_MW_TYPE_1);
            bind(b, &window, range(b, 0, 8));
            let rkey = window.rkey();
            (Some(window), rkey)
        },
        |b| {
            let window = Window::new(b, IBV_MW_TYPE_2);
            let rkey = window.rkey();
            (Some(window), rkey)
        },
    ];
    for key in keys {
        let (a, b) = two();
        let (_window, rkey) = key(&b);
        assert_eq!(b.receive(7, &mut [b.sge(0, 8)]), 0);
        assert_eq!(a.post(invalidating(1, IBV_WR_SEND_WITH_INV, rkey), &mut []), 0);
        let wc = a.wait();
        assert_eq!((wc.wr_id, wc.status), (1, IBV_WC_REM_ACCESS_ERR));
        let wc = b.wait();
        assert_eq!((wc.wr_id, wc.status), (7, IBV_WC_REM_INV_REQ_ERR));
        assert_eq!((a.state(), b.state()), (IBV_QPS_ERR, IBV_QPS_ERR));
    }
}

#[test]
fn binds_refused_at_posting() {
    let (a, b) = two();
    let (one, two) = (Window::new(&b, IBV_MW_TYPE_1), Window::new(&b, IBV_MW_TYPE_2));
    let good = range(&b, 0, 64);
    // Of the wrong type for the call.
    assert_eq!(bind_1(&b, &two, 1, good), libc::EINVAL);
    let mut bind = ibv_mw_bind {
        wr_id: 1,
        send_flags: 0,
        bind_info: good,
    };
    // SAFETY: live.
    let past_the_header = unsafe { (*b.context).ops.bind_mw.unwrap()(b.qp, two.0, &mut bind) };
    assert_eq!(past_the_header, libc::EINVAL);
    let refused = |wr| assert_eq!(b.post(wr, &mut []), libc::EINVAL);
    refused(binding(&one, 1, one.rkey(), good));
    // A key of another window, and no window.
    refused(binding(&two, 1, one.rkey(), good));
    refused(binding(&two, 1, two.rkey() ^ 0x100, good));
    let mut none = binding(&two, 1, two.rkey(), good);
    none.anon_2.bind_mw.mw = ptr::null_mut();
    refused(none);
    for flag in [IBV_ACCESS_MW_BIND, IBV_ACCESS_ON_DEMAND] {
        let mut info = good;
        info.mw_access_flags |= flag;
        assert_eq!(bind_1(&b, &one, 1, info), libc::EINVAL);
        refused(binding(&two, 1, two.rkey(), info));
    }
    let mut nowhere = good;
    nowhere.mr = ptr::null_mut();
    assert_eq!(bind_1(&b, &one, 1, nowhere), libc::EINVAL);
    refused(binding(&two, 1, two.rkey(), nowhere));
    let mut foreign = good;
    foreign.mr = a.mr;
    assert_eq!(bind_1(&b, &one, 1, foreign), libc::EPERM);
    // SAFETY: live.
    unsafe {
        assert!(inline::alloc_mw(b.pd, 3).is_null());
        assert_eq!(errno(), libc::EINVAL);
        assert_eq!((api().dealloc_pd)(b.pd), libc::EBUSY);
    }
    // None of it has an effect.
    assert!(b.poll().is_none());
    assert_eq!(b.state(), IBV_QPS_RTS);
    let datagrams = Setup {
        qp_type: IBV_QPT_UD,
        ..Setup::default()
    };
    let (c, _d) = pair(("soft0", "soft1"), &datagrams);
    let other = Window::new(&c, IBV_MW_TYPE_1);
    assert_eq!(bind_1(&c, &other, 1, range(&c, 0, 8)), libc::EINVAL);
    let unreliable = Setup {
        qp_type: IBV_QPT_UC,
        ..Setup::default()
    };
    let (e, _f) = pair(("soft0", "soft1"), &unreliable);
    assert_eq!(e.post(invalidating(1, IBV_WR_SEND_WITH_INV, 1), &mut []), libc::EINVAL);
}

#[test]
fn binds_that_fail_on_execution() {
    type Change = fn(&Side, &mut ibv_mw_bind_info);
    let changes: [(u32, Change); 6] = [
        (BINDABLE, |b, info| info.addr = b.addr() + 4096 - 63),
        (BINDABLE, |b, info| info.addr = b.addr() - 1),
        (BINDABLE, |_, info| info.length = u64::MAX),
        // The region does not allow windows, or lacks LOCAL_WRITE.
        (IBV_ACCESS_LOCAL_WRITE, |_, _| {}),
        (IBV_ACCESS_MW_BIND, |_, info| {
            info.mw_access_flags = IBV_ACCESS_REMOTE_WRITE
        }),
        (IBV_ACCESS_MW_BIND, |_, info| {
            info.mw_access_flags = IBV_ACCESS_REMOTE_ATOMIC
        }),
    ];
    crate::setup();
    for kind in [IBV_MW_TYPE_1, IBV_MW_TYPE_2] {
        for (rights, change) in changes {
            let setup = Setup {
                rights,
                bytes: 1 << 12,
                ..Setup::default()
            };
            let (_a, b) = pair(("soft0", "soft1"), &setup);
            let window = Window::new(&b, kind);
            let mut info = range(&b, 0, 64);
            change(&b, &mut info);
            if kind == IBV_MW_TYPE_1 {
                assert_eq!(bind_1(&b, &window, 1, info), 0);
            } else {
                assert_eq!(b.post(binding(&window, 1, window.rkey(), info), &mut []), 0);
            }
            let wc = b.wait();
            assert_eq!((wc.wr_id, wc.status), (1, IBV_WC_MW_BIND_ERR));
            assert_eq!(b.state(), IBV_QPS_ERR);
        }
    }
    // Type 2: bound already; of length 0; by a key that does not exist.
    let twice: [fn(&Side, &Window) -> ibv_send_wr; 4] = [
        |b, window| {
            bind_2(b, window, range(b, 0, 8));
            binding(window, 1, inline::inc_rkey(window.rkey()), range(b, 0, 8))
        },
        |b, window| binding(window, 1, window.rkey(), range(b, 0, 0)),
        |_, window| invalidating(1, IBV_WR_LOCAL_INV, window.rkey() ^ 1),
        |b, _| invalidating(1, IBV_WR_LOCAL_INV, b.rkey()),
    ];
    for make in twice {
        let (_a, b) = two();
        let window = Window::new(&b, IBV_MW_TYPE_2);
        assert_eq!(b.post(make(&b, &window), &mut []), 0);
        let wc = b.wait();
        assert_eq!((wc.wr_id, wc.status), (1, IBV_WC_MW_BIND_ERR));
    }
    let (_a, b) = two();
    let window = Window::new(&b, IBV_MW_TYPE_1);
    let mut info = range(&b, 0, 64);
    info.mw_access_flags |= IBV_ACCESS_ZERO_BASED;
    assert_eq!(bind_1(&b, &window, 1, info), 0);
    assert_eq!(b.wait().status, IBV_WC_MW_BIND_ERR);
}

#[test]
fn a_reset_queue_pair_forgets_its_windows_of_type_2() {
    for kind in [IBV_MW_TYPE_1, IBV_MW_TYPE_2] {
        let setup = Setup {
            rights: BINDABLE,
            ..Setup::default()
        };
        let (a, b) = two();
        let window = Window::new(&b, kind);
        bind(&b, &window, range(&b, 0, 64));
        for side in [&a, &b] {
            let mut reset = attr();
            reset.qp_state = IBV_QPS_RESET;
            assert_eq!(side.modify(&mut reset, IBV_QP_STATE), 0);
        }
        connect(&a, &b, &setup);
        let wr = rdma(1, IBV_WR_RDMA_WRITE, b.addr(), window.rkey());
        if kind == IBV_MW_TYPE_2 {
            refused(&a, &b, wr);
        } else {
            assert_eq!(a.post(wr, &mut [a.sge(0, 8)]), 0);
            a.done(1);
        }
    }
}

#[test]
fn addresses_from_zero() {
    let (a, b) = two();
    let window = Window::new(&b, IBV_MW_TYPE_2);
    let mut info = range(&b, 512, 64);
    info.mw_access_flags |= IBV_ACCESS_ZERO_BASED | IBV_ACCESS_LOCAL_WRITE;
    bind_2(&b, &window, info);
    a.fill(0, &pattern(64, 6));
    assert_eq!(
        a.post(rdma(1, IBV_WR_RDMA_WRITE, 0, window.rkey()), &mut [a.sge(0, 64)]),
        0
    );
    a.done(1);
    assert_eq!(b.bytes(512..576), pattern(64, 6));
    refused(&a, &b, rdma(2, IBV_WR_RDMA_WRITE, 57, window.rkey()));
}

#[test]
fn device_attributes_are_reported() {
    crate::setup();
    let side = Side::new("soft0", &Setup::default());
    let mut attr = std::mem::MaybeUninit::uninit();
    // SAFETY: live; filled on success.
    let attr = unsafe {
        assert_eq!((api().query_device)(side.context, attr.as_mut_ptr()), 0);
        attr.assume_init()
    };
    let windows = IBV_DEVICE_MEM_WINDOW | IBV_DEVICE_MEM_WINDOW_TYPE_2A | IBV_DEVICE_MEM_WINDOW_TYPE_2B;
    assert_eq!(
        attr.device_cap_flags & windows,
        IBV_DEVICE_MEM_WINDOW | IBV_DEVICE_MEM_WINDOW_TYPE_2B
    );
    assert!(attr.max_mw > 0);
}
