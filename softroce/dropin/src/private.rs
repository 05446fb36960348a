//! Private symbols that only rdma-core's drivers and tools import. Drivers linked into programs
//! register themselves when loaded; as none is offered a device, nothing else is called. Arguments
//! are ignored, as in [`absent`](crate::absent).

use core::ffi::{c_int, c_uint, c_void};
use core::ptr;

/// `verbs_register_driver_*`, `verbs_set_ops`, `verbs_uninit_context`, `__verbs_log`, and the
/// conversions for a librdmacm that uses the kernel's connection manager.
pub(crate) unsafe extern "C" fn nothing() {}

/// `__ioctl_final_num_attrs`.
pub(crate) unsafe extern "C" fn zero() -> c_uint {
    0
}

pub(crate) unsafe extern "C" fn none() -> *mut c_void {
    ptr::null_mut()
}

/// `ibv_cmd_*` and `execute_ioctl`, which return an errno value.
pub(crate) unsafe extern "C" fn unsupported() -> c_int {
    libc::EOPNOTSUPP
}
