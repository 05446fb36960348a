//! Protection domains, parent domains and thread domains.

use core::ffi::c_int;
use std::ops::Deref;
use std::sync::Arc;

use doorbell_softroce::Pd;
use doorbell_verbs_sys::{
    IBV_PARENT_DOMAIN_INIT_ATTR_ALLOCATORS, IBV_PARENT_DOMAIN_INIT_ATTR_PD_CONTEXT, ibv_context,
    ibv_parent_domain_init_attr, ibv_pd, ibv_td, ibv_td_init_attr,
};

use crate::context::Context;
use crate::device_file::Object;
use crate::errno;
use crate::protection::errno_of_limit;

#[repr(C)]
pub(crate) struct SoftPd {
    base: ibv_pd,
    pub(crate) pd: PdRef,
}

impl SoftPd {
    /// The domain, if it is a parent domain.
    ///
    /// # Safety
    /// `pd` is null, or live and ours for as long as the reference is used.
    pub(crate) unsafe fn parent<'a>(pd: *mut ibv_pd) -> Option<&'a Pd> {
        // SAFETY: the same contract, `base` being its first member.
        match unsafe { pd.cast::<Self>().as_ref() }?.pd {
            PdRef::Parent { ref pd, .. } => Some(pd),
            PdRef::Own(_) => None,
        }
    }
}

/// The domain of one C struct.
pub(crate) enum PdRef {
    Own(Arc<Object<Pd>>),
    /// A parent domain, and the thread domain that it keeps.
    Parent {
        pd: Pd,
        _td: Option<Arc<()>>,
    },
}

impl Deref for PdRef {
    type Target = Pd;

    fn deref(&self) -> &Pd {
        match self {
            Self::Own(pd) => pd,
            Self::Parent { pd, .. } => pd,
        }
    }
}

fn boxed(context: *mut ibv_context, handle: u32, pd: PdRef) -> *mut ibv_pd {
    let base = ibv_pd { context, handle };
    Box::into_raw(Box::new(SoftPd { base, pd })).cast()
}

pub(crate) unsafe extern "C" fn alloc_pd(context: *mut ibv_context) -> *mut ibv_pd {
    // SAFETY: `context` is live by contract.
    let opened = unsafe { Context::from_ptr(context) };
    match opened.device.protection_domain() {
        Ok(pd) => {
            let pd = Object::new(opened, pd);
            boxed(context, pd.handle, PdRef::Own(pd))
        }
        Err(error) => errno::null(errno_of_limit(error)),
    }
}

/// ibv_import_pd(3): `ENOENT` for the handle of anything but a protection domain.
///
/// # Safety
/// `context` is live and ours.
pub unsafe extern "C" fn import_pd(context: *mut ibv_context, handle: u32) -> *mut ibv_pd {
    // SAFETY: the same contract.
    match unsafe { Context::from_ptr(context) }.file.object(handle) {
        Some(pd) => boxed(context, handle, PdRef::Own(pd)),
        None => errno::null(libc::ENOENT),
    }
}

/// # Safety
/// `pd` came from [`import_pd`], and is not used again.
pub unsafe extern "C" fn unimport_pd(pd: *mut ibv_pd) {
    // SAFETY: it came from a Box in `boxed`, and the caller gives up ownership.
    drop(unsafe { Box::from_raw(pd.cast::<SoftPd>()) });
}

/// `EBUSY` while regions, windows, queues or parent domains use it.
pub(crate) unsafe extern "C" fn dealloc_pd(pd: *mut ibv_pd) -> c_int {
    // SAFETY: `pd` is live and ours by contract.
    let found = unsafe { &(*pd.cast::<SoftPd>()).pd };
    if found.is_shared() {
        return libc::EBUSY;
    }
    if let PdRef::Own(own) = found {
        own.destroy();
    }
    // SAFETY: it came from a Box in `boxed`, and the caller gives up ownership.
    drop(unsafe { Box::from_raw(pd.cast::<SoftPd>()) });
    0
}

/// Its allocators are not called: all queues are the device's own memory.
pub(crate) unsafe extern "C" fn alloc_parent_domain(
    context: *mut ibv_context,
    attr: *mut ibv_parent_domain_init_attr,
) -> *mut ibv_pd {
    const KNOWN: u32 = IBV_PARENT_DOMAIN_INIT_ATTR_ALLOCATORS | IBV_PARENT_DOMAIN_INIT_ATTR_PD_CONTEXT;
    // SAFETY: live by contract.
    let attr = unsafe { &*attr };
    // SAFETY: both are null, or live and ours by contract.
    let (pd, td) = unsafe { (attr.pd.cast::<SoftPd>().as_ref(), attr.td.cast::<SoftTd>().as_ref()) };
    let of_this = |other| other == context;
    let Some(pd) = pd.filter(|pd| of_this(pd.base.context) && td.is_none_or(|td| of_this(td.base.context))) else {
        return errno::null(libc::EINVAL);
    };
    if attr.comp_mask & !KNOWN != 0 {
        return errno::null(libc::EINVAL);
    }
    let parent = PdRef::Parent {
        pd: pd.pd.parent_domain(),
        _td: td.map(|td| Arc::clone(&td.users)),
    };
    boxed(context, pd.base.handle, parent)
}

#[repr(C)]
struct SoftTd {
    base: ibv_td,
    /// One, and its parent domains.
    users: Arc<()>,
}

/// A thread domain: of no effect, as the device's locks are its own.
pub(crate) unsafe extern "C" fn alloc_td(context: *mut ibv_context, attr: *mut ibv_td_init_attr) -> *mut ibv_td {
    // SAFETY: live by contract.
    if unsafe { (*attr).comp_mask } != 0 {
        return errno::null(libc::EINVAL);
    }
    let (base, users) = (ibv_td { context }, Arc::new(()));
    Box::into_raw(Box::new(SoftTd { base, users })).cast()
}

/// `EBUSY` while parent domains use it.
pub(crate) unsafe extern "C" fn dealloc_td(td: *mut ibv_td) -> c_int {
    // SAFETY: live and ours by contract.
    if Arc::strong_count(unsafe { &(*td.cast::<SoftTd>()).users }) > 1 {
        return libc::EBUSY;
    }
    // SAFETY: it came from a Box in `alloc_td`, and the caller gives up ownership.
    drop(unsafe { Box::from_raw(td.cast::<SoftTd>()) });
    0
}
