//! An executable specification of a reliable connection in one direction, checked in lock step
//! against the engine over every schedule of small scenarios: what the network does with each
//! packet, when timers expire, when receives are posted, when the responder sends. Windows and PSNs
//! are chosen so that PSNs wrap and the window fills.
//!
//! After every step of every schedule:
//!
//! - each message is delivered exactly once, in order: the responder has executed the packets that
//!   the specification has, and has completed the receives of those;
//! - requests complete once, in order, successfully, and only when a response permitted it;
//! - no byte is written but those of executed packets: every region of both ends is compared whole;
//! - packets are within the window and the number of outstanding READs; responses acknowledge
//!   nothing that is not executed.
//!
//! There is no deadlock and no livelock: faults are bounded, no state recurs in its own future, and
//! where nothing more can happen all requests are complete and nothing is left. So from each state
//! the end is reached once packets are no longer lost.

mod util;

#[path = "spec/explore.rs"]
mod explore;
#[path = "spec/model.rs"]
mod model;

use std::env;

use explore::{Scenario, explore};
use model::Op;

const OPS: [Op; 8] = [
    Op::Send(1),
    Op::Send(3),
    Op::Write(2),
    Op::WriteImm(2),
    Op::Read(1),
    Op::Read(3),
    Op::FetchAdd,
    Op::AtomicWrite,
];

/// Whether all scenarios are explored, with the most faults, and not a selection.
fn is_whole() -> bool {
    env::var_os("DOORBELL_SWEEP").is_some_and(|value| value == "all")
}

fn up_to(whole: usize) -> usize {
    whole - usize::from(!is_whole())
}

/// Every sequence of `len` of the operations.
fn sequences(len: u32) -> impl Iterator<Item = Vec<Op>> {
    let op = |number: usize, at: u32| OPS[number / OPS.len().pow(at) % OPS.len()];
    (0..OPS.len().pow(len)).map(move |number| (0..len).map(|at| op(number, at)).collect())
}

/// One of `by` of them, unless all are explored.
fn some<T>(by: usize, all: impl Iterator<Item = T>) -> impl Iterator<Item = T> {
    all.step_by(if is_whole() { 1 } else { by })
}

fn check(name: &str, scenarios: impl Iterator<Item = Scenario>) {
    let (mut count, mut states, mut ends) = (0, 0, 0);
    for scenario in scenarios {
        let (of_states, of_ends) = explore(&scenario);
        (count, states, ends) = (count + 1, states + of_states, ends + of_ends);
    }
    println!("{name}: {count} scenarios, {states} states, {ends} ends");
    assert!(ends >= count && states > 10 * count);
}

#[test]
fn one_message_with_three_faults() {
    check(
        "one message",
        sequences(1).flat_map(|ops| {
            [2, 4].map(|window| Scenario {
                ops: ops.clone(),
                window,
                max_reads: 1,
                faults: up_to(3),
                late_receives: false,
                lazy: false,
            })
        }),
    );
}

#[test]
fn two_messages_with_two_faults() {
    check(
        "two messages",
        sequences(2).flat_map(|ops| {
            [2, 4].map(|window| Scenario {
                ops: ops.clone(),
                window,
                max_reads: 2,
                faults: up_to(2),
                late_receives: false,
                lazy: false,
            })
        }),
    );
}

#[test]
fn three_messages_with_one_fault() {
    check(
        "three messages",
        some(16, sequences(3)).map(|ops| Scenario {
            ops,
            window: 4,
            max_reads: 1,
            faults: 1,
            late_receives: false,
            lazy: false,
        }),
    );
}

/// ACKs coalesce, and receives are posted late.
#[test]
fn two_messages_to_a_slow_responder() {
    for (lazy, late_receives) in [(true, false), (false, true)] {
        let concerned = |ops: &Vec<Op>| !late_receives || ops.iter().any(|op| op.receives());
        check(
            "slow responder",
            some(6, sequences(2).filter(concerned)).map(|ops| Scenario {
                ops,
                window: 3,
                max_reads: 2,
                faults: 1,
                late_receives,
                lazy,
            }),
        );
    }
}
