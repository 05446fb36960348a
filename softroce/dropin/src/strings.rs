//! Human-readable names. Scripts match rdma-core's words, so these are identical; tests/dropin
//! compares them.

use core::ffi::{CStr, c_char, c_int};

const NODE_TYPES: [&CStr; 8] = [
    c"unknown",
    c"InfiniBand channel adapter",
    c"InfiniBand switch",
    c"InfiniBand router",
    c"iWARP NIC",
    c"usNIC",
    c"usNIC UDP",
    c"unspecified",
];

const PORT_STATES: [&CStr; 6] = [
    c"no state change (NOP)",
    c"down",
    c"init",
    c"armed",
    c"active",
    c"active defer",
];

const EVENT_TYPES: [&CStr; 20] = [
    c"CQ error",
    c"local work queue catastrophic error",
    c"invalid request local work queue error",
    c"local access violation work queue error",
    c"communication established",
    c"send queue drained",
    c"path migrated",
    c"path migration request error",
    c"local catastrophic error",
    c"port active",
    c"port error",
    c"LID change",
    c"P_Key change",
    c"SM change",
    c"SRQ catastrophic error",
    c"SRQ limit reached",
    c"last WQE reached",
    c"client reregistration",
    c"GID table change",
    c"WQ fatal",
];

const WC_STATUSES: [&CStr; 24] = [
    c"success",
    c"local length error",
    c"local QP operation error",
    c"local EE context operation error",
    c"local protection error",
    c"Work Request Flushed Error",
    c"memory management operation error",
    c"bad response error",
    c"local access error",
    c"remote invalid request error",
    c"remote access error",
    c"remote operation error",
    c"transport retry counter exceeded",
    c"RNR retry counter exceeded",
    c"local RDD violation error",
    c"remote invalid RD request",
    c"aborted error",
    c"invalid EE context number",
    c"invalid EE context state",
    c"fatal error",
    c"response timeout error",
    c"general error",
    c"TM error",
    c"TM software rendezvous",
];

fn name(names: &[&'static CStr], value: c_int) -> *const c_char {
    usize::try_from(value)
        .ok()
        .and_then(|index| names.get(index))
        .unwrap_or(&c"unknown")
        .as_ptr()
}

pub(crate) unsafe extern "C" fn node_type(value: c_int) -> *const c_char {
    name(&NODE_TYPES, value)
}

pub(crate) unsafe extern "C" fn port_state(value: c_int) -> *const c_char {
    name(&PORT_STATES, value)
}

pub(crate) unsafe extern "C" fn event_type(value: c_int) -> *const c_char {
    name(&EVENT_TYPES, value)
}

pub(crate) unsafe extern "C" fn wc_status(value: c_int) -> *const c_char {
    name(&WC_STATUSES, value)
}
