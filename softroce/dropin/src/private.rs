//! Private symbols that only rdma-core's drivers and tools import. Drivers linked into programs
//! register themselves when loaded; as none is offered a device, the other functions are not
//! called.
//!
//! As in [`absent`](crate::absent), the functions ignore their arguments.

use core::ffi::{c_int, c_uint, c_void};
use core::ptr;

/// Functions without a result: `verbs_register_driver_*`, `verbs_set_ops`, `verbs_uninit_context`,
/// `__verbs_log`; and those that convert the kernel connection manager's structures for a librdmacm
/// that uses it.
pub(crate) unsafe extern "C" fn nothing() {}

/// Functions that return a count: `__ioctl_final_num_attrs`.
pub(crate) unsafe extern "C" fn zero() -> c_uint {
    0
}

/// Functions that return an object: null.
pub(crate) unsafe extern "C" fn none() -> *mut c_void {
    ptr::null_mut()
}

/// Commands to the kernel, `ibv_cmd_*` and `execute_ioctl`, which return an errno value.
pub(crate) unsafe extern "C" fn unsupported() -> c_int {
    libc::EOPNOTSUPP
}
