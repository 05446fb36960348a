//! A target process that is stopped serves WRITE, READ and atomics, as an adapter involves no
//! thread of it. On soft devices both processes share an address.

use std::env;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use doorbell_verbs::exchange::{Exchange, Listener};
use doorbell_verbs::{AllAccess, Memory, PeerAll, QueueKind, QueuePair, QueuePairBuilder, Remote};
use nix::sys::signal::{Signal, kill};
use nix::sys::wait::{WaitPidFlag, WaitStatus, waitpid};
use nix::unistd::Pid;

use crate::{Side, TIMEOUT};

/// The role of the target: the initiator's process id, and the port at which it listens.
const TARGET: &str = "DOORBELL_TEST_STOPPED";
const LEN: usize = 1 << 20;
/// The word of the atomics, behind what is written.
const WORD: u64 = LEN as u64;
/// A request that has not completed by then waits for the target.
const PROMPT: Duration = Duration::from_secs(2);
/// The first requests between two processes may go through the target's ring.
const ATTEMPTS: u32 = 10;

fn all(builder: QueuePairBuilder<'_>) -> QueuePairBuilder<'_> {
    builder
        .allow_remote_read()
        .allow_remote_write()
        .allow_remote_atomic()
        .max_rd_atomic(4)
}

/// Continues and kills the target when dropped.
struct Target(Child);

impl Target {
    fn signal(&self, signal: Signal) {
        kill(self.pid(), signal).unwrap();
    }

    fn pid(&self) -> Pid {
        Pid::from_raw(self.0.id().cast_signed())
    }

    /// Returns when all its threads are stopped, some time after the signal: one that still runs
    /// could execute a request.
    fn stop(&self) {
        self.signal(Signal::SIGSTOP);
        let status = waitpid(self.pid(), Some(WaitPidFlag::WUNTRACED)).unwrap();
        assert!(matches!(status, WaitStatus::Stopped(..)), "{status:?}");
    }
}

impl Drop for Target {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

#[test]
fn a_stopped_target_serves_every_operation() {
    let listener = Listener::bind("127.0.0.1:0").unwrap();
    let role = format!("{} {}", std::process::id(), listener.local_addr().port());
    let target = Command::new(env::current_exe().unwrap())
        .args(["--exact", "stopped::target", "--ignored", "--nocapture"])
        .env(TARGET, role)
        .stdout(Stdio::null())
        .spawn()
        .unwrap();
    let mut target = Target(target);
    let mut side = Side::new(0);
    let prepared = all(side.builder()).rc().unwrap();
    let mut exchange = listener.accept(TIMEOUT).unwrap();
    let (mut qp, key) = exchange.pair(prepared, b"").unwrap();
    let memory: Remote<AllAccess> = Remote::from_bytes(&key).unwrap();

    let served = (0..ATTEMPTS).any(|_| {
        target.stop();
        let byte = side.buffer(1);
        qp.post(|batch| {
            batch.write(byte, memory.slice(0, 1).unwrap()).signaled();
        })
        .unwrap();
        let served = completes(&mut side);
        if !served {
            target.signal(Signal::SIGCONT);
            side.next(QueueKind::Send, |completion| completion.result().unwrap());
        }
        served
    });
    assert!(served, "a WRITE waits for its stopped target");
    let sizes = (0..=20).map(|bits| 1_usize << bits);
    for (byte, len) in (1..).zip(sizes) {
        transfer(&mut side, &mut qp, memory, len, byte);
    }
    atomics(&mut side, &mut qp, memory);
    target.signal(Signal::SIGCONT);
    exchange.finish().unwrap();
    assert!(
        target.0.wait().unwrap().success(),
        "the bytes are not in the target's memory"
    );
}

/// Whether the one outstanding request completes soon.
fn completes(side: &mut Side) -> bool {
    let deadline = Instant::now() + PROMPT;
    while Instant::now() < deadline {
        if let Some(completion) = side.cq.poll().unwrap().next() {
            completion.result().unwrap();
            return true;
        }
    }
    false
}

/// WRITE and READ of `len` bytes, each checked.
fn transfer(side: &mut Side, qp: &mut QueuePair, memory: Remote<AllAccess>, len: usize, byte: u8) {
    let there = memory.slice(0, len as u64).unwrap();
    let mut message = side.buffer(len);
    message.fill(byte);
    qp.post(|batch| {
        batch.write(message, there).signaled();
    })
    .unwrap();
    side.next(QueueKind::Send, |completion| completion.result().unwrap());
    let into = side.buffer(len);
    qp.post(|batch| {
        batch.read(into, there).signaled();
    })
    .unwrap();
    side.next(QueueKind::Send, |completion| {
        completion.result().unwrap();
        let read: doorbell_verbs::Buffer = completion.take().unwrap();
        assert!(read.iter().all(|&found| found == byte), "{len} bytes");
    });
}

fn atomics(side: &mut Side, qp: &mut QueuePair, memory: Remote<AllAccess>) {
    let there = memory.word(WORD).unwrap();
    let mut before = |qp: &mut QueuePair, swap: Option<(u64, u64)>| {
        let word = side.buffer(8).into_word().unwrap();
        qp.post(|batch| {
            if let Some((compare, swap)) = swap {
                batch.compare_swap(word, there, compare, swap).signaled();
            } else {
                batch.fetch_add(word, there, 5).signaled();
            }
        })
        .unwrap();
        let mut found = 0;
        side.next(QueueKind::Send, |completion| {
            completion.result().unwrap();
            found = completion.take_word().unwrap().get();
        });
        found
    };
    assert_eq!(before(qp, None), 0);
    assert_eq!(before(qp, Some((5, 42))), 5);
    assert_eq!(before(qp, Some((5, 1))), 42, "not swapped");
}

#[test]
#[ignore = "the target of a_stopped_target_serves_every_operation, which starts it"]
fn target() {
    let role = env::var(TARGET).expect("started by the other test");
    let (initiator, port) = role.split_once(' ').unwrap();
    let side = Side::of(initiator.parse().unwrap(), 0);
    let memory = Memory::shared(LEN + 8).unwrap();
    let memory = side.pd.register(memory, PeerAll).unwrap();
    let mut exchange = Exchange::connect(format!("127.0.0.1:{port}"), TIMEOUT).unwrap();
    let prepared = all(side.builder()).rc().unwrap();
    let (_qp, _) = exchange.pair(prepared, &memory.remote().to_bytes()).unwrap();
    exchange.finish().unwrap();
    let mut found = vec![0; LEN + 8];
    memory.read_at(0, &mut found);
    assert!(found[..LEN].iter().all(|&byte| byte == 21));
    assert_eq!(found[LEN..], 42_u64.to_ne_bytes());
}
