//! What can go wrong with an engine and its operations.

use doorbell_verbs::{CompletionQueueError, DeviceError, Failure, MemoryError, Qpn, QueuePairError};

use crate::bootstrap::ExchangeError;
use crate::failure::message_number;
use crate::plan::Collective;
use crate::types::Rank;

/// An engine that could not be made, or that refuses an operation.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum EngineError {
    /// No device was given.
    #[error("no device to run collectives on: give one at least")]
    NoDevice,
    /// The rank is none of the communicator's.
    #[error("rank {rank} is not one of {ranks}")]
    NoRank {
        /// The rank.
        rank: Rank,
        /// How many there are.
        ranks: u32,
    },
    /// A setting is out of its range.
    #[error("{what} must be from 1 to {max}, and is {given}")]
    Setting {
        /// Which.
        what: &'static str,
        /// What it was.
        given: u64,
        /// The most it may be.
        max: u64,
    },
    /// A device refuses.
    #[error(transparent)]
    Device(#[from] DeviceError),
    /// A device refuses memory.
    #[error(transparent)]
    Memory(#[from] MemoryError),
    /// A device refuses a completion queue.
    #[error(transparent)]
    CompletionQueue(#[from] CompletionQueueError),
    /// A device refuses a queue pair, or to connect it.
    #[error("the connection to rank {peer}: {error}")]
    QueuePair {
        /// To whom.
        peer: Rank,
        /// What is wrong.
        #[source]
        error: QueuePairError,
    },
    /// The ranks could not tell each other how to connect.
    #[error("exchanging addresses with the other ranks: {0}")]
    Exchange(#[from] ExchangeError),
    /// A rank has said something that makes no sense.
    #[error("rank {peer} has sent no address of this version: run the same release everywhere, with the same settings")]
    BadAddress {
        /// Which.
        peer: Rank,
    },
    /// A schedule that is not for this communicator.
    #[error("the schedule of {collective} is for {given} ranks, and there are {ranks}")]
    OtherRanks {
        /// What it does.
        collective: Collective,
        /// How many it is for.
        given: u32,
        /// How many there are.
        ranks: u32,
    },
    /// A schedule with more strands than there are connections for.
    #[error("a schedule of {given} strands, and connections are made for {max}")]
    Strands {
        /// How many it has.
        given: u32,
        /// How many there can be.
        max: u32,
    },
    /// A step of a plan makes no sense.
    #[error("strand {strand}, step {step} of the plan of {collective}: {what}")]
    Plan {
        /// What it does.
        collective: Collective,
        /// The strand.
        strand: usize,
        /// The step, counted from 0.
        step: usize,
        /// What is wrong.
        what: &'static str,
    },
    /// An operation that makes no sense.
    #[error("{collective}: {what}")]
    Operation {
        /// What it does.
        collective: Collective,
        /// What is wrong.
        what: &'static str,
    },
    /// The engine has failed before.
    #[error(transparent)]
    Failed(#[from] Failed),
}

/// Where an operation is, or was when it failed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Waiting {
    /// The operation's number: the first of an engine is 1. Of messages between two ranks, [`MESSAGES`](crate::failure::MESSAGES) and which it is in its direction.
    pub operation: u64,
    /// What it does.
    pub collective: Collective,
    /// The channel.
    pub channel: u32,
    /// The strand.
    pub strand: u32,
    /// The slice.
    pub slice: u64,
    /// The step, counted from 0; as many as there are when only confirmations are missing.
    pub step: u32,
    /// The rank that something is to come from.
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

/// Why an engine has failed, and all operations that were under way or come after.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum Failed {
    /// A request failed.
    #[error("the connection to rank {peer}: {failure}")]
    Connection {
        /// To whom.
        peer: Rank,
        /// What the device says.
        failure: Failure,
    },
    /// A device does not take requests or give completions.
    #[error("the connection to rank {peer}: {what}")]
    Refused {
        /// To whom.
        peer: Rank,
        /// What the device says.
        what: String,
    },
    /// A device gives no completions.
    #[error("{0}")]
    Device(String),
    /// The two ends of a message do not mean the same length; nothing of it was written.
    #[error(
        "message {message} to rank {peer} has {bytes} bytes, and that rank receives {expected}: give both ends of a message the same length"
    )]
    Length {
        /// To whom.
        peer: Rank,
        /// Which message to that rank, counted from 1.
        message: u64,
        /// Bytes that are sent.
        bytes: u64,
        /// Bytes that the receiver has room for.
        expected: u64,
    },
    /// Two ranks do not mean the same length of what one sends the other in an operation whose parts have lengths of their own.
    #[error(
        "operation {operation} ({collective}): rank {from} sends rank {to} {bytes} bytes, and that one expects {expected}: give both the same count"
    )]
    Parts {
        /// The operation, counted from 1.
        operation: u64,
        /// What it does.
        collective: Collective,
        /// Who sends.
        from: Rank,
        /// To whom.
        to: Rank,
        /// Bytes that are sent.
        bytes: u64,
        /// Bytes that the receiver expects.
        expected: u64,
    },
    /// An operation's time is up.
    #[error("the deadline has passed: {0}")]
    Deadline(Waiting),
    /// It was ended from outside.
    #[error("aborted: {0}")]
    Aborted(String),
}
