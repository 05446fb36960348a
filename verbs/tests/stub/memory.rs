//! The stub's memory verbs besides ibv_reg_mr: options, dma-bufs, device memory.

use core::ffi::{c_int, c_uint, c_void};
use std::cell::UnsafeCell;

use doorbell_verbs_sys::*;

use super::Verb;
use super::provider::{self, set_errno, stub_of};

pub(crate) const DEVICE_MEMORY: u64 = 4096;

/// A byte for regions without host memory: what their `addr` points to.
static NOWHERE: u8 = 0;

#[repr(C)]
struct Dm {
    raw: ibv_dm,
    bytes: UnsafeCell<Box<[u8]>>,
}

pub(super) unsafe extern "C" fn reg_mr_iova2(
    pd: *mut ibv_pd,
    addr: *mut c_void,
    length: usize,
    iova: u64,
    access: c_uint,
) -> *mut ibv_mr {
    assert_eq!(addr as u64, iova);
    // SAFETY: the caller's.
    unsafe { provider::reg_mr(pd, addr, length, access.cast_signed()) }
}

pub(super) unsafe extern "C" fn rereg_mr(
    mr: *mut ibv_mr,
    flags: c_int,
    _: *mut ibv_pd,
    _: *mut c_void,
    _: usize,
    access: c_int,
) -> c_int {
    assert_eq!(flags, IBV_REREG_MR_CHANGE_ACCESS.cast_signed());
    // SAFETY: a live region.
    let (stub, old) = unsafe { (stub_of((*mr).context), (*mr).lkey) };
    if let Some(result) = stub.failing(Verb::ReregMr) {
        // A result above 0 is invalid for this verb: it stands for a device without the call.
        let (result, errno) = match result {
            errno if errno > 0 => (IBV_REREG_MR_ERR_CMD, errno),
            result => (result, libc::EINVAL),
        };
        set_errno(errno);
        return result;
    }
    let mut state = stub.state();
    let (addr, length, _) = state.regions.remove(&old).expect("a live region");
    // Different keys, as a device may return.
    let key = old + 0x10_0000;
    state.regions.insert(key, (addr, length, access as u32));
    // SAFETY: as above.
    unsafe { ((*mr).lkey, (*mr).rkey) = (key, key | 0x8000_0000) };
    0
}

pub(super) unsafe extern "C" fn reg_dmabuf_mr(
    pd: *mut ibv_pd,
    offset: u64,
    length: usize,
    _: u64,
    fd: c_int,
    access: c_int,
) -> *mut ibv_mr {
    // SAFETY: a live domain.
    let stub = unsafe { stub_of((*pd).context) };
    if let Some(errno) = stub.failing(Verb::RegDmaBuf) {
        set_errno(errno);
        return core::ptr::null_mut();
    }
    // SAFETY: fcntl(2) of a number.
    if unsafe { libc::fcntl(fd, libc::F_GETFD) } == -1 {
        return core::ptr::null_mut();
    }
    // SAFETY: as above.
    let mr = unsafe { provider::reg_mr(pd, (&raw const NOWHERE).cast_mut().cast(), length, access) };
    // SAFETY: just made.
    let key = unsafe { (*mr).lkey };
    stub.state().regions.insert(key, (offset, length as u64, access as u32));
    mr
}

pub(super) unsafe extern "C" fn alloc_dm(context: *mut ibv_context, attr: *mut ibv_alloc_dm_attr) -> *mut ibv_dm {
    // SAFETY: the caller's.
    let (stub, length) = unsafe { (stub_of(context), (*attr).length) };
    if length as u64 > DEVICE_MEMORY {
        set_errno(libc::ENOMEM);
        return core::ptr::null_mut();
    }
    stub.count("dm", 1);
    Box::into_raw(Box::new(Dm {
        raw: ibv_dm {
            context,
            memcpy_to_dm: Some(memcpy_to_dm),
            memcpy_from_dm: Some(memcpy_from_dm),
            comp_mask: 0,
            handle: 0,
        },
        bytes: UnsafeCell::new(vec![0; length].into_boxed_slice()),
    }))
    .cast()
}

pub(super) unsafe extern "C" fn free_dm(dm: *mut ibv_dm) -> c_int {
    // SAFETY: made by alloc_dm.
    let stub = unsafe { stub_of((*dm).context) };
    assert_eq!(stub.live("dm mr"), 0, "device memory freed while registered");
    stub.count("dm", -1);
    // SAFETY: as above.
    drop(unsafe { Box::from_raw(dm.cast::<Dm>()) });
    0
}

pub(super) unsafe extern "C" fn reg_dm_mr(
    pd: *mut ibv_pd,
    _: *mut ibv_dm,
    offset: u64,
    length: usize,
    access: c_uint,
) -> *mut ibv_mr {
    // SAFETY: a live domain.
    let mr = unsafe { provider::reg_mr(pd, (&raw const NOWHERE).cast_mut().cast(), length, access.cast_signed()) };
    // SAFETY: as above; just made.
    let (stub, key) = unsafe { (stub_of((*pd).context), (*mr).lkey) };
    stub.state().regions.insert(key, (offset, length as u64, access));
    mr
}

unsafe extern "C" fn memcpy_to_dm(dm: *mut ibv_dm, offset: u64, from: *const c_void, length: usize) -> c_int {
    // SAFETY: the caller's, who has checked the range.
    unsafe {
        let at = (*(*dm.cast::<Dm>()).bytes.get()).as_mut_ptr().add(offset as usize);
        at.copy_from(from.cast(), length);
    }
    0
}

unsafe extern "C" fn memcpy_from_dm(into: *mut c_void, dm: *mut ibv_dm, offset: u64, length: usize) -> c_int {
    // SAFETY: the caller's, who has checked the range.
    unsafe {
        let at = (*(*dm.cast::<Dm>()).bytes.get()).as_ptr().add(offset as usize);
        into.cast::<u8>().copy_from(at, length);
    }
    0
}

pub(super) unsafe extern "C" fn query_device_ex(
    context: *mut ibv_context,
    _: *const ibv_query_device_ex_input,
    attr: *mut ibv_device_attr_ex,
    size: usize,
) -> c_int {
    assert_eq!(size, size_of::<ibv_device_attr_ex>());
    // SAFETY: the caller's.
    unsafe {
        provider::query_device(context, &raw mut (*attr).orig_attr);
        (*attr).odp_caps.general_caps = IBV_ODP_SUPPORT.into();
        (*attr).max_dm_size = DEVICE_MEMORY;
        (*attr).hca_core_clock = super::extended_cq::CLOCK_KHZ;
        (*attr).completion_timestamp_mask = u64::MAX;
    }
    0
}

pub(super) unsafe extern "C" fn advise_mr(
    pd: *mut ibv_pd,
    advice: ib_uverbs_advise_mr_advice,
    _: u32,
    _: *mut ibv_sge,
    num: u32,
) -> c_int {
    assert_eq!(num, 1);
    let what = if advice == 0 { "prefetch" } else { "prefetch_write" };
    // SAFETY: a live domain.
    unsafe { stub_of((*pd).context) }.state().log.push(what);
    0
}
