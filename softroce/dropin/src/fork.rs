//! ibv_fork_init(3) and its driver interface: no page is pinned, so none needs protection.

use core::ffi::{c_int, c_void};

use doorbell_verbs_sys::{IBV_FORK_UNNEEDED, ibv_fork_status};

pub(crate) unsafe extern "C" fn dontfork_range(_base: *mut c_void, _size: usize) -> c_int {
    0
}

pub(crate) unsafe extern "C" fn dofork_range(_base: *mut c_void, _size: usize) -> c_int {
    0
}

pub(crate) unsafe extern "C" fn is_fork_initialized() -> ibv_fork_status {
    IBV_FORK_UNNEEDED
}
