//! What goes wrong with a heap.

use core::time::Duration;

use doorbell_cuda::Error as CudaError;
use doorbell_verbs::{CompletionQueueError, DeviceError, MemoryError, QueuePairError};

use crate::Flush;
use crate::proxy::{Failed, ProxyError};

/// Why something with a symmetric heap was not done.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum HeapError {
    /// A range does not lie in another.
    #[error("{len} bytes at {offset} do not lie in {whole}")]
    Range {
        /// Where.
        offset: u64,
        /// How many.
        len: u64,
        /// Of how many.
        whole: u64,
    },
    /// The ends of a put are not equally long.
    #[error("{here} bytes here and {there} on the peer: both must be equally long")]
    Lengths {
        /// The range here.
        here: u64,
        /// The range there.
        there: u64,
    },
    /// There is no such rank.
    #[error("there is no rank {peer}: there are {ranks}")]
    Peer {
        /// The rank asked for.
        peer: u32,
        /// How many there are.
        ranks: u32,
    },
    /// The heap has not so much left in one piece.
    #[error("{len} bytes of a heap that has {longest} in one piece: make it larger on every rank")]
    Full {
        /// What was asked for.
        len: u64,
        /// What could be had.
        longest: u64,
    },
    /// A range that was not allocated as it is, or was given back.
    #[error("nothing was allocated at {offset}: give back what alloc has given, once")]
    NotAllocated {
        /// Where.
        offset: u64,
    },
    /// All signals are taken.
    #[error("all {all} signals of the heap are taken: make it with more")]
    NoSignal {
        /// How many there are.
        all: u64,
    },
    /// What was waited for has not come.
    #[error("waited {after:?} for {what}: is every rank alive, and does each the same in the same order?")]
    Timeout {
        /// For what.
        what: String,
        /// How long.
        after: Duration,
    },
    /// The part lies in a GPU's memory, which the processor does not reach.
    #[error("this part of the heap lies in a GPU's memory: copy by a stream (SymmetricHeap::span)")]
    OnGpu,
    /// The GPU's memory could only be registered by a mirror of it, which kernels do not see.
    #[error(
        "no adapter reaches this GPU's memory, so a heap there would need copies ({refused}): have it in the host's memory by pinned()"
    )]
    Staged {
        /// The better paths, and why each was not possible.
        refused: String,
    },
    /// Kernels might find a signal and not what was put before it.
    #[error(
        "this GPU sees an adapter's writes only after a flush ({flush}), and kernels that wait for signals have none: have the heap in the host's memory by pinned()"
    )]
    Unordered {
        /// What would be needed.
        flush: Flush,
    },
    /// The GPU's memory was not registered.
    #[error(transparent)]
    Register(#[from] Box<crate::Error>),
    /// A GPU is needed that the heap does not know of.
    #[error("the heap was made without a GPU: make it by gpu() or pinned()")]
    NotPinned,
    /// The stream is being captured.
    #[error(
        "the stream is being captured: what a graph asks for must be asked for anew each time it runs, so launch a kernel that puts, or use a RepeatedPost"
    )]
    Capturing,
    /// Puts in a stream's order, after one of which was not put into the stream.
    #[error("the stream has refused an earlier put: make another HeapStream")]
    Broken,
    /// The ranks' parts are not alike.
    #[error(
        "rank {peer} has {theirs} bytes of heap and {their_signals} signals, this rank {here} and {signals}: make them alike on every rank"
    )]
    Unlike {
        /// Which rank.
        peer: u32,
        /// Its bytes.
        theirs: u64,
        /// Its signals.
        their_signals: u64,
        /// The bytes here.
        here: u64,
        /// The signals here.
        signals: u64,
    },
    /// A rank has said what no rank says.
    #[error("rank {peer} has sent what is no description of a heap ({what}): is it of the same version?")]
    Nonsense {
        /// Which rank.
        peer: u32,
        /// What is wrong.
        what: String,
    },
    /// Some rank could not connect.
    #[error("rank {peer} could not connect: its own error says why")]
    PeerFailed {
        /// Which rank.
        peer: u32,
    },
    /// The exchange before connecting.
    #[error("the exchange among the ranks: {0}")]
    Exchange(#[from] std::io::Error),
    /// A request failed.
    #[error(transparent)]
    Failed(#[from] Failed),
    /// The thread could not be started.
    #[error("the heap's thread cannot be started: {0}")]
    Thread(#[source] std::io::Error),
    /// By the GPU's driver.
    #[error(transparent)]
    Cuda(#[from] CudaError),
    /// Memory of the device.
    #[error(transparent)]
    Memory(#[from] MemoryError),
    /// The device.
    #[error(transparent)]
    Device(#[from] DeviceError),
    /// A queue pair.
    #[error(transparent)]
    QueuePair(#[from] QueuePairError),
    /// A completion queue.
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
