//! The extended posting API, one call per request: ibv_wr_post(3).
//!
//! Requests are staged in memory of the queue pair, allocated at creation, as an application must
//! not hold the device's lock for an unbounded time. `ibv_wr_complete` posts all of them under the
//! lock, or none, and returns the first error since `ibv_wr_start` (a setter before its request,
//! too many SGEs, a full queue).
//!
//! `ibv_wr_start` takes a lock of the queue pair until the batch ends: a thread that starts twice
//! deadlocks. Calls of operations not requested at creation are null pointers, as with rxe.
//!
//! To add an operation: a row in [`operations_of`], a pointer in [`with_calls`], and its function
//! beside [`send`]; those that rdma-core appended later are in [`placement`](crate::placement).

use core::ffi::{c_int, c_void};
use std::cell::UnsafeCell;
use std::mem::MaybeUninit;
use std::ops::Range;
use std::slice;
use std::sync::atomic::{AtomicBool, Ordering};

use doorbell_roce_proto::memory::{AtomicOp, Sge};
use doorbell_roce_proto::wire::{Transport, XrcEth};
use doorbell_roce_proto::work::{Destination, Operation, Payload, PostError, Remote, SendRequest};
use doorbell_roce_proto::{Qpn, RKey};
use doorbell_softroce::Posting;
use doorbell_verbs_sys::{
    IBV_QP_EX_WITH_ATOMIC_CMP_AND_SWP, IBV_QP_EX_WITH_ATOMIC_FETCH_AND_ADD, IBV_QP_EX_WITH_ATOMIC_WRITE,
    IBV_QP_EX_WITH_BIND_MW, IBV_QP_EX_WITH_LOCAL_INV, IBV_QP_EX_WITH_RDMA_READ, IBV_QP_EX_WITH_RDMA_WRITE,
    IBV_QP_EX_WITH_RDMA_WRITE_WITH_IMM, IBV_QP_EX_WITH_SEND, IBV_QP_EX_WITH_SEND_WITH_IMM,
    IBV_QP_EX_WITH_SEND_WITH_INV, IBV_SEND_FENCE, IBV_SEND_SIGNALED, IBV_SEND_SOLICITED, ibv_ah, ibv_data_buf, ibv_mw,
    ibv_mw_bind_info, ibv_qp, ibv_qp_cap, ibv_qp_ex, ibv_sge,
};
use parking_lot::RawMutex;
use parking_lot::lock_api::RawMutex as _;

use crate::placement::{ExtendedQp, IBV_QP_EX_WITH_FLUSH, atomic_write, flush};
use crate::post::{errno_of, to_sge};
use crate::queue_pair::SoftQp;
use crate::{address, window};

/// The operations that a queue pair may be created for (`IBV_QP_EX_WITH_*`; IBTA vol 1, table 36).
pub(crate) fn operations_of(transport: Transport) -> u64 {
    let sends = IBV_QP_EX_WITH_SEND | IBV_QP_EX_WITH_SEND_WITH_IMM;
    let writes = IBV_QP_EX_WITH_RDMA_WRITE | IBV_QP_EX_WITH_RDMA_WRITE_WITH_IMM;
    let atomics = IBV_QP_EX_WITH_ATOMIC_CMP_AND_SWP | IBV_QP_EX_WITH_ATOMIC_FETCH_AND_ADD;
    let windows = IBV_QP_EX_WITH_BIND_MW | IBV_QP_EX_WITH_LOCAL_INV;
    let placement = IBV_QP_EX_WITH_FLUSH | IBV_QP_EX_WITH_ATOMIC_WRITE;
    let reliable = IBV_QP_EX_WITH_RDMA_READ | atomics | IBV_QP_EX_WITH_SEND_WITH_INV | placement;
    u64::from(match transport {
        Transport::Rc | Transport::Xrc => sends | writes | windows | reliable,
        Transport::Uc => sends | writes | windows,
        Transport::Ud => sends,
    })
}

/// Whether each request names its remote end.
pub(crate) const fn has_remote(transport: Transport) -> bool {
    matches!(transport, Transport::Ud | Transport::Xrc)
}

pub(crate) const fn remote_srq(number: u32) -> Remote {
    Remote::Srq(XrcEth {
        srq: number & 0x00ff_ffff,
    })
}

pub(crate) fn with_calls(qp_base: ibv_qp, operations: Option<u64>, transport: Transport) -> ExtendedQp {
    // SAFETY: all-zero is a valid ibv_qp_ex: integers, null pointers and function pointers that are
    // `None`. The mutex and condition are overwritten by those of `qp_base`.
    let mut qp: ibv_qp_ex = unsafe { MaybeUninit::zeroed().assume_init() };
    qp.qp_base = qp_base;
    let Some(operations) = operations else {
        let (base, wr_flush) = (qp, None);
        return ExtendedQp { base, wr_flush };
    };
    let requested = |operation: u32| operations & u64::from(operation) != 0;
    macro_rules! call {
        ($entry:ident, $flag:ident, $function:ident) => {
            qp.$entry = if requested($flag) { Some($function) } else { None };
        };
    }
    call!(wr_send, IBV_QP_EX_WITH_SEND, send);
    call!(wr_send_imm, IBV_QP_EX_WITH_SEND_WITH_IMM, send_imm);
    call!(wr_rdma_write, IBV_QP_EX_WITH_RDMA_WRITE, rdma_write);
    call!(wr_rdma_write_imm, IBV_QP_EX_WITH_RDMA_WRITE_WITH_IMM, rdma_write_imm);
    call!(wr_rdma_read, IBV_QP_EX_WITH_RDMA_READ, rdma_read);
    call!(wr_atomic_cmp_swp, IBV_QP_EX_WITH_ATOMIC_CMP_AND_SWP, atomic_cmp_swp);
    call!(
        wr_atomic_fetch_add,
        IBV_QP_EX_WITH_ATOMIC_FETCH_AND_ADD,
        atomic_fetch_add
    );
    call!(wr_bind_mw, IBV_QP_EX_WITH_BIND_MW, bind_mw);
    call!(wr_local_inv, IBV_QP_EX_WITH_LOCAL_INV, local_inv);
    call!(wr_send_inv, IBV_QP_EX_WITH_SEND_WITH_INV, send_inv);
    call!(wr_atomic_write, IBV_QP_EX_WITH_ATOMIC_WRITE, atomic_write);
    qp.wr_set_sge = Some(set_sge);
    qp.wr_set_sge_list = Some(set_sge_list);
    qp.wr_set_inline_data = Some(set_inline_data);
    qp.wr_set_inline_data_list = Some(set_inline_data_list);
    qp.wr_set_ud_addr = Some(set_ud_addr);
    if transport == Transport::Xrc {
        qp.wr_set_ud_addr = None;
        qp.wr_set_xrc_srqn = Some(set_xrc_srqn);
    }
    qp.wr_start = Some(start);
    qp.wr_complete = Some(complete);
    qp.wr_abort = Some(abort);
    ExtendedQp {
        base: qp,
        wr_flush: requested(IBV_QP_EX_WITH_FLUSH).then_some(flush),
    }
}

/// The staged requests of a queue pair, behind the lock that a batch holds.
pub(crate) struct Stage {
    lock: RawMutex,
    /// Whether a batch is open: the lock is held, and `batch` belongs to its holder.
    open: AtomicBool,
    batch: UnsafeCell<Batch>,
}

/// A batch. Its vectors are allocated for the queue pair's capacities and never grow.
struct Batch {
    requests: Vec<Staged>,
    sges: Vec<Sge>,
    inline: Vec<u8>,
    max_requests: usize,
    max_sge: usize,
    max_inline: usize,
    has_remote: bool,
    refused: Option<PostError>,
}

#[derive(Debug)]
struct Staged {
    wr_id: u64,
    flags: u32,
    operation: Operation,
    bytes: Bytes,
    remote: Option<Remote>,
}

/// The payload of a staged request: a range of the batch's SGEs, or of its inline bytes.
#[derive(Debug)]
enum Bytes {
    Gather(Range<usize>),
    Inline(Range<usize>),
}

impl Stage {
    pub(crate) fn new(cap: &ibv_qp_cap, transport: Transport) -> Self {
        let (max_requests, max_sge, max_inline) = (
            cap.max_send_wr as usize,
            cap.max_send_sge as usize,
            cap.max_inline_data as usize,
        );
        Self {
            lock: RawMutex::INIT,
            open: AtomicBool::new(false),
            batch: UnsafeCell::new(Batch {
                requests: Vec::with_capacity(max_requests),
                sges: Vec::with_capacity(max_requests * max_sge),
                inline: Vec::with_capacity(max_requests * max_inline),
                max_requests,
                max_sge,
                max_inline,
                has_remote: has_remote(transport),
                refused: None,
            }),
        }
    }

    /// A call outside of a batch cannot report an error, and has no effect.
    ///
    /// # Safety
    /// An open batch belongs to this thread (ibv_wr_post(3)), and `change` does not reenter.
    unsafe fn with(&self, change: impl FnOnce(&mut Batch)) {
        if self.open.load(Ordering::Relaxed) {
            // SAFETY: open, so this thread's by contract until it is completed or aborted.
            change(unsafe { &mut *self.batch.get() });
        }
    }

    /// Ends a batch: `false` when none is open.
    ///
    /// # Safety
    /// As for [`with`](Self::with).
    unsafe fn end(&self, last: impl FnOnce(&mut Batch)) -> bool {
        if !self.open.load(Ordering::Relaxed) {
            return false;
        }
        // SAFETY: as in `with`; no other thread gets here before the lock is released. This thread
        // holds it, as `start` took it for this batch.
        unsafe {
            last(&mut *self.batch.get());
            self.open.store(false, Ordering::Relaxed);
            self.lock.unlock();
        }
        true
    }
}

impl Batch {
    fn clear(&mut self) {
        self.requests.clear();
        self.sges.clear();
        self.inline.clear();
        self.refused = None;
    }

    fn refuse(&mut self, why: PostError) {
        self.refused.get_or_insert(why);
    }

    fn begin(&mut self, wr_id: u64, flags: u32, operation: Operation) {
        if self.requests.len() == self.max_requests {
            return self.refuse(PostError::Full);
        }
        self.requests.push(Staged {
            wr_id,
            flags,
            operation,
            bytes: Bytes::Gather(0..0),
            remote: None,
        });
    }

    /// After an error nothing more is staged: it might belong to a request that was refused.
    fn set(&mut self, change: impl FnOnce(&mut Staged, &mut Vec<Sge>, &mut Vec<u8>) -> Result<(), PostError>) {
        if self.refused.is_some() {
            return;
        }
        let Some(request) = self.requests.last_mut() else {
            return self.refuse(PostError::Invalid);
        };
        // A second payload setter replaces the first, so the capacity suffices.
        match &request.bytes {
            Bytes::Gather(range) => self.sges.truncate(self.sges.len() - range.len()),
            Bytes::Inline(range) => self.inline.truncate(self.inline.len() - range.len()),
        }
        request.bytes = Bytes::Gather(0..0);
        if let Err(why) = change(request, &mut self.sges, &mut self.inline) {
            self.refuse(why);
        }
    }

    fn set_elements(&mut self, elements: &[ibv_sge]) {
        let max = self.max_sge;
        self.set(|request, sges, _| {
            if elements.len() > max {
                return Err(PostError::Invalid);
            }
            let start = sges.len();
            sges.extend(elements.iter().map(to_sge));
            request.bytes = Bytes::Gather(start..sges.len());
            Ok(())
        });
    }

    /// # Safety
    /// Each piece is readable, and not modified during the call.
    unsafe fn set_inline(&mut self, pieces: &[ibv_data_buf]) {
        let max = self.max_inline;
        self.set(|request, _, inline| {
            // Data that is too long is refused before it is read.
            let total = pieces
                .iter()
                .try_fold(0_usize, |sum, piece| sum.checked_add(piece.length));
            if total.is_none_or(|total| total > max) {
                return Err(PostError::Invalid);
            }
            let start = inline.len();
            for piece in pieces.iter().filter(|piece| piece.length > 0) {
                // SAFETY: readable by contract.
                inline.extend_from_slice(unsafe { slice::from_raw_parts(piece.addr.cast(), piece.length) });
            }
            request.bytes = Bytes::Inline(start..inline.len());
            Ok(())
        });
    }

    fn post(&self, posting: &mut Posting<'_>) -> Result<(), PostError> {
        if let Some(why) = self.refused {
            return Err(why);
        }
        for (ahead, request) in (0..).zip(&self.requests) {
            if self.has_remote != request.remote.is_some() {
                return Err(PostError::Invalid);
            }
            posting.check_send(&self.request(request), self.has_remote, ahead)?;
        }
        for request in &self.requests {
            match &request.remote {
                None => posting.send(&self.request(request))?,
                Some(to) => posting.send_to(&self.request(request), to)?,
            }
        }
        Ok(())
    }

    fn request(&self, staged: &Staged) -> SendRequest<'_> {
        SendRequest {
            wr_id: staged.wr_id,
            operation: staged.operation,
            payload: match &staged.bytes {
                Bytes::Gather(range) => Payload::Gather(&self.sges[range.clone()]),
                Bytes::Inline(range) => Payload::Inline(&self.inline[range.clone()]),
            },
            signaled: staged.flags & IBV_SEND_SIGNALED != 0,
            fence: staged.flags & IBV_SEND_FENCE != 0,
            solicited: staged.flags & IBV_SEND_SOLICITED != 0,
        }
    }
}

/// `ibv_wr_start`: waits while another thread has a batch open on this queue pair.
unsafe extern "C" fn start(qp: *mut ibv_qp_ex) {
    // SAFETY: live and ours by contract, as for every call here; one with these calls has a stage.
    if let Some(stage) = unsafe { SoftQp::stage(qp) } {
        stage.lock.lock();
        // SAFETY: the lock was just taken, and is held until `end`.
        unsafe { &mut *stage.batch.get() }.clear();
        stage.open.store(true, Ordering::Relaxed);
    }
}

/// On an error (an errno value) none of the batch is posted; `EINVAL` without one.
unsafe extern "C" fn complete(qp: *mut ibv_qp_ex) -> c_int {
    // SAFETY: as in `start`; the base is the extended struct's first member.
    let (stage, soft) = unsafe { (SoftQp::stage(qp), SoftQp::handle(qp.cast::<ibv_qp>())) };
    let mut posted = Err(PostError::Invalid);
    if let Some(stage) = stage {
        // SAFETY: an open batch belongs to this thread by contract.
        unsafe { stage.end(|batch| posted = soft.post_send(|posting| batch.post(posting))) };
    }
    posted.map_or_else(errno_of, |()| 0)
}

unsafe extern "C" fn abort(qp: *mut ibv_qp_ex) {
    // SAFETY: as in `complete`.
    if let Some(stage) = unsafe { SoftQp::stage(qp) } {
        // SAFETY: an open batch belongs to this thread by contract.
        unsafe { stage.end(Batch::clear) };
    }
}

/// # Safety
/// `qp` is live and ours, and its open batch, if any, belongs to this thread.
unsafe fn change(qp: *mut ibv_qp_ex, change: impl FnOnce(&mut Batch)) {
    // SAFETY: by contract.
    if let Some(stage) = unsafe { SoftQp::stage(qp) } {
        // SAFETY: by contract.
        unsafe { stage.with(change) };
    }
}

/// # Safety
/// As for [`change`].
pub(crate) unsafe fn begin(qp: *mut ibv_qp_ex, operation: Operation) {
    // SAFETY: live by contract; only the caller writes the two while its batch is open.
    let (wr_id, flags) = unsafe { ((*qp).wr_id, (*qp).wr_flags) };
    // SAFETY: the same contract.
    unsafe { change(qp, |batch| batch.begin(wr_id, flags, operation)) };
}

/// # Safety
/// As for [`change`].
pub(crate) unsafe fn refuse(qp: *mut ibv_qp_ex, why: PostError) {
    // SAFETY: the same contract.
    unsafe { change(qp, |batch| batch.refuse(why)) };
}

unsafe extern "C" fn send(qp: *mut ibv_qp_ex) {
    // SAFETY: by contract of ibv_wr_post(3), as for all the calls that follow.
    unsafe { begin(qp, Operation::Send { imm: None }) };
}

unsafe extern "C" fn send_imm(qp: *mut ibv_qp_ex, imm_data: u32) {
    let imm = Some(u32::from_be(imm_data));
    // SAFETY: as above.
    unsafe { begin(qp, Operation::Send { imm }) };
}

unsafe extern "C" fn send_inv(qp: *mut ibv_qp_ex, invalidate_rkey: u32) {
    let rkey = RKey(invalidate_rkey);
    // SAFETY: as above.
    unsafe { begin(qp, Operation::SendInvalidate { rkey }) };
}

unsafe extern "C" fn local_inv(qp: *mut ibv_qp_ex, invalidate_rkey: u32) {
    let rkey = RKey(invalidate_rkey);
    // SAFETY: as above.
    unsafe { begin(qp, Operation::Invalidate { rkey }) };
}

unsafe extern "C" fn bind_mw(qp: *mut ibv_qp_ex, mw: *mut ibv_mw, rkey: u32, bind_info: *const ibv_mw_bind_info) {
    // SAFETY: as above; window, region and bind info are live, the first two ours.
    unsafe {
        match window::posted_bind(mw, rkey, &*bind_info) {
            Ok(bind) => begin(qp, Operation::Bind(bind)),
            Err(why) => refuse(qp, why),
        }
    }
}

unsafe extern "C" fn rdma_write(qp: *mut ibv_qp_ex, rkey: u32, addr: u64) {
    let (rkey, imm) = (RKey(rkey), None);
    // SAFETY: as above.
    unsafe { begin(qp, Operation::Write { addr, rkey, imm }) };
}

unsafe extern "C" fn rdma_write_imm(qp: *mut ibv_qp_ex, rkey: u32, addr: u64, imm_data: u32) {
    let (rkey, imm) = (RKey(rkey), Some(u32::from_be(imm_data)));
    // SAFETY: as above.
    unsafe { begin(qp, Operation::Write { addr, rkey, imm }) };
}

unsafe extern "C" fn rdma_read(qp: *mut ibv_qp_ex, rkey: u32, addr: u64) {
    let rkey = RKey(rkey);
    // SAFETY: as above.
    unsafe { begin(qp, Operation::Read { addr, rkey }) };
}

unsafe extern "C" fn atomic_cmp_swp(qp: *mut ibv_qp_ex, rkey: u32, addr: u64, compare: u64, swap: u64) {
    let (rkey, op) = (RKey(rkey), AtomicOp::CompareSwap { compare, swap });
    // SAFETY: as above.
    unsafe { begin(qp, Operation::Atomic { addr, rkey, op }) };
}

unsafe extern "C" fn atomic_fetch_add(qp: *mut ibv_qp_ex, rkey: u32, addr: u64, add: u64) {
    let (rkey, op) = (RKey(rkey), AtomicOp::FetchAdd { add });
    // SAFETY: as above.
    unsafe { begin(qp, Operation::Atomic { addr, rkey, op }) };
}

unsafe extern "C" fn set_sge(qp: *mut ibv_qp_ex, lkey: u32, addr: u64, length: u32) {
    let element = ibv_sge { addr, length, lkey };
    // SAFETY: as above.
    unsafe { change(qp, |batch| batch.set_elements(slice::from_ref(&element))) };
}

unsafe extern "C" fn set_sge_list(qp: *mut ibv_qp_ex, num_sge: usize, sg_list: *const ibv_sge) {
    // SAFETY: that many elements by contract.
    let elements = unsafe { list(sg_list, num_sge) };
    // SAFETY: as above.
    unsafe { change(qp, |batch| batch.set_elements(elements)) };
}

/// The bytes are copied at once: the caller may reuse its buffer.
unsafe extern "C" fn set_inline_data(qp: *mut ibv_qp_ex, addr: *mut c_void, length: usize) {
    let piece = ibv_data_buf { addr, length };
    // SAFETY: as above; readable by contract.
    unsafe { change(qp, |batch| batch.set_inline(slice::from_ref(&piece))) };
}

unsafe extern "C" fn set_inline_data_list(qp: *mut ibv_qp_ex, num_buf: usize, buf_list: *const ibv_data_buf) {
    // SAFETY: that many pieces by contract.
    let pieces = unsafe { list(buf_list, num_buf) };
    // SAFETY: as above; readable by contract.
    unsafe { change(qp, |batch| batch.set_inline(pieces)) };
}

/// The path is copied: the handle may be destroyed after this call.
unsafe extern "C" fn set_ud_addr(qp: *mut ibv_qp_ex, ah: *mut ibv_ah, remote_qpn: u32, remote_qkey: u32) {
    // SAFETY: null, or live and ours by contract, as is the queue pair, whose domain never changes.
    let path = unsafe { address::path_of(ah, (*qp).qp_base.pd) };
    let set = |batch: &mut Batch| match (batch.requests.last_mut(), path) {
        (Some(request), Some(path)) => {
            request.remote = Some(Remote::Datagram(Destination {
                path,
                qpn: Qpn::new(remote_qpn),
                qkey: remote_qkey,
            }));
        }
        _ => batch.refuse(PostError::Invalid),
    };
    // SAFETY: as above.
    unsafe { change(qp, set) };
}

unsafe extern "C" fn set_xrc_srqn(qp: *mut ibv_qp_ex, remote_srqn: u32) {
    let set = |batch: &mut Batch| match batch.requests.last_mut() {
        Some(request) => request.remote = Some(remote_srq(remote_srqn)),
        None => batch.refuse(PostError::Invalid),
    };
    // SAFETY: as above.
    unsafe { change(qp, set) };
}

/// # Safety
/// `first` points to `count` live elements, unless `count` is 0.
unsafe fn list<'a, T>(first: *const T, count: usize) -> &'a [T] {
    if count == 0 {
        return &[];
    }
    // SAFETY: by contract.
    unsafe { slice::from_raw_parts(first, count) }
}
