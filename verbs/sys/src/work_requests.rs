//! `ibv_create_qp_ex` and `ibv_wr_*` (ibv_wr_post(3)), which are `static inline` too.
//!
//! Each calls a function pointer of the [`ibv_qp_ex`]. A provider fills those that any queue pair
//! needs and those requested at creation (`send_ops_flags`); callers check these for null once.

use core::ffi::{c_int, c_void};
use core::mem::{offset_of, size_of};

use crate::bindings::*;
use crate::inline::verbs_get_ctx;

/// ibv_create_qp_ex(3): null with `errno` set on failure (`EOPNOTSUPP` if missing).
///
/// # Safety
/// `context` and `attr` are live, and what `attr` names is of this context.
pub unsafe fn create_qp_ex(context: *mut ibv_context, attr: *mut ibv_qp_init_attr_ex) -> *mut ibv_qp {
    // SAFETY: `context` is live, and the extended entry is read only when `sz` covers it.
    unsafe {
        let extended = verbs_get_ctx(context);
        let covered = size_of::<verbs_context>() - offset_of!(verbs_context, create_qp_ex);
        if !extended.is_null()
            && (*extended).sz >= covered
            && let Some(create) = (*extended).create_qp_ex
        {
            return create(context, attr);
        }
        *libc::__errno_location() = libc::EOPNOTSUPP;
        core::ptr::null_mut()
    }
}

macro_rules! work_requests {
    ($( $(#[$doc:meta])* fn $name:ident($($arg:ident: $ty:ty),*) $(-> $ret:ty)?; )*) => { $(
        $(#[$doc])*
        /// # Safety
        /// As ibv_wr_post(3) has it: `qp` is live, its provider has filled this entry, and this
        /// call is in its place between `wr_start` and `wr_complete`.
        #[inline(always)]
        pub unsafe fn $name(qp: *mut ibv_qp_ex $(, $arg: $ty)*) $(-> $ret)? {
            // SAFETY: by contract.
            unsafe { (*qp).$name.unwrap_unchecked()(qp $(, $arg)*) }
        }
    )* };
}

work_requests! {
    fn wr_start();
    /// Rings the doorbell for the batch: 0, or an errno value, and then nothing of it was posted.
    fn wr_complete() -> c_int;
    fn wr_abort();
    fn wr_send();
    fn wr_send_imm(imm_data: __be32);
    fn wr_send_inv(invalidate_rkey: u32);
    fn wr_local_inv(invalidate_rkey: u32);
    fn wr_bind_mw(mw: *mut ibv_mw, rkey: u32, bind_info: *const ibv_mw_bind_info);
    fn wr_rdma_write(rkey: u32, remote_addr: u64);
    fn wr_rdma_write_imm(rkey: u32, remote_addr: u64, imm_data: __be32);
    fn wr_rdma_read(rkey: u32, remote_addr: u64);
    fn wr_atomic_cmp_swp(rkey: u32, remote_addr: u64, compare: u64, swap: u64);
    fn wr_atomic_fetch_add(rkey: u32, remote_addr: u64, add: u64);
    fn wr_set_sge(lkey: u32, addr: u64, length: u32);
    fn wr_set_sge_list(num_sge: usize, sg_list: *const ibv_sge);
    /// Sets the request's inline data, which is copied.
    fn wr_set_inline_data(addr: *mut c_void, length: usize);
    fn wr_set_ud_addr(ah: *mut ibv_ah, remote_qpn: u32, remote_qkey: u32);
}
