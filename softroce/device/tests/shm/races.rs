//! Memory and queue pairs destroyed while peers copy: what is copied then is never a message.

use std::time::{Duration, Instant};

use doorbell_roce_proto::qp::{Modify, State};
use doorbell_roce_proto::work::Status;
use doorbell_softroce::CopyMode;

use super::side::{Key, Side, device, own_address};

/// Bytes of a message: two packets of a shm link.
const LEN: usize = 512 << 10;
/// The most payload bytes of a shm packet.
const PACKET: usize = 256 << 10;
const MESSAGES: usize = 8;
const ROUNDS: u64 = 60;
/// The content of memory that the application owns again; no round's pattern.
const POISON: u8 = 0xee;
const TIMEOUT: u8 = 10;

/// How packets in flight lose their memory.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum End {
    Deregistered,
    Reset,
    Error,
    Destroyed,
}

fn pattern(round: u64) -> u8 {
    (round % 200) as u8 + 1
}

fn delay(round: u64) {
    let (since, wait) = (Instant::now(), Duration::from_micros(round * 7 % 300));
    while since.elapsed() < wait {
        std::hint::spin_loop();
    }
}

impl Side {
    fn end(&mut self, end: End) {
        let into = |state| Modify {
            state: Some(state),
            ..Modify::default()
        };
        match end {
            End::Deregistered => drop(self.mr.take()),
            End::Reset => self.qp().modify(&into(State::Reset)).unwrap(),
            End::Error => self.qp().modify(&into(State::Err)).unwrap(),
            End::Destroyed => drop(self.qp.take()),
        }
        self.memory.fill(0, MESSAGES * LEN, POISON);
    }
}

/// `post` makes one side send from its memory, which then `end`s; `check` examines the other.
fn rounds(copy_mode: CopyMode, end: End, post: impl Fn(&Side, &Side, (Key, Key)), check: impl Fn(&Side, &Side, u8)) {
    let address = own_address();
    let (local, remote) = (device(address, copy_mode), device(address, copy_mode));
    for round in 0..ROUNDS {
        let mut a = Side::new(&local, MESSAGES * LEN, copy_mode);
        let b = Side::new(&remote, MESSAGES * LEN, copy_mode);
        let keys = (a.key(), b.key());
        a.connect(keys.1, TIMEOUT);
        b.connect(keys.0, TIMEOUT);
        a.memory.fill(0, MESSAGES * LEN, pattern(round));
        b.memory.fill(0, MESSAGES * LEN, 0);
        post(&a, &b, keys);
        delay(round);
        a.end(end);
        check(&a, &b, pattern(round));
    }
}

/// Until nothing has completed for 3 ms.
fn drain_completions(side: &Side, mut seen: impl FnMut(u64)) {
    let mut since = Instant::now();
    while since.elapsed() < Duration::from_millis(3) {
        for completion in side.poll() {
            since = Instant::now();
            if completion.status == Status::Success {
                seen(completion.wr_id);
            }
        }
    }
}

fn sends(copy_mode: CopyMode, end: End) {
    rounds(
        copy_mode,
        end,
        |a, b, _| {
            (0..MESSAGES).for_each(|n| b.receive(n as u64, n * LEN, LEN));
            (0..MESSAGES).for_each(|n| a.send(n as u64, n * LEN, LEN));
        },
        |_, b, pattern| {
            drain_completions(b, |message| {
                let whole = b.memory.is_all(message as usize * LEN, LEN, pattern);
                assert!(whole, "{copy_mode:?}, {end:?}: message {message} is not what was sent");
            });
        },
    );
}

#[test]
fn messages_are_whole_or_never_happen() {
    for copy_mode in CopyMode::ALL {
        for end in [End::Deregistered, End::Reset, End::Error, End::Destroyed] {
            sends(copy_mode, end);
        }
    }
}

/// The last bytes of a WRITE appear after all others, also of one that is cut off.
#[test]
fn the_last_bytes_of_a_write_appear_last() {
    for copy_mode in CopyMode::ALL {
        rounds(
            copy_mode,
            End::Deregistered,
            |a, _, (_, b)| (0..MESSAGES).for_each(|n| a.write(n as u64, n * LEN, PACKET, b)),
            |a, b, pattern| {
                a.wait(MESSAGES);
                for n in 0..MESSAGES {
                    let last = b.memory.is_all(n * LEN + PACKET - 8, 8, pattern);
                    assert!(
                        !last || b.memory.is_all(n * LEN, PACKET, pattern),
                        "{copy_mode:?}: WRITE {n}"
                    );
                }
            },
        );
    }
}

#[test]
fn reads_are_whole_or_fail() {
    for copy_mode in CopyMode::ALL {
        for end in [End::Deregistered, End::Destroyed] {
            rounds(
                copy_mode,
                end,
                |_, b, (a, _)| (0..MESSAGES).for_each(|n| b.read(n as u64, n * LEN, LEN, a)),
                |_, b, pattern| {
                    for done in b.wait(MESSAGES) {
                        let whole = b.memory.is_all(done.wr_id as usize * LEN, LEN, pattern);
                        assert!(
                            done.status != Status::Success || whole,
                            "{copy_mode:?}, {end:?}: READ {}",
                            done.wr_id
                        );
                    }
                },
            );
        }
    }
}
