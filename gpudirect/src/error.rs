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
    QueuePair(QueuePairError),
    /// From the RDMA device, for a completion queue.
    #[error("the completion queue that flushes writes into GPU memory: {0}")]
    CompletionQueue(CompletionQueueError),
    /// The flushing READ could not be posted.
    #[error("the READ that flushes writes into GPU memory could not be posted: {0}")]
    FlushRefused(PostError),
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

#[cfg(test)]
mod tests {
    use super::*;
    use std::error::Error as _;

    #[test]
    fn causes_are_said_once() {
        let error = crate::heap::HeapError::Register(Box::new(Error::QueuePair(QueuePairError::Query {
            object: "of a test".to_owned(),
            error: std::io::Error::other("no answer"),
        })));
        let said = "the queue pair that flushes writes into GPU memory: ibv_query_qp(of a test): no answer";
        assert_eq!(error.to_string(), said);
        assert!(error.source().is_none());
    }
}
