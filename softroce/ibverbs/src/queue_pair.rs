//! Queue pairs: creating, changing, querying and destroying them.

use core::ffi::c_int;
use std::mem::{ManuallyDrop, MaybeUninit};
use std::ptr;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};

use doorbell_roce_proto::wire::Transport;
use doorbell_softroce::{CreateQpError, Event, EventQueue, Owner, Qp, QpConfig, Token};
use doorbell_verbs_sys::{
    IBV_QP_STATE, IBV_QPS_RESET, IBV_QPT_RC, IBV_QPT_UC, IBV_QPT_UD, ibv_pd, ibv_qp, ibv_qp_attr, ibv_qp_init_attr,
};

use crate::completion::SoftCq;
use crate::context::{Context, await_acknowledged, next_handle};
use crate::protection::SoftPd;
use crate::shared_receive::SoftSrq;
use crate::{attributes, errno};

/// A queue pair: what C sees, and what it stands for.
#[repr(C)]
pub(crate) struct SoftQp {
    base: ibv_qp,
    /// Dropped before the rest, which must stay in place until the last event is acknowledged.
    pub(crate) qp: ManuallyDrop<Qp>,
    /// Sends name their destination.
    is_datagram: bool,
    /// The context's events, to take ours out of.
    events: Arc<EventQueue<Event>>,
    /// Asynchronous events handed to the application.
    async_events: AtomicU32,
}

impl SoftQp {
    /// The queue pair behind C's pointer. Not a reference to the whole: other threads may write `base` meanwhile (its state, its acknowledged events).
    ///
    /// # Safety
    /// `qp` came from [`create_qp`] and was not destroyed; the reference is not used after it is.
    pub(crate) unsafe fn handle<'a>(qp: *mut ibv_qp) -> &'a Qp {
        // SAFETY: ours by contract, `base` being its first member; the handle is written at creation and destruction only.
        unsafe { &(*qp.cast::<Self>()).qp }
    }

    /// Whether its sends name their destination.
    ///
    /// # Safety
    /// As for [`handle`](Self::handle).
    pub(crate) unsafe fn is_datagram(qp: *mut ibv_qp) -> bool {
        // SAFETY: ours by contract; the field is written at creation only.
        unsafe { (*qp.cast::<Self>()).is_datagram }
    }
}

/// A queue pair's name in events: its address.
fn token_of(qp: *mut SoftQp) -> Token {
    qp.expose_provenance() as Token
}

fn from_token(token: Token) -> *mut SoftQp {
    // It came from a pointer of this process.
    ptr::with_exposed_provenance_mut(token as usize)
}

/// Counts an asynchronous event handed to the application.
///
/// # Safety
/// The event was just taken from the context's queue of events, under its lock.
pub(crate) unsafe fn count_async_event(token: Token) {
    // SAFETY: live: destroying it takes its events out first.
    unsafe { &(*from_token(token)).async_events }.fetch_add(1, Ordering::Relaxed);
}

/// The queue pair that an event names, as C sees it.
pub(crate) fn of_event(token: Token) -> *mut ibv_qp {
    from_token(token).cast()
}

/// ibv_create_qp(3).
pub(crate) unsafe extern "C" fn create_qp(pd: *mut ibv_pd, init: *mut ibv_qp_init_attr) -> *mut ibv_qp {
    // SAFETY: both are live by contract.
    let (soft_pd, attr) = unsafe { (&*pd.cast::<SoftPd>(), &*init) };
    let transport = match attr.qp_type {
        IBV_QPT_RC => Transport::Rc,
        IBV_QPT_UC => Transport::Uc,
        IBV_QPT_UD => Transport::Ud,
        _ => return errno::null(libc::EOPNOTSUPP),
    };
    // SAFETY: the completion queues are live and ours by contract, or null.
    let cqs = unsafe { (SoftCq::handle(attr.send_cq), SoftCq::handle(attr.recv_cq)) };
    let (Some(send_cq), Some(recv_cq)) = cqs else {
        return errno::null(libc::EINVAL);
    };
    // SAFETY: a shared receive queue that is given is live and ours by contract.
    let srq = (!attr.srq.is_null()).then(|| unsafe { SoftSrq::handle(attr.srq) });
    let config = QpConfig {
        send_cq: send_cq.clone(),
        recv_cq: recv_cq.clone(),
        max_send_wr: attr.cap.max_send_wr,
        max_recv_wr: attr.cap.max_recv_wr,
        max_send_sge: attr.cap.max_send_sge,
        max_recv_sge: attr.cap.max_recv_sge,
        max_inline: attr.cap.max_inline_data,
        signal_all: attr.sq_sig_all != 0,
        transport,
        srq: srq.cloned(),
    };
    // SAFETY: a live PD has a live context.
    let context = unsafe { (*pd).context };
    // SAFETY: as above.
    let events = &unsafe { Context::from_ptr(context) }.events;
    // Its address is its name in events, so that it exists before the queue pair does.
    let place = Box::into_raw(Box::<SoftQp>::new_uninit()).cast::<SoftQp>();
    let owner = Owner {
        queue: Arc::clone(events),
        token: token_of(place),
    };
    let qp = match soft_pd.pd.queue_pair(&config, owner) {
        Ok(qp) => qp,
        Err(error) => {
            tracing::debug!("ibv_create_qp: {error}");
            // SAFETY: just taken from that Box, and never filled.
            drop(unsafe { Box::from_raw(place.cast::<MaybeUninit<SoftQp>>()) });
            return errno::null(match error {
                CreateQpError::Size | CreateQpError::OtherDevice => libc::EINVAL,
                CreateQpError::Exhausted => libc::ENOMEM,
            });
        }
    };
    let soft = SoftQp {
        base: ibv_qp {
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
        },
        qp: ManuallyDrop::new(qp),
        is_datagram: transport == Transport::Ud,
        events: Arc::clone(events),
        async_events: AtomicU32::new(0),
    };
    // SAFETY: just allocated for it.
    unsafe { place.write(soft) };
    // `init.cap` stays as it is: the queues are as large as asked for.
    place.cast()
}

/// ibv_modify_qp(3).
pub(crate) unsafe extern "C" fn modify_qp(qp: *mut ibv_qp, attr: *mut ibv_qp_attr, mask: c_int) -> c_int {
    let mask = mask as u32;
    // SAFETY: both are live and `qp` ours by contract.
    let (soft, attr) = unsafe { (SoftQp::handle(qp), &*attr) };
    let modify = match attributes::to_modify(attr, mask, soft.device().info()) {
        Ok(modify) => modify,
        Err(refused) => {
            tracing::debug!("ibv_modify_qp: {refused}");
            return libc::EINVAL;
        }
    };
    if let Err(refused) = soft.modify(&modify) {
        tracing::debug!("ibv_modify_qp: {refused:?}");
        return libc::EINVAL;
    }
    if mask & IBV_QP_STATE != 0 {
        let state = attr.qp_state;
        // SAFETY: live; the library writes it in this call only, which the caller does not make twice at the same time for one queue pair.
        unsafe { (*qp).state = state };
    }
    0
}

/// ibv_query_qp(3).
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
    // SAFETY: all three are the caller's to write or ours (man page).
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

/// ibv_create_qp(3): waits until its events are acknowledged (ibv_get_async_event(3)).
pub(crate) unsafe extern "C" fn destroy_qp(qp: *mut ibv_qp) -> c_int {
    let soft = qp.cast::<SoftQp>();
    let token = token_of(soft);
    // SAFETY: `qp` is live and ours by contract, given up by the caller, and nothing uses the handle after this.
    unsafe { ManuallyDrop::drop(&mut (*soft).qp) };
    // From here on the device knows it no more: no new event comes.
    // SAFETY: the rest of it is live still; the mutex and condition were initialised with it.
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
