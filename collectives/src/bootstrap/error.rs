//! Errors before a group is complete.

use std::io;
use std::net::SocketAddr;
use std::time::Duration;

use doorbell_rendezvous::SecretError;

use super::id::NotAnId;
use crate::types::Rank;

/// Why a group was not formed.
#[derive(Debug, thiserror::Error)]
pub enum BootstrapError {
    /// The environment does not contain the rank of this process.
    #[error(
        "no launcher says which rank this process is: start it with mpirun, srun or torchrun, or set DOORBELL_RANK, DOORBELL_RANKS and DOORBELL_ID"
    )]
    NotLaunched,
    /// An environment variable has an invalid value.
    #[error("environment variable {variable} is {value:?}: {expected}")]
    Variable {
        /// Its name.
        variable: &'static str,
        /// Its value; empty where it is not set.
        value: String,
        /// What is expected.
        expected: &'static str,
    },
    /// An invalid unique id.
    #[error("environment variable {variable}: {error}")]
    Id {
        /// The variable that holds it.
        variable: &'static str,
        /// The parse error.
        error: NotAnId,
    },
    /// A rank that is not below the number of ranks, or too many ranks.
    #[error("rank {rank} of {ranks} cannot be: ranks count from 0, and a group has 1 to {max}", max = super::wire::MAX_RANKS)]
    Rank {
        /// The rank.
        rank: Rank,
        /// The number of ranks.
        ranks: u32,
    },
    /// No socket of this process could listen.
    #[error(
        "cannot listen on {address} for the other ranks: {error}; DOORBELL_BOOTSTRAP names another address of this machine"
    )]
    Listen {
        /// The address.
        address: String,
        /// The kernel's error.
        error: io::Error,
    },
    /// A host name that does not resolve.
    #[error("cannot find host {host:?}, where the ranks meet: {error}")]
    Resolve {
        /// The name.
        host: String,
        /// The resolver's error.
        error: io::Error,
    },
    /// No rendezvous of this group answers.
    #[error(
        "rank {rank} found no rendezvous of its group at {address} within {within:?}: {last}; is rank 0, or the launcher, running?"
    )]
    NoRendezvous {
        /// This rank.
        rank: Rank,
        /// The addresses that were tried.
        address: String,
        /// For how long.
        within: Duration,
        /// The result of the last attempt.
        last: String,
    },
    /// The rendezvous, or another member, rejected this process.
    #[error("{by} refused rank {rank}: {reason}")]
    Refused {
        /// Address of the peer.
        by: SocketAddr,
        /// This rank.
        rank: Rank,
        /// The reason it gave.
        reason: String,
    },
    /// The peer does not prove the group's secret, or this process does not prove the peer's.
    #[error(
        "rank {rank} and the rendezvous at {by} do not authenticate each other: {reason}; another program holds the port, or the secrets differ (DOORBELL_SECRET)"
    )]
    Unauthenticated {
        /// Address of the peer.
        by: SocketAddr,
        /// This rank.
        rank: Rank,
        /// What failed.
        reason: String,
    },
    /// The ranks of several processes have no secret.
    #[error("no secret authenticates the ranks: {0}; set DOORBELL_SECRET on all of them, as to openssl rand -hex 16")]
    NoSecret(SecretError),
    /// The rendezvous or a member stopped answering during the handshake.
    #[error("rank {rank} lost {peer} while the group came together: {reason}")]
    Lost {
        /// This rank.
        rank: Rank,
        /// The peer.
        peer: String,
        /// The error.
        reason: String,
    },
    /// A rank ended after it had registered, so that the group cannot be complete.
    #[error("rank {rank} ({member}) ended during the rendezvous")]
    Ended {
        /// The rank that ended.
        rank: Rank,
        /// Its process and host.
        member: String,
    },
    /// Nothing listens where a rendezvous was open.
    #[error("rank {rank} cannot join: the rendezvous at {by} has ended, or its group is complete")]
    Closed {
        /// The address.
        by: SocketAddr,
        /// This rank.
        rank: Rank,
    },
    /// Some ranks did not connect in time.
    #[error("{missing} of {ranks} did not come within {within:?}{turned_away}")]
    Missing {
        /// The missing ranks, as text.
        missing: String,
        /// The number of ranks.
        ranks: u32,
        /// The timeout.
        within: Duration,
        /// The last connection that was rejected and why, or nothing.
        turned_away: String,
    },
    /// No rank of a group of any size came in time.
    #[error("no rank came within {within:?}{turned_away}")]
    NoRank {
        /// The timeout.
        within: Duration,
        /// The last connection that was rejected and why, or nothing.
        turned_away: String,
    },
    /// Another system call failed.
    #[error("cannot {what}: {error}")]
    System {
        /// The action that failed.
        what: &'static str,
        /// The kernel's error.
        error: io::Error,
    },
}

impl BootstrapError {
    pub(super) fn system(what: &'static str) -> impl FnOnce(io::Error) -> Self {
        move |error| Self::System { what, error }
    }
}

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
    use crate::CollectiveError;
    use std::error::Error;

    #[test]
    fn causes_are_said_once() {
        let listen = BootstrapError::system("listen")(io::Error::other("no port"));
        let secret = BootstrapError::NoSecret(SecretError::NoHome);
        for (error, said) in [
            (listen, "cannot listen: no port"),
            (secret, "no secret authenticates the ranks: HOME"),
        ] {
            let error = CollectiveError::from(error);
            assert!(error.to_string().starts_with(said), "{error}");
            assert!(error.source().is_none(), "{error}");
        }
    }

    #[test]
    fn ranks_as_text() {
        let words = |n| in_words(&(0..n).map(Rank).collect::<Vec<_>>());
        assert_eq!(words(0), "no rank");
        assert_eq!(words(1), "rank 0");
        assert_eq!(words(2), "ranks 0 and 1");
        assert_eq!(words(8), "ranks 0, 1, 2, 3, 4, 5, 6 and 7");
        assert_eq!(words(10), "ranks 0, 1, 2, 3, 4, 5, 6, 7 and 2 others");
    }
}
