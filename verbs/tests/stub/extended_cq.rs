//! The stub's extended completion queues. Misuse that would deadlock a real provider fails the
//! test: polls started twice, used when not open, a queue pair destroyed by the polling thread.

use core::ffi::{c_int, c_uint};

use std::sync::{Mutex, MutexGuard};
use std::thread::ThreadId;

use doorbell_verbs_sys::*;

use super::provider::{set_errno, stub_of};
use super::{Cq, Stub, Verb};
use crate::allocation::ProviderScope;

pub(super) struct Open {
    thread: ThreadId,
    current: Option<ibv_wc>,
}

/// The rate of the stub's clock: one tick is 4 ns.
pub(crate) const CLOCK_KHZ: u64 = 250_000;

pub(crate) fn ticks_of(wr_id: u64) -> u64 {
    0x1000_0000 + (wr_id & 0xffff)
}

pub(crate) fn wallclock_of(wr_id: u64) -> u64 {
    1_700_000_000_000_000_000 + (wr_id & 0xffff)
}

impl Stub {
    pub(crate) fn polls(&self) -> (usize, usize, usize) {
        self.state().polls
    }

    pub(crate) fn reads(&self) -> usize {
        self.state().reads
    }
}

pub(super) unsafe extern "C" fn create_cq_ex(
    context: *mut ibv_context,
    attr: *mut ibv_cq_init_attr_ex,
) -> *mut ibv_cq_ex {
    // SAFETY: live, both.
    let (stub, attr) = unsafe { (stub_of(context), &*attr) };
    if let Some(errno) = stub.failing(Verb::CreateCq) {
        set_errno(errno);
        return core::ptr::null_mut();
    }
    // SAFETY: all-zero is a valid ibv_cq_ex.
    let mut raw: ibv_cq_ex = unsafe { core::mem::zeroed() };
    (raw.context, raw.cqe) = (context, attr.cqe as c_int);
    (raw.cq_context, raw.channel) = (attr.cq_context, attr.channel);
    raw.start_poll = Some(start_poll);
    raw.next_poll = Some(next_poll);
    raw.end_poll = Some(end_poll);
    raw.read_opcode = Some(read_opcode);
    raw.read_vendor_err = Some(read_vendor_err);
    raw.read_wc_flags = Some(read_wc_flags);
    // As in hardware, a field that was not requested cannot be read.
    macro_rules! if_requested {
        ($($field:ident = $read:ident if $flag:ident;)*) => {
            $( if attr.wc_flags & u64::from($flag) != 0 {
                raw.$field = Some($read);
            } )*
        };
    }
    if_requested! {
        read_byte_len = read_byte_len if IBV_WC_EX_WITH_BYTE_LEN;
        read_imm_data = read_imm_data if IBV_WC_EX_WITH_IMM;
        read_qp_num = read_qp_num if IBV_WC_EX_WITH_QP_NUM;
        read_src_qp = read_src_qp if IBV_WC_EX_WITH_SRC_QP;
        read_slid = read_slid if IBV_WC_EX_WITH_SLID;
        read_sl = read_sl if IBV_WC_EX_WITH_SL;
        read_dlid_path_bits = read_dlid_path_bits if IBV_WC_EX_WITH_DLID_PATH_BITS;
        read_completion_ts = read_completion_ts if IBV_WC_EX_WITH_COMPLETION_TIMESTAMP;
        read_completion_wallclock_ns = read_wallclock_ns if IBV_WC_EX_WITH_COMPLETION_TIMESTAMP_WALLCLOCK;
    }
    stub.count("cq", 1);
    Cq::leak(raw).cast()
}

/// # Safety
/// `cq` is live, and one of this provider.
unsafe fn cq_of<'a>(cq: *mut ibv_cq_ex) -> (&'a Cq, &'static Stub) {
    // SAFETY: by contract.
    unsafe { (&*cq.cast::<Cq>(), stub_of((*cq).context)) }
}

unsafe fn advance(cq: *mut ibv_cq_ex, open: &mut Open) -> c_int {
    // SAFETY: live.
    let next = unsafe { cq_of(cq) }.0.queue.lock().unwrap().pop_front();
    open.current = next;
    let Some(wc) = next else { return libc::ENOENT };
    // SAFETY: the polling thread's.
    unsafe { ((*cq).wr_id, (*cq).status) = (wc.wr_id, wc.status) };
    0
}

unsafe extern "C" fn start_poll(cq: *mut ibv_cq_ex, attr: *mut ibv_poll_cq_attr) -> c_int {
    let _uncounted = ProviderScope::begin();
    // SAFETY: live, both.
    let (inner, stub) = unsafe {
        assert_eq!((*attr).comp_mask, 0);
        cq_of(cq)
    };
    if stub.failing(Verb::PollCq).is_some() {
        return libc::EIO;
    }
    let mut poll = inner.poll.lock().unwrap();
    assert!(poll.is_none(), "a poll is started while one is open");
    let mut open = Open {
        thread: std::thread::current().id(),
        current: None,
    };
    // SAFETY: live.
    let result = unsafe { advance(cq, &mut open) };
    if result == 0 {
        stub.state().polls.0 += 1;
        *poll = Some(open);
    }
    result
}

fn open_of(poll: &Mutex<Option<Open>>) -> MutexGuard<'_, Option<Open>> {
    let poll = poll.lock().unwrap_or_else(|poisoned| poisoned.into_inner());
    let open = poll.as_ref().expect("a poll is open");
    assert_eq!(open.thread, std::thread::current().id(), "the thread that started it");
    poll
}

unsafe extern "C" fn next_poll(cq: *mut ibv_cq_ex) -> c_int {
    let _uncounted = ProviderScope::begin();
    // SAFETY: live.
    let (inner, stub) = unsafe { cq_of(cq) };
    stub.state().polls.1 += 1;
    if stub.failing(Verb::NextPoll).is_some() {
        return libc::EIO;
    }
    let mut poll = open_of(&inner.poll);
    let open = poll.as_mut().unwrap();
    assert!(open.current.is_some(), "advanced beyond the end");
    // SAFETY: live.
    unsafe { advance(cq, open) }
}

unsafe extern "C" fn end_poll(cq: *mut ibv_cq_ex) {
    let _uncounted = ProviderScope::begin();
    // SAFETY: live.
    let (inner, stub) = unsafe { cq_of(cq) };
    *open_of(&inner.poll) = None;
    stub.state().polls.2 += 1;
}

pub(super) fn is_polled_here(cq: &Cq) -> bool {
    let poll = cq.poll.lock().unwrap();
    poll.as_ref()
        .is_some_and(|open| open.thread == std::thread::current().id())
}

/// # Safety
/// `cq` is live, and one of this provider.
unsafe fn current(cq: *mut ibv_cq_ex) -> ibv_wc {
    let _uncounted = ProviderScope::begin();
    // SAFETY: by contract.
    let (inner, stub) = unsafe { cq_of(cq) };
    stub.state().reads += 1;
    let poll = open_of(&inner.poll);
    poll.as_ref().unwrap().current.expect("a completion is current")
}

macro_rules! reads {
    ($($name:ident: $type:ty = |$wc:ident| $value:expr;)*) => {
        $( unsafe extern "C" fn $name(cq: *mut ibv_cq_ex) -> $type {
            // SAFETY: live.
            let $wc = unsafe { current(cq) };
            $value
        } )*
    };
}

reads! {
    read_opcode: ibv_wc_opcode = |wc| wc.opcode;
    read_vendor_err: u32 = |wc| wc.vendor_err;
    read_byte_len: u32 = |wc| wc.byte_len;
    // SAFETY: both are 32 bits.
    read_imm_data: u32 = |wc| unsafe { wc.anon_1.imm_data };
    read_qp_num: u32 = |wc| wc.qp_num;
    read_src_qp: u32 = |wc| wc.src_qp;
    read_wc_flags: c_uint = |wc| wc.wc_flags;
    read_slid: u32 = |wc| u32::from(wc.slid);
    read_sl: u8 = |wc| wc.sl;
    read_dlid_path_bits: u8 = |wc| wc.dlid_path_bits;
    read_completion_ts: u64 = |wc| ticks_of(wc.wr_id);
    read_wallclock_ns: u64 = |wc| wallclock_of(wc.wr_id);
}

/// The device's clock is a thousand ticks behind all completions.
pub(super) unsafe extern "C" fn query_rt_values(_: *mut ibv_context, values: *mut ibv_values_ex) -> c_int {
    // SAFETY: live.
    let values = unsafe { &mut *values };
    assert_eq!(values.comp_mask, IBV_VALUES_MASK_RAW_CLOCK);
    values.raw_clock.tv_sec = 0;
    values.raw_clock.tv_nsec = (ticks_of(0) - 1000) as i64;
    0
}
