//! Failure detectors of several members in virtual time; messages are delivered by hand.

use super::*;
use crate::failure::monitor::{Awaited, Wait};
use crate::failure::verdict::Stuck;
use crate::plan::Collective;

struct Simulation {
    now: Instant,
    members: Vec<FailureDetector>,
    /// Members that neither receive nor send.
    disconnected: Vec<bool>,
    mail: Vec<(usize, usize, Message)>,
    carried: usize,
}

const WINDOW: Duration = Duration::from_secs(1);

impl Simulation {
    fn new(ranks: usize) -> Self {
        Self {
            now: Instant::now(),
            members: (0..ranks)
                .map(|rank| FailureDetector::new(Rank(rank as u32), ranks, ProgressMonitor::default()))
                .collect(),
            disconnected: vec![false; ranks],
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

    fn deliver(&mut self, reports: impl Fn(usize) -> Option<Vec<Wait>>) {
        loop {
            for (rank, member) in self
                .members
                .iter()
                .enumerate()
                .filter(|(_, member)| member.monitor().report_requested())
            {
                if let Some(waits) = reports(rank).filter(|_| !self.disconnected[rank]) {
                    member.monitor().report(waits);
                }
            }
            // The eventfd is written when an engine has reported.
            self.pass(Duration::ZERO);
            if self.mail.is_empty() {
                return;
            }
            let (from, to, message) = self.mail.remove(0);
            self.carried += 1;
            assert!(self.carried < 10_000, "they never stop talking");
            if !self.disconnected[from] && !self.disconnected[to] {
                self.act(to, |detector, now, out| {
                    detector.receive(Rank(from as u32), message, now, out)
                });
            }
        }
    }

    fn pass(&mut self, time: Duration) {
        self.now += time;
        for rank in 0..self.members.len() {
            if !self.disconnected[rank] {
                self.act(rank, |detector, now, out| detector.tick(now, out));
            }
        }
    }

    fn verdict(&self) -> Verdict {
        let mut verdicts = self
            .members
            .iter()
            .zip(&self.disconnected)
            .filter(|(_, disconnected)| !**disconnected)
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

fn no_waits(_: usize) -> Option<Vec<Wait>> {
    None
}

#[test]
fn a_death_that_all_notice_is_agreed_without_a_timeout() {
    let mut simulation = Simulation::new(4);
    for rank in [0, 1, 3] {
        simulation.act(rank, |detector, now, out| {
            detector.died(Rank(2), "its connection closed", now, out)
        });
    }
    simulation.disconnected[2] = true;
    simulation.deliver(no_waits);
    assert_eq!(simulation.verdict().cause.culprit(), Rank(2));
    assert_eq!(
        simulation.members[0].excluded(),
        [Rank(2), Rank(2)],
        "as a dead one, and as the verdict's"
    );
}

/// Its program may end when it learns of the failure, before the end of the connection is noticed.
#[test]
fn a_death_is_known_by_the_verdict_too() {
    let mut simulation = Simulation::new(3);
    simulation.act(0, |detector, now, out| {
        detector.died(Rank(2), "its connection closed", now, out)
    });
    simulation.disconnected[2] = true;
    simulation.deliver(no_waits);
    simulation.pass(AGREEMENT_TIMEOUT);
    assert!(simulation.members[1].verdict().is_some());
    assert!(simulation.members[1].dead().eq([Rank(2)]));
}

#[test]
fn two_deaths_in_different_order_give_one_verdict() {
    let mut simulation = Simulation::new(5);
    simulation.disconnected[1] = true;
    simulation.disconnected[3] = true;
    for (rank, order) in [(0, [1, 3]), (2, [3, 1]), (4, [3, 1])] {
        for dead in order {
            let how = format!("seen by {rank}");
            simulation.act(rank, |detector, now, out| detector.died(Rank(dead), &how, now, out));
        }
    }
    simulation.deliver(no_waits);
    let expected = Cause::Died {
        rank: Rank(1),
        how: "seen by 0".into(),
    };
    assert_eq!(simulation.verdict().cause, expected);
}

#[test]
fn an_unresponsive_member_is_named_by_all_once_a_member_gives_up() {
    let mut simulation = Simulation::new(3);
    simulation
        .members
        .iter()
        .for_each(|member| member.monitor().begin(1, Collective::Reduce));
    simulation.disconnected[2] = true;
    simulation.act(0, |detector, now, out| detector.investigate(WINDOW, false, now, out));
    let reports = |rank: usize| Some(vec![wait(if rank == 0 { 1 } else { 2 })]);
    simulation.deliver(reports);
    assert_eq!(simulation.members[0].finding(), None, "it may still reply");
    simulation.pass(WINDOW);
    let stuck = Stuck {
        rank: Rank(1),
        kind: Some(Collective::Reduce),
        wait: wait(2),
    };
    let expected = Verdict {
        cause: Cause::Stopped { rank: Rank(2) },
        stuck: Some(stuck),
    };
    assert_eq!(simulation.members[0].finding(), Some(&expected));
    assert!(!simulation.members[0].failed(), "an opinion ends nothing");
    simulation.act(0, |detector, now, out| detector.give_up("it took too long", now, out));
    simulation.deliver(reports);
    assert_eq!(simulation.verdict(), expected);
}

#[test]
fn an_investigation_ends_once_all_have_replied() {
    let mut simulation = Simulation::new(3);
    simulation.members[0].monitor().begin(1, Collective::Reduce);
    simulation.act(0, |detector, now, out| detector.investigate(WINDOW, false, now, out));
    simulation.deliver(no_waits);
    let local_deadline = Some(simulation.now + WINDOW / 2);
    assert_eq!(
        simulation.members[0].due(),
        local_deadline,
        "only its own engine may report more"
    );
    simulation.deliver(|_| Some(vec![wait(2)]));
    let found = simulation.members[0].finding().map(|verdict| verdict.cause.clone());
    assert_eq!(
        found,
        Some(Cause::Absent {
            rank: Rank(2),
            operation: 1
        })
    );
    assert_eq!(simulation.members[0].due(), None);
    assert!(simulation.members.iter().all(|member| !member.failed()));
}

#[test]
fn an_engine_that_is_not_driven_is_idle() {
    let mut simulation = Simulation::new(2);
    simulation
        .members
        .iter()
        .for_each(|member| member.monitor().begin(1, Collective::Reduce));
    simulation.act(0, |detector, now, out| detector.investigate(WINDOW, false, now, out));
    let reports = |rank: usize| (rank == 0).then(|| vec![wait(1)]);
    simulation.deliver(reports);
    assert_eq!(simulation.members[0].finding(), None, "it has half the time to report");
    simulation.pass(WINDOW / 2);
    simulation.deliver(reports);
    let found = simulation.members[0].finding().map(|verdict| verdict.cause.clone());
    assert_eq!(found, Some(Cause::Idle { rank: Rank(1) }));
}

/// Rank 1 is cut off, and rank 0 notices. Links are tested only if the query requests it.
#[test]
fn links_are_tested_only_after_a_link_failure() {
    for links in [false, true] {
        let mut simulation = Simulation::new(4);
        for (rank, member) in simulation.members.iter().enumerate() {
            member.monitor().begin(1, Collective::Reduce);
            assert_eq!(member.monitor().requested_link_test(), None);
            let reached = (0..4).filter(|to| *to != rank as u32 && rank != 1 && *to != 1);
            // As an engine that tests at once reports, if a test was requested.
            if links {
                member.monitor().report_reachable(reached.map(Rank).collect());
            }
        }
        simulation.act(0, |detector, now, out| detector.investigate(WINDOW, links, now, out));
        simulation.deliver(|rank| {
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
        for member in &simulation.members {
            // Less than half of the report timeout.
            assert_eq!(
                member.monitor().requested_link_test(),
                links.then_some(LINK_TEST_TIMEOUT)
            );
        }
        let found = simulation.members[0].finding().map(|verdict| verdict.cause.clone());
        let (rank, peer) = (Rank(0), Rank(1));
        let expected = match links {
            true => Cause::CutOff { rank: peer },
            false => Cause::Broken { rank, peer },
        };
        assert_eq!(found, Some(expected));
    }
}

#[test]
fn giving_up_without_a_finding_reports_the_reason_on_one_line() {
    let mut simulation = Simulation::new(2);
    let reason = format!("the disk\nis full {}", "!".repeat(5000));
    simulation.act(1, |detector, now, out| detector.give_up(&reason, now, out));
    simulation.deliver(no_waits);
    let Cause::Aborted { rank, reason } = simulation.verdict().cause else {
        panic!("{:?}", simulation.verdict());
    };
    assert_eq!(rank, Rank(1));
    assert!(
        reason.starts_with("the disk is full !") && reason.len() == MAX_REASON,
        "{reason}"
    );
}

#[test]
fn a_silent_member_delays_the_verdict_but_does_not_prevent_it() {
    let mut simulation = Simulation::new(3);
    simulation.disconnected[1] = true;
    simulation.act(0, |detector, now, out| detector.give_up("enough", now, out));
    simulation.deliver(no_waits);
    assert!(simulation.members[0].failed() && simulation.members[0].verdict().is_none());
    assert_eq!(simulation.members[0].due(), Some(simulation.now + AGREEMENT_TIMEOUT));
    simulation.pass(AGREEMENT_TIMEOUT);
    assert_eq!(simulation.verdict().cause.culprit(), Rank(0));
    // It wakes, learns of the verdict, and changes nothing.
    simulation.disconnected[1] = false;
    let late = Verdict {
        cause: Cause::Died {
            rank: Rank(1),
            how: String::new(),
        },
        stuck: None,
    };
    simulation.act(0, |detector, now, out| {
        detector.receive(Rank(1), Message::Verdict(late), now, out)
    });
    assert_eq!(simulation.members[0].verdict().unwrap().cause.culprit(), Rank(0));
}

#[test]
fn invalid_messages_are_ignored() {
    let mut simulation = Simulation::new(2);
    let beyond = Verdict {
        cause: Cause::Left { rank: Rank(2) },
        stuck: None,
    };
    let reply = Message::Reply {
        number: 5,
        report: Report::default(),
    };
    for message in [Message::Verdict(beyond), reply] {
        simulation.act(0, |detector, now, out| detector.receive(Rank(1), message, now, out));
    }
    assert!(!simulation.members[0].failed() && simulation.members[0].due().is_none());
}
