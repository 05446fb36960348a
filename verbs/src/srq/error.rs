//! Why a shared receive queue could not be made, changed or asked.

use std::io;

/// Shared receive queues: making, changing and querying one.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum SharedReceiveError {
    /// The device or its library has no shared receive queues.
    #[error("{device} has no shared receive queues: give each queue pair receives of its own")]
    Unsupported {
        /// The device's name.
        device: String,
    },
    /// A size is 0, or beyond what the device has.
    #[error("ibv_create_srq({device}): {what} {asked} is not between 1 and the device's {max}")]
    Limit {
        /// The device's name.
        device: String,
        /// Which size.
        what: &'static str,
        /// What was asked for.
        asked: u32,
        /// The most that the device allows.
        max: u32,
    },
    /// ibv_create_srq(3) failed.
    #[error("ibv_create_srq({device}): {error}{}", create_advice(.error))]
    Create {
        /// The device's name.
        device: String,
        /// What the library said.
        #[source]
        error: io::Error,
    },
    /// ibv_modify_srq(3) failed.
    #[error("ibv_modify_srq({queue}): the limit {limit} was not armed: {error}; it must be at most the depth {depth}")]
    Arm {
        /// The queue.
        queue: String,
        /// What was asked for.
        limit: u32,
        /// How many receives the queue holds.
        depth: u32,
        /// What the library said.
        #[source]
        error: io::Error,
    },
    /// ibv_query_srq(3) failed.
    #[error("ibv_query_srq({queue}): {error}")]
    Query {
        /// The queue.
        queue: String,
        /// What the library said.
        #[source]
        error: io::Error,
    },
}

fn create_advice(error: &io::Error) -> &'static str {
    match error.kind() {
        io::ErrorKind::OutOfMemory => {
            "; the device has no more of them, or locked memory is limited: see `ulimit -l` (RLIMIT_MEMLOCK)"
        }
        _ => "",
    }
}
