//! Extended completion queues (ibv_create_cq_ex(3)): concurrent polls, overruns, creation.

use std::mem::MaybeUninit;
use std::ptr;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Instant;

use doorbell_softroce_ibverbs::api;
use doorbell_verbs_sys::*;

use crate::common::*;

fn setup_with(fields: u32) -> Setup {
    crate::setup();
    Setup {
        wc_flags: Some(fields),
        ..Setup::default()
    }
}

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
    }

    fn start(&self) -> i32 {
        self.start_poll(&mut ibv_poll_cq_attr { comp_mask: 0 })
    }

    fn named(&self) -> (u64, ibv_wc_status) {
        // SAFETY: live.
        unsafe { ((*self.0).wr_id, (*self.0).status) }
    }
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
        Err(libc::EINVAL),
        "no parent domain"
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
