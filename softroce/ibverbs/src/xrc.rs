//! XRC domains: ibv_open_xrcd(3). Those of a file are one for all that open it in this process.

use core::ffi::c_int;
use std::sync::{Arc, Weak};

use doorbell_softroce::Xrcd;
use doorbell_verbs_sys::{
    IBV_XRCD_INIT_ATTR_FD, IBV_XRCD_INIT_ATTR_OFLAGS, ibv_context, ibv_srq, ibv_xrcd, ibv_xrcd_init_attr,
};
use parking_lot::Mutex;

use crate::context::Context;
use crate::device_file::{Inode, inode_of};
use crate::errno;
use crate::shared_receive::SoftSrq;

#[repr(C)]
struct SoftXrcd {
    base: ibv_xrcd,
    domain: Arc<Domain>,
}

struct Domain {
    xrcd: Xrcd,
    inode: Option<Inode>,
}

/// Those of files.
static DOMAINS: Mutex<Vec<Weak<Domain>>> = Mutex::new(Vec::new());

/// # Safety
/// `xrcd` came from [`open_xrcd`] and was not closed; the reference is not used after it is.
pub(crate) unsafe fn handle<'a>(xrcd: *mut ibv_xrcd) -> &'a Xrcd {
    // SAFETY: ours by contract, `base` being its first member.
    let domain = unsafe { &(*xrcd.cast::<SoftXrcd>()).domain };
    &domain.xrcd
}

/// As the kernel: `EAGAIN` for a file without a domain, unless O_CREAT is given, `EINVAL` for one
/// that has one if O_EXCL is. A domain without a file, of descriptor −1, is its opener's own.
pub(crate) unsafe extern "C" fn open_xrcd(context: *mut ibv_context, init: *mut ibv_xrcd_init_attr) -> *mut ibv_xrcd {
    // SAFETY: both are live by contract.
    let (opened, init) = unsafe { (Context::from_ptr(context), &*init) };
    if init.comp_mask != IBV_XRCD_INIT_ATTR_FD | IBV_XRCD_INIT_ATTR_OFLAGS {
        return errno::null(libc::EINVAL);
    }
    let inode = match (init.fd, inode_of(init.fd)) {
        (-1, _) => None,
        (_, None) => return errno::null(libc::EBADF),
        (_, found) => found,
    };
    let mut domains = DOMAINS.lock();
    domains.retain(|domain| domain.strong_count() > 0);
    let is_same = |domain: &Arc<Domain>| {
        inode.is_some() && domain.inode == inode && Arc::ptr_eq(domain.xrcd.device(), &opened.device)
    };
    let found = domains.iter().filter_map(Weak::upgrade).find(is_same);
    let domain = match found {
        Some(_) if init.oflags & libc::O_EXCL != 0 => return errno::null(libc::EINVAL),
        Some(found) => found,
        None if inode.is_some() && init.oflags & libc::O_CREAT == 0 => return errno::null(libc::EAGAIN),
        None => {
            let xrcd = opened.device.xrc_domain();
            let new = Arc::new(Domain { xrcd, inode });
            domains.push(Arc::downgrade(&new));
            new
        }
    };
    let base = ibv_xrcd { context };
    Box::into_raw(Box::new(SoftXrcd { base, domain })).cast()
}

/// `EBUSY` if it is the last of its domain, while queues use that.
pub(crate) unsafe extern "C" fn close_xrcd(xrcd: *mut ibv_xrcd) -> c_int {
    // SAFETY: live and ours by contract.
    let domain = unsafe { &(*xrcd.cast::<SoftXrcd>()).domain };
    // No other can be opened meanwhile.
    let _domains = DOMAINS.lock();
    if Arc::strong_count(domain) == 1 && domain.xrcd.is_shared() {
        return libc::EBUSY;
    }
    // SAFETY: it came from a Box in `open_xrcd`, and the caller gives up ownership.
    drop(unsafe { Box::from_raw(xrcd.cast::<SoftXrcd>()) });
    0
}

/// `EINVAL` for a queue that is not of an XRC domain.
pub(crate) unsafe extern "C" fn get_srq_num(srq: *mut ibv_srq, number: *mut u32) -> c_int {
    // SAFETY: live and ours by contract.
    let Some(found) = unsafe { SoftSrq::handle(srq) }.xrc_number() else {
        return libc::EINVAL;
    };
    // SAFETY: writable by contract (man page).
    unsafe { number.write(found) };
    0
}
