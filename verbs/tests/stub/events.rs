//! The stub's channels and events; destroying an object with unacknowledged ones fails the test.

use core::ffi::{c_int, c_uint, c_void};
use std::collections::VecDeque;
use std::sync::Mutex;

use doorbell_verbs_sys::*;

use super::provider::stub_of;
use super::{Cq, Stub, Verb};

#[repr(C)]
struct Channel {
    raw: ibv_comp_channel,
    /// The addresses of queues with an event.
    queue: Mutex<VecDeque<usize>>,
}

impl Stub {
    pub(crate) fn extend(&self) {
        self.extended.store(1, core::sync::atomic::Ordering::Relaxed);
    }

    /// The oldest send completes just before a queue is next armed: after a sleeper's last poll.
    pub(crate) fn complete_before_arming(&self, qpn: u32) {
        self.state().completes_before_arming = Some(qpn);
    }

    pub(crate) fn raise_on(&self, qpn: u32, event_type: u32) {
        let qp = self.state().qps[&qpn].raw as *mut ibv_qp;
        self.raise(ibv_async_event {
            element: ibv_async_event_element { qp },
            event_type,
        });
    }

    pub(crate) fn raise_overrun(&self, qpn: u32) {
        let cq = self.state().qps[&qpn].send_cq as *mut ibv_cq;
        self.raise(ibv_async_event {
            element: ibv_async_event_element { cq },
            event_type: IBV_EVENT_CQ_ERR,
        });
    }

    pub(crate) fn raise_on_port(&self, event_type: u32) {
        self.raise(ibv_async_event {
            element: ibv_async_event_element { port_num: 1 },
            event_type,
        });
    }

    pub(super) fn raise(&self, event: ibv_async_event) {
        self.state().async_events.push_back(event);
        post(self.async_fd);
    }

    pub(crate) fn acknowledgements(&self) -> usize {
        self.state().acknowledgements
    }

    pub(crate) fn moderation(&self) -> Option<(u16, u16)> {
        self.state().moderation
    }

    pub(super) fn all_acknowledged(&self, object: usize) {
        let left = self.state().unacknowledged.remove(&object).unwrap_or(0);
        assert_eq!(left, 0, "events unacknowledged when their object goes");
    }

    fn acknowledge(&self, object: usize, count: u32) {
        let mut state = self.state();
        let left = state.unacknowledged.entry(object).or_default();
        *left = left
            .checked_sub(count)
            .expect("no more than there were are acknowledged");
    }

    fn hand_out(&self, object: usize) {
        *self.state().unacknowledged.entry(object).or_default() += 1;
    }
}

/// No descriptor: Miri has no semaphore eventfd and no poll(2), nor the tests that wait.
#[cfg(miri)]
pub(super) fn semaphore() -> c_int {
    -1
}

/// A blocking semaphore that works with poll(2).
#[cfg(not(miri))]
pub(super) fn semaphore() -> c_int {
    // SAFETY: no preconditions.
    let fd = unsafe { libc::eventfd(0, libc::EFD_CLOEXEC | libc::EFD_SEMAPHORE) };
    assert!(fd >= 0, "a file descriptor is left");
    fd
}

fn post(fd: c_int) {
    // SAFETY: an eventfd.
    assert_eq!(unsafe { libc::write(fd, (&raw const ONE).cast(), 8) }, 8);
}

static ONE: u64 = 1;

/// Whether a unit was taken; blocks if the descriptor does. If not, `errno` is set.
fn take(fd: c_int) -> bool {
    let mut count = 0_u64;
    // SAFETY: an eventfd, and room for its count.
    unsafe { libc::read(fd, (&raw mut count).cast(), 8) == 8 }
}

pub(super) fn completed(cq: &Cq, failed: bool) {
    let mut armed = cq.armed.lock().unwrap();
    if armed.is_none_or(|solicited| solicited && !failed) {
        return;
    }
    *armed = None;
    // SAFETY: live as long as the queue.
    if let Some(channel) = unsafe { cq.channel().cast::<Channel>().as_ref() } {
        channel.queue.lock().unwrap().push_back((&raw const *cq) as usize);
        post(channel.raw.fd);
    }
}

pub(super) fn forget(cq: &Cq) {
    let address = (&raw const *cq) as usize;
    // SAFETY: live.
    unsafe { stub_of(cq.context()) }.all_acknowledged(address);
    // SAFETY: live as long as the queue.
    if let Some(channel) = unsafe { cq.channel().cast::<Channel>().as_ref() } {
        channel.queue.lock().unwrap().retain(|other| *other != address);
    }
}

pub(super) unsafe extern "C" fn create_comp_channel(context: *mut ibv_context) -> *mut ibv_comp_channel {
    // SAFETY: live.
    unsafe { stub_of(context) }.count("channel", 1);
    let raw = ibv_comp_channel {
        context,
        fd: semaphore(),
        refcnt: 0,
    };
    Box::into_raw(Box::new(Channel {
        raw,
        queue: Mutex::default(),
    }))
    .cast()
}

pub(super) unsafe extern "C" fn destroy_comp_channel(channel: *mut ibv_comp_channel) -> c_int {
    // SAFETY: made by create_comp_channel.
    let channel = unsafe { Box::from_raw(channel.cast::<Channel>()) };
    // SAFETY: its own descriptor; the context is live.
    unsafe {
        libc::close(channel.raw.fd);
        stub_of(channel.raw.context).count("channel", -1);
    }
    0
}

pub(super) unsafe extern "C" fn req_notify_cq(cq: *mut ibv_cq, solicited_only: c_int) -> c_int {
    // SAFETY: live.
    let stub = unsafe { stub_of((*cq).context) };
    let completes = stub.state().completes_before_arming.take();
    if let Some(qpn) = completes {
        stub.complete_sends(qpn, 1);
    }
    // SAFETY: made by create_cq.
    let mut armed = unsafe { &*cq.cast::<Cq>() }.armed.lock().unwrap();
    *armed = Some(solicited_only != 0 && *armed != Some(false));
    0
}

pub(super) unsafe extern "C" fn get_cq_event(
    channel: *mut ibv_comp_channel,
    cq: *mut *mut ibv_cq,
    cq_context: *mut *mut c_void,
) -> c_int {
    // SAFETY: made by create_comp_channel.
    let channel = unsafe { &*channel.cast::<Channel>() };
    while take(channel.raw.fd) {
        let Some(address) = channel.queue.lock().unwrap().pop_front() else {
            continue;
        };
        let found = address as *mut ibv_cq;
        // SAFETY: a live queue's, as `forget` ensures; the others are the caller's.
        unsafe {
            stub_of((*found).context).hand_out(address);
            (*cq, *cq_context) = (found, (*found).cq_context);
        }
        return 0;
    }
    -1
}

pub(super) unsafe extern "C" fn ack_cq_events(cq: *mut ibv_cq, count: c_uint) {
    // SAFETY: live.
    let stub = unsafe { stub_of((*cq).context) };
    stub.acknowledge(cq as usize, count);
    stub.state().acknowledgements += 1;
}

pub(super) unsafe extern "C" fn get_async_event(context: *mut ibv_context, event: *mut ibv_async_event) -> c_int {
    // SAFETY: live.
    let stub = unsafe { stub_of(context) };
    if !take(stub.async_fd) {
        return -1;
    }
    let taken = stub
        .state()
        .async_events
        .pop_front()
        .expect("as many as the semaphore says");
    stub.hand_out(object_of(&taken));
    // SAFETY: the caller's.
    unsafe { *event = taken };
    0
}

pub(super) unsafe extern "C" fn ack_async_event(event: *mut ibv_async_event) {
    // SAFETY: filled by get_async_event, of the one device that has such an object, or else of any.
    let event = unsafe { *event };
    let object = object_of(&event);
    if object != 0 {
        // SAFETY: an object that is live until this acknowledges, whose first field is its context.
        unsafe { stub_of(*(object as *const *mut ibv_context)) }.acknowledge(object, 1);
    }
}

fn object_of(event: &ibv_async_event) -> usize {
    match event.event_type {
        IBV_EVENT_DEVICE_FATAL
        | IBV_EVENT_PORT_ACTIVE
        | IBV_EVENT_PORT_ERR
        | IBV_EVENT_LID_CHANGE
        | IBV_EVENT_PKEY_CHANGE
        | IBV_EVENT_SM_CHANGE
        | IBV_EVENT_CLIENT_REREGISTER
        | IBV_EVENT_GID_CHANGE => 0,
        // SAFETY: for all others it is a pointer.
        _ => unsafe { event.element.qp as usize },
    }
}

pub(super) unsafe extern "C" fn resize_cq(cq: *mut ibv_cq, cqe: c_int) -> c_int {
    // SAFETY: live.
    if let Some(errno) = unsafe { stub_of((*cq).context) }.failing(Verb::ResizeCq) {
        return errno;
    }
    // SAFETY: live. Rounded up, as hardware does.
    unsafe { (*cq).cqe = (cqe as u32).next_multiple_of(16) as c_int };
    0
}

pub(super) unsafe extern "C" fn modify_cq(cq: *mut ibv_cq, attr: *mut ibv_modify_cq_attr) -> c_int {
    // SAFETY: live, both.
    let (stub, attr) = unsafe { (stub_of((*cq).context), &*attr) };
    assert_eq!(attr.attr_mask, IBV_CQ_ATTR_MODERATE);
    stub.state().moderation = Some((attr.moderate.cq_count, attr.moderate.cq_period));
    0
}
