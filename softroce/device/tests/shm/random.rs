//! Direct writes race with the end of what they use: registrations, queue pairs, and the initiator
//! itself, killed or stopped. The schedule is the machine's; the choices are seeded. With
//! `DOORBELL_SWEEP=all` there are 10 million writes.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};
use std::{env, hint, thread};

use doorbell_roce_proto::work::Status;
use doorbell_softroce::Device;
use nix::sys::signal::Signal;

use super::processes::{PRIVATE, Peer, hammer_len};
use super::side::{Backing, Side, TEST_TIMEOUT, device, own_address};

const LEN: usize = 64 << 10;
const TIMEOUT: u8 = 14;
const WRITTEN: u8 = 1;
const POISON: u8 = 2;
const CANARY: u8 = 3;
const BACKINGS: [Backing; 2] = [Backing::Shared, Backing::Private];

fn is_whole() -> bool {
    env::var_os("DOORBELL_SWEEP").is_some_and(|value| value == "all")
}

/// SplitMix64.
struct Random(u64);

impl Random {
    fn below(&mut self, end: u64) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut mixed = self.0;
        mixed = (mixed ^ mixed >> 30).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        mixed = (mixed ^ mixed >> 27).wrapping_mul(0x94d0_49bb_1331_11eb);
        (mixed ^ mixed >> 31) % end
    }
}

fn pair(devices: &[Arc<Device>; 2], backing: Backing) -> [Side; 2] {
    let [one, other] = devices.each_ref().map(|device| Side::with(device, LEN, backing));
    one.connect(other.key(), TIMEOUT);
    other.connect(one.key(), TIMEOUT);
    [one, other]
}

/// Each write fails as a whole, or is done before what it uses ends.
#[test]
fn registrations_and_queue_pairs_end_during_direct_writes() {
    // Of each backing: private memory is written directly while its target sleeps alone.
    let (rounds, writes) = if is_whole() {
        (20_000, [10_000_000, 100_000])
    } else {
        (300, [10_000; 2])
    };
    let address = own_address();
    let devices = [0, 1].map(|_| device(address, None));
    let (mut random, mut direct, mut round) = (Random(7), [0; 2], 0);
    let since = Instant::now();
    while round < rounds || direct.iter().zip(&writes).any(|(direct, writes)| direct < writes) {
        let kind = random.below(2) as usize;
        let [one, mut other] = pair(&devices, BACKINGS[kind]);
        let len = [8, 64, 4096, hammer_len(BACKINGS[kind])][random.below(4) as usize];
        other.memory.fill(0, LEN, CANARY);
        let (key, stop) = (other.key(), AtomicBool::new(false));
        let before = devices[0].counters().direct_requests;
        one.memory.fill(0, LEN, WRITTEN);
        let (action, delay) = (random.below(5), random.below(60_000));
        thread::scope(|scope| {
            scope.spawn(|| {
                while !stop.load(Ordering::Relaxed) {
                    one.write(1, 0, len, key);
                    if one.wait(1)[0].status != Status::Success {
                        return;
                    }
                }
            });
            (0..delay).for_each(|_| hint::spin_loop());
            match action {
                0 => drop(other.mr.take()),
                1 => {
                    // A region of the same memory with another key.
                    drop(other.mr.take());
                    other.register();
                }
                2 => other.fail(),
                3 => drop(other.qp.take()),
                _ => other.reregister_without_rights(),
            }
            other.memory.fill(0, len, POISON);
            // The writer meets the end, or finds no pair to write to any more.
            thread::sleep(Duration::from_micros(random.below(200)));
            one.fail();
            stop.store(true, Ordering::Relaxed);
        });
        assert!(
            other.memory.is_all(0, len, POISON) && other.memory.is_all(len, LEN - len, CANARY),
            "round {round}: action {action}, {len} bytes, {:?}",
            BACKINGS[kind]
        );
        direct[kind] += devices[0].counters().direct_requests - before;
        round += 1;
        assert!(
            is_whole() || since.elapsed() < TEST_TIMEOUT,
            "{round} rounds, {direct:?} direct writes"
        );
    }
}

/// A deregistration waits for the copy of a stopped initiator, and for no copy of a killed one.
#[test]
fn initiators_are_killed_or_stopped_during_direct_writes() {
    let rounds = if is_whole() { 300 } else { 12 };
    let address = own_address();
    let device = device(address, None);
    let mut random = Random(11);
    for round in 0..rounds {
        let backing = BACKINGS[round % 2];
        let mut side = Side::with(&device, LEN, backing);
        side.memory.fill(0, LEN, CANARY);
        let len = hammer_len(backing);
        let suffix = if backing == Backing::Private { PRIVATE } else { "" };
        let mut peer = Peer::start(address, None, &format!("hammer{suffix}"));
        peer.connect_side(&side);
        let since = Instant::now();
        while !side.memory.is_all(0, len, WRITTEN) {
            assert!(since.elapsed() < TEST_TIMEOUT);
            hint::spin_loop();
        }
        thread::sleep(Duration::from_micros(500 + random.below(3000)));
        let killed = random.below(2) == 0;
        peer.signal(if killed { Signal::SIGKILL } else { Signal::SIGSTOP });
        thread::scope(|scope| {
            if !killed {
                scope.spawn(|| {
                    thread::sleep(Duration::from_millis(20));
                    peer.signal(Signal::SIGCONT);
                });
            }
            drop(side.mr.take());
            side.memory.fill(0, len, POISON);
        });
        thread::sleep(Duration::from_millis(5));
        assert!(
            side.memory.is_all(0, len, POISON) && side.memory.is_all(len, LEN - len, CANARY),
            "round {round}, killed: {killed}"
        );
    }
}
