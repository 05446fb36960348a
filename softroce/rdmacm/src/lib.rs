//! The functions of librdmacm over the userspace RoCEv2 device: connecting by IP address
//! (rdma_cm(7)), with real management datagrams on queue pair 1.
//!
//! Every function has C's name and prototype, and the contract of its man page: pointers are to
//! live objects that these functions created ("ours" in safety comments). softroce/dropin exports
//! them with symbol versions. They work on contexts of [`doorbell_softroce_ibverbs`], which this
//! library opens itself and keeps open.
//!
//! - `id`: the identifier, `route`: its binding and route, `queue_pair`: its queue pair,
//!   `endpoint`: all in one call;
//! - `connection`: commands to the device's connection manager, `dispatch`: its events to
//!   identifiers, `channel`: events to the application.
//!
//! A panic, which would be a bug here, aborts the process, as this ABI defines.

mod address;
mod addrinfo;
mod channel;
mod connection;
mod devices;
mod dispatch;
mod endpoint;
mod errno;
mod id;
mod multicast;
mod names;
mod ports;
mod queue_pair;
mod route;
mod rsocket;
mod table;

pub use addrinfo::{rdma_freeaddrinfo, rdma_getaddrinfo};
pub use channel::{rdma_ack_cm_event, rdma_create_event_channel, rdma_destroy_event_channel, rdma_get_cm_event};
pub use connection::{
    rdma_accept, rdma_connect, rdma_disconnect, rdma_establish, rdma_listen, rdma_notify, rdma_reject, rdma_reject_ece,
};
pub use devices::{rdma_free_devices, rdma_get_devices};
pub use endpoint::{rdma_create_ep, rdma_destroy_ep, rdma_get_request};
pub use id::{
    rdma_create_id, rdma_destroy_id, rdma_get_remote_ece, rdma_migrate_id, rdma_set_local_ece, rdma_set_option,
};
pub use multicast::{rdma_join_multicast, rdma_join_multicast_ex, rdma_leave_multicast};
pub use names::rdma_event_str;
pub use queue_pair::{
    rdma_create_qp, rdma_create_qp_ex, rdma_create_srq, rdma_create_srq_ex, rdma_destroy_qp, rdma_destroy_srq,
    rdma_init_qp_attr,
};
pub use route::{rdma_bind_addr, rdma_get_dst_port, rdma_get_src_port, rdma_resolve_addr, rdma_resolve_route};
pub use rsocket::*;
pub use table::API;
