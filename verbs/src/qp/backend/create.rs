//! Creating a queue pair by ibv_create_qp(3) or ibv_create_qp_ex(3).

use std::io;

use doorbell_verbs_sys::{self as sys, work_requests};

use crate::error::QueuePairError;
use crate::pd::ProtectionDomain;
use crate::qp::transport::TransportKind;

pub(super) fn create_qp(
    pd: &ProtectionDomain,
    init: &mut sys::ibv_qp_init_attr,
) -> Result<*mut sys::ibv_qp, QueuePairError> {
    let pd = pd.inner();
    // SAFETY: the domain is live, and so are the completion queues that `init` names.
    let raw = unsafe { (pd.context.api.create_qp)(pd.raw, init) };
    if raw.is_null() {
        return Err(QueuePairError::Create {
            device: pd.context.name.clone(),
            error: io::Error::last_os_error(),
        });
    }
    Ok(raw)
}

pub(super) fn create_qp_ex(
    pd: &ProtectionDomain,
    transport: TransportKind,
    init: &mut sys::ibv_qp_init_attr,
) -> Result<*mut sys::ibv_qp, QueuePairError> {
    let pd = pd.inner();
    let context = &pd.context;
    let lacking = |reason: &str| QueuePairError::NoWrPost {
        device: context.name.clone(),
        transport,
        reason: reason.to_owned(),
    };
    let Some(to_extended) = context.api.qp_to_qp_ex else {
        return Err(lacking("the library has no ibv_qp_to_qp_ex"));
    };
    // SAFETY: all-zero is a valid value of this struct of integers and nullable pointers.
    let mut attr: sys::ibv_qp_init_attr_ex = unsafe { core::mem::zeroed() };
    attr.qp_context = init.qp_context;
    attr.send_cq = init.send_cq;
    attr.recv_cq = init.recv_cq;
    attr.srq = init.srq;
    attr.cap = init.cap;
    attr.qp_type = init.qp_type;
    attr.sq_sig_all = init.sq_sig_all;
    attr.comp_mask = sys::IBV_QP_INIT_ATTR_PD | sys::IBV_QP_INIT_ATTR_SEND_OPS_FLAGS;
    attr.pd = pd.raw;
    let needed = send_ops_flags(transport, context.attr.atomics);
    let mut raw = core::ptr::null_mut();
    // Windows are checked when used, as atomics are: a provider without them gets a second request.
    let windows = transport == TransportKind::Rc && context.attr.windows.type_2;
    for more in [WINDOWS, 0].into_iter().filter(|&more| windows || more == 0) {
        attr.send_ops_flags = (needed | more).into();
        // SAFETY: as in `plain`.
        raw = unsafe { work_requests::create_qp_ex(context.raw, &mut attr) };
        if !raw.is_null() {
            break;
        }
    }
    if raw.is_null() {
        let error = io::Error::last_os_error();
        return Err(match error.kind() {
            io::ErrorKind::Unsupported => lacking(&format!("ibv_create_qp_ex: {error}")),
            _ => QueuePairError::Create {
                device: context.name.clone(),
                error,
            },
        });
    }
    init.cap = attr.cap;
    // SAFETY: just made.
    let extended = unsafe { to_extended(raw) };
    // SAFETY: live, if it is not null.
    if extended.cast() == raw && unsafe { has_required_calls(&*extended, transport) } {
        return Ok(raw);
    }
    // SAFETY: just made, and nothing else refers to it.
    unsafe { (context.api.destroy_qp)(raw) };
    Err(lacking("the provider leaves some of the functions out"))
}

const WINDOWS: sys::ibv_qp_create_send_ops_flags =
    sys::IBV_QP_EX_WITH_BIND_MW | sys::IBV_QP_EX_WITH_LOCAL_INV | sys::IBV_QP_EX_WITH_SEND_WITH_INV;

fn send_ops_flags(transport: TransportKind, atomics: bool) -> sys::ibv_qp_create_send_ops_flags {
    let send = sys::IBV_QP_EX_WITH_SEND | sys::IBV_QP_EX_WITH_SEND_WITH_IMM;
    let write = sys::IBV_QP_EX_WITH_RDMA_WRITE | sys::IBV_QP_EX_WITH_RDMA_WRITE_WITH_IMM;
    let atomic = sys::IBV_QP_EX_WITH_ATOMIC_CMP_AND_SWP | sys::IBV_QP_EX_WITH_ATOMIC_FETCH_AND_ADD;
    match transport {
        TransportKind::Ud => send,
        TransportKind::Uc => send | write,
        TransportKind::Rc if atomics => send | write | sys::IBV_QP_EX_WITH_RDMA_READ | atomic,
        TransportKind::Rc => send | write | sys::IBV_QP_EX_WITH_RDMA_READ,
    }
}

/// Those of its transport; atomics and windows are checked when used.
fn has_required_calls(qp: &sys::ibv_qp_ex, transport: TransportKind) -> bool {
    let always = qp.wr_start.is_some()
        && qp.wr_complete.is_some()
        && qp.wr_abort.is_some()
        && qp.wr_send.is_some()
        && qp.wr_send_imm.is_some()
        && qp.wr_set_sge.is_some()
        && qp.wr_set_sge_list.is_some()
        && qp.wr_set_inline_data.is_some();
    let write = || qp.wr_rdma_write.is_some() && qp.wr_rdma_write_imm.is_some();
    always
        && match transport {
            TransportKind::Rc => write() && qp.wr_rdma_read.is_some(),
            TransportKind::Uc => write(),
            TransportKind::Ud => qp.wr_set_ud_addr.is_some(),
        }
}
