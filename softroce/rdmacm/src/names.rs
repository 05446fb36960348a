//! The names of events: rdma_event_str(3).

use core::ffi::c_char;
use std::ffi::CStr;

use doorbell_verbs_sys::rdmacm::rdma_cm_event_type;

/// Indexed by `enum rdma_cm_event_type`.
const NAMES: [&CStr; 16] = [
    c"RDMA_CM_EVENT_ADDR_RESOLVED",
    c"RDMA_CM_EVENT_ADDR_ERROR",
    c"RDMA_CM_EVENT_ROUTE_RESOLVED",
    c"RDMA_CM_EVENT_ROUTE_ERROR",
    c"RDMA_CM_EVENT_CONNECT_REQUEST",
    c"RDMA_CM_EVENT_CONNECT_RESPONSE",
    c"RDMA_CM_EVENT_CONNECT_ERROR",
    c"RDMA_CM_EVENT_UNREACHABLE",
    c"RDMA_CM_EVENT_REJECTED",
    c"RDMA_CM_EVENT_ESTABLISHED",
    c"RDMA_CM_EVENT_DISCONNECTED",
    c"RDMA_CM_EVENT_DEVICE_REMOVAL",
    c"RDMA_CM_EVENT_MULTICAST_JOIN",
    c"RDMA_CM_EVENT_MULTICAST_ERROR",
    c"RDMA_CM_EVENT_ADDR_CHANGE",
    c"RDMA_CM_EVENT_TIMEWAIT_EXIT",
];

/// rdma_event_str(3): a static string, for any number.
pub extern "C" fn rdma_event_str(event: rdma_cm_event_type) -> *const c_char {
    let name = NAMES.get(event as usize).copied().unwrap_or(c"UNKNOWN EVENT");
    name.as_ptr()
}
