//! What only rdma-core's own drivers and tools import. Drivers are linked into programs, and announce themselves when they are loaded; as none is ever asked
//! about a device, none comes to call the rest.
//!
//! As in [`absent`](crate::absent), no function looks at its arguments.

use core::ffi::{c_int, c_uint, c_void};
use core::ptr;

/// Functions that give nothing back: `verbs_register_driver_*`, which hears of drivers, `verbs_set_ops`, `verbs_uninit_context`, `__verbs_log`; and those that turn
/// structures of the kernel's connection manager into the user's, for a librdmacm that works with one.
pub(crate) unsafe extern "C" fn nothing() {}

/// Functions that count: `__ioctl_final_num_attrs`.
pub(crate) unsafe extern "C" fn zero() -> c_uint {
    0
}

/// Functions that give an object: there is none.
pub(crate) unsafe extern "C" fn none() -> *mut c_void {
    ptr::null_mut()
}

/// Commands to the kernel, `ibv_cmd_*` and `execute_ioctl`, which give an errno value.
pub(crate) unsafe extern "C" fn unsupported() -> c_int {
    libc::EOPNOTSUPP
}
