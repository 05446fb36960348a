//! Shared receive queues: create, modify, query, destroy.

use core::ffi::c_int;
use std::mem::MaybeUninit;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};

use doorbell_softroce::{Event, EventOwner, EventQueue, Srq, SrqConfig, XrcSrqConfig};
use doorbell_verbs_sys::{
    IBV_SRQ_INIT_ATTR_CQ, IBV_SRQ_INIT_ATTR_PD, IBV_SRQ_INIT_ATTR_TYPE, IBV_SRQ_INIT_ATTR_XRCD, IBV_SRQ_LIMIT,
    IBV_SRQ_MAX_WR, IBV_SRQT_BASIC, IBV_SRQT_XRC, ibv_context, ibv_pd, ibv_srq, ibv_srq_attr, ibv_srq_init_attr,
    ibv_srq_init_attr_ex,
};

use crate::completion::SoftCq;
use crate::context::{Context, await_acknowledged, next_handle};
use crate::domain::SoftPd;
use crate::event::token_of;
use crate::protection::errno_of_limit;
use crate::{errno, xrc};

#[repr(C)]
pub(crate) struct SoftSrq {
    base: ibv_srq,
    srq: Srq,
    events: Arc<EventQueue<Event>>,
    /// Asynchronous events reported to the application.
    pub(crate) async_events: AtomicU32,
}

impl SoftSrq {
    /// Not a reference to the whole: other threads may write `base` (its acknowledged events).
    ///
    /// # Safety
    /// `srq` came from [`create_srq`] and was not destroyed; the reference is not used after it is.
    pub(crate) unsafe fn handle<'a>(srq: *mut ibv_srq) -> &'a Srq {
        // SAFETY: ours by contract, `base` first; written at creation and destruction only.
        unsafe { &(*srq.cast::<Self>()).srq }
    }
}

pub(crate) unsafe extern "C" fn create_srq(pd: *mut ibv_pd, init: *mut ibv_srq_init_attr) -> *mut ibv_srq {
    // SAFETY: the same contract.
    unsafe { create(pd, &*init, None) }
}

/// The limit is not armed, whatever `srq_limit` is (man page).
///
/// # Safety
/// `pd` is live and ours.
unsafe fn create(pd: *mut ibv_pd, init: &ibv_srq_init_attr, xrc: Option<XrcSrqConfig>) -> *mut ibv_srq {
    // SAFETY: by contract.
    let soft_pd = unsafe { &*pd.cast::<SoftPd>() };
    // SAFETY: a live PD has a live context.
    let context = unsafe { (*pd).context };
    // SAFETY: as above.
    let events = &unsafe { Context::from_ptr(context) }.events;
    // Its address is its event token, so it is allocated before the queue is created.
    let allocation = Box::into_raw(Box::<SoftSrq>::new_uninit()).cast::<SoftSrq>();
    let config = SrqConfig {
        max_wr: init.attr.max_wr,
        max_sge: init.attr.max_sge,
        xrc,
    };
    let owner = EventOwner {
        queue: Arc::clone(events),
        token: token_of(allocation),
    };
    let srq = match soft_pd.pd.shared_receive_queue(config, owner) {
        Ok(srq) => srq,
        Err(error) => {
            tracing::debug!("ibv_create_srq: {error}");
            // SAFETY: just taken from that Box, and uninitialised.
            drop(unsafe { Box::from_raw(allocation.cast::<MaybeUninit<SoftSrq>>()) });
            return errno::null(errno_of_limit(error));
        }
    };
    let soft = SoftSrq {
        base: ibv_srq {
            context,
            srq_context: init.srq_context,
            pd,
            handle: next_handle(),
            mutex: libc::PTHREAD_MUTEX_INITIALIZER,
            cond: libc::PTHREAD_COND_INITIALIZER,
            events_completed: 0,
        },
        srq,
        events: Arc::clone(events),
        async_events: AtomicU32::new(0),
    };
    // SAFETY: just allocated for it.
    unsafe { allocation.write(soft) };
    // `init.attr` is unchanged: the queue has exactly the requested size.
    allocation.cast()
}

/// ibv_create_srq_ex(3), for the basic and the XRC type.
pub(crate) unsafe extern "C" fn create_srq_ex(
    _context: *mut ibv_context,
    init: *mut ibv_srq_init_attr_ex,
) -> *mut ibv_srq {
    // SAFETY: live by contract.
    let init = unsafe { &*init };
    let given = |bit| init.comp_mask & bit != 0;
    let of_type = if given(IBV_SRQ_INIT_ATTR_TYPE) {
        init.srq_type
    } else {
        IBV_SRQT_BASIC
    };
    let needed = match of_type {
        IBV_SRQT_BASIC => IBV_SRQ_INIT_ATTR_PD,
        IBV_SRQT_XRC => IBV_SRQ_INIT_ATTR_PD | IBV_SRQ_INIT_ATTR_XRCD | IBV_SRQ_INIT_ATTR_CQ,
        _ => return errno::null(libc::EOPNOTSUPP),
    };
    if init.comp_mask & !(IBV_SRQ_INIT_ATTR_TYPE | needed) != 0 {
        return errno::null(libc::EOPNOTSUPP);
    }
    if init.comp_mask & needed != needed {
        return errno::null(libc::EINVAL);
    }
    let xrc = if of_type == IBV_SRQT_XRC {
        // SAFETY: the mask says that both are given, so they are live and ours by contract.
        match unsafe { (SoftCq::handle(init.cq), xrc::handle(init.xrcd)) } {
            (Some(cq), xrcd) => Some(XrcSrqConfig {
                xrcd: xrcd.clone(),
                cq: cq.clone(),
            }),
            (None, _) => return errno::null(libc::EINVAL),
        }
    } else {
        None
    };
    let classic = ibv_srq_init_attr {
        srq_context: init.srq_context,
        attr: init.attr,
    };
    // SAFETY: the mask says that the domain is given, so it is live and ours by contract.
    unsafe { create(init.pd, &classic, xrc) }
}

pub(crate) unsafe extern "C" fn modify_srq(srq: *mut ibv_srq, attr: *mut ibv_srq_attr, mask: c_int) -> c_int {
    let mask = mask as u32;
    if mask & !(IBV_SRQ_MAX_WR | IBV_SRQ_LIMIT) != 0 {
        return libc::EINVAL;
    }
    // SAFETY: both are live and `srq` ours by contract.
    let (soft, attr) = unsafe { (SoftSrq::handle(srq), &*attr) };
    let max_wr = (mask & IBV_SRQ_MAX_WR != 0).then_some(attr.max_wr);
    let limit = (mask & IBV_SRQ_LIMIT != 0).then_some(attr.srq_limit);
    match soft.modify(max_wr, limit) {
        Ok(()) => 0,
        Err(refused) => {
            tracing::debug!("ibv_modify_srq: {refused:?}");
            libc::EINVAL
        }
    }
}

pub(crate) unsafe extern "C" fn query_srq(srq: *mut ibv_srq, attr: *mut ibv_srq_attr) -> c_int {
    // SAFETY: `srq` is live and ours by contract.
    let Some(found) = unsafe { SoftSrq::handle(srq) }.query() else {
        return libc::EINVAL;
    };
    // SAFETY: writable by contract (man page).
    unsafe {
        attr.write(ibv_srq_attr {
            max_wr: found.max_wr,
            max_sge: found.max_sge,
            srq_limit: found.limit,
        });
    }
    0
}

/// `EBUSY` while queue pairs use it; waits until its events are acknowledged.
pub(crate) unsafe extern "C" fn destroy_srq(srq: *mut ibv_srq) -> c_int {
    let soft = srq.cast::<SoftSrq>();
    let token = token_of(soft);
    // SAFETY: `srq` is live and ours by contract.
    if unsafe { SoftSrq::handle(srq) }.is_shared() {
        return libc::EBUSY;
    }
    // SAFETY: it is still live, and the mutex and condition were initialised with it. No queue pair
    // uses it and no thread arms its limit, so no new event is reported.
    unsafe {
        (*soft).events.remove(|event| *event == Event::SrqLimit(token));
        let wanted = (*soft).async_events.load(Ordering::Relaxed);
        let (mutex, cond) = (&raw mut (*srq).mutex, &raw mut (*srq).cond);
        await_acknowledged(mutex, cond, &raw const (*srq).events_completed, wanted);
    }
    // SAFETY: it came from a Box in `create_srq`, and nothing waits for it any more.
    drop(unsafe { Box::from_raw(soft) });
    0
}
