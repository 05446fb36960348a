//! Extended completion queues, with time stamps (ibv_create_cq_ex(3)): a completion is removed from
//! the queue when a poll reaches it.
//!
//! The device's lock of the queue is not held between the calls; a separate lock serialises polling
//! threads, unless the queue was created single-threaded. Calls that read fields not requested at
//! creation are null pointers, as with other providers.

use core::ffi::{c_int, c_uint};
use std::cell::UnsafeCell;
use std::mem::MaybeUninit;
use std::sync::atomic::{AtomicBool, Ordering};

use doorbell_roce_proto::work::Completion;
use doorbell_softroce::clock::{Timestamp, TimestampClocks};
use doorbell_softroce::{Cq, Overrun};
use doorbell_verbs_sys::*;
use parking_lot::RawMutex;
use parking_lot::lock_api::RawMutex as _;

use crate::completion::{self, SoftCq, to_wc};
use crate::domain::SoftPd;
use crate::errno;

const KNOWN_FIELDS: u64 = (IBV_WC_STANDARD_FLAGS
    | IBV_WC_EX_WITH_COMPLETION_TIMESTAMP
    | IBV_WC_EX_WITH_CVLAN
    | IBV_WC_EX_WITH_FLOW_TAG
    | IBV_WC_EX_WITH_TM_INFO
    | IBV_WC_EX_WITH_COMPLETION_TIMESTAMP_WALLCLOCK) as u64;

/// The fields that are supported: none of VLAN, flow tag or tag matching.
const FIELDS: u64 = (IBV_WC_STANDARD_FLAGS
    | IBV_WC_EX_WITH_COMPLETION_TIMESTAMP
    | IBV_WC_EX_WITH_COMPLETION_TIMESTAMP_WALLCLOCK) as u64;

pub(crate) struct Poll {
    lock: RawMutex,
    single_threaded: bool,
    /// Set between a successful start and the end: `current` then belongs to the polling thread.
    open: AtomicBool,
    current: UnsafeCell<Current>,
}

struct Current {
    wc: ibv_wc,
    stamp: Timestamp,
}

impl Poll {
    pub(crate) fn new(single_threaded: bool) -> Self {
        Self {
            lock: RawMutex::INIT,
            single_threaded,
            open: AtomicBool::new(false),
            // SAFETY: all-zero is valid for both: they have integers only.
            current: UnsafeCell::new(unsafe { MaybeUninit::zeroed().assume_init() }),
        }
    }

    fn lock(&self) {
        if !self.single_threaded {
            self.lock.lock();
        }
    }

    /// # Safety
    /// This thread has called [`lock`](Self::lock), and not this since.
    unsafe fn unlock(&self) {
        if !self.single_threaded {
            // SAFETY: by contract.
            unsafe { self.lock.unlock() };
        }
    }
}

/// `EOPNOTSUPP` for known features that the device lacks, `EINVAL` for unknown ones.
pub(crate) unsafe extern "C" fn create_cq_ex(
    context: *mut ibv_context,
    attr: *mut ibv_cq_init_attr_ex,
) -> *mut ibv_cq_ex {
    const KNOWN: u32 = IBV_CQ_INIT_ATTR_MASK_FLAGS | IBV_CQ_INIT_ATTR_MASK_PD;
    const FLAGS: u32 = IBV_CREATE_CQ_ATTR_SINGLE_THREADED | IBV_CREATE_CQ_ATTR_IGNORE_OVERRUN;
    // SAFETY: live by contract.
    let attr = unsafe { &*attr };
    let flags = if attr.comp_mask & IBV_CQ_INIT_ATTR_MASK_FLAGS != 0 {
        attr.flags
    } else {
        0
    };
    let (Ok(cqe), Ok(comp_vector)) = (attr.cqe.try_into(), attr.comp_vector.try_into()) else {
        return errno::null(libc::EINVAL);
    };
    if attr.comp_mask & !KNOWN != 0 || flags & !FLAGS != 0 || attr.wc_flags & !KNOWN_FIELDS != 0 {
        return errno::null(libc::EINVAL);
    }
    // An ignored overrun would lose completions silently.
    if flags & IBV_CREATE_CQ_ATTR_IGNORE_OVERRUN != 0 || attr.wc_flags & !FIELDS != 0 {
        return errno::null(libc::EOPNOTSUPP);
    }
    let domain = if attr.comp_mask & IBV_CQ_INIT_ATTR_MASK_PD != 0 {
        // SAFETY: the mask says that it is given, so live and ours by contract, or null.
        match unsafe { SoftPd::parent(attr.parent_domain) } {
            Some(parent) => Some(parent.clone()),
            None => return errno::null(libc::EINVAL),
        }
    } else {
        None
    };
    let requested = |field| attr.wc_flags & u64::from(field) != 0;
    let params = completion::CqParams {
        cqe,
        cq_context: attr.cq_context,
        channel: attr.channel,
        comp_vector,
        stamps: TimestampClocks {
            ticks: requested(IBV_WC_EX_WITH_COMPLETION_TIMESTAMP),
            wallclock: requested(IBV_WC_EX_WITH_COMPLETION_TIMESTAMP_WALLCLOCK),
        },
        single_threaded: flags & IBV_CREATE_CQ_ATTR_SINGLE_THREADED != 0,
        domain,
    };
    // SAFETY: the same contract.
    let cq = unsafe { completion::create(context, params) }.cast::<ibv_cq_ex>();
    if !cq.is_null() {
        // SAFETY: just created, and not shared yet.
        set_calls(unsafe { &mut *cq }, attr.wc_flags);
    }
    cq
}

fn set_calls(cq: &mut ibv_cq_ex, wc_flags: u64) {
    cq.start_poll = Some(start_poll);
    cq.next_poll = Some(next_poll);
    cq.end_poll = Some(end_poll);
    cq.read_opcode = Some(read_opcode);
    cq.read_vendor_err = Some(read_vendor_err);
    cq.read_wc_flags = Some(read_wc_flags);
    macro_rules! call {
        ($entry:ident, $flag:ident) => {
            if wc_flags & u64::from($flag) != 0 {
                cq.$entry = Some($entry);
            }
        };
    }
    call!(read_byte_len, IBV_WC_EX_WITH_BYTE_LEN);
    call!(read_imm_data, IBV_WC_EX_WITH_IMM);
    call!(read_qp_num, IBV_WC_EX_WITH_QP_NUM);
    call!(read_src_qp, IBV_WC_EX_WITH_SRC_QP);
    call!(read_slid, IBV_WC_EX_WITH_SLID);
    call!(read_sl, IBV_WC_EX_WITH_SL);
    call!(read_dlid_path_bits, IBV_WC_EX_WITH_DLID_PATH_BITS);
    call!(read_completion_ts, IBV_WC_EX_WITH_COMPLETION_TIMESTAMP);
    call!(
        read_completion_wallclock_ns,
        IBV_WC_EX_WITH_COMPLETION_TIMESTAMP_WALLCLOCK
    );
}

/// # Safety
/// `cq` is live and was created by [`create_cq_ex`], for as long as the references are used.
unsafe fn parts<'a>(cq: *mut ibv_cq_ex) -> (&'a Cq, &'a Poll) {
    // SAFETY: the base is its first member; the two are written at creation and destruction only.
    unsafe { (&(*cq.cast::<SoftCq>()).cq, &(*cq.cast::<SoftCq>()).poll) }
}

/// # Safety
/// The poll of this live queue belongs to this thread.
unsafe fn advance(cq: *mut ibv_cq_ex, poll: &Poll, found: Result<Option<(Completion, Timestamp)>, Overrun>) -> c_int {
    let (completion, stamp) = match found {
        Ok(Some(found)) => found,
        Ok(None) => return libc::ENOENT,
        Err(Overrun) => return libc::EOVERFLOW,
    };
    let wc = to_wc(&completion);
    // SAFETY: by contract no other thread uses `current`; status and wr_id are read by the polling
    // thread, and written here only.
    unsafe {
        (*cq).wr_id = wc.wr_id;
        (*cq).status = wc.status;
        *poll.current.get() = Current { wc, stamp };
    }
    0
}

/// `ibv_start_poll`: `ENOENT` when the queue is empty. After an error there is no poll to end.
unsafe extern "C" fn start_poll(cq: *mut ibv_cq_ex, attr: *mut ibv_poll_cq_attr) -> c_int {
    // SAFETY: live by contract, or null.
    if unsafe { attr.as_ref() }.is_some_and(|attr| attr.comp_mask != 0) {
        return libc::EINVAL;
    }
    // SAFETY: live by contract, as for all the calls here.
    let (queue, poll) = unsafe { parts(cq) };
    poll.lock();
    // SAFETY: the lock was just taken, or none is needed: the poll is this thread's.
    let result = unsafe { advance(cq, poll, queue.poll_next()) };
    if result == 0 {
        poll.open.store(true, Ordering::Relaxed);
    } else {
        // SAFETY: taken above.
        unsafe { poll.unlock() };
    }
    result
}

/// `ENOENT` when the queue is empty: the poll must still be ended; `EINVAL` outside of one.
unsafe extern "C" fn next_poll(cq: *mut ibv_cq_ex) -> c_int {
    // SAFETY: as above.
    let (queue, poll) = unsafe { parts(cq) };
    if !poll.open.load(Ordering::Relaxed) {
        return libc::EINVAL;
    }
    // SAFETY: an open poll is this thread's by contract.
    unsafe { advance(cq, poll, queue.take_next()) }
}

/// `ibv_end_poll`; no effect outside of a poll.
unsafe extern "C" fn end_poll(cq: *mut ibv_cq_ex) {
    // SAFETY: as above.
    let (_, poll) = unsafe { parts(cq) };
    if poll.open.load(Ordering::Relaxed) {
        poll.open.store(false, Ordering::Relaxed);
        // SAFETY: `start_poll` took it for this poll, which belongs to this thread by contract.
        unsafe { poll.unlock() };
    }
}

/// # Safety
/// `cq` is live and ours, its open poll this thread's and not advanced while the reference is used.
unsafe fn current<'a>(cq: *mut ibv_cq_ex) -> &'a Current {
    // SAFETY: by contract; before the first poll it is all zero.
    unsafe { &*parts(cq).1.current.get() }
}

macro_rules! reads {
    ($($name:ident -> $type:ty = $value:expr;)*) => {
        $(unsafe extern "C" fn $name(cq: *mut ibv_cq_ex) -> $type {
            let value: fn(&Current) -> $type = $value;
            // SAFETY: called during a poll, by the polling thread (ibv_create_cq_ex(3)).
            value(unsafe { current(cq) })
        })*
    };
}

reads! {
    read_opcode -> ibv_wc_opcode = |current| current.wc.opcode;
    read_vendor_err -> u32 = |current| current.wc.vendor_err;
    read_byte_len -> u32 = |current| current.wc.byte_len;
    // SAFETY: both members of the union are 32 bits, whichever was written.
    read_imm_data -> u32 = |current| unsafe { current.wc.anon_1.imm_data };
    read_qp_num -> u32 = |current| current.wc.qp_num;
    read_src_qp -> u32 = |current| current.wc.src_qp;
    read_wc_flags -> c_uint = |current| current.wc.wc_flags;
    read_slid -> u32 = |current| u32::from(current.wc.slid);
    read_sl -> u8 = |current| current.wc.sl;
    read_dlid_path_bits -> u8 = |current| current.wc.dlid_path_bits;
    read_completion_ts -> u64 = |current| current.stamp.ticks;
    read_completion_wallclock_ns -> u64 = |current| current.stamp.wallclock_ns;
}
