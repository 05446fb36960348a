//! Groups over loopback, in threads and in processes: bootstrap, and failures of members.

mod ended;
mod hostile;
mod member;
mod scripted;

use std::net::TcpListener;
use std::thread;
use std::time::{Duration, Instant};

use doorbell_collectives::Rank;
use doorbell_collectives::bootstrap::{Exchange, ExchangeError, Group, Options, Rendezvous};
use doorbell_collectives::failure::{Awaited, Cause, ShrinkError, Wait};
use doorbell_collectives::plan::Collective;
use member::{Member, processes};
use nix::sys::signal::Signal;

const TIMEOUT: Duration = Duration::from_secs(60);

fn with_all<T: Send>(groups: Vec<Group>, each: impl Fn(Group) -> T + Sync) -> Vec<T> {
    thread::scope(|scope| {
        let each = &each;
        let threads: Vec<_> = groups
            .into_iter()
            .map(|group| scope.spawn(move || each(group)))
            .collect();
        threads.into_iter().map(|thread| thread.join().unwrap()).collect()
    })
}

fn eventually<T>(what: &str, mut is_so: impl FnMut() -> Option<T>) -> T {
    let since = Instant::now();
    loop {
        if let Some(it) = is_so() {
            return it;
        }
        assert!(since.elapsed() < TIMEOUT, "{what}");
        thread::sleep(Duration::from_millis(2));
    }
}

fn command_all(members: &mut [Member], ranks: &[usize], command: impl Fn(usize) -> String) -> Vec<String> {
    for rank in ranks {
        members[*rank].send_command(&command(*rank));
    }
    ranks.iter().map(|rank| members[*rank].read_reply()).collect()
}

#[test]
fn every_rank_receives_every_message() {
    for ranks in [1, 2, 3, 8] {
        with_all(Group::local(ranks).unwrap(), |mut group| {
            let me = group.rank().0 as u8;
            for round in 0..20_u8 {
                let message = |from: u8, to: u8| [from, to, round].repeat(usize::from(to) * 1000 + 1);
                let outgoing = (0..ranks as u8).map(|to| message(me, to)).collect();
                let got = group.control_mut().all_to_all(outgoing).unwrap();
                for (from, bytes) in got.iter().enumerate() {
                    assert_eq!(*bytes, message(from as u8, me));
                }
            }
            group.control_mut().barrier().unwrap();
        });
    }
}

#[test]
fn long_messages_go_both_ways_at_once() {
    with_all(Group::local(2).unwrap(), |mut group| {
        let mine = vec![group.rank().0 as u8 + 1; 16 << 20];
        let got = group.control_mut().all_gather(&mine).unwrap();
        assert!(
            got.iter()
                .enumerate()
                .all(|(rank, bytes)| bytes.len() == mine.len() && bytes.iter().all(|byte| *byte == rank as u8 + 1))
        );
        let long = vec![0; (16 << 20) + 1];
        assert!(matches!(
            group.control_mut().all_gather(&long),
            Err(ExchangeError::Misuse { .. })
        ));
        assert!(matches!(
            group.control_mut().all_to_all(vec![]),
            Err(ExchangeError::Misuse { .. })
        ));
        // A rejected exchange has no effect.
        group.control_mut().barrier().unwrap();
    });
}

#[test]
fn split_groups_are_independent() {
    with_all(Group::local(6).unwrap(), |mut group| {
        let me = group.rank().0;
        let mut half = group.split(Some(me % 2), -(me as i32)).unwrap().unwrap();
        assert_eq!((half.ranks(), half.rank().0), (3, 2 - me / 2));
        let none = group.split((me == 4).then_some(0), 0).unwrap();
        assert_eq!(none.is_some(), me == 4);
        let mut copy = half.duplicate().unwrap();
        // All three groups at once, the parent's last.
        let gathered = |group: &mut Group| group.control_mut().all_gather(&[me as u8]).unwrap().concat();
        let expected: Vec<u8> = [4, 2, 0].map(|rank| rank + me as u8 % 2).to_vec();
        assert_eq!(gathered(&mut copy), expected);
        assert_eq!(gathered(&mut half), expected);
        drop(half);
        assert_eq!(gathered(&mut copy), expected);
        assert_eq!(gathered(&mut group), [0, 1, 2, 3, 4, 5]);
    });
}

#[test]
fn a_leaving_member_is_not_dead() {
    let mut groups = Group::local(3).unwrap();
    drop(groups.remove(1));
    let failed = |group: &mut Group| group.control_mut().barrier().unwrap_err();
    for group in &mut groups {
        let said = failed(group);
        assert!(matches!(said, ExchangeError::Left { rank: Rank(1), .. }), "{said}");
        assert!(!group.control().monitor().failed());
    }
}

#[test]
fn an_exchange_names_missing_members() {
    let mut groups = Group::local(3).unwrap();
    groups[0].control_mut().set_timeout(Duration::from_millis(50));
    let said = groups[0].control_mut().barrier().unwrap_err().to_string();
    assert!(
        said.starts_with("ranks 1 and 2 did not take part in the exchange"),
        "{said}"
    );
    // The others come later, and receive its message; it has moved on to the next exchange.
    groups[0].control_mut().set_timeout(TIMEOUT);
    with_all(groups, |mut group| {
        if group.rank() != Rank(0) {
            group.control_mut().set_timeout(Duration::from_millis(50));
            let _ = group.control_mut().all_gather(b"first");
            group.control_mut().set_timeout(TIMEOUT);
        }
        let all = group.control_mut().all_gather(b"second").unwrap();
        assert!(all.iter().all(|said| said == b"second"), "{all:?}");
    });
}

#[test]
fn giving_up_fails_the_group_and_all_may_shrink() {
    let groups = Group::local(4).unwrap();
    groups[2].control().give_up("the disk is full");
    let smaller = with_all(groups, |group| {
        let failure = eventually("a verdict", || group.control().failure());
        assert!(
            matches!(failure.verdict.cause, Cause::Aborted { rank: Rank(2), .. }),
            "{failure}"
        );
        assert!(failure.to_string().ends_with("aborted: the disk is full"), "{failure}");
        let mut smaller = group.shrink(TIMEOUT).unwrap();
        assert_eq!(
            (smaller.rank(), smaller.ranks()),
            (group.rank(), 4),
            "no member is dead"
        );
        drop(group);
        smaller.control_mut().barrier().unwrap();
        smaller
    });
    with_all(smaller, |mut group| group.control_mut().barrier().unwrap());
}

#[test]
fn a_queue_pair_that_fails_ends_the_group_and_names_both_ends() {
    let wait = |peer: u32, awaited| Wait {
        operation: 1,
        connection: 2,
        slice: 3,
        step: 4,
        peer: Rank(peer),
        qpn: 0x11,
        awaited,
    };
    with_all(Group::local(3).unwrap(), |group| {
        let control = group.control();
        let monitor = control.monitor();
        monitor.begin(1, Collective::Broadcast);
        let failure = if group.rank() == Rank(0) {
            control.end(vec![wait(1, Awaited::QueuePairFailed)], TIMEOUT, "a queue pair failed")
        } else {
            eventually("a verdict", || {
                if monitor.report_requested() {
                    monitor.report(vec![wait(0, Awaited::Message)]);
                }
                control.failure()
            })
        };
        let said = failure.to_string();
        assert!(said.starts_with("the link from rank 0 (process "), "{said}");
        assert!(
            said.contains(
                "has lost its queue pair to rank 1 in broadcast 1, slice 3, step 4, connection 2, queue pair 17"
            ),
            "{said}"
        );
        let shrunk = group.shrink(TIMEOUT);
        assert_eq!(
            shrunk.is_err(),
            group.rank() == Rank(1),
            "the higher of the two is left behind"
        );
    });
}

#[test]
fn ranks_without_an_id_meet_beside_another_server_on_their_port() {
    let stranger = TcpListener::bind("127.0.0.1:0").unwrap();
    let taken = stranger.local_addr().unwrap().port();
    let member = |rank: u32| {
        let variables = [
            ("RANK", rank),
            ("WORLD_SIZE", 3),
            ("LOCAL_RANK", rank),
            ("MASTER_PORT", u32::from(taken - 1)),
        ];
        let mut variables = variables.map(|(name, value)| (name, value.to_string())).to_vec();
        variables.push(("MASTER_ADDR", "127.0.0.1".into()));
        variables.push(("DOORBELL_SECRET", "sixteen characters or more".into()));
        Member::start(&variables)
    };
    let mut members: Vec<_> = (0..3).map(member).collect();
    for (rank, member) in members.iter_mut().enumerate() {
        assert_eq!(member.read_reply(), format!("rank {rank} of 3"));
    }
    assert_eq!(
        command_all(&mut members, &[0, 1, 2], |_| "exchange".into()),
        ["[0, 1, 2]"; 3]
    );
    members.into_iter().for_each(Member::end);
}

#[test]
fn a_group_shrinks_without_those_who_left_or_do_not_come() {
    let mut groups = Group::local(5).unwrap();
    let absent = groups.remove(3);
    drop(groups.remove(0));
    with_all(groups, |group| {
        let mut smaller = group.shrink(Duration::from_secs(8)).unwrap();
        drop(group);
        assert_eq!(smaller.ranks(), 3);
        smaller.control_mut().barrier().unwrap();
    });
    let said = absent.shrink(Duration::from_secs(8)).unwrap_err();
    assert_eq!(said, ShrinkError::Excluded { rank: Rank(3) });
}

#[test]
fn missing_ranks_are_named_to_the_others() {
    let rendezvous = Rendezvous::open("127.0.0.1".parse().unwrap(), 4).unwrap();
    let serving = rendezvous.spawn(Duration::from_millis(500)).unwrap();
    let options = Options::default();
    thread::scope(|scope| {
        for rank in [0, 2] {
            let id = serving.id().clone();
            scope.spawn(move || {
                let said = Group::join(&id, Rank(rank), 4, &options).unwrap_err().to_string();
                assert!(said.contains("ranks 1 and 3 of 4 did not come within 500ms"), "{said}");
            });
        }
    });
    let said = serving.wait().unwrap_err().to_string();
    assert_eq!(said, "ranks 1 and 3 of 4 did not come within 500ms");
}

/// Of two ranks that disagree the first one is right, whichever it is.
#[test]
fn the_first_rank_says_how_many_there_are() {
    let serving = Rendezvous::open_for_any("127.0.0.1".parse().unwrap()).unwrap();
    let serving = serving.spawn(TIMEOUT).unwrap();
    let id = serving.id().clone();
    serving.detach();
    let options = Options::default();
    let (sender, joined) = std::sync::mpsc::channel();
    let join = |rank, ranks| {
        let (id, sender) = (id.clone(), sender.clone());
        thread::spawn(move || {
            sender
                .send((ranks, Group::join(&id, Rank(rank), ranks, &options)))
                .unwrap()
        })
    };
    join(0, 2);
    join(1, 3);
    let (refused, error) = joined.recv().unwrap();
    let said = error.unwrap_err().to_string();
    let others: &[u32] = if refused == 3 { &[1] } else { &[0, 2] };
    let ranks = 5 - refused;
    assert!(
        said.contains(&format!(
            "this group has {ranks} ranks, and it was started for {refused}"
        )),
        "{said}"
    );
    for rank in others {
        join(*rank, ranks);
    }
    for _ in 0..ranks {
        let (_, group) = joined.recv().unwrap();
        assert_eq!(group.unwrap().ranks(), ranks);
    }
}

#[test]
fn a_killed_process_is_named_by_all_and_the_others_continue() {
    let mut members = processes(4);
    let alive = [0, 1, 3];
    for rank in alive {
        members[rank].send_command(&format!("operate {} 80000", (rank + 3) % 4));
    }
    let pid = members[2].pid();
    members[2].signal(Signal::SIGKILL);
    for rank in alive {
        let said = members[rank].read_reply();
        assert!(
            said.starts_with(&format!("rank 2 (process {pid} on ")) && said.contains(") died: "),
            "{said}"
        );
    }
    for said in command_all(&mut members, &alive, |_| "exchange".into()) {
        assert!(said.starts_with("rank 2 (process "), "{said}");
    }
    let said = command_all(&mut members, &alive, |_| "shrink 30000".into());
    assert_eq!(said, ["rank 0 of 3", "rank 1 of 3", "rank 2 of 3"]);
    members[0].signal(Signal::SIGKILL);
    for rank in [1, 3] {
        let said = members[rank].command("failure");
        assert!(
            said.contains(&format!("rank 0 (process {}", members[0].pid())),
            "{said}"
        );
    }
    assert_eq!(
        command_all(&mut members, &[1, 3], |_| "shrink 30000".into()),
        ["rank 0 of 2", "rank 1 of 2"]
    );
    assert_eq!(
        command_all(&mut members, &[1, 3], |_| "exchange".into()),
        ["[0, 1]", "[0, 1]"]
    );
    for rank in [3, 1] {
        members.remove(rank).end();
    }
}

#[test]
fn a_stopped_process_is_named_within_the_deadline_and_excluded() {
    let mut members = processes(4);
    let running = [0, 2, 3];
    members[1].signal(Signal::SIGSTOP);
    let said = command_all(&mut members, &running, |rank| {
        format!("operate {} 8000", (rank + 3) % 4)
    });
    for said in &said {
        assert!(
            said.starts_with(&format!("rank 1 (process {} on ", members[1].pid())) && said.contains("does not answer"),
            "{said}"
        );
        assert!(
            said.contains(
                "waits for a message from rank 1 in allreduce 1, slice 0, step 4, connection 0, queue pair 17"
            ),
            "{said}"
        );
        assert_eq!(*said, said[..], "all say the same");
    }
    assert!(said.iter().all(|other| *other == said[0]), "{said:?}");
    assert_eq!(
        command_all(&mut members, &running, |_| "shrink 30000".into()),
        ["rank 0 of 3", "rank 1 of 3", "rank 2 of 3"]
    );
    // It wakes, and learns that it was excluded.
    members[1].signal(Signal::SIGCONT);
    let said = members[1].command("failure");
    assert!(said.contains("does not answer"), "{said}");
    let said = members[1].command("shrink 30000");
    assert!(said.starts_with("the others go on without rank 1"), "{said}");
    assert_eq!(
        command_all(&mut members, &running, |_| "exchange".into()),
        ["[0, 1, 2]"; 3]
    );
}

#[test]
fn a_rank_that_does_not_begin_differs_from_a_lost_message() {
    let mut members = processes(3);
    let said = command_all(&mut members, &[0, 1], |rank| format!("operate {} 8000", (rank + 2) % 3));
    for said in said {
        assert!(
            said.starts_with("rank 2 (process ") && said.contains("has not begun operation 1; rank 0 "),
            "{said}"
        );
    }
    let mut members = processes(3);
    let said = command_all(&mut members, &[0, 1, 2], |rank| {
        format!("operate {} 8000", (rank + 2) % 3)
    });
    for said in said {
        assert!(
            said.starts_with("a message from rank 2 (process ") && said.contains("does not arrive at rank 0"),
            "{said}"
        );
    }
}
