//! Why something with GPU memory on queue pairs was not done.

use doorbell_verbs::{CompletionQueueError, MemoryError, QueuePairError, Refused};

use crate::path::{BadPath, NoPath};

/// Why something with GPU memory on queue pairs was not done.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// By the GPU's driver.
    #[error(transparent)]
    Cuda(#[from] doorbell_cuda::Error),
    /// No path leads from the adapter to the memory.
    #[error(transparent)]
    NoPath(#[from] NoPath),
    /// What forces a path names none.
    #[error(transparent)]
    BadPath(#[from] BadPath),
    /// By the RDMA device, of memory.
    #[error(transparent)]
    Memory(#[from] MemoryError),
    /// By the RDMA device, of a queue pair.
    #[error("the queue pair that flushes writes into GPU memory: {0}")]
    QueuePair(#[from] QueuePairError),
    /// By the RDMA device, of a completion queue.
    #[error("the completion queue of what flushes writes into GPU memory: {0}")]
    CompletionQueue(#[from] CompletionQueueError),
    /// The READ that flushes was not posted.
    #[error("the READ that flushes writes into GPU memory was not posted: {0}")]
    FlushRefused(#[from] Refused),
    /// The READ that flushes did not come back.
    #[error("the READ that flushes writes into GPU memory failed: {0}")]
    FlushFailed(String),
    /// Memory that goes, with more than one request could move.
    #[error("{len} bytes of GPU memory as one buffer: at most 2 GiB are, cut it by register_chunks")]
    TooLong {
        /// Its length in bytes.
        len: usize,
    },
}
