//! Completion channels, asynchronous events, and overruns of completion queues.

use std::mem::MaybeUninit;
use std::ptr;
use std::time::{Duration, Instant};

use doorbell_softroce_ibverbs::api;
use doorbell_verbs_sys::*;

use crate::common::*;

fn event_of(channel: *mut ibv_comp_channel, cq: *mut ibv_cq) {
    let (mut named, mut context) = (ptr::null_mut(), ptr::null_mut());
    // SAFETY: a live channel; both are written on success.
    assert_eq!(unsafe { (api().get_cq_event)(channel, &mut named, &mut context) }, 0);
    assert_eq!(named, cq);
    // SAFETY: live.
    unsafe { (api().ack_cq_events)(cq, 1) };
}

fn readable(fd: i32) -> bool {
    let mut watched = libc::pollfd {
        fd,
        events: libc::POLLIN,
        revents: 0,
    };
    // SAFETY: one entry, live.
    unsafe { libc::poll(&mut watched, 1, 0) == 1 }
}

fn set_nonblocking(fd: i32) {
    // SAFETY: of an open descriptor.
    unsafe { libc::fcntl(fd, libc::F_SETFL, libc::fcntl(fd, libc::F_GETFL) | libc::O_NONBLOCK) };
}

#[test]
fn completion_event_wakes_a_sleeping_thread() {
    crate::setup();
    let setup = Setup::default();
    let context = open("soft1").unwrap();
    // SAFETY: live.
    let channel = unsafe { (api().create_comp_channel)(context) };
    let a = Side::new("soft0", &setup);
    let b = Side::with_channel("soft1", &setup, channel);
    connect(&a, &b, &setup);
    for id in 0..20 {
        assert_eq!(b.receive(id, &mut [b.sge(0, 8)]), 0);
        // SAFETY: live.
        assert_eq!(unsafe { inline::req_notify_cq(b.cq, 0) }, 0);
        assert_eq!(a.post(request(id, IBV_WR_SEND), &mut [a.sge(0, 8)]), 0);
        event_of(channel, b.cq);
        b.done(id);
        a.done(id);
    }
    // Not armed, or for solicited completions only: no event, although the completion exists.
    // SAFETY: live.
    let fd = unsafe { (*channel).fd };
    set_nonblocking(fd);
    let none = || {
        let (mut named, mut context) = (ptr::null_mut(), ptr::null_mut());
        // SAFETY: a live channel.
        let result = unsafe { (api().get_cq_event)(channel, &mut named, &mut context) };
        assert_eq!((result, errno()), (-1, libc::EAGAIN));
    };
    for (id, flags) in [(1, 0), (2, IBV_SEND_SOLICITED)] {
        // SAFETY: live.
        assert_eq!(unsafe { inline::req_notify_cq(b.cq, 1) }, 0);
        assert_eq!(b.receive(id, &mut [b.sge(0, 8)]), 0);
        let mut send = request(id, IBV_WR_SEND);
        send.send_flags |= flags;
        assert_eq!(a.post(send, &mut [a.sge(0, 8)]), 0);
        b.done(id);
        a.done(id);
        if flags == 0 {
            none();
        } else {
            event_of(channel, b.cq);
        }
    }
    // SAFETY: live, destroyed once, after what uses it; its context belongs to `b`.
    unsafe {
        assert_eq!((api().destroy_comp_channel)(channel), libc::EBUSY);
        let context_of_b = b.context;
        let (qp, cq, mr, pd) = (b.qp, b.cq, b.mr, b.pd);
        let memory = b.into_memory();
        assert_eq!((api().destroy_qp)(qp), 0);
        assert_eq!((api().destroy_cq)(cq), 0);
        assert_eq!((api().destroy_comp_channel)(channel), 0);
        assert_eq!((api().dereg_mr)(mr), 0);
        assert_eq!((api().dealloc_pd)(pd), 0);
        assert_eq!((api().close_device)(context_of_b), 0);
        drop(Box::from_raw(memory));
    }
}

#[test]
fn cq_overrun() {
    crate::setup();
    let setup = Setup {
        depth: 8,
        ..Setup::default()
    };
    let (a, b) = pair(("soft0", "soft1"), &setup);
    // SAFETY: live.
    assert_eq!(unsafe { (api().resize_cq)(a.cq, 2) }, 0);
    for id in 0..4 {
        assert_eq!(
            a.post(rdma(id, IBV_WR_RDMA_WRITE, b.addr() + id, b.rkey()), &mut [a.sge(0, 1)]),
            0
        );
    }
    let event = async_event(a.context);
    // SAFETY: of a completion queue's event the element is one.
    let named = unsafe { event.element.cq };
    assert_eq!((event.event_type, named), (IBV_EVENT_CQ_ERR, a.cq));
    a.done(0);
    a.done(1);
    let mut wc = MaybeUninit::uninit();
    // SAFETY: live, room for one.
    assert!(unsafe { inline::poll_cq(a.cq, 1, wc.as_mut_ptr()) } < 0);
}

/// As with adapters: its number's next completions are of its next life.
#[test]
fn a_reset_queue_pair_has_no_completions() {
    crate::setup();
    let setup = Setup::default();
    let (a, b) = pair(("soft0", "soft1"), &setup);
    for id in 0..3 {
        assert_eq!(a.receive(id, &mut [a.sge(0, 8)]), 0);
    }
    for (state, left) in [(IBV_QPS_ERR, 1), (IBV_QPS_RESET, 0)] {
        let mut to = attr();
        to.qp_state = state;
        assert_eq!(a.modify(&mut to, IBV_QP_STATE), 0);
        // Of those flushed one is taken.
        assert_eq!(a.poll().into_iter().count(), left);
    }
    let mut reset = attr();
    reset.qp_state = IBV_QPS_RESET;
    assert_eq!(b.modify(&mut reset, IBV_QP_STATE), 0);
    connect(&a, &b, &setup);
    assert_eq!(a.receive(7, &mut [a.sge(0, 8)]), 0);
    assert_eq!(b.post(request(8, IBV_WR_SEND), &mut [b.sge(0, 8)]), 0);
    a.done(7);
    b.done(8);
}

fn modify_cq(cq: *mut ibv_cq, attr_mask: u32, cq_count: u16, cq_period: u16) -> i32 {
    let moderate = ibv_moderate_cq { cq_count, cq_period };
    let mut attr = ibv_modify_cq_attr { attr_mask, moderate };
    // SAFETY: live.
    unsafe { inline::modify_cq(cq, &mut attr) }
}

#[test]
fn cq_moderation_coalesces_events() {
    crate::setup();
    let setup = Setup::default();
    let context = open("soft1").unwrap();
    // SAFETY: live.
    let channel = unsafe { (api().create_comp_channel)(context) };
    let a = Side::new("soft0", &setup);
    let b = Side::with_channel("soft1", &setup, channel);
    connect(&a, &b, &setup);
    let arm = || {
        // SAFETY: live.
        assert_eq!(unsafe { inline::req_notify_cq(b.cq, 0) }, 0)
    };
    let mut next = 0;
    // Whether the channel was notified: the event is queued before the message is acknowledged.
    let mut notified = || {
        next += 1;
        assert_eq!(b.receive(next, &mut [b.sge(0, 8)]), 0);
        assert_eq!(a.post(request(next, IBV_WR_SEND), &mut [a.sge(0, 8)]), 0);
        a.done(next);
        // SAFETY: live.
        readable(unsafe { (*channel).fd })
    };
    let take = |messages: usize| {
        event_of(channel, b.cq);
        for _ in 0..messages {
            b.wait();
        }
    };
    let micros = |period: u16| Duration::from_micros(period.into());
    assert_eq!(modify_cq(b.cq, IBV_CQ_ATTR_MODERATE, 4, u16::MAX), 0);
    for _ in 0..3 {
        arm();
        let since = Instant::now();
        for message in 1..4 {
            assert!(
                !notified() || since.elapsed() >= micros(u16::MAX),
                "notified of message {message}"
            );
        }
        assert!(notified(), "of the fourth");
        take(4);
    }
    // Fewer are reported when the period is over.
    const PERIOD: u16 = 20_000;
    assert_eq!(modify_cq(b.cq, IBV_CQ_ATTR_MODERATE, 1000, PERIOD), 0);
    for messages in [1, 3] {
        arm();
        let since = Instant::now();
        for _ in 0..messages {
            notified();
        }
        take(messages);
        assert!(since.elapsed() >= micros(PERIOD));
    }
    // No moderation without a period, or with a count of at most one; unknown bits are ignored.
    for (count, period) in [(0, 0), (1, u16::MAX), (1000, 0)] {
        assert_eq!(modify_cq(b.cq, IBV_CQ_ATTR_MODERATE, count, period), 0);
        arm();
        assert!(notified(), "{count} in {period} µs");
        take(1);
    }
    for mask in [0, IBV_CQ_ATTR_RESERVED, IBV_CQ_ATTR_RESERVED | IBV_CQ_ATTR_MODERATE] {
        assert_eq!(modify_cq(b.cq, mask, 1000, u16::MAX), libc::EINVAL);
    }
    // A queue destroyed while its event is pending does not report it.
    assert_eq!(modify_cq(b.cq, IBV_CQ_ATTR_MODERATE, 1000, u16::MAX), 0);
    arm();
    assert_eq!(b.receive(900, &mut [b.sge(0, 8)]), 0);
    assert_eq!(a.post(request(900, IBV_WR_SEND), &mut [a.sge(0, 8)]), 0);
    a.done(900);
    // SAFETY: live, destroyed once, after what uses it.
    unsafe {
        set_nonblocking((*channel).fd);
        let (qp, cq, mr, pd) = (b.qp, b.cq, b.mr, b.pd);
        let memory = b.into_memory();
        assert_eq!((api().destroy_qp)(qp), 0);
        assert_eq!((api().destroy_cq)(cq), 0);
        std::thread::sleep(2 * micros(u16::MAX));
        let (mut named, mut cq_context) = (ptr::null_mut(), ptr::null_mut());
        assert_eq!((api().get_cq_event)(channel, &mut named, &mut cq_context), -1);
        assert_eq!(errno(), libc::EAGAIN);
        assert_eq!((api().destroy_comp_channel)(channel), 0);
        assert_eq!((api().dereg_mr)(mr), 0);
        assert_eq!((api().dealloc_pd)(pd), 0);
        assert_eq!((api().close_device)(context), 0);
        drop(Box::from_raw(memory));
    }
}
