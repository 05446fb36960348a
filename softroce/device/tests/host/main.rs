//! Processes that share an address: many join at once, are killed, stopped and forked, and belong
//! to other users. The members are processes of this test program (`member`).

mod member;

use std::net::{IpAddr, Ipv4Addr, SocketAddr, UdpSocket};
use std::process;
use std::sync::atomic::{AtomicU8, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use doorbell_softroce::Device;
use member::{Member, Start};
use nix::sys::signal::{Signal, kill};
use nix::unistd::{Pid, geteuid};

/// Longer than any test takes, even on a busy machine.
const PATIENCE: Duration = Duration::from_secs(60);

/// An address that no other test has.
fn own_address() -> IpAddr {
    static NEXT: AtomicU8 = AtomicU8::new(1);
    let pid = process::id();
    let last = NEXT.fetch_add(1, Ordering::Relaxed);
    IpAddr::V4(Ipv4Addr::new(127, 1 + (pid >> 8) as u8 % 250, pid as u8, last))
}

/// Waits until the condition holds.
fn eventually(what: &str, mut is_so: impl FnMut() -> bool) {
    let since = Instant::now();
    while !is_so() {
        assert!(since.elapsed() < PATIENCE, "{what}");
        thread::sleep(Duration::from_millis(2));
    }
}

/// The abstract names of the group on an address.
fn names(address: IpAddr) -> Vec<String> {
    let ours = format!("/{}/", SocketAddr::new(address, 4791));
    let table = std::fs::read_to_string("/proc/net/unix").unwrap();
    let names = table.lines().filter_map(|line| line.split_whitespace().nth(7));
    names.filter(|name| name.contains(&ours)).map(str::to_owned).collect()
}

/// Waits until nothing is left of a group.
fn vanishes(address: IpAddr) {
    eventually("a name is left", || names(address).is_empty());
    eventually("the port is taken", || UdpSocket::bind((address, 4791)).is_ok());
}

fn signal(pid: u32, signal: Signal) {
    kill(Pid::from_raw(pid as i32), signal).unwrap();
}

/// Stops a process. One thread handles the signal and then stops the others: until then they run.
fn stop(pid: u32) {
    signal(pid, Signal::SIGSTOP);
    let is_stopped = |thread: std::io::Result<std::fs::DirEntry>| {
        let stat = std::fs::read_to_string(thread.unwrap().path().join("stat")).unwrap();
        stat.rsplit_once(") ").is_some_and(|(_, state)| state.starts_with('T'))
    };
    eventually("a process does not stop", || {
        let mut threads = std::fs::read_dir(format!("/proc/{pid}/task")).unwrap();
        threads.all(is_stopped)
    });
}

/// All have different slots and blocks, one has the port, and each sees all.
fn is_one_group(members: &mut [Member]) {
    let mut slots: Vec<_> = members.iter().map(|member| member.slot).collect();
    slots.sort_unstable();
    slots.dedup();
    assert_eq!(slots.len(), members.len(), "slots");
    let mut blocks: Vec<_> = members.iter_mut().map(|member| member.ask("block")[0]).collect();
    blocks.sort_unstable();
    blocks.dedup();
    assert_eq!(blocks.len(), members.len(), "blocks of queue pair numbers");
    let count = members.len() as u64;
    for member in &mut *members {
        assert_eq!(member.ask("members"), [count]);
    }
    let holders = members.iter().filter(|member| member.port == 4791).count();
    assert_eq!(holders, 1, "holders");
}

#[test]
fn members_come_and_go() {
    let address = own_address();
    let mut members: Vec<_> = (0..3).map(|_| Member::start(Start::at(address)).unwrap()).collect();
    assert_eq!(members.iter().map(|member| member.slot).collect::<Vec<_>>(), [0, 1, 2]);
    is_one_group(&mut members);
    // One leaves, and its slot is free.
    members.remove(1).leave();
    let next = Member::start(Start::at(address)).unwrap();
    assert_eq!(next.slot, 1);
    members.push(next);
    is_one_group(&mut members);
    for member in members {
        member.leave();
    }
    vanishes(address);
}

#[test]
fn whoever_is_killed_the_others_carry_on() {
    let address = own_address();
    let mut members: Vec<_> = (0..5).map(|_| Member::start(Start::at(address)).unwrap()).collect();
    // Not the port holder: the others detect it when they connect.
    let victim = members.remove(2);
    let slot = victim.slot;
    victim.kill();
    let mut next = Member::start(Start::at(address)).unwrap();
    assert_eq!(next.slot, slot, "its place is taken by the next");
    assert_eq!(next.ask("members"), [5]);
    members.push(next);
    // The port holder, again and again: a member takes the port over, and all agree which.
    while members.len() > 1 {
        let holder = members[0].ask("holder")[0];
        let index = members
            .iter()
            .position(|member| u64::from(member.slot) == holder)
            .unwrap();
        members.remove(index).kill();
        for member in &mut members {
            eventually("the port is nobody's", || {
                member.ask("holder").first().is_some_and(|&now| now != holder)
            });
        }
        let agreed = members[0].ask("holder");
        assert!(members.iter_mut().all(|member| member.ask("holder") == agreed));
        assert_eq!(
            UdpSocket::bind((address, 4791)).unwrap_err().kind(),
            std::io::ErrorKind::AddrInUse
        );
    }
    // A new process joins the same group.
    members.push(Member::start(Start::at(address)).unwrap());
    assert_eq!(members[1].ask("members"), [2]);
    // All at once.
    members.iter().for_each(|member| signal(member.pid(), Signal::SIGKILL));
    vanishes(address);
}

#[test]
fn sixty_four_come_at_once() {
    let address = own_address();
    let starting: Vec<_> = (0..64).map(|_| Member::launch(Start::at(address))).collect();
    let mut members: Vec<_> = starting.into_iter().map(|member| member.joined().unwrap()).collect();
    is_one_group(&mut members);
    drop(members);
    vanishes(address);
}

#[test]
fn there_is_one_founder() {
    for _ in 0..15 {
        let address = own_address();
        let starting: Vec<_> = (0..6).map(|_| Member::launch(Start::at(address))).collect();
        let mut members: Vec<_> = starting.into_iter().map(|member| member.joined().unwrap()).collect();
        is_one_group(&mut members);
    }
}

#[test]
fn groups_that_end_while_others_join_stay_one() {
    let address = own_address();
    let mut members: Vec<Member> = Vec::new();
    for round in 0..12 {
        let starting: Vec<_> = (0..3).map(|_| Member::launch(Start::at(address))).collect();
        // All existing members, the port holder too, while the next ones join.
        let gone = members.len();
        for member in members.drain(..) {
            if round % 2 == 0 { member.kill() } else { member.leave() }
        }
        members = starting.into_iter().map(|member| member.joined().unwrap()).collect();
        for member in &mut members {
            eventually(&format!("round {round}: not one group after {gone} went"), || {
                member.ask("members") == [3]
            });
            eventually("the port is nobody's", || member.ask("holder").len() == 1);
        }
    }
}

#[test]
fn who_is_stopped_holds_nobody_up_for_long() {
    let address = own_address();
    let stopped = Member::start(Start::at(address)).unwrap();
    let other = Member::start(Start::at(address)).unwrap();
    stop(stopped.pid());
    let mut third = Member::start(Start::at(address)).unwrap();
    assert_eq!(third.ask("members"), [3]);
    // No running member is left to reply.
    third.leave();
    stop(other.pid());
    let said = Member::start(Start::at(address)).unwrap_err();
    assert!(
        said.contains("do not answer") && said.contains(&stopped.pid().to_string()),
        "{said}"
    );
    signal(stopped.pid(), Signal::SIGCONT);
    let mut fourth = Member::start(Start::at(address)).unwrap();
    assert_eq!(fourth.ask("members"), [3]);
    signal(other.pid(), Signal::SIGCONT);
}

#[test]
fn another_users_address_is_not_shared() {
    if !geteuid().is_root() {
        eprintln!("skipped: only root can be two users");
        return;
    }
    let address = own_address();
    let _member = Member::start(Start::at(address)).unwrap();
    let said = Member::start(Start::at(address).by(65534)).unwrap_err();
    assert!(said.contains("uid 0") && said.contains(&address.to_string()), "{said}");
    // Nor does a user of that address keep root out with its names alone.
    let other = own_address();
    let theirs = Member::start(Start::at(other).by(65534)).unwrap();
    let said = Member::start(Start::at(other)).unwrap_err();
    assert!(said.contains("uid 65534"), "{said}");
    theirs.kill();
    Member::start(Start::at(other)).unwrap().leave();
}

#[test]
fn a_fork_keeps_nothing() {
    let address = own_address();
    let mut member = Member::start(Start::at(address)).unwrap();
    let mut beside = Member::start(Start::at(address)).unwrap();
    let fork = member.ask("fork")[0] as u32;
    let slot = u64::from(member.slot);
    // The fork closes its device, which changes nothing for its parent.
    assert_eq!(beside.ask("holder"), [slot]);
    assert_eq!(beside.ask("members"), [2]);
    member.kill();
    eventually("the fork holds the port", || {
        beside.ask("holder") == [u64::from(beside.slot)]
    });
    eventually("the fork lives in the group", || beside.ask("seen") == [1]);
    beside.kill();
    vanishes(address);
    signal(fork, Signal::SIGKILL);
}

#[test]
fn the_default_address_is_shared() {
    // A port of this process alone, as other devices of this machine use the default address.
    let config = member::at_port(20_000 + (process::id() % 40_000) as u16);
    let (one, two) = (Device::open(&config).unwrap(), Device::open(&config).unwrap());
    assert_eq!(one.info().address, two.info().address);
    assert_eq!(one.info().address.ip(), IpAddr::V4(Ipv4Addr::LOCALHOST));
    assert_eq!(one.info().gid, two.info().gid);
    assert_ne!(one.host().me(), two.host().me());
}
