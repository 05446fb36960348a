//! Out-of-band exchange between the members of a group, before and beside their queue pairs.

use std::time::Duration;

use crate::failure::Failure;
use crate::types::Rank;

/// Exchange of bytes between the members of a group: keys, addresses, endpoints. All members make
/// the same calls in the same order.
pub trait Exchange {
    /// Sends `outgoing[r]` to rank `r`, and returns the bytes that each rank sent to this one, by
    /// rank.
    ///
    /// # Errors
    /// An [`ExchangeError`] that names the member responsible.
    fn all_to_all(&mut self, outgoing: Vec<Vec<u8>>) -> Result<Vec<Vec<u8>>, ExchangeError>;

    /// The number of members.
    fn ranks(&self) -> u32;

    /// Sends `mine` to all ranks, and returns the bytes of each, by rank.
    ///
    /// # Errors
    /// As [`all_to_all`](Self::all_to_all).
    fn all_gather(&mut self, mine: &[u8]) -> Result<Vec<Vec<u8>>, ExchangeError> {
        self.all_to_all((0..self.ranks()).map(|_| mine.to_vec()).collect())
    }

    /// Returns once all members have called it.
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
    /// The group has failed: a member died, or blocks progress.
    #[error("{0}")]
    Failed(Failure),
    /// A member has left the group and sends nothing more.
    #[error("rank {rank} ({member}) has left the group")]
    Left {
        /// Its rank.
        rank: Rank,
        /// Its process and host.
        member: String,
    },
    /// Members did not take part in time.
    #[error("{missing} did not take part in the exchange within {within:?}")]
    Late {
        /// The missing ranks, as text.
        missing: String,
        /// The timeout.
        within: Duration,
    },
    /// An invalid call: a message is too long, or one is missing.
    #[error("rank {rank} cannot send this: {reason}")]
    Misuse {
        /// This rank.
        rank: Rank,
        /// What is wrong.
        reason: String,
    },
}
