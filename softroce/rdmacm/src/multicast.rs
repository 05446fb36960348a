//! Multicast groups of UD identifiers: rdma_join_multicast(3), as Linux does it for RoCE v2. The
//! MGID is the group's address, which no subnet manager assigns, so a join is immediate; its queue
//! pair is attached when the application takes the event.

use core::ffi::{c_int, c_void};
use std::mem;
use std::net::IpAddr;

use doorbell_roce_proto::qp::Path;
use doorbell_roce_proto::{Gid, MULTICAST_QPN};
use doorbell_softroce_ibverbs::{attach_mcast, detach_mcast};
use doorbell_verbs_sys::rdmacm::{
    RDMA_CM_EVENT_MULTICAST_ERROR, RDMA_CM_EVENT_MULTICAST_JOIN, RDMA_UDP_QKEY, rdma_cm_id, rdma_cm_join_mc_attr_ex,
    rdma_ud_param,
};
use doorbell_verbs_sys::{IBV_QPT_UD, ibv_gid, ibv_qp};
use libc::sockaddr;

use crate::address;
use crate::channel::{EventInfo, Param};
use crate::errno::{self, Errno};
use crate::id::{Phase, Shared, complete, shared};
use crate::queue_pair::address_vector;

/// `RDMA_CM_JOIN_MC_ATTR_ADDRESS` and `RDMA_CM_JOIN_MC_ATTR_JOIN_FLAGS`, the attributes required.
const REQUIRED: u32 = 3;
/// `RDMA_MC_JOIN_FLAG_SENDONLY_FULLMEMBER`: the queue pair is not attached.
const SENDONLY: u32 = 1;

/// A group that the identifier has joined.
pub(crate) struct Membership {
    group: IpAddr,
    send_only: bool,
    /// The identifier's queue pair is attached, by the event of the join.
    attached: bool,
}

/// rdma_join_multicast(3).
///
/// # Safety
/// `id` is null or live and ours; `address` is null, or of the family that it names.
pub unsafe extern "C" fn rdma_join_multicast(
    id: *mut rdma_cm_id,
    address: *mut sockaddr,
    context: *mut c_void,
) -> c_int {
    // SAFETY: the same contract.
    errno::result(unsafe { join(id, address, false, context) })
}

/// rdma_join_multicast_ex(3).
///
/// # Safety
/// As for [`rdma_join_multicast`]; `attr` is null or live.
pub unsafe extern "C" fn rdma_join_multicast_ex(
    id: *mut rdma_cm_id,
    attr: *mut rdma_cm_join_mc_attr_ex,
    context: *mut c_void,
) -> c_int {
    let join = || {
        // SAFETY: null or live by contract.
        let attr = unsafe { attr.as_ref() }.ok_or(libc::EINVAL)?;
        if attr.comp_mask & !REQUIRED != 0 {
            return Err(libc::ENOTSUP);
        }
        if attr.comp_mask != REQUIRED || attr.join_flags > SENDONLY {
            return Err(libc::EINVAL);
        }
        // SAFETY: the same contract.
        unsafe { join(id, attr.addr, attr.join_flags == SENDONLY, context) }
    };
    errno::result(join())
}

unsafe fn join(
    id: *mut rdma_cm_id,
    address: *const sockaddr,
    send_only: bool,
    context: *mut c_void,
) -> Result<(), Errno> {
    // SAFETY: by contract.
    let (shared, group, is_datagram) = unsafe { (shared(id)?, address::read(address)?, (*id).qp_type == IBV_QPT_UD) };
    let group = group.ok_or(libc::EINVAL)?.ip().to_canonical();
    let mut state = shared.state();
    let bound = matches!(state.phase, Phase::Bound | Phase::AddressResolved);
    let opened = state.opened.filter(|_| bound && is_datagram && !group.is_unspecified());
    let local = opened.ok_or(libc::EINVAL)?.ip();
    if group.is_ipv4() != local.is_ipv4() {
        return Err(libc::EINVAL);
    }
    let mut path = Path::new(local, group);
    path.traffic_class = state.options.traffic_class;
    state.groups.push(Membership {
        group,
        send_only,
        attached: false,
    });
    drop(state);
    shared.notify(EventInfo {
        param: Param::Ud(rdma_ud_param {
            private_data: context,
            private_data_len: 0,
            ah_attr: address_vector(&path),
            qp_num: MULTICAST_QPN.get(),
            qkey: RDMA_UDP_QKEY,
        }),
        ..EventInfo::plain(RDMA_CM_EVENT_MULTICAST_JOIN, 0)
    });
    // SAFETY: by contract, and in a call on it.
    unsafe { complete(id) }
}

/// Attaches the identifier's queue pair, if it has one, when the application takes the event.
pub(crate) fn attach(shared: &Shared, info: &mut EventInfo) {
    let Param::Ud(param) = &info.param else {
        return;
    };
    // SAFETY: a GID is 16 bytes, and was written as such.
    let group = Gid(unsafe { param.ah_attr.grh.dgid.raw }).to_ip();
    // SAFETY: the identifier is live until its events are acknowledged; in a call that takes one.
    let qp = unsafe { (*shared.as_ptr()).qp };
    let mut state = shared.state();
    let joined = state.groups.iter_mut().find(|joined| joined.group == group);
    // It may have left meanwhile.
    let Some(joined) = joined.filter(|joined| !joined.send_only && !qp.is_null()) else {
        return;
    };
    // SAFETY: the queue pair is live and of our libibverbs.
    match errno::of_verb(unsafe { attach_mcast(qp, &gid_of(group), 0) }) {
        Ok(()) => joined.attached = true,
        Err(value) => {
            info.kind = RDMA_CM_EVENT_MULTICAST_ERROR;
            info.status = -value;
        }
    }
}

/// rdma_leave_multicast(3): `EADDRNOTAVAIL` for a group that it has not joined.
///
/// # Safety
/// As for [`rdma_join_multicast`].
pub unsafe extern "C" fn rdma_leave_multicast(id: *mut rdma_cm_id, address: *mut sockaddr) -> c_int {
    // SAFETY: the same contract.
    errno::result(unsafe { leave(id, address) })
}

unsafe fn leave(id: *mut rdma_cm_id, address: *const sockaddr) -> Result<(), Errno> {
    // SAFETY: by contract.
    let (shared, group, qp) = unsafe { (shared(id)?, address::read(address)?, (*id).qp) };
    let group = group.ok_or(libc::EINVAL)?.ip().to_canonical();
    let mut state = shared.state();
    let index = state.groups.iter().position(|joined| joined.group == group);
    detach(qp, &mut state.groups.swap_remove(index.ok_or(libc::EADDRNOTAVAIL)?))
}

/// Detaches the identifier's queue pair, which is about to be destroyed, from all groups.
pub(crate) fn detach_all(shared: &Shared, qp: *mut ibv_qp) {
    for joined in &mut shared.state().groups {
        // It fails where the application has detached it.
        let _ = detach(qp, joined);
    }
}

fn detach(qp: *mut ibv_qp, joined: &mut Membership) -> Result<(), Errno> {
    if !mem::take(&mut joined.attached) {
        return Ok(());
    }
    // SAFETY: the identifier's queue pair, which `detach_all` detaches before it is destroyed.
    errno::of_verb(unsafe { detach_mcast(qp, &gid_of(joined.group), 0) })
}

fn gid_of(group: IpAddr) -> ibv_gid {
    ibv_gid {
        raw: Gid::from(group).0,
    }
}
