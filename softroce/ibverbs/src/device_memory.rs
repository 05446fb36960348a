//! Device memory: ibv_alloc_dm(3).

use core::ffi::{c_int, c_void};
use std::slice;
use std::sync::Arc;

use doorbell_softroce::{Dm, OutOfRange};
use doorbell_verbs_sys::{IBV_DM_MASK_HANDLE, ibv_alloc_dm_attr, ibv_context, ibv_dm};

use crate::context::Context;
use crate::device_file::Object;
use crate::errno;
use crate::protection::errno_of_limit;

#[repr(C)]
struct SoftDm {
    base: ibv_dm,
    dm: Arc<Object<Dm>>,
}

/// # Safety
/// `dm` came from [`alloc_dm`] and was not freed; the reference is not used after it is.
pub(crate) unsafe fn handle<'a>(dm: *mut ibv_dm) -> &'a Dm {
    // SAFETY: ours by contract, `base` being its first member.
    unsafe { &(*dm.cast::<SoftDm>()).dm }
}

pub(crate) unsafe extern "C" fn alloc_dm(context: *mut ibv_context, attr: *mut ibv_alloc_dm_attr) -> *mut ibv_dm {
    // SAFETY: both are live by contract.
    let (opened, attr) = unsafe { (Context::from_ptr(context), &*attr) };
    if attr.comp_mask != 0 {
        return errno::null(libc::EINVAL);
    }
    match opened.device.device_memory(attr.length, attr.log_align_req) {
        Ok(dm) => boxed(context, Object::new(opened, dm)),
        Err(error) => errno::null(errno_of_limit(error)),
    }
}

fn boxed(context: *mut ibv_context, dm: Arc<Object<Dm>>) -> *mut ibv_dm {
    let base = ibv_dm {
        context,
        memcpy_to_dm: Some(memcpy_to_dm),
        memcpy_from_dm: Some(memcpy_from_dm),
        comp_mask: IBV_DM_MASK_HANDLE,
        handle: dm.handle,
    };
    Box::into_raw(Box::new(SoftDm { base, dm })).cast()
}

/// ibv_import_dm(3): `ENOENT` for the handle of anything but device memory.
///
/// # Safety
/// `context` is live and ours.
pub unsafe extern "C" fn import_dm(context: *mut ibv_context, handle: u32) -> *mut ibv_dm {
    // SAFETY: the same contract.
    match unsafe { Context::from_ptr(context) }.file.object(handle) {
        Some(dm) => boxed(context, dm),
        None => errno::null(libc::ENOENT),
    }
}

/// # Safety
/// `dm` came from [`import_dm`], and is not used again.
pub unsafe extern "C" fn unimport_dm(dm: *mut ibv_dm) {
    // SAFETY: it came from a Box in `boxed`, and the caller gives up ownership.
    drop(unsafe { Box::from_raw(dm.cast::<SoftDm>()) });
}

/// `EBUSY` while a region is registered on it.
pub(crate) unsafe extern "C" fn free_dm(dm: *mut ibv_dm) -> c_int {
    // SAFETY: live and ours by contract.
    let found = unsafe { &(*dm.cast::<SoftDm>()).dm };
    if found.is_shared() {
        return libc::EBUSY;
    }
    found.destroy();
    // SAFETY: it came from a Box in `boxed`, and the caller gives up ownership.
    drop(unsafe { Box::from_raw(dm.cast::<SoftDm>()) });
    0
}

/// Adapters copy words of this many bytes.
const WORD: u64 = 4;

/// `EINVAL` for what is not whole words, `EFAULT` beyond the end: as with an adapter.
fn copy(offset: u64, length: usize, run: impl FnOnce() -> Result<(), OutOfRange>) -> c_int {
    if !offset.is_multiple_of(WORD) || !(length as u64).is_multiple_of(WORD) {
        return libc::EINVAL;
    }
    match run() {
        Ok(()) => 0,
        Err(OutOfRange) => libc::EFAULT,
    }
}

/// See [`copy`].
unsafe extern "C" fn memcpy_to_dm(dm: *mut ibv_dm, offset: u64, host_addr: *const c_void, length: usize) -> c_int {
    if length == 0 {
        return 0;
    }
    // SAFETY: readable by contract, and not modified during the call; `dm` is live and ours.
    let (dm, bytes) = unsafe { (handle(dm), slice::from_raw_parts(host_addr.cast(), length)) };
    copy(offset, length, || dm.write(offset, bytes))
}

/// See [`copy`].
unsafe extern "C" fn memcpy_from_dm(host_addr: *mut c_void, dm: *mut ibv_dm, offset: u64, length: usize) -> c_int {
    if length == 0 {
        return 0;
    }
    // SAFETY: writable by contract, and not used otherwise during the call; `dm` is live and ours.
    // Any byte is initialised memory of u8.
    let (dm, bytes) = unsafe { (handle(dm), slice::from_raw_parts_mut(host_addr.cast(), length)) };
    copy(offset, length, || dm.read(offset, bytes))
}
