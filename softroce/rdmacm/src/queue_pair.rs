//! Queue pairs of identifiers, and their state transitions with the connection.

use core::ffi::{c_int, c_void};
use std::ptr;

use doorbell_roce_proto::Gid;
use doorbell_roce_proto::cm::Parameters;
use doorbell_roce_proto::qp::Path;
use doorbell_roce_proto::wire::Transport;
use doorbell_softroce_ibverbs::{api, routable_index};
use doorbell_verbs_sys::inline::verbs_get_ctx;
use doorbell_verbs_sys::rdmacm::{RDMA_UDP_QKEY, rdma_cm_id};
use doorbell_verbs_sys::*;

use crate::devices::{OpenDevice, PORT, of_context};
use crate::errno::{self, Errno};
use crate::id::shared;
use crate::{connection, multicast};

/// Minimum inline capacity in bytes, as of other adapters' smallest request: programs rely on it.
const INLINE: u32 = 64;

/// rdma_create_qp(3): in INIT, or RTS for UD; with a protection domain and CQs if not given.
///
/// # Safety
/// `id` is null or live and ours; `pd` and what `init` names are null, or live and ours; `init` is
/// null or live.
pub unsafe extern "C" fn rdma_create_qp(id: *mut rdma_cm_id, pd: *mut ibv_pd, init: *mut ibv_qp_init_attr) -> c_int {
    // SAFETY: the same contract.
    errno::result(unsafe { create_qp(id, pd, init) })
}

pub(crate) unsafe fn create_qp(id: *mut rdma_cm_id, pd: *mut ibv_pd, init: *mut ibv_qp_init_attr) -> Result<(), Errno> {
    if init.is_null() {
        return Err(libc::EINVAL);
    }
    // SAFETY: live by contract.
    let attr = unsafe { &mut *init };
    let mut extended = ibv_qp_init_attr_ex {
        qp_context: attr.qp_context,
        send_cq: attr.send_cq,
        recv_cq: attr.recv_cq,
        srq: attr.srq,
        cap: attr.cap,
        qp_type: attr.qp_type,
        sq_sig_all: attr.sq_sig_all,
        comp_mask: IBV_QP_INIT_ATTR_PD,
        pd,
        // SAFETY: the rest is integers and pointers, and ignored without its bits in the mask.
        ..unsafe { core::mem::zeroed() }
    };
    // SAFETY: the same contract.
    unsafe { create_qp_ex(id, &mut extended) }?;
    attr.send_cq = extended.send_cq;
    attr.recv_cq = extended.recv_cq;
    attr.srq = extended.srq;
    attr.cap = extended.cap;
    Ok(())
}

/// rdma_create_qp(3), with the extensions of ibv_create_qp_ex(3).
///
/// # Safety
/// As for [`rdma_create_qp`].
pub unsafe extern "C" fn rdma_create_qp_ex(id: *mut rdma_cm_id, init: *mut ibv_qp_init_attr_ex) -> c_int {
    if init.is_null() {
        return errno::result(Err(libc::EINVAL));
    }
    // SAFETY: the same contract.
    errno::result(unsafe { create_qp_ex(id, &mut *init) })
}

unsafe fn create_qp_ex(id: *mut rdma_cm_id, init: &mut ibv_qp_init_attr_ex) -> Result<(), Errno> {
    // SAFETY: by contract; in a call on the identifier.
    let (context, qp, srq) = unsafe {
        shared(id)?;
        ((*id).verbs, (*id).qp, (*id).srq)
    };
    if context.is_null() || !qp.is_null() {
        return Err(libc::EINVAL);
    }
    let opened = of_context(context)?;
    if init.comp_mask & IBV_QP_INIT_ATTR_PD == 0 || init.pd.is_null() {
        init.comp_mask |= IBV_QP_INIT_ATTR_PD;
        init.pd = opened.default_pd()?;
    }
    // SAFETY: live by contract, or just created.
    if unsafe { (*init.pd).context } != context {
        return Err(libc::EINVAL);
    }
    if init.srq.is_null() {
        init.srq = srq;
    }
    init.cap.max_inline_data = init.cap.max_inline_data.max(INLINE);
    // SAFETY: all is live and ours, in a call on the identifier.
    unsafe {
        create_cqs(id, opened, init)?;
        let made = create(context, init).and_then(|qp| {
            (*id).qp = qp;
            (*id).pd = init.pd;
            begin(id, qp).inspect_err(|_| {
                (api().destroy_qp)(qp);
                (*id).qp = ptr::null_mut();
            })
        });
        made.inspect_err(|_| destroy_cqs(id))
    }
}

unsafe fn create(context: *mut ibv_context, init: &mut ibv_qp_init_attr_ex) -> Result<*mut ibv_qp, Errno> {
    // SAFETY: an open context of this library is extended, and has the entry.
    let qp = unsafe {
        (*verbs_get_ctx(context))
            .create_qp_ex
            .map(|create| create(context, init))
    };
    qp.filter(|qp| !qp.is_null()).ok_or_else(errno::last)
}

/// Creates those not given, each with a channel, and stores them in the identifier.
unsafe fn create_cqs(id: *mut rdma_cm_id, opened: &OpenDevice, init: &mut ibv_qp_init_attr_ex) -> Result<(), Errno> {
    // SAFETY: in a call on the identifier. On failure the caller destroys a queue already created.
    unsafe {
        if init.send_cq.is_null() {
            let made = create_cq(opened, init.cap.max_send_wr, id.cast())?;
            ((*id).send_cq_channel, (*id).send_cq) = made;
            init.send_cq = made.1;
        }
        if init.recv_cq.is_null() {
            let made = create_cq(opened, init.cap.max_recv_wr, id.cast()).inspect_err(|_| destroy_cqs(id))?;
            ((*id).recv_cq_channel, (*id).recv_cq) = made;
            init.recv_cq = made.1;
        }
    }
    Ok(())
}

unsafe fn create_cq(
    opened: &OpenDevice,
    entries: u32,
    context: *mut c_void,
) -> Result<(*mut ibv_comp_channel, *mut ibv_cq), Errno> {
    let entries = c_int::try_from(entries.max(1)).map_err(|_| libc::EINVAL)?;
    // SAFETY: the context is open, and the channel is of it.
    unsafe {
        let channel = (api().create_comp_channel)(opened.context);
        if channel.is_null() {
            return Err(errno::last());
        }
        let cq = (api().create_cq)(opened.context, entries, context, channel, 0);
        if cq.is_null() {
            let value = errno::last();
            (api().destroy_comp_channel)(channel);
            return Err(value);
        }
        Ok((channel, cq))
    }
}

/// Destroys the completion queues that the library created: those with a channel in the identifier.
unsafe fn destroy_cqs(id: *mut rdma_cm_id) {
    // SAFETY: in a call on the identifier; its objects are live, and not used any more.
    unsafe {
        for (channel, cq) in [
            (&raw mut (*id).send_cq_channel, &raw mut (*id).send_cq),
            (&raw mut (*id).recv_cq_channel, &raw mut (*id).recv_cq),
        ] {
            let (channel, cq) = (
                ptr::replace(channel, ptr::null_mut()),
                ptr::replace(cq, ptr::null_mut()),
            );
            if !channel.is_null() {
                (api().destroy_cq)(cq);
                (api().destroy_comp_channel)(channel);
            }
        }
    }
}

/// rdma_destroy_qp(3), with the completion queues that the library created for it.
///
/// # Safety
/// `id` is null or live and ours.
pub unsafe extern "C" fn rdma_destroy_qp(id: *mut rdma_cm_id) {
    if id.is_null() {
        return;
    }
    // SAFETY: by contract, in a call on the identifier.
    unsafe {
        let qp = ptr::replace(&raw mut (*id).qp, ptr::null_mut());
        if qp.is_null() {
            return;
        }
        if let Ok(shared) = shared(id) {
            multicast::detach_all(&shared, qp);
        }
        (api().destroy_qp)(qp);
        destroy_cqs(id);
    }
}

/// rdma_create_srq(3).
///
/// # Safety
/// `id` is null or live and ours; `pd` is null or live and ours; `init` is null or live.
pub unsafe extern "C" fn rdma_create_srq(id: *mut rdma_cm_id, pd: *mut ibv_pd, init: *mut ibv_srq_init_attr) -> c_int {
    let create = || {
        if init.is_null() {
            return Err(libc::EINVAL);
        }
        // SAFETY: live by contract.
        let attr = unsafe { &mut *init };
        // SAFETY: the same contract.
        unsafe { create_srq(id, pd, attr) }
    };
    errno::result(create())
}

/// rdma_create_srq(3), with the extensions of ibv_create_srq_ex(3): basic type only.
///
/// # Safety
/// As for [`rdma_create_srq`].
pub unsafe extern "C" fn rdma_create_srq_ex(id: *mut rdma_cm_id, init: *mut ibv_srq_init_attr_ex) -> c_int {
    let create = || {
        if init.is_null() {
            return Err(libc::EINVAL);
        }
        // SAFETY: live by contract.
        let attr = unsafe { &*init };
        let given = |bit| attr.comp_mask & bit != 0;
        if given(!(IBV_SRQ_INIT_ATTR_TYPE | IBV_SRQ_INIT_ATTR_PD))
            || given(IBV_SRQ_INIT_ATTR_TYPE) && attr.srq_type != IBV_SRQT_BASIC
        {
            return Err(libc::EOPNOTSUPP);
        }
        let pd = if given(IBV_SRQ_INIT_ATTR_PD) {
            attr.pd
        } else {
            ptr::null_mut()
        };
        let mut basic = ibv_srq_init_attr {
            srq_context: attr.srq_context,
            attr: attr.attr,
        };
        // SAFETY: the same contract.
        unsafe { create_srq(id, pd, &mut basic) }
    };
    errno::result(create())
}

unsafe fn create_srq(id: *mut rdma_cm_id, pd: *mut ibv_pd, init: &mut ibv_srq_init_attr) -> Result<(), Errno> {
    // SAFETY: by contract; in a call on the identifier.
    let (context, srq) = unsafe {
        shared(id)?;
        ((*id).verbs, (*id).srq)
    };
    if context.is_null() || !srq.is_null() {
        return Err(libc::EINVAL);
    }
    let pd = if pd.is_null() {
        of_context(context)?.default_pd()?
    } else {
        pd
    };
    // SAFETY: live by contract, or just created.
    if unsafe { (*pd).context } != context {
        return Err(libc::EINVAL);
    }
    let create = api().create_srq.ok_or(libc::ENOSYS)?;
    // SAFETY: both are live.
    let srq = unsafe { create(pd, init) };
    if srq.is_null() {
        return Err(errno::last());
    }
    // SAFETY: in a call on the identifier.
    unsafe {
        (*id).srq = srq;
        (*id).pd = pd;
    }
    Ok(())
}

/// rdma_create_srq(3).
///
/// # Safety
/// `id` is null or live and ours.
pub unsafe extern "C" fn rdma_destroy_srq(id: *mut rdma_cm_id) {
    if id.is_null() {
        return;
    }
    // SAFETY: by contract, in a call on the identifier.
    unsafe {
        let srq = ptr::replace(&raw mut (*id).srq, ptr::null_mut());
        if let Some(destroy) = api().destroy_srq.filter(|_| !srq.is_null()) {
            destroy(srq);
        }
    }
}

/// The state after rdma_create_qp(3): INIT, or RTS for UD.
unsafe fn begin(id: *mut rdma_cm_id, qp: *mut ibv_qp) -> Result<(), Errno> {
    // SAFETY: by contract.
    unsafe {
        to_state(id, qp, IBV_QPS_INIT)?;
        if (*qp).qp_type == IBV_QPT_UD {
            to_state(id, qp, IBV_QPS_RTR)?;
            to_state(id, qp, IBV_QPS_RTS)?;
        }
    }
    Ok(())
}

/// Connects the identifier's queue pair: INIT (with the connection's access rights), RTR, RTS.
///
/// # Safety
/// `id` is live and ours, in a call on it; `qp` is its queue pair.
pub(crate) unsafe fn connect(id: *mut rdma_cm_id, qp: *mut ibv_qp) -> Result<(), Errno> {
    for state in [IBV_QPS_INIT, IBV_QPS_RTR, IBV_QPS_RTS] {
        // SAFETY: by contract.
        unsafe { to_state(id, qp, state) }?;
    }
    Ok(())
}

/// Moves the identifier's queue pair, if any, to the error state, which flushes it.
///
/// # Safety
/// `id` is live and ours, in a call on it.
pub(crate) unsafe fn fail(id: *mut rdma_cm_id) -> Result<(), Errno> {
    // SAFETY: by contract; all-zero is a valid ibv_qp_attr, of integers.
    unsafe {
        let qp = (*id).qp;
        if qp.is_null() {
            return Ok(());
        }
        let mut attr: ibv_qp_attr = core::mem::zeroed();
        attr.qp_state = IBV_QPS_ERR;
        errno::of_verb((api().modify_qp)(qp, &mut attr, IBV_QP_STATE as c_int))
    }
}

unsafe fn to_state(id: *mut rdma_cm_id, qp: *mut ibv_qp, state: ibv_qp_state) -> Result<(), Errno> {
    // SAFETY: by contract; all-zero is a valid ibv_qp_attr, of integers.
    unsafe {
        let mut attr: ibv_qp_attr = core::mem::zeroed();
        attr.qp_state = state;
        let mask = attributes(id, &mut attr)?;
        errno::of_verb((api().modify_qp)(qp, &mut attr, mask as c_int))
    }
}

/// rdma_init_qp_attr(3), for an external queue pair: INIT, and once connected RTR and RTS.
///
/// # Safety
/// `id` is null or live and ours; `attr` and `mask` are null or writable.
pub unsafe extern "C" fn rdma_init_qp_attr(id: *mut rdma_cm_id, attr: *mut ibv_qp_attr, mask: *mut c_int) -> c_int {
    if attr.is_null() || mask.is_null() {
        return errno::result(Err(libc::EINVAL));
    }
    // SAFETY: the same contract.
    errno::result(unsafe { attributes(id, &mut *attr) }.map(|found| {
        // SAFETY: writable by contract.
        unsafe { mask.write(found as c_int) };
    }))
}

unsafe fn attributes(id: *mut rdma_cm_id, attr: &mut ibv_qp_attr) -> Result<u32, Errno> {
    // SAFETY: by contract.
    let shared = unsafe { shared(id) }?;
    // SAFETY: in a call on the identifier.
    let (bound, is_datagram) = unsafe { (!(*id).verbs.is_null(), (*id).qp_type == IBV_QPT_UD) };
    if !bound {
        return Err(libc::EINVAL);
    }
    let parameters = connection::parameters(&shared);
    match (attr.qp_state, parameters) {
        (IBV_QPS_INIT, parameters) => {
            attr.pkey_index = 0;
            attr.port_num = PORT;
            let mask = IBV_QP_STATE | IBV_QP_PKEY_INDEX | IBV_QP_PORT;
            if is_datagram {
                attr.qkey = RDMA_UDP_QKEY;
                return Ok(mask | IBV_QP_QKEY);
            }
            attr.qp_access_flags = parameters.as_ref().map_or(0, rights);
            Ok(mask | IBV_QP_ACCESS_FLAGS)
        }
        (IBV_QPS_RTR, _) if is_datagram => Ok(IBV_QP_STATE),
        (IBV_QPS_RTS, _) if is_datagram => {
            attr.sq_psn = 0;
            Ok(IBV_QP_STATE | IBV_QP_SQ_PSN)
        }
        (IBV_QPS_RTR, Some(parameters)) => Ok(ready_to_receive(attr, &parameters)),
        (IBV_QPS_RTS, Some(parameters)) => Ok(ready_to_send(attr, &parameters)),
        _ => Err(libc::EINVAL),
    }
}

/// Access rights of the peer: WRITE; READ and atomics if it may have any outstanding.
fn rights(parameters: &Parameters) -> u32 {
    match parameters.responder_resources {
        0 => IBV_ACCESS_REMOTE_WRITE,
        _ => IBV_ACCESS_REMOTE_WRITE | IBV_ACCESS_REMOTE_READ | IBV_ACCESS_REMOTE_ATOMIC,
    }
}

fn ready_to_receive(attr: &mut ibv_qp_attr, parameters: &Parameters) -> u32 {
    attr.ah_attr = address_vector(&parameters.path);
    attr.path_mtu = parameters.mtu as ibv_mtu;
    attr.dest_qp_num = parameters.dest_qpn.get();
    attr.rq_psn = parameters.rq_psn.get();
    let mask = IBV_QP_STATE | IBV_QP_AV | IBV_QP_PATH_MTU | IBV_QP_DEST_QPN | IBV_QP_RQ_PSN;
    if parameters.transport != Transport::Rc {
        return mask;
    }
    attr.max_dest_rd_atomic = parameters.responder_resources;
    // 655 ms (rdma_connect(3)).
    attr.min_rnr_timer = 0;
    mask | IBV_QP_MAX_DEST_RD_ATOMIC | IBV_QP_MIN_RNR_TIMER
}

fn ready_to_send(attr: &mut ibv_qp_attr, parameters: &Parameters) -> u32 {
    attr.sq_psn = parameters.sq_psn.get();
    let mask = IBV_QP_STATE | IBV_QP_SQ_PSN;
    if parameters.transport != Transport::Rc {
        return mask;
    }
    attr.timeout = parameters.ack_timeout;
    attr.retry_cnt = parameters.retry_count;
    attr.rnr_retry = parameters.rnr_retry_count;
    attr.max_rd_atomic = parameters.initiator_depth;
    mask | IBV_QP_TIMEOUT | IBV_QP_RETRY_CNT | IBV_QP_RNR_RETRY | IBV_QP_MAX_QP_RD_ATOMIC
}

pub(crate) fn address_vector(path: &Path) -> ibv_ah_attr {
    ibv_ah_attr {
        grh: ibv_global_route {
            dgid: ibv_gid {
                raw: Gid::from(path.remote).0,
            },
            flow_label: 0,
            sgid_index: routable_index(path.local),
            hop_limit: path.hop_limit,
            traffic_class: path.traffic_class,
        },
        dlid: 0,
        sl: 0,
        src_path_bits: 0,
        static_rate: 0,
        is_global: 1,
        port_num: PORT,
    }
}
