//! Registered memory that the application has unmapped, or whose file it has truncated: an access
//! is an error of its request, and no signal (decision 072).

use std::sync::Arc;

use doorbell_roce_proto::RKey;
use doorbell_roce_proto::memory::AtomicOp;
use doorbell_roce_proto::work::{Operation, Status};
use doorbell_softroce::{CopyMode, Device, LinkChoice};

use super::side::{Backing, Key, Side, device_on, own_address};

const PAGE: usize = 4096;
/// Longer than a record of a shm ring.
const LEN: usize = 1 << 20;
/// One word; what fits a packet; several packets or a payload by reference; several records.
const LENGTHS: [usize; 4] = [8, 1000, 64 << 10, LEN];

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Path {
    Udp,
    /// Of two devices of this process, which take each other for other processes.
    Shm(CopyMode),
    /// One device.
    Loopback,
}

const PATHS: [Path; 4] = [
    Path::Udp,
    Path::Shm(CopyMode::Ring),
    Path::Shm(CopyMode::Shared),
    Path::Loopback,
];

fn devices(path: Path) -> [Arc<Device>; 2] {
    let address = own_address();
    let open = |link, copy_mode| device_on(address, link, copy_mode);
    match path {
        Path::Udp => [0, 1].map(|_| open(LinkChoice::Udp, None)),
        Path::Shm(copy_mode) => [0, 1].map(|_| open(LinkChoice::Local, Some(copy_mode))),
        Path::Loopback => {
            let device = open(LinkChoice::Local, None);
            [Arc::clone(&device), device]
        }
    }
}

fn connected(devices: &[Arc<Device>; 2], backing: Backing) -> [Side; 2] {
    let sides = [0, 1].map(|n: usize| Side::with(&devices[n], 2 * LEN, backing));
    let [a, b] = &sides;
    a.connect(b.key(), 17);
    b.connect(a.key(), 17);
    sides
}

/// Runs `post` on a new connection for each path and length, where memory of one side is unmapped:
/// all that is accessed, or its last page. The first completion has the status `expected`.
///
/// On one device, what a READ has sent by reference when it meets the page is revoked, as the queue
/// pair fails: the NAK arrives behind packets that are lost, and the error may be that of retries.
fn statuses(post: impl Fn(&[Side; 2], usize), unmapped: usize, expected: Status) {
    for path in PATHS {
        let devices = devices(path);
        for len in LENGTHS {
            for first in [0, (len - 1) / PAGE * PAGE] {
                let sides = connected(&devices, Backing::Private);
                sides[unmapped].memory.unmap(first, LEN - first);
                post(&sides, len);
                let found = sides[0].wait(1)[0].status;
                let revoked = path == Path::Loopback && len == LEN && found == Status::RetryExceeded;
                assert!(
                    found == expected || revoked,
                    "{found:?}: {path:?}, {len} bytes, from {first}"
                );
            }
        }
    }
}

#[test]
fn a_write_to_unmapped_memory_is_an_access_error() {
    statuses(|[a, b], len| a.write(1, 0, len, b.key()), 1, Status::RemoteAccess);
}

#[test]
fn a_read_of_unmapped_memory_is_an_access_error() {
    statuses(|[a, b], len| a.read(1, 0, len, b.key()), 1, Status::RemoteAccess);
}

#[test]
fn a_read_into_unmapped_memory_is_a_protection_error() {
    statuses(|[a, b], len| a.read(1, 0, len, b.key()), 0, Status::LocalProtection);
}

#[test]
fn a_send_from_unmapped_memory_is_a_protection_error() {
    let send = |[a, b]: &[Side; 2], len| {
        b.receive(7, 0, len);
        a.send(1, 0, len);
    };
    statuses(send, 0, Status::LocalProtection);
}

#[test]
fn a_receive_into_unmapped_memory_is_an_error_at_both_sides() {
    let send = |[a, b]: &[Side; 2], len| {
        b.receive(7, 0, len);
        a.send(1, 0, len);
        assert_eq!(b.wait(1)[0].status, Status::LocalProtection, "{len} bytes");
    };
    statuses(send, 1, Status::RemoteOperational);
}

#[test]
fn an_atomic_on_unmapped_memory_is_an_access_error() {
    for op in [
        AtomicOp::FetchAdd { add: 1 },
        AtomicOp::CompareSwap { compare: 0, swap: 1 },
    ] {
        for path in PATHS {
            let [a, b] = connected(&devices(path), Backing::Private);
            b.memory.unmap(0, PAGE);
            let Key { addr, rkey, .. } = b.key();
            let rkey = RKey(rkey);
            a.post(1, Operation::Atomic { addr, rkey, op }, 0, 8);
            assert_eq!(a.wait(1)[0].status, Status::RemoteAccess, "{path:?}");
        }
    }
}

/// Its file ends before it: SIGBUS in place of SIGSEGV.
#[test]
fn a_write_to_a_truncated_file_is_an_access_error() {
    for link in [LinkChoice::Udp, LinkChoice::Local] {
        let address = own_address();
        let devices = [0, 1].map(|_| device_on(address, link, None));
        let [a, b] = connected(&devices, Backing::Application);
        b.memory.file().unwrap().set_len(PAGE as u64).unwrap();
        a.write(1, 0, PAGE, b.key());
        assert_eq!(a.wait(1)[0].status, Status::Success, "what is left of it");
        a.write(2, PAGE, 8, b.key());
        assert_eq!(a.wait(1)[0].status, Status::RemoteAccess, "{link:?}");
    }
}
