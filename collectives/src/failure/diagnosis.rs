//! Root cause of a stall: a pure function of the status of every member.
//!
//! The wait-for graph is followed from waiter to awaited: a member that others wait for and that
//! does not wait itself is the cause. If all members wait in a cycle, a message was lost: the one
//! awaited by the member with the least progress, as all others wait for what would follow it.

use std::collections::BTreeSet;

use super::monitor::{Awaited, Report, message_number};
use super::verdict::{Cause, Stuck, Verdict};
use crate::plan::Collective;
use crate::types::Rank;

/// Status of a member.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum MemberStatus {
    /// Its process ended; how that was noticed.
    Dead(String),
    /// It has left the group.
    Left,
    /// It did not reply to a query.
    Unresponsive,
    /// It replied.
    Reported(Report),
}

/// Finds the cause from the status of every member, by rank; `None` without a wait or a death.
#[must_use]
pub fn diagnose(members: &[MemberStatus]) -> Option<Verdict> {
    let dead = members.iter().enumerate().filter_map(|(rank, member)| match member {
        MemberStatus::Dead(how) => Some(Verdict {
            cause: Cause::Died {
                rank: Rank(rank as u32),
                how: how.clone(),
            },
            stuck: None,
        }),
        _ => None,
    });
    let waits: Vec<Stuck> = all_waits(members).collect();
    let failed_links = failed_links(members, &waits);
    let found = waits.iter().filter_map(|stuck| {
        let cause = root_cause(members, stuck)?;
        Some(Verdict {
            cause,
            stuck: Some(*stuck),
        })
    });
    dead.chain(failed_links)
        .chain(found)
        .reduce(Verdict::stronger)
        .or_else(|| wait_cycle(&waits))
}

fn all_waits(members: &[MemberStatus]) -> impl Iterator<Item = Stuck> + '_ {
    members.iter().enumerate().flat_map(|(rank, member)| {
        let report = match member {
            MemberStatus::Reported(report) => Some(report),
            _ => None,
        };
        let waits = report
            .into_iter()
            .flat_map(|report| report.waits.iter().flatten().map(move |wait| (report, wait)));
        waits
            .filter(|(_, wait)| wait.peer.index() < members.len())
            .map(move |(report, wait)| Stuck {
                rank: Rank(rank as u32),
                kind: kind(report, wait.operation),
                wait: *wait,
            })
    })
}

/// The collective of an operation, as far as the member knows.
fn kind(report: &Report, operation: u64) -> Option<Collective> {
    let place = operation.checked_sub(report.finished + 1)?;
    *report.pending.get(usize::try_from(place).ok()?)?
}

/// Why an awaited member does not deliver; `None` if it waits itself.
fn root_cause(members: &[MemberStatus], stuck: &Stuck) -> Option<Cause> {
    let rank = stuck.wait.peer;
    let operation = stuck.wait.operation;
    let report = match &members[rank.index()] {
        MemberStatus::Dead(how) => {
            let how = how.clone();
            return Some(Cause::Died { rank, how });
        }
        MemberStatus::Left => return Some(Cause::Left { rank }),
        MemberStatus::Unresponsive => return Some(Cause::Stopped { rank }),
        MemberStatus::Reported(report) => report,
    };
    if stuck.wait.awaited == Awaited::QueuePairFailed {
        return None;
    }
    if let Some((kind, other_kind)) = kind(report, operation).zip(stuck.kind)
        && kind != other_kind
    {
        // Reported from the lower rank, whichever member noticed it.
        let (one, two) = ((rank, kind), (stuck.rank, other_kind));
        let ((rank, kind), (other, other_kind)) = (one.min(two), one.max(two));
        return Some(Cause::Mismatch {
            rank,
            kind,
            other,
            other_kind,
        });
    }
    let waits = report.waits.as_ref().is_some_and(|waits| !waits.is_empty());
    if message_number(operation).is_some() {
        // Point-to-point messages are unordered with the operations of all ranks: a member that
        // waits for nothing has not started its end.
        return match report.waits {
            None => Some(Cause::Idle { rank }),
            Some(_) => (!waits).then_some(Cause::Absent { rank, operation }),
        };
    }
    if report.finished >= operation {
        return Some(Cause::Lost {
            from: rank,
            to: stuck.rank,
        });
    }
    if report.begun == report.finished {
        // Unless a message between it and another member blocks it.
        return (!waits).then_some(Cause::Absent { rank, operation });
    }
    match report.waits.as_deref() {
        None => Some(Cause::Idle { rank }),
        Some([]) => Some(Cause::Slow { rank }),
        Some(_) => None,
    }
}

fn failed_links(members: &[MemberStatus], waits: &[Stuck]) -> Option<Verdict> {
    let lives = |rank: Rank| matches!(members[rank.index()], MemberStatus::Reported(_));
    let failed = |stuck: &&Stuck| stuck.wait.awaited == Awaited::QueuePairFailed && lives(stuck.wait.peer);
    let failed: Vec<&Stuck> = waits.iter().filter(failed).collect();
    let stuck = **failed.iter().min_by_key(|stuck| (stuck.order(), stuck.rank))?;
    let ends = |stuck: &Stuck| [stuck.rank.min(stuck.wait.peer), stuck.rank.max(stuck.wait.peer)];
    let links: BTreeSet<_> = failed.iter().map(|stuck| ends(stuck)).collect();
    let shared = ends(&stuck)
        .into_iter()
        .find(|end| links.iter().all(|link| link.contains(end)));
    // A rank that is cut off may show on a single link; then no third member reaches it.
    let report = |rank: Rank| match &members[rank.index()] {
        MemberStatus::Reported(report) => Some(report),
        _ => None,
    };
    let tried = |rank: Rank| report(rank).and_then(|report| report.reachable.as_deref());
    let reachable = |from: Rank, to: Rank| tried(from).is_some_and(|reached| reached.contains(&to));
    let third = || {
        (0..members.len() as u32)
            .map(Rank)
            .filter(|rank| !ends(&stuck).contains(rank))
    };
    let works = |end: Rank| third().any(|rank| reachable(rank, end) || reachable(end, rank));
    // An engine that failed and kept no connection for the link test proves nothing, and neither do
    // members that had no time for the test.
    let is_tested = || third().any(|rank| tried(rank).is_some());
    let shows = |end: Rank| tried(end).is_some() || is_tested() && failed.iter().all(|stuck| stuck.rank != end);
    let [one, other] = ends(&stuck);
    let cause = match shared {
        Some(rank) if links.len() > 1 => Cause::CutOff { rank },
        _ if works(one) && !works(other) && shows(other) => Cause::CutOff { rank: other },
        _ if works(other) && !works(one) && shows(one) => Cause::CutOff { rank: one },
        _ => Cause::Broken {
            rank: stuck.rank,
            peer: stuck.wait.peer,
        },
    };
    Some(Verdict {
        cause,
        stuck: Some(stuck),
    })
}

fn wait_cycle(waits: &[Stuck]) -> Option<Verdict> {
    let stuck = *waits.iter().min_by_key(|stuck| stuck.order())?;
    Some(Verdict {
        cause: Cause::Lost {
            from: stuck.wait.peer,
            to: stuck.rank,
        },
        stuck: Some(stuck),
    })
}

#[cfg(test)]
#[path = "diagnosis_tests.rs"]
mod tests;
