//! Ranks, and rendezvous, that end before the group is complete, where no rank has a deadline.

use std::net::TcpListener;
use std::thread::{self, JoinHandle};
use std::time::Duration;

use doorbell_collectives::Rank;
use doorbell_collectives::bootstrap::{Group, Options, Rendezvous, RendezvousServer, UniqueId};

use super::scripted::{self, MEMBER, ScriptedRank, ScriptedRendezvous};

const NEVER: Options = Options {
    bind: None,
    timeout: Duration::MAX,
    rendezvous_is_open: true,
};

fn serving() -> RendezvousServer {
    let rendezvous = Rendezvous::open_for_any("127.0.0.1".parse().unwrap()).unwrap();
    rendezvous.spawn(Duration::MAX).unwrap()
}

/// A rank that joins: the error that it gets.
fn joining(id: &UniqueId, rank: u32, ranks: u32) -> JoinHandle<String> {
    let id = id.clone();
    thread::spawn(move || Group::join(&id, Rank(rank), ranks, &NEVER).unwrap_err().to_string())
}

fn error(rank: JoinHandle<String>) -> String {
    super::eventually("a rank that has joined no group", || rank.is_finished().then_some(()));
    rank.join().unwrap()
}

fn said(of: u32) -> String {
    format!("rank {of} ({MEMBER}) ended during the rendezvous")
}

#[test]
fn a_rank_that_ends_while_another_is_awaited_is_named_to_all() {
    let serving = serving();
    let id = serving.id();
    let before = [joining(id, 0, 4), joining(id, 2, 4)];
    drop(ScriptedRank::register(id, 1, 4).confirm());
    for rank in before {
        assert_eq!(error(rank), said(1));
    }
    // One that takes its place, and one that has not registered yet.
    for rank in [1, 3] {
        assert_eq!(error(joining(id, rank, 4)), said(1));
    }
    assert_eq!(serving.wait().unwrap_err().to_string(), said(1));
}

#[test]
fn a_rank_that_ends_with_the_table_is_named_to_all() {
    for ends in 0..3 {
        let serving = serving();
        let id = serving.id();
        let others: Vec<_> = (0..3)
            .filter(|rank| *rank != ends)
            .map(|rank| joining(id, rank, 3))
            .collect();
        let mut rank = ScriptedRank::register(id, ends, 3).confirm();
        assert_eq!(rank.receive(), scripted::TABLE);
        drop(rank);
        for rank in others {
            assert_eq!(error(rank), said(ends));
        }
        assert_eq!(serving.wait().unwrap_err().to_string(), said(ends));
    }
}

/// Its connection may be lost before it knows of its acceptance.
#[test]
fn a_rank_that_has_not_confirmed_may_register_again() {
    let serving = serving();
    let id = serving.id();
    let other = joining(id, 0, 2);
    drop(ScriptedRank::register(id, 1, 2));
    let mut again = ScriptedRank::register(id, 1, 2).confirm();
    assert_eq!(again.receive(), scripted::TABLE);
    drop(again);
    assert_eq!(error(other), said(1));
}

#[test]
fn the_end_of_the_rendezvous_ends_the_wait_for_the_others() {
    let silent = TcpListener::bind("127.0.0.1:0").unwrap();
    for has_table in [false, true] {
        let mut rendezvous = ScriptedRendezvous::open();
        let id = rendezvous.id();
        let rank = joining(&id, 1, 2);
        let mut connection = rendezvous.accept();
        if has_table {
            scripted::send_table(&mut connection, 2, silent.local_addr().unwrap());
        }
        drop((rendezvous, connection));
        let said = error(rank);
        let lost = format!("rank 1 lost the rendezvous at {}:{}", id.host(), id.port());
        assert!(said.starts_with(&lost), "{said}");
        let said = error(joining(&id, 0, 2));
        assert!(said.contains("has ended, or its group is complete"), "{said}");
    }
}
