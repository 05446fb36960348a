//! Processes that share an address: many join at once, are killed, stopped and forked, and belong
//! to other users. The members are processes of this test program (`member`).

#[path = "../common/address.rs"]
mod address;
mod member;

use std::net::{IpAddr, Ipv4Addr, SocketAddr, UdpSocket};
use std::os::fd::{AsRawFd, OwnedFd};
use std::process;
use std::thread;
use std::time::{Duration, Instant};

use address::own_address;
use doorbell_softroce::Device;
use member::{Member, Start};
use nix::sys::signal::{Signal, kill};
use nix::sys::socket::{AddressFamily, Backlog, SockFlag, SockType, UnixAddr, bind, listen, socket};
use nix::unistd::{Pid, geteuid};

/// Longer than any test takes, even on a busy machine.
const TIMEOUT: Duration = Duration::from_secs(60);

fn wait_until(what: &str, mut is_so: impl FnMut() -> bool) {
    let since = Instant::now();
    while !is_so() {
        assert!(since.elapsed() < TIMEOUT, "{what}");
        thread::sleep(Duration::from_millis(2));
    }
}

fn socket_names(address: IpAddr) -> Vec<String> {
    let ours = format!("/{}/", SocketAddr::new(address, 4791));
    let table = std::fs::read_to_string("/proc/net/unix").unwrap();
    let socket_names = table.lines().filter_map(|line| line.split_whitespace().nth(7));
    socket_names
        .filter(|name| name.contains(&ours))
        .map(str::to_owned)
        .collect()
}

fn assert_group_vanishes(address: IpAddr) {
    wait_until("a name is left", || socket_names(address).is_empty());
    wait_until("the port is taken", || UdpSocket::bind((address, 4791)).is_ok());
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
    wait_until("a process does not stop", || {
        let mut threads = std::fs::read_dir(format!("/proc/{pid}/task")).unwrap();
        threads.all(is_stopped)
    });
}

/// All have different slots and blocks, one has the port, and each sees all.
fn assert_one_group(members: &mut [Member]) {
    let mut slots: Vec<_> = members.iter().map(|member| member.slot).collect();
    slots.sort_unstable();
    slots.dedup();
    assert_eq!(slots.len(), members.len(), "slots");
    let mut blocks: Vec<_> = members.iter_mut().map(|member| member.query("block")[0]).collect();
    blocks.sort_unstable();
    blocks.dedup();
    assert_eq!(blocks.len(), members.len(), "blocks of queue pair numbers");
    let count = members.len() as u64;
    for member in &mut *members {
        assert_eq!(member.query("members"), [count]);
    }
    let holders = members.iter().filter(|member| member.port == 4791).count();
    assert_eq!(holders, 1, "holders");
}

#[test]
fn members_join_and_leave() {
    let address = own_address();
    let mut members: Vec<_> = (0..3).map(|_| Member::start(Start::at(address)).unwrap()).collect();
    assert_eq!(members.iter().map(|member| member.slot).collect::<Vec<_>>(), [0, 1, 2]);
    assert_one_group(&mut members);
    // One leaves, and its slot is free.
    members.remove(1).leave();
    let next = Member::start(Start::at(address)).unwrap();
    assert_eq!(next.slot, 1);
    members.push(next);
    assert_one_group(&mut members);
    for member in members {
        member.leave();
    }
    assert_group_vanishes(address);
}

#[test]
fn other_members_survive_a_killed_one() {
    let address = own_address();
    let mut members: Vec<_> = (0..5).map(|_| Member::start(Start::at(address)).unwrap()).collect();
    // Not the port holder: the others detect it when they connect.
    let victim = members.remove(2);
    let slot = victim.slot;
    victim.kill();
    let mut next = Member::start(Start::at(address)).unwrap();
    assert_eq!(next.slot, slot, "its place is taken by the next");
    assert_eq!(next.query("members"), [5]);
    members.push(next);
    // The port holder, again and again: a member takes the port over, and all agree which.
    while members.len() > 1 {
        let holder = members[0].query("holder")[0];
        let index = members
            .iter()
            .position(|member| u64::from(member.slot) == holder)
            .unwrap();
        members.remove(index).kill();
        for member in &mut members {
            wait_until("the port has no holder", || {
                member.query("holder").first().is_some_and(|&now| now != holder)
            });
        }
        let agreed = members[0].query("holder");
        assert!(members.iter_mut().all(|member| member.query("holder") == agreed));
        assert_eq!(
            UdpSocket::bind((address, 4791)).unwrap_err().kind(),
            std::io::ErrorKind::AddrInUse
        );
    }
    // A new process joins the same group.
    members.push(Member::start(Start::at(address)).unwrap());
    assert_eq!(members[1].query("members"), [2]);
    members.iter().for_each(|member| signal(member.pid(), Signal::SIGKILL));
    assert_group_vanishes(address);
}

#[test]
fn sixty_four_join_at_once() {
    let address = own_address();
    let starting: Vec<_> = (0..64).map(|_| Member::launch(Start::at(address))).collect();
    let mut members: Vec<_> = starting.into_iter().map(|member| member.joined().unwrap()).collect();
    assert_one_group(&mut members);
    drop(members);
    assert_group_vanishes(address);
}

#[test]
fn exactly_one_member_founds_the_group() {
    for _ in 0..15 {
        let address = own_address();
        let starting: Vec<_> = (0..6).map(|_| Member::launch(Start::at(address))).collect();
        let mut members: Vec<_> = starting.into_iter().map(|member| member.joined().unwrap()).collect();
        assert_one_group(&mut members);
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
            wait_until(&format!("round {round}: not one group after {gone} went"), || {
                member.query("members") == [3]
            });
            wait_until("the port has no holder", || member.query("holder").len() == 1);
        }
    }
}

#[test]
fn a_stopped_member_does_not_block_others_for_long() {
    let address = own_address();
    let stopped = Member::start(Start::at(address)).unwrap();
    let other = Member::start(Start::at(address)).unwrap();
    stop(stopped.pid());
    let mut third = Member::start(Start::at(address)).unwrap();
    assert_eq!(third.query("members"), [3]);
    // No running member is left to reply.
    third.leave();
    stop(other.pid());
    let reply = Member::start(Start::at(address)).unwrap_err();
    assert!(
        reply.contains("do not answer") && reply.contains(&stopped.pid().to_string()),
        "{reply}"
    );
    signal(stopped.pid(), Signal::SIGCONT);
    let mut fourth = Member::start(Start::at(address)).unwrap();
    assert_eq!(fourth.query("members"), [3]);
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
    let reply = Member::start(Start::at(address).by(65534)).unwrap_err();
    assert!(
        reply.contains("uid 0") && reply.contains(&address.to_string()),
        "{reply}"
    );
    // Nor does a user of that address keep root out with its names alone.
    let other = own_address();
    let theirs = Member::start(Start::at(other).by(65534)).unwrap();
    let reply = Member::start(Start::at(other)).unwrap_err();
    assert!(reply.contains("uid 65534"), "{reply}");
    theirs.kill();
    Member::start(Start::at(other)).unwrap().leave();
}

/// Users that a user namespace does not map have one uid there, the overflow uid.
#[test]
fn the_overflow_uid_proves_no_user() {
    if !geteuid().is_root() {
        eprintln!("skipped: only root can be two users");
        return;
    }
    let address = own_address();
    let start = |uid| Member::start(Start::at(address).by(uid).unmapped());
    if let Err(error) = member::try_user_namespace() {
        eprintln!("skipped: no user namespace for another user: {error}");
        return;
    }
    let _member = start(1001).unwrap();
    let reply = start(1002).unwrap_err();
    assert!(reply.contains("uid 65534 (the overflow uid"), "{reply}");
    // Without an address of their own choice each founds a group, at the next free one.
    let start = |uid| Member::start(Start::anywhere().by(uid).unmapped()).unwrap();
    let (one, other) = (start(1001), start(1002));
    assert_eq!((one.slot, other.slot), (0, 0));
}

/// Listens at an abstract name as another user, which the calling thread stays.
fn squat(name: &str, uid: u32) -> OwnedFd {
    // SAFETY: setresuid(2) takes numbers; the system call, unlike libc's function, is for this
    // thread alone.
    assert_eq!(unsafe { libc::syscall(libc::SYS_setresuid, -1, uid, -1) }, 0);
    let socket = socket(AddressFamily::Unix, SockType::SeqPacket, SockFlag::SOCK_CLOEXEC, None).unwrap();
    bind(socket.as_raw_fd(), &UnixAddr::new_abstract(name.as_bytes()).unwrap()).unwrap();
    listen(&socket, Backlog::MAXALLOWABLE).unwrap();
    socket
}

#[test]
fn another_users_name_does_not_hide_the_group() {
    if !geteuid().is_root() {
        eprintln!("skipped: only root can be two users");
        return;
    }
    let address = own_address();
    let first = Member::start(Start::at(address)).unwrap();
    let second = Member::start(Start::at(address)).unwrap();
    let names = socket_names(address);
    let lowest = names.into_iter().find(|name| name.ends_with("/0")).unwrap();
    first.leave();
    let _squatter = thread::spawn(move || squat(&lowest[1..], 65534)).join().unwrap();
    let mut third = Member::start(Start::at(address)).unwrap();
    assert_eq!((second.slot, third.slot), (1, 2));
    assert_eq!(third.query("members"), [2]);
}

#[test]
fn a_fork_keeps_no_descriptors() {
    let address = own_address();
    let mut member = Member::start(Start::at(address)).unwrap();
    let mut other = Member::start(Start::at(address)).unwrap();
    let fork = member.query("fork")[0] as u32;
    let slot = u64::from(member.slot);
    // The fork closes its device, which changes nothing for its parent.
    assert_eq!(other.query("holder"), [slot]);
    assert_eq!(other.query("members"), [2]);
    member.kill();
    wait_until("the fork holds the port", || {
        other.query("holder") == [u64::from(other.slot)]
    });
    wait_until("the fork is still in the group", || other.query("seen") == [1]);
    other.kill();
    assert_group_vanishes(address);
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
