//! The memory placement extensions (IBTA vol 1, annex A19): `ibv_wr_atomic_write` of rdma-core 44
//! and `ibv_wr_flush` of 46, with their values, which the bindings, of an older release, lack.

use core::ffi::c_void;

use doorbell_roce_proto::RKey;
use doorbell_roce_proto::memory::{Flush, Placement};
use doorbell_roce_proto::work::{Operation, PostError};
use doorbell_verbs_sys::{ibv_qp_ex, ibv_wc_opcode};

use crate::wr;

pub(crate) const IBV_ACCESS_FLUSH_GLOBAL: u32 = 1 << 8;
pub(crate) const IBV_ACCESS_FLUSH_PERSISTENT: u32 = 1 << 9;
pub(crate) const IBV_WC_FLUSH: ibv_wc_opcode = 8;
pub(crate) const IBV_WC_ATOMIC_WRITE: ibv_wc_opcode = 9;
pub(crate) const IBV_QP_EX_WITH_FLUSH: u32 = 1 << 11;
pub(crate) const IBV_QP_EX_WITH_ATOMIC_WRITE: u32 = 1 << 12;
/// Of `device_cap_flags_ex`, by the kernel's header.
pub(crate) const IBV_DEVICE_FLUSH_GLOBAL: u64 = 1 << 38;
pub(crate) const IBV_DEVICE_ATOMIC_WRITE: u64 = 1 << 40;

const IBV_FLUSH_GLOBAL: u8 = 1;
const IBV_FLUSH_PERSISTENT: u8 = 2;
const IBV_FLUSH_RANGE: u8 = 0;
const IBV_FLUSH_MR: u8 = 1;

/// `ibv_qp_ex` as of rdma-core 46: the calls that later releases appended follow it.
#[repr(C)]
pub(crate) struct ExtendedQp {
    pub(crate) base: ibv_qp_ex,
    wr_atomic_write:
        Option<unsafe extern "C" fn(qp: *mut ibv_qp_ex, rkey: u32, remote_addr: u64, atomic_wr: *const c_void)>,
    wr_flush:
        Option<unsafe extern "C" fn(qp: *mut ibv_qp_ex, rkey: u32, remote_addr: u64, len: usize, type_: u8, level: u8)>,
}

impl ExtendedQp {
    /// With the calls among `operations`.
    pub(crate) fn new(base: ibv_qp_ex, operations: u64) -> Self {
        let requested = |operation: u32| operations & u64::from(operation) != 0;
        Self {
            base,
            wr_atomic_write: requested(IBV_QP_EX_WITH_ATOMIC_WRITE).then_some(atomic_write),
            wr_flush: requested(IBV_QP_EX_WITH_FLUSH).then_some(flush),
        }
    }
}

unsafe extern "C" fn atomic_write(qp: *mut ibv_qp_ex, rkey: u32, addr: u64, atomic_wr: *const c_void) {
    // SAFETY: eight bytes, of any alignment, by contract of ibv_wr_post(3).
    let word = unsafe { atomic_wr.cast::<[u8; 8]>().read_unaligned() };
    let rkey = RKey(rkey);
    // SAFETY: the same contract.
    unsafe { wr::begin(qp, Operation::AtomicWrite { addr, rkey, word }) };
}

unsafe extern "C" fn flush(qp: *mut ibv_qp_ex, rkey: u32, addr: u64, len: usize, type_: u8, level: u8) {
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
