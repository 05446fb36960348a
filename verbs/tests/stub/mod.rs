//! A verbs provider in memory, which completes, refuses and fails as tests instruct.

mod address;
mod calls;
mod events;
pub(crate) mod extended_cq;
pub(crate) mod memory;
mod provider;
mod shared;
mod windows;

use core::ffi::c_int;
use std::cell::UnsafeCell;
use std::collections::{HashMap, VecDeque};
use std::ffi::CString;
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Mutex, MutexGuard};

use doorbell_verbs::{Context, Library};
use doorbell_verbs_sys::*;

pub(crate) use address::Origin;

/// Verbs whose next call tests can make fail, with an errno.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) enum Verb {
    RegMr,
    DeregMr,
    /// Returns the value given.
    ReregMr,
    RegDmaBuf,
    CreateQp,
    CreateQpEx,
    ModifyQp,
    DestroyQp,
    /// Accepts all, and reports a refusal without naming one; with `ibv_wr_*` accepts none.
    PostSend,
    /// Also the start of an extended queue's poll.
    PollCq,
    NextPoll,
    DestroyCq,
    CreateCq,
    CreateAh,
    AllocMw,
    BindMw,
    ResizeCq,
    CreateSrq,
    DestroySrq,
}

#[derive(Debug, Clone, PartialEq)]
pub(crate) struct Posted {
    pub(crate) wr_id: u64,
    pub(crate) opcode: u32,
    pub(crate) flags: u32,
    pub(crate) imm: u32,
    pub(crate) remote: (u64, u32),
    /// compare_add and swap.
    pub(crate) atomic: (u64, u64),
    /// A datagram's destination: address handle, queue pair and Q_Key.
    pub(crate) to: Option<(usize, u32, u32)>,
    /// Address, length, key.
    pub(crate) sges: Vec<(u64, u32, u32)>,
    pub(crate) inline: Vec<u8>,
    pub(crate) bind: Option<Bound>,
    pub(crate) invalidate: Option<u32>,
}

/// The binding of a window: its key, and the range and rights behind it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Bound {
    pub(crate) rkey: u32,
    pub(crate) addr: u64,
    pub(crate) len: u64,
    pub(crate) access: u32,
}

impl Posted {
    fn receive(wr_id: u64, sges: Vec<(u64, u32, u32)>) -> Self {
        Self {
            wr_id,
            opcode: 0,
            flags: 0,
            imm: 0,
            remote: (0, 0),
            to: None,
            atomic: (0, 0),
            sges,
            inline: Vec::new(),
            bind: None,
            invalidate: None,
        }
    }

    pub(crate) fn signaled(&self) -> bool {
        self.flags & IBV_SEND_SIGNALED != 0
    }
}

#[derive(Default)]
struct WorkQueue {
    pending: VecDeque<Posted>,
    doorbells: usize,
    /// The index in its list at which the next call refuses, and the errno.
    refuse: Option<(usize, c_int)>,
}

// fields: what tests set and observe, one each.
struct StubQp {
    raw: usize,
    transport: u32,
    state: u32,
    signal_all: bool,
    send_cq: usize,
    recv_cq: usize,
    /// The address of its shared receive queue, 0 if it has none.
    srq: usize,
    send: WorkQueue,
    recv: WorkQueue,
    building: Option<calls::Building>,
    aborts: usize,
    masks: Vec<u32>,
    attr: Option<ibv_qp_attr>,
}

#[derive(Default)]
// fields: what tests set and observe, one each.
struct State {
    qps: HashMap<u32, StubQp>,
    srqs: HashMap<usize, shared::StubSrq>,
    /// Unpolled completions of a queue pair are removed with it, as on some hardware.
    purges: bool,
    live: HashMap<&'static str, i32>,
    /// Registered regions: key to address, length and access.
    regions: HashMap<u32, (u64, u64, u32)>,
    fail: HashMap<Verb, c_int>,
    log: Vec<&'static str>,
    handles: Vec<Origin>,
    port_state: u32,
    async_events: VecDeque<ibv_async_event>,
    /// Events read and not acknowledged, by the address of their object.
    unacknowledged: HashMap<usize, u32>,
    acknowledgements: usize,
    completes_before_arming: Option<u32>,
    /// Number of starts, advances and ends of extended polls, and of reads of their completions.
    polls: (usize, usize, usize),
    reads: usize,
    moderation: Option<(u16, u16)>,
    vector: Option<c_int>,
    without: u32,
}

#[repr(C)]
struct Cq {
    /// Begins with the fields of a classic queue. A polling thread writes some of them while others
    /// have references to the rest.
    raw: UnsafeCell<ibv_cq_ex>,
    poll: Mutex<Option<extended_cq::Open>>,
    queue: Mutex<VecDeque<ibv_wc>>,
    /// Whether the next completion raises an event; and if only a failed one (none is solicited).
    armed: Mutex<Option<bool>>,
}

impl Cq {
    fn leak(raw: ibv_cq_ex) -> *mut Self {
        Box::into_raw(Box::new(Self {
            raw: UnsafeCell::new(raw),
            poll: Mutex::default(),
            queue: Mutex::default(),
            armed: Mutex::default(),
        }))
    }

    fn context(&self) -> *mut ibv_context {
        // SAFETY: the field is written at creation only.
        unsafe { (*self.raw.get()).context }
    }

    fn channel(&self) -> *mut ibv_comp_channel {
        // SAFETY: as above.
        unsafe { (*self.raw.get()).channel }
    }

    fn cqe(&self) -> c_int {
        // SAFETY: written at creation, and by a resize, while no other thread uses the queue.
        unsafe { (*self.raw.get()).cqe }
    }
}

/// A device. Leaked, as its pointers are shared freely.
#[repr(C)]
pub(crate) struct Stub {
    device: ibv_device,
    pub(crate) name: String,
    c_name: CString,
    state: Mutex<State>,
    /// Whether every request completes as soon as it is posted.
    auto: AtomicU32,
    async_fd: c_int,
    /// Whether contexts opened from now on have the extended functions.
    extended: AtomicU32,
}

// SAFETY: `device` is never written after creation; its pointers are null.
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
            async_fd: events::semaphore(),
            extended: AtomicU32::new(0),
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

    pub(crate) fn fail(&self, verb: Verb, errno: c_int) {
        self.state().fail.insert(verb, errno);
    }

    pub(crate) fn port_state(&self, state: u32) {
        self.state().port_state = state;
    }

    pub(crate) fn complete_at_once(&self) {
        self.auto.store(1, Ordering::Relaxed);
    }

    pub(crate) fn live(&self, kind: &'static str) -> i32 {
        self.state().live.get(kind).copied().unwrap_or(0)
    }

    pub(crate) fn log(&self) -> Vec<&'static str> {
        self.state().log.clone()
    }

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

    pub(crate) fn aborts(&self, qpn: u32) -> usize {
        self.state().qps[&qpn].aborts
    }

    /// From now on `ibv_create_qp_ex` lacks these (`ibv_qp_create_send_ops_flags`).
    pub(crate) fn without(&self, operations: u32) {
        self.state().without = operations;
    }

    pub(crate) fn masks(&self, qpn: u32) -> Vec<u32> {
        self.state().qps[&qpn].masks.clone()
    }

    pub(crate) fn attr(&self, qpn: u32) -> ibv_qp_attr {
        self.state().qps[&qpn].attr.unwrap()
    }

    pub(crate) fn refuse_send(&self, qpn: u32, index: usize, errno: c_int) {
        self.state().qps.get_mut(&qpn).unwrap().send.refuse = Some((index, errno));
    }

    pub(crate) fn refuse_receive(&self, qpn: u32, index: usize, errno: c_int) {
        self.state().qps.get_mut(&qpn).unwrap().recv.refuse = Some((index, errno));
    }

    /// Reads the memory of all pending sends, and writes that of all pending receives.
    pub(crate) fn access_memory(&self, qpn: u32) {
        let state = self.state();
        let qp = &state.qps[&qpn];
        for (request, writes) in (qp.send.pending.iter().map(|request| (request, false)))
            .chain(qp.recv.pending.iter().map(|request| (request, true)))
        {
            for &(address, len, _) in &request.sges {
                for at in 0..u64::from(len) {
                    let byte = core::ptr::with_exposed_provenance_mut::<u8>((address + at) as usize);
                    // SAFETY: registered memory of a request in flight is the device's; sanitizers
                    // and Miri see one that is not there any longer.
                    unsafe {
                        if writes {
                            byte.write_volatile(9);
                        } else {
                            byte.read_volatile();
                        }
                    }
                }
            }
        }
    }

    /// Completes the oldest `n` sends: signaled ones get a completion.
    pub(crate) fn complete_sends(&self, qpn: u32, n: usize) {
        let mut state = self.state();
        let qp = state.qps.get_mut(&qpn).unwrap();
        for _ in 0..n {
            let Some(request) = qp.send.pending.pop_front() else {
                return;
            };
            if request.signaled() || qp.signal_all {
                push(qp.send_cq, success(&request, qpn));
            }
        }
    }

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

    /// Completes the oldest receive with an empty message that has invalidated a key.
    pub(crate) fn complete_invalidating(&self, qpn: u32, rkey: u32) {
        let mut state = self.state();
        let qp = state.qps.get_mut(&qpn).unwrap();
        let request = qp.recv.pending.pop_front().expect("a receive is posted");
        let mut wc = completion(request.wr_id, qpn, IBV_WC_SUCCESS, IBV_WC_RECV);
        wc.anon_1.invalidated_rkey = rkey;
        wc.wc_flags = IBV_WC_WITH_INV;
        push(qp.recv_cq, wc);
    }

    /// Completes the oldest receive with a datagram of `len` bytes and additional `flags`.
    pub(crate) fn complete_datagram(&self, qpn: u32, len: u32, source: u32, flags: u32) {
        let mut state = self.state();
        let qp = state.qps.get_mut(&qpn).unwrap();
        let request = qp.recv.pending.pop_front().expect("a receive is posted");
        let mut wc = completion(request.wr_id, qpn, IBV_WC_SUCCESS, IBV_WC_RECV);
        (wc.byte_len, wc.src_qp, wc.wc_flags) = (len + 40, source, flags);
        (wc.slid, wc.sl, wc.pkey_index, wc.dlid_path_bits) = (0x21, 3, 1, 2);
        push(qp.recv_cq, wc);
    }

    /// Fails the oldest send with `status`; all others are flushed, and the queue pair is in ERR.
    pub(crate) fn fail_send(&self, qpn: u32, status: u32) {
        let mut state = self.state();
        let qp = state.qps.get_mut(&qpn).unwrap();
        if let Some(request) = qp.send.pending.pop_front() {
            push(qp.send_cq, failure(request.wr_id, qpn, status));
        }
        flush(qp, qpn);
    }

    pub(crate) fn forge(&self, qpn: u32, wr_id: u64) {
        let state = self.state();
        push(
            state.qps[&qpn].recv_cq,
            completion(wr_id, qpn, IBV_WC_SUCCESS, IBV_WC_SEND),
        );
    }

    fn queues_of(&self, qpn: u32) -> [usize; 2] {
        let state = self.state();
        let qp = &state.qps[&qpn];
        [qp.send_cq, qp.recv_cq]
    }

    pub(crate) fn vector(&self) -> Option<c_int> {
        self.state().vector
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
        IBV_WR_BIND_MW => IBV_WC_BIND_MW,
        IBV_WR_LOCAL_INV => IBV_WC_LOCAL_INV,
        _ => IBV_WC_SEND,
    };
    completion(request.wr_id, qpn, IBV_WC_SUCCESS, opcode)
}

/// As in hardware, the fields that an error completion does not define are garbage.
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
    assert!(queue.len() <= cq.cqe() as usize, "the completion queue has overrun");
    drop(queue);
    events::completed(cq, wc.status != IBV_WC_SUCCESS);
}

pub(crate) fn library() -> Library {
    Library::new(&provider::API)
}
