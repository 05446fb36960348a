//! The memory placement extensions (IBTA vol 1, annex A19): `ibv_wr_atomic_write`, and
//! `ibv_wr_flush` of rdma-core 46, with its values, which the bindings, of 44, lack.

use core::ffi::c_void;

use doorbell_roce_proto::RKey;
use doorbell_roce_proto::memory::{Flush, Placement};
use doorbell_roce_proto::work::{Operation, PostError};
use doorbell_verbs_sys::{ibv_qp_ex, ibv_wc_opcode};

use crate::wr;

pub(crate) const IBV_ACCESS_FLUSH_GLOBAL: u32 = 1 << 8;
pub(crate) const IBV_ACCESS_FLUSH_PERSISTENT: u32 = 1 << 9;
pub(crate) const IBV_WC_FLUSH: ibv_wc_opcode = 8;
pub(crate) const IBV_QP_EX_WITH_FLUSH: u32 = 1 << 11;
/// Of `device_cap_flags_ex`, by the kernel's header.
pub(crate) const IBV_DEVICE_FLUSH_GLOBAL: u64 = 1 << 38;
pub(crate) const IBV_DEVICE_ATOMIC_WRITE: u64 = 1 << 40;

const IBV_FLUSH_GLOBAL: u8 = 1;
const IBV_FLUSH_PERSISTENT: u8 = 2;
const IBV_FLUSH_RANGE: u8 = 0;
const IBV_FLUSH_MR: u8 = 1;

/// `ibv_qp_ex` as of rdma-core 46, which appended a call.
#[repr(C)]
pub(crate) struct ExtendedQp {
    pub(crate) base: ibv_qp_ex,
    pub(crate) wr_flush: Option<FlushCall>,
}

type FlushCall =
    unsafe extern "C" fn(qp: *mut ibv_qp_ex, rkey: u32, remote_addr: u64, len: usize, type_: u8, level: u8);

pub(crate) unsafe extern "C" fn atomic_write(qp: *mut ibv_qp_ex, rkey: u32, addr: u64, atomic_wr: *const c_void) {
    // SAFETY: eight bytes, of any alignment, by contract of ibv_wr_post(3).
    let word = unsafe { atomic_wr.cast::<[u8; 8]>().read_unaligned() };
    let rkey = RKey(rkey);
    // SAFETY: the same contract.
    unsafe { wr::begin(qp, Operation::AtomicWrite { addr, rkey, word }) };
}

pub(crate) unsafe extern "C" fn flush(qp: *mut ibv_qp_ex, rkey: u32, addr: u64, len: usize, type_: u8, level: u8) {
    let known = type_ & !(IBV_FLUSH_GLOBAL | IBV_FLUSH_PERSISTENT) == 0 && level <= IBV_FLUSH_MR;
    let Some(len) = u32::try_from(len).ok().filter(|_| known) else {
        // SAFETY: by contract of ibv_wr_post(3).
        return unsafe { wr::refuse(qp, PostError::Invalid) };
    };
    let flush = Flush {
        addr,
        rkey: RKey(rkey),
        len,
        whole_region: level != IBV_FLUSH_RANGE,
        placement: Placement {
            global: type_ & IBV_FLUSH_GLOBAL != 0,
            persistent: type_ & IBV_FLUSH_PERSISTENT != 0,
        },
    };
    // SAFETY: the same contract.
    unsafe { wr::begin(qp, Operation::Flush(flush)) };
}
