//! Completion queues and channels. No loom model: event counts are changed and read under the event
//! queue's lock; users of a channel and an open batch or poll, by the holder of a lock only.

use core::ffi::{c_int, c_uint, c_void};
use std::mem::MaybeUninit;
use std::os::fd::AsRawFd;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::Duration;

use doorbell_roce_proto::work::{Completion, CompletionOpcode, IpVersion, Status};
use doorbell_softroce::clock::TimestampClocks;
use doorbell_softroce::{Cq, CqConfig, CqNotify, Event, EventOwner, EventQueue, Pd, Token};
use doorbell_verbs_sys::*;

use crate::context::{Context, acknowledge, await_acknowledged, next_handle};
use crate::errno;
use crate::event::{from_token, token_of};
use crate::extended_cq::Poll;
use crate::placement::IBV_WC_FLUSH;
use crate::protection::errno_of_limit;

#[repr(C)]
struct SoftChannel {
    base: ibv_comp_channel,
    queue: Arc<EventQueue<Token>>,
    users: AtomicU32,
}

/// Laid out as an extended queue; only those created as such have its function pointers.
#[repr(C)]
pub(crate) struct SoftCq {
    base: ibv_cq_ex,
    pub(crate) cq: Cq,
    pub(crate) poll: Poll,
    events: Arc<EventQueue<Event>>,
    /// Events reported to the application.
    completion_events: AtomicU32,
    pub(crate) async_events: AtomicU32,
    _domain: Option<Pd>,
}

impl SoftCq {
    /// Not a reference to the whole: other threads may write `base` (its acknowledged events).
    ///
    /// # Safety
    /// `cq` is null, or came from [`create_cq`] and is not destroyed while the reference is used.
    pub(crate) unsafe fn handle<'a>(cq: *mut ibv_cq) -> Option<&'a Cq> {
        // SAFETY: ours if not null, `base` first; written at creation and destruction only.
        (!cq.is_null()).then(|| unsafe { &(*cq.cast::<Self>()).cq })
    }
}

pub(crate) unsafe extern "C" fn create_comp_channel(context: *mut ibv_context) -> *mut ibv_comp_channel {
    match EventQueue::new() {
        Ok(queue) => Box::into_raw(Box::new(SoftChannel {
            base: ibv_comp_channel {
                context,
                fd: queue.as_raw_fd(),
                refcnt: 0,
            },
            queue: Arc::new(queue),
            users: AtomicU32::new(0),
        }))
        .cast(),
        Err(error) => errno::null(errno::of(&error)),
    }
}

/// ibv_create_comp_channel(3): `EBUSY` while a completion queue uses it.
pub(crate) unsafe extern "C" fn destroy_comp_channel(channel: *mut ibv_comp_channel) -> c_int {
    let soft = channel.cast::<SoftChannel>();
    // SAFETY: `channel` is live and ours by contract.
    if unsafe { &*soft }.users.load(Ordering::Acquire) > 0 {
        return libc::EBUSY;
    }
    // SAFETY: it came from a Box in `create_comp_channel`, and the caller gives up ownership.
    drop(unsafe { Box::from_raw(soft) });
    0
}

pub(crate) unsafe extern "C" fn get_cq_event(
    channel: *mut ibv_comp_channel,
    cq: *mut *mut ibv_cq,
    cq_context: *mut *mut c_void,
) -> c_int {
    // SAFETY: `channel` is live and ours by contract.
    let soft = unsafe { &*channel.cast::<SoftChannel>() };
    let count = |token: &Token| {
        // SAFETY: an event's queue is live: destroying it removes its events first, which is
        // excluded while this runs.
        let events = unsafe { &(*from_token::<SoftCq>(*token)).completion_events };
        events.fetch_add(1, Ordering::Relaxed);
    };
    match soft.queue.wait(count) {
        Ok(token) => {
            let found: *mut SoftCq = from_token(token);
            // SAFETY: live until the event just counted is acknowledged; writable (man page).
            unsafe {
                *cq_context = (*found).base.cq_context;
                *cq = found.cast();
            }
            0
        }
        Err(error) => errno::minus_one(errno::of(&error)),
    }
}

pub(crate) unsafe extern "C" fn ack_cq_events(cq: *mut ibv_cq, count: c_uint) {
    // SAFETY: `cq` is live by contract, its mutex and condition were initialised with it.
    unsafe {
        acknowledge(
            &raw mut (*cq).mutex,
            &raw mut (*cq).cond,
            &raw mut (*cq).comp_events_completed,
            count,
        )
    };
}

pub(crate) unsafe extern "C" fn create_cq(
    context: *mut ibv_context,
    cqe: c_int,
    cq_context: *mut c_void,
    channel: *mut ibv_comp_channel,
    comp_vector: c_int,
) -> *mut ibv_cq {
    let params = CqParams {
        cqe,
        cq_context,
        channel,
        comp_vector,
        stamps: TimestampClocks::default(),
        single_threaded: false,
        domain: None,
    };
    // SAFETY: the same contract.
    unsafe { create(context, params) }
}

pub(crate) struct CqParams {
    pub(crate) cqe: c_int,
    pub(crate) cq_context: *mut c_void,
    pub(crate) channel: *mut ibv_comp_channel,
    pub(crate) comp_vector: c_int,
    pub(crate) stamps: TimestampClocks,
    pub(crate) single_threaded: bool,
    /// A parent domain, which the queue keeps allocated.
    pub(crate) domain: Option<Pd>,
}

/// # Safety
/// `context` is live, and so is the channel, unless it is null.
pub(crate) unsafe fn create(context: *mut ibv_context, params: CqParams) -> *mut ibv_cq {
    let CqParams { cqe, channel, .. } = params;
    // SAFETY: `context` is live by contract.
    let opened = unsafe { Context::from_ptr(context) };
    let (Ok(entries), 0) = (u32::try_from(cqe), params.comp_vector) else {
        return errno::null(libc::EINVAL);
    };
    // Its address is its event token, so it is allocated before the queue is created.
    let allocation = Box::into_raw(Box::<SoftCq>::new_uninit()).cast::<SoftCq>();
    let token = token_of(allocation);
    let owner = EventOwner {
        queue: Arc::clone(&opened.events),
        token,
    };
    // SAFETY: a channel that is given is live and ours by contract.
    let soft_channel = unsafe { channel.cast::<SoftChannel>().as_ref() };
    let notify = soft_channel.map(|channel| CqNotify {
        channel: Arc::clone(&channel.queue),
        token,
    });
    let config = CqConfig {
        entries,
        notify,
        timestamps: params.stamps,
    };
    let cq = match opened.device.completion_queue(config, owner) {
        Ok(cq) => cq,
        Err(error) => {
            // SAFETY: just taken from that Box, and uninitialised.
            drop(unsafe { Box::from_raw(allocation.cast::<MaybeUninit<SoftCq>>()) });
            return errno::null(errno_of_limit(error));
        }
    };
    if let Some(channel) = soft_channel {
        channel.users.fetch_add(1, Ordering::AcqRel);
    }
    // SAFETY: all-zero is a valid ibv_cq_ex: integers, null pointers and function pointers that are
    // `None`; the mutex and condition are set below.
    let mut base: ibv_cq_ex = unsafe { MaybeUninit::zeroed().assume_init() };
    base.context = context;
    base.channel = channel;
    base.cq_context = params.cq_context;
    base.handle = next_handle();
    base.cqe = cqe;
    base.mutex = libc::PTHREAD_MUTEX_INITIALIZER;
    base.cond = libc::PTHREAD_COND_INITIALIZER;
    let soft = SoftCq {
        base,
        cq,
        poll: Poll::new(params.single_threaded),
        events: Arc::clone(&opened.events),
        completion_events: AtomicU32::new(0),
        async_events: AtomicU32::new(0),
        _domain: params.domain,
    };
    // SAFETY: just allocated for it.
    unsafe { allocation.write(soft) };
    allocation.cast()
}

pub(crate) unsafe extern "C" fn resize_cq(cq: *mut ibv_cq, cqe: c_int) -> c_int {
    let Ok(entries) = u32::try_from(cqe) else {
        return libc::EINVAL;
    };
    // SAFETY: `cq` is live and ours by contract.
    let resized = unsafe { &(*cq.cast::<SoftCq>()).cq }.resize(entries);
    match resized {
        Ok(()) => {
            // SAFETY: live by contract, and no other thread resizes it at the same time.
            unsafe { (*cq).cqe = cqe };
            0
        }
        Err(error) => errno_of_limit(error),
    }
}

pub(crate) unsafe extern "C" fn modify_cq(cq: *mut ibv_cq, attr: *mut ibv_modify_cq_attr) -> c_int {
    // SAFETY: both are live and `cq` ours by contract.
    let (cq, attr) = unsafe { (&(*cq.cast::<SoftCq>()).cq, &*attr) };
    if attr.attr_mask != IBV_CQ_ATTR_MODERATE {
        return libc::EINVAL;
    }
    let ibv_moderate_cq { cq_count, cq_period } = attr.moderate;
    cq.moderate(cq_count, Duration::from_micros(cq_period.into()));
    0
}

/// `EBUSY` while queue pairs use it; waits until its events are acknowledged.
pub(crate) unsafe extern "C" fn destroy_cq(cq: *mut ibv_cq) -> c_int {
    let soft = cq.cast::<SoftCq>();
    let token = token_of(soft);
    {
        // SAFETY: `cq` is live and ours by contract; only fields that no thread writes are
        // borrowed, for this block, as others may be acknowledging events.
        let (handle, events) = unsafe { (&(*soft).cq, &(*soft).events) };
        if handle.is_shared() {
            return libc::EBUSY;
        }
        handle.disarm();
        events.remove(|event| *event == Event::CqOverrun(token));
        // SAFETY: its channel, if any, is live: it cannot be destroyed while this queue uses it.
        if let Some(channel) = unsafe { (*soft).base.channel.cast::<SoftChannel>().as_ref() } {
            channel.queue.remove(|name| *name == token);
            channel.users.fetch_sub(1, Ordering::AcqRel);
        }
    }
    // SAFETY: live; the mutex and condition were initialised with it. No queue pair uses it and it
    // is not armed, so no new event is reported.
    unsafe {
        let (mutex, cond) = (&raw mut (*cq).mutex, &raw mut (*cq).cond);
        let completion_events = (*soft).completion_events.load(Ordering::Relaxed);
        await_acknowledged(mutex, cond, &raw const (*cq).comp_events_completed, completion_events);
        let async_events = (*soft).async_events.load(Ordering::Relaxed);
        await_acknowledged(mutex, cond, &raw const (*cq).async_events_completed, async_events);
    }
    // SAFETY: it came from a Box in `create_cq`, and the caller gives up ownership.
    drop(unsafe { Box::from_raw(soft) });
    0
}

pub(crate) unsafe extern "C" fn poll_cq(cq: *mut ibv_cq, num_entries: c_int, wc: *mut ibv_wc) -> c_int {
    // SAFETY: `cq` is live and ours by contract.
    let cq = unsafe { &(*cq.cast::<SoftCq>()).cq };
    let mut next = wc;
    let take = |completion| {
        // SAFETY: called at most `num_entries` times, for which there is space by contract.
        unsafe {
            next.write(to_wc(&completion));
            next = next.add(1);
        }
    };
    match cq.poll(usize::try_from(num_entries).unwrap_or(0), take) {
        // At most `num_entries`.
        Ok(count) => count as c_int,
        Err(_overrun) => -libc::EOVERFLOW,
    }
}

pub(crate) unsafe extern "C" fn req_notify_cq(cq: *mut ibv_cq, solicited_only: c_int) -> c_int {
    // SAFETY: `cq` is live and ours by contract.
    unsafe { &(*cq.cast::<SoftCq>()).cq }.arm(solicited_only != 0);
    0
}

/// For an error only `wr_id`, `status`, `qp_num` and `vendor_err` are valid; the rest is zero. The
/// service level of a datagram is the type of its frame, as in mlx5's completions: bit 3 for UDP,
/// and 1 for IPv6 or 2 for IPv4.
pub(crate) fn to_wc(completion: &Completion) -> ibv_wc {
    let mut wc = ibv_wc {
        wr_id: completion.wr_id,
        status: status_of(completion.status),
        opcode: 0,
        vendor_err: 0,
        byte_len: 0,
        anon_1: ibv_wc_imm { imm_data: 0 },
        qp_num: completion.qpn.get(),
        src_qp: 0,
        wc_flags: 0,
        pkey_index: 0,
        slid: 0,
        sl: 0,
        dlid_path_bits: 0,
    };
    if completion.status == Status::Success {
        wc.opcode = match completion.opcode {
            CompletionOpcode::Send => IBV_WC_SEND,
            CompletionOpcode::Write => IBV_WC_RDMA_WRITE,
            CompletionOpcode::Read => IBV_WC_RDMA_READ,
            CompletionOpcode::CompareSwap => IBV_WC_COMP_SWAP,
            CompletionOpcode::FetchAdd => IBV_WC_FETCH_ADD,
            CompletionOpcode::BindWindow => IBV_WC_BIND_MW,
            CompletionOpcode::LocalInvalidate => IBV_WC_LOCAL_INV,
            CompletionOpcode::Flush => IBV_WC_FLUSH,
            CompletionOpcode::AtomicWrite => IBV_WC_ATOMIC_WRITE,
            CompletionOpcode::Receive => IBV_WC_RECV,
            CompletionOpcode::ReceiveWriteImm => IBV_WC_RECV_RDMA_WITH_IMM,
        };
        wc.byte_len = completion.byte_len;
        wc.src_qp = completion.src_qpn.get();
        if let Some(version) = completion.grh {
            wc.wc_flags = IBV_WC_GRH;
            wc.sl = match version {
                IpVersion::V4 => 0b1010,
                IpVersion::V6 => 0b1001,
            };
        }
        if let Some(imm) = completion.imm {
            wc.wc_flags |= IBV_WC_WITH_IMM;
            wc.anon_1.imm_data = imm.to_be();
        }
        if let Some(rkey) = completion.invalidated {
            wc.wc_flags |= IBV_WC_WITH_INV;
            wc.anon_1.invalidated_rkey = rkey.0;
        }
    }
    wc
}

fn status_of(status: Status) -> ibv_wc_status {
    match status {
        Status::Success => IBV_WC_SUCCESS,
        Status::LocalLength => IBV_WC_LOC_LEN_ERR,
        Status::LocalQpOperation => IBV_WC_LOC_QP_OP_ERR,
        Status::LocalProtection => IBV_WC_LOC_PROT_ERR,
        Status::Flushed => IBV_WC_WR_FLUSH_ERR,
        Status::WindowBind => IBV_WC_MW_BIND_ERR,
        Status::BadResponse => IBV_WC_BAD_RESP_ERR,
        Status::LocalAccess => IBV_WC_LOC_ACCESS_ERR,
        Status::RemoteInvalidRequest => IBV_WC_REM_INV_REQ_ERR,
        Status::RemoteAccess => IBV_WC_REM_ACCESS_ERR,
        Status::RemoteOperational => IBV_WC_REM_OP_ERR,
        Status::RetryExceeded => IBV_WC_RETRY_EXC_ERR,
        Status::RnrRetryExceeded => IBV_WC_RNR_RETRY_EXC_ERR,
        Status::RemoteAborted => IBV_WC_REM_ABORT_ERR,
    }
}
