//! Protection domains and memory regions.

use core::ffi::{c_int, c_uint, c_void};

use doorbell_softroce::{LimitError, Mr, Pd, RegisterError, Rights};
use doorbell_verbs_sys::{
    IBV_ACCESS_HUGETLB, IBV_ACCESS_LOCAL_WRITE, IBV_ACCESS_MW_BIND, IBV_ACCESS_OPTIONAL_FIRST,
    IBV_ACCESS_REMOTE_ATOMIC, IBV_ACCESS_REMOTE_READ, IBV_ACCESS_REMOTE_WRITE, ibv_context, ibv_mr, ibv_pd,
};

use crate::context::{Context, next_handle};
use crate::errno;

/// A protection domain: what C sees, and what it stands for.
#[repr(C)]
pub(crate) struct SoftPd {
    base: ibv_pd,
    pub(crate) pd: Pd,
}

/// A memory region: what C sees, and what it stands for.
#[repr(C)]
struct SoftMr {
    base: ibv_mr,
    mr: Mr,
}

/// The access flags above this bit may be ignored by who does not know them (ibv_reg_mr(3)): bits 20 to 29.
const OPTIONAL: u32 = 0x3ff * IBV_ACCESS_OPTIONAL_FIRST;

/// What an object's creation says when the device has no room.
pub(crate) fn errno_of_limit(error: LimitError) -> c_int {
    match error {
        LimitError::Size => libc::EINVAL,
        LimitError::Exhausted => libc::ENOMEM,
    }
}

/// ibv_alloc_pd(3).
pub(crate) unsafe extern "C" fn alloc_pd(context: *mut ibv_context) -> *mut ibv_pd {
    // SAFETY: `context` is live by contract.
    let device = &unsafe { Context::from_ptr(context) }.device;
    match device.protection_domain() {
        Ok(pd) => Box::into_raw(Box::new(SoftPd {
            base: ibv_pd {
                context,
                handle: next_handle(),
            },
            pd,
        }))
        .cast(),
        Err(error) => errno::null(errno_of_limit(error)),
    }
}

/// ibv_alloc_pd(3): `EBUSY` while regions, windows or queue pairs are in it.
pub(crate) unsafe extern "C" fn dealloc_pd(pd: *mut ibv_pd) -> c_int {
    let soft = pd.cast::<SoftPd>();
    // SAFETY: `pd` is live and ours by contract.
    if unsafe { &*soft }.pd.is_shared() {
        return libc::EBUSY;
    }
    // SAFETY: it came from a Box in `alloc_pd`, and is given up by the caller.
    drop(unsafe { Box::from_raw(soft) });
    0
}

/// ibv_reg_mr(3).
pub(crate) unsafe extern "C" fn reg_mr(
    pd: *mut ibv_pd,
    addr: *mut c_void,
    length: usize,
    access: c_int,
) -> *mut ibv_mr {
    // SAFETY: the same contract.
    unsafe { register(pd, addr, length, addr.addr() as u64, access as u32) }
}

/// ibv_reg_mr_iova(3).
pub(crate) unsafe extern "C" fn reg_mr_iova(
    pd: *mut ibv_pd,
    addr: *mut c_void,
    length: usize,
    iova: u64,
    access: c_int,
) -> *mut ibv_mr {
    // SAFETY: the same contract.
    unsafe { register(pd, addr, length, iova, access as u32) }
}

/// What the macro `ibv_reg_mr` calls when the flags are not known when compiling.
pub(crate) unsafe extern "C" fn reg_mr_iova2(
    pd: *mut ibv_pd,
    addr: *mut c_void,
    length: usize,
    iova: u64,
    access: c_uint,
) -> *mut ibv_mr {
    // SAFETY: the same contract.
    unsafe { register(pd, addr, length, iova, access) }
}

/// Registers memory.
///
/// # Safety
/// `pd` is live and ours; the memory stays mapped until the region is deregistered (ibv_reg_mr(3)).
unsafe fn register(pd: *mut ibv_pd, addr: *mut c_void, length: usize, iova: u64, access: u32) -> *mut ibv_mr {
    const KNOWN: u32 = IBV_ACCESS_LOCAL_WRITE
        | IBV_ACCESS_REMOTE_WRITE
        | IBV_ACCESS_REMOTE_READ
        | IBV_ACCESS_REMOTE_ATOMIC
        | IBV_ACCESS_MW_BIND
        | IBV_ACCESS_HUGETLB;
    if access & !(KNOWN | OPTIONAL) != 0 {
        // Zero-based addresses, on-demand paging.
        return errno::null(libc::EOPNOTSUPP);
    }
    let rights = Rights {
        local_write: access & IBV_ACCESS_LOCAL_WRITE != 0,
        remote_write: access & IBV_ACCESS_REMOTE_WRITE != 0,
        remote_read: access & IBV_ACCESS_REMOTE_READ != 0,
        remote_atomic: access & IBV_ACCESS_REMOTE_ATOMIC != 0,
        bind: access & IBV_ACCESS_MW_BIND != 0,
    };
    // SAFETY: live by contract.
    let soft = unsafe { &*pd.cast::<SoftPd>() };
    // SAFETY: the memory stays mapped until it is deregistered by contract; how the program uses it meanwhile is its concern, as with any RDMA device.
    let registered = unsafe { soft.pd.register(addr.cast(), length, iova, rights) };
    match registered {
        Ok(mr) => Box::into_raw(Box::new(SoftMr {
            base: ibv_mr {
                context: soft.base.context,
                pd,
                addr,
                length,
                handle: next_handle(),
                lkey: mr.lkey().0,
                rkey: mr.rkey().0,
            },
            mr,
        }))
        .cast(),
        Err(error) => {
            tracing::debug!("ibv_reg_mr: {error}");
            errno::null(match error {
                RegisterError::Range | RegisterError::Rights => libc::EINVAL,
                RegisterError::Fault => libc::EFAULT,
                RegisterError::OutOfMemory | RegisterError::Exhausted => libc::ENOMEM,
            })
        }
    }
}

/// ibv_reg_mr(3): `EBUSY` while windows are bound to it. When it returns 0, no copy to or from the memory is in flight.
pub(crate) unsafe extern "C" fn dereg_mr(mr: *mut ibv_mr) -> c_int {
    // SAFETY: `mr` is live and ours by contract; the handle is written at creation and destruction only.
    if unsafe { &(*mr.cast::<SoftMr>()).mr }.deregister().is_err() {
        return libc::EBUSY;
    }
    // SAFETY: it came from a Box in `register`, and is given up by the caller.
    drop(unsafe { Box::from_raw(mr.cast::<SoftMr>()) });
    0
}
