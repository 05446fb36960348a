//! What is said of a request that failed: to the kernel as a word, to the host as a value.

use doorbell_cuda::Error as CudaError;

/// Why a request was not done. The numbers are those that a kernel finds in its queue's word of failure, in the lowest 8 bits; above them is the index of the descriptor, plus one.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(u8)]
#[non_exhaustive]
pub enum Cause {
    /// The descriptor says nothing that could be done.
    Operation = 1,
    /// There is no such rank.
    Peer = 2,
    /// The range does not lie in the own memory.
    Local = 3,
    /// The range does not lie in the peer's memory.
    Remote = 4,
    /// The peer has no such signal.
    Signal = 5,
    /// The ring was written by something that is no turn of it. Nothing more is taken from it.
    Torn = 6,
    /// The connection to the peer has failed.
    Connection = 7,
    /// The proxy has gone.
    Stopped = 8,
}

impl Cause {
    /// The word for kernels.
    pub(crate) fn word(self, index: u64) -> u64 {
        (index + 1) << 8 | self as u64
    }

    /// What is wrong and what to do.
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
pub struct Failed {
    /// Why.
    pub cause: Cause,
    /// What was to be done.
    pub what: String,
    /// What the device said, if it did; begins with "; ".
    pub detail: String,
}

impl Failed {
    pub(crate) fn new(cause: Cause, what: impl ToString) -> Self {
        Self {
            cause,
            what: what.to_string(),
            detail: String::new(),
        }
    }
}

/// What cannot be made.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ProxyError {
    /// By the GPU's driver.
    #[error(transparent)]
    Cuda(#[from] CudaError),
    /// The thread could not be started.
    #[error("the proxy's thread cannot be started: {0}")]
    Thread(#[source] std::io::Error),
}
