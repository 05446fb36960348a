//! Agreement of the survivors of a group on its members (shrink), sans-IO.
//!
//! Each member that wants to continue *joins* and lists the members that it excludes; exclusions
//! accumulate and are forwarded. The *coordinator*, the lowest rank not excluded, *proposes* those
//! that have joined; when all have acknowledged, it *commits*. A member that dies or does not reply
//! meanwhile is excluded and a new round begins; the next rank takes over from a failed
//! coordinator. A member that has committed replies with that commit, so the decision stands even
//! if its coordinator is dead.
//!
//! A member acknowledges no proposal of a member that it excludes, and accepts no commit from it,
//! so no two groups can both be committed by their common members.

use std::collections::BTreeSet;
use std::time::{Duration, Instant};

use serde::{Deserialize, Serialize};

use crate::bootstrap::GroupId;
use crate::types::Rank;

/// A proposed group. Ranks are those of the old group.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct Proposal {
    /// Counts the proposals of one coordinator.
    pub(crate) epoch: u32,
    pub(crate) group: GroupId,
    /// Its members in order; the first is the coordinator.
    pub(crate) members: Vec<Rank>,
}

#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) enum ShrinkMessage {
    Join { excluded: Vec<Rank> },
    Propose(Proposal),
    Ready { epoch: u32 },
    Commit(Proposal),
}

pub(crate) type AddressedMessage = (Rank, ShrinkMessage);

#[derive(Clone, PartialEq, Eq, Debug)]
pub(crate) enum Outcome {
    Agreed(Proposal),
    Excluded,
    TimedOut,
}

/// Why there is no group of survivors for this member.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum ShrinkError {
    /// The others continue without it.
    #[error(
        "the others go on without rank {rank}: they found it dead, stopped or cut off, or it did not shrink in time"
    )]
    Excluded {
        /// This rank.
        rank: Rank,
    },
    /// There was no agreement in time.
    #[error(
        "rank {rank} found no agreement on who is left within {within:?}: give it more time, and have all survivors shrink"
    )]
    Late {
        /// This rank.
        rank: Rank,
        /// The timeout.
        within: Duration,
    },
}

#[derive(Debug)]
pub(crate) struct Agreement {
    me: Rank,
    ranks: u32,
    deadline: Option<(Instant, Duration)>,
    round_deadline: Option<Instant>,
    joined: BTreeSet<Rank>,
    excluded: BTreeSet<Rank>,
    epoch: u32,
    /// Coordinator and epoch. Coordinators only increase, as exclusions are never revoked.
    last_acked: Option<(Rank, u32)>,
    proposal: Option<Proposal>,
    ready: BTreeSet<Rank>,
    outcome: Option<Outcome>,
}

impl Agreement {
    pub(crate) fn new(me: Rank, ranks: u32) -> Self {
        Self {
            me,
            ranks,
            deadline: None,
            round_deadline: None,
            joined: BTreeSet::new(),
            excluded: BTreeSet::new(),
            epoch: 0,
            last_acked: None,
            proposal: None,
            ready: BTreeSet::new(),
            outcome: None,
        }
    }

    pub(crate) fn outcome(&self) -> Option<&Outcome> {
        self.outcome.as_ref()
    }

    /// The group whose frames this member has to accept.
    pub(crate) fn proposal(&self) -> Option<&Proposal> {
        self.proposal.as_ref()
    }

    /// Joins, without `excluded`. `next` numbers groups that this member creates.
    pub(crate) fn join(
        &mut self,
        excluded: impl IntoIterator<Item = Rank>,
        timeout: Duration,
        now: Instant,
        next: &mut dyn FnMut() -> GroupId,
        out: &mut Vec<AddressedMessage>,
    ) {
        self.deadline = Some((now + timeout, timeout));
        self.round_deadline = Some(now + timeout / 2);
        self.joined.insert(self.me);
        self.excluded.extend(excluded);
        self.broadcast_join(out);
        self.advance(now, next, out);
    }

    pub(crate) fn member_lost(
        &mut self,
        rank: Rank,
        now: Instant,
        next: &mut dyn FnMut() -> GroupId,
        out: &mut Vec<AddressedMessage>,
    ) {
        self.exclude([rank], out);
        self.advance(now, next, out);
    }

    /// A member has left the old group. One that has joined leaves it for the new one.
    pub(crate) fn member_left(
        &mut self,
        rank: Rank,
        now: Instant,
        next: &mut dyn FnMut() -> GroupId,
        out: &mut Vec<AddressedMessage>,
    ) {
        if !self.joined.contains(&rank) {
            self.member_lost(rank, now, next, out);
        }
    }

    pub(crate) fn receive(
        &mut self,
        from: Rank,
        message: ShrinkMessage,
        now: Instant,
        next: &mut dyn FnMut() -> GroupId,
        out: &mut Vec<AddressedMessage>,
    ) {
        if let Some(Outcome::Agreed(committed)) = &self.outcome {
            if matches!(message, ShrinkMessage::Join { .. } | ShrinkMessage::Propose(_)) {
                out.push((from, ShrinkMessage::Commit(committed.clone())));
            }
            return;
        }
        match message {
            ShrinkMessage::Join { excluded } => {
                self.joined.insert(from);
                self.exclude(excluded, out);
            }
            ShrinkMessage::Propose(proposal) => self.handle_proposal(from, proposal, now, out),
            ShrinkMessage::Ready { epoch } => {
                if self.owns_proposal() && epoch == self.epoch {
                    self.ready.insert(from);
                }
            }
            ShrinkMessage::Commit(proposal) => {
                if !self.excluded.contains(&from) && self.deadline.is_some() && self.valid(&proposal) {
                    self.handle_commit(proposal, out);
                }
            }
        }
        self.advance(now, next, out);
    }

    pub(crate) fn due(&self) -> Option<Instant> {
        let (end, _) = self.deadline.filter(|_| self.outcome.is_none())?;
        Some(self.round_deadline.map_or(end, |deadline| deadline.min(end)))
    }

    pub(crate) fn tick(&mut self, now: Instant, next: &mut dyn FnMut() -> GroupId, out: &mut Vec<AddressedMessage>) {
        let Some((end, timeout)) = self.deadline.filter(|_| self.outcome.is_none()) else {
            return;
        };
        if now >= end {
            self.outcome = Some(Outcome::TimedOut);
            return;
        }
        if self.round_deadline.is_some_and(|deadline| now >= deadline) {
            self.round_deadline = Some(now + self.round_length(timeout));
            let absent: Vec<_> = match &self.proposal {
                Some(proposal) if self.owns_proposal() => {
                    let members = proposal.members.iter().copied();
                    members.filter(|rank| !self.ready.contains(rank)).collect()
                }
                _ if self.all_joined() => self.coordinator().into_iter().collect(),
                _ => self.candidates().filter(|rank| !self.joined.contains(rank)).collect(),
            };
            let me = self.me;
            self.exclude(absent.into_iter().filter(|rank| *rank != me), out);
            self.advance(now, next, out);
        }
    }

    /// The length of a round: a coordinator excludes silent members sooner than they exclude it.
    fn round_length(&self, timeout: Duration) -> Duration {
        if self.coordinator() == Some(self.me) {
            timeout / 16
        } else {
            timeout / 8
        }
    }

    fn candidates(&self) -> impl Iterator<Item = Rank> + '_ {
        (0..self.ranks).map(Rank).filter(|rank| !self.excluded.contains(rank))
    }

    fn coordinator(&self) -> Option<Rank> {
        self.candidates().next()
    }

    fn all_joined(&self) -> bool {
        self.candidates().all(|rank| self.joined.contains(&rank))
    }

    fn owns_proposal(&self) -> bool {
        self.proposal
            .as_ref()
            .is_some_and(|proposal| proposal.members.first() == Some(&self.me))
    }

    /// Members are ranks of this group, in order and distinct.
    fn valid(&self, proposal: &Proposal) -> bool {
        let members = &proposal.members;
        members.is_sorted_by(|a, b| a < b) && members.last().is_some_and(|last| last.0 < self.ranks)
    }

    fn exclude(&mut self, ranks: impl IntoIterator<Item = Rank>, out: &mut Vec<AddressedMessage>) {
        let before = self.excluded.len();
        self.excluded
            .extend(ranks.into_iter().filter(|rank| rank.0 < self.ranks));
        if self.excluded.len() > before && self.deadline.is_some() && self.outcome.is_none() {
            self.broadcast_join(out);
        }
    }

    fn broadcast_join(&self, out: &mut Vec<AddressedMessage>) {
        let join = ShrinkMessage::Join {
            excluded: self.excluded.iter().copied().collect(),
        };
        // Excluded members are informed too: they may be alive.
        let others = (0..self.ranks).map(Rank).filter(|rank| *rank != self.me);
        out.extend(others.map(|rank| (rank, join.clone())));
    }

    fn handle_proposal(&mut self, from: Rank, proposal: Proposal, now: Instant, out: &mut Vec<AddressedMessage>) {
        let fits = self.deadline.is_some() && self.valid(&proposal) && proposal.members.first() == Some(&from);
        let is_newer = self
            .last_acked
            .is_none_or(|last_acked| (from, proposal.epoch) > last_acked);
        if !fits || !is_newer || self.excluded.contains(&from) {
            return;
        }
        let absent = (0..self.ranks)
            .map(Rank)
            .filter(|rank| !proposal.members.contains(rank));
        self.exclude(absent.collect::<Vec<_>>(), out);
        if proposal.members.iter().any(|rank| self.excluded.contains(rank)) {
            // The coordinator learns of the exclusions and proposes again.
            let excluded = self.excluded.iter().copied().collect();
            out.push((from, ShrinkMessage::Join { excluded }));
            return;
        }
        let epoch = proposal.epoch;
        self.last_acked = Some((from, epoch));
        self.proposal = Some(proposal);
        self.round_deadline = self.deadline.map(|(_, timeout)| now + self.round_length(timeout));
        out.push((from, ShrinkMessage::Ready { epoch }));
    }

    fn handle_commit(&mut self, proposal: Proposal, out: &mut Vec<AddressedMessage>) {
        if self.owns_proposal() {
            // This member took over from the coordinator that decided this, and others wait for its
            // commit.
            self.send_commit(&proposal, out);
        }
        self.outcome = Some(if proposal.members.contains(&self.me) {
            self.proposal = Some(proposal.clone());
            Outcome::Agreed(proposal)
        } else {
            Outcome::Excluded
        });
    }

    fn send_commit(&self, proposal: &Proposal, out: &mut Vec<AddressedMessage>) {
        let others = proposal.members.iter().filter(|rank| **rank != self.me);
        out.extend(others.map(|rank| (*rank, ShrinkMessage::Commit(proposal.clone()))));
    }

    fn advance(&mut self, now: Instant, next: &mut dyn FnMut() -> GroupId, out: &mut Vec<AddressedMessage>) {
        let Some((_, timeout)) = self.deadline.filter(|_| self.outcome.is_none()) else {
            return;
        };
        if self.excluded.contains(&self.me) {
            self.outcome = Some(Outcome::Excluded);
            return;
        }
        let excluded = &self.excluded;
        self.proposal
            .take_if(|proposal| proposal.members.iter().any(|rank| excluded.contains(rank)));
        if self.proposal.is_none() && self.all_joined() && self.coordinator() == Some(self.me) {
            self.epoch += 1;
            let proposal = Proposal {
                epoch: self.epoch,
                group: next(),
                members: self.candidates().collect(),
            };
            self.ready = BTreeSet::from([self.me]);
            self.round_deadline = Some(now + self.round_length(timeout));
            let others = proposal.members.iter().filter(|rank| **rank != self.me);
            out.extend(others.map(|rank| (*rank, ShrinkMessage::Propose(proposal.clone()))));
            self.proposal = Some(proposal);
        } else if self.proposal.is_none() && self.all_joined() {
            let round_length = now + self.round_length(timeout);
            self.round_deadline = self.round_deadline.map(|deadline| deadline.max(round_length));
        }
        if self.owns_proposal()
            && let Some(proposal) = &self.proposal
            && proposal.members.iter().all(|rank| self.ready.contains(rank))
        {
            self.send_commit(proposal, out);
            self.outcome = Some(Outcome::Agreed(proposal.clone()));
        }
    }
}

impl ShrinkMessage {
    pub(crate) fn encode(&self) -> Vec<u8> {
        serde_json::to_vec(self).unwrap_or_default()
    }

    pub(crate) fn decode(bytes: &[u8]) -> Option<Self> {
        serde_json::from_slice(bytes).ok()
    }
}

#[cfg(test)]
#[path = "agreement_tests.rs"]
mod tests;
