//! Trials of several members in virtual time, with messages that are carried by hand.

use super::*;
use crate::failure::monitor::{Awaited, Wait};
use crate::failure::verdict::Stuck;
use crate::plan::Collective;

struct Court {
    now: Instant,
    members: Vec<FailureDetector>,
    /// Who does not hear and says nothing.
    deaf: Vec<bool>,
    mail: Vec<(usize, usize, Message)>,
    carried: usize,
}

const WINDOW: Duration = Duration::from_secs(1);

impl Court {
    fn new(ranks: usize) -> Self {
        Self {
            now: Instant::now(),
            members: (0..ranks)
                .map(|rank| FailureDetector::new(Rank(rank as u32), ranks, ProgressMonitor::default()))
                .collect(),
            deaf: vec![false; ranks],
            mail: Vec::new(),
            carried: 0,
        }
    }

    fn act(&mut self, rank: usize, act: impl FnOnce(&mut FailureDetector, Instant, &mut Vec<Outgoing>)) {
        let mut out = Vec::new();
        act(&mut self.members[rank], self.now, &mut out);
        for (to, message) in out {
            let all = 0..self.members.len();
            let others = all.filter(|other| *other != rank && to.is_none_or(|to| to.index() == *other));
            self.mail.extend(others.map(|other| (rank, other, message.clone())));
        }
    }

    /// Carries all that is last_verdict; engines that are driven report at once.
    fn carry(&mut self, reports: impl Fn(usize) -> Option<Vec<Wait>>) {
        loop {
            for (rank, member) in self
                .members
                .iter()
                .enumerate()
                .filter(|(_, member)| member.monitor().report_requested())
            {
                if let Some(waits) = reports(rank).filter(|_| !self.deaf[rank]) {
                    member.monitor().report(waits);
                }
            }
            // The bell rings where an engine has reported.
            self.pass(Duration::ZERO);
            if self.mail.is_empty() {
                return;
            }
            let (from, to, message) = self.mail.remove(0);
            self.carried += 1;
            assert!(self.carried < 10_000, "they never stop talking");
            if !self.deaf[from] && !self.deaf[to] {
                self.act(to, |detector, now, out| {
                    detector.receive(Rank(from as u32), message, now, out)
                });
            }
        }
    }

    fn pass(&mut self, time: Duration) {
        self.now += time;
        for rank in 0..self.members.len() {
            if !self.deaf[rank] {
                self.act(rank, |detector, now, out| detector.tick(now, out));
            }
        }
    }

    /// All who hear have agreed on one verdict.
    fn verdict(&self) -> Verdict {
        let mut verdicts = self
            .members
            .iter()
            .zip(&self.deaf)
            .filter(|(_, deaf)| !**deaf)
            .map(|(member, _)| {
                assert!(member.monitor().failed());
                member.verdict().expect("it is agreed").clone()
            });
        let first = verdicts.next().unwrap();
        assert!(verdicts.all(|other| other == first));
        first
    }
}

fn wait(peer: u32) -> Wait {
    Wait {
        operation: 1,
        connection: 0,
        slice: 0,
        step: 3,
        peer: Rank(peer),
        qpn: 9,
        awaited: Awaited::Message,
    }
}

fn nobody(_: usize) -> Option<Vec<Wait>> {
    None
}

#[test]
fn a_death_that_all_see_is_settled_without_a_time_out() {
    let mut court = Court::new(4);
    for rank in [0, 1, 3] {
        court.act(rank, |detector, now, out| {
            detector.died(Rank(2), "its connection closed", now, out)
        });
    }
    court.deaf[2] = true;
    court.carry(nobody);
    assert_eq!(court.verdict().cause.culprit(), Rank(2));
    assert_eq!(
        court.members[0].excluded(),
        [Rank(2), Rank(2)],
        "as a dead one, and as the verdict's"
    );
}

#[test]
fn two_deaths_that_are_seen_in_different_order_are_one_verdict() {
    let mut court = Court::new(5);
    court.deaf[1] = true;
    court.deaf[3] = true;
    for (rank, order) in [(0, [1, 3]), (2, [3, 1]), (4, [3, 1])] {
        for dead in order {
            let how = format!("seen by {rank}");
            court.act(rank, |detector, now, out| detector.died(Rank(dead), &how, now, out));
        }
    }
    court.carry(nobody);
    let expected = Cause::Died {
        rank: Rank(1),
        how: "seen by 0".into(),
    };
    assert_eq!(court.verdict().cause, expected);
}

#[test]
fn a_member_that_does_not_answer_is_found_and_named_by_all_once_somebody_gives_up() {
    let mut court = Court::new(3);
    court
        .members
        .iter()
        .for_each(|member| member.monitor().begin(1, Collective::Reduce));
    court.deaf[2] = true;
    court.act(0, |detector, now, out| detector.investigate(WINDOW, false, now, out));
    let reports = |rank: usize| Some(vec![wait(if rank == 0 { 1 } else { 2 })]);
    court.carry(reports);
    assert_eq!(court.members[0].finding(), None, "it may still reply");
    court.pass(WINDOW);
    let stuck = Stuck {
        rank: Rank(1),
        kind: Some(Collective::Reduce),
        wait: wait(2),
    };
    let expected = Verdict {
        cause: Cause::Stopped { rank: Rank(2) },
        stuck: Some(stuck),
    };
    assert_eq!(court.members[0].finding(), Some(&expected));
    assert!(!court.members[0].failed(), "an opinion ends nothing");
    court.act(0, |detector, now, out| detector.give_up("it took too long", now, out));
    court.carry(reports);
    assert_eq!(court.verdict(), expected);
}

#[test]
fn an_investigation_ends_as_soon_as_all_have_answered() {
    let mut court = Court::new(3);
    court.members[0].monitor().begin(1, Collective::Reduce);
    court.act(0, |detector, now, out| detector.investigate(WINDOW, false, now, out));
    court.carry(nobody);
    let local_deadline = Some(court.now + WINDOW / 2);
    assert_eq!(
        court.members[0].due(),
        local_deadline,
        "only its local_deadline engine may say more"
    );
    court.carry(|_| Some(vec![wait(2)]));
    let found = court.members[0].finding().map(|verdict| verdict.cause.clone());
    assert_eq!(
        found,
        Some(Cause::Absent {
            rank: Rank(2),
            operation: 1
        })
    );
    assert_eq!(court.members[0].due(), None);
    assert!(court.members.iter().all(|member| !member.failed()));
}

#[test]
fn an_engine_that_nobody_drives_is_said_to_be_idle() {
    let mut court = Court::new(2);
    court
        .members
        .iter()
        .for_each(|member| member.monitor().begin(1, Collective::Reduce));
    court.act(0, |detector, now, out| detector.investigate(WINDOW, false, now, out));
    let reports = |rank: usize| (rank == 0).then(|| vec![wait(1)]);
    court.carry(reports);
    assert_eq!(court.members[0].finding(), None, "it has half the time to report");
    court.pass(WINDOW / 2);
    court.carry(reports);
    let found = court.members[0].finding().map(|verdict| verdict.cause.clone());
    assert_eq!(found, Some(Cause::Idle { rank: Rank(1) }));
}

/// Rank 1 is cut off, and rank 0 notices. Whether links are tried is the question's.
#[test]
fn links_are_tried_where_one_has_failed_and_only_there() {
    for links in [false, true] {
        let mut court = Court::new(4);
        for (rank, member) in court.members.iter().enumerate() {
            member.monitor().begin(1, Collective::Reduce);
            assert_eq!(member.monitor().requested_link_test(), None);
            let reached = (0..4).filter(|to| *to != rank as u32 && rank != 1 && *to != 1);
            // As engines that try at once have it, and only if it is wanted.
            if links {
                member.monitor().report_reachable(reached.map(Rank).collect());
            }
        }
        court.act(0, |detector, now, out| detector.investigate(WINDOW, links, now, out));
        court.carry(|rank| {
            let awaited = if rank == 0 {
                Awaited::QueuePairFailed
            } else {
                Awaited::Message
            };
            Some(vec![Wait {
                awaited,
                ..wait(if rank == 0 { 1 } else { 0 })
            }])
        });
        for member in &court.members {
            // Less than half of the time that there is to report.
            assert_eq!(
                member.monitor().requested_link_test(),
                links.then_some(LINK_TEST_TIMEOUT)
            );
        }
        let found = court.members[0].finding().map(|verdict| verdict.cause.clone());
        let (rank, peer) = (Rank(0), Rank(1));
        let expected = match links {
            true => Cause::CutOff { rank: peer },
            false => Cause::Broken { rank, peer },
        };
        assert_eq!(found, Some(expected));
    }
}

#[test]
fn who_gives_up_without_a_finding_says_its_own_reason_on_one_line() {
    let mut court = Court::new(2);
    let reason = format!("the disk\nis full {}", "!".repeat(5000));
    court.act(1, |detector, now, out| detector.give_up(&reason, now, out));
    court.carry(nobody);
    let Cause::Aborted { rank, reason } = court.verdict().cause else {
        panic!("{:?}", court.verdict());
    };
    assert_eq!(rank, Rank(1));
    assert!(
        reason.starts_with("the disk is full !") && reason.len() == MAX_REASON,
        "{reason}"
    );
}

#[test]
fn a_member_that_says_nothing_delays_the_verdict_and_does_not_prevent_it() {
    let mut court = Court::new(3);
    court.deaf[1] = true;
    court.act(0, |detector, now, out| detector.give_up("enough", now, out));
    court.carry(nobody);
    assert!(court.members[0].failed() && court.members[0].verdict().is_none());
    assert_eq!(court.members[0].due(), Some(court.now + AGREEMENT_TIMEOUT));
    court.pass(AGREEMENT_TIMEOUT);
    assert_eq!(court.verdict().cause.culprit(), Rank(0));
    // It wakes, is_investigating of it now, and changes nothing.
    court.deaf[1] = false;
    let late = Verdict {
        cause: Cause::Died {
            rank: Rank(1),
            how: String::new(),
        },
        stuck: None,
    };
    court.act(0, |detector, now, out| {
        detector.receive(Rank(1), Message::Verdict(late), now, out)
    });
    assert_eq!(court.members[0].verdict().unwrap().cause.culprit(), Rank(0));
}

#[test]
fn nonsense_from_a_member_is_ignored() {
    let mut court = Court::new(2);
    let beyond = Verdict {
        cause: Cause::Left { rank: Rank(2) },
        stuck: None,
    };
    let reply = Message::Reply {
        number: 5,
        report: Report::default(),
    };
    for message in [Message::Verdict(beyond), reply] {
        court.act(0, |detector, now, out| detector.receive(Rank(1), message, now, out));
    }
    assert!(!court.members[0].failed() && court.members[0].due().is_none());
}
