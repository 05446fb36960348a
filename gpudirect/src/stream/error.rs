//! What goes wrong with posts in a stream's order.

use doorbell_cuda::Error as CudaError;
use doorbell_verbs::{CompletionQueueError, QueuePairError};

use super::Posted;

/// A post that failed, in words: by its request's completion, or because it could not be posted.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("a post in a stream's order: {0}")]
pub struct PostFailed(pub(super) String);

/// Why something was not posted, or not waited for.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum StreamError {
    /// The queue pair completes only some of its requests.
    #[error("the queue pair does not complete each of its requests: make it by QueuePairBuilder::signal_all")]
    NotSignalled,
    /// Too many posts.
    #[error("256 posts are not over: wait for some of them first")]
    Full,
    /// The stream is being captured.
    #[error(
        "the stream is being captured: what a graph posts has to be posted each time it runs, by StreamQueue::repeated"
    )]
    Capturing,
    /// The queue's poster has gone.
    #[error("what posts for the queue has been dropped")]
    Gone,
    /// It has not come to an end yet; here it is.
    #[error("the post is not over yet: does the stream that it waits for go on, and is the peer alive?")]
    Timeout(Posted),
    /// A post failed.
    #[error(transparent)]
    Failed(#[from] PostFailed),
    /// The thread could not be started.
    #[error("the queue's thread cannot be started: {0}")]
    Thread(#[source] std::io::Error),
    /// By the GPU's driver.
    #[error(transparent)]
    Cuda(#[from] CudaError),
    /// The queue pair.
    #[error(transparent)]
    QueuePair(#[from] QueuePairError),
    /// The completion queue.
    #[error(transparent)]
    CompletionQueue(#[from] CompletionQueueError),
}
