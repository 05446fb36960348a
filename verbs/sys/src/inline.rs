//! What `<infiniband/verbs.h>` defines as `static inline`, so that no library exports it: calls
//! through the context's own function pointers.
//!
//! Safety is that of the man pages: objects are live, of the library whose pointers they carry.

use core::ffi::{c_int, c_uint, c_void};
use core::mem::{offset_of, size_of};

use crate::api::Api;
use crate::bindings::*;

/// ibv_post_send(3): 0, or an errno value with `*bad_wr` at the rejected request.
///
/// # Safety
/// `qp` is live; `wr` heads a well-formed list, whose memory (but for inline data) stays registered
/// until its completion.
#[inline(always)]
pub unsafe fn post_send(qp: *mut ibv_qp, wr: *mut ibv_send_wr, bad_wr: *mut *mut ibv_send_wr) -> c_int {
    // SAFETY: live, with a live context; every provider fills this entry (verbs.h never checks).
    unsafe { (*(*qp).context).ops.post_send.unwrap_unchecked()(qp, wr, bad_wr) }
}

/// ibv_post_recv(3): 0, or an errno value with `*bad_wr` at the rejected request.
///
/// # Safety
/// As for [`post_send`].
#[inline(always)]
pub unsafe fn post_recv(qp: *mut ibv_qp, wr: *mut ibv_recv_wr, bad_wr: *mut *mut ibv_recv_wr) -> c_int {
    // SAFETY: as in `post_send`.
    unsafe { (*(*qp).context).ops.post_recv.unwrap_unchecked()(qp, wr, bad_wr) }
}

/// ibv_post_srq_recv(3): 0, or an errno value with `*bad_wr` at the rejected request.
///
/// # Safety
/// `srq` is live; `wr` as for [`post_recv`].
#[inline(always)]
pub unsafe fn post_srq_recv(srq: *mut ibv_srq, wr: *mut ibv_recv_wr, bad_wr: *mut *mut ibv_recv_wr) -> c_int {
    // SAFETY: as in `post_send`.
    unsafe { (*(*srq).context).ops.post_srq_recv.unwrap_unchecked()(srq, wr, bad_wr) }
}

/// ibv_poll_cq(3): how many of `wc` were filled, or a negative value on failure.
///
/// # Safety
/// `cq` is live and `wc` has room for `num_entries`.
#[inline(always)]
pub unsafe fn poll_cq(cq: *mut ibv_cq, num_entries: c_int, wc: *mut ibv_wc) -> c_int {
    // SAFETY: as in `post_send`.
    unsafe { (*(*cq).context).ops.poll_cq.unwrap_unchecked()(cq, num_entries, wc) }
}

/// ibv_req_notify_cq(3): 0, or an errno value.
///
/// # Safety
/// `cq` is live.
#[inline(always)]
pub unsafe fn req_notify_cq(cq: *mut ibv_cq, solicited_only: c_int) -> c_int {
    // SAFETY: as in `post_send`.
    unsafe { (*(*cq).context).ops.req_notify_cq.unwrap_unchecked()(cq, solicited_only) }
}

/// The `abi_compat` of an [`ibv_context`] that lies inside a [`verbs_context`]: `UINTPTR_MAX`.
pub const VERBS_ABI_IS_EXTENDED: *mut c_void = core::ptr::without_provenance_mut(usize::MAX);

/// ibv_alloc_mw(3): null with errno set on failure; `EOPNOTSUPP` when the provider has no windows.
///
/// # Safety
/// `pd` is live.
pub unsafe fn alloc_mw(pd: *mut ibv_pd, kind: ibv_mw_type) -> *mut ibv_mw {
    // SAFETY: a live domain has a live context; errno is this thread's; arguments by contract.
    unsafe {
        let Some(alloc) = (*(*pd).context).ops.alloc_mw else {
            *libc::__errno_location() = libc::EOPNOTSUPP;
            return core::ptr::null_mut();
        };
        alloc(pd, kind)
    }
}

/// ibv_dealloc_mw(3): 0, or an errno value.
///
/// # Safety
/// `mw` is live, and not used after this.
pub unsafe fn dealloc_mw(mw: *mut ibv_mw) -> c_int {
    // SAFETY: live; the provider that allocated it fills this entry too.
    unsafe { (*(*mw).context).ops.dealloc_mw.unwrap_unchecked()(mw) }
}

/// ibv_bind_mw(3), for windows of type 1: 0, or an errno value.
///
/// # Safety
/// `qp`, `mw` and what `bind` names are live, and stay so until the binding completes.
pub unsafe fn bind_mw(qp: *mut ibv_qp, mw: *mut ibv_mw, bind: *mut ibv_mw_bind) -> c_int {
    // SAFETY: as in `dealloc_mw`.
    unsafe {
        if (*mw).type_ != IBV_MW_TYPE_1 {
            return libc::EINVAL;
        }
        (*(*mw).context).ops.bind_mw.unwrap_unchecked()(qp, mw, bind)
    }
}

/// ibv_inc_rkey(3): the key with its lower 8 bits increased, which are the consumer's to choose.
pub const fn inc_rkey(rkey: u32) -> u32 {
    rkey & !0xff | rkey.wrapping_add(1) & 0xff
}

/// The extended context around `context`, or null when its provider has none.
///
/// # Safety
/// `context` is live.
pub unsafe fn verbs_get_ctx(context: *mut ibv_context) -> *mut verbs_context {
    // SAFETY: live by contract.
    if unsafe { (*context).abi_compat } != VERBS_ABI_IS_EXTENDED {
        return core::ptr::null_mut();
    }
    // SAFETY: the marker says that the context is the `context` member of a verbs_context.
    unsafe { context.byte_sub(offset_of!(verbs_context, context)).cast() }
}

/// The entry of the extended context at `field`, if it is long enough to have it.
///
/// Entries lie *before* the embedded `ibv_context`; `sz` counts the whole struct, and older
/// libraries lack the ones at its start. To be used inside `unsafe`: the context is live.
macro_rules! extended {
    ($context:expr, $field:ident) => {{
        let extended = verbs_get_ctx($context);
        if extended.is_null() || (*extended).sz < size_of::<verbs_context>() - offset_of!(verbs_context, $field) {
            None
        } else {
            (*extended).$field
        }
    }};
}

/// ibv_query_port(3): 0, or an errno value; zeros where an old library knows less.
///
/// # Safety
/// `context` is live and was made by `api`; `attr` may be written.
pub unsafe fn query_port(api: &Api, context: *mut ibv_context, port: u8, attr: *mut ibv_port_attr) -> c_int {
    // SAFETY: `attr` may be written; all-zero is valid, with `_compat_ibv_port_attr` as a prefix.
    // `context` is live, and the extended entry is read only when `sz` covers it.
    unsafe {
        attr.write_bytes(0, 1);
        match extended!(context, query_port) {
            Some(query) => query(context, port, attr, size_of::<ibv_port_attr>()),
            None => (api.query_port)(context, port, attr.cast()),
        }
    }
}

/// ibv_modify_cq(3): 0, or an errno value; `EOPNOTSUPP` when the provider has no such function.
///
/// # Safety
/// `cq` and `attr` are live.
pub unsafe fn modify_cq(cq: *mut ibv_cq, attr: *mut ibv_modify_cq_attr) -> c_int {
    // SAFETY: a live queue has a live context; the entry is read only when `sz` covers it.
    unsafe {
        match extended!((*cq).context, modify_cq) {
            Some(modify) => modify(cq, attr),
            None => libc::EOPNOTSUPP,
        }
    }
}

/// ibv_query_device_ex(3): 0, or an errno value (`EOPNOTSUPP` if missing); zeros where unknown.
///
/// # Safety
/// `context` is live; `attr` may be written.
pub unsafe fn query_device_ex(context: *mut ibv_context, attr: *mut ibv_device_attr_ex) -> c_int {
    // SAFETY: all-zero is valid; the context is live; the entry is read only when `sz` covers it.
    unsafe {
        attr.write_bytes(0, 1);
        match extended!(context, query_device_ex) {
            Some(query) => query(context, core::ptr::null(), attr, size_of::<ibv_device_attr_ex>()),
            None => libc::EOPNOTSUPP,
        }
    }
}

/// ibv_advise_mr(3): 0, or an errno value; `EOPNOTSUPP` when the provider has no such function.
///
/// # Safety
/// `pd` is live, and `sg_list` points to `num_sge` elements of its regions.
pub unsafe fn advise_mr(
    pd: *mut ibv_pd,
    advice: ib_uverbs_advise_mr_advice,
    flags: u32,
    sg_list: *mut ibv_sge,
    num_sge: u32,
) -> c_int {
    // SAFETY: a live domain has a live context; the entry is read only when `sz` covers it.
    unsafe {
        match extended!((*pd).context, advise_mr) {
            Some(advise) => advise(pd, advice, flags, sg_list, num_sge),
            None => libc::EOPNOTSUPP,
        }
    }
}

/// ibv_alloc_dm(3): null, with `errno` set, on failure (`EOPNOTSUPP` if missing).
///
/// # Safety
/// `context` and `attr` are live.
pub unsafe fn alloc_dm(context: *mut ibv_context, attr: *mut ibv_alloc_dm_attr) -> *mut ibv_dm {
    // SAFETY: live by contract, and the extended entry is read only when `sz` covers it.
    unsafe {
        match extended!(context, alloc_dm) {
            Some(alloc) => alloc(context, attr),
            None => fail(libc::EOPNOTSUPP),
        }
    }
}

/// ibv_free_dm: 0, or an errno value (ibv_alloc_dm(3)).
///
/// # Safety
/// `dm` is live, and not used after.
pub unsafe fn free_dm(dm: *mut ibv_dm) -> c_int {
    // SAFETY: live by contract, and the extended entry is read only when `sz` covers it.
    unsafe {
        match extended!((*dm).context, free_dm) {
            Some(free) => free(dm),
            None => libc::EOPNOTSUPP,
        }
    }
}

/// ibv_reg_dm_mr (ibv_alloc_dm(3)): null with `errno` set on failure (`EOPNOTSUPP` if missing).
///
/// # Safety
/// `pd` and `dm` are live, and of one device.
pub unsafe fn reg_dm_mr(pd: *mut ibv_pd, dm: *mut ibv_dm, offset: u64, length: usize, access: c_uint) -> *mut ibv_mr {
    // SAFETY: live by contract, and the extended entry is read only when `sz` covers it.
    unsafe {
        match extended!((*pd).context, reg_dm_mr) {
            Some(register) => register(pd, dm, offset, length, access),
            None => fail(libc::EOPNOTSUPP),
        }
    }
}

/// ibv_memcpy_to_dm (ibv_alloc_dm(3)): 0, or an errno value.
///
/// # Safety
/// `dm` is live, the range is in it, and `from` has `length` readable bytes.
pub unsafe fn memcpy_to_dm(dm: *mut ibv_dm, offset: u64, from: *const c_void, length: usize) -> c_int {
    // SAFETY: live by contract; verbs.h calls the entry unconditionally, we don't.
    unsafe {
        match (*dm).memcpy_to_dm {
            Some(copy) => copy(dm, offset, from, length),
            None => libc::EOPNOTSUPP,
        }
    }
}

/// ibv_memcpy_from_dm (ibv_alloc_dm(3)): 0, or an errno value.
///
/// # Safety
/// `dm` is live, the range is in it, and `into` has room for `length` bytes.
pub unsafe fn memcpy_from_dm(into: *mut c_void, dm: *mut ibv_dm, offset: u64, length: usize) -> c_int {
    // SAFETY: as in `memcpy_to_dm`.
    unsafe {
        match (*dm).memcpy_from_dm {
            Some(copy) => copy(into, dm, offset, length),
            None => libc::EOPNOTSUPP,
        }
    }
}

fn fail<T>(errno: c_int) -> *mut T {
    // SAFETY: the calling thread's own errno.
    unsafe { *libc::__errno_location() = errno };
    core::ptr::null_mut()
}

/// ibv_create_cq_ex(3): null with errno set on failure (`EOPNOTSUPP` if missing).
///
/// # Safety
/// `context`, `attr` and the channel in it are live.
pub unsafe fn create_cq_ex(context: *mut ibv_context, attr: *mut ibv_cq_init_attr_ex) -> *mut ibv_cq_ex {
    // SAFETY: live by contract; the entry is read only when `sz` covers it; this thread's errno.
    unsafe {
        match extended!(context, create_cq_ex) {
            Some(create) => create(context, attr),
            None => {
                *libc::__errno_location() = libc::EOPNOTSUPP;
                core::ptr::null_mut()
            }
        }
    }
}

/// ibv_start_poll (ibv_create_cq_ex(3)): 0 with a completion, `ENOENT` for none, or an errno.
///
/// # Safety
/// `cq` is live, has its calls, and has no open poll of this thread.
#[inline(always)]
pub unsafe fn start_poll(cq: *mut ibv_cq_ex) -> c_int {
    let mut attr = ibv_poll_cq_attr { comp_mask: 0 };
    // SAFETY: by contract.
    unsafe { (*cq).start_poll.unwrap_unchecked()(cq, &mut attr) }
}

/// ibv_next_poll of ibv_create_cq_ex(3): as [`start_poll`].
///
/// # Safety
/// `cq` is live, has its calls, and its poll is open.
#[inline(always)]
pub unsafe fn next_poll(cq: *mut ibv_cq_ex) -> c_int {
    // SAFETY: by contract.
    unsafe { (*cq).next_poll.unwrap_unchecked()(cq) }
}

/// ibv_end_poll of ibv_create_cq_ex(3).
///
/// # Safety
/// As for [`next_poll`]; the poll is no longer open after it.
#[inline(always)]
pub unsafe fn end_poll(cq: *mut ibv_cq_ex) {
    // SAFETY: by contract.
    unsafe { (*cq).end_poll.unwrap_unchecked()(cq) }
}

/// ibv_query_rt_values_ex(3): 0, or an errno value (`EOPNOTSUPP` if missing).
///
/// # Safety
/// `context` and `values` are live.
pub unsafe fn query_rt_values_ex(context: *mut ibv_context, values: *mut ibv_values_ex) -> c_int {
    // SAFETY: live by contract, and the extended entry is read only when `sz` covers it.
    unsafe {
        match extended!(context, query_rt_values) {
            Some(query) => query(context, values),
            None => libc::EOPNOTSUPP,
        }
    }
}
