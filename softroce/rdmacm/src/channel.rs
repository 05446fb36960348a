//! Event channels and their events: rdma_create_event_channel(3), rdma_get_cm_event(3).
//!
//! The effects of events, such as queue pair transitions, happen in the thread that takes the
//! event, as the man pages require.

use core::ffi::c_int;
use std::os::fd::AsRawFd;
use std::ptr;
use std::sync::Arc;

use doorbell_softroce::EventQueue;
use doorbell_verbs_sys::rdmacm::{
    rdma_cm_event, rdma_cm_event__bindgen_ty_1, rdma_cm_event_type, rdma_conn_param, rdma_event_channel, rdma_ud_param,
};

use crate::connection;
use crate::errno::{self, Errno};
use crate::id::{Shared, UnownedId};

/// Identifiers share it: events queued after the channel is destroyed are dropped.
pub(crate) type Queue = EventQueue<Pending>;

#[repr(C)]
struct Channel {
    base: rdma_event_channel,
    queue: Arc<Queue>,
}

pub(crate) struct Pending {
    /// The identifier whose events it counts for: its own, or of a request the listener's.
    pub(crate) to: Arc<Shared>,
    pub(crate) info: EventInfo,
}

pub(crate) struct EventInfo {
    pub(crate) kind: rdma_cm_event_type,
    /// 0, a negative errno, or the protocol's reason code.
    pub(crate) status: c_int,
    pub(crate) param: Param,
    pub(crate) private_data: Vec<u8>,
    pub(crate) child: Option<UnownedId>,
}

/// The active member of the event's union. Private data is added when the event is taken.
pub(crate) enum Param {
    None,
    Conn(rdma_conn_param),
    Ud(rdma_ud_param),
}

// SAFETY: until the event is taken a pointer to private data is null, or the context of a join,
// which is the application's and not followed here; the rest may be sent.
unsafe impl Send for Param {}

impl EventInfo {
    pub(crate) fn plain(kind: rdma_cm_event_type, status: c_int) -> Self {
        Self {
            kind,
            status,
            param: Param::None,
            private_data: Vec::new(),
            child: None,
        }
    }
}

#[repr(C)]
struct SoftEvent {
    base: rdma_cm_event,
    to: Arc<Shared>,
    /// Referenced by `base`.
    private_data: Vec<u8>,
}

/// # Safety
/// `channel` came from [`rdma_create_event_channel`] and is live.
pub(crate) unsafe fn queue_of(channel: *mut rdma_event_channel) -> Arc<Queue> {
    // SAFETY: ours by contract, `base` being its first member.
    Arc::clone(unsafe { &(*channel.cast::<Channel>()).queue })
}

/// rdma_create_event_channel(3). Its descriptor may be polled, and made non-blocking (fcntl(2)).
pub extern "C" fn rdma_create_event_channel() -> *mut rdma_event_channel {
    match EventQueue::new() {
        Ok(queue) => {
            let base = rdma_event_channel { fd: queue.as_raw_fd() };
            let queue = Arc::new(queue);
            Box::into_raw(Box::new(Channel { base, queue })).cast()
        }
        Err(error) => errno::null(errno::of(&error)),
    }
}

/// rdma_create_event_channel(3): no identifier may use it any more.
///
/// # Safety
/// `channel` came from [`rdma_create_event_channel`], and is not used again.
pub unsafe extern "C" fn rdma_destroy_event_channel(channel: *mut rdma_event_channel) {
    // SAFETY: by contract, from a Box.
    drop(unsafe { Box::from_raw(channel.cast::<Channel>()) });
}

/// rdma_get_cm_event(3).
///
/// # Safety
/// `channel` is null or live and ours; `event` is null or writable.
pub unsafe extern "C" fn rdma_get_cm_event(channel: *mut rdma_event_channel, event: *mut *mut rdma_cm_event) -> c_int {
    if channel.is_null() || event.is_null() {
        return errno::result(Err(libc::EINVAL));
    }
    // SAFETY: not null, so live by contract.
    let queue = unsafe { queue_of(channel) };
    // SAFETY: writable by contract.
    errno::result(take(&queue).map(|taken| unsafe { event.write(taken) }))
}

pub(crate) fn take(queue: &Queue) -> Result<*mut rdma_cm_event, Errno> {
    let pending = queue.wait(|pending| pending.to.count_taken());
    let Pending { to, mut info } = pending.map_err(|error| errno::of(&error))?;
    // The identifier is live until the event is acknowledged.
    connection::apply_event(&to, &mut info);
    Ok(into_event(to, info))
}

fn into_event(to: Arc<Shared>, info: EventInfo) -> *mut rdma_cm_event {
    let mut event = Box::new(SoftEvent {
        base: rdma_cm_event {
            id: to.as_ptr(),
            listen_id: ptr::null_mut(),
            event: info.kind,
            status: info.status,
            // SAFETY: all-zero is valid for either member: integers and pointers.
            param: unsafe { core::mem::zeroed::<rdma_cm_event__bindgen_ty_1>() },
        },
        to,
        private_data: info.private_data,
    });
    if let Some(child) = info.child {
        event.base.listen_id = event.base.id;
        event.base.id = child.into_raw();
    }
    let (data, len) = match event.private_data.len() {
        0 => (ptr::null(), 0),
        // At most the private data of a message.
        len => (event.private_data.as_ptr().cast(), len as u8),
    };
    match info.param {
        Param::None => {}
        Param::Conn(conn) => {
            event.base.param.conn = rdma_conn_param {
                private_data: data,
                private_data_len: len,
                ..conn
            };
        }
        Param::Ud(ud) if len == 0 => event.base.param.ud = ud,
        Param::Ud(ud) => {
            event.base.param.ud = rdma_ud_param {
                private_data: data,
                private_data_len: len,
                ..ud
            };
        }
    }
    Box::into_raw(event).cast()
}

/// rdma_ack_cm_event(3).
///
/// # Safety
/// `event` is null, or came from [`rdma_get_cm_event`] and is not used again.
pub unsafe extern "C" fn rdma_ack_cm_event(event: *mut rdma_cm_event) -> c_int {
    if event.is_null() {
        return errno::result(Err(libc::EINVAL));
    }
    // SAFETY: from a Box by contract.
    let event = unsafe { Box::from_raw(event.cast::<SoftEvent>()) };
    event.to.count_acknowledged();
    0
}
