//! The column `rdma-sys`: raw FFI from Rust, with the accounting of C.

use std::error::Error;
use std::ffi::{c_int, c_uint};
use std::hint::black_box;
use std::mem::MaybeUninit;
use std::process::ExitCode;
use std::ptr;

use doorbell_peer_common::{BATCH, BYTES, Buffer, DEPTH, Queue, RECEIVE, Remote};
use rdma_sys::*;

const POLL: usize = 32;

const SIGNALED: c_uint = ibv_send_flags::IBV_SEND_SIGNALED.0;
const INLINE: c_uint = ibv_send_flags::IBV_SEND_INLINE.0;

struct Peer {
    qp: *mut ibv_qp,
    qp_ex: *mut ibv_qp_ex,
    cq: *mut ibv_cq,
    cq_ex: *mut ibv_cq_ex,
    sends: Queue<&'static Buffer>,
    receives: Queue<&'static Buffer>,
    pool: Vec<&'static Buffer>,
}

/// Leaves the other fields uninitialised, as the C columns do.
///
/// # Safety
/// `wr` may be written.
#[inline]
unsafe fn fill_write(
    wr: *mut ibv_send_wr,
    next: *mut ibv_send_wr,
    wr_id: u64,
    sge: *mut ibv_sge,
    flags: c_uint,
    remote: &Remote,
) {
    // SAFETY: by the contract; no reference to uninitialised data is made.
    unsafe {
        (*wr).wr_id = wr_id;
        (*wr).next = next;
        (*wr).sg_list = sge;
        (*wr).num_sge = 1;
        (*wr).opcode = ibv_wr_opcode::IBV_WR_RDMA_WRITE;
        (*wr).send_flags = flags;
        (*wr).wr.rdma.remote_addr = remote.addr;
        (*wr).wr.rdma.rkey = remote.rkey;
    }
}

fn sge_of(buffer: &Buffer) -> ibv_sge {
    ibv_sge {
        addr: buffer.addr,
        length: buffer.length,
        lkey: buffer.lkey,
    }
}

#[inline]
fn flags_of(queue: &mut Queue<&'static Buffer>) -> c_uint {
    if queue.is_signaled() { SIGNALED } else { 0 }
}

#[inline(never)]
fn measure_write(peer: &mut Peer, buffer: &'static Buffer, remote: &Remote) -> c_int {
    if !peer.sends.has_room(1) {
        return ENOMEM;
    }
    let mut sge = sge_of(buffer);
    let mut wr = MaybeUninit::uninit();
    let flags = flags_of(&mut peer.sends);
    let wr_id = peer.sends.put(Some(buffer));
    // SAFETY: filled in before it is posted; its memory is registered and never freed.
    unsafe {
        fill_write(wr.as_mut_ptr(), ptr::null_mut(), wr_id, &mut sge, flags, remote);
        ibv_post_send(peer.qp, wr.as_mut_ptr(), &mut ptr::null_mut())
    }
}

#[inline(never)]
fn measure_write_wr(peer: &mut Peer, buffer: &'static Buffer, remote: &Remote) -> c_int {
    if !peer.sends.has_room(1) {
        return ENOMEM;
    }
    let flags = flags_of(&mut peer.sends);
    let wr_id = peer.sends.put(Some(buffer));
    // SAFETY: the queue pair is an extended one; the memory is registered and never freed.
    unsafe {
        ibv_wr_start(peer.qp_ex);
        (*peer.qp_ex).wr_id = wr_id;
        (*peer.qp_ex).wr_flags = flags;
        ibv_wr_rdma_write(peer.qp_ex, remote.rkey, remote.addr);
        ibv_wr_set_sge(peer.qp_ex, buffer.lkey, buffer.addr, buffer.length);
        ibv_wr_complete(peer.qp_ex)
    }
}

#[inline(never)]
fn measure_inline(peer: &mut Peer, bytes: &[u8], remote: &Remote) -> c_int {
    if !peer.sends.has_room(1) {
        return ENOMEM;
    }
    let mut sge = ibv_sge {
        addr: bytes.as_ptr() as u64,
        length: bytes.len() as u32,
        lkey: 0,
    };
    let mut wr = MaybeUninit::uninit();
    let flags = INLINE | flags_of(&mut peer.sends);
    let wr_id = peer.sends.put(None);
    // SAFETY: the request is filled in before it is posted; inline data is read while posting.
    unsafe {
        fill_write(wr.as_mut_ptr(), ptr::null_mut(), wr_id, &mut sge, flags, remote);
        ibv_post_send(peer.qp, wr.as_mut_ptr(), &mut ptr::null_mut())
    }
}

#[inline(never)]
fn measure_inline_wr(peer: &mut Peer, bytes: &[u8], remote: &Remote) -> c_int {
    if !peer.sends.has_room(1) {
        return ENOMEM;
    }
    let flags = flags_of(&mut peer.sends);
    let wr_id = peer.sends.put(None);
    // SAFETY: the queue pair is an extended one; inline data is read while posting.
    unsafe {
        ibv_wr_start(peer.qp_ex);
        (*peer.qp_ex).wr_id = wr_id;
        (*peer.qp_ex).wr_flags = flags;
        ibv_wr_rdma_write(peer.qp_ex, remote.rkey, remote.addr);
        ibv_wr_set_inline_data(peer.qp_ex, bytes.as_ptr().cast_mut().cast(), bytes.len());
        ibv_wr_complete(peer.qp_ex)
    }
}

#[inline(never)]
fn measure_batch(peer: &mut Peer, remote: &Remote) -> c_int {
    if !peer.sends.has_room(BATCH) {
        return ENOMEM;
    }
    let mut wrs = MaybeUninit::<[ibv_send_wr; BATCH]>::uninit();
    let mut sges = MaybeUninit::<[ibv_sge; BATCH]>::uninit();
    let (wrs, sges) = (
        wrs.as_mut_ptr().cast::<ibv_send_wr>(),
        sges.as_mut_ptr().cast::<ibv_sge>(),
    );
    for n in 0..BATCH {
        let Some(buffer) = peer.pool.pop() else { return ENOMEM };
        let flags = flags_of(&mut peer.sends);
        let wr_id = peer.sends.put(Some(buffer));
        // SAFETY: both arrays have an `n`.
        unsafe {
            let next = if n + 1 < BATCH { wrs.add(n + 1) } else { ptr::null_mut() };
            sges.add(n).write(sge_of(buffer));
            fill_write(wrs.add(n), next, wr_id, sges.add(n), flags, remote);
        }
    }
    // SAFETY: all requests of the list are filled in; their memory is registered and never freed.
    unsafe { ibv_post_send(peer.qp, wrs, &mut ptr::null_mut()) }
}

#[inline(never)]
fn measure_batch_wr(peer: &mut Peer, remote: &Remote) -> c_int {
    if !peer.sends.has_room(BATCH) {
        return ENOMEM;
    }
    // SAFETY: the queue pair is an extended one; the memory is registered and never freed.
    unsafe {
        ibv_wr_start(peer.qp_ex);
        for _ in 0..BATCH {
            let Some(buffer) = peer.pool.pop() else {
                ibv_wr_abort(peer.qp_ex);
                return ENOMEM;
            };
            (*peer.qp_ex).wr_flags = flags_of(&mut peer.sends);
            (*peer.qp_ex).wr_id = peer.sends.put(Some(buffer));
            ibv_wr_rdma_write(peer.qp_ex, remote.rkey, remote.addr);
            ibv_wr_set_sge(peer.qp_ex, buffer.lkey, buffer.addr, buffer.length);
        }
        ibv_wr_complete(peer.qp_ex)
    }
}

#[inline(never)]
fn measure_receive(peer: &mut Peer, buffer: &'static Buffer) -> c_int {
    if !peer.receives.has_room(1) {
        return ENOMEM;
    }
    let mut sge = sge_of(buffer);
    let mut wr = ibv_recv_wr {
        wr_id: RECEIVE | peer.receives.put(Some(buffer)),
        next: ptr::null_mut(),
        sg_list: &mut sge,
        num_sge: 1,
    };
    // SAFETY: the memory is registered and lives as long as the program.
    unsafe { ibv_post_recv(peer.qp, &mut wr, &mut ptr::null_mut()) }
}

#[inline(never)]
fn measure_list(peer: &mut Peer) -> c_int {
    if !peer.receives.has_room(BATCH) {
        return ENOMEM;
    }
    let mut wrs = MaybeUninit::<[ibv_recv_wr; BATCH]>::uninit();
    let mut sges = MaybeUninit::<[ibv_sge; BATCH]>::uninit();
    let (wrs, sges) = (
        wrs.as_mut_ptr().cast::<ibv_recv_wr>(),
        sges.as_mut_ptr().cast::<ibv_sge>(),
    );
    for n in 0..BATCH {
        let Some(buffer) = peer.pool.pop() else { return ENOMEM };
        let wr_id = RECEIVE | peer.receives.put(Some(buffer));
        // SAFETY: both arrays have an `n`.
        unsafe {
            let next = if n + 1 < BATCH { wrs.add(n + 1) } else { ptr::null_mut() };
            sges.add(n).write(sge_of(buffer));
            wrs.add(n).write(ibv_recv_wr {
                wr_id,
                next,
                sg_list: sges.add(n),
                num_sge: 1,
            });
        }
    }
    // SAFETY: all requests of the list are filled in; their memory is registered and never freed.
    unsafe { ibv_post_recv(peer.qp, wrs, &mut ptr::null_mut()) }
}

impl Peer {
    #[inline]
    fn retire(&mut self, wr_id: u64) {
        let queue = if wr_id & RECEIVE == 0 {
            &mut self.sends
        } else {
            &mut self.receives
        };
        queue.retire(wr_id as u32, &mut self.pool);
    }
}

#[inline(never)]
fn measure_drain(peer: &mut Peer) -> bool {
    let mut wcs = MaybeUninit::<[ibv_wc; POLL]>::uninit();
    let wcs = wcs.as_mut_ptr().cast::<ibv_wc>();
    // SAFETY: the array has room for [`POLL`].
    let count = unsafe { ibv_poll_cq(peer.cq, POLL as i32, wcs) };
    for n in 0..usize::try_from(count).unwrap_or(0) {
        // SAFETY: the first `count` are written.
        let wc = unsafe { &*wcs.add(n) };
        if wc.status != ibv_wc_status::IBV_WC_SUCCESS {
            return false;
        }
        peer.retire(wc.wr_id);
    }
    count >= 0
}

#[inline(never)]
fn measure_drain_ex(peer: &mut Peer) -> bool {
    let mut attr = ibv_poll_cq_attr { comp_mask: 0 };
    // SAFETY: the completion queue is an extended one; a poll that has begun is ended once.
    unsafe {
        match ibv_start_poll(peer.cq_ex, &mut attr) {
            0 => {}
            error => return error == ENOENT,
        }
        let error = loop {
            if (*peer.cq_ex).status != ibv_wc_status::IBV_WC_SUCCESS {
                break 0;
            }
            let wr_id = (*peer.cq_ex).wr_id;
            peer.retire(wr_id);
            match ibv_next_poll(peer.cq_ex) {
                0 => {}
                error => break error,
            }
        };
        ibv_end_poll(peer.cq_ex);
        error == ENOENT
    }
}

const ENOMEM: c_int = 12;
const ENOENT: c_int = 2;

/// `rdma-sys` itself compares the marker with `u32::MAX`, and so fails on 64-bit machines.
fn extended(context: *mut ibv_context) -> *mut verbs_context {
    context
        .wrapping_byte_sub(std::mem::offset_of!(verbs_context, context))
        .cast()
}

impl doorbell_peer_common::Peer for Peer {
    fn lacks(_row: &str) -> Option<&'static str> {
        None
    }

    fn open(row: &str) -> Result<Self, Box<dyn Error>> {
        let memory = Box::leak(Box::new([0_u8; 2 * DEPTH as usize * BYTES]));
        // SAFETY: every pointer is checked before it is used, and every structure is of plain
        // integers and pointers, for which zero is a value.
        unsafe {
            let devices = ibv_get_device_list(ptr::null_mut());
            let context = ibv_open_device(*devices);
            if context.is_null() {
                return Err("cannot open the device".into());
            }
            let pd = ibv_alloc_pd(context);
            let access = ibv_access_flags::IBV_ACCESS_LOCAL_WRITE.0 as i32;
            let mr = ibv_reg_mr(pd, memory.as_mut_ptr().cast(), memory.len(), access);
            let (cq, cq_ex) = if row.ends_with("_ex") {
                let mut attr: ibv_cq_init_attr_ex = std::mem::zeroed();
                attr.cqe = 2 * DEPTH;
                let create = (*extended(context)).create_cq_ex.ok_or("no create_cq_ex")?;
                let made = create(context, &mut attr);
                (ibv_cq_ex_to_cq(made), made)
            } else {
                let made = ibv_create_cq(context, 2 * DEPTH as i32, ptr::null_mut(), ptr::null_mut(), 0);
                (made, ptr::null_mut())
            };
            let mut attr: ibv_qp_init_attr_ex = std::mem::zeroed();
            attr.send_cq = cq;
            attr.recv_cq = cq;
            attr.cap.max_send_wr = DEPTH;
            attr.cap.max_recv_wr = DEPTH;
            attr.cap.max_send_sge = 1;
            attr.cap.max_recv_sge = 1;
            attr.cap.max_inline_data = BYTES as u32;
            attr.qp_type = ibv_qp_type::IBV_QPT_RC;
            attr.pd = pd;
            attr.comp_mask = ibv_qp_init_attr_mask::IBV_QP_INIT_ATTR_PD.0;
            if row.ends_with("_wr") {
                attr.comp_mask |= ibv_qp_init_attr_mask::IBV_QP_INIT_ATTR_SEND_OPS_FLAGS.0;
                attr.send_ops_flags = u64::from(ibv_qp_create_send_ops_flags::IBV_QP_EX_WITH_RDMA_WRITE.0);
            }
            let qp = (*extended(context)).create_qp_ex.ok_or("no create_qp_ex")?(context, &mut attr);
            let qp_ex = ibv_qp_to_qp_ex(qp);
            if mr.is_null() || cq.is_null() || qp.is_null() || (qp_ex.is_null() && row.ends_with("_wr")) {
                return Err("an object could not be made".into());
            }
            Ok(Self {
                qp,
                qp_ex,
                cq,
                cq_ex,
                sends: Queue::default(),
                receives: Queue::default(),
                pool: Buffer::pool(memory.as_mut_ptr(), (*mr).lkey),
            })
        }
    }

    fn post(&mut self, row: &str) -> bool {
        let remote = black_box(&Remote {
            addr: 0x10000,
            rkey: 0x4321,
        });
        let bytes = black_box(&[0_u8; BATCH]);
        let mut take = || self.pool.pop();
        let result = match row {
            "write" => take().map(|buffer| measure_write(self, buffer, remote)),
            "write_wr" => take().map(|buffer| measure_write_wr(self, buffer, remote)),
            "receive" => take().map(|buffer| measure_receive(self, buffer)),
            "inline" => Some(measure_inline(self, bytes, remote)),
            "inline_wr" => Some(measure_inline_wr(self, bytes, remote)),
            "batch" => Some(measure_batch(self, remote)),
            "batch_wr" => Some(measure_batch_wr(self, remote)),
            "list" | "drain" | "drain_ex" => Some(measure_list(self)),
            _ => None,
        };
        result == Some(0)
    }

    fn drain(&mut self) -> bool {
        if self.cq_ex.is_null() {
            measure_drain(self)
        } else {
            measure_drain_ex(self)
        }
    }
}

fn main() -> ExitCode {
    doorbell_peer_common::main::<Peer>()
}
