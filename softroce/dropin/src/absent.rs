//! Verbs that the device does not support, each failing as its man page allows. They ignore their
//! arguments, so one function serves all that fail alike.

use core::ffi::{c_int, c_void};
use core::ptr;

pub(crate) fn set_errno(value: c_int) {
    // SAFETY: returns the calling thread's own errno, always valid to write.
    unsafe { *libc::__errno_location() = value };
}

/// `ibv_reg_mr_ex`.
pub(crate) unsafe extern "C" fn object() -> *mut c_void {
    set_errno(libc::EOPNOTSUPP);
    ptr::null_mut()
}

/// ibv_query_ece(3) and ibv_set_ece(3): no extensions beyond the standard.
pub(crate) unsafe extern "C" fn ece() -> c_int {
    libc::EOPNOTSUPP
}

/// ibv_get_device_index(3): the kernel does not know the device.
pub(crate) unsafe extern "C" fn get_device_index() -> c_int {
    -1
}

/// ibv_query_qp_data_in_order(3): no promise beyond the standard's.
pub(crate) unsafe extern "C" fn query_qp_data_in_order() -> c_int {
    0
}

/// `ibv_resolve_eth_l2_from_gid`: the kernel under the device builds the Ethernet header.
pub(crate) unsafe extern "C" fn resolve_eth_l2_from_gid() -> c_int {
    -libc::EOPNOTSUPP
}
