//! ibv_fork_init(3) and what drivers call for it. No page is pinned, so that no page has to be kept from a child.

use core::ffi::{c_int, c_void};

use doorbell_verbs_sys::{IBV_FORK_UNNEEDED, ibv_fork_status};

/// `ibv_dontfork_range`.
pub(crate) unsafe extern "C" fn dontfork_range(_base: *mut c_void, _size: usize) -> c_int {
    0
}

/// `ibv_dofork_range`.
pub(crate) unsafe extern "C" fn dofork_range(_base: *mut c_void, _size: usize) -> c_int {
    0
}

/// ibv_is_fork_initialized(3).
pub(crate) unsafe extern "C" fn is_fork_initialized() -> ibv_fork_status {
    IBV_FORK_UNNEEDED
}
