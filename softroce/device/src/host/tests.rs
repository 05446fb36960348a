//! Several members in one process: nothing here depends on whose process they are.

#[path = "../../tests/common/address.rs"]
mod address;

use std::fs::File;
use std::io::{Read, Seek, Write};
use std::os::fd::AsFd;
use std::sync::atomic::{AtomicU8, Ordering};
use std::thread;

use address::own_address;
use nix::poll::{PollFd, PollFlags, PollTimeout, poll};

use super::peers::ControlRecord;
use super::*;

fn address() -> SocketAddr {
    SocketAddr::new(own_address(), 4791)
}

/// Joins while the existing members are polled.
fn join(address: SocketAddr, members: &[&Host]) -> (Host, CloseOnFork<UdpSocket>) {
    thread::scope(|scope| {
        let joining = scope.spawn(|| Host::join(address, Flags::default(), Duration::ZERO).unwrap());
        while !joining.is_finished() {
            for member in members {
                assert!(member.poll().is_none());
            }
            thread::yield_now();
        }
        joining.join().unwrap()
    })
}

fn next_event(host: &Host) -> HostEvent {
    loop {
        if let Some(next_event) = host.poll() {
            return next_event;
        }
        let mut readable = [PollFd::new(host.pollfd(), PollFlags::POLLIN)];
        assert_eq!(poll(&mut readable, PollTimeout::from(30_000_u16)), Ok(1), "no event");
    }
}

fn memfd(content: &[u8]) -> File {
    let fd = nix::sys::memfd::memfd_create(c"test", nix::sys::memfd::MFdFlags::MFD_CLOEXEC).unwrap();
    let mut file = File::from(fd);
    file.write_all(content).unwrap();
    file
}

#[test]
fn two_members_share_an_address() {
    let at = address();
    let (first, its_socket) = Host::join(at, Flags::UDP_ONLY, Duration::ZERO).unwrap();
    let (second, other_socket) = join(at, &[&first]);
    let other_port = other_socket.local_addr().unwrap();
    assert_eq!(its_socket.local_addr().unwrap(), at);
    assert_eq!((other_port.ip(), other_port.port() == at.port()), (at.ip(), false));
    // One that peers pin, by its range.
    assert!((0x8000..0xc000).contains(&other_port.port()));
    assert_eq!((first.me().slot(), second.me().slot()), (0, 1));
    for host in [&first, &second] {
        assert_eq!(host.port_holder(), Some(first.me()));
        assert_eq!(host.udp_port(first.me()), Some(at.port()));
        assert_eq!(host.udp_port(second.me()), Some(other_port.port()));
        assert_eq!(host.flags(first.me()), Some(Flags::UDP_ONLY));
        assert_eq!(host.flags(second.me()), Some(Flags::default()));
        assert_eq!(host.member(1), Some(second.me()));
        assert_eq!(host.member(2), None);
    }
    assert!(first.take_over_at().is_none());
    assert!(second.take_over_at().is_some() && second.take_over().is_none() && second.take_over_at().is_none());
}

fn block(index: u16) -> QpnBlock {
    QpnBlock::new(index).unwrap()
}

#[test]
fn blocks_belong_to_one_member_each() {
    let at = address();
    let (first, _first) = join(at, &[]);
    let (second, _second) = join(at, &[&first]);
    let one = first.claim(block(5)).unwrap();
    let other = second.claim(block(5)).unwrap();
    assert_eq!((one.index(), other.index()), (5, 6));
    assert_eq!(first.owner_of(Qpn::new(5 << 10 | 17)), Some(first.me()));
    assert_eq!(first.owner_of(Qpn::new(6 << 10)), Some(second.me()));
    assert_eq!(first.owner_of(Qpn::new(7 << 10)), None);
    drop(second);
    assert_eq!(first.owner_of(Qpn::new(6 << 10)), None);
    // Never used blocks come first.
    assert_eq!(first.claim(block(6)).unwrap().index(), 7);
}

#[test]
fn services_are_of_the_group() {
    let at = address();
    let (first, _first) = join(at, &[]);
    let (second, _second) = join(at, &[&first]);
    first.add_service(17).unwrap();
    second.add_service(18).unwrap();
    assert_eq!(
        (second.find_service(17), first.find_service(18)),
        (Some(first.me()), Some(second.me()))
    );
    assert!(matches!(second.add_service(17), Err(ServiceError::InUse { id: 17 })));
    first.remove_service(17);
    assert_eq!(second.find_service(17), None);
    second.add_service(17).unwrap();
    drop(second);
    assert_eq!((first.find_service(17), first.find_service(18)), (None, None));
}

#[test]
fn adding_a_service_does_not_wait_for_joining_processes() {
    let at = address();
    let (member, _socket) = join(at, &[]);
    // A child that another test has forked may have a copy of the lock until it has closed it.
    let _lock = NamedLock::acquire(&GroupNames::new(at).join_lock(), Duration::from_secs(10)).unwrap();
    let before = member.services_added();
    member.add_service(17).unwrap();
    assert_eq!(member.find_service(17), Some(member.me()));
    assert_ne!(member.services_added(), before);
}

/// An undetected dead listener is not found, and does not block the service.
#[test]
fn a_listener_that_has_died_is_not_found() {
    let at = address();
    let (member, _socket) = join(at, &[]);
    // It still has its slot, but the name is free.
    let dead = member.registry.add_member(7, Flags::default(), 0);
    assert!(member.registry.add_service(17, dead));
    assert!(member.is_alive(dead));
    assert_eq!(member.find_service(17), None);
    assert!(!member.is_alive(dead));
    member.add_service(17).unwrap();
}

/// The last messages of a member are received before its end, though its connection was not
/// accepted yet, and the connection in the other direction hangs up first.
#[test]
fn the_last_messages_of_a_member_are_received() {
    let at = address();
    let (first, _first) = join(at, &[]);
    let (second, second_socket) = join(at, &[&first]);
    let _reverse = first.connect(second.me()).unwrap();
    assert!(second.poll().is_none());
    let connection = second.connect(first.me()).unwrap();
    connection.send(Message::Ring, &[memfd(b"ring").as_fd()]).unwrap();
    let second_id = second.me();
    drop((connection, second, second_socket));
    let message = next_event(&first);
    assert!(
        matches!(message, HostEvent::Message { from, message: Message::Ring, ref fds, .. } if from == second_id && fds.len() == 1),
        "{message:?}"
    );
    assert!(matches!(next_event(&first), HostEvent::Gone(member) if member == second_id));
}

#[test]
fn messages_descriptors_and_hang_up() {
    let at = address();
    let (first, _first) = join(at, &[]);
    let (second, _second) = join(at, &[&first]);
    let connection = second.connect(first.me()).unwrap();
    assert_eq!(
        (connection.to(), connection.pid()),
        (first.me(), Some(std::process::id() as i32))
    );
    assert!(Arc::ptr_eq(&connection, &second.connect(first.me()).unwrap()));
    connection.send(Message::Ring, &[memfd(b"ring").as_fd()]).unwrap();
    connection.wake();
    connection
        .send(
            Message::Segment { id: 1 << 40 },
            &[memfd(b"one").as_fd(), memfd(b"two").as_fd()],
        )
        .unwrap();
    for (expected, contents) in [
        (Message::Ring, &["ring"][..]),
        (Message::Segment { id: 1 << 40 }, &["one", "two"]),
    ] {
        let HostEvent::Message {
            from,
            pid,
            message,
            fds,
        } = next_event(&first)
        else {
            panic!("no message");
        };
        assert_eq!((from, pid, message), (second.me(), connection.pid(), expected));
        let read = |fd| {
            let (mut file, mut content) = (File::from(fd), String::new());
            file.rewind().unwrap();
            file.read_to_string(&mut content).unwrap();
            content
        };
        assert_eq!(fds.into_iter().map(read).collect::<Vec<_>>(), contents);
    }
    // The first leaves while both ends have a connection: one event.
    let back = first.connect(second.me()).unwrap();
    back.wake();
    assert!(second.poll().is_none());
    let gone = first.me();
    drop((first, back, _first));
    assert!(matches!(next_event(&second), HostEvent::Gone(member) if member == gone));
    assert!(second.poll().is_none());
    assert_eq!(second.connect(gone).unwrap_err().kind(), io::ErrorKind::NotConnected);
    // A child that another test has forked may have a copy of the socket until it has closed it.
    let since = Instant::now();
    while connection.send(Message::Ring, &[]).is_ok() {
        assert!(since.elapsed() < Duration::from_secs(10));
        thread::yield_now();
    }
    // A socket that has hung up, kept open by `connection`, does not wake the thread.
    let mut readable = [PollFd::new(second.pollfd(), PollFlags::POLLIN)];
    assert_eq!(poll(&mut readable, PollTimeout::ZERO), Ok(0));
}

#[test]
fn the_port_is_taken_over() {
    let at = address();
    let (first, its_socket) = join(at, &[]);
    let (second, _second) = join(at, &[&first]);
    let (third, _third) = join(at, &[&first, &second]);
    assert!(second.take_over().is_none() && third.take_over().is_none());
    drop((first, its_socket));
    for host in [&second, &third] {
        assert!(matches!(next_event(host), HostEvent::Gone(_)));
        assert!(host.take_over_at().is_some());
    }
    let port = second.take_over().unwrap();
    assert_eq!(port.local_addr().unwrap(), at);
    assert!(third.take_over().is_none() && third.take_over_at().is_none());
    assert_eq!(third.port_holder(), Some(second.me()));
}

#[test]
fn a_port_in_use_is_an_error() {
    let at = address();
    let _other = UdpSocket::bind(at).unwrap();
    let error = Host::join(at, Flags::default(), Duration::from_millis(3)).unwrap_err();
    assert!(
        matches!(&error, JoinError::Port { error, .. } if error.kind() == io::ErrorKind::AddrInUse),
        "{error}"
    );
}

#[test]
fn a_port_that_outlives_its_names_is_retried() {
    let at = address();
    let dying = UdpSocket::bind(at).unwrap();
    thread::scope(|scope| {
        let joining = scope.spawn(|| Host::join(at, Flags::default(), Duration::from_secs(30)));
        thread::sleep(Duration::from_millis(20));
        assert!(!joining.is_finished());
        drop(dying);
        let (_host, socket) = joining.join().unwrap().unwrap();
        assert_eq!(socket.local_addr().unwrap(), at);
    });
}

#[test]
fn arbitrary_bytes_on_a_connection_are_harmless() {
    let at = address();
    let (member, _its) = join(at, &[]);
    let (other, _others) = join(at, &[&member]);
    let raw = |bytes: &[u8], fds: &[BorrowedFd<'_>]| {
        let connection = socket::connect_to(&GroupNames::new(at).slot(0)).unwrap();
        for _ in 0..2 {
            // It may be closed by then.
            let _ = socket::send(connection.as_fd(), &[io::IoSlice::new(bytes)], fds);
            assert!(member.poll().is_none(), "{bytes:?}");
        }
        connection
    };
    let (mut kept, sent) = io::pipe().unwrap();
    let hello = |from: u64, to: u64| ControlRecord::Hello { from, to }.encode();
    let (me, them) = (member.me().pack(), other.me().pack());
    let records = [
        vec![],
        vec![0],
        vec![0xff; 24],
        vec![3; 23],
        vec![7; 5000],
        ControlRecord::Wake.encode().to_vec(),
        ControlRecord::Message(Message::Ring).encode().to_vec(),
        ControlRecord::Registry.encode().to_vec(),
        hello(0, me).to_vec(),
        hello(u64::MAX, me).to_vec(),
        // Another generation, and a slot without a member.
        hello(them + (1 << 16), me).to_vec(),
        hello(them + 1, me).to_vec(),
        hello(them, them).to_vec(),
    ];
    let open: Vec<_> = records.iter().map(|record| raw(record, &[sent.as_fd(); 3])).collect();
    drop(sent);
    assert_eq!(kept.read(&mut [0]).unwrap(), 0);
    // An identified peer may send anything, too.
    let known = socket::connect_to(&GroupNames::new(at).slot(0)).unwrap();
    for record in [
        &hello(them, me)[..],
        &hello(me, me),
        &ControlRecord::QueryRegistry.encode(),
        &[9; 24],
        &[7],
    ] {
        socket::send(known.as_fd(), &[io::IoSlice::new(record)], &[]).unwrap();
        assert!(member.poll().is_none());
    }
    let (_third, _socket) = join(at, &[&member, &other]);
    drop(open);
}

#[test]
fn accepting_resumes_after_running_out_of_descriptors() {
    let at = address();
    let (member, _its) = join(at, &[]);
    member.peers.lock().pause();
    let waiting = socket::connect_to(&GroupNames::new(at).slot(0)).unwrap();
    peers::send(&waiting, ControlRecord::QueryRegistry, &[]).unwrap();
    let mut buffer = [0; ControlRecord::MAX];
    let mut answered = || socket::receive(waiting.as_fd(), &mut buffer).is_ok();
    assert!(member.poll().is_none() && !answered());
    assert!(member.take_over_at().is_some(), "a retry is scheduled");
    while !answered() {
        assert!(member.poll().is_none());
        thread::yield_now();
    }
}

#[test]
fn the_lock_is_exclusive_and_acquiring_times_out() {
    let lock = GroupNames::new(address()).join_lock();
    let inside = NamedLock::acquire(&lock, Duration::ZERO).unwrap();
    assert!(matches!(
        NamedLock::acquire(&lock, Duration::from_millis(20)),
        Err(named_lock::LockError::Busy)
    ));
    thread::scope(|scope| {
        let next = scope.spawn(|| NamedLock::acquire(&lock, Duration::from_secs(3600)));
        thread::sleep(Duration::from_millis(5));
        assert!(!next.is_finished());
        drop(inside);
        assert!(next.join().unwrap().is_ok());
    });
    const EACH: Duration = Duration::from_millis(30);
    let entered = AtomicU8::new(0);
    thread::scope(|scope| {
        let acquire = || {
            let _lock = NamedLock::acquire(&lock, 10 * EACH).unwrap();
            assert_eq!(entered.fetch_add(1, Ordering::Relaxed), 0);
            thread::sleep(EACH);
            entered.fetch_sub(1, Ordering::Relaxed);
        };
        for _ in 0..20 {
            scope.spawn(acquire);
        }
    });
}
