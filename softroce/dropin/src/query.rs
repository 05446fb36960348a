//! The one private symbol that tools need: ibv_devinfo(1) shows the type of each GID.

use core::ffi::{c_int, c_uint};
use core::mem::{MaybeUninit, size_of};

use doorbell_softroce_ibverbs::API;
use doorbell_verbs_sys::{IBV_GID_TYPE_ROCE_V2, ibv_context, ibv_gid_entry};

/// `IBV_GID_TYPE_SYSFS_*`: sysfs does not distinguish InfiniBand and RoCE v1.
const SYSFS_IB_ROCE_V1: c_uint = 0;
const SYSFS_ROCE_V2: c_uint = 1;

/// `ibv_query_gid_type`: 0, or −1 and `errno`.
pub(crate) unsafe extern "C" fn gid_type(
    context: *mut ibv_context,
    port: u8,
    index: c_uint,
    kind: *mut c_uint,
) -> c_int {
    let Some(query) = API.query_gid_ex else { return -1 };
    let mut entry = MaybeUninit::<ibv_gid_entry>::zeroed();
    // SAFETY: `context` is live by contract; the entry has the size given.
    let result = unsafe {
        query(
            context,
            u32::from(port),
            index,
            entry.as_mut_ptr(),
            0,
            size_of::<ibv_gid_entry>(),
        )
    };
    if result != 0 {
        // SAFETY: the calling thread's own errno, always valid to write.
        unsafe { *libc::__errno_location() = result };
        return -1;
    }
    // SAFETY: integers only, filled or zero; `kind` is writable by contract.
    unsafe {
        *kind = if entry.assume_init().gid_type == IBV_GID_TYPE_ROCE_V2 {
            SYSFS_ROCE_V2
        } else {
            SYSFS_IB_ROCE_V1
        };
    }
    0
}
