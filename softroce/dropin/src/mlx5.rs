//! The functions of `libmlx5.so.1` that neither return an object nor an errno value: what they
//! answer where no device is an mlx5 adapter. Arguments are ignored, as in
//! [`absent`](crate::absent).

use core::ffi::{c_int, c_void};

/// mlx5dv_is_supported(3)
pub(crate) unsafe extern "C" fn is_supported() -> bool {
    false
}

/// mlx5dv_devx_get_event(3): there is no channel to read from.
pub(crate) unsafe extern "C" fn get_event() -> isize {
    crate::absent::set_errno(libc::EOPNOTSUPP);
    -1
}

/// mlx5dv_vfio_get_events_fd(3)
pub(crate) unsafe extern "C" fn get_events_fd() -> c_int {
    -libc::EOPNOTSUPP
}

/// `mlx5dv_get_export_sizes`: nothing is exported.
pub(crate) unsafe extern "C" fn get_export_sizes(sizes: *mut c_void, len: usize) {
    // SAFETY: the caller's struct of sizes, integers, has `len` bytes.
    unsafe { sizes.cast::<u8>().write_bytes(0, len) };
}
