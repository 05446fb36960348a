//! What can go wrong before a group is together.

use std::io;
use std::net::SocketAddr;
use std::time::Duration;

use super::id::NotAnId;
use crate::types::Rank;

/// Why a group did not come together.
#[derive(Debug, thiserror::Error)]
pub enum BootstrapError {
    /// No launcher describe_io_error this process which rank it is.
    #[error(
        "no launcher says which rank this process is: start it with mpirun, srun or torchrun, or set DOORBELL_RANK, DOORBELL_RANKS and DOORBELL_ID"
    )]
    NotLaunched,
    /// A variable of the environment is not what it should be.
    #[error("environment variable {variable} is {value:?}: {expected}")]
    Variable {
        /// Its name.
        variable: &'static str,
        /// What it says; empty where it is not set.
        value: String,
        /// What it should send_message.
        expected: &'static str,
    },
    /// A unique id that is none.
    #[error("environment variable {variable}: {source}")]
    Id {
        /// The variable that has it.
        variable: &'static str,
        /// What is wrong with it.
        source: NotAnId,
    },
    /// A rank that is not below the number of ranks, or too many of them.
    #[error("rank {rank} of {ranks} cannot be: ranks count from 0, and a group has 1 to {max}", max = super::wire::MAX_RANKS)]
    Rank {
        /// The rank.
        rank: Rank,
        /// How many there are.
        ranks: u32,
    },
    /// Nothing listens where this process wanted to.
    #[error(
        "cannot listen on {address} for the other ranks: {source}; DOORBELL_BOOTSTRAP names another address of this machine"
    )]
    Listen {
        /// The address.
        address: String,
        /// What the kernel said.
        source: io::Error,
    },
    /// A name that has no address.
    #[error("cannot find host {host:?}, where the ranks meet: {source}")]
    Resolve {
        /// The name.
        host: String,
        /// What the resolver said.
        source: io::Error,
    },
    /// Nobody answers where the ranks meet.
    #[error(
        "rank {rank} found no rendezvous of its group at {address} within {within:?}: {last}; is rank 0, or the launcher, running?"
    )]
    NoRendezvous {
        /// This rank.
        rank: Rank,
        /// Where it looked.
        address: String,
        /// For how long.
        within: Duration,
        /// What came of the last attempt.
        last: String,
    },
    /// The rendezvous, or another member, does not want this process.
    #[error("{by} refused rank {rank}: {reason}")]
    Refused {
        /// Who.
        by: SocketAddr,
        /// This rank.
        rank: Rank,
        /// Why.
        reason: String,
    },
    /// The rendezvous or a member stopped answering half-way.
    #[error("rank {rank} lost {peer} while the group came together: {reason}")]
    Lost {
        /// This rank.
        rank: Rank,
        /// Whom.
        peer: String,
        /// How.
        reason: String,
    },
    /// Not everybody came.
    #[error("{missing} of {ranks} did not come within {within:?}{turned_away}")]
    Missing {
        /// Which ranks, in words.
        missing: String,
        /// How many there should have been.
        ranks: u32,
        /// How long they had.
        within: Duration,
        /// Who was turned away last and why, or nothing.
        turned_away: String,
    },
    /// The kernel refused something else.
    #[error("cannot {what}: {source}")]
    System {
        /// What was to be done.
        what: &'static str,
        /// What the kernel said.
        source: io::Error,
    },
}

impl BootstrapError {
    pub(super) fn system(what: &'static str) -> impl FnOnce(io::Error) -> Self {
        move |source| Self::System { what, source }
    }
}

/// Ranks in words: `rank 3`, `ranks 3 and 5`, `ranks 1, 2, 3 and 7 others`.
pub(crate) fn in_words(ranks: &[Rank]) -> String {
    const SHOWN: usize = 8;
    let words: Vec<_> = ranks.iter().map(Rank::to_string).collect();
    match words.as_slice() {
        [] => "no rank".to_owned(),
        [one] => format!("rank {one}"),
        [all @ .., last] if words.len() <= SHOWN => format!("ranks {} and {last}", all.join(", ")),
        all => format!("ranks {} and {} others", all[..SHOWN].join(", "), all.len() - SHOWN),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ranks_are_told_in_words() {
        let words = |n| in_words(&(0..n).map(Rank).collect::<Vec<_>>());
        assert_eq!(words(0), "no rank");
        assert_eq!(words(1), "rank 0");
        assert_eq!(words(2), "ranks 0 and 1");
        assert_eq!(words(8), "ranks 0, 1, 2, 3, 4, 5, 6 and 7");
        assert_eq!(words(10), "ranks 0, 1, 2, 3, 4, 5, 6, 7 and 2 others");
    }
}
