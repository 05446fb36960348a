//! The result of an investigation and its text.

use std::fmt;
use std::sync::Arc;

use serde::{Deserialize, Serialize};

use super::monitor::{Awaited, Wait, message_number};
use crate::bootstrap::Member;
use crate::plan::Collective;
use crate::types::Rank;

/// Why a group makes no progress. Ordered by strength: of two causes known at a time the first
/// usually causes the other, and all members agree on the first.
#[derive(Clone, PartialEq, Eq, PartialOrd, Ord, Hash, Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub enum Cause {
    /// A member aborted.
    Aborted {
        /// Its rank.
        rank: Rank,
        /// The reason it gave.
        #[serde(deserialize_with = "super::message::reason")]
        reason: String,
    },
    /// A member's process ended, or its host is gone.
    Died {
        /// Its rank.
        rank: Rank,
        /// How that was noticed.
        #[serde(deserialize_with = "super::message::reason")]
        how: String,
    },
    /// A member has left the group while others wait for it.
    Left {
        /// Its rank.
        rank: Rank,
    },
    /// A member's process exists and does not reply: it is stopped, or its host is unreachable.
    Stopped {
        /// Its rank.
        rank: Rank,
    },
    /// Two members began different operations at the same position.
    Mismatch {
        /// One member.
        rank: Rank,
        /// What it began.
        kind: Collective,
        /// The other member.
        other: Rank,
        /// What that one began.
        other_kind: Collective,
    },
    /// All queue pairs to a live member that was waited for have failed.
    CutOff {
        /// Its rank.
        rank: Rank,
    },
    /// A queue pair between two live members has failed.
    Broken {
        /// The rank whose queue pair failed.
        rank: Rank,
        /// The peer.
        peer: Rank,
    },
    /// A member has not begun an operation that others have.
    Absent {
        /// Its rank.
        rank: Rank,
        /// The operation, counted from 1.
        operation: u64,
    },
    /// A member has begun an operation and does not drive it.
    Idle {
        /// Its rank.
        rank: Rank,
    },
    /// A message does not arrive; both ends live and have done their part.
    Lost {
        /// The sender.
        from: Rank,
        /// The receiver.
        to: Rank,
    },
    /// No error: a member is still working.
    Slow {
        /// Its rank.
        rank: Rank,
    },
}

impl Cause {
    /// The member to blame; of a link between two, the one at which it is broken.
    #[must_use]
    pub fn culprit(&self) -> Rank {
        match self {
            Self::Aborted { rank, .. }
            | Self::Died { rank, .. }
            | Self::Left { rank }
            | Self::Stopped { rank }
            | Self::Mismatch { rank, .. }
            | Self::CutOff { rank }
            | Self::Absent { rank, .. }
            | Self::Idle { rank }
            | Self::Slow { rank }
            | Self::Broken { peer: rank, .. }
            | Self::Lost { from: rank, .. } => *rank,
        }
    }

    /// The member that cannot be in a group of survivors; of a broken link, the higher rank.
    #[must_use]
    pub fn excluded(&self) -> Option<Rank> {
        match self {
            Self::Died { rank, .. } | Self::Left { rank } | Self::Stopped { rank } | Self::CutOff { rank } => {
                Some(*rank)
            }
            Self::Broken { rank: one, peer: other } | Self::Lost { from: one, to: other } => Some(*one.max(other)),
            Self::Aborted { .. }
            | Self::Mismatch { .. }
            | Self::Absent { .. }
            | Self::Idle { .. }
            | Self::Slow { .. } => None,
        }
    }
}

/// A waiting member and what it waits for.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Stuck {
    /// The waiting rank.
    pub rank: Rank,
    /// The collective of the operation, where known.
    pub kind: Option<Collective>,
    /// The wait.
    pub wait: Wait,
}

impl Stuck {
    /// Total order of waits that show the same cause: least progress first. It includes every
    /// field, or members could choose differently: a rank may lose its queue pair a moment later.
    pub(crate) fn order(&self) -> impl Ord + use<> {
        let Wait {
            operation,
            slice,
            step,
            connection,
            peer,
            qpn,
            awaited,
        } = self.wait;
        let place = (operation, slice, step, self.rank, connection);
        (place, peer, qpn, awaited, self.kind)
    }
}

/// The cause of a failure and the wait that showed it.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Verdict {
    /// The cause.
    pub cause: Cause,
    /// The wait that showed it; `None` where it was noticed otherwise.
    pub stuck: Option<Stuck>,
}

impl Verdict {
    /// The stronger of two verdicts.
    #[must_use]
    pub fn stronger(self, other: Self) -> Self {
        // A verdict with a wait carries more information.
        let key = |verdict: &Self| (verdict.stuck.is_none(), verdict.stuck.map(|stuck| stuck.order()));
        match self.cause.cmp(&other.cause).then_with(|| key(&self).cmp(&key(&other))) {
            std::cmp::Ordering::Greater => other,
            _ => self,
        }
    }
}

/// The failure of a group: the verdict and the members. Displays as one line.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Failure {
    /// The verdict.
    pub verdict: Verdict,
    /// The members of the group, by rank.
    pub members: Arc<[Member]>,
}

impl std::error::Error for Failure {}

impl fmt::Display for Failure {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let name = |rank: Rank| Named {
            rank,
            member: self.members.get(rank.index()),
        };
        match &self.verdict.cause {
            Cause::Aborted { rank, reason } => write!(f, "{} aborted: {reason}", name(*rank)),
            Cause::Died { rank, how } => write!(f, "{} died: {how}", name(*rank)),
            Cause::Left { rank } => write!(f, "{} has left the group, and others wait for it", name(*rank)),
            Cause::Stopped { rank } => write!(
                f,
                "{} does not answer: it is stopped, or its host cannot be reached",
                name(*rank)
            ),
            Cause::Mismatch {
                rank,
                kind,
                other,
                other_kind,
            } => write!(
                f,
                "{} began {kind} where {} began {other_kind}: all ranks must begin the same operations in the same order",
                name(*rank),
                name(*other)
            ),
            Cause::CutOff { rank } => write!(
                f,
                "{} is cut off: its process lives, and the queue pairs to it have failed",
                name(*rank)
            ),
            Cause::Broken { rank, peer } => {
                write!(
                    f,
                    "the link from {} to {} is broken: both live, and the queue pair has failed",
                    name(*rank),
                    name(*peer)
                )
            }
            Cause::Absent { rank, operation } => match message_number(*operation) {
                Some(number) => write!(f, "{} has not come to its end of message {number}", name(*rank)),
                None => write!(f, "{} has not begun operation {operation}", name(*rank)),
            },
            Cause::Idle { rank } => write!(f, "{} has begun the operation and does not drive it", name(*rank)),
            Cause::Lost { from, to } => write!(
                f,
                "a message from {} does not arrive at {}: both live",
                name(*from),
                name(*to)
            ),
            Cause::Slow { rank } => write!(f, "{} is still at work", name(*rank)),
        }?;
        let Some(Stuck { rank, kind, wait }) = self.verdict.stuck else {
            return Ok(());
        };
        let what = match wait.awaited {
            Awaited::Message => "waits for a message from",
            Awaited::Credit => "waits for a credit from",
            Awaited::Acknowledgement => "waits for an acknowledgement from",
            Awaited::QueuePairFailed => "has lost its queue pair to",
        };
        let message = message_number(wait.operation);
        let kind = kind.map_or(
            if message.is_some() { "message" } else { "operation" },
            Collective::name,
        );
        write!(
            f,
            "; {} {what} rank {} in {kind} {}, slice {}, step {}, connection {}, queue pair {}",
            name(rank),
            wait.peer,
            message.unwrap_or(wait.operation),
            wait.slice,
            wait.step,
            wait.connection,
            wait.qpn
        )
    }
}

struct Named<'a> {
    rank: Rank,
    member: Option<&'a Member>,
}

impl fmt::Display for Named<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.member {
            Some(member) => write!(f, "rank {} ({member})", self.rank),
            None => write!(f, "rank {}", self.rank),
        }
    }
}
