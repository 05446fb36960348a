//! Errors of shared receive queues.

use std::io;

/// A shared receive queue could not be created, modified or queried.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum SharedReceiveQueueError {
    /// The device or its library has no shared receive queues.
    #[error("{device} has no shared receive queues: give each queue pair receives of its own")]
    Unsupported {
        /// The device's name.
        device: String,
    },
    /// A size is 0, or beyond the device's limit.
    #[error("ibv_create_srq({device}): {what} {requested} is not between 1 and the device's {max}")]
    Limit {
        /// The device's name.
        device: String,
        /// Which size.
        what: &'static str,
        /// The size requested.
        requested: u32,
        /// The device's limit.
        max: u32,
    },
    /// ibv_create_srq(3) failed.
    #[error("ibv_create_srq({device}): {error}{}", create_advice(.error))]
    Create {
        /// The device's name.
        device: String,
        /// The library's error.
        error: io::Error,
    },
    /// ibv_modify_srq(3) failed.
    #[error("ibv_modify_srq({queue}): the limit {limit} was not armed: {error}; it must be at most the depth {depth}")]
    Arm {
        /// The queue.
        queue: String,
        /// The limit requested.
        limit: u32,
        /// The queue's depth.
        depth: u32,
        /// The library's error.
        error: io::Error,
    },
    /// ibv_query_srq(3) failed.
    #[error("ibv_query_srq({queue}): {error}")]
    Query {
        /// The queue.
        queue: String,
        /// The library's error.
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
