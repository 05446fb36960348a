//! Processes of this test program, killed or stopped while they copy, or are copied from.

use std::io::{BufRead, BufReader, Write};
use std::process::{Child, ChildStdin, ChildStdout, Command, Stdio};
use std::time::{Duration, Instant};
use std::{env, thread};

use doorbell_roce_proto::work::Status;
use doorbell_softroce::{CopyMode, Device, DeviceConfig};
use nix::sys::signal::{Signal, kill};
use nix::sys::wait::{WaitPidFlag, WaitStatus, waitpid};
use nix::unistd::Pid;

use super::side::{Backing, Key, Side, TEST_TIMEOUT, device, own_address};

const LEN: usize = 1 << 20;
const MESSAGES: usize = 16;
pub(super) const PRIVATE: &str = "-private";
const GOOD: u8 = 0x5a;
const POISON: u8 = 0xee;
/// 17 ms: with three retries a dead peer is detected after 70 ms; a busy one is not taken for dead.
const TIMEOUT: u8 = 12;
/// Half a second.
const LONG_TIMEOUT: u8 = 17;
/// Set for the peer process: its address, copy mode and task.
const ROLE: &str = "DOORBELL_TEST_LOCAL_PEER";
/// Marks a line as the peer's, among the test harness's output.
const ANSWER: &str = "peer: ";

/// What the task `hammer` writes, again and again.
pub(super) fn hammer_len(backing: Backing) -> usize {
    if backing == Backing::Private {
        16 << 10
    } else {
        64 << 10
    }
}

pub(super) struct Peer {
    process: Child,
    commands: ChildStdin,
    answers: BufReader<ChildStdout>,
}

impl Peer {
    /// With a copy mode, or all; a task that ends with `PRIVATE` uses private memory.
    pub(super) fn start(address: std::net::IpAddr, copy_mode: impl Into<Option<CopyMode>>, task: &str) -> Self {
        let copy_mode = copy_mode.into().map_or("all", CopyMode::name);
        let mut process = Command::new(env::current_exe().unwrap())
            .args(["--exact", "processes::peer", "--nocapture", "--include-ignored"])
            .env(ROLE, format!("{address} {copy_mode} {task}"))
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        Self {
            commands: process.stdin.take().unwrap(),
            answers: BufReader::new(process.stdout.take().unwrap()),
            process,
        }
    }

    pub(super) fn read_line(&mut self) -> String {
        loop {
            let mut line = String::new();
            assert_ne!(self.answers.read_line(&mut line).unwrap(), 0, "the peer is gone");
            // The harness prints the test's name in front of the first.
            if let Some(at) = line.find(ANSWER) {
                return line[at + ANSWER.len()..].trim().to_owned();
            }
        }
    }

    pub(super) fn send_line(&mut self, what: &str) {
        writeln!(self.commands, "{what}").unwrap();
    }

    pub(super) fn connect_side(&mut self, side: &Side) -> Key {
        let key = parse(&self.read_line());
        side.connect(key, TIMEOUT);
        let ours = side.key();
        self.send_line(&format!("{} {} {}", ours.qpn, ours.rkey, ours.addr));
        assert_eq!(self.read_line(), "ready");
        key
    }

    /// Returns when all of its threads have stopped.
    pub(super) fn stop(&self) {
        self.signal(Signal::SIGSTOP);
        let status = waitpid(self.pid(), Some(WaitPidFlag::WUNTRACED)).unwrap();
        assert!(matches!(status, WaitStatus::Stopped(..)), "{status:?}");
    }

    pub(super) fn pid(&self) -> Pid {
        Pid::from_raw(self.process.id() as i32)
    }

    pub(super) fn signal(&self, signal: Signal) {
        kill(self.pid(), signal).unwrap();
    }
}

impl Drop for Peer {
    fn drop(&mut self) {
        let _ = self.process.kill();
        let _ = self.process.wait();
    }
}

fn parse(line: &str) -> Key {
    let mut words = line.split_whitespace().map(|word| word.parse::<u64>().unwrap());
    let mut next = || words.next().unwrap();
    Key {
        qpn: next() as u32,
        rkey: next() as u32,
        addr: next(),
    }
}

/// The peer process; as a test it does nothing.
#[test]
#[ignore = "no test by itself, but the other process of those in this file, which start it and fail with it"]
fn peer() {
    let Ok(role) = env::var(ROLE) else {
        return;
    };
    let mut words = role.split_whitespace();
    let mut next = || words.next().unwrap();
    let (address, copy_mode, task) = (next().parse().unwrap(), next(), next());
    let copy_mode = CopyMode::ALL.into_iter().find(|known| known.name() == copy_mode);
    let device = device(address, copy_mode);
    let (task, backing) = match task.strip_suffix(PRIVATE) {
        Some(task) => (task, Backing::Private),
        None => (task, Backing::Shared),
    };
    let side = match task {
        "direct" | "hammer" => Side::with(&device, LEN, backing),
        _ => Side::new(&device, MESSAGES * LEN, copy_mode.unwrap()),
    };
    let key = side.key();
    println!("{ANSWER}{} {} {}", key.qpn, key.rkey, key.addr);
    let mut lines = std::io::stdin().lines();
    let them = parse(&lines.next().unwrap().unwrap());
    // Its timeouts are not tested when it writes; and its peer may not be scheduled for a while.
    side.connect(them, if task == "write" { LONG_TIMEOUT } else { TIMEOUT });
    if task == "receive" {
        (0..MESSAGES).for_each(|n| side.receive(n as u64, n * LEN, LEN));
    }
    if task == "direct" {
        side.receive(0, LEN - 64, 8);
    }
    println!("{ANSWER}ready");
    match task {
        // The byte that all of its memory has up to an offset, but the first word of atomics.
        "direct" => {
            let end: usize = lines.next().unwrap().unwrap().parse().unwrap();
            let byte = side.memory.word(8) as u8;
            let same = side.memory.is_all(8, end - 8, byte);
            println!("{ANSWER}{}", if same { byte } else { 0 });
            lines.next();
        }
        // The messages received until it is queried.
        "receive" => {
            lines.next();
            let done = side.poll();
            let good = done.iter().filter(|done| done.status == Status::Success);
            let wrong = good.filter(|done| !side.memory.is_all(done.wr_id as usize * LEN, LEN, GOOD));
            println!("{ANSWER}{}", wrong.count());
            lines.next();
        }
        "hammer" => {
            let len = hammer_len(backing);
            side.memory.fill(0, len, 1);
            loop {
                side.write(0, 0, len, them);
                side.wait(1);
            }
        }
        "write" => {
            side.memory.fill(0, MESSAGES * LEN, GOOD);
            let mut busy = 0;
            loop {
                while busy < MESSAGES {
                    side.write(0, busy * LEN, LEN, them);
                    busy += 1;
                }
                busy -= side.wait(1).len();
            }
        }
        // Its progress thread serves the rest.
        _ => drop(lines.next()),
    }
}

/// Writes until the peer no longer responds, which must be detected in time.
fn write_until_lost(side: &Side, peer: Key, within: Duration) {
    let mut last = Instant::now();
    loop {
        (0..MESSAGES).for_each(|n| side.write(0, n * LEN, LEN, peer));
        let done = side.wait(MESSAGES);
        if let Some(failed) = done.iter().find(|done| done.status != Status::Success) {
            assert_eq!(failed.status, Status::RetryExceeded);
            assert!(last.elapsed() < within);
            return;
        }
        last = Instant::now();
    }
}

#[test]
fn a_killed_receiver_affects_only_its_connection() {
    for copy_mode in CopyMode::ALL {
        let address = own_address();
        let device = device(address, copy_mode);
        let (mut side, other) = (
            Side::new(&device, MESSAGES * LEN, copy_mode),
            Side::new(&device, MESSAGES * LEN, copy_mode),
        );
        let (mut doomed, mut survivor) = (
            Peer::start(address, copy_mode, "serve"),
            Peer::start(address, copy_mode, "serve"),
        );
        let (key, survivor_key) = (doomed.connect_side(&side), survivor.connect_side(&other));
        let killer = thread::spawn(move || {
            thread::sleep(Duration::from_millis(20));
            doomed.signal(Signal::SIGKILL);
            doomed
        });
        write_until_lost(&side, key, TEST_TIMEOUT);
        // Nothing waits for a dead peer.
        drop(side.mr.take());
        drop(side.qp.take());
        drop(killer.join().unwrap());
        other.write(7, 0, LEN, survivor_key);
        assert_eq!(other.wait(1)[0].status, Status::Success);
        survivor.send_line("done");
    }
}

/// Dead since it sent its number: what is sent to it is not acknowledged.
#[test]
fn an_undetected_dead_peer_can_be_connected_to() {
    let address = own_address();
    // The port holder would detect it, as it has a connection with all.
    let mut holder = Peer::start(address, CopyMode::Ring, "serve");
    holder.read_line();
    let config = DeviceConfig {
        address: Some(address),
        ..DeviceConfig::new("soft0")
    };
    let side = Side::new(&Device::open(&config).unwrap(), LEN, CopyMode::Ring);
    let mut doomed = Peer::start(address, CopyMode::Ring, "serve");
    let key = parse(&doomed.read_line());
    holder.signal(Signal::SIGSTOP);
    drop(doomed);
    side.connect(key, TIMEOUT);
    side.write(1, 0, LEN, key);
    assert_eq!(side.wait(1)[0].status, Status::RetryExceeded);
}

#[test]
fn a_killed_sender_leaves_no_trace() {
    for copy_mode in CopyMode::ALL {
        let address = own_address();
        let device = device(address, copy_mode);
        let side = Side::new(&device, MESSAGES * LEN, copy_mode);
        let mut doomed = Peer::start(address, copy_mode, "write");
        doomed.connect_side(&side);
        // It writes; then it is killed, in the middle of something.
        let since = Instant::now();
        while !side.memory.is_all((MESSAGES - 1) * LEN, LEN, GOOD) {
            assert!(since.elapsed() < TEST_TIMEOUT);
        }
        doomed.signal(Signal::SIGKILL);
        drop(doomed);
        let (a, b) = (Side::new(&device, LEN, copy_mode), Side::new(&device, LEN, copy_mode));
        a.connect(b.key(), TIMEOUT);
        b.connect(a.key(), TIMEOUT);
        a.memory.fill(0, LEN, 3);
        a.write(1, 0, LEN, b.key());
        assert_eq!(a.wait(1)[0].status, Status::Success);
        assert!(b.memory.is_all(0, LEN, 3));
    }
}

/// The sender ends its queue pair and gets its memory back; what is copied then is no message.
#[test]
fn a_stopped_receiver_does_not_block_the_sender() {
    for copy_mode in CopyMode::ALL {
        for round in 0..4 {
            let address = own_address();
            let device = device(address, copy_mode);
            let mut side = Side::new(&device, MESSAGES * LEN, copy_mode);
            side.memory.fill(0, MESSAGES * LEN, GOOD);
            let mut stopped = Peer::start(address, copy_mode, "receive");
            stopped.connect_side(&side);
            (0..MESSAGES).for_each(|n| side.send(n as u64, n * LEN, LEN));
            let since = Instant::now();
            while since.elapsed() < Duration::from_micros(50 + 150 * round) {
                side.cq.poll(0, |_| {}).unwrap();
            }
            stopped.signal(Signal::SIGSTOP);
            side.fail();
            let done = side.wait(MESSAGES);
            drop(side.mr.take());
            side.memory.fill(0, MESSAGES * LEN, POISON);
            let failed = done.iter().filter(|done| done.status != Status::Success).count();
            stopped.signal(Signal::SIGCONT);
            stopped.send_line("report");
            assert_eq!(
                stopped.read_line(),
                "0",
                "{copy_mode:?}: messages that are wrong, {failed} failed"
            );
            stopped.send_line("done");
        }
    }
}
