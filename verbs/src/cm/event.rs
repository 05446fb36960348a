//! Events, copied out of the library's and acknowledged (rdma_get_cm_event(3)).

use core::mem::MaybeUninit;

use doorbell_verbs_sys::rdmacm as sys;

use crate::ah::AddressVector;
use crate::qp::UdEndpoint;
use crate::types::{Gid, Lid, Mtu, QKey, Qpn};

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
    /// Of a datagram service: its queue pair, and the path to it.
    pub(super) service: Option<ServicePath>,
    pub(super) child: Option<Child>,
}

#[derive(Debug, Clone, Copy)]
pub(super) struct ServicePath {
    pub(super) endpoint: UdEndpoint,
    pub(super) vector: AddressVector,
    pub(super) gid_index: Option<u8>,
}

impl ServicePath {
    fn of(service: &sys::rdma_ud_param) -> Self {
        let (vector, gid_index) = AddressVector::of(&service.ah_attr);
        let endpoint = UdEndpoint {
            gid: Gid::from_sys(&service.ah_attr.grh.dgid),
            lid: Lid(service.ah_attr.dlid),
            qpn: Qpn::truncated(service.qp_num),
            qkey: QKey(service.qkey),
            mtu: Mtu::B4096,
        };
        Self {
            endpoint,
            vector,
            gid_index,
        }
    }
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
            service: None,
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
            // SAFETY: live; events of RDMA_PS_UDP use `ud`, those of a connected port space `conn`
            // (rdma_get_cm_event(3)).
            let (private_data, len) = unsafe {
                if (*id).ps == sys::RDMA_PS_UDP {
                    let service = (*raw).param.ud;
                    event.service = Some(ServicePath::of(&service));
                    (service.private_data, service.private_data_len)
                } else {
                    let conn = (*raw).param.conn;
                    event.responder_resources = conn.responder_resources;
                    event.initiator_depth = conn.initiator_depth;
                    (conn.private_data, conn.private_data_len)
                }
            };
            if !private_data.is_null() {
                // SAFETY: that many bytes are there until the event is acknowledged.
                let private_data = unsafe { core::slice::from_raw_parts(private_data.cast::<u8>(), len.into()) };
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
