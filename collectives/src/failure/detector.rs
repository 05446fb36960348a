//! The failure detector of a group member, sans-IO: queries, findings, and agreement on one
//! verdict.
//!
//! A rank whose engine is stalled sends a *query* to all members; [`diagnose`] derives a tentative
//! *finding* from the replies. A *verdict* fails the group: from a death, or from a member that
//! gives up. Every member broadcasts the first verdict that it receives and each stronger one, so
//! all end with the strongest. It is *agreed*, and final, when all members that can send one have
//! sent the same, or [`AGREEMENT_TIMEOUT`] after the first was known.

use std::sync::Arc;
use std::time::{Duration, Instant};

use super::diagnosis::{MemberStatus, diagnose};
use super::message::{MAX_REASON, Message};
use super::monitor::{ProgressMonitor, Report};
use super::verdict::{Cause, Verdict};
use crate::bootstrap::one_line;
use crate::types::Rank;

/// Maximum time for members to agree on a verdict; one round trip where all members respond.
pub const AGREEMENT_TIMEOUT: Duration = Duration::from_millis(200);
/// A driven engine reports at once, or when its thread is scheduled; others count as idle.
const REPORT_TIMEOUT: Duration = Duration::from_secs(1);

/// A working link takes a round trip, and its peer may wait for a processor.
const LINK_TEST_TIMEOUT: Duration = Duration::from_millis(100);

/// A message and its destination; `None` is all other members.
pub(crate) type Outgoing = (Option<Rank>, Message);

#[derive(Clone, PartialEq, Eq, Debug, Default)]
enum MemberState {
    #[default]
    Present,
    Left,
    Dead(String),
}

#[derive(Clone, Debug, Default)]
struct MemberRecord {
    state: MemberState,
    last_verdict: Option<Verdict>,
}

#[derive(Debug)]
struct Investigation {
    number: u32,
    deadline: Instant,
    local_deadline: Instant,
    replies: Vec<Option<Report>>,
}

#[derive(Debug)]
pub(crate) struct FailureDetector {
    me: Rank,
    members: Vec<MemberRecord>,
    monitor: Arc<ProgressMonitor>,
    investigation: Option<Investigation>,
    queries_sent: u32,
    /// Queries to reply to: the querying rank, its query number, and the deadline.
    pending_queries: Vec<(Rank, u32, Instant)>,
    finding: Option<Verdict>,
    verdict: Option<Verdict>,
    /// The verdict may change until then.
    agreement_deadline: Option<Instant>,
    agreed: bool,
}

impl FailureDetector {
    pub(crate) fn new(me: Rank, ranks: usize, monitor: ProgressMonitor) -> Self {
        Self {
            me,
            members: vec![MemberRecord::default(); ranks],
            monitor: Arc::new(monitor),
            investigation: None,
            queries_sent: 0,
            pending_queries: Vec::new(),
            finding: None,
            verdict: None,
            agreement_deadline: None,
            agreed: false,
        }
    }

    pub(crate) fn monitor(&self) -> &Arc<ProgressMonitor> {
        &self.monitor
    }

    pub(crate) fn verdict(&self) -> Option<&Verdict> {
        self.verdict.as_ref().filter(|_| self.agreed)
    }

    pub(crate) fn failed(&self) -> bool {
        self.verdict.is_some()
    }

    pub(crate) fn has_left(&self, rank: Rank) -> bool {
        self.members[rank.index()].state == MemberState::Left
    }

    pub(crate) fn is_investigating(&self) -> bool {
        self.investigation.is_some()
    }

    pub(crate) fn finding(&self) -> Option<&Verdict> {
        self.finding.as_ref()
    }

    /// The members whose process has ended: by the connection of this one or, which may be earlier,
    /// by the verdict.
    pub(crate) fn dead(&self) -> impl Iterator<Item = Rank> {
        let of_verdict = self.verdict().and_then(|verdict| match verdict.cause {
            Cause::Died { rank, .. } => Some(rank),
            _ => None,
        });
        let members = (0..).map(Rank).zip(&self.members);
        let dead = members
            .filter(move |(rank, record)| matches!(record.state, MemberState::Dead(_)) || of_verdict == Some(*rank));
        dead.map(|(rank, _)| rank)
    }

    /// The dead, and the one that the verdict excludes.
    pub(crate) fn excluded(&self) -> Vec<Rank> {
        let excluded = self.verdict().and_then(|verdict| verdict.cause.excluded());
        self.dead().chain(excluded).collect()
    }

    pub(crate) fn died(&mut self, rank: Rank, how: &str, now: Instant, out: &mut Vec<Outgoing>) {
        let how = one_line(how, MAX_REASON);
        self.members[rank.index()].state = MemberState::Dead(how.clone());
        let cause = Cause::Died { rank, how };
        self.propose_verdict(Verdict { cause, stuck: None }, now, out);
        self.tick(now, out);
    }

    pub(crate) fn left(&mut self, rank: Rank, now: Instant, out: &mut Vec<Outgoing>) {
        let state = &mut self.members[rank.index()].state;
        if *state == MemberState::Present {
            *state = MemberState::Left;
        }
        self.tick(now, out);
    }

    /// Derives a finding from the replies within `window`.
    pub(crate) fn investigate(&mut self, window: Duration, test_links: bool, now: Instant, out: &mut Vec<Outgoing>) {
        if self.investigation.is_some() || self.failed() {
            return;
        }
        self.finding = None;
        let report_timeout = REPORT_TIMEOUT.min(window / 2);
        self.request_link_test(test_links, report_timeout);
        self.request_report();
        self.queries_sent = self.queries_sent.wrapping_add(1);
        self.investigation = Some(Investigation {
            number: self.queries_sent,
            deadline: now + window,
            local_deadline: now + report_timeout,
            replies: vec![None; self.members.len()],
        });
        let query = Message::Query {
            number: self.queries_sent,
            timeout_ms: report_timeout.as_millis() as u32,
            test_links,
        };
        out.push((None, query));
    }

    /// Fails the group with the last finding, or else `reason`; no effect if it has failed already.
    pub(crate) fn give_up(&mut self, reason: &str, now: Instant, out: &mut Vec<Outgoing>) {
        if self.failed() {
            return;
        }
        let verdict = self.finding.clone().unwrap_or_else(|| Verdict {
            cause: Cause::Aborted {
                rank: self.me,
                reason: one_line(reason, MAX_REASON),
            },
            stuck: None,
        });
        self.propose_verdict(verdict, now, out);
        self.tick(now, out);
    }

    pub(crate) fn receive(&mut self, from: Rank, message: Message, now: Instant, out: &mut Vec<Outgoing>) {
        match message {
            Message::Query {
                number,
                timeout_ms,
                test_links,
            } => {
                let known = self.monitor.snapshot();
                if known.begun == known.finished && !self.monitor.messages_in_flight() {
                    let report = Report {
                        waits: Some(Vec::new()),
                        ..known
                    };
                    out.push((Some(from), Message::Reply { number, report }));
                    return;
                }
                let report_timeout = Duration::from_millis(timeout_ms.into()).min(REPORT_TIMEOUT);
                self.request_link_test(test_links, report_timeout);
                self.request_report();
                self.pending_queries.retain(|(who, ..)| *who != from);
                self.pending_queries.push((from, number, now + report_timeout));
            }
            Message::Reply { number, report } => {
                if let Some(investigation) = self
                    .investigation
                    .as_mut()
                    .filter(|investigation| investigation.number == number)
                {
                    investigation.replies[from.index()] = Some(report);
                }
            }
            Message::Verdict(verdict) => {
                let ranks = self.members.len();
                if verdict.cause.culprit().index() < ranks && !self.agreed {
                    self.members[from.index()].last_verdict = Some(verdict.clone());
                    self.propose_verdict(verdict, now, out);
                }
            }
        }
        self.tick(now, out);
    }

    pub(crate) fn due(&self) -> Option<Instant> {
        let investigation = self.investigation.as_ref().map(|investigation| {
            let all_answered = self.all_answered(investigation);
            if all_answered {
                investigation.local_deadline
            } else {
                investigation.deadline
            }
        });
        let pending_queries = self.pending_queries.iter().map(|(.., due)| *due);
        let agreement_deadline = self.agreement_deadline.filter(|_| !self.agreed);
        pending_queries.chain(investigation).chain(agreement_deadline).min()
    }

    pub(crate) fn tick(&mut self, now: Instant, out: &mut Vec<Outgoing>) {
        let monitor = &self.monitor;
        let reported = !monitor.report_requested();
        self.pending_queries.retain(|(who, number, due)| {
            let replies = reported || now >= *due;
            if replies {
                let (number, report) = (*number, monitor.snapshot());
                out.push((Some(*who), Message::Reply { number, report }));
            }
            !replies
        });
        let over = |investigation: &Investigation| {
            now >= investigation.deadline
                || (self.all_answered(investigation) && (reported || now >= investigation.local_deadline))
        };
        if self.investigation.as_ref().is_some_and(over)
            && let Some(investigation) = self.investigation.take()
        {
            self.finding = self.diagnose(investigation);
        }
        if let Some(verdict) = &self.verdict
            && !self.agreed
        {
            let excluded = verdict.cause.excluded();
            let concurs = |(rank, record): (usize, &MemberRecord)| {
                let rank = Rank(rank as u32);
                rank == self.me
                    || record.state != MemberState::Present
                    || excluded == Some(rank)
                    || record.last_verdict.as_ref() == Some(verdict)
            };
            self.agreed = self.members.iter().enumerate().all(concurs)
                || self.agreement_deadline.is_some_and(|deadline| now >= deadline);
        }
    }

    fn request_link_test(&self, wanted: bool, report_timeout: Duration) {
        if wanted {
            self.monitor
                .request_link_test(LINK_TEST_TIMEOUT.min(report_timeout / 2));
        }
    }

    fn request_report(&self) {
        let requested = self.investigation.is_some() || !self.pending_queries.is_empty();
        if !requested {
            self.monitor.request_report();
        }
    }

    fn all_answered(&self, investigation: &Investigation) -> bool {
        let replies = self.members.iter().zip(&investigation.replies).enumerate();
        let mut open = replies.filter(|(rank, (record, reply))| {
            *rank != self.me.index() && record.state == MemberState::Present && reply.is_none()
        });
        open.next().is_none()
    }

    fn diagnose(&self, investigation: Investigation) -> Option<Verdict> {
        let status = |(rank, reply): (usize, Option<Report>)| match (&self.members[rank].state, reply) {
            (MemberState::Dead(how), _) => MemberStatus::Dead(how.clone()),
            _ if rank == self.me.index() => MemberStatus::Reported(self.monitor.snapshot()),
            (MemberState::Left, _) => MemberStatus::Left,
            (MemberState::Present, Some(report)) => MemberStatus::Reported(report),
            (MemberState::Present, None) => MemberStatus::Unresponsive,
        };
        let statuses: Vec<_> = investigation.replies.into_iter().enumerate().map(status).collect();
        diagnose(&statuses)
    }

    /// Adopts a verdict if it is stronger than the known one, and broadcasts it.
    fn propose_verdict(&mut self, verdict: Verdict, now: Instant, out: &mut Vec<Outgoing>) {
        if self.agreed {
            return;
        }
        let before = self.verdict.take();
        let after = match &before {
            Some(before) => before.clone().stronger(verdict),
            None => verdict,
        };
        if before.as_ref() != Some(&after) {
            out.push((None, Message::Verdict(after.clone())));
        }
        self.verdict = Some(after);
        self.agreement_deadline.get_or_insert(now + AGREEMENT_TIMEOUT);
        self.monitor.fail();
    }
}

#[cfg(test)]
#[path = "detector_tests.rs"]
mod tests;
