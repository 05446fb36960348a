//! Events, copied out of the library's and acknowledged (rdma_get_cm_event(3)).

use core::mem::MaybeUninit;

use doorbell_verbs_sys::rdmacm as sys;

#[derive(Debug)]
pub(super) struct Event {
    pub(super) kind: sys::rdma_cm_event_type,
    /// 0, a negative errno, or the reason of a rejection.
    pub(super) status: i32,
    /// The peer's private data, if the event carries any; padded with zeros by most transports.
    pub(super) private_data: Vec<u8>,
    /// READs and atomics that this side has to serve at once.
    pub(super) responder_resources: u8,
    /// READs and atomics that this side may have outstanding.
    pub(super) initiator_depth: u8,
    pub(super) child: Option<Child>,
}

/// An identifier created by the library and not owned yet.
#[derive(Debug)]
pub(super) struct Child(pub(super) *mut sys::rdma_cm_id);

impl Event {
    /// # Safety
    /// `raw` is an event of the library's that has not been acknowledged.
    pub(super) unsafe fn copy(raw: *const sys::rdma_cm_event) -> Self {
        // SAFETY: live by contract.
        let (kind, status, id) = unsafe { ((*raw).event, (*raw).status, (*raw).id) };
        let mut event = Self {
            kind,
            status,
            private_data: Vec::new(),
            responder_resources: 0,
            initiator_depth: 0,
            child: (kind == sys::RDMA_CM_EVENT_CONNECT_REQUEST).then_some(Child(id)),
        };
        let connects = matches!(
            kind,
            sys::RDMA_CM_EVENT_CONNECT_REQUEST
                | sys::RDMA_CM_EVENT_CONNECT_RESPONSE
                | sys::RDMA_CM_EVENT_REJECTED
                | sys::RDMA_CM_EVENT_ESTABLISHED
        );
        if connects {
            // SAFETY: events of a connected port space use `conn` (rdma_get_cm_event(3)).
            let conn = unsafe { (*raw).param.conn };
            event.responder_resources = conn.responder_resources;
            event.initiator_depth = conn.initiator_depth;
            if !conn.private_data.is_null() {
                // SAFETY: that many bytes are there until the event is acknowledged.
                let private_data = unsafe {
                    core::slice::from_raw_parts(conn.private_data.cast::<u8>(), conn.private_data_len.into())
                };
                event.private_data = private_data.to_vec();
            }
        }
        event
    }
}

pub(super) fn no_parameters() -> sys::rdma_conn_param {
    // SAFETY: all-zero is a valid value of this struct of integers and a pointer.
    unsafe { MaybeUninit::zeroed().assume_init() }
}
