//! Queue pairs: create, modify, query, destroy.

use core::ffi::c_int;
use std::mem::{ManuallyDrop, MaybeUninit};
use std::ptr;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};

use doorbell_roce_proto::wire::Transport;
use doorbell_softroce::{CreateQpError, Event, EventOwner, EventQueue, ModifyQpError, Qp, QpConfig};
use doorbell_verbs_sys::{
    IBV_QP_CREATE_BLOCK_SELF_MCAST_LB, IBV_QP_CREATE_PCI_WRITE_END_PADDING, IBV_QP_INIT_ATTR_CREATE_FLAGS,
    IBV_QP_INIT_ATTR_IND_TABLE, IBV_QP_INIT_ATTR_MAX_TSO_HEADER, IBV_QP_INIT_ATTR_PD, IBV_QP_INIT_ATTR_RX_HASH,
    IBV_QP_INIT_ATTR_SEND_OPS_FLAGS, IBV_QP_INIT_ATTR_XRCD, IBV_QP_STATE, IBV_QPS_RESET, IBV_QPT_RC, IBV_QPT_UC,
    IBV_QPT_UD, IBV_QPT_XRC_RECV, IBV_QPT_XRC_SEND, ibv_context, ibv_pd, ibv_qp, ibv_qp_attr, ibv_qp_ex,
    ibv_qp_init_attr, ibv_qp_init_attr_ex,
};

use crate::completion::SoftCq;
use crate::context::{Context, await_acknowledged, next_handle};
use crate::domain::SoftPd;
use crate::event::token_of;
use crate::placement::ExtendedQp;
use crate::shared_receive::SoftSrq;
use crate::wr::{self, Stage};
use crate::{attributes, errno, xrc};

#[repr(C)]
pub(crate) struct SoftQp {
    base: ExtendedQp,
    stage: Option<Stage>,
    /// Dropped before the rest, which must stay allocated until the last event is acknowledged.
    pub(crate) qp: ManuallyDrop<Qp>,
    transport: Transport,
    /// Created with IBV_QP_CREATE_BLOCK_SELF_MCAST_LB.
    blocks_own_multicast: bool,
    events: Arc<EventQueue<Event>>,
    /// Asynchronous events reported to the application.
    pub(crate) async_events: AtomicU32,
}

impl SoftQp {
    /// Not a reference to the whole: other threads may write `base` (state, acknowledged events).
    ///
    /// # Safety
    /// `qp` came from [`create_qp`] and was not destroyed; the reference is not used after it is.
    pub(crate) unsafe fn handle<'a>(qp: *mut ibv_qp) -> &'a Qp {
        // SAFETY: ours by contract, `base` first; written at creation and destruction only.
        unsafe { &(*qp.cast::<Self>()).qp }
    }

    /// # Safety
    /// As for [`handle`](Self::handle).
    pub(crate) unsafe fn stage<'a>(qp: *mut ibv_qp_ex) -> Option<&'a Stage> {
        // SAFETY: ours by contract, `base` first; written at creation and destruction only.
        unsafe { (*qp.cast::<Self>()).stage.as_ref() }
    }

    /// # Safety
    /// As for [`handle`](Self::handle).
    pub(crate) unsafe fn transport(qp: *mut ibv_qp) -> Transport {
        // SAFETY: ours by contract; the field is written at creation only.
        unsafe { (*qp.cast::<Self>()).transport }
    }

    /// # Safety
    /// As for [`handle`](Self::handle).
    pub(crate) unsafe fn blocks_own_multicast(qp: *mut ibv_qp) -> bool {
        // SAFETY: as in `transport`.
        unsafe { (*qp.cast::<Self>()).blocks_own_multicast }
    }
}

pub(crate) unsafe extern "C" fn create_qp(pd: *mut ibv_pd, init: *mut ibv_qp_init_attr) -> *mut ibv_qp {
    // SAFETY: the same contract.
    unsafe { create(pd, &*init, None, 0) }
}

/// `EOPNOTSUPP` for known features that the device lacks (TSO, hashing), else `EINVAL`.
pub(crate) unsafe extern "C" fn create_qp_ex(context: *mut ibv_context, init: *mut ibv_qp_init_attr_ex) -> *mut ibv_qp {
    const KNOWN: u32 = IBV_QP_INIT_ATTR_PD
        | IBV_QP_INIT_ATTR_XRCD
        | IBV_QP_INIT_ATTR_CREATE_FLAGS
        | IBV_QP_INIT_ATTR_SEND_OPS_FLAGS
        | IBV_QP_INIT_ATTR_MAX_TSO_HEADER
        | IBV_QP_INIT_ATTR_IND_TABLE
        | IBV_QP_INIT_ATTR_RX_HASH;
    // The second has no effect here: there is no bus to pad for.
    const FLAGS: u32 = IBV_QP_CREATE_BLOCK_SELF_MCAST_LB | IBV_QP_CREATE_PCI_WRITE_END_PADDING;
    // SAFETY: live by contract.
    let attr = unsafe { &*init };
    let given = |bit| attr.comp_mask & bit != 0;
    let is_target = attr.qp_type == IBV_QPT_XRC_RECV;
    let domain = if is_target {
        IBV_QP_INIT_ATTR_XRCD
    } else {
        IBV_QP_INIT_ATTR_PD
    };
    let is_of_this = || {
        // SAFETY: called if the mask says that the domain is given, so it is live by contract.
        let of = unsafe {
            if is_target {
                (*attr.xrcd).context
            } else {
                (*attr.pd).context
            }
        };
        of == context
    };
    if attr.comp_mask & !KNOWN != 0 || !given(domain) || !is_of_this() {
        return errno::null(libc::EINVAL);
    }
    let supported = domain | IBV_QP_INIT_ATTR_CREATE_FLAGS | IBV_QP_INIT_ATTR_SEND_OPS_FLAGS;
    let flags = if given(IBV_QP_INIT_ATTR_CREATE_FLAGS) {
        attr.create_flags
    } else {
        0
    };
    if attr.comp_mask & !supported != 0 || flags & !FLAGS != 0 {
        return errno::null(libc::EOPNOTSUPP);
    }
    let operations = given(IBV_QP_INIT_ATTR_SEND_OPS_FLAGS).then_some(attr.send_ops_flags);
    let mut classic = ibv_qp_init_attr {
        qp_context: attr.qp_context,
        send_cq: attr.send_cq,
        recv_cq: attr.recv_cq,
        srq: attr.srq,
        cap: attr.cap,
        qp_type: attr.qp_type,
        sq_sig_all: attr.sq_sig_all,
    };
    if !is_target {
        // SAFETY: the same contract.
        return unsafe { create(attr.pd, &classic, operations, flags) };
    }
    (classic.send_cq, classic.recv_cq, classic.srq) = (ptr::null_mut(), ptr::null_mut(), ptr::null_mut());
    // SAFETY: live and ours by contract.
    let xrcd = unsafe { xrc::handle(attr.xrcd) };
    let parts = QpParts {
        context,
        pd: ptr::null_mut(),
        attr: &classic,
        transport: Transport::Xrc,
        operations: None,
        blocks_own_multicast: false,
    };
    // SAFETY: live by contract.
    unsafe { finish(&parts, |owner| xrcd.target(owner)) }
}

/// Null for a queue pair that was created without send operations (ibv_wr_post(3)).
pub(crate) unsafe extern "C" fn qp_to_qp_ex(qp: *mut ibv_qp) -> *mut ibv_qp_ex {
    let extended = qp.cast::<ibv_qp_ex>();
    // SAFETY: live and ours by contract.
    match unsafe { SoftQp::stage(extended) } {
        Some(_) => extended,
        None => ptr::null_mut(),
    }
}

/// # Safety
/// `pd` is live and ours, as are the completion queues of `attr`, unless they are null.
unsafe fn create(pd: *mut ibv_pd, attr: &ibv_qp_init_attr, operations: Option<u64>, create_flags: u32) -> *mut ibv_qp {
    // SAFETY: live by contract.
    let soft_pd = unsafe { &*pd.cast::<SoftPd>() };
    let transport = match attr.qp_type {
        IBV_QPT_RC => Transport::Rc,
        IBV_QPT_UC => Transport::Uc,
        IBV_QPT_UD => Transport::Ud,
        IBV_QPT_XRC_SEND => Transport::Xrc,
        _ => return errno::null(libc::EOPNOTSUPP),
    };
    if operations.is_some_and(|requested| requested & !wr::operations_of(transport) != 0) {
        return errno::null(libc::EOPNOTSUPP);
    }
    // An XRC initiator has no receives.
    let sends_only = transport == Transport::Xrc;
    let recv_cq = if sends_only { attr.send_cq } else { attr.recv_cq };
    // SAFETY: the completion queues are live and ours by contract, or null.
    let cqs = unsafe { (SoftCq::handle(attr.send_cq), SoftCq::handle(recv_cq)) };
    let (Some(send_cq), Some(recv_cq)) = cqs else {
        return errno::null(libc::EINVAL);
    };
    // SAFETY: a shared receive queue that is given is live and ours by contract.
    let srq = (!attr.srq.is_null()).then(|| unsafe { SoftSrq::handle(attr.srq) });
    // An XRC queue is reached by its number alone.
    if srq.is_some_and(|srq| sends_only || srq.xrc_number().is_some()) {
        return errno::null(libc::EINVAL);
    }
    let received = |size| if sends_only { 0 } else { size };
    let config = QpConfig {
        send_cq: send_cq.clone(),
        recv_cq: recv_cq.clone(),
        max_send_wr: attr.cap.max_send_wr,
        max_recv_wr: received(attr.cap.max_recv_wr),
        max_send_sge: attr.cap.max_send_sge,
        max_recv_sge: received(attr.cap.max_recv_sge),
        max_inline: attr.cap.max_inline_data,
        signal_all: attr.sq_sig_all != 0,
        transport,
        srq: srq.cloned(),
    };
    let parts = QpParts {
        // SAFETY: a live PD has a live context.
        context: unsafe { (*pd).context },
        pd,
        attr,
        transport,
        operations,
        blocks_own_multicast: create_flags & IBV_QP_CREATE_BLOCK_SELF_MCAST_LB != 0,
    };
    // SAFETY: as above.
    unsafe { finish(&parts, |owner| soft_pd.pd.queue_pair(&config, owner)) }
}

struct QpParts<'a> {
    context: *mut ibv_context,
    /// Null for an XRC target.
    pd: *mut ibv_pd,
    attr: &'a ibv_qp_init_attr,
    transport: Transport,
    operations: Option<u64>,
    blocks_own_multicast: bool,
}

/// Around the queue pair that `make` creates.
///
/// # Safety
/// The context is live and ours.
unsafe fn finish(parts: &QpParts<'_>, make: impl FnOnce(EventOwner) -> Result<Qp, CreateQpError>) -> *mut ibv_qp {
    let &QpParts {
        context,
        pd,
        attr,
        transport,
        operations,
        blocks_own_multicast,
    } = parts;
    // SAFETY: by contract.
    let events = &unsafe { Context::from_ptr(context) }.events;
    // Its address is its event token, so it is allocated before the queue pair is created.
    let allocation = Box::into_raw(Box::<SoftQp>::new_uninit()).cast::<SoftQp>();
    let owner = EventOwner {
        queue: Arc::clone(events),
        token: token_of(allocation),
    };
    let qp = match make(owner) {
        Ok(qp) => qp,
        Err(error) => {
            tracing::debug!("ibv_create_qp: {error}");
            // SAFETY: just taken from that Box, and uninitialised.
            drop(unsafe { Box::from_raw(allocation.cast::<MaybeUninit<SoftQp>>()) });
            return errno::null(match error {
                CreateQpError::Size | CreateQpError::OtherDevice => libc::EINVAL,
                CreateQpError::Exhausted => libc::ENOMEM,
            });
        }
    };
    let qp_base = ibv_qp {
        context,
        qp_context: attr.qp_context,
        pd,
        send_cq: attr.send_cq,
        recv_cq: attr.recv_cq,
        srq: attr.srq,
        handle: next_handle(),
        qp_num: qp.number().get(),
        state: IBV_QPS_RESET,
        qp_type: attr.qp_type,
        mutex: libc::PTHREAD_MUTEX_INITIALIZER,
        cond: libc::PTHREAD_COND_INITIALIZER,
        events_completed: 0,
    };
    let soft = SoftQp {
        base: wr::with_calls(qp_base, operations, transport),
        stage: operations.map(|_| Stage::new(&attr.cap, transport)),
        qp: ManuallyDrop::new(qp),
        transport,
        blocks_own_multicast,
        events: Arc::clone(events),
        async_events: AtomicU32::new(0),
    };
    // SAFETY: just allocated for it.
    unsafe { allocation.write(soft) };
    // `init.cap` is unchanged: the queues have exactly the requested sizes.
    allocation.cast()
}

pub(crate) unsafe extern "C" fn modify_qp(qp: *mut ibv_qp, attr: *mut ibv_qp_attr, mask: c_int) -> c_int {
    let mask = mask as u32;
    // SAFETY: both are live and `qp` ours by contract.
    let (soft, attr) = unsafe { (SoftQp::handle(qp), &*attr) };
    let modify = match attributes::to_modify(attr, mask, soft.device()) {
        Ok(modify) => modify,
        Err(refused) => {
            tracing::debug!("ibv_modify_qp: {refused}");
            return libc::EINVAL;
        }
    };
    if let Err(refused) = soft.modify(&modify) {
        tracing::debug!("ibv_modify_qp: {refused:?}");
        return match refused {
            ModifyQpError::Invalid(_) => libc::EINVAL,
            ModifyQpError::Link(error) => errno::of(&error),
        };
    }
    if mask & IBV_QP_STATE != 0 {
        let state = attr.qp_state;
        // SAFETY: live; written in this call only, which is not concurrent for one queue pair.
        unsafe { (*qp).state = state };
    }
    0
}

pub(crate) unsafe extern "C" fn query_qp(
    qp: *mut ibv_qp,
    attr: *mut ibv_qp_attr,
    _mask: c_int,
    init: *mut ibv_qp_init_attr,
) -> c_int {
    // SAFETY: `qp` is live and ours by contract.
    let soft = unsafe { SoftQp::handle(qp) };
    let Some(found) = soft.query() else {
        return libc::EINVAL;
    };
    let queried = attributes::to_attr(&found);
    // SAFETY: all three are writable by contract (man page) or ours.
    unsafe {
        init.write(ibv_qp_init_attr {
            qp_context: (*qp).qp_context,
            send_cq: (*qp).send_cq,
            recv_cq: (*qp).recv_cq,
            srq: (*qp).srq,
            cap: queried.cap,
            qp_type: (*qp).qp_type,
            sq_sig_all: c_int::from(found.init.signal_all),
        });
        (*qp).state = queried.qp_state;
        attr.write(queried);
    }
    0
}

/// Waits until its events are acknowledged (ibv_get_async_event(3)). `EBUSY` while it is attached
/// to a multicast group.
pub(crate) unsafe extern "C" fn destroy_qp(qp: *mut ibv_qp) -> c_int {
    // SAFETY: live and ours by contract.
    if unsafe { SoftQp::transport(qp) == Transport::Ud && SoftQp::handle(qp).is_attached() } {
        return libc::EBUSY;
    }
    let soft = qp.cast::<SoftQp>();
    let token = token_of(soft);
    // SAFETY: live and ours; the caller gives up ownership, and nothing uses the handle after this.
    unsafe { ManuallyDrop::drop(&mut (*soft).qp) };
    // From here on the device does not know it: no new event is reported. SAFETY: the rest of it is
    // still live; the mutex and condition were initialised with it.
    unsafe {
        (*soft)
            .events
            .remove(|event| matches!(event, Event::Qp(name, _) if *name == token));
        let wanted = (*soft).async_events.load(Ordering::Relaxed);
        let (mutex, cond) = (&raw mut (*qp).mutex, &raw mut (*qp).cond);
        await_acknowledged(mutex, cond, &raw const (*qp).events_completed, wanted);
    }
    // SAFETY: it came from a Box in `create_qp`, and nothing waits for it any more.
    drop(unsafe { Box::from_raw(soft) });
    0
}
