//! Errors of GPU memory on queue pairs.

use doorbell_verbs::{CompletionQueueError, MemoryError, PostError, QueuePairError};

use crate::path::{InvalidPath, NoPath};

/// A failed operation on GPU memory and queue pairs.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// From the CUDA driver.
    #[error(transparent)]
    Cuda(#[from] doorbell_cuda::Error),
    /// No path from the adapter to the memory works.
    #[error(transparent)]
    NoPath(#[from] NoPath),
    /// The forced path's name is invalid.
    #[error(transparent)]
    InvalidPath(#[from] InvalidPath),
    /// From the RDMA device, for memory.
    #[error(transparent)]
    Memory(#[from] MemoryError),
    /// From the RDMA device, for a queue pair.
    #[error("the queue pair that flushes writes into GPU memory: {0}")]
    QueuePair(#[from] QueuePairError),
    /// From the RDMA device, for a completion queue.
    #[error("the completion queue that flushes writes into GPU memory: {0}")]
    CompletionQueue(#[from] CompletionQueueError),
    /// The flushing READ could not be posted.
    #[error("the READ that flushes writes into GPU memory could not be posted: {0}")]
    FlushRefused(#[from] PostError),
    /// The flushing READ failed.
    #[error("the READ that flushes writes into GPU memory failed: {0}")]
    FlushFailed(String),
    /// The memory exceeds the length of one message.
    #[error("{len} bytes of GPU memory as one buffer: the maximum is 2 GiB; split it with register_chunks")]
    TooLong {
        /// Its length in bytes.
        len: usize,
    },
}
