//! Endpoints (identifier, route and queue pair in one call), and rdma_get_request(3).

use core::ffi::c_int;
use std::ptr;
use std::sync::Arc;

use doorbell_verbs_sys::rdmacm::{
    RAI_PASSIVE, RDMA_CM_EVENT_CONNECT_REQUEST, rdma_addrinfo, rdma_cm_id, rdma_port_space,
};
use doorbell_verbs_sys::{ibv_pd, ibv_qp_init_attr, ibv_qp_type};

use crate::channel::{rdma_ack_cm_event, take};
use crate::errno::{self, Errno};
use crate::id::{self, ack_stored_event, migrate, rdma_destroy_id, shared};
use crate::queue_pair::{create_qp, rdma_destroy_qp, rdma_destroy_srq};
use crate::route::{bind_addr, resolve_addr, resolve_route};

#[derive(Clone, Copy)]
pub(crate) struct PassiveQpInit {
    pd: *mut ibv_pd,
    init: ibv_qp_init_attr,
}

// SAFETY: the objects that it names may be used by any thread; the application keeps them while it
// listens (rdma_create_ep(3)).
unsafe impl Send for PassiveQpInit {}

/// rdma_create_ep(3).
///
/// # Safety
/// `id` is writable; `info` came from rdma_getaddrinfo(3), or is filled likewise; `pd` and what
/// `init` names are null, or live and ours.
pub unsafe extern "C" fn rdma_create_ep(
    id: *mut *mut rdma_cm_id,
    info: *mut rdma_addrinfo,
    pd: *mut ibv_pd,
    init: *mut ibv_qp_init_attr,
) -> c_int {
    if id.is_null() || info.is_null() {
        return errno::result(Err(libc::EINVAL));
    }
    // SAFETY: the same contract.
    errno::result(unsafe { create_ep(&*info, pd, init) }.map(|made| {
        // SAFETY: writable by contract.
        unsafe { id.write(made) };
    }))
}

unsafe fn create_ep(
    info: &rdma_addrinfo,
    pd: *mut ibv_pd,
    init: *mut ibv_qp_init_attr,
) -> Result<*mut rdma_cm_id, Errno> {
    // SAFETY: null creates a synchronous one.
    let unowned = unsafe { id::create(ptr::null_mut(), ptr::null_mut(), info.ai_port_space as rdma_port_space) }?;
    let id = unowned.shared().as_ptr();
    // SAFETY: the identifier is new, and known to no other thread; the rest by contract.
    unsafe {
        (*id).qp_type = info.ai_qp_type as ibv_qp_type;
        if info.ai_flags as u32 & RAI_PASSIVE != 0 {
            bind_addr(id, info.ai_src_addr)?;
            if !init.is_null() {
                unowned.shared().state().passive = Some(PassiveQpInit { pd, init: *init });
            }
            return Ok(unowned.into_raw());
        }
        resolve_addr(id, info.ai_src_addr, info.ai_dst_addr)?;
        resolve_route(id)?;
        if !init.is_null() {
            (*init).qp_type = (*id).qp_type;
            create_qp(id, pd, init)?;
        }
        ack_stored_event(id);
    }
    Ok(unowned.into_raw())
}

/// rdma_destroy_ep(3): including its queue pair and shared receive queue.
///
/// # Safety
/// `id` is null, or live and ours, and not used again.
pub unsafe extern "C" fn rdma_destroy_ep(id: *mut rdma_cm_id) {
    // SAFETY: the same contract.
    unsafe {
        rdma_destroy_qp(id);
        rdma_destroy_srq(id);
        rdma_destroy_id(id);
    }
}

/// rdma_get_request(3).
///
/// # Safety
/// `listen` is null or live and ours; `id` is null or writable.
pub unsafe extern "C" fn rdma_get_request(listen: *mut rdma_cm_id, id: *mut *mut rdma_cm_id) -> c_int {
    if id.is_null() {
        return errno::result(Err(libc::EINVAL));
    }
    // SAFETY: the same contract.
    errno::result(unsafe { get_request(listen) }.map(|request| {
        // SAFETY: writable by contract.
        unsafe { id.write(request) };
    }))
}

unsafe fn get_request(listen: *mut rdma_cm_id) -> Result<*mut rdma_cm_id, Errno> {
    // SAFETY: by contract.
    let listener = unsafe { shared(listen) }?;
    let (queue, passive) = {
        let state = listener.state();
        match &state.queue {
            Some(queue) if state.synchronous => (Arc::clone(queue), state.passive),
            _ => return Err(libc::EINVAL),
        }
    };
    let event = take(&queue)?;
    // SAFETY: just taken.
    let (kind, status, id) = unsafe { ((*event).event, (*event).status, (*event).id) };
    if status != 0 || kind != RDMA_CM_EVENT_CONNECT_REQUEST {
        // SAFETY: taken above, and not shared.
        unsafe { rdma_ack_cm_event(event) };
        return Err(if status == 0 {
            libc::EINVAL
        } else {
            status.saturating_abs()
        });
    }
    // SAFETY: the new identifier is owned here until it is returned. It gets a channel of its own;
    // its event stays with it until its next call.
    unsafe {
        let prepared = migrate(id, ptr::null_mut()).and_then(|()| match passive {
            Some(PassiveQpInit { pd, mut init }) => {
                init.qp_type = (*id).qp_type;
                create_qp(id, pd, &mut init)
            }
            None => Ok(()),
        });
        (*id).event = event;
        if let Err(value) = prepared {
            rdma_destroy_id(id);
            return Err(value);
        }
    }
    Ok(id)
}
