//! Errors of the symmetric heap.

use core::time::Duration;

use doorbell_cuda::Error as CudaError;
use doorbell_verbs::{CompletionQueueError, DeviceError, MemoryError, QueuePairError};

use crate::Flush;
use crate::proxy::{ProxyError, RequestFailure};

/// A failed operation on a symmetric heap.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum HeapError {
    /// A range exceeds another.
    #[error("{len} bytes at {offset} do not lie in {whole}")]
    Range {
        /// The offset.
        offset: u64,
        /// The length.
        len: u64,
        /// The length of the enclosing range.
        whole: u64,
    },
    /// Source and target of a put have different lengths.
    #[error("{here} local bytes and {there} on the peer: the lengths must be equal")]
    Lengths {
        /// The local length.
        here: u64,
        /// The peer's length.
        there: u64,
    },
    /// There is no such rank.
    #[error("there is no rank {peer}: there are {ranks}")]
    Peer {
        /// The requested rank.
        peer: u32,
        /// The number of ranks.
        ranks: u32,
    },
    /// The heap has no free range of this length.
    #[error(
        "cannot allocate {len} bytes: the longest free range of the heap is {longest}; make it larger on every rank"
    )]
    Full {
        /// The requested bytes.
        len: u64,
        /// The longest free range.
        longest: u64,
    },
    /// A free of a range that is not an allocation, or was already freed.
    #[error("nothing is allocated at {offset}: free each range of alloc once")]
    NotAllocated {
        /// The offset.
        offset: u64,
    },
    /// All signals are allocated.
    #[error("all {all} signals of the heap are allocated: build it with more")]
    NoSignal {
        /// The number of signals.
        all: u64,
    },
    /// A wait timed out.
    #[error("waited {after:?} for {what}: is every rank alive, and does each make the same calls in the same order?")]
    Timeout {
        /// The awaited condition.
        what: String,
        /// The timeout.
        after: Duration,
    },
    /// The part is in GPU memory, which the host cannot access.
    #[error("this part of the heap is in GPU memory: copy it on a stream (SymmetricHeap::span)")]
    OnGpu,
    /// The GPU memory could only be registered through a staging buffer, which kernels do not see.
    #[error(
        "no adapter has access to this GPU's memory, so a heap there would need copies ({refused}): use host memory with pinned()"
    )]
    Staged {
        /// The better paths with the reason each failed.
        refused: String,
    },
    /// Kernels could see a signal before the data put ahead of it.
    #[error(
        "this GPU sees an adapter's writes only after a flush ({flush}), and kernels that wait for signals do not flush: use host memory with pinned()"
    )]
    Unordered {
        /// The required flush.
        flush: Flush,
    },
    /// The GPU memory could not be registered.
    #[error(transparent)]
    Register(#[from] Box<crate::Error>),
    /// The operation requires a GPU, and the heap was built without one.
    #[error("the heap was built without a GPU: build it with gpu() or pinned()")]
    NoGpu,
    /// The stream is being captured.
    #[error(
        "the stream is being captured: a graph's requests must be submitted again at each launch, so launch a kernel that puts, or use a RepeatedPost"
    )]
    Capturing,
    /// An earlier stream-ordered put could not be enqueued.
    #[error("an earlier put could not be enqueued on the stream: create another HeapStream")]
    Broken,
    /// The ranks' parts differ in size.
    #[error(
        "rank {peer} has {theirs} bytes of heap and {their_signals} signals, this rank {here} and {signals}: they must be equal on all ranks"
    )]
    SizeMismatch {
        /// The rank.
        peer: u32,
        /// Its bytes.
        theirs: u64,
        /// Its signals.
        their_signals: u64,
        /// The local bytes.
        here: u64,
        /// The local signals.
        signals: u64,
    },
    /// A rank sent a malformed message.
    #[error("rank {peer} sent an invalid heap description ({what}): is it of the same version?")]
    InvalidMessage {
        /// The rank.
        peer: u32,
        /// The defect.
        what: String,
    },
    /// Another rank could not connect.
    #[error("rank {peer} could not connect: see its own error")]
    PeerFailed {
        /// The rank.
        peer: u32,
    },
    /// The bootstrap exchange failed.
    #[error("the exchange among the ranks: {0}")]
    Exchange(std::io::Error),
    /// A request failed.
    #[error(transparent)]
    Failed(#[from] RequestFailure),
    /// The proxy thread could not be started.
    #[error("the heap's proxy thread cannot be started: {0}")]
    Thread(std::io::Error),
    /// From the CUDA driver.
    #[error(transparent)]
    Cuda(#[from] CudaError),
    /// From the RDMA device, for memory.
    #[error(transparent)]
    Memory(#[from] MemoryError),
    /// From the RDMA device.
    #[error(transparent)]
    Device(#[from] DeviceError),
    /// From a queue pair.
    #[error(transparent)]
    QueuePair(#[from] QueuePairError),
    /// From a completion queue.
    #[error(transparent)]
    CompletionQueue(#[from] CompletionQueueError),
}

impl From<ProxyError> for HeapError {
    fn from(error: ProxyError) -> Self {
        match error {
            ProxyError::Cuda(error) => error.into(),
            ProxyError::Thread(error) => Self::Thread(error),
        }
    }
}
