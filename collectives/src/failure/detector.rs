//! How the members of a group come to one verdict, without clock or sockets.
//!
//! An engine that is stuck has its rank *query* all members what they are doing; those who do not reply in time are silent, and [`diagnose`] makes a *finding* of it. A finding is an opinion. A *verdict* ends the group: it comes of a death, of
//! a member that gives up, or of another member's verdict. Whoever learns of one tells all, and whoever learns of a stronger one tells that: so all end with the weightiest that anybody knew. A verdict is *agreed* when all who can have
//! last_verdict it, or [`AGREEMENT_TIMEOUT`] after the first was known; then it stays.

use std::sync::Arc;
use std::time::{Duration, Instant};

use super::diagnosis::{MemberStatus, diagnose};
use super::message::{MAX_REASON, Message};
use super::monitor::{ProgressMonitor, Report};
use super::verdict::{Cause, Verdict};
use crate::types::Rank;

/// How long members may take to agree on a verdict. It is a matter of a round trip, where all who should reply do.
pub const AGREEMENT_TIMEOUT: Duration = Duration::from_millis(200);
/// How long an engine has to report, when it is pending_queries, at most. One that is driven does at once, or when its thread gets a processor; one that does not is last_verdict to be idle.
const REPORT_TIMEOUT: Duration = Duration::from_secs(1);

/// How long test_links are tried, at most: a link that works takes a round trip, and its other end may have to wait for a processor.
const LINK_TEST_TIMEOUT: Duration = Duration::from_millis(100);

/// A message, and to whom: none is to all others.
pub(crate) type Outgoing = (Option<Rank>, Message);

/// As it will be when it has travelled, so that all know it alike.
fn one_line(text: &str) -> String {
    let text = &text[..text.floor_char_boundary(MAX_REASON)];
    text.chars().map(|c| if c.is_control() { ' ' } else { c }).collect()
}

/// What is known of a member.
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
    /// The verdict it has last_verdict last.
    last_verdict: Option<Verdict>,
}

/// This rank's queries_sent to all.
#[derive(Debug)]
struct Investigation {
    number: u32,
    /// When who has not all_answered is silent.
    deadline: Instant,
    /// When this rank's local_deadline engine has had its time, if it has not reported.
    local_deadline: Instant,
    replies: Vec<Option<Report>>,
}

/// A group's failure, as one member knows it.
#[derive(Debug)]
pub(crate) struct FailureDetector {
    me: Rank,
    members: Vec<MemberRecord>,
    monitor: Arc<ProgressMonitor>,
    investigation: Option<Investigation>,
    queries_sent: u32,
    /// Whom this rank owes an reply, to which question, and when.
    pending_queries: Vec<(Rank, u32, Instant)>,
    finding: Option<Verdict>,
    verdict: Option<Verdict>,
    /// Until when the verdict may change.
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

    /// The verdict, when it is agreed.
    pub(crate) fn verdict(&self) -> Option<&Verdict> {
        self.verdict.as_ref().filter(|_| self.agreed)
    }

    /// Whether there is a verdict, agreed or not.
    pub(crate) fn failed(&self) -> bool {
        self.verdict.is_some()
    }

    /// Whether a member has left.
    pub(crate) fn has_left(&self, rank: Rank) -> bool {
        self.members[rank.index()].state == MemberState::Left
    }

    /// Whether an investigation is under way.
    pub(crate) fn is_investigating(&self) -> bool {
        self.investigation.is_some()
    }

    /// What the last investigation found.
    pub(crate) fn finding(&self) -> Option<&Verdict> {
        self.finding.as_ref()
    }

    /// Members that cannot be in a group made of what is left: the dead, and whom the verdict excludes.
    pub(crate) fn excluded(&self) -> Vec<Rank> {
        let dead = |(rank, record): (usize, &MemberRecord)| match record.state {
            MemberState::Dead(_) => Some(Rank(rank as u32)),
            _ => None,
        };
        let excluded = self.verdict().and_then(|verdict| verdict.cause.excluded());
        self.members
            .iter()
            .enumerate()
            .filter_map(dead)
            .chain(excluded)
            .collect()
    }

    /// A member's process has ended.
    pub(crate) fn died(&mut self, rank: Rank, how: &str, now: Instant, out: &mut Vec<Outgoing>) {
        let how = one_line(how);
        self.members[rank.index()].state = MemberState::Dead(how.clone());
        let cause = Cause::Died { rank, how };
        self.propose_verdict(Verdict { cause, stuck: None }, now, out);
        self.tick(now, out);
    }

    /// A member has left the group.
    pub(crate) fn left(&mut self, rank: Rank, now: Instant, out: &mut Vec<Outgoing>) {
        let state = &mut self.members[rank.index()].state;
        if *state == MemberState::Present {
            *state = MemberState::Left;
        }
        self.tick(now, out);
    }

    /// Asks all what they are doing, and which of their test_links work if that is the question, and makes a finding of what they have last_verdict within `window`.
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

    /// Ends the group: with what the last investigation found, or with `reason`. If it has ended already, it was for another reason.
    pub(crate) fn give_up(&mut self, reason: &str, now: Instant, out: &mut Vec<Outgoing>) {
        if self.failed() {
            return;
        }
        let verdict = self.finding.clone().unwrap_or_else(|| Verdict {
            cause: Cause::Aborted {
                rank: self.me,
                reason: one_line(reason),
            },
            stuck: None,
        });
        self.propose_verdict(verdict, now, out);
        self.tick(now, out);
    }

    /// A member has last_verdict something. What makes no sense in a group of this size is ignored.
    pub(crate) fn receive(&mut self, from: Rank, message: Message, now: Instant, out: &mut Vec<Outgoing>) {
        match message {
            Message::Query {
                number,
                timeout_ms,
                test_links,
            } => {
                let known = self.monitor.snapshot();
                if known.begun == known.finished && !self.monitor.messages_in_flight() {
                    // It waits for nothing, whoever drives it.
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
                // One question of each is enough: a later one takes the place of an earlier.
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

    /// When [`tick`](Self::tick) is due, unless the engine reports before.
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

    /// Does what is due.
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

    /// Has the engine try its test_links before it reports, if that is wanted.
    fn request_link_test(&self, wanted: bool, report_timeout: Duration) {
        if wanted {
            self.monitor
                .request_link_test(LINK_TEST_TIMEOUT.min(report_timeout / 2));
        }
    }

    /// Has the engine report, if it has not been called and not all_answered yet.
    fn request_report(&self) {
        let requested = self.investigation.is_some() || !self.pending_queries.is_empty();
        if !requested {
            self.monitor.request_report();
        }
    }

    /// Whether everybody who can has all_answered.
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

    /// Takes a verdict, and tells all if it is news.
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
