//! Errors of an engine and its operations.

use doorbell_verbs::{CompletionError, CompletionQueueError, DeviceError, MemoryError, Qpn, QueuePairError};

use crate::bootstrap::ExchangeError;
use crate::failure::message_number;
use crate::kernel::TypeMismatch;
use crate::plan::Collective;
use crate::types::Rank;

/// An engine that could not be created, or that refuses an operation.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum EngineError {
    /// No device was given.
    #[error("no device to run collectives on: give one at least")]
    NoDevice,
    /// The rank is not in the communicator.
    #[error("rank {rank} is not one of {ranks}")]
    NoRank {
        /// The rank.
        rank: Rank,
        /// The number of ranks.
        ranks: u32,
    },
    /// A setting is out of range.
    #[error("{what} must be from 1 to {max}, and is {given}")]
    Setting {
        /// The setting.
        what: &'static str,
        /// Its value.
        given: u64,
        /// Its maximum.
        max: u64,
    },
    /// A device error.
    #[error(transparent)]
    Device(#[from] DeviceError),
    /// Memory could not be registered.
    #[error(transparent)]
    Memory(#[from] MemoryError),
    /// A completion queue could not be created.
    #[error(transparent)]
    CompletionQueue(#[from] CompletionQueueError),
    /// A queue pair could not be created or connected.
    #[error("the connection to rank {peer}: {error}")]
    QueuePair {
        /// The peer.
        peer: Rank,
        /// The error.
        error: QueuePairError,
    },
    /// The exchange of addresses failed.
    #[error("exchanging addresses with the other ranks: {0}")]
    Exchange(ExchangeError),
    /// A rank has sent an invalid address.
    #[error("rank {peer} has sent no address of this version: run the same release everywhere, with the same settings")]
    BadAddress {
        /// The rank.
        peer: Rank,
    },
    /// A schedule for another number of ranks.
    #[error("the schedule of {collective} is for {given} ranks, and there are {ranks}")]
    OtherRanks {
        /// The collective.
        collective: Collective,
        /// Ranks of the schedule.
        given: u32,
        /// Ranks of the engine.
        ranks: u32,
    },
    /// A schedule with more strands than there are connections for.
    #[error("a schedule of {given} strands, and connections are made for {max}")]
    Strands {
        /// Strands of the schedule.
        given: u32,
        /// Strands of the engine.
        max: u32,
    },
    /// A step of a plan is invalid.
    #[error("strand {strand}, step {step} of the plan of {collective}: {what}")]
    Plan {
        /// The collective.
        collective: Collective,
        /// The strand.
        strand: usize,
        /// The step, counted from 0.
        step: usize,
        /// The error.
        what: &'static str,
    },
    /// An operation is invalid.
    #[error("{collective}: {what}")]
    Operation {
        /// The collective.
        collective: Collective,
        /// The error.
        what: &'static str,
    },
    /// An operator or a scalar of another type than the elements.
    #[error(transparent)]
    Unfit(#[from] TypeMismatch),
    /// The engine has failed before.
    #[error(transparent)]
    Failed(#[from] Failed),
}

/// The wait of an operation.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Waiting {
    /// The operation's number: the first of an engine is 1. Of point-to-point messages,
    /// [`MESSAGES`](crate::failure::MESSAGES) plus the number in its direction.
    pub operation: u64,
    /// The collective.
    pub collective: Collective,
    /// The channel.
    pub channel: u32,
    /// The strand.
    pub strand: u32,
    /// The slice.
    pub slice: u64,
    /// The step, counted from 0; the number of steps when only acknowledgements are missing.
    pub step: u32,
    /// The awaited rank.
    pub peer: Rank,
    /// This side's queue pair to it.
    pub qpn: Qpn,
}

impl core::fmt::Display for Waiting {
    fn fmt(&self, f: &mut core::fmt::Formatter<'_>) -> core::fmt::Result {
        let Self {
            operation,
            collective,
            channel,
            strand,
            slice,
            step,
            peer,
            qpn,
        } = self;
        if let Some(message) = message_number(*operation) {
            return write!(
                f,
                "message {message} ({collective}), part {slice}: waiting for rank {peer} on queue pair {qpn}"
            );
        }
        write!(
            f,
            "operation {operation} ({collective}), channel {channel}, strand {strand}, slice {slice}, step {step}: waiting for rank {peer} on queue pair {qpn}"
        )
    }
}

/// Why an engine, and all its operations, have failed.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum Failed {
    /// A work request failed.
    #[error("the connection to rank {peer}: {failure}")]
    Connection {
        /// The peer.
        peer: Rank,
        /// The completion status.
        failure: CompletionError,
    },
    /// A device refuses a request.
    #[error("the connection to rank {peer}: {what}")]
    Refused {
        /// The peer.
        peer: Rank,
        /// The error.
        what: String,
    },
    /// Polling completions failed.
    #[error("{0}")]
    Device(String),
    /// The two ends of a message have different lengths; nothing of it was written.
    #[error(
        "message {message} to rank {peer} has {bytes} bytes, and that rank receives {expected}: give both ends of a message the same length"
    )]
    Length {
        /// The peer.
        peer: Rank,
        /// The number of the message to that rank, from 1.
        message: u64,
        /// Bytes sent.
        bytes: u64,
        /// Bytes that the receiver expects.
        expected: u64,
    },
    /// Two ranks disagree on the length of what one sends the other in an operation.
    #[error(
        "operation {operation} ({collective}): rank {from} sends rank {to} {bytes} bytes, and that one expects {expected}: give both the same count"
    )]
    Parts {
        /// The operation, counted from 1.
        operation: u64,
        /// The collective.
        collective: Collective,
        /// The sender.
        from: Rank,
        /// The receiver.
        to: Rank,
        /// Bytes sent.
        bytes: u64,
        /// Bytes that the receiver expects.
        expected: u64,
    },
    /// An operation missed its deadline.
    #[error("the deadline has passed: {0}")]
    Deadline(Waiting),
    /// The engine was aborted.
    #[error("aborted: {0}")]
    Aborted(String),
}

impl From<MemoryError> for Failed {
    fn from(error: MemoryError) -> Self {
        Self::Device(error.to_string())
    }
}
