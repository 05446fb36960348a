//! Opened devices: `ibv_context`, inside `verbs_context`, with its function pointers.

use core::ffi::{c_int, c_uint, c_void};
use std::mem::{MaybeUninit, offset_of};
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd};
use std::ptr;
use std::sync::Arc;

use doorbell_softroce::{Device, Event, EventQueue};
use doorbell_verbs_sys::inline::VERBS_ABI_IS_EXTENDED;
use doorbell_verbs_sys::{ibv_context, ibv_context_ops, ibv_device, verbs_context};

use crate::device_file::DeviceFile;
use crate::registry::SoftDevice;
use crate::{
    completion, device_memory, domain, errno, extended_cq, post, protection, query, queue_pair, shared_receive, window,
    xrc,
};

#[repr(C)]
pub(crate) struct Context {
    verbs: verbs_context,
    pub(crate) device: Arc<Device>,
    pub(crate) file: Arc<DeviceFile>,
    _cmd_fd: OwnedFd,
    /// Its descriptor is `async_fd`.
    pub(crate) events: Arc<EventQueue<Event>>,
}

impl Context {
    /// # Safety
    /// `context` came from [`open_device`] and is not closed while the reference is used.
    pub(crate) unsafe fn from_ptr<'a>(context: *mut ibv_context) -> &'a Self {
        // SAFETY: `open_device` returns pointers to the `context` member of `verbs`, the first
        // member of Context, derived from the whole.
        unsafe { &*context.byte_sub(offset_of!(verbs_context, context)).cast::<Self>() }
    }
}

/// The device of a context, for the connection manager.
///
/// # Safety
/// `context` came from this library's ibv_open_device(3), and is open.
pub unsafe fn device_of(context: *mut ibv_context) -> Arc<Device> {
    // SAFETY: the same contract.
    Arc::clone(unsafe { &Context::from_ptr(context).device })
}

pub(crate) unsafe extern "C" fn open_device(device: *mut ibv_device) -> *mut ibv_context {
    // SAFETY: `device` is of our list by contract.
    let soft = unsafe { SoftDevice::from_ptr(device) };
    match DeviceFile::create(soft) {
        Ok((file, fd)) => open(file, || fd),
        Err(value) => errno::null(value),
    }
}

/// The context owns `cmd_fd` from then on, unless it is refused.
///
/// # Safety
/// `cmd_fd` is no other object's if it is a duplicate of a context's own.
pub unsafe extern "C" fn import_device(cmd_fd: c_int) -> *mut ibv_context {
    match DeviceFile::find(cmd_fd) {
        // SAFETY: a descriptor, as it was found; given away by contract.
        Ok(file) => open(file, || unsafe { OwnedFd::from_raw_fd(cmd_fd) }),
        Err(value) => errno::null(value),
    }
}

fn open(file: Arc<DeviceFile>, cmd_fd: impl FnOnce() -> OwnedFd) -> *mut ibv_context {
    let soft = Arc::clone(&file.soft);
    let opened = match soft.open() {
        Ok(opened) => opened,
        Err(value) => return errno::null(value),
    };
    let events = match EventQueue::new() {
        Ok(events) => Arc::new(events),
        Err(error) => {
            soft.close(opened);
            return errno::null(errno::of(&error));
        }
    };
    opened.add_event_queue(Arc::clone(&events));
    // SAFETY: all-zero is a valid verbs_context: integers, null pointers and entries that are
    // `None`, which callers check for.
    let mut verbs: verbs_context = unsafe { MaybeUninit::zeroed().assume_init() };
    verbs.query_port = Some(query::query_port);
    verbs.create_srq_ex = Some(shared_receive::create_srq_ex);
    verbs.advise_mr = Some(protection::advise_mr);
    verbs.alloc_null_mr = Some(protection::alloc_null_mr);
    verbs.reg_dm_mr = Some(protection::reg_dm_mr);
    verbs.alloc_dm = Some(device_memory::alloc_dm);
    verbs.free_dm = Some(device_memory::free_dm);
    verbs.modify_cq = Some(completion::modify_cq);
    verbs.create_cq_ex = Some(extended_cq::create_cq_ex);
    verbs.query_device_ex = Some(query::query_device_ex);
    verbs.query_rt_values = Some(query::query_rt_values);
    verbs.create_qp_ex = Some(queue_pair::create_qp_ex);
    verbs.alloc_td = Some(domain::alloc_td);
    verbs.dealloc_td = Some(domain::dealloc_td);
    verbs.alloc_parent_domain = Some(domain::alloc_parent_domain);
    verbs.open_xrcd = Some(xrc::open_xrcd);
    verbs.close_xrcd = Some(xrc::close_xrcd);
    verbs.get_srq_num = Some(xrc::get_srq_num);
    let cmd_fd = cmd_fd();
    verbs.sz = size_of::<verbs_context>();
    verbs.context = ibv_context {
        device: soft.as_ptr(),
        ops: operations(),
        cmd_fd: cmd_fd.as_raw_fd(),
        async_fd: events.as_raw_fd(),
        num_comp_vectors: 1,
        mutex: libc::PTHREAD_MUTEX_INITIALIZER,
        abi_compat: VERBS_ABI_IS_EXTENDED,
    };
    let context = Box::into_raw(Box::new(Context {
        verbs,
        device: opened,
        file,
        _cmd_fd: cmd_fd,
        events,
    }));
    // SAFETY: `context` was just made and is live.
    unsafe { &raw mut (*context).verbs.context }
}

/// Objects of the context that still exist keep the device itself open.
pub(crate) unsafe extern "C" fn close_device(context: *mut ibv_context) -> c_int {
    // SAFETY: `open_device` took it from a Box, and the caller gives up ownership.
    let closed = unsafe { Box::from_raw(context.byte_sub(offset_of!(verbs_context, context)).cast::<Context>()) };
    let Context {
        device, file, events, ..
    } = *closed;
    device.remove_event_queue(&events);
    file.soft.close(device);
    0
}

/// No effect, as no page is pinned. A device opened before fork(2) serves the parent only.
pub(crate) unsafe extern "C" fn fork_init() -> c_int {
    0
}

/// Those that C calls without a check are not null: they fail with `ENOSYS`.
fn operations() -> ibv_context_ops {
    ibv_context_ops {
        _compat_query_device: Some(query::query_device),
        _compat_query_port: Some(query::query_port_compat),
        _compat_alloc_pd: Some(unsupported),
        _compat_dealloc_pd: Some(unsupported),
        _compat_reg_mr: Some(unsupported),
        _compat_rereg_mr: Some(unsupported),
        _compat_dereg_mr: Some(unsupported),
        alloc_mw: Some(window::alloc_mw),
        bind_mw: Some(window::bind_mw),
        dealloc_mw: Some(window::dealloc_mw),
        _compat_create_cq: Some(unsupported),
        poll_cq: Some(completion::poll_cq),
        req_notify_cq: Some(completion::req_notify_cq),
        _compat_cq_event: Some(unsupported),
        _compat_resize_cq: Some(unsupported),
        _compat_destroy_cq: Some(unsupported),
        _compat_create_srq: Some(unsupported),
        _compat_modify_srq: Some(unsupported),
        _compat_query_srq: Some(unsupported),
        _compat_destroy_srq: Some(unsupported),
        post_srq_recv: Some(post::post_srq_recv),
        _compat_create_qp: Some(unsupported),
        _compat_query_qp: Some(unsupported),
        _compat_modify_qp: Some(unsupported),
        _compat_destroy_qp: Some(unsupported),
        post_send: Some(post::post_send),
        post_recv: Some(post::post_recv),
        _compat_create_ah: Some(unsupported),
        _compat_destroy_ah: Some(unsupported),
        _compat_attach_mcast: Some(unsupported),
        _compat_detach_mcast: Some(unsupported),
        _compat_async_event: Some(unsupported),
    }
}

unsafe extern "C" fn unsupported() -> *mut c_void {
    errno::null(libc::ENOSYS)
}

/// For an object's `handle`, which rdma-core gets from the kernel and programs print.
pub(crate) fn next_handle() -> u32 {
    use std::sync::atomic::{AtomicU32, Ordering};
    static NEXT: AtomicU32 = AtomicU32::new(1);
    NEXT.fetch_add(1, Ordering::Relaxed)
}

/// Adds to an object's count of acknowledged events, which its destruction waits for.
///
/// # Safety
/// All are live, `mutex` and `cond` initialised, `acknowledged` modified under the mutex only.
pub(crate) unsafe fn acknowledge(
    mutex: *mut libc::pthread_mutex_t,
    cond: *mut libc::pthread_cond_t,
    acknowledged: *mut u32,
    count: c_uint,
) {
    // SAFETY: initialised by contract; this thread does not hold the mutex, and releases it below;
    // the counter is modified under it.
    unsafe {
        libc::pthread_mutex_lock(mutex);
        *acknowledged = (*acknowledged).wrapping_add(count);
        libc::pthread_cond_signal(cond);
        libc::pthread_mutex_unlock(mutex);
    }
}

/// # Safety
/// As for [`acknowledge`].
pub(crate) unsafe fn await_acknowledged(
    mutex: *mut libc::pthread_mutex_t,
    cond: *mut libc::pthread_cond_t,
    acknowledged: *const u32,
    wanted: u32,
) {
    // SAFETY: as in `acknowledge`; pthread_cond_wait is called with the mutex held.
    unsafe {
        libc::pthread_mutex_lock(mutex);
        while ptr::read(acknowledged) != wanted {
            libc::pthread_cond_wait(cond, mutex);
        }
        libc::pthread_mutex_unlock(mutex);
    }
}
