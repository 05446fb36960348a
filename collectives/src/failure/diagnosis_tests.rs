//! Members that are stalled for a known reason, which the diagnosis has to find.

use super::*;
use crate::failure::monitor::{MESSAGES, Wait};

fn wait(peer: u32, step: u32, awaited: Awaited) -> Wait {
    Wait {
        operation: 7,
        connection: 0,
        slice: 0,
        step,
        peer: Rank(peer),
        qpn: 0x20 + peer,
        awaited,
    }
}

fn waits(waits: Vec<Wait>) -> MemberStatus {
    MemberStatus::Reported(Report {
        begun: 7,
        finished: 6,
        pending: vec![Some(Collective::AllReduce)],
        waits: Some(waits),
        ..Report::default()
    })
}

fn idles(finished: u64) -> MemberStatus {
    MemberStatus::Reported(Report {
        begun: finished,
        finished,
        pending: Vec::new(),
        waits: None,
        ..Report::default()
    })
}

fn cause(members: &[MemberStatus]) -> Option<Cause> {
    diagnose(members).map(|verdict| verdict.cause)
}

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Fault {
    Dead,
    Stopped,
    Left,
    Absent,
    Idle,
    Lost,
    CutOff,
}

/// A ring until nothing moves; `culprit` has its fault at step `at`.
fn ring(ranks: u32, culprit: u32, at: u32, fault: Fault) -> Vec<MemberStatus> {
    let steps = 2 * (ranks - 1);
    let mut done = vec![0; ranks as usize];
    let faulty = |rank: u32, done: u32| rank == culprit && done >= at;
    let sent = |rank: u32, done: &[u32]| {
        let reached = done[rank as usize];
        // A message leaves when its step begins.
        let leaves = (reached + 1).min(steps);
        if rank == culprit { leaves.min(at) } else { leaves }
    };
    loop {
        let moves = |rank: &u32| {
            let (before, reached) = ((rank + ranks - 1) % ranks, done[*rank as usize]);
            // A rank whose messages are lost goes on itself.
            let stands = faulty(*rank, reached) && fault != Fault::Lost;
            reached < steps && !stands && sent(before, &done) > reached
        };
        let Some(rank) = (0..ranks).find(moves) else { break };
        done[rank as usize] += 1;
    }
    let member = |rank: u32| {
        let (before, after, reached) = ((rank + ranks - 1) % ranks, (rank + 1) % ranks, done[rank as usize]);
        let message = wait(before, reached, Awaited::Message);
        if faulty(rank, reached) {
            match fault {
                Fault::Dead => return MemberStatus::Dead("it closed".into()),
                Fault::Stopped => return MemberStatus::Unresponsive,
                Fault::Left => return MemberStatus::Left,
                Fault::Absent => return idles(6),
                Fault::Idle => {
                    let MemberStatus::Reported(report) = waits(Vec::new()) else {
                        unreachable!()
                    };
                    return MemberStatus::Reported(Report { waits: None, ..report });
                }
                Fault::CutOff => {
                    return waits(vec![
                        wait(before, reached, Awaited::QueuePairFailed),
                        wait(after, reached, Awaited::QueuePairFailed),
                    ]);
                }
                Fault::Lost => {}
            }
        }
        if reached == steps {
            return idles(7);
        }
        let broken = fault == Fault::CutOff && faulty(culprit, done[culprit as usize]) && after == culprit;
        waits(if broken {
            vec![message, wait(after, reached, Awaited::QueuePairFailed)]
        } else {
            vec![message]
        })
    };
    (0..ranks).map(member).collect()
}

fn exchanges(peer: u32) -> MemberStatus {
    let message = Wait {
        operation: MESSAGES | 3,
        ..wait(peer, 0, Awaited::Message)
    };
    let MemberStatus::Reported(report) = idles(6) else {
        unreachable!()
    };
    MemberStatus::Reported(Report {
        waits: Some(vec![message]),
        ..report
    })
}

fn rests(finished: u64) -> MemberStatus {
    let MemberStatus::Reported(report) = idles(finished) else {
        unreachable!()
    };
    let waits = Some(Vec::new());
    MemberStatus::Reported(Report { waits, ..report })
}

/// Messages between two ranks are independent of the number of operations done.
#[test]
fn a_missing_end_of_a_message_is_found() {
    let absent = |rank, operation| {
        let rank = Rank(rank);
        Some(Cause::Absent { rank, operation })
    };
    let message = MESSAGES | 3;
    assert_eq!(cause(&[exchanges(1), rests(6)]), absent(1, message));
    assert_eq!(cause(&[exchanges(1), rests(9)]), absent(1, message));
    assert_eq!(cause(&[exchanges(1), exchanges(2), rests(6)]), absent(2, message));
    // One that is kept from an operation by a message is not to blame for it.
    let kept = [exchanges(2), waits(vec![wait(0, 4, Awaited::Message)]), rests(6)];
    assert_eq!(cause(&kept), absent(2, message));
    // Rank 1 does not begin its message, as rank 2 does not begin the operation.
    let kept = [exchanges(1), waits(vec![wait(2, 4, Awaited::Message)]), rests(6)];
    assert_eq!(cause(&kept), absent(2, 7));
    // Rank 1 has begun its end but its engine is not driven, or it would report its wait.
    assert_eq!(cause(&[exchanges(1), idles(6)]), Some(Cause::Idle { rank: Rank(1) }));
    assert_eq!(
        cause(&[exchanges(1), MemberStatus::Unresponsive]),
        Some(Cause::Stopped { rank: Rank(1) })
    );
    // Two that wait for each other's messages have lost one.
    let (from, to) = (Rank(1), Rank(0));
    assert_eq!(cause(&[exchanges(1), exchanges(0)]), Some(Cause::Lost { from, to }));
}

#[test]
fn every_fault_of_a_ring_is_found_at_every_rank_and_step() {
    for ranks in 2..9 {
        for culprit in 0..ranks {
            let rank = Rank(culprit);
            for at in 0..2 * (ranks - 1) {
                for fault in [
                    Fault::Dead,
                    Fault::Stopped,
                    Fault::Left,
                    Fault::Absent,
                    Fault::Idle,
                    Fault::Lost,
                    Fault::CutOff,
                ] {
                    if fault == Fault::Absent && at > 0 {
                        continue;
                    }
                    let found = cause(&ring(ranks, culprit, at, fault));
                    let expected = match fault {
                        Fault::Dead => Cause::Died {
                            rank,
                            how: "it closed".into(),
                        },
                        Fault::Stopped => Cause::Stopped { rank },
                        Fault::Left => Cause::Left { rank },
                        Fault::Absent => Cause::Absent { rank, operation: 7 },
                        Fault::Idle => Cause::Idle { rank },
                        Fault::Lost => Cause::Lost {
                            from: rank,
                            to: Rank((culprit + 1) % ranks),
                        },
                        // Between two ranks it is undecidable which one it is.
                        Fault::CutOff if ranks == 2 => {
                            assert!(matches!(found, Some(Cause::Broken { .. })), "{found:?}");
                            continue;
                        }
                        Fault::CutOff => Cause::CutOff { rank },
                    };
                    assert_eq!(
                        found,
                        Some(expected),
                        "{fault:?} of rank {culprit} of {ranks} at step {at}"
                    );
                }
            }
        }
    }
}

#[test]
fn a_member_at_an_earlier_operation_is_followed_to_its_peer() {
    // 0 waits for 1 in operation 9; 1 is still in 7 and waits for 2, which has not begun it.
    let ninth = Wait {
        operation: 9,
        ..wait(1, 0, Awaited::Message)
    };
    let zero = MemberStatus::Reported(Report {
        begun: 9,
        finished: 8,
        pending: vec![Some(Collective::Broadcast)],
        waits: Some(vec![ninth]),
        ..Report::default()
    });
    let members = [zero, waits(vec![wait(2, 3, Awaited::Message)]), idles(6)];
    let expected = Cause::Absent {
        rank: Rank(2),
        operation: 7,
    };
    assert_eq!(cause(&members), Some(expected));
}

#[test]
fn a_mismatch_is_reported_alike_from_both_sides() {
    let gather = |waits| {
        MemberStatus::Reported(Report {
            begun: 7,
            finished: 6,
            pending: vec![Some(Collective::AllGather)],
            waits: Some(waits),
            ..Report::default()
        })
    };
    let expected = Cause::Mismatch {
        rank: Rank(0),
        kind: Collective::AllReduce,
        other: Rank(1),
        other_kind: Collective::AllGather,
    };
    let both = [
        waits(vec![wait(1, 0, Awaited::Message)]),
        gather(vec![wait(0, 0, Awaited::Message)]),
    ];
    assert_eq!(cause(&both), Some(expected.clone()));
    let one = [waits(vec![wait(1, 0, Awaited::Message)]), gather(Vec::new())];
    assert_eq!(cause(&one), Some(expected));
}

#[test]
fn finished_members_are_not_to_blame() {
    assert_eq!(cause(&[idles(7), idles(7), idles(6)]), None);
    assert_eq!(
        cause(&[idles(7), MemberStatus::Unresponsive, MemberStatus::Left]),
        None,
        "no member needs them"
    );
    let busy = [waits(vec![wait(1, 0, Awaited::Credit)]), waits(Vec::new())];
    assert_eq!(cause(&busy), Some(Cause::Slow { rank: Rank(1) }));
}

#[test]
fn one_failed_queue_pair_names_both_ends() {
    let members = [
        waits(vec![wait(1, 2, Awaited::QueuePairFailed)]),
        waits(vec![wait(0, 2, Awaited::Message)]),
        idles(7),
    ];
    let expected = Cause::Broken {
        rank: Rank(0),
        peer: Rank(1),
    };
    assert_eq!(cause(&members), Some(expected));
    // The process at its other end being dead says more.
    let members = [
        waits(vec![wait(1, 2, Awaited::QueuePairFailed)]),
        MemberStatus::Dead(String::new()),
        idles(7),
    ];
    assert!(matches!(cause(&members), Some(Cause::Died { rank: Rank(1), .. })));
}

fn reaching(member: MemberStatus, peers: &[u32]) -> MemberStatus {
    let MemberStatus::Reported(report) = member else {
        unreachable!()
    };
    let reachable = Some(peers.iter().copied().map(Rank).collect());
    MemberStatus::Reported(Report { reachable, ..report })
}

type Reaches<'a> = &'a dyn Fn(u32, u32) -> bool;

/// A single link shows that something is cut: whichever end noticed it, the reachability reported
/// by the others determines whether it is one of the ends, and which, or the link alone.
#[test]
fn of_a_single_failed_queue_pair_the_unreachable_end_is_cut_off() {
    const RANKS: u32 = 4;
    for rank in 0..RANKS {
        for peer in (0..RANKS).filter(|peer| *peer != rank) {
            let cut_off = |rank| Cause::CutOff { rank: Rank(rank) };
            let broken = Cause::Broken {
                rank: Rank(rank),
                peer: Rank(peer),
            };
            // Reachability between ranks, whether the engine at which the link failed could try its
            // own, and what is to come of it.
            let cases: [(Reaches<'_>, bool, Cause); 7] = [
                (&|from, to| ![from, to].contains(&peer), true, cut_off(peer)),
                (&|from, to| ![from, to].contains(&rank), true, cut_off(rank)),
                (
                    &|from, to| [from, to] != [rank, peer] && [from, to] != [peer, rank],
                    true,
                    broken.clone(),
                ),
                // A packet on the way to it was lost, and not the one on the way back.
                (
                    &|from, to| from == peer && to != rank || ![from, to].contains(&peer),
                    true,
                    broken.clone(),
                ),
                // No member has a wait to report.
                (&|_, _| false, true, broken.clone()),
                // It has no connections any more, so not reaching it proves nothing.
                (&|from, to| ![from, to].contains(&rank), false, broken.clone()),
                (
                    &|from, to| ![from, to].contains(&peer) && ![from, to].contains(&rank),
                    false,
                    broken,
                ),
            ];
            for (case, (reachable, tries, expected)) in cases.into_iter().enumerate() {
                let member = |me: u32| {
                    let peers: Vec<_> = (0..RANKS).filter(|to| *to != me && reachable(me, *to)).collect();
                    match me {
                        _ if me == rank && !tries => waits(vec![wait(peer, 2, Awaited::QueuePairFailed)]),
                        _ if me == rank => reaching(waits(vec![wait(peer, 2, Awaited::QueuePairFailed)]), &peers),
                        _ => reaching(waits(vec![wait(rank, 2, Awaited::Message)]), &peers),
                    }
                };
                let members: Vec<_> = (0..RANKS).map(member).collect();
                assert_eq!(cause(&members), Some(expected), "case {case}: {rank} has lost {peer}");
            }
            // The other members had no time for the test.
            let member = |me: u32| match me {
                _ if me == rank => {
                    let others: Vec<_> = (0..RANKS).filter(|other| ![rank, peer].contains(other)).collect();
                    reaching(waits(vec![wait(peer, 2, Awaited::QueuePairFailed)]), &others)
                }
                _ => waits(vec![wait(rank, 2, Awaited::Message)]),
            };
            let members: Vec<_> = (0..RANKS).map(member).collect();
            let broken = Cause::Broken {
                rank: Rank(rank),
                peer: Rank(peer),
            };
            assert_eq!(cause(&members), Some(broken), "{rank} alone has tested its links");
        }
    }
}

/// Every state of three members: the blamed member is the culprit.
#[test]
fn the_verdict_names_the_culprit_in_all_states_of_three_members() {
    let states = |me: u32| {
        let others: Vec<u32> = (0..3).filter(|other| *other != me).collect();
        let mut all = vec![
            MemberStatus::Dead(String::new()),
            MemberStatus::Left,
            MemberStatus::Unresponsive,
            idles(6),
            idles(7),
            waits(Vec::new()),
        ];
        for awaited in [
            Awaited::Message,
            Awaited::Credit,
            Awaited::Acknowledgement,
            Awaited::QueuePairFailed,
        ] {
            all.extend(others.iter().map(|other| waits(vec![wait(*other, me, awaited)])));
        }
        all.push(waits(
            others.iter().map(|other| wait(*other, 1, Awaited::Message)).collect(),
        ));
        all
    };
    let waiting = |member: &MemberStatus| matches!(member, MemberStatus::Reported(Report { waits: Some(waits), .. }) if !waits.is_empty());
    let mut seen = 0;
    for a in states(0) {
        for b in states(1) {
            for c in states(2) {
                let members = [a.clone(), b.clone(), c.clone()];
                let verdict = diagnose(&members);
                let someone_waits = members.iter().any(waiting);
                let someone_is_dead = members.iter().any(|member| matches!(member, MemberStatus::Dead(_)));
                assert_eq!(verdict.is_some(), someone_waits || someone_is_dead, "{members:?}");
                let Some(verdict) = verdict else { continue };
                seen += 1;
                let state = &members[verdict.cause.culprit().index()];
                let right = match &verdict.cause {
                    Cause::Died { .. } => matches!(state, MemberStatus::Dead(_)),
                    Cause::Left { .. } => *state == MemberStatus::Left,
                    Cause::Stopped { .. } => *state == MemberStatus::Unresponsive,
                    Cause::Absent { .. } => *state == idles(6),
                    Cause::Slow { .. } => *state == waits(Vec::new()),
                    Cause::CutOff { .. } | Cause::Broken { .. } => matches!(state, MemberStatus::Reported(_)),
                    Cause::Lost { .. } => {
                        *state == idles(7)
                            || members.iter().all(|member| {
                                waiting(member)
                                    || matches!(
                                        member,
                                        MemberStatus::Left | MemberStatus::Unresponsive | MemberStatus::Reported(_)
                                    )
                            })
                    }
                    Cause::Aborted { .. } | Cause::Mismatch { .. } | Cause::Idle { .. } => false,
                };
                assert!(right, "{:?} of {members:?}", verdict.cause);
                assert!(
                    !someone_is_dead || matches!(verdict.cause, Cause::Died { .. }),
                    "{members:?}"
                );
                if let Some(stuck) = verdict.stuck {
                    assert!(waiting(&members[stuck.rank.index()]), "{members:?}");
                }
            }
        }
    }
    assert!(seen > 2000, "{seen}");
}

/// Also waits of a member that lost its queue pair between two queries.
#[test]
fn all_members_choose_the_same_of_two_verdicts() {
    let verdict = |awaited, kind| Verdict {
        cause: Cause::Stopped { rank: Rank(0) },
        stuck: Some(Stuck {
            rank: Rank(1),
            kind,
            wait: wait(0, 2, awaited),
        }),
    };
    let awaited = [
        Awaited::Message,
        Awaited::Credit,
        Awaited::Acknowledgement,
        Awaited::QueuePairFailed,
    ];
    let kinds = [None, Some(Collective::AllReduce), Some(Collective::Barrier)];
    let all: Vec<_> = awaited
        .iter()
        .flat_map(|awaited| kinds.map(|kind| verdict(*awaited, kind)))
        .collect();
    for one in &all {
        for other in &all {
            assert_eq!(one.clone().stronger(other.clone()), other.clone().stronger(one.clone()));
        }
    }
}
