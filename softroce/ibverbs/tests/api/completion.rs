//! Completion channels, asynchronous events, and completion queues that overrun.

use std::mem::MaybeUninit;
use std::ptr;

use doorbell_softroce_ibverbs::api;
use doorbell_verbs_sys::*;

use crate::common::*;

/// Waits for the channel's next event, which is of `cq`.
fn event_of(channel: *mut ibv_comp_channel, cq: *mut ibv_cq) {
    let (mut named, mut context) = (ptr::null_mut(), ptr::null_mut());
    // SAFETY: a live channel; both are written when it says 0.
    assert_eq!(unsafe { (api().get_cq_event)(channel, &mut named, &mut context) }, 0);
    assert_eq!(named, cq);
    // SAFETY: live.
    unsafe { (api().ack_cq_events)(cq, 1) };
}

fn set_nonblocking(fd: i32) {
    // SAFETY: of an open descriptor.
    unsafe { libc::fcntl(fd, libc::F_SETFL, libc::fcntl(fd, libc::F_GETFL) | libc::O_NONBLOCK) };
}

#[test]
fn a_sleeper_is_woken_by_the_progress_thread() {
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
    // Not armed, or for solicited ones alone: no event. The completion is there nevertheless.
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
fn a_refused_access_is_told_to_its_owner() {
    crate::setup();
    let (a, b) = pair(("soft0", "soft1"), &Setup::default());
    assert_eq!(
        a.post(rdma(1, IBV_WR_RDMA_WRITE, b.addr(), b.rkey() ^ 1), &mut [a.sge(0, 8)]),
        0
    );
    assert_eq!(a.wait().status, IBV_WC_REM_ACCESS_ERR);
    let event = async_event(b.context);
    assert_eq!(event.event_type, IBV_EVENT_QP_ACCESS_ERR);
    // SAFETY: of a queue pair's event the element is one.
    assert_eq!(unsafe { event.element.qp }, b.qp);
    // SAFETY: live.
    set_nonblocking(unsafe { (*a.context).async_fd });
    let mut event = MaybeUninit::uninit();
    // SAFETY: live.
    let result = unsafe { (api().get_async_event)(a.context, event.as_mut_ptr()) };
    assert_eq!((result, errno()), (-1, libc::EAGAIN), "the other side has none");
}

#[test]
fn an_overrun_breaks_the_queue_and_not_the_memory() {
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
