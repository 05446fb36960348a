//! Multicast groups of UD queue pairs: ibv_attach_mcast(3). The group is the address of the MGID;
//! the MLID has no meaning under RoCE (IBTA annex A17).

use core::ffi::c_int;

use doorbell_roce_proto::Gid;
use doorbell_softroce::AttachError;
use doorbell_verbs_sys::{ibv_gid, ibv_qp};

use crate::errno;
use crate::queue_pair::SoftQp;

/// ibv_attach_mcast(3): `EINVAL`, `ENOMEM`, or why the system refuses to receive from the group.
///
/// # Safety
/// `qp` is live and came from this library; `gid` is live.
pub unsafe extern "C" fn attach_mcast(qp: *mut ibv_qp, gid: *const ibv_gid, _lid: u16) -> c_int {
    // SAFETY: live by contract; a GID is 16 bytes, whichever member of the union was written.
    let (soft, group, blocks_own) = unsafe { (SoftQp::handle(qp), Gid((*gid).raw), SoftQp::blocks_own_multicast(qp)) };
    match soft.attach_multicast(group.to_ip(), blocks_own) {
        Ok(()) => 0,
        Err(refused) => {
            tracing::debug!("ibv_attach_mcast: {refused}");
            match refused {
                AttachError::Invalid => libc::EINVAL,
                AttachError::Exhausted => libc::ENOMEM,
                AttachError::Link(error) => errno::of(&error),
            }
        }
    }
}

/// ibv_attach_mcast(3): `EINVAL` when it is not attached.
///
/// # Safety
/// As for [`attach_mcast`].
pub unsafe extern "C" fn detach_mcast(qp: *mut ibv_qp, gid: *const ibv_gid, _lid: u16) -> c_int {
    // SAFETY: as there.
    let (soft, group) = unsafe { (SoftQp::handle(qp), Gid((*gid).raw)) };
    match soft.detach_multicast(group.to_ip()) {
        true => 0,
        false => libc::EINVAL,
    }
}
