//! RDMA and GPUDirect by one dependency: the crates of Doorbell, and devices by one string.
//!
//! ```
//! use doorbell::prelude::*;
//!
//! # fn main() -> Result<(), Box<dyn std::error::Error>> {
//! // The userspace device; "mlx5_0" is hardware, and "soft?drop=0.01&seed=7" loses packets.
//! let device = doorbell::open("soft0")?;
//! let pd = device.protection_domain()?;
//! let buffer = pd.register(vec![0; 4096], Local)?;
//! assert_eq!(buffer.len(), 4096);
//! # Ok(())
//! # }
//! ```
//!
//! The root is [`doorbell_verbs`]. The rest is modules, by feature:
//!
//! | feature | module | contents |
//! |---|---|---|
//! | `softroce` (default) | `softroce` | the userspace device: its configuration, faults and connection manager |
//! | `collectives` | `collectives` | collectives on queue pairs |
//! | `gpudirect` | `gpudirect` | GPU memory on queue pairs; with `collectives`, collectives on it |
//! | `tokio` | `tasks` | byte streams and awaited operations; waiting for completions and events in tasks |

#![forbid(unsafe_code)]

mod open;

pub use doorbell_verbs::*;
pub use open::{OpenError, open, open_from_env};

#[cfg(feature = "collectives")]
pub use doorbell_collectives as collectives;
#[cfg(feature = "gpudirect")]
pub use doorbell_gpudirect as gpudirect;

/// Byte streams and awaited operations, for tasks of a tokio runtime.
#[cfg(feature = "tokio")]
pub use doorbell_tokio as tasks;

/// The userspace RoCEv2 device.
#[cfg(feature = "softroce")]
pub mod softroce {
    pub use doorbell_softroce::links::udp::fault::{FaultConfig, FaultConfigError, Outage};
    pub use doorbell_softroce_ibverbs::{
        AddedDevice, AlreadyInUse, ConfigError, CopyMode, DeviceConfig, LinkChoice, OpenError, add, api, configure,
        last_open_error,
    };
    pub use doorbell_softroce_rdmacm::API as CM_API;
}

/// What most programs use. No name of it is in the prelude of std, or a trait of its `io`.
pub mod prelude {
    pub use doorbell_verbs::exchange::{Connection, Exchange, Listener};
    pub use doorbell_verbs::{
        AddressHandle, Buffer, BufferPool, Completion, CompletionError, CompletionQueue, CompletionStatus, Context,
        Endpoint, GRH_BYTES, Library, Local, PeerAtomic, PeerRead, PeerReadWrite, PeerWrite, ProtectionDomain,
        QueueKind, QueuePair, ReadAccess, Remote, Success, WriteAccess,
    };

    #[cfg(feature = "collectives")]
    pub use doorbell_collectives::{Communicator, Rank, ReduceOp};
}
