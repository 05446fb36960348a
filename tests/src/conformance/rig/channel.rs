//! Completion channels.

use std::ffi::c_uint;
use std::ptr;
use std::rc::Rc;
use std::thread;
use std::time::Duration;

use doorbell_verbs_sys::*;

use super::{Cq, Device, Errno, Object};

/// A completion channel; its descriptor is non-blocking.
#[derive(Clone)]
pub(in crate::conformance) struct Channel(Rc<Object<ibv_comp_channel>>, Device);

impl Device {
    pub(in crate::conformance) fn channel(&self) -> Result<Channel, Errno> {
        // SAFETY: the context is live.
        let channel = unsafe { (self.api().create_comp_channel)(self.raw()) };
        let object = Object::new(self, "completion channel", channel, self.api().destroy_comp_channel)?;
        // SAFETY: just created; the descriptor is its own.
        unsafe {
            let fd = (*channel).fd;
            libc::fcntl(fd, libc::F_SETFL, libc::fcntl(fd, libc::F_GETFL) | libc::O_NONBLOCK);
        }
        Ok(Channel(Rc::new(object), self.clone()))
    }
}

impl Channel {
    pub(super) fn raw(&self) -> *mut ibv_comp_channel {
        self.0.get()
    }

    pub(in crate::conformance) fn destroy(&self) -> Errno {
        self.0.destroy()
    }

    /// The cq_context of its completion queue, or `None` on timeout. The caller acknowledges it.
    pub(in crate::conformance) fn event(&self, within: Duration) -> Result<Option<usize>, Errno> {
        // SAFETY: live.
        let fd = unsafe { (*self.raw()).fd };
        if !readable(fd, within) {
            return Ok(None);
        }
        let (mut cq, mut context) = (ptr::null_mut(), ptr::null_mut());
        // SAFETY: live; both may be written.
        let result = unsafe { (self.1.api().get_cq_event)(self.raw(), &mut cq, &mut context) };
        if result == 0 {
            return Ok(Some(context.addr()));
        }
        match Errno::last() {
            Errno(libc::EAGAIN) => Ok(None),
            error => Err(error),
        }
    }
}

impl Cq {
    pub(in crate::conformance) fn acknowledge(&self, events: c_uint) {
        // SAFETY: live; this many events of it were taken, by the case's own count.
        unsafe { (self.device().api().ack_cq_events)(self.raw(), events) };
    }

    pub(in crate::conformance) fn arm(&self, solicited_only: bool) -> Errno {
        // SAFETY: live.
        Errno(unsafe { inline::req_notify_cq(self.raw(), i32::from(solicited_only)) })
    }
}

struct Sent(*mut ibv_cq);

// SAFETY: verbs may be called from any thread (man pages).
unsafe impl Send for Sent {}

impl Cq {
    /// Acknowledges its event after `after`; returns whether the destruction waited for that.
    pub(in crate::conformance) fn destroy_in_parallel(&self, after: Duration) -> (bool, Errno) {
        let api = self.device().api();
        let taken = Sent(self.take());
        let cq = taken.0;
        thread::scope(|scope| {
            let destruction = scope.spawn(move || {
                let taken = taken;
                // SAFETY: live, and no longer used by the case.
                unsafe { (api.destroy_cq)(taken.0) }
            });
            thread::sleep(after);
            let waited = !destruction.is_finished();
            if waited {
                // SAFETY: live, as its destruction waits for this; one event of it was taken.
                unsafe { (api.ack_cq_events)(cq, 1) };
            }
            (waited, Errno(destruction.join().unwrap_or(-1)))
        })
    }
}

/// Whether a descriptor becomes readable within that time.
pub(super) fn readable(fd: i32, within: Duration) -> bool {
    let mut poll = libc::pollfd {
        fd,
        events: libc::POLLIN,
        revents: 0,
    };
    // SAFETY: one descriptor.
    unsafe { libc::poll(&mut poll, 1, within.as_millis() as i32) == 1 }
}
