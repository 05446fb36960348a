//! Extended completion queues (ibv_create_cq_ex(3)): every field, time stamps, and concurrent
//! polls.

use std::mem::MaybeUninit;
use std::ptr;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Instant, SystemTime};

use doorbell_softroce_ibverbs::api;
use doorbell_verbs_sys::*;

use crate::common::*;

const STAMPS: u32 = IBV_WC_EX_WITH_COMPLETION_TIMESTAMP | IBV_WC_EX_WITH_COMPLETION_TIMESTAMP_WALLCLOCK;

fn setup_with(fields: u32) -> Setup {
    crate::setup();
    Setup {
        wc_flags: Some(fields),
        ..Setup::default()
    }
}

/// The calls of one completion queue, as verbs.h makes them.
#[derive(Clone, Copy)]
struct Poll(*mut ibv_cq_ex);

// SAFETY: completion queues may be used from any thread (man pages).
unsafe impl Send for Poll {}

macro_rules! calls {
    ($($name:ident($($arg:ident: $type:ty),*) $(-> $result:ty)?;)*) => {
        $(fn $name(&self, $($arg: $type),*) $(-> $result)? {
            // SAFETY: the queue is live, and so is what the arguments point to.
            unsafe { (*self.0).$name.unwrap()(self.0, $($arg),*) }
        })*
    };
}

impl Poll {
    fn of(side: &Side) -> Self {
        Self(side.cq.cast())
    }

    calls! {
        start_poll(attr: *mut ibv_poll_cq_attr) -> i32;
        next_poll() -> i32;
        end_poll();
        read_opcode() -> ibv_wc_opcode;
        read_vendor_err() -> u32;
        read_byte_len() -> u32;
        read_imm_data() -> u32;
        read_qp_num() -> u32;
        read_src_qp() -> u32;
        read_wc_flags() -> u32;
        read_slid() -> u32;
        read_sl() -> u8;
        read_dlid_path_bits() -> u8;
        read_completion_ts() -> u64;
        read_completion_wallclock_ns() -> u64;
    }

    fn start(&self) -> i32 {
        self.start_poll(&mut ibv_poll_cq_attr { comp_mask: 0 })
    }

    /// Starts a poll that finds a completion.
    fn started(&self) {
        let since = Instant::now();
        loop {
            match self.start() {
                0 => return,
                error => assert_eq!(error, libc::ENOENT),
            }
            assert!(since.elapsed() < TIMEOUT, "no completion");
        }
    }

    fn named(&self) -> (u64, ibv_wc_status) {
        // SAFETY: live.
        unsafe { ((*self.0).wr_id, (*self.0).status) }
    }
}

fn raw_clock(context: *mut ibv_context) -> u64 {
    let mut values = MaybeUninit::<ibv_values_ex>::zeroed();
    // SAFETY: live; zeroes are one, and the entry is there in a soft device's context.
    unsafe {
        (*values.as_mut_ptr()).comp_mask = IBV_VALUES_MASK_RAW_CLOCK;
        let query = (*inline::verbs_get_ctx(context)).query_rt_values.unwrap();
        assert_eq!(query(context, values.as_mut_ptr()), 0);
        let values = values.assume_init();
        assert_eq!(values.raw_clock.tv_sec, 0);
        values.raw_clock.tv_nsec as u64
    }
}

fn since_1970() -> u64 {
    SystemTime::UNIX_EPOCH.elapsed().unwrap().as_nanos() as u64
}

#[test]
fn every_field_and_both_clocks() {
    let (a, b) = pair(("soft0", "soft1"), &setup_with(IBV_WC_STANDARD_FLAGS | STAMPS));
    let before = (raw_clock(b.context), since_1970());
    for id in [1, 2] {
        assert_eq!(b.receive(id, &mut [b.sge(0, 100)]), 0);
    }
    let mut send = request(7, IBV_WR_SEND_WITH_IMM);
    send.anon_1.imm_data = 70_u32.to_be();
    assert_eq!(a.post(send, &mut [a.sge(0, 33)]), 0);
    assert_eq!(a.post(request(8, IBV_WR_SEND), &mut [a.sge(0, 34)]), 0);
    let poll = Poll::of(&a);
    poll.started();
    assert_eq!(poll.named(), (7, IBV_WC_SUCCESS));
    assert_eq!((poll.read_opcode(), poll.read_wc_flags()), (IBV_WC_SEND, 0));
    poll.end_poll();
    a.done(8);
    // Both are queued when the sender has both acknowledged; the time stamps do not depend on the
    // time of the poll.
    let after = (raw_clock(b.context), since_1970());
    let poll = Poll::of(&b);
    poll.started();
    assert_eq!(poll.named(), (1, IBV_WC_SUCCESS));
    assert_eq!(
        (poll.read_opcode(), poll.read_wc_flags(), poll.read_imm_data()),
        (IBV_WC_RECV, IBV_WC_WITH_IMM, 70_u32.to_be())
    );
    assert_eq!(
        (poll.read_byte_len(), poll.read_qp_num(), poll.read_src_qp()),
        (33, b.qpn(), a.qpn())
    );
    assert_eq!(
        (
            poll.read_slid(),
            poll.read_sl(),
            poll.read_dlid_path_bits(),
            poll.read_vendor_err()
        ),
        (0, 0, 0, 0)
    );
    let first = (poll.read_completion_ts(), poll.read_completion_wallclock_ns());
    assert_eq!(poll.next_poll(), 0);
    assert_eq!(poll.named(), (2, IBV_WC_SUCCESS));
    assert_eq!((poll.read_byte_len(), poll.read_wc_flags()), (34, 0));
    let second = (poll.read_completion_ts(), poll.read_completion_wallclock_ns());
    assert_eq!(poll.next_poll(), libc::ENOENT);
    poll.end_poll();
    assert!(
        before.0 <= first.0 && first.0 <= second.0 && second.0 <= after.0,
        "{before:?} {first:?} {second:?} {after:?}"
    );
    // The wall clock may be adjusted during the test, by less than an hour.
    assert!(first.1.abs_diff(before.1) < 3_600_000_000_000 && second.1.abs_diff(after.1) < 3_600_000_000_000);
}

#[test]
fn polls_begin_and_end() {
    let (a, b) = pair(("soft0", "soft1"), &setup_with(IBV_WC_STANDARD_FLAGS));
    let poll = Poll::of(&a);
    assert_eq!(poll.start(), libc::ENOENT);
    assert_eq!(poll.start(), libc::ENOENT, "a start that failed is not to be ended");
    assert_eq!(poll.start_poll(&mut ibv_poll_cq_attr { comp_mask: 1 }), libc::EINVAL);
    assert_eq!(poll.next_poll(), libc::EINVAL, "outside of a poll");
    poll.end_poll();
    let write = |id| {
        let wr = rdma(id, IBV_WR_RDMA_WRITE, b.addr(), b.rkey());
        assert_eq!(a.post(wr, &mut [a.sge(0, 8)]), 0);
    };
    (1..=5).for_each(write);
    // What a poll has not reached stays for the next one, extended or not.
    poll.started();
    assert_eq!(poll.named().0, 1);
    poll.end_poll();
    a.done(2);
    poll.started();
    assert_eq!(poll.named().0, 3);
    a.done(4);
    assert_eq!((poll.named().0, poll.read_opcode()), (3, IBV_WC_RDMA_WRITE));
    // The fifth may still be in flight; the progress thread delivers it.
    let since = Instant::now();
    while poll.next_poll() == libc::ENOENT {
        assert!(since.elapsed() < TIMEOUT, "no completion");
        std::thread::yield_now();
    }
    assert_eq!(poll.named().0, 5);
    poll.end_poll();
    // A failed request is reported; invalid fields are zero.
    assert_eq!(
        a.post(rdma(6, IBV_WR_RDMA_WRITE, b.addr(), b.rkey() ^ 1), &mut [a.sge(0, 8)]),
        0
    );
    poll.started();
    assert_eq!(poll.named(), (6, IBV_WC_REM_ACCESS_ERR));
    assert_eq!((poll.read_qp_num(), poll.read_byte_len()), (a.qpn(), 0));
    poll.end_poll();
}

#[test]
fn extended_polls_of_threads_are_serialised() {
    let (a, b) = pair(("soft0", "soft1"), &setup_with(IBV_WC_STANDARD_FLAGS));
    const WRITES: u64 = 600;
    // Send queue slots are freed on completion, polled or not: the completion queue has space for
    // all. SAFETY: live.
    assert_eq!(unsafe { (api().resize_cq)(a.cq, WRITES as i32) }, 0);
    let polled = AtomicU64::new(0);
    let mut seen: Vec<u64> = std::thread::scope(|scope| {
        let pollers = [(); 3].map(|()| {
            let (poll, polled) = (Poll::of(&a), &polled);
            scope.spawn(move || {
                let poll = poll;
                let (mut seen, since) = (Vec::new(), Instant::now());
                while polled.load(Ordering::Relaxed) < WRITES {
                    assert!(since.elapsed() < TIMEOUT, "the last request never completed");
                    let mut found = poll.start();
                    let started = found == 0;
                    while found == 0 {
                        seen.push(poll.named().0);
                        polled.fetch_add(1, Ordering::Relaxed);
                        found = poll.next_poll();
                    }
                    if started {
                        poll.end_poll();
                    }
                }
                seen
            })
        });
        for id in 0..WRITES {
            let wr = rdma(id, IBV_WR_RDMA_WRITE, b.addr(), b.rkey());
            while a.post(wr, &mut [a.sge(0, 8)]) != 0 {
                std::thread::yield_now();
            }
        }
        pollers.into_iter().flat_map(|poller| poller.join().unwrap()).collect()
    });
    seen.sort_unstable();
    assert_eq!(seen, (0..WRITES).collect::<Vec<_>>(), "each once");
}

#[test]
fn an_overrun_ends_the_poll() {
    let setup = Setup {
        depth: 8,
        ..setup_with(IBV_WC_STANDARD_FLAGS)
    };
    let (a, b) = pair(("soft0", "soft1"), &setup);
    // SAFETY: live.
    assert_eq!(unsafe { (api().resize_cq)(a.cq, 1) }, 0);
    for id in 0..2 {
        let wr = rdma(id, IBV_WR_RDMA_WRITE, b.addr(), b.rkey());
        assert_eq!(a.post(wr, &mut [a.sge(0, 8)]), 0);
    }
    let mut event = MaybeUninit::<ibv_async_event>::uninit();
    // SAFETY: live; filled on success.
    unsafe {
        assert_eq!((api().get_async_event)(a.context, event.as_mut_ptr()), 0);
        assert_eq!((*event.as_ptr()).event_type, IBV_EVENT_CQ_ERR);
        (api().ack_async_event)(event.as_mut_ptr());
    }
    let poll = Poll::of(&a);
    assert_eq!((poll.start(), poll.named().0), (0, 0));
    assert_eq!(poll.next_poll(), libc::EOVERFLOW);
    poll.end_poll();
    assert_eq!(poll.start(), libc::EOVERFLOW);
}

#[test]
fn creation_is_checked() {
    crate::setup();
    let context = open("soft0").unwrap();
    // SAFETY: live; a queue that was made is destroyed.
    let create = |change: &dyn Fn(&mut ibv_cq_init_attr_ex)| unsafe {
        let mut attr = extended_cq_attr(8, IBV_WC_EX_WITH_BYTE_LEN, ptr::null_mut());
        change(&mut attr);
        let cq = create_cq_ex(context, &mut attr);
        if cq.is_null() {
            return Err(errno());
        }
        let calls = ((*cq).read_byte_len.is_some(), (*cq).read_imm_data.is_some(), (*cq).cqe);
        assert_eq!(Poll(cq).start(), libc::ENOENT);
        assert_eq!((api().destroy_cq)(cq.cast()), 0);
        Ok(calls)
    };
    assert_eq!(create(&|_| {}), Ok((true, false, 8)), "only what was requested");
    assert_eq!(create(&|attr| attr.wc_flags = 0), Ok((false, false, 8)));
    let flags = |flags| {
        create(&|attr| {
            attr.comp_mask = IBV_CQ_INIT_ATTR_MASK_FLAGS;
            attr.flags = flags;
        })
    };
    assert!(flags(IBV_CREATE_CQ_ATTR_SINGLE_THREADED).is_ok());
    assert_eq!(flags(IBV_CREATE_CQ_ATTR_IGNORE_OVERRUN), Err(libc::EOPNOTSUPP));
    assert_eq!(flags(1 << 9), Err(libc::EINVAL));
    let fields = |fields: u32| create(&|attr| attr.wc_flags = u64::from(fields));
    assert_eq!(fields(IBV_WC_EX_WITH_CVLAN), Err(libc::EOPNOTSUPP));
    assert_eq!(fields(1 << 31), Err(libc::EINVAL));
    assert_eq!(
        create(&|attr| attr.comp_mask = IBV_CQ_INIT_ATTR_MASK_PD),
        Err(libc::EOPNOTSUPP)
    );
    assert_eq!(create(&|attr| attr.comp_mask = 1 << 9), Err(libc::EINVAL));
    for value in [1, u32::MAX] {
        assert_eq!(create(&|attr| attr.comp_vector = value), Err(libc::EINVAL));
    }
    for value in [0, u32::MAX] {
        assert_eq!(create(&|attr| attr.cqe = value), Err(libc::EINVAL));
    }
    // SAFETY: live, and closed once.
    unsafe {
        let classic = (api().create_cq)(context, 8, ptr::null_mut(), ptr::null_mut(), 0);
        // The cast is valid for any; this one has no function pointers.
        assert!((*classic.cast::<ibv_cq_ex>()).start_poll.is_none());
        assert_eq!((api().destroy_cq)(classic), 0);
        assert!((api().create_cq)(context, 8, ptr::null_mut(), ptr::null_mut(), 1).is_null());
        assert_eq!(errno(), libc::EINVAL);
        let mut values = MaybeUninit::<ibv_values_ex>::zeroed();
        (*values.as_mut_ptr()).comp_mask = IBV_VALUES_MASK_RESERVED;
        let query = (*inline::verbs_get_ctx(context)).query_rt_values.unwrap();
        assert_eq!(query(context, values.as_mut_ptr()), libc::EINVAL);
        assert_eq!((api().close_device)(context), 0);
    }
}
