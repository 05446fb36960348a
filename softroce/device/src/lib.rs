//! The userspace RoCEv2 device: drives the sans-IO engine of `doorbell-roce-proto` over UDP sockets
//! and shared memory.
//!
//! [`Device::open`] binds an address; the verbs objects are Rust values: [`Pd`], [`Mr`], [`Cq`],
//! [`Srq`], [`Qp`]. The C ABI over them is `doorbell-softroce-ibverbs`.
//!
//! Application threads drive the device inside `poll` and `post`, and one progress thread drives it
//! for those that poll memory or sleep. The lock order is in `drive`. Decisions are numbered in
//! docs/decisions.

pub mod clock;
pub mod cm;
mod config;
mod congestion_text;
mod counters;
mod cq;
mod device;
mod direct;
mod drive;
mod event;
mod gpu;
pub mod host;
pub mod links;
mod mapping;
mod memory;
mod multicast;
mod pd;
mod progress;
mod qp;
mod srq;
mod state;
mod sync;
mod wakeup;
mod xrc;

#[doc(hidden)]
pub use direct::fuzzing as fuzzing_direct;
pub use doorbell_roce_proto::{Counters, congestion};

pub use config::{ConfigError, DeviceConfig, LinkChoice};
pub use counters::COUNTER_FILES;
pub use cq::{Cq, CqConfig, CqNotify, Overrun};
pub use device::{Device, DeviceInfo, LimitError, OpenError};
pub use event::{Event, EventOwner, EventQueue, PortEvent, QpEvent, Token};
pub use links::shm::CopyMode;
pub use links::udp::PortState;
pub use memory::{
    Dm, HostRange, Mr, Mw, OutOfRange, RegisterError, Reregister, Rights, WindowKind, WindowsBound, supports_gpu_memory,
};
pub use multicast::AttachError;
pub use pd::Pd;
pub use qp::{CreateQpError, ModifyQpError, Posting, Qp, QpConfig};
pub use srq::{SharedPosting, Srq, SrqConfig};
pub use xrc::{XrcSrqConfig, Xrcd};

/// The limits of a device; the same for every device (ibv_query_device(3)).
pub mod capacity {
    /// Queue pairs.
    pub const QPS: usize = 16_384;
    /// Outstanding work requests of each queue of a queue pair.
    pub const WORK_REQUESTS: u32 = 16_384;
    /// Scatter/gather elements of a work request.
    pub const SGES: u32 = 32;
    /// Bytes of inline data of a work request.
    pub const INLINE: u32 = 512;
    /// Shared receive queues, each with the work requests and elements of a queue pair's.
    pub const SRQS: usize = 16_384;
    /// Completion queues.
    pub const CQS: usize = 16_384;
    /// Entries of a completion queue.
    pub const CQ_ENTRIES: u32 = 1 << 20;
    /// Memory regions: the position of a region or window is 16 bits of its key.
    pub const REGIONS: usize = 32_768;
    /// Memory windows.
    pub const WINDOWS: usize = 32_768;
    /// Bytes of device memory.
    pub const DEVICE_MEMORY: usize = 4 << 20;
    /// Protection domains.
    pub const PDS: usize = 32_768;
    /// Multicast groups with queue pairs attached.
    pub const MULTICAST_GROUPS: usize = doorbell_roce_proto::Endpoint::MAX_MULTICAST_GROUPS;
    /// Queue pairs attached to one of them.
    pub const MULTICAST_QPS: usize = doorbell_roce_proto::Endpoint::MAX_MULTICAST_QPS;
    /// READs and atomics outstanding on a queue pair, as requester and as responder.
    pub const RD_ATOMIC: u8 = 128;
    /// Bytes of a message.
    pub const MESSAGE: u32 = 1 << 31;
}
