//! Errors of a communicator.

use core::fmt;

use crate::algorithm::Unsupported;
use crate::bootstrap::{BootstrapError, ExchangeError, Member};
use crate::executor::{EngineError, Failed, Waiting};
use crate::failure::{Failure, ShrinkError};
use crate::kernel::TypeMismatch;
use crate::plan::Collective;
use crate::tune::{EnvironmentError, FileError, NoChoice};
use crate::types::Rank;

/// Why a communicator could not be created, or an operation failed.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum CollectiveError {
    /// The bootstrap failed.
    #[error(transparent)]
    Bootstrap(#[from] BootstrapError),
    /// An exchange between the ranks failed.
    #[error(transparent)]
    Exchange(#[from] ExchangeError),
    /// The engine cannot be created, or refuses an operation.
    #[error(transparent)]
    Engine(#[from] EngineError),
    /// An environment variable has an invalid value.
    #[error(transparent)]
    Environment(#[from] EnvironmentError),
    /// The tuning file is invalid.
    #[error(transparent)]
    Tuning(#[from] FileError),
    /// No algorithm fits.
    #[error(transparent)]
    NoChoice(#[from] NoChoice),
    /// The selected algorithm does not support the collective.
    #[error(transparent)]
    Unsupported(#[from] Unsupported),
    /// An operator is over another type.
    #[error(transparent)]
    Unfit(#[from] TypeMismatch),
    /// The arguments of an operation are invalid; nothing was begun.
    #[error("{collective}: {what}")]
    Misuse {
        /// The collective.
        collective: Collective,
        /// What is wrong, and what is expected.
        what: String,
    },
    /// The progress thread could not be started.
    #[error("cannot start a thread for progress: {0}")]
    Thread(std::io::Error),
    /// There is no group of survivors for this rank.
    #[error(transparent)]
    Shrink(#[from] ShrinkError),
    /// The group has failed, and all its operations: it can be
    /// [shrunk](super::Communicator::shrink) or dropped.
    #[error(transparent)]
    Failed(#[from] Box<GroupFailed>),
}

impl CollectiveError {
    /// The failure that the members agreed on.
    #[must_use]
    pub fn failure(&self) -> Option<&Failure> {
        match self {
            Self::Failed(failed) => failed.failure.as_ref(),
            Self::Exchange(ExchangeError::Failed(failure))
            | Self::Engine(EngineError::Exchange(ExchangeError::Failed(failure))) => Some(failure),
            _ => None,
        }
    }

    /// The rank to blame, where known: by the members' verdict or, without one, the rank that this
    /// one waited for.
    #[must_use]
    pub fn culprit(&self) -> Option<Rank> {
        let waiting = || match self {
            Self::Failed(failed) => failed.waiting.map(|waiting| waiting.peer),
            _ => None,
        };
        self.failure()
            .map(|failure| failure.verdict.cause.culprit())
            .or_else(waiting)
    }
}

/// The failure of a group, as one of its members saw it. Displays as one line.
#[derive(Debug, Clone)]
pub struct GroupFailed {
    /// This rank.
    pub rank: Rank,
    /// The failure that the members agreed on; `None` if they did not in time.
    pub failure: Option<Failure>,
    /// The error of this rank's own engine, if it failed first.
    pub engine: Option<Failed>,
    /// The wait of this rank; `None` if it had no operation in flight.
    pub waiting: Option<Waiting>,
    /// The awaited member: process and host.
    pub peer: Option<Member>,
}

impl std::error::Error for GroupFailed {}

impl fmt::Display for GroupFailed {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match (&self.failure, &self.engine) {
            (Some(failure), None) => failure.fmt(f)?,
            (Some(failure), Some(engine)) => write!(f, "{failure}; noticed by rank {} as: {engine}", self.rank)?,
            (None, Some(engine)) => engine.fmt(f)?,
            (None, None) => f.write_str("the group has failed, and its members have not agreed why")?,
        }
        if let Some(waiting) = &self.waiting {
            write!(f, "; here, rank {}: {waiting}", self.rank)?;
        }
        match &self.peer {
            Some(peer) => write!(f, " ({peer})"),
            None => Ok(()),
        }
    }
}
