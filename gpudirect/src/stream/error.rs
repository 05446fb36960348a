//! Errors of stream-ordered posting.

use doorbell_cuda::Error as CudaError;
use doorbell_verbs::{CompletionQueueError, QueuePairError};

use super::Posted;

/// The message of a failed post: from its work completion, or because it could not be posted.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("a stream-ordered post: {0}")]
pub struct PostFailed(pub(super) String);

/// A failed operation on a stream queue.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum StreamError {
    /// The queue pair does not signal all of its requests.
    #[error("the queue pair does not signal all of its requests: build it with QueuePairBuilder::signal_all")]
    NotSignaled,
    /// Too many pending posts.
    #[error("256 posts are pending: wait for some of them first")]
    Full,
    /// The stream is being captured.
    #[error("the stream is being captured: a graph must post again at each launch, with StreamQueue::repeated")]
    Capturing,
    /// The queue's poster was dropped.
    #[error("the queue's poster has been dropped")]
    Gone,
    /// The post is not complete; it is returned.
    #[error("the post is not complete: does the stream that it waits for make progress, and is the peer alive?")]
    Timeout(Posted),
    /// A post failed.
    #[error(transparent)]
    Failed(#[from] PostFailed),
    /// The thread could not be started.
    #[error("the queue's thread cannot be started: {0}")]
    Thread(std::io::Error),
    /// From the CUDA driver.
    #[error(transparent)]
    Cuda(#[from] CudaError),
    /// From the queue pair.
    #[error(transparent)]
    QueuePair(#[from] QueuePairError),
    /// From the completion queue.
    #[error(transparent)]
    CompletionQueue(#[from] CompletionQueueError),
}
