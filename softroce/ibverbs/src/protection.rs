//! Memory regions.

use core::ffi::{c_int, c_uint, c_void};
use std::os::fd::BorrowedFd;
use std::sync::Arc;
use std::{ptr, slice};

use doorbell_softroce::{HostRange, LimitError, Mr, RegisterError, Reregister, Rights};
use doorbell_verbs_sys::{
    IB_UVERBS_ADVISE_MR_ADVICE_PREFETCH, IB_UVERBS_ADVISE_MR_ADVICE_PREFETCH_NO_FAULT,
    IB_UVERBS_ADVISE_MR_ADVICE_PREFETCH_WRITE, IBV_ACCESS_HUGETLB, IBV_ACCESS_LOCAL_WRITE, IBV_ACCESS_MW_BIND,
    IBV_ACCESS_ON_DEMAND, IBV_ACCESS_OPTIONAL_FIRST, IBV_ACCESS_REMOTE_ATOMIC, IBV_ACCESS_REMOTE_READ,
    IBV_ACCESS_REMOTE_WRITE, IBV_ACCESS_ZERO_BASED, IBV_REREG_MR_CHANGE_ACCESS, IBV_REREG_MR_CHANGE_PD,
    IBV_REREG_MR_CHANGE_TRANSLATION, IBV_REREG_MR_ERR_INPUT, IBV_REREG_MR_FLAGS_SUPPORTED, ib_uverbs_advise_mr_advice,
    ibv_dm, ibv_mr, ibv_pd, ibv_sge,
};
use parking_lot::Mutex;

use crate::context::Context;
use crate::device_file::Object;
use crate::domain::SoftPd;
use crate::placement::{IBV_ACCESS_FLUSH_GLOBAL, IBV_ACCESS_FLUSH_PERSISTENT};
use crate::post::to_sge;
use crate::{device_memory, errno};

#[repr(C)]
struct SoftMr {
    base: ibv_mr,
    shared: Arc<Object<Mutex<Registered>>>,
}

/// What an imported region shares with the original.
struct Registered {
    mr: Mr,
    length: usize,
    zero_based: bool,
}

/// Optional access flags, which may be ignored if unknown (ibv_reg_mr(3)): bits 20 to 29.
const OPTIONAL: u32 = 0x3ff * IBV_ACCESS_OPTIONAL_FIRST;

pub(crate) fn errno_of_limit(error: LimitError) -> c_int {
    match error {
        LimitError::Size => libc::EINVAL,
        LimitError::Exhausted => libc::ENOMEM,
    }
}

pub(crate) unsafe extern "C" fn reg_mr(
    pd: *mut ibv_pd,
    addr: *mut c_void,
    length: usize,
    access: c_int,
) -> *mut ibv_mr {
    // SAFETY: the same contract.
    unsafe { register(pd, addr, length, addr.addr() as u64, access as u32) }
}

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

/// Called by the macro `ibv_reg_mr` when the flags are not a compile-time constant.
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

struct Access {
    rights: Rights,
    zero_based: bool,
}

impl Access {
    /// # Errors
    /// The errno value for unknown flags. Huge pages and relaxed ordering are hints, and ignored.
    fn of(flags: u32) -> Result<Self, c_int> {
        const KNOWN: u32 = IBV_ACCESS_LOCAL_WRITE
            | IBV_ACCESS_REMOTE_WRITE
            | IBV_ACCESS_REMOTE_READ
            | IBV_ACCESS_REMOTE_ATOMIC
            | IBV_ACCESS_MW_BIND
            | IBV_ACCESS_ZERO_BASED
            | IBV_ACCESS_ON_DEMAND
            | IBV_ACCESS_HUGETLB
            | IBV_ACCESS_FLUSH_GLOBAL;
        // As rxe, for memory that is not persistent.
        if flags & IBV_ACCESS_FLUSH_PERSISTENT != 0 {
            return Err(libc::EINVAL);
        }
        if flags & !(KNOWN | OPTIONAL) != 0 {
            return Err(libc::EOPNOTSUPP);
        }
        Ok(Self {
            rights: Rights {
                local_write: flags & IBV_ACCESS_LOCAL_WRITE != 0,
                remote_write: flags & IBV_ACCESS_REMOTE_WRITE != 0,
                remote_read: flags & IBV_ACCESS_REMOTE_READ != 0,
                remote_atomic: flags & IBV_ACCESS_REMOTE_ATOMIC != 0,
                flush_global: flags & IBV_ACCESS_FLUSH_GLOBAL != 0,
                bind: flags & IBV_ACCESS_MW_BIND != 0,
                on_demand: flags & IBV_ACCESS_ON_DEMAND != 0,
            },
            zero_based: flags & IBV_ACCESS_ZERO_BASED != 0,
        })
    }
}

fn errno_of_register_error(error: RegisterError) -> c_int {
    tracing::debug!("memory region: {error}");
    match error {
        RegisterError::Range | RegisterError::Rights | RegisterError::Memfd => libc::EINVAL,
        RegisterError::Fault => libc::EFAULT,
        RegisterError::NoDevice => libc::EOPNOTSUPP,
        RegisterError::Bound => libc::EBUSY,
        RegisterError::OutOfMemory | RegisterError::Exhausted => libc::ENOMEM,
    }
}

/// # Safety
/// `pd` is live and ours.
unsafe fn export_mr(
    pd: *mut ibv_pd,
    addr: *mut c_void,
    length: usize,
    zero_based: bool,
    registered: Result<Mr, RegisterError>,
) -> *mut ibv_mr {
    let registered = registered.map(|mr| Registered { mr, length, zero_based });
    match registered {
        Ok(registered) => {
            // SAFETY: a live PD, by contract, has a live context.
            let context = unsafe { Context::from_ptr((*pd).context) };
            // SAFETY: the same contract.
            unsafe { boxed(pd, addr, Object::new(context, Mutex::new(registered))) }
        }
        Err(error) => errno::null(errno_of_register_error(error)),
    }
}

/// # Safety
/// `pd` is live and ours.
unsafe fn boxed(pd: *mut ibv_pd, addr: *mut c_void, shared: Arc<Object<Mutex<Registered>>>) -> *mut ibv_mr {
    let registered = shared.lock();
    let base = ibv_mr {
        // SAFETY: live by contract.
        context: unsafe { (*pd).context },
        pd,
        addr,
        length: registered.length,
        handle: shared.handle,
        lkey: registered.mr.lkey().0,
        rkey: registered.mr.rkey().0,
    };
    drop(registered);
    Box::into_raw(Box::new(SoftMr { base, shared })).cast()
}

/// ibv_import_mr(3): the address is unknown, thus null. `ENOENT` for any other handle.
///
/// # Safety
/// `pd` is live and ours.
pub unsafe extern "C" fn import_mr(pd: *mut ibv_pd, handle: u32) -> *mut ibv_mr {
    // SAFETY: a live PD has a live context.
    let file = &unsafe { Context::from_ptr((*pd).context) }.file;
    match file.object(handle) {
        // SAFETY: the same contract.
        Some(shared) => unsafe { boxed(pd, ptr::null_mut(), shared) },
        None => errno::null(libc::ENOENT),
    }
}

/// # Safety
/// `mr` came from [`import_mr`], and is not used again.
pub unsafe extern "C" fn unimport_mr(mr: *mut ibv_mr) {
    // SAFETY: it came from a Box in `boxed`, and the caller gives up ownership.
    drop(unsafe { Box::from_raw(mr.cast::<SoftMr>()) });
}

/// # Safety
/// `pd` is live and ours; the memory stays mapped until the region is deregistered (ibv_reg_mr(3)).
unsafe fn register(pd: *mut ibv_pd, addr: *mut c_void, len: usize, iova: u64, access: u32) -> *mut ibv_mr {
    let access = match Access::of(access) {
        Ok(access) => access,
        Err(value) => return errno::null(value),
    };
    let range = HostRange {
        addr: addr.cast(),
        len,
        iova: if access.zero_based { 0 } else { iova },
    };
    // SAFETY: live by contract.
    let soft = unsafe { &*pd.cast::<SoftPd>() };
    // SAFETY: the memory stays mapped until it is deregistered by contract; concurrent use by the
    // program is its responsibility, as with any RDMA device.
    let registered = unsafe { soft.pd.register(range, access.rights) };
    // SAFETY: the same contract.
    unsafe { export_mr(pd, addr, len, access.zero_based, registered) }
}

/// For a memfd that the program has sealed and mapped at `iova`, to share it with the peers of this
/// host; or for GPU memory: a process cannot copy from the dma-buf itself, but by convention of all
/// callers `iova` is the memory's address, which CUDA confirms. Otherwise `EOPNOTSUPP`.
pub(crate) unsafe extern "C" fn reg_dmabuf_mr(
    pd: *mut ibv_pd,
    offset: u64,
    length: usize,
    iova: u64,
    fd: c_int,
    access: c_int,
) -> *mut ibv_mr {
    let link = std::fs::read_link(format!("/proc/self/fd/{fd}")).ok();
    let link = link.as_ref().map(|link| link.to_string_lossy());
    let is_memfd = link.as_ref().is_some_and(|link| link.starts_with("/memfd:"));
    // Before the descriptor: programs probe for dma-bufs with an invalid one.
    if !is_memfd && !doorbell_softroce::supports_gpu_memory() {
        return errno::null(libc::EOPNOTSUPP);
    }
    let Some(link) = link else {
        return errno::null(libc::EBADF);
    };
    let access = match Access::of(access as u32) {
        Ok(access) => access,
        Err(value) => return errno::null(value),
    };
    if !(is_memfd && offset == 0 || link.contains("dmabuf")) || access.zero_based {
        tracing::debug!(
            "descriptor {fd} is {link}: only memfds and dma-bufs of GPUs' memory, with its address as iova, can be registered"
        );
        return errno::null(libc::EOPNOTSUPP);
    }
    let range = HostRange {
        addr: ptr::with_exposed_provenance_mut(iova as usize),
        len: length,
        iova,
    };
    // SAFETY: live by contract.
    let soft = unsafe { &*pd.cast::<SoftPd>() };
    // SAFETY: the memory stays allocated until it is deregistered, and a memfd is open and mapped
    // there, by contract.
    let registered = unsafe {
        if is_memfd {
            soft.pd.register_memfd(BorrowedFd::borrow_raw(fd), range, access.rights)
        } else {
            soft.pd.register_device(range, access.rights)
        }
    };
    // SAFETY: the same contract. The address of such a region is its offset in the dma-buf.
    unsafe {
        export_mr(
            pd,
            ptr::without_provenance_mut(offset as usize),
            length,
            false,
            registered,
        )
    }
}

/// Always zero-based, which the flags must say (ibv_alloc_dm(3)).
pub(crate) unsafe extern "C" fn reg_dm_mr(
    pd: *mut ibv_pd,
    dm: *mut ibv_dm,
    offset: u64,
    length: usize,
    access: c_uint,
) -> *mut ibv_mr {
    let access = match Access::of(access) {
        Ok(access) if access.zero_based => access,
        Ok(_) => return errno::null(libc::EINVAL),
        Err(value) => return errno::null(value),
    };
    // SAFETY: both are live and ours by contract.
    let (soft, dm) = unsafe { (&*pd.cast::<SoftPd>(), device_memory::handle(dm)) };
    let registered = soft.pd.register_device_memory(dm, offset, length, access.rights);
    // SAFETY: the same contract.
    unsafe { export_mr(pd, ptr::null_mut(), length, true, registered) }
}

pub(crate) unsafe extern "C" fn alloc_null_mr(pd: *mut ibv_pd) -> *mut ibv_mr {
    // SAFETY: live and ours by contract.
    let registered = unsafe { &*pd.cast::<SoftPd>() }.pd.null_region();
    // SAFETY: the same contract.
    unsafe { export_mr(pd, ptr::null_mut(), usize::MAX, false, registered) }
}

/// The region keeps its keys, and changes atomically with respect to packets. On failure it is
/// unchanged, with the reason in `errno`, such as `EBUSY` while windows are bound to it.
pub(crate) unsafe extern "C" fn rereg_mr(
    mr: *mut ibv_mr,
    flags: c_int,
    pd: *mut ibv_pd,
    addr: *mut c_void,
    length: usize,
    access: c_int,
) -> c_int {
    let refuse = |value| {
        errno::set(value);
        IBV_REREG_MR_ERR_INPUT
    };
    let flags = flags as u32;
    let given = |bit| flags & bit != 0;
    if flags == 0 || flags & !IBV_REREG_MR_FLAGS_SUPPORTED != 0 || access != 0 && !given(IBV_REREG_MR_CHANGE_ACCESS) {
        return refuse(libc::EINVAL);
    }
    let access = match given(IBV_REREG_MR_CHANGE_ACCESS)
        .then(|| Access::of(access as u32))
        .transpose()
    {
        Ok(access) => access,
        Err(value) => return refuse(value),
    };
    // SAFETY: live and ours by contract, and not used by other threads during the call.
    let soft = unsafe { &mut *mr.cast::<SoftMr>() };
    let mut registered = soft.shared.lock();
    let zero_based = access
        .as_ref()
        .map_or(registered.zero_based, |access| access.zero_based);
    // Zero-based addressing is part of the translation.
    if zero_based && !registered.zero_based && !given(IBV_REREG_MR_CHANGE_TRANSLATION) {
        return refuse(libc::EINVAL);
    }
    // SAFETY: live by contract, if it is to change.
    if given(IBV_REREG_MR_CHANGE_PD) && unsafe { (*pd).context } != soft.base.context {
        return refuse(libc::EINVAL);
    }
    // SAFETY: as above.
    let new_pd = given(IBV_REREG_MR_CHANGE_PD).then(|| unsafe { &*pd.cast::<SoftPd>() });
    let change = Reregister {
        range: given(IBV_REREG_MR_CHANGE_TRANSLATION).then(|| HostRange {
            addr: addr.cast(),
            len: length,
            iova: if zero_based { 0 } else { addr.addr() as u64 },
        }),
        pd: new_pd.map(|soft| &*soft.pd),
        rights: access.map(|access| access.rights),
    };
    // SAFETY: the new memory stays mapped as for `register`.
    if let Err(error) = unsafe { registered.mr.reregister(&change) } {
        return refuse(errno_of_register_error(error));
    }
    if new_pd.is_some() {
        soft.base.pd = pd;
    }
    if change.range.is_some() {
        (soft.base.addr, soft.base.length) = (addr, length);
        (registered.length, registered.zero_based) = (length, zero_based);
    }
    0
}

/// Prefetching populates pages: those of a region on demand need not be present. Without faults
/// nothing is populated. On return it is complete, whether flags want that or not.
pub(crate) unsafe extern "C" fn advise_mr(
    pd: *mut ibv_pd,
    advice: ib_uverbs_advise_mr_advice,
    flags: u32,
    sg_list: *mut ibv_sge,
    num_sges: u32,
) -> c_int {
    /// `IBV_ADVISE_MR_FLAG_FLUSH`.
    const FLUSH: u32 = 1;
    let write = match advice {
        IB_UVERBS_ADVISE_MR_ADVICE_PREFETCH | IB_UVERBS_ADVISE_MR_ADVICE_PREFETCH_NO_FAULT => false,
        IB_UVERBS_ADVISE_MR_ADVICE_PREFETCH_WRITE => true,
        _ => return libc::EOPNOTSUPP,
    };
    if flags & !FLUSH != 0 || num_sges == 0 {
        return libc::EINVAL;
    }
    // SAFETY: live and ours by contract.
    let pd = unsafe { &(*pd.cast::<SoftPd>()).pd };
    // SAFETY: that many elements by contract.
    for element in unsafe { slice::from_raw_parts(sg_list, num_sges as usize) } {
        let element = to_sge(element);
        if !pd.allows(&element, false) {
            return libc::EFAULT;
        }
        if write && !pd.allows(&element, true) {
            return libc::EPERM;
        }
        if advice != IB_UVERBS_ADVISE_MR_ADVICE_PREFETCH_NO_FAULT && !pd.populate(&element, write) {
            return libc::EFAULT;
        }
    }
    0
}

/// `EBUSY` while windows are bound to it. On return no copy to or from the memory is in flight.
pub(crate) unsafe extern "C" fn dereg_mr(mr: *mut ibv_mr) -> c_int {
    // SAFETY: `mr` is live and ours; the member is written at creation and destruction only.
    let shared = unsafe { &(*mr.cast::<SoftMr>()).shared };
    if shared.lock().mr.deregister().is_err() {
        return libc::EBUSY;
    }
    shared.destroy();
    // SAFETY: it came from a Box in `boxed`, and the caller gives up ownership.
    drop(unsafe { Box::from_raw(mr.cast::<SoftMr>()) });
    0
}
