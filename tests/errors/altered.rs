//! Verbs tables of the soft device with one or two functions that fail as hardware's do.

use core::ffi::c_int;
use std::mem::offset_of;

use doorbell_softroce_ibverbs::api;
use doorbell_verbs::{Context, Library};
use doorbell_verbs_sys::{
    _compat_ibv_port_attr, Api, IBV_MTU_1024, IBV_PORT_DOWN, IBV_PORT_INIT, Promise, ibv_context, ibv_device, ibv_mr,
    ibv_pd, ibv_port_attr, verbs_context,
};

#[derive(Clone, Copy)]
pub(crate) struct Altered(fn(Api) -> Api);

impl Altered {
    pub(crate) const LOCKED_MEMORY: Self = Self(|whole| Api {
        reg_mr: out_of_memory,
        reg_mr_iova2: None,
        ..whole
    });
    pub(crate) const EMPTY: Self = Self(|whole| Api {
        get_device_list: no_devices,
        ..whole
    });
    pub(crate) const PORT_DOWN: Self = Self(|whole| Api {
        open_device,
        query_port: down,
        ..whole
    });
    pub(crate) const PORT_INIT: Self = Self(|whole| Api {
        open_device,
        query_port: unconfigured,
        ..whole
    });
    /// Port 1 has an interface of MTU 1500.
    pub(crate) const MTU_1024: Self = Self(|whole| Api {
        open_device,
        query_port: narrow,
        ..whole
    });
    pub(crate) const NO_DMA_BUF: Self = Self(|whole| Api {
        reg_dmabuf_mr: Some(no_dma_buf),
        ..whole
    });
    /// The user may not open the device node.
    pub(crate) const NO_PERMISSION: Self = Self(|whole| Api {
        open_device: forbidden,
        ..whole
    });

    pub(crate) fn library(self) -> Library {
        let whole = Api {
            // SAFETY: the functions below fail, or report of a port what the man page allows; the
            // others are the soft device's, which keeps the contract.
            promise: unsafe { Promise::given() },
            ..*api()
        };
        Library::new(Box::leak(Box::new((self.0)(whole))))
    }

    pub(crate) fn open(self, device: &str) -> Context {
        self.library().open(device).unwrap()
    }
}

fn fail<T>(errno: c_int) -> *mut T {
    // SAFETY: the calling thread's own errno.
    unsafe { *libc::__errno_location() = errno };
    core::ptr::null_mut()
}

unsafe extern "C" fn out_of_memory(_: *mut ibv_pd, _: *mut libc::c_void, _: usize, _: c_int) -> *mut ibv_mr {
    fail(libc::ENOMEM)
}

unsafe extern "C" fn no_dma_buf(_: *mut ibv_pd, _: u64, _: usize, _: u64, _: c_int, _: c_int) -> *mut ibv_mr {
    fail(libc::EOPNOTSUPP)
}

unsafe extern "C" fn forbidden(_: *mut ibv_device) -> *mut ibv_context {
    fail(libc::EACCES)
}

/// A list of no devices, which the soft device's function frees.
unsafe extern "C" fn no_devices(num: *mut c_int) -> *mut *mut ibv_device {
    // SAFETY: by the caller's contract; null is also what a kernel without RDMA returns.
    unsafe { *num = 0 };
    fail(libc::ENOSYS)
}

/// The soft device's context, with its ports queried by the table's function.
unsafe extern "C" fn open_device(device: *mut ibv_device) -> *mut ibv_context {
    // SAFETY: by the caller's contract; an extended context is in a verbs_context, and unshared.
    unsafe {
        let context = (api().open_device)(device);
        if !context.is_null() {
            let whole = context.byte_sub(offset_of!(verbs_context, context));
            (*whole.cast::<verbs_context>()).query_port = None;
        }
        context
    }
}

/// The soft device's port attributes, changed by `alter`.
unsafe fn port(
    context: *mut ibv_context,
    number: u8,
    attr: *mut _compat_ibv_port_attr,
    alter: fn(&mut ibv_port_attr),
) -> c_int {
    // SAFETY: by the caller's contract. The one caller of this function, `inline::query_port`,
    // passes a whole ibv_port_attr.
    unsafe {
        let result = (api().query_port)(context, number, attr);
        alter(&mut *attr.cast());
        result
    }
}

unsafe extern "C" fn down(context: *mut ibv_context, number: u8, attr: *mut _compat_ibv_port_attr) -> c_int {
    // SAFETY: by the caller's contract.
    unsafe { port(context, number, attr, |attr| attr.state = IBV_PORT_DOWN) }
}

unsafe extern "C" fn unconfigured(context: *mut ibv_context, number: u8, attr: *mut _compat_ibv_port_attr) -> c_int {
    // SAFETY: by the caller's contract.
    unsafe { port(context, number, attr, |attr| attr.state = IBV_PORT_INIT) }
}

unsafe extern "C" fn narrow(context: *mut ibv_context, number: u8, attr: *mut _compat_ibv_port_attr) -> c_int {
    // SAFETY: by the caller's contract.
    unsafe { port(context, number, attr, |attr| attr.active_mtu = IBV_MTU_1024) }
}
