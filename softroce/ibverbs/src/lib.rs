//! The functions of libibverbs over the userspace RoCEv2 device, as the [`Api`] table.
//!
//! [`api`] replaces the system's library in the safe API. The devices are those given to
//! [`configure`], or by the environment ([`DeviceConfig::from_env`]), and those [added](add).
//!
//! Every function is `extern "C"` with the contract of its man page: pointers are to live objects
//! that these functions created ("ours" in safety comments), posted and registered memory stays
//! valid. A panic, which would be a bug here, aborts the process, as this ABI defines.
//!
//! Each object is a C struct in rdma-core's layout, followed by its Rust handle; C gets a pointer
//! to the former. An object's memory is freed by its destroying function only.

mod address;
mod attributes;
mod completion;
mod context;
mod device_file;
mod device_memory;
mod domain;
mod errno;
mod event;
mod extended_cq;
mod gids;
mod multicast;
mod placement;
mod post;
mod protection;
mod query;
mod queue_pair;
mod registry;
mod shared_receive;
mod window;
mod wr;
mod xrc;

pub use address::init_ah_from_wc;
pub use context::{device_of, import_device};
pub use device_memory::{import_dm, unimport_dm};
pub use domain::{import_pd, unimport_pd};
pub use doorbell_softroce::{ConfigError, CopyMode, DeviceConfig, LinkChoice, OpenError};
use doorbell_verbs_sys::{Api, Promise};
pub use gids::{GID_TABLE_LEN, gid_table, routable_index};
pub use multicast::{attach_mcast, detach_mcast};
pub use protection::{import_mr, unimport_mr};
pub use registry::{
    AddedDevice, AlreadyInUse, add, configure, copy_modes, is_configured, last_open_error, process_group,
};

/// The table, which the drop-in library's symbols call.
pub static API: Api = Api {
    // SAFETY: each function below is the verb of its name, and follows its man page: objects live
    // in boxes that only their destroying function frees, and the device copies to and from
    // registered memory under a lock that deregistering and destroying take.
    promise: unsafe { Promise::given() },
    get_device_list: registry::get_device_list,
    free_device_list: registry::free_device_list,
    get_device_name: registry::get_device_name,
    get_device_guid: registry::get_device_guid,
    open_device: context::open_device,
    close_device: context::close_device,
    get_async_event: event::get_async_event,
    ack_async_event: event::ack_async_event,
    query_device: query::query_device,
    query_port: query::query_port_compat,
    query_gid: query::query_gid,
    query_pkey: query::query_pkey,
    alloc_pd: domain::alloc_pd,
    dealloc_pd: domain::dealloc_pd,
    reg_mr: protection::reg_mr,
    dereg_mr: protection::dereg_mr,
    create_comp_channel: completion::create_comp_channel,
    destroy_comp_channel: completion::destroy_comp_channel,
    create_cq: completion::create_cq,
    resize_cq: completion::resize_cq,
    destroy_cq: completion::destroy_cq,
    get_cq_event: completion::get_cq_event,
    ack_cq_events: completion::ack_cq_events,
    create_qp: queue_pair::create_qp,
    query_qp: queue_pair::query_qp,
    modify_qp: queue_pair::modify_qp,
    destroy_qp: queue_pair::destroy_qp,
    fork_init: context::fork_init,
    create_srq: Some(shared_receive::create_srq),
    modify_srq: Some(shared_receive::modify_srq),
    query_srq: Some(shared_receive::query_srq),
    destroy_srq: Some(shared_receive::destroy_srq),
    create_ah: Some(address::create_ah),
    create_ah_from_wc: Some(address::create_ah_from_wc),
    destroy_ah: Some(address::destroy_ah),
    attach_mcast: Some(multicast::attach_mcast),
    detach_mcast: Some(multicast::detach_mcast),
    rereg_mr: Some(protection::rereg_mr),
    reg_mr_iova: Some(protection::reg_mr_iova),
    reg_mr_iova2: Some(protection::reg_mr_iova2),
    reg_dmabuf_mr: Some(protection::reg_dmabuf_mr),
    query_gid_ex: Some(query::query_gid_ex),
    query_gid_table: Some(query::query_gid_table),
    get_pkey_index: Some(query::get_pkey_index),
    get_device_index: None,
    qp_to_qp_ex: Some(queue_pair::qp_to_qp_ex),
    query_ece: None,
    set_ece: None,
    query_qp_data_in_order: None,
};

/// The soft devices as a libibverbs.
pub fn api() -> &'static Api {
    &API
}
