//! A verbs provider in memory, for the tests of this crate: it records what it is given, and completes, refuses and fails as it is told.
//!
//! It moves no data. Each test makes a device of its own, so that tests don't see each other's.

use core::ffi::{c_char, c_int, c_uint, c_void};
use std::collections::{HashMap, VecDeque};
use std::ffi::CString;
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Mutex, MutexGuard};

use doorbell_verbs::{Context, Library};
use doorbell_verbs_sys::*;

/// Verbs of which a test may say that the next call fails, with an errno.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) enum Verb {
    RegMr,
    DeregMr,
    CreateQp,
    ModifyQp,
    DestroyQp,
}

/// A request as the provider got it.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct Posted {
    pub(crate) wr_id: u64,
    pub(crate) opcode: u32,
    pub(crate) flags: u32,
    pub(crate) imm: u32,
    pub(crate) remote: (u64, u32),
    /// compare_add and swap.
    pub(crate) atomic: (u64, u64),
    /// Address, length, key.
    pub(crate) sges: Vec<(u64, u32, u32)>,
    /// What an inline request carries.
    pub(crate) inline: Vec<u8>,
}

impl Posted {
    pub(crate) fn signalled(&self) -> bool {
        self.flags & IBV_SEND_SIGNALED != 0
    }
}

/// One queue of a queue pair.
#[derive(Default)]
struct WorkQueue {
    /// Posted and not yet completed.
    pending: VecDeque<Posted>,
    /// How many calls of the post verb there were.
    doorbells: usize,
    /// The index in its list at which the next call refuses, and the errno.
    refuse: Option<(usize, c_int)>,
}

struct StubQp {
    state: u32,
    signal_all: bool,
    send_cq: usize,
    recv_cq: usize,
    send: WorkQueue,
    recv: WorkQueue,
    /// What each transition was given.
    masks: Vec<u32>,
    attr: Option<ibv_qp_attr>,
}

#[derive(Default)]
struct State {
    qps: HashMap<u32, StubQp>,
    live: HashMap<&'static str, i32>,
    /// Registered: key to address and length.
    regions: HashMap<u32, (u64, u64, u32)>,
    fail: HashMap<Verb, c_int>,
    log: Vec<&'static str>,
    port_state: u32,
}

#[repr(C)]
struct Cq {
    raw: ibv_cq,
    queue: Mutex<VecDeque<ibv_wc>>,
}

/// A device. Leaked, as its pointers go everywhere.
#[repr(C)]
pub(crate) struct Stub {
    device: ibv_device,
    pub(crate) name: String,
    c_name: CString,
    state: Mutex<State>,
    /// Complete every request as soon as it is posted.
    auto: AtomicU32,
}

// SAFETY: `device` is never written after it was made; its pointers are null.
unsafe impl Sync for Stub {}
// SAFETY: as above.
unsafe impl Send for Stub {}

static DEVICES: Mutex<Vec<&'static Stub>> = Mutex::new(Vec::new());
static NEXT: AtomicU32 = AtomicU32::new(1);

pub(crate) const ACTIVE: u32 = IBV_PORT_ACTIVE;

impl Stub {
    pub(crate) fn new() -> &'static Self {
        let number = NEXT.fetch_add(1, Ordering::Relaxed);
        let name = format!("stub{number}");
        // SAFETY: all-zero is a valid ibv_device.
        let device = unsafe { core::mem::zeroed() };
        let state = State {
            port_state: ACTIVE,
            ..State::default()
        };
        let c_name = CString::new(name.clone()).unwrap();
        let stub = Box::leak(Box::new(Self {
            device,
            name,
            c_name,
            state: Mutex::new(state),
            auto: AtomicU32::new(0),
        }));
        DEVICES.lock().unwrap().push(stub);
        stub
    }

    pub(crate) fn open(&'static self) -> Context {
        library().open(&self.name).unwrap()
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(|poisoned| poisoned.into_inner())
    }

    /// The next call of `verb` fails.
    pub(crate) fn fail(&self, verb: Verb, errno: c_int) {
        self.state().fail.insert(verb, errno);
    }

    pub(crate) fn port_state(&self, state: u32) {
        self.state().port_state = state;
    }

    /// Completes every send when it is posted.
    pub(crate) fn complete_at_once(&self) {
        self.auto.store(1, Ordering::Relaxed);
    }

    /// How many objects of a kind there are.
    pub(crate) fn live(&self, kind: &'static str) -> i32 {
        self.state().live.get(kind).copied().unwrap_or(0)
    }

    pub(crate) fn log(&self) -> Vec<&'static str> {
        self.state().log.clone()
    }

    /// The address, length and access of the region with this key.
    pub(crate) fn region(&self, key: u32) -> Option<(u64, u64, u32)> {
        self.state().regions.get(&key).copied()
    }

    pub(crate) fn pending_sends(&self, qpn: u32) -> Vec<Posted> {
        self.state().qps[&qpn].send.pending.iter().cloned().collect()
    }

    pub(crate) fn pending_receives(&self, qpn: u32) -> Vec<Posted> {
        self.state().qps[&qpn].recv.pending.iter().cloned().collect()
    }

    pub(crate) fn doorbells(&self, qpn: u32) -> (usize, usize) {
        let state = self.state();
        let qp = &state.qps[&qpn];
        (qp.send.doorbells, qp.recv.doorbells)
    }

    pub(crate) fn masks(&self, qpn: u32) -> Vec<u32> {
        self.state().qps[&qpn].masks.clone()
    }

    pub(crate) fn attr(&self, qpn: u32) -> ibv_qp_attr {
        self.state().qps[&qpn].attr.unwrap()
    }

    /// The next post to the send queue is refused at its request number `index`.
    pub(crate) fn refuse_send(&self, qpn: u32, index: usize, errno: c_int) {
        self.state().qps.get_mut(&qpn).unwrap().send.refuse = Some((index, errno));
    }

    /// The next post to the receive queue is refused at its request number `index`.
    pub(crate) fn refuse_receive(&self, qpn: u32, index: usize, errno: c_int) {
        self.state().qps.get_mut(&qpn).unwrap().recv.refuse = Some((index, errno));
    }

    /// Completes the oldest `n` sends: those signalled get a completion.
    pub(crate) fn complete_sends(&self, qpn: u32, n: usize) {
        let mut state = self.state();
        let qp = state.qps.get_mut(&qpn).unwrap();
        for _ in 0..n {
            let Some(request) = qp.send.pending.pop_front() else {
                return;
            };
            if request.signalled() || qp.signal_all {
                push(qp.send_cq, success(&request, qpn));
            }
        }
    }

    /// Completes the oldest receive with a message of `len` bytes.
    pub(crate) fn complete_receive(&self, qpn: u32, opcode: u32, len: u32, imm: Option<u32>) {
        let mut state = self.state();
        let qp = state.qps.get_mut(&qpn).unwrap();
        let request = qp.recv.pending.pop_front().expect("a receive is posted");
        let mut wc = completion(request.wr_id, qpn, IBV_WC_SUCCESS, opcode);
        wc.byte_len = len;
        if let Some(imm) = imm {
            wc.anon_1.imm_data = imm.to_be();
            wc.wc_flags = IBV_WC_WITH_IMM;
        }
        push(qp.recv_cq, wc);
    }

    /// Fails the oldest send with `status`; all others are flushed, and the queue pair is in error.
    pub(crate) fn fail_send(&self, qpn: u32, status: u32) {
        let mut state = self.state();
        let qp = state.qps.get_mut(&qpn).unwrap();
        if let Some(request) = qp.send.pending.pop_front() {
            push(qp.send_cq, failure(request.wr_id, qpn, status));
        }
        flush(qp, qpn);
    }

    /// Puts a completion in the queue that receives of this queue pair complete to.
    pub(crate) fn forge(&self, qpn: u32, wr_id: u64) {
        let state = self.state();
        push(
            state.qps[&qpn].recv_cq,
            completion(wr_id, qpn, IBV_WC_SUCCESS, IBV_WC_SEND),
        );
    }

    fn count(&self, kind: &'static str, by: i32) {
        *self.state().live.entry(kind).or_insert(0) += by;
    }

    fn failing(&self, verb: Verb) -> Option<c_int> {
        self.state().fail.remove(&verb)
    }
}

fn flush(qp: &mut StubQp, qpn: u32) {
    qp.state = IBV_QPS_ERR;
    for request in qp.send.pending.drain(..) {
        push(qp.send_cq, failure(request.wr_id, qpn, IBV_WC_WR_FLUSH_ERR));
    }
    for request in qp.recv.pending.drain(..) {
        push(qp.recv_cq, failure(request.wr_id, qpn, IBV_WC_WR_FLUSH_ERR));
    }
}

fn completion(wr_id: u64, qpn: u32, status: u32, opcode: u32) -> ibv_wc {
    // SAFETY: all-zero is a valid ibv_wc.
    let zero: ibv_wc = unsafe { core::mem::zeroed() };
    ibv_wc {
        wr_id,
        qp_num: qpn,
        status,
        opcode,
        ..zero
    }
}

fn success(request: &Posted, qpn: u32) -> ibv_wc {
    let opcode = match request.opcode {
        IBV_WR_RDMA_WRITE | IBV_WR_RDMA_WRITE_WITH_IMM => IBV_WC_RDMA_WRITE,
        IBV_WR_RDMA_READ => IBV_WC_RDMA_READ,
        IBV_WR_ATOMIC_CMP_AND_SWP => IBV_WC_COMP_SWAP,
        IBV_WR_ATOMIC_FETCH_AND_ADD => IBV_WC_FETCH_ADD,
        _ => IBV_WC_SEND,
    };
    completion(request.wr_id, qpn, IBV_WC_SUCCESS, opcode)
}

/// As hardware does it: what an error completion does not define is garbage.
fn failure(wr_id: u64, qpn: u32, status: u32) -> ibv_wc {
    let mut wc = completion(wr_id, qpn, status, 0xdead);
    wc.byte_len = 0xdead_beef;
    wc.vendor_err = 0x99;
    wc.wc_flags = u32::MAX;
    wc
}

fn push(cq: usize, wc: ibv_wc) {
    // SAFETY: a completion queue of this stub, alive as long as a queue pair on it.
    let cq = unsafe { &*(cq as *const Cq) };
    let mut queue = cq.queue.lock().unwrap();
    queue.push_back(wc);
    assert!(queue.len() <= cq.raw.cqe as usize, "the completion queue has overrun");
}

/// The library whose devices are the stubs.
pub(crate) fn library() -> Library {
    Library::new(&API)
}

unsafe fn stub_of(context: *mut ibv_context) -> &'static Stub {
    // SAFETY: every context of this provider has a stub's device, its first field.
    unsafe { &*(*context).device.cast::<Stub>() }
}

fn set_errno(errno: c_int) {
    // SAFETY: the calling thread's own errno.
    unsafe { *libc::__errno_location() = errno }
}

unsafe extern "C" fn get_device_list(num: *mut c_int) -> *mut *mut ibv_device {
    let devices: Vec<*mut ibv_device> = DEVICES
        .lock()
        .unwrap()
        .iter()
        .map(|stub| (&raw const **stub).cast_mut().cast())
        .collect();
    // SAFETY: the caller's.
    unsafe { *num = devices.len() as c_int };
    let mut devices = devices.into_boxed_slice();
    // The list's length is not known when it is freed; so it is leaked.
    let first = devices.as_mut_ptr();
    core::mem::forget(devices);
    first
}
unsafe extern "C" fn free_device_list(_: *mut *mut ibv_device) {}
unsafe extern "C" fn get_device_name(device: *mut ibv_device) -> *const c_char {
    // SAFETY: a stub's device.
    unsafe { (*device.cast::<Stub>()).c_name.as_ptr() }
}
unsafe extern "C" fn get_device_guid(_: *mut ibv_device) -> u64 {
    0x0102_0304_0506_0708_u64.to_be()
}
unsafe extern "C" fn open_device(device: *mut ibv_device) -> *mut ibv_context {
    // SAFETY: all-zero is a valid context without functions; those called are filled in.
    let mut context: Box<ibv_context> = Box::new(unsafe { core::mem::zeroed() });
    context.device = device;
    context.ops.post_send = Some(post_send);
    context.ops.post_recv = Some(post_recv);
    context.ops.poll_cq = Some(poll_cq);
    let context = Box::into_raw(context);
    // SAFETY: just made.
    unsafe { stub_of(context) }.count("context", 1);
    context
}
unsafe extern "C" fn close_device(context: *mut ibv_context) -> c_int {
    // SAFETY: made by open_device.
    let stub = unsafe { stub_of(context) };
    for kind in ["pd", "mr", "cq", "qp"] {
        assert_eq!(stub.live(kind), 0, "{kind} alive when the device is closed");
    }
    stub.count("context", -1);
    // SAFETY: as above.
    drop(unsafe { Box::from_raw(context) });
    0
}
unsafe extern "C" fn get_async_event(_: *mut ibv_context, _: *mut ibv_async_event) -> c_int {
    -1
}
unsafe extern "C" fn ack_async_event(_: *mut ibv_async_event) {}
unsafe extern "C" fn query_device(_: *mut ibv_context, attr: *mut ibv_device_attr) -> c_int {
    // SAFETY: the caller's.
    unsafe {
        attr.write_bytes(0, 1);
        (*attr).phys_port_cnt = 1;
        (*attr).max_qp_wr = 4096;
        (*attr).max_sge = 8;
        (*attr).max_cqe = 8192;
        (*attr).max_qp_rd_atom = 16;
        (*attr).max_qp_init_rd_atom = 16;
        (*attr).atomic_cap = IBV_ATOMIC_HCA;
    }
    0
}
unsafe extern "C" fn query_port(context: *mut ibv_context, _: u8, attr: *mut _compat_ibv_port_attr) -> c_int {
    let attr = attr.cast::<ibv_port_attr>();
    // SAFETY: the caller's.
    unsafe {
        (*attr).state = stub_of(context).state().port_state;
        (*attr).max_mtu = IBV_MTU_4096;
        (*attr).active_mtu = IBV_MTU_1024;
        (*attr).gid_tbl_len = 4;
        (*attr).link_layer = IBV_LINK_LAYER_ETHERNET as u8;
        (*attr).active_width = 2;
        (*attr).active_speed = 32;
    }
    0
}
/// Index 1 holds 10.0.0.1, index 2 a link-local address, the others nothing.
unsafe extern "C" fn query_gid(_: *mut ibv_context, _: u8, index: c_int, gid: *mut ibv_gid) -> c_int {
    let mut raw = [0; 16];
    match index {
        1 => raw[10..].copy_from_slice(&[0xff, 0xff, 10, 0, 0, 1]),
        2 => (raw[0], raw[1], raw[15]) = (0xfe, 0x80, 1),
        _ => {}
    }
    // SAFETY: the caller's.
    unsafe { (*gid).raw = raw };
    0
}
unsafe extern "C" fn query_pkey(_: *mut ibv_context, _: u8, _: c_int, _: *mut u16) -> c_int {
    0
}
unsafe extern "C" fn alloc_pd(context: *mut ibv_context) -> *mut ibv_pd {
    // SAFETY: a live context.
    unsafe { stub_of(context) }.count("pd", 1);
    Box::into_raw(Box::new(ibv_pd { context, handle: 0 }))
}
unsafe extern "C" fn dealloc_pd(pd: *mut ibv_pd) -> c_int {
    // SAFETY: made by alloc_pd.
    let stub = unsafe { stub_of((*pd).context) };
    for kind in ["mr", "qp"] {
        assert_eq!(stub.live(kind), 0, "{kind} alive when the protection domain goes");
    }
    stub.count("pd", -1);
    // SAFETY: as above.
    drop(unsafe { Box::from_raw(pd) });
    0
}
unsafe extern "C" fn reg_mr(pd: *mut ibv_pd, addr: *mut c_void, length: usize, access: c_int) -> *mut ibv_mr {
    // SAFETY: a live domain.
    let (stub, context) = unsafe { (stub_of((*pd).context), (*pd).context) };
    if let Some(errno) = stub.failing(Verb::RegMr) {
        set_errno(errno);
        return core::ptr::null_mut();
    }
    stub.count("mr", 1);
    let key = NEXT.fetch_add(1, Ordering::Relaxed) + 0x1000;
    stub.state()
        .regions
        .insert(key, (addr as u64, length as u64, access as u32));
    Box::into_raw(Box::new(ibv_mr {
        context,
        pd,
        addr,
        length,
        handle: 0,
        lkey: key,
        rkey: key | 0x8000_0000,
    }))
}
unsafe extern "C" fn dereg_mr(mr: *mut ibv_mr) -> c_int {
    // SAFETY: made by reg_mr.
    let (stub, lkey, addr) = unsafe { (stub_of((*mr).context), (*mr).lkey, (*mr).addr) };
    if let Some(errno) = stub.failing(Verb::DeregMr) {
        return errno;
    }
    // SAFETY: the memory must still be there: whoever frees it before this has it read here, which AddressSanitizer and valgrind see.
    unsafe { addr.cast::<u8>().read_volatile() };
    stub.count("mr", -1);
    let mut state = stub.state();
    state.regions.remove(&lkey);
    state.log.push("dereg_mr");
    // SAFETY: as above.
    drop(unsafe { Box::from_raw(mr) });
    0
}
unsafe extern "C" fn create_comp_channel(_: *mut ibv_context) -> *mut ibv_comp_channel {
    core::ptr::null_mut()
}
unsafe extern "C" fn destroy_comp_channel(_: *mut ibv_comp_channel) -> c_int {
    0
}
unsafe extern "C" fn create_cq(
    context: *mut ibv_context,
    cqe: c_int,
    _: *mut c_void,
    _: *mut ibv_comp_channel,
    _: c_int,
) -> *mut ibv_cq {
    // SAFETY: all-zero is a valid ibv_cq.
    let mut raw: ibv_cq = unsafe { core::mem::zeroed() };
    (raw.context, raw.cqe) = (context, cqe);
    // SAFETY: a live context.
    unsafe { stub_of(context) }.count("cq", 1);
    Box::into_raw(Box::new(Cq {
        raw,
        queue: Mutex::default(),
    }))
    .cast()
}
unsafe extern "C" fn resize_cq(_: *mut ibv_cq, _: c_int) -> c_int {
    libc::ENOSYS
}
unsafe extern "C" fn destroy_cq(cq: *mut ibv_cq) -> c_int {
    // SAFETY: made by create_cq.
    let stub = unsafe { stub_of((*cq).context) };
    assert_eq!(
        stub.state()
            .qps
            .values()
            .filter(|qp| qp.send_cq == cq as usize || qp.recv_cq == cq as usize)
            .count(),
        0,
        "queue pairs alive when their completion queue goes"
    );
    stub.count("cq", -1);
    // SAFETY: as above.
    drop(unsafe { Box::from_raw(cq.cast::<Cq>()) });
    0
}
unsafe extern "C" fn get_cq_event(_: *mut ibv_comp_channel, _: *mut *mut ibv_cq, _: *mut *mut c_void) -> c_int {
    -1
}
unsafe extern "C" fn ack_cq_events(_: *mut ibv_cq, _: c_uint) {}
unsafe extern "C" fn create_qp(pd: *mut ibv_pd, attr: *mut ibv_qp_init_attr) -> *mut ibv_qp {
    // SAFETY: the caller's.
    let (stub, attr) = unsafe { (stub_of((*pd).context), &mut *attr) };
    if let Some(errno) = stub.failing(Verb::CreateQp) {
        set_errno(errno);
        return core::ptr::null_mut();
    }
    attr.cap.max_inline_data = attr.cap.max_inline_data.next_multiple_of(64);
    let qpn = NEXT.fetch_add(1, Ordering::Relaxed);
    // SAFETY: all-zero is a valid ibv_qp.
    let mut qp: Box<ibv_qp> = Box::new(unsafe { core::mem::zeroed() });
    // SAFETY: the caller's.
    (qp.context, qp.qp_num) = (unsafe { (*pd).context }, qpn);
    let raw = Box::into_raw(qp);
    stub.count("qp", 1);
    stub.state().qps.insert(
        qpn,
        StubQp {
            state: IBV_QPS_RESET,
            signal_all: attr.sq_sig_all != 0,
            send_cq: attr.send_cq as usize,
            recv_cq: attr.recv_cq as usize,
            send: WorkQueue::default(),
            recv: WorkQueue::default(),
            masks: Vec::new(),
            attr: None,
        },
    );
    raw
}
unsafe extern "C" fn query_qp(qp: *mut ibv_qp, attr: *mut ibv_qp_attr, _: c_int, _: *mut ibv_qp_init_attr) -> c_int {
    // SAFETY: the caller's.
    unsafe { (*attr).qp_state = stub_of((*qp).context).state().qps[&(*qp).qp_num].state };
    0
}
unsafe extern "C" fn modify_qp(qp: *mut ibv_qp, attr: *mut ibv_qp_attr, mask: c_int) -> c_int {
    // SAFETY: the caller's.
    let (stub, qpn, attr) = unsafe { (stub_of((*qp).context), (*qp).qp_num, *attr) };
    if attr.qp_state != IBV_QPS_ERR
        && let Some(errno) = stub.failing(Verb::ModifyQp)
    {
        return errno;
    }
    let mut state = stub.state();
    let qp = state.qps.get_mut(&qpn).unwrap();
    qp.masks.push(mask as u32);
    qp.state = attr.qp_state;
    if attr.qp_state == IBV_QPS_RTR {
        qp.attr = Some(attr);
    }
    if attr.qp_state == IBV_QPS_ERR {
        flush(qp, qpn);
    }
    0
}
unsafe extern "C" fn destroy_qp(qp: *mut ibv_qp) -> c_int {
    // SAFETY: made by create_qp.
    let (stub, qpn) = unsafe { (stub_of((*qp).context), (*qp).qp_num) };
    if let Some(errno) = stub.failing(Verb::DestroyQp) {
        return errno;
    }
    stub.count("qp", -1);
    let mut state = stub.state();
    state.log.push("destroy_qp");
    state.qps.remove(&qpn);
    // SAFETY: as above.
    drop(unsafe { Box::from_raw(qp) });
    0
}
unsafe extern "C" fn fork_init() -> c_int {
    0
}

unsafe fn sges_of(list: *const ibv_sge, num: c_int) -> Vec<(u64, u32, u32)> {
    // SAFETY: the request's list.
    (0..num as usize)
        .map(|at| unsafe { &*list.add(at) })
        .map(|sge| (sge.addr, sge.length, sge.lkey))
        .collect()
}

unsafe extern "C" fn post_send(qp: *mut ibv_qp, mut wr: *mut ibv_send_wr, bad: *mut *mut ibv_send_wr) -> c_int {
    // SAFETY: the caller's.
    let (stub, qpn) = unsafe { (stub_of((*qp).context), (*qp).qp_num) };
    let mut state = stub.state();
    let queue = state.qps.get_mut(&qpn).unwrap();
    queue.send.doorbells += 1;
    let mut refuse = queue.send.refuse.take();
    let failed = queue.state == IBV_QPS_ERR;
    while !wr.is_null() {
        if let Some((0, errno)) = refuse {
            // SAFETY: the caller's.
            unsafe { *bad = wr };
            return errno;
        }
        refuse = refuse.map(|(index, errno)| (index - 1, errno));
        // SAFETY: the chain is well-formed by contract; both unions were written for the opcode, or are zero.
        let request = unsafe {
            let inline = if (*wr).send_flags & IBV_SEND_INLINE != 0 && (*wr).num_sge == 1 {
                let sge = *(*wr).sg_list;
                let at = core::ptr::with_exposed_provenance::<u8>(sge.addr as usize);
                core::slice::from_raw_parts(at, sge.length as usize).to_vec()
            } else {
                Vec::new()
            };
            let atomic = (*wr).opcode == IBV_WR_ATOMIC_CMP_AND_SWP || (*wr).opcode == IBV_WR_ATOMIC_FETCH_AND_ADD;
            Posted {
                wr_id: (*wr).wr_id,
                opcode: (*wr).opcode,
                flags: (*wr).send_flags,
                imm: u32::from_be((*wr).anon_1.imm_data),
                remote: match atomic {
                    true => ((*wr).wr.atomic.remote_addr, (*wr).wr.atomic.rkey),
                    false => ((*wr).wr.rdma.remote_addr, (*wr).wr.rdma.rkey),
                },
                atomic: ((*wr).wr.atomic.compare_add, (*wr).wr.atomic.swap),
                sges: sges_of((*wr).sg_list, (*wr).num_sge),
                inline,
            }
        };
        queue.send.pending.push_back(request);
        // SAFETY: as above.
        wr = unsafe { (*wr).next };
    }
    if failed {
        flush(queue, qpn);
    }
    drop(state);
    if stub.auto.load(Ordering::Relaxed) != 0 {
        stub.complete_sends(qpn, usize::MAX);
    }
    0
}

unsafe extern "C" fn post_recv(qp: *mut ibv_qp, mut wr: *mut ibv_recv_wr, bad: *mut *mut ibv_recv_wr) -> c_int {
    // SAFETY: the caller's.
    let (stub, qpn) = unsafe { (stub_of((*qp).context), (*qp).qp_num) };
    let mut state = stub.state();
    let queue = state.qps.get_mut(&qpn).unwrap();
    queue.recv.doorbells += 1;
    let mut refuse = queue.recv.refuse.take();
    while !wr.is_null() {
        if let Some((0, errno)) = refuse {
            // SAFETY: the caller's.
            unsafe { *bad = wr };
            return errno;
        }
        refuse = refuse.map(|(index, errno)| (index - 1, errno));
        // SAFETY: the chain is well-formed by contract.
        let (wr_id, sges) = unsafe { ((*wr).wr_id, sges_of((*wr).sg_list, (*wr).num_sge)) };
        queue.recv.pending.push_back(Posted {
            wr_id,
            opcode: 0,
            flags: 0,
            imm: 0,
            remote: (0, 0),
            atomic: (0, 0),
            sges,
            inline: Vec::new(),
        });
        // SAFETY: as above.
        wr = unsafe { (*wr).next };
    }
    0
}

unsafe extern "C" fn poll_cq(cq: *mut ibv_cq, num: c_int, wc: *mut ibv_wc) -> c_int {
    // SAFETY: made by create_cq.
    let cq = unsafe { &*cq.cast::<Cq>() };
    let mut queue = cq.queue.lock().unwrap();
    let n = queue.len().min(num as usize);
    for (at, completion) in queue.drain(..n).enumerate() {
        // SAFETY: the caller has room for `num`.
        unsafe { *wc.add(at) = completion };
    }
    n as c_int
}

static API: Api = Api {
    get_device_list,
    free_device_list,
    get_device_name,
    get_device_guid,
    open_device,
    close_device,
    get_async_event,
    ack_async_event,
    query_device,
    query_port,
    query_gid,
    query_pkey,
    alloc_pd,
    dealloc_pd,
    reg_mr,
    dereg_mr,
    create_comp_channel,
    destroy_comp_channel,
    create_cq,
    resize_cq,
    destroy_cq,
    get_cq_event,
    ack_cq_events,
    create_qp,
    query_qp,
    modify_qp,
    destroy_qp,
    fork_init,
    create_srq: None,
    modify_srq: None,
    query_srq: None,
    destroy_srq: None,
    create_ah: None,
    create_ah_from_wc: None,
    destroy_ah: None,
    rereg_mr: None,
    reg_mr_iova: None,
    reg_mr_iova2: None,
    reg_dmabuf_mr: None,
    query_gid_ex: None,
    query_gid_table: None,
    get_pkey_index: None,
    get_device_index: None,
    qp_to_qp_ex: None,
    query_ece: None,
    set_ece: None,
    query_qp_data_in_order: None,
};
