//! Direct operations, whatever the target does meanwhile: on memory of doorbell-verbs' kind, and on
//! private memory.

use std::io::IoSliceMut;
use std::net::IpAddr;
use std::sync::atomic::{AtomicU8, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use doorbell_roce_proto::RKey;
use doorbell_roce_proto::memory::AtomicOp;
use doorbell_roce_proto::work::{Operation, Status};
use doorbell_softroce::{CopyMode, Device};
use nix::sys::signal::Signal;
use nix::sys::uio::{RemoteIoVec, process_vm_readv};

use super::processes::{PRIVATE, Peer};
use super::side::{Backing, Key, Side, TEST_TIMEOUT, device, own_address};

const LEN: usize = 1 << 20;
const TIMEOUT: u8 = 14;
/// Half a second.
const LONG_TIMEOUT: u8 = 17;
/// The longest direct request for private memory.
const PRIVATE_LEN: usize = 16 << 10;

fn direct_requests(device: &Device) -> u64 {
    device.counters().direct_requests
}

/// Until the tables and segments of the peer have arrived: a request is direct.
fn warm_up(side: &Side, peer: Key) {
    let since = Instant::now();
    while direct_requests(side.device()) == 0 {
        side.write(0, 0, 1, peer);
        assert_eq!(side.wait(1)[0].status, Status::Success);
        assert!(since.elapsed() < TEST_TIMEOUT);
    }
}

fn connected(address: IpAddr) -> (Side, Side) {
    let [one, other] = [0, 1].map(|_| Side::with(&device(address, CopyMode::Shared), LEN, Backing::Shared));
    one.connect(other.key(), TIMEOUT);
    other.connect(one.key(), TIMEOUT);
    (one, other)
}

fn atomic(side: &Side, at: usize, peer: Key, op: AtomicOp) -> u64 {
    let addr = peer.addr + at as u64;
    let rkey = RKey(peer.rkey);
    side.post(9, Operation::Atomic { addr, rkey, op }, LEN - 8, 8);
    let done = side.wait(1)[0];
    assert_eq!((done.status, done.wr_id), (Status::Success, 9));
    side.memory.word(LEN - 8)
}

/// WRITE and READ of every power of two and of `longest` bytes, each byte checked. Returns how many
/// requests there were, and the last byte.
fn writes_and_reads(side: &Side, peer: Key, longest: usize) -> (u64, u8) {
    let (operation, read) = (
        Operation::Write {
            addr: peer.addr,
            rkey: RKey(peer.rkey),
            imm: None,
        },
        Operation::Read {
            addr: peer.addr,
            rkey: RKey(peer.rkey),
        },
    );
    let parts = [(4096, 1000), (0, 13), (64, 8)];
    side.memory.fill(0, LEN, 0xee);
    (1..)
        .zip(parts)
        .for_each(|(byte, (at, len))| side.memory.fill(at, len, byte));
    side.post_list(1, operation, &parts);
    assert_eq!(side.wait(1)[0].status, Status::Success);
    side.memory.fill(0, LEN, 0xee);
    side.post_list(2, read, &parts);
    assert_eq!(side.wait(1)[0].status, Status::Success);
    for (byte, (at, len)) in (1..).zip(parts) {
        assert!(side.memory.is_all(at, len, byte) && side.memory.is_all(at + len, 8, 0xee));
    }
    let (mut count, mut byte) = (2, 0);
    for len in (0..=19)
        .map(|bits| 1 << bits)
        .filter(|len| *len < longest)
        .chain([longest])
    {
        (count, byte) = (count + 2, byte + 1);
        side.memory.fill(0, len, byte);
        side.write(1, 0, len, peer);
        assert_eq!(side.wait(1)[0].status, Status::Success);
        side.memory.fill(0, len, 0xee);
        side.read(2, 0, len, peer);
        assert_eq!(side.wait(1)[0].status, Status::Success);
        assert!(side.memory.is_all(0, len, byte), "{len} bytes");
    }
    (count, byte)
}

fn atomics(side: &Side, peer: Key) {
    let before = atomic(side, 0, peer, AtomicOp::FetchAdd { add: 5 });
    let (compare, swap) = (before + 5, 42);
    assert_eq!(atomic(side, 0, peer, AtomicOp::CompareSwap { compare, swap }), compare);
    assert_eq!(atomic(side, 0, peer, AtomicOp::CompareSwap { compare, swap: 1 }), swap);
}

#[test]
fn a_stopped_target_serves_every_operation() {
    let address = own_address();
    let side = Side::with(&device(address, CopyMode::Shared), LEN, Backing::Shared);
    let mut peer = Peer::start(address, CopyMode::Shared, "direct");
    let key = peer.connect_side(&side);
    warm_up(&side, key);
    peer.stop();
    let before = direct_requests(side.device());
    let (count, byte) = writes_and_reads(&side, key, LEN - 8);
    atomics(&side, key);
    assert_eq!(direct_requests(side.device()) - before, count + 3);
    // The bytes of the last WRITE are in the target's memory.
    peer.signal(Signal::SIGCONT);
    peer.send_line(&(LEN - 64).to_string());
    assert_eq!(peer.read_line(), byte.to_string());
}

#[test]
fn a_stopped_target_serves_private_memory() {
    let address = own_address();
    let side = Side::with(&device(address, None), LEN, Backing::Private);
    let mut peer = Peer::start(address, None, &format!("direct{PRIVATE}"));
    let key = peer.connect_side(&side);
    let (mut byte, base) = ([0], key.addr as usize);
    let there = RemoteIoVec { base, len: 1 };
    if process_vm_readv(peer.pid(), &mut [IoSliceMut::new(&mut byte)], &[there]) != Ok(1) {
        println!("skipped: this machine forbids process_vm_readv");
        return;
    }
    warm_up(&side, key);
    peer.stop();
    let before = direct_requests(side.device());
    let (count, byte) = writes_and_reads(&side, key, PRIVATE_LEN);
    assert_eq!(direct_requests(side.device()) - before, count);
    peer.signal(Signal::SIGCONT);
    peer.send_line(&PRIVATE_LEN.to_string());
    assert_eq!(peer.read_line(), byte.to_string());
    // Atomics need the target.
    atomics(&side, key);
    assert_eq!(direct_requests(side.device()) - before, count);
}

/// A SEND needs the target. It waits on the ring, and no timeout ends the connection.
#[test]
fn a_stopped_target_keeps_its_connections() {
    for copy_mode in CopyMode::ALL {
        let address = own_address();
        let side = Side::with(&device(address, copy_mode), LEN, Backing::Shared);
        let mut peer = Peer::start(address, copy_mode, "direct");
        // With 17 ms and three retries, a lost peer is detected after 70 ms.
        let key = peer.connect_side(&side);
        peer.stop();
        side.memory.fill(0, LEN, 21);
        side.send(1, 0, 8);
        side.write(2, 0, LEN, key);
        thread::sleep(Duration::from_millis(1500));
        assert_eq!(side.poll(), []);
        peer.signal(Signal::SIGCONT);
        let done = side.wait(2);
        assert!(done.iter().all(|done| done.status == Status::Success), "{done:?}");
        peer.send_line(&(LEN - 64).to_string());
        assert_eq!(peer.read_line(), "21");
    }
}

#[test]
fn a_request_behind_another_keeps_its_order() {
    let (one, other) = connected(own_address());
    warm_up(&one, other.key());
    for round in 0..200 {
        let byte = round as u8;
        other.receive(0, LEN / 2, 64);
        one.memory.fill(0, 64, byte);
        one.send(1, 0, 64);
        // Behind the SEND, which takes the ring; then alone.
        one.write(2, 64, 64, other.key());
        one.wait(2);
        assert_eq!(other.wait(1)[0].status, Status::Success);
        assert!(other.memory.is_all(LEN / 2, 64, byte));
    }
}

/// After deregistering or the end of a queue pair nothing is written, however late the request.
#[test]
fn nothing_is_written_after_the_end_of_a_registration() {
    let address = own_address();
    for round in 0..50 {
        let (one, mut other) = connected(address);
        let key = other.key();
        warm_up(&one, key);
        let writer = thread::spawn(move || {
            one.memory.fill(0, LEN, 1);
            loop {
                one.write(1, 0, LEN, key);
                if one.wait(1)[0].status != Status::Success {
                    return one;
                }
            }
        });
        thread::sleep(Duration::from_micros(50 * round));
        if round % 2 == 0 {
            drop(other.mr.take());
        } else {
            drop(other.qp.take());
        }
        other.memory.fill(0, LEN, 2);
        drop(writer.join().unwrap());
        assert!(other.memory.is_all(0, LEN, 2), "round {round}");
    }
}

/// Keys, ranges and rights are refused as over the ring: the request takes it.
#[test]
fn what_is_not_permitted_is_refused_by_the_target() {
    let address = own_address();
    let refusals: [fn(&mut Key); 3] = [
        |key| key.rkey ^= 1,
        |key| key.addr -= 8,
        |key| key.addr += LEN as u64 - 7,
    ];
    for alter in refusals {
        let (one, other) = connected(address);
        warm_up(&one, other.key());
        let before = direct_requests(one.device());
        let mut wrong = other.key();
        alter(&mut wrong);
        one.write(1, 0, 8, wrong);
        assert_eq!(one.wait(1)[0].status, Status::RemoteAccess);
        assert_eq!(direct_requests(one.device()), before);
    }
    // A queue pair of ours that the target's is not connected to.
    let (one, other) = connected(address);
    warm_up(&one, other.key());
    let stranger = Side::with(other.device(), LEN, Backing::Shared);
    let third = Side::with(one.device(), LEN, Backing::Shared);
    third.connect(other.key(), 12);
    third.write(1, 0, 8, other.key());
    assert_eq!(third.wait(1)[0].status, Status::RetryExceeded);
    drop(stranger);
}

/// A poll that finds the last bytes of a WRITE finds all others.
#[test]
fn the_last_bytes_of_a_direct_write_appear_last() {
    for backing in [Backing::Shared, Backing::Private] {
        let address = own_address();
        let [one, other] = [0, 1].map(|_| Side::with(&device(address, None), LEN, backing));
        one.connect(other.key(), TIMEOUT);
        other.connect(one.key(), TIMEOUT);
        warm_up(&one, other.key());
        let (since, seen) = (Instant::now(), AtomicU8::new(0));
        let rounds = 1..=u8::MAX;
        thread::scope(|scope| {
            scope.spawn(|| {
                for byte in rounds.clone() {
                    while other.memory.word(PRIVATE_LEN - 8) != u64::from_ne_bytes([byte; 8]) {
                        assert!(since.elapsed() < TEST_TIMEOUT);
                        thread::yield_now();
                    }
                    assert!(other.memory.is_all(0, PRIVATE_LEN, byte), "{backing:?}, {byte}");
                    seen.store(byte, Ordering::Relaxed);
                }
            });
            for byte in rounds.clone() {
                one.memory.fill(0, PRIVATE_LEN, byte);
                one.write(1, 0, PRIVATE_LEN, other.key());
                one.wait(1);
                while seen.load(Ordering::Relaxed) != byte {
                    assert!(since.elapsed() < TEST_TIMEOUT);
                    thread::yield_now();
                }
            }
        });
    }
}

/// Memory that this library did not allocate is accessed through the kernel: up to a length, and
/// unless either end forces a copy mode.
#[test]
fn other_memory_is_direct_up_to_a_length() {
    let address = own_address();
    let write = |one: &Side, other: &Side, byte, len| {
        let before = direct_requests(one.device());
        one.memory.fill(0, len, byte);
        one.write(1, 0, len, other.key());
        assert_eq!(one.wait(1)[0].status, Status::Success);
        assert!(other.memory.is_all(0, len, byte) && other.memory.word(len) == 0);
        direct_requests(one.device()) - before
    };
    let (shared, ring) = (Some(CopyMode::Shared), Some(CopyMode::Ring));
    for backing in [Backing::Private, Backing::Application] {
        for modes in [[None, None], [shared, None], [None, shared], [ring, ring]] {
            let [one, other] = modes.map(|mode| Side::with(&device(address, mode), LEN, backing));
            one.connect(other.key(), LONG_TIMEOUT);
            other.connect(one.key(), LONG_TIMEOUT);
            let all = modes == [None, None];
            if all {
                warm_up(&one, other.key());
            }
            let is_direct = |byte, len| {
                let direct = write(&one, &other, byte, len);
                other.memory.fill(0, len, 0);
                direct > 0
            };
            for byte in 1..6 {
                assert!(!is_direct(byte, PRIVATE_LEN + 8), "{backing:?} {modes:?}");
                // The target sleeps soon after it has executed a request.
                let since = Instant::now();
                while is_direct(byte, PRIVATE_LEN) != all {
                    assert!(all && since.elapsed() < TEST_TIMEOUT, "{backing:?} {modes:?}");
                }
            }
        }
    }
}

/// Regions come and go; none is written by a request for another.
#[test]
fn rebinding_regions_never_misdirects_a_write() {
    let address = own_address();
    let (one, mut other) = connected(address);
    warm_up(&one, other.key());
    for round in 0..200 {
        let key = other.key();
        one.memory.fill(0, 4096, round as u8);
        one.write(1, 0, 4096, key);
        assert_eq!(one.wait(1)[0].status, Status::Success);
        assert!(other.memory.is_all(0, 4096, round as u8));
        // A new region of the same memory, in the same slot of the table.
        drop(other.mr.take());
        other.register();
    }
}
