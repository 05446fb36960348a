//! The ABI of librdmacm: the types of `<rdma/rdma_cma.h>` (rdma-core 44), and its functions.
//!
//! It opens the system's libibverbs: [`Api::load`](crate::Api::load)'s table fits it.

use core::ffi::{c_int, c_void};
use std::sync::OnceLock;

use libc::sockaddr;
use libloading::os::unix::Library;

use crate::api::{LoadError, api, open};
use crate::bindings::*;

// Generated: its names are C's, and its items are documented by the man pages.
#[allow(missing_docs, non_camel_case_types, clippy::all)]
mod bindings;

pub use bindings::*;

api! {
    /// The functions of librdmacm (man pages: `rdma_` before the field's name).
    struct CmApi from LIBRARY;
    required {
        /// rdma_create_event_channel(3).
        fn create_event_channel = "rdma_create_event_channel"() -> *mut rdma_event_channel;
        /// rdma_destroy_event_channel(3).
        fn destroy_event_channel = "rdma_destroy_event_channel"(channel: *mut rdma_event_channel);
        /// rdma_create_id(3).
        fn create_id = "rdma_create_id"(channel: *mut rdma_event_channel, id: *mut *mut rdma_cm_id, context: *mut c_void, ps: rdma_port_space) -> c_int;
        /// rdma_destroy_id(3).
        fn destroy_id = "rdma_destroy_id"(id: *mut rdma_cm_id) -> c_int;
        /// rdma_migrate_id(3).
        fn migrate_id = "rdma_migrate_id"(id: *mut rdma_cm_id, channel: *mut rdma_event_channel) -> c_int;
        /// rdma_bind_addr(3).
        fn bind_addr = "rdma_bind_addr"(id: *mut rdma_cm_id, address: *mut sockaddr) -> c_int;
        /// rdma_resolve_addr(3).
        fn resolve_addr = "rdma_resolve_addr"(id: *mut rdma_cm_id, source: *mut sockaddr, destination: *mut sockaddr, timeout_ms: c_int) -> c_int;
        /// rdma_resolve_route(3).
        fn resolve_route = "rdma_resolve_route"(id: *mut rdma_cm_id, timeout_ms: c_int) -> c_int;
        /// rdma_connect(3).
        fn connect = "rdma_connect"(id: *mut rdma_cm_id, parameters: *mut rdma_conn_param) -> c_int;
        /// rdma_establish(3).
        fn establish = "rdma_establish"(id: *mut rdma_cm_id) -> c_int;
        /// rdma_listen(3).
        fn listen = "rdma_listen"(id: *mut rdma_cm_id, backlog: c_int) -> c_int;
        /// rdma_accept(3).
        fn accept = "rdma_accept"(id: *mut rdma_cm_id, parameters: *mut rdma_conn_param) -> c_int;
        /// rdma_reject(3).
        fn reject = "rdma_reject"(id: *mut rdma_cm_id, private_data: *const c_void, private_data_len: u8) -> c_int;
        /// rdma_disconnect(3).
        fn disconnect = "rdma_disconnect"(id: *mut rdma_cm_id) -> c_int;
        /// rdma_get_cm_event(3): blocks unless the channel's `fd` is non-blocking.
        fn get_cm_event = "rdma_get_cm_event"(channel: *mut rdma_event_channel, event: *mut *mut rdma_cm_event) -> c_int;
        /// rdma_ack_cm_event(3).
        fn ack_cm_event = "rdma_ack_cm_event"(event: *mut rdma_cm_event) -> c_int;
        /// rdma_init_qp_attr: the connection's attributes for a transition to the state in `attr`.
        fn init_qp_attr = "rdma_init_qp_attr"(id: *mut rdma_cm_id, attr: *mut ibv_qp_attr, attr_mask: *mut c_int) -> c_int;
    }
    optional {}
}

const LIBRARY: &str = "librdmacm.so.1";

impl CmApi {
    /// The functions of the system's `librdmacm.so.1`, loaded once for the life of the process.
    ///
    /// # Errors
    /// When the library or a required function is missing; the result of the first call is final.
    pub fn load() -> Result<&'static Self, LoadError> {
        static SYSTEM: OnceLock<Result<CmApi, LoadError>> = OnceLock::new();
        SYSTEM
            .get_or_init(|| {
                // SAFETY: librdmacm's initialisers have no requirements of their callers.
                let library = unsafe {
                    open(
                        LIBRARY,
                        "install rdma-core's librdmacm1, or connect over TCP by `exchange`",
                    )
                }?;
                Self::fill(library)
            })
            .as_ref()
            .map_err(Clone::clone)
    }
}
