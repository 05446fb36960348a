//! What the members of a group tell one another before there are queue pairs, and beside them.

use std::time::Duration;

use crate::failure::Failure;
use crate::types::Rank;

/// How members of a group exchange bytes: keys, addresses, endpoints.
///
/// All members make the same calls in the same order. An engine asks for no more than this, so that tests can run many ranks in one process.
pub trait Exchange {
    /// Gives `outgoing[r]` to rank `r`, and returns what each rank gave to this one, by rank.
    ///
    /// # Errors
    /// An [`ExchangeError`] that names the member that made it impossible.
    fn all_to_all(&mut self, outgoing: Vec<Vec<u8>>) -> Result<Vec<Vec<u8>>, ExchangeError>;

    /// How many members there are.
    fn ranks(&self) -> u32;

    /// Gives `mine` to all ranks, and returns what each gave, by rank.
    ///
    /// # Errors
    /// As [`all_to_all`](Self::all_to_all).
    fn all_gather(&mut self, mine: &[u8]) -> Result<Vec<Vec<u8>>, ExchangeError> {
        self.all_to_all((0..self.ranks()).map(|_| mine.to_vec()).collect())
    }

    /// Waits until all members have come here.
    ///
    /// # Errors
    /// As [`all_to_all`](Self::all_to_all).
    fn barrier(&mut self) -> Result<(), ExchangeError> {
        self.all_gather(&[]).map(drop)
    }
}

/// Why an exchange failed.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum ExchangeError {
    /// The group has failed: a member died, or was found to be in the way.
    #[error("{0}")]
    Failed(Failure),
    /// A member has left the group, and will send_message nothing more.
    #[error("rank {rank} ({member}) has left the group")]
    Left {
        /// Which.
        rank: Rank,
        /// Its process and host.
        member: String,
    },
    /// Members did not take part in time.
    #[error("{missing} did not take part in the exchange within {within:?}")]
    Late {
        /// Which ranks, in words.
        missing: String,
        /// How long they had.
        within: Duration,
    },
    /// Too much at once, or not something for each.
    #[error("rank {rank} cannot send this: {reason}")]
    Misuse {
        /// This rank.
        rank: Rank,
        /// What is wrong with it.
        reason: String,
    },
}
