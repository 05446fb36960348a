//! What can go wrong with a communicator.

use core::fmt;

use crate::algorithm::Unsupported;
use crate::bootstrap::{BootstrapError, ExchangeError, Member};
use crate::executor::{EngineError, Failed, Waiting};
use crate::failure::{Failure, ShrinkError};
use crate::kernel::Unfit;
use crate::plan::Collective;
use crate::tune::{EnvironmentError, FileError, NoChoice};
use crate::types::Rank;

/// Why there is no communicator, or an operation was not done.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum CollectiveError {
    /// The ranks did not come together.
    #[error(transparent)]
    Bootstrap(#[from] BootstrapError),
    /// The ranks did not agree on something.
    #[error(transparent)]
    Exchange(#[from] ExchangeError),
    /// The engine cannot be made, or refuses an operation.
    #[error(transparent)]
    Engine(#[from] EngineError),
    /// A variable of the environment says nothing that can be done.
    #[error(transparent)]
    Environment(#[from] EnvironmentError),
    /// The tuning file cannot be used.
    #[error(transparent)]
    Tuning(#[from] FileError),
    /// There is no way of doing it.
    #[error(transparent)]
    NoChoice(#[from] NoChoice),
    /// The algorithm that was asked for does not do it.
    #[error(transparent)]
    Unsupported(#[from] Unsupported),
    /// An operator is over another type.
    #[error(transparent)]
    Unfit(#[from] Unfit),
    /// What was given to an operation does not fit it; nothing was begun.
    #[error("{collective}: {what}")]
    Misuse {
        /// The operation.
        collective: Collective,
        /// What does not fit, and how it should be.
        what: String,
    },
    /// A process could not be made to drive operations in the background.
    #[error("cannot start a thread for progress: {0}")]
    Thread(std::io::Error),
    /// There is no group of survivors for this rank.
    #[error(transparent)]
    Shrink(#[from] ShrinkError),
    /// The group has failed, and with it all operations: what is left to do is to [`shrink`](super::Communicator::shrink) or to drop it.
    #[error(transparent)]
    Failed(#[from] Box<GroupFailed>),
}

impl CollectiveError {
    /// Who is to blame, where the members agreed on it.
    #[must_use]
    pub fn failure(&self) -> Option<&Failure> {
        match self {
            Self::Failed(failed) => failed.failure.as_ref(),
            Self::Exchange(ExchangeError::Failed(failure))
            | Self::Engine(EngineError::Exchange(ExchangeError::Failed(failure))) => Some(failure),
            _ => None,
        }
    }

    /// The rank that is to blame, where that is known: of the members' verdict, or, if they came to none, the one that this rank waited for.
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

/// How a group failed, as one of its members saw it. Reads as one line.
#[derive(Debug, Clone)]
pub struct GroupFailed {
    /// This rank.
    pub rank: Rank,
    /// What the members agreed on; none if they did not in time.
    pub failure: Option<Failure>,
    /// What this rank's own engine had noticed, if it was the first to.
    pub engine: Option<Failed>,
    /// Where this rank was; none if it had no operation under way.
    pub waiting: Option<Waiting>,
    /// Whom it was waiting for: process and host.
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
