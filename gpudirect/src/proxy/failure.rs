//! Failures of requests, reported to kernels as a word and to the host as a value.

use doorbell_cuda::Error as CudaError;

/// The cause of a failed request. Kernels find the number in the lowest 8 bits of their queue's
/// `failed` word; above it is the descriptor's index plus one.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(u8)]
#[non_exhaustive]
pub enum FailureCause {
    /// The descriptor encodes no valid operation.
    Operation = 1,
    /// There is no such rank.
    Peer = 2,
    /// The range exceeds local memory.
    Local = 3,
    /// The range exceeds the peer's memory.
    Remote = 4,
    /// The peer has no such signal.
    Signal = 5,
    /// The ring holds a word of an unexpected lap. Nothing more is consumed from it.
    Torn = 6,
    /// The connection to the peer has failed.
    Connection = 7,
    /// The proxy has stopped.
    Stopped = 8,
}

impl FailureCause {
    pub(crate) fn word(self, index: u64) -> u64 {
        (index + 1) << 8 | self as u64
    }

    /// Description and advice.
    #[must_use]
    pub const fn advice(self) -> &'static str {
        match self {
            Self::Operation => "it names no operation: is the kernel built with this version's doorbell.cuh?",
            Self::Peer => "there is no such rank",
            Self::Local => "the range goes beyond the own memory",
            Self::Remote => "the range goes beyond the peer's memory",
            Self::Signal => "the peer has no such signal",
            Self::Torn => "the ring was overwritten by something that is no put; nothing more is taken from it",
            Self::Connection => "the connection to that rank has failed: is the process there alive?",
            Self::Stopped => "the proxy has gone",
        }
    }
}

/// The first failure of a ring, or of a proxy.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{what}: {}{detail}", cause.advice())]
pub struct RequestFailure {
    /// The cause.
    pub cause: FailureCause,
    /// The failed request.
    pub what: String,
    /// The device's error, if any; begins with "; ".
    pub detail: String,
}

impl RequestFailure {
    pub(crate) fn new(cause: FailureCause, what: impl ToString) -> Self {
        Self {
            cause,
            what: what.to_string(),
            detail: String::new(),
        }
    }
}

/// Failure to create a proxy or queue.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ProxyError {
    /// From the CUDA driver.
    #[error(transparent)]
    Cuda(#[from] CudaError),
    /// The proxy thread could not be started.
    #[error("the proxy thread cannot be started: {0}")]
    Thread(std::io::Error),
}
