//! The functions as a table, for programs with this device built in.

use doorbell_verbs_sys::Promise;
use doorbell_verbs_sys::rdmacm::CmApi;

use crate::{
    rdma_accept, rdma_ack_cm_event, rdma_bind_addr, rdma_connect, rdma_create_event_channel, rdma_create_id,
    rdma_destroy_event_channel, rdma_destroy_id, rdma_disconnect, rdma_establish, rdma_get_cm_event, rdma_init_qp_attr,
    rdma_listen, rdma_migrate_id, rdma_reject, rdma_resolve_addr, rdma_resolve_route,
};

/// The connection manager over the devices of [`doorbell_softroce_ibverbs::API`].
pub static API: CmApi = CmApi {
    // SAFETY: each function below is that of its name, and follows its man page: identifiers,
    // channels and events live in boxes that only their destroying function frees, and contexts of
    // identifiers stay open.
    promise: unsafe { Promise::given() },
    create_event_channel: rdma_create_event_channel,
    destroy_event_channel: rdma_destroy_event_channel,
    create_id: rdma_create_id,
    destroy_id: rdma_destroy_id,
    migrate_id: rdma_migrate_id,
    bind_addr: rdma_bind_addr,
    resolve_addr: rdma_resolve_addr,
    resolve_route: rdma_resolve_route,
    connect: rdma_connect,
    establish: rdma_establish,
    listen: rdma_listen,
    accept: rdma_accept,
    reject: rdma_reject,
    disconnect: rdma_disconnect,
    get_cm_event: rdma_get_cm_event,
    ack_cm_event: rdma_ack_cm_event,
    init_qp_attr: rdma_init_qp_attr,
};
