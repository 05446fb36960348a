//! Multicast groups: unsupported, so joining fails with `EOPNOTSUPP`.

use core::ffi::{c_int, c_void};

use doorbell_verbs_sys::rdmacm::{rdma_cm_id, rdma_cm_join_mc_attr_ex};
use libc::sockaddr;

use crate::errno;

/// rdma_join_multicast(3): `EOPNOTSUPP`.
pub extern "C" fn rdma_join_multicast(_id: *mut rdma_cm_id, _address: *mut sockaddr, _context: *mut c_void) -> c_int {
    errno::result(Err(libc::EOPNOTSUPP))
}

/// rdma_join_multicast_ex(3): `EOPNOTSUPP`.
pub extern "C" fn rdma_join_multicast_ex(
    _id: *mut rdma_cm_id,
    _attr: *mut rdma_cm_join_mc_attr_ex,
    _context: *mut c_void,
) -> c_int {
    errno::result(Err(libc::EOPNOTSUPP))
}

/// rdma_leave_multicast(3): `EADDRNOTAVAIL`, for a group that was never joined.
pub extern "C" fn rdma_leave_multicast(_id: *mut rdma_cm_id, _address: *mut sockaddr) -> c_int {
    errno::result(Err(libc::EADDRNOTAVAIL))
}
