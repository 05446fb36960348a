//! Errors outside the data path; messages name verb, object and remedy. Those of the data path are
//! [`PostError`](crate::PostError) and [`CompletionError`](crate::CompletionError).

mod advice;

use core::ffi::c_int;
use std::io;

use doorbell_verbs_sys as sys;

use advice::{
    create_advice, create_cq_advice, device_memory_advice, list_devices, list_gids, moderate_advice, open_advice,
    port_advice, resize_advice, window_advice,
};
pub(crate) use advice::{modify_advice, register_advice};

use crate::port::PortState;
use crate::qp::TransportKind;
use crate::qp::attributes::Explanation;
use crate::types::{Gid, Mtu};

/// Converts a verb's result: 0, an errno, or a negative value with `errno` set.
pub(crate) fn check(result: c_int) -> Result<(), io::Error> {
    match result {
        0 => Ok(()),
        errno if errno > 0 => Err(io::Error::from_raw_os_error(errno)),
        _ => Err(io::Error::last_os_error()),
    }
}

/// Errors of libraries, devices, ports and protection domains.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum DeviceError {
    /// The system's libibverbs could not be loaded.
    #[error(transparent)]
    Library(#[from] sys::LoadError),
    /// ibv_get_device_list(3) failed.
    #[error("ibv_get_device_list: {0}; is the kernel's ib_uverbs module loaded?")]
    List(io::Error),
    /// There is no device of that name.
    #[error("no RDMA device {name:?}; {}", list_devices(.available))]
    NoDevice {
        /// The requested name.
        name: String,
        /// The names of the devices present.
        available: Vec<String>,
    },
    /// ibv_open_device(3) failed.
    #[error("ibv_open_device({name}): {error}; {}", open_advice(.error))]
    Open {
        /// The device's name.
        name: String,
        /// The library's error.
        error: io::Error,
    },
    /// A query of a device, a port or a GID table failed.
    #[error("{verb}({object}): {error}")]
    Query {
        /// The verb that failed.
        verb: &'static str,
        /// The device, and the port or index where there is one.
        object: String,
        /// The library's error.
        error: io::Error,
    },
    /// The device has no such port.
    #[error("{device} has no port {port}: it has ports 1 to {ports}")]
    NoPort {
        /// The device's name.
        device: String,
        /// The requested port.
        port: u8,
        /// How many it has.
        ports: u8,
    },
    /// There is no GID at that index of the port's table.
    #[error("no GID at index {index} of {device} port {port}; {}", list_gids(.available))]
    NoGid {
        /// The device's name.
        device: String,
        /// The port.
        port: u8,
        /// The requested index.
        index: IndexOrAny,
        /// The indices that hold a GID.
        available: Vec<(u32, Gid)>,
    },
    /// ibv_alloc_pd(3) failed.
    #[error("ibv_alloc_pd({device}): {error}")]
    ProtectionDomain {
        /// The device's name.
        device: String,
        /// The library's error.
        error: io::Error,
    },
}

/// An index of a table, or any that holds an entry.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum IndexOrAny {
    /// This one.
    Index(u32),
    /// Any index.
    Any,
}

impl core::fmt::Display for IndexOrAny {
    fn fmt(&self, f: &mut core::fmt::Formatter<'_>) -> core::fmt::Result {
        match self {
            Self::Index(index) => index.fmt(f),
            Self::Any => f.write_str("(any)"),
        }
    }
}

/// Errors of memory registration, memory windows and device memory.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum MemoryError {
    /// The memory is empty.
    #[error("ibv_reg_mr: the memory is empty; register at least one byte")]
    Empty,
    /// A buffer longer than a message may be.
    #[error("a buffer of {len} bytes is longer than a message may be ({max} bytes); register it with register_chunks")]
    TooLong {
        /// Its length in bytes.
        len: usize,
        /// The longest, in bytes.
        max: usize,
    },
    /// ibv_reg_mr(3) failed.
    #[error("ibv_reg_mr({device}, {len} bytes): {error}; {advice}")]
    Register {
        /// The device's name.
        device: String,
        /// Its length in bytes.
        len: usize,
        /// Advice.
        advice: String,
        /// The library's error.
        error: io::Error,
    },
    /// Huge pages could not be allocated.
    #[error(
        "{len} bytes of huge pages of {page_kib} KiB: {error}; set some aside (/sys/kernel/mm/hugepages/hugepages-{page_kib}kB/nr_hugepages), or use Memory::transparent_huge"
    )]
    HugePages {
        /// The requested length in bytes.
        len: usize,
        /// The size of the pages, in KiB.
        page_kib: usize,
        /// The error of mmap(2).
        error: io::Error,
    },
    /// Memory that other processes can map could not be allocated.
    #[error(
        "{len} bytes of shared memory (memfd_create, mmap): {error}; use Memory::zeroed, which no other process can map"
    )]
    Shared {
        /// The requested length in bytes.
        len: usize,
        /// The system's error.
        error: io::Error,
    },
    /// The device has no on-demand paging.
    #[error("{device} cannot page on demand: register without on_demand, which pins the memory")]
    NoOnDemandPaging {
        /// The device's name.
        device: String,
    },
    /// ibv_advise_mr(3) failed.
    #[error("ibv_advise_mr({device}): {error}; only regions that page on demand can be prefetched")]
    Prefetch {
        /// The device's name.
        device: String,
        /// The library's error.
        error: io::Error,
    },
    /// ibv_alloc_mw(3) failed.
    #[error("ibv_alloc_mw({device}, type {kind}): {error}; {}", window_advice(.error))]
    Window {
        /// The device's name.
        device: String,
        /// Its type: 1 or 2.
        kind: u32,
        /// The library's error.
        error: io::Error,
    },
    /// ibv_rereg_mr(3) failed.
    #[error("ibv_rereg_mr({device}): {error}; deregister the memory (Buffer::into_memory) and register it anew")]
    Reregister {
        /// The device's name.
        device: String,
        /// The library's error.
        error: io::Error,
    },
    /// The device cannot register dma-bufs.
    #[error(
        "{device} cannot register a dma-buf: it takes a device with that ability (mlx5, efa, irdma, bnxt_re, mana), Linux 5.12 and rdma-core 34; without it copy \
         through host memory, or load nvidia_peermem"
    )]
    NoDmaBuf {
        /// The device's name.
        device: String,
    },
    /// An address at which a dma-buf cannot be registered.
    #[error(
        "a dma-buf's {len} bytes at offset {offset:#x} cannot be known by addresses from {iova:#x} on: both must have the same place in their page, and the end lie in \
         the address space"
    )]
    DmaBufAddress {
        /// The offset in the dma-buf, in bytes.
        offset: u64,
        /// The requested address.
        iova: u64,
        /// Its length in bytes.
        len: usize,
    },
    /// ibv_reg_dmabuf_mr(3) failed.
    #[error("ibv_reg_dmabuf_mr({device}, {len} bytes): {error}; is the descriptor a dma-buf, and the range in it?")]
    RegisterDmaBuf {
        /// The device's name.
        device: String,
        /// Its length in bytes.
        len: usize,
        /// The library's error.
        error: io::Error,
    },
    /// A range beyond what the owner lends.
    #[error("bytes {start}..{end} are beyond the {len} bytes of their owner")]
    BeyondOwner {
        /// The first byte.
        start: usize,
        /// The byte after the last.
        end: usize,
        /// The number of bytes.
        len: usize,
    },
    /// A device memory verb failed.
    #[error("{verb}({device}, {len} bytes): {error}{}", device_memory_advice(.error))]
    DeviceMemory {
        /// The verb that failed.
        verb: &'static str,
        /// The device's name.
        device: String,
        /// The length in bytes.
        len: usize,
        /// The library's error.
        error: io::Error,
    },
    /// A range beyond the device memory.
    #[error("{len} bytes at offset {offset} are beyond device memory of {whole} bytes")]
    BeyondDeviceMemory {
        /// The offset in bytes.
        offset: u64,
        /// The length in bytes.
        len: usize,
        /// The length of the device memory, in bytes.
        whole: u64,
    },
    /// Device memory and protection domain are of different devices.
    #[error("the device memory belongs to another device than {device}, in whose domain it was to be registered")]
    ForeignDeviceMemory {
        /// The device's name.
        device: String,
    },
    /// ibv_dereg_mr(3) failed; the memory stays registered, and is leaked.
    #[error("ibv_dereg_mr: {0}; the memory is leaked, because the device may still touch it")]
    Deregister(io::Error),
}

impl MemoryError {
    /// Lack of memory or of locked-memory limit: deregistering other regions may help.
    pub(crate) fn is_out_of_memory(&self) -> bool {
        matches!(self, Self::Register { error, .. } if error.kind() == io::ErrorKind::OutOfMemory)
    }
}

/// Errors of completion queues.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum CompletionQueueError {
    /// More entries than the device supports.
    #[error("a completion queue of {entries} entries: {device} has at most {max}")]
    TooLarge {
        /// The device's name.
        device: String,
        /// The requested entries.
        entries: u32,
        /// The device's limit.
        max: u32,
    },
    /// Completion queue and channel belong to different devices.
    #[error("the completion channel belongs to another device than {device}, which was to have the completion queue")]
    ForeignChannel {
        /// The device's name.
        device: String,
    },
    /// There is no such completion vector.
    #[error("completion vector {vector}: {device} has {vectors}, counted from 0")]
    NoVector {
        /// The device's name.
        device: String,
        /// The requested vector.
        vector: u32,
        /// The number of vectors.
        vectors: u32,
    },
    /// ibv_create_cq(3) or ibv_create_cq_ex(3) failed.
    #[error("{verb}({device}, {entries} entries): {error}{}", create_cq_advice(verb, .error))]
    Create {
        /// The verb.
        verb: &'static str,
        /// The device's name.
        device: String,
        /// The requested entries.
        entries: u32,
        /// The library's error.
        error: io::Error,
    },
    /// Fewer entries than its queue pairs have reserved.
    #[error(
        "ibv_resize_cq({device}): {entries} entries requested, and its queue pairs have reserved {reserved}: drop some, and poll it until it is empty"
    )]
    Reserved {
        /// The device's name.
        device: String,
        /// The requested entries.
        entries: u32,
        /// The entries that are reserved.
        reserved: u32,
    },
    /// ibv_resize_cq(3) failed; the queue is as it was.
    #[error("ibv_resize_cq({device}, {entries} entries): {error}{}", resize_advice(.error))]
    Resize {
        /// The device's name.
        device: String,
        /// The requested entries.
        entries: u32,
        /// The library's error.
        error: io::Error,
    },
    /// ibv_modify_cq(3) failed.
    #[error("ibv_modify_cq({device}, {count} completions, {period_us} µs): {error}{}", moderate_advice(.error))]
    Moderate {
        /// The device's name.
        device: String,
        /// The requested count of completions (`cq_count`).
        count: u16,
        /// The requested period in microseconds (`cq_period`).
        period_us: u16,
        /// The library's error; [`Unsupported`](io::ErrorKind::Unsupported) without moderation.
        error: io::Error,
    },
    /// ibv_poll_cq(3) or an extended poll failed: the queue and its queue pairs are broken.
    #[error("{verb}({device}): failed ({result}); the queue has overrun or the device is gone: reopen it")]
    Poll {
        /// The verb.
        verb: &'static str,
        /// The device's name.
        device: String,
        /// The verb's result.
        result: c_int,
    },
}

/// Errors of waiting for events.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum EventError {
    /// ibv_create_comp_channel(3) failed.
    #[error("ibv_create_comp_channel({device}): {error}; each channel takes a file descriptor (`ulimit -n`)")]
    CreateChannel {
        /// The device's name.
        device: String,
        /// The library's error.
        error: io::Error,
    },
    /// Events cannot be read.
    #[error("{verb}({device}): {error}; the device is gone: reopen it")]
    Wait {
        /// The verb that failed.
        verb: &'static str,
        /// The device's name.
        device: String,
        /// The library's error.
        error: io::Error,
    },
    /// The completion queue was made without a channel, so it cannot notify.
    #[error("a completion queue of {device} has no channel to wait on: make it with Context::completion_queue_on")]
    NoChannel {
        /// The device's name.
        device: String,
    },
    /// The completion queue is on another channel than the one waited on, or on none.
    #[error("the completion queue was not made on this channel: make it with Context::completion_queue_on")]
    ForeignChannel,
    /// ibv_req_notify_cq(3) failed.
    #[error("ibv_req_notify_cq({device}): {error}")]
    Arm {
        /// The device's name.
        device: String,
        /// The library's error.
        error: io::Error,
    },
    /// Another reader of the context's asynchronous events exists.
    #[error("the asynchronous events of {device} are being read already: drop that reader first")]
    ReaderTaken {
        /// The device's name.
        device: String,
    },
    /// The completion queue cannot be polled.
    #[error(transparent)]
    Poll(#[from] CompletionQueueError),
}

/// Errors of creating, connecting, modifying and querying queue pairs.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum QueuePairError {
    /// A capacity or attribute beyond the device's limit.
    #[error("ibv_create_qp({device}): {what} {requested} is beyond the device's {max}: lower it")]
    Limit {
        /// The device's name.
        device: String,
        /// Which one.
        what: &'static str,
        /// The requested value.
        requested: u32,
        /// The device's limit.
        max: u32,
    },
    /// The completion queue has too few unreserved entries for this queue pair's completions.
    #[error(
        "the queue pair's {which} queue needs {needed} entries of its completion queue, which has {capacity}, {free} of them unreserved: make one as large as all \
         the queues on it are deep together, lower the depths, or (after dropping a queue pair) poll it until it is empty"
    )]
    CompletionQueueTooSmall {
        /// "send" or "receive".
        which: &'static str,
        /// The entries needed.
        needed: u32,
        /// The entries not reserved by other queue pairs.
        free: u32,
        /// The entries it has.
        capacity: u32,
    },
    /// The queue pair and a completion queue belong to different devices.
    #[error("the {which} completion queue belongs to another device than the protection domain")]
    ForeignCompletionQueue {
        /// "send" or "receive".
        which: &'static str,
    },
    /// The queue pair and its shared receive queue belong to different devices.
    #[error("the shared receive queue belongs to another device than the protection domain")]
    ForeignSharedReceiveQueue,
    /// ibv_create_qp(3) failed.
    #[error("ibv_create_qp({device}): {error}; {}", create_advice(.error))]
    Create {
        /// The device's name.
        device: String,
        /// The library's error.
        error: io::Error,
    },
    /// The provider has no `ibv_wr_*` calls (ibv_wr_post(3)).
    #[error(
        "{device} has no ibv_wr_* for {transport} queue pairs ({reason}): leave out wr_post(), or use best_rc() and its like"
    )]
    NoWrPost {
        /// The device's name.
        device: String,
        /// The queue pair's transport.
        transport: TransportKind,
        /// What is missing.
        reason: String,
    },
    /// A setting of the builder that the transport does not have.
    #[error("a {transport} queue pair has no use for {setting}: only RC has READ and atomics, and UD has SEND alone")]
    NotOfTransport {
        /// The transport.
        transport: TransportKind,
        /// The builder's method, or the attribute.
        setting: &'static str,
    },
    /// The port is not active.
    #[error("{device} port {port} is {state}, not active: {}", port_advice(.state))]
    PortDown {
        /// The device's name.
        device: String,
        /// The port.
        port: u8,
        /// Its state.
        state: PortState,
    },
    /// The requested path MTU is larger than the port's.
    #[error(
        "path MTU {requested} is beyond the {active} of {device} port {port}: leave mtu() out, which takes the smaller of both ends', or give both network interfaces a \
         larger one (`ip link set … mtu`: 80 bytes more than the path's)"
    )]
    Mtu {
        /// The device's name.
        device: String,
        /// The port.
        port: u8,
        /// The requested MTU.
        requested: Mtu,
        /// The port's active MTU.
        active: Mtu,
    },
    /// ibv_modify_qp(3) failed.
    #[error("ibv_modify_qp({object}): {error}: {explanation}")]
    Modify {
        /// The queue pair, and the transition.
        object: String,
        /// What is wrong, in words.
        explanation: Box<Explanation>,
        /// The library's error.
        error: io::Error,
    },
    /// ibv_attach_mcast(3) or ibv_detach_mcast(3) failed.
    #[error("{call}: {error}; is it a multicast group, on RoCE of the family of the device's addresses?")]
    Multicast {
        /// The function, the queue pair and the group.
        call: String,
        /// The library's error.
        error: io::Error,
    },
    /// A value beyond the range of its attribute.
    #[error("ibv_modify_qp({object}): {what} {requested} is beyond {max}")]
    Range {
        /// The queue pair.
        object: String,
        /// Which attribute.
        what: &'static str,
        /// The requested value.
        requested: u8,
        /// The highest value.
        max: u8,
    },
    /// ibv_query_qp(3) failed.
    #[error("ibv_query_qp({object}): {error}")]
    Query {
        /// The queue pair.
        object: String,
        /// The library's error.
        error: io::Error,
    },
    /// A port or a GID could not be queried.
    #[error(transparent)]
    Device(#[from] DeviceError),
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn results_of_verbs_are_errno_values() {
        assert!(check(0).is_ok());
        let refused = check(22).unwrap_err();
        assert_eq!(refused.raw_os_error(), Some(22));
        assert!(check(-1).is_err());
    }

    #[test]
    fn causes_are_said_once() {
        use std::error::Error;

        let error = crate::exchange::ExchangeError::from(QueuePairError::Query {
            object: "of a test".into(),
            error: io::Error::other("no answer"),
        });
        assert_eq!(error.to_string(), "ibv_query_qp(of a test): no answer");
        assert!(error.source().is_none());
    }

    #[test]
    fn a_missing_device_lists_those_there_are() {
        let error = DeviceError::NoDevice {
            name: "mlx5_9".into(),
            available: vec!["soft0".into(), "rxe0".into()],
        };
        assert_eq!(
            error.to_string(),
            "no RDMA device \"mlx5_9\"; open one of those there are: soft0, rxe0"
        );
    }
}
