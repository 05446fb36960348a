//! Plans with one flaw each, and the flaw that the checker reports.

use super::{At, Fault, Flaw, Wait, Why, prove};
use crate::plan::{BlockForm, Collective, Plan, PlanMemory};
use crate::types::Rank;

fn flaw(text: &str) -> Flaw {
    let plan: Plan = text.parse().expect("a plan");
    prove(&plan).expect_err("a flaw")
}

fn at(rank: u32, strand: u32, step: u32) -> At {
    At::Step {
        rank: Rank(rank),
        strand,
        step,
    }
}

/// A plan between two ranks, with so many blocks and these programs.
fn two(collective: &str, blocks: u32, programs: [&str; 2]) -> String {
    let [first, second] = programs;
    format!("{collective}\norder 0 1\nroot 0\nblocks {blocks}\nrank 0\n{first}\nrank 1\n{second}\n")
}

#[test]
fn a_contribution_that_comes_twice() {
    let text = two(
        "reduce",
        1,
        [
            "partial 0 \n strand 0 \n recv-reduce element from 1 with input[0] into partial[0] \n reduce partial[0] input[0] into output[0]",
            "strand 0 \n send input[0] to 0",
        ],
    );
    let fault = Fault::Twice {
        contributor: Rank(0),
        data: 0,
    };
    assert_eq!(flaw(&text), Flaw { at: at(0, 0, 1), fault });
}

#[test]
fn a_contribution_that_never_comes() {
    let text = two(
        "allreduce",
        1,
        ["strand 0 \n reduce input[0] into output[0]", "strand 0"],
    );
    let fault = Fault::Lacks {
        data: 0,
        contributor: Rank(1),
    };
    assert_eq!(flaw(&text), Flaw { at: at(0, 0, 0), fault });
}

#[test]
fn a_contribution_taken_for_a_result() {
    let text = two("allreduce", 1, ["strand 0 \n copy input[0] into output[0]", "strand 0"]);
    let fault = Fault::Place {
        place: PlanMemory::Output,
        what: "what lacks contributions",
    };
    assert_eq!(flaw(&text), Flaw { at: at(0, 0, 0), fault });
}

#[test]
fn a_result_that_is_reduced_further() {
    let reduce = "strand 0 \n send input[0] to 1 \n recv-reduce element from 1 with input[0] into output[0]";
    let again = "partial 0 \n strand 0 \n send input[0] to 0 \n recv-reduce element from 0 with input[0] into output[0] \n reduce output[0] into partial[0]";
    assert_eq!(flaw(&two("allreduce", 1, [reduce, again])).fault, Fault::Whole(0));
}

#[test]
fn different_blocks_reduced_with_each_other() {
    let text = two(
        "allreduce",
        2,
        [
            "partial 0 \n strand 0 \n reduce input[0] input[1] into partial[0]",
            "strand 0",
        ],
    );
    assert_eq!(
        flaw(&text),
        Flaw {
            at: at(0, 0, 0),
            fault: Fault::DifferentBlocks(0, 1)
        }
    );
}

#[test]
fn a_reduction_of_what_is_not_reduced() {
    let text = two(
        "broadcast",
        1,
        ["strand 0 \n reduce input[0] into output[0]", "strand 0"],
    );
    assert_eq!(flaw(&text).fault, Fault::Reduces(Collective::Broadcast));
    let text = two(
        "allreduce",
        1,
        ["partial 0 \n strand 0 \n reduce into partial[0]", "strand 0"],
    );
    assert_eq!(flaw(&text).fault, Fault::NoSources);
}

#[test]
fn a_read_before_a_write() {
    let text = two(
        "broadcast",
        1,
        [
            "strand 0 \n send output[0] to 1 \n copy input[0] into output[0]",
            "strand 0 \n recv output[0] from 0",
        ],
    );
    let fault = Fault::Undefined {
        place: PlanMemory::Output,
        block: 0,
    };
    assert_eq!(flaw(&text), Flaw { at: at(0, 0, 0), fault });
}

#[test]
fn an_output_that_is_not_written_or_is_another_block() {
    let good = "strand 0 \n send input[0..2] to 1 \n copy input[0..2] into output[0..2]";
    let text = two(
        "broadcast",
        2,
        [
            good,
            "scratch 0 1 \n strand 0 \n recv scratch[0..2] from 0 \n copy scratch[0] into output[0]",
        ],
    );
    let fault = Fault::Undefined {
        place: PlanMemory::Output,
        block: 1,
    };
    assert_eq!(
        flaw(&text),
        Flaw {
            at: At::End { rank: Rank(1) },
            fault
        }
    );
    let text = two(
        "sendrecv",
        1,
        [
            "strand 0 \n send input[0] to 1 \n recv output[0] from 1",
            "strand 0 \n copy input[0] into output[0] \n send input[0] to 0 \n recv output[0] from 0",
        ],
    );
    assert!(
        prove(&text.parse().expect("a plan")).is_ok(),
        "what is overwritten in time is no harm"
    );
    let text = two("sendrecv", 1, ["strand 0 \n copy input[0] into output[0]", "strand 0"]);
    let fault = Fault::Wrong {
        block: 0,
        found: 0,
        expected: 1,
    };
    assert_eq!(
        flaw(&text),
        Flaw {
            at: At::End { rank: Rank(0) },
            fault
        }
    );
}

#[test]
fn a_block_that_is_not_as_long() {
    let text = two(
        "broadcast",
        2,
        ["scratch 1 \n strand 0 \n copy input[0] into scratch[0]", "strand 0"],
    );
    let fault = Fault::Length {
        data: 0,
        place: PlanMemory::Scratch,
        block: 0,
        length_of: 1,
    };
    assert_eq!(flaw(&text), Flaw { at: at(0, 0, 0), fault });
}

#[test]
fn a_step_that_writes_the_input() {
    let text = two(
        "sendrecv",
        1,
        [
            "strand 0 \n send input[0] to 1 \n recv input[0] from 1",
            "strand 0 \n send input[0] to 0 \n recv output[0] from 0",
        ],
    );
    let fault = Fault::Place {
        place: PlanMemory::Input,
        what: "what the rank gets",
    };
    assert_eq!(flaw(&text).fault, fault);
}

#[test]
fn blocks_that_there_are_not() {
    for (span, block) in [
        ("input[1]", 1),
        ("input[0..2]", 1),
        ("input[4294967294..4294967295]", u32::MAX - 1),
    ] {
        let text = two(
            "sendrecv",
            1,
            [&format!("strand 0 \n copy {span} into output[0]"), "strand 0"],
        );
        let fault = Fault::NoBlock {
            place: PlanMemory::Input,
            block,
            blocks: 1,
        };
        assert_eq!(flaw(&text), Flaw { at: at(0, 0, 0), fault });
    }
}

#[test]
fn unmatched_messages() {
    let text = two("barrier", 0, ["strand 0 \n send nothing to 1", "strand 0"]);
    let fault = Fault::Unmatched {
        from: Rank(0),
        to: Rank(1),
        sent: 1,
        received: 0,
    };
    assert_eq!(flaw(&text), Flaw { at: at(0, 0, 0), fault });
    let text = two("barrier", 0, ["strand 0", "strand 0 \n recv nothing from 0"]);
    let fault = Fault::Unmatched {
        from: Rank(0),
        to: Rank(1),
        sent: 0,
        received: 1,
    };
    assert_eq!(flaw(&text), Flaw { at: at(1, 0, 0), fault });
    for peer in [0, 2] {
        let text = two(
            "barrier",
            0,
            [&format!("strand 0 \n send nothing to {peer}"), "strand 0"],
        );
        assert_eq!(
            flaw(&text),
            Flaw {
                at: at(0, 0, 0),
                fault: Fault::Peer(Rank(peer))
            }
        );
    }
    let text = two(
        "broadcast",
        2,
        ["strand 0 \n send input[0..2] to 1", "strand 0 \n recv output[0] from 0"],
    );
    assert_eq!(
        flaw(&text),
        Flaw {
            at: at(1, 0, 0),
            fault: Fault::Blocks { from: 2, into: 1 }
        }
    );
    let text = two(
        "reduce",
        1,
        [
            "partial 0 \n strand 0 \n recv partial[0] from 1",
            "strand 0 \n send input[0] to 0",
        ],
    );
    let fault = Fault::FormMismatch {
        from: Rank(1),
        sent: BlockForm::Element,
        expected: BlockForm::Partial,
    };
    assert_eq!(flaw(&text), Flaw { at: at(0, 0, 0), fault });
}

#[test]
fn ranks_that_wait_in_a_cycle() {
    let text = two(
        "sendrecv",
        1,
        [
            "strand 0 \n recv output[0] from 1 \n send input[0] to 1",
            "strand 0 \n recv output[0] from 0 \n send input[0] to 0",
        ],
    );
    let Fault::Cycle(waits) = flaw(&text).fault else {
        panic!("no cycle")
    };
    let wait = |rank, peer, why| Wait {
        rank: Rank(rank),
        strand: 0,
        step: 0,
        peer: Rank(peer),
        why,
    };
    assert_eq!(waits, [wait(0, 1, Why::Message), wait(1, 0, Why::Message)]);
}

#[test]
fn more_messages_on_their_way_than_there_is_room_for() {
    let flood = |peer| {
        format!(
            "strand 0 \n send nothing to {peer} \n send nothing to {peer} \n recv nothing from {peer} \n recv nothing from {peer}"
        )
    };
    let Fault::Cycle(waits) = flaw(&two("barrier", 0, [&flood(1), &flood(0)])).fault else {
        panic!("no cycle")
    };
    assert!(
        waits.len() == 2 && waits.iter().all(|wait| wait.why == Why::QueueSlot && wait.step == 1),
        "{waits:?}"
    );
}

#[test]
fn a_message_that_is_staged_only_after_another_has_come() {
    let plan = |first: &str, second: &str| {
        format!(
            "allreduce\norder 0 1 2\nroot 0\nblocks 1\n\
             rank 0\nscratch 0\nstrand 0\ncopy input[0] into scratch[0]\nsend scratch[0] to 1\ncopy input[0] into scratch[0]\nsend nothing to 2\n\
             rank 1\npartial 0\nstrand 0\n{first}\n{second}\n\
             rank 2\nstrand 0\nrecv nothing from 0\nsend nothing to 1\n"
        )
    };
    let (reduce, other) = (
        "recv-reduce element from 0 with input[0] into partial[0]",
        "recv nothing from 2",
    );
    let wait = |rank, step, peer, why| Wait {
        rank: Rank(rank),
        strand: 0,
        step,
        peer: Rank(peer),
        why,
    };
    let Fault::Cycle(mut waits) = flaw(&plan(other, reduce)).fault else {
        panic!("no cycle")
    };
    waits.sort_by_key(|wait| wait.rank);
    assert_eq!(
        waits,
        [
            wait(0, 2, 1, Why::Overwrite),
            wait(1, 0, 2, Why::Message),
            wait(2, 0, 0, Why::Message)
        ]
    );
    // In the other order it completes, and no rank has a result.
    let end = Flaw {
        at: At::End { rank: Rank(0) },
        fault: Fault::Undefined {
            place: PlanMemory::Output,
            block: 0,
        },
    };
    assert_eq!(flaw(&plan(reduce, other)), end);
}

#[test]
fn an_exchange_through_the_memory_that_is_being_sent() {
    let text = "allreduce in place\norder 0 1\nroot 0\nblocks 2\n\
                rank 0\nscratch 0 1\nstrand 0\nsend input[0..2] to 1\nrecv scratch[0..2] from 1\nreduce input[0..2] scratch[0..2] into output[0..2]\n\
                send output[0..2] to 1\nrecv output[0..2] from 1\n\
                rank 1\nscratch 0 1\nstrand 0\nsend input[0..2] to 0\nrecv scratch[0..2] from 0\nreduce input[0..2] scratch[0..2] into output[0..2]\n\
                send output[0..2] to 0\nrecv output[0..2] from 0\n";
    let Fault::Cycle(waits) = flaw(text).fault else {
        panic!("no cycle")
    };
    assert!(
        waits.len() == 2 && waits.iter().all(|wait| wait.why == Why::Overwrite && wait.step == 4),
        "{waits:?}"
    );
}

#[test]
fn what_is_safe_apart_and_not_in_place() {
    let rank = |rank, peer| {
        format!(
            "rank {rank}\nscratch 0 1\nstrand 0\nsend input[0..2] to {peer}\nrecv scratch[0..2] from {peer}\nreduce input[0] scratch[0] into output[0]\nreduce input[1] scratch[1] into output[1]\n"
        )
    };
    let plan = |twice: &str| {
        format!(
            "allreduce in place\norder 0 1\nroot 0\nblocks 2\n{}{}{twice}",
            rank(0, 1),
            rank(1, 0)
        )
    };
    assert!(prove(&plan("").parse().expect("a plan")).is_ok_and(|proof| proof.in_place));
    let twice = plan("reduce input[0] scratch[0] into output[0]\n");
    assert!(prove(&twice.replace(" in place", "").parse().expect("a plan")).is_ok_and(|proof| !proof.in_place));
    assert_eq!(
        flaw(&twice),
        Flaw {
            at: at(1, 0, 4),
            fault: Fault::Whole(0)
        }
    );
    let exchange = |own, peer| {
        format!(
            "strand 0 \n send input[{peer}] to {peer} \n copy input[{own}] into output[{own}] \n recv output[{peer}] from {peer}"
        )
    };
    let good = two("alltoall", 1, [&exchange(0, 1), &exchange(1, 0)]);
    assert!(prove(&good.parse().expect("a plan")).is_ok_and(|proof| !proof.in_place));
    let fault = Fault::Shape("this collective does not run in place");
    assert_eq!(
        flaw(&good.replace("alltoall", "alltoall in place")),
        Flaw { at: At::Plan, fault }
    );
}

#[test]
fn strands_that_share_what_one_writes() {
    let root = "strand 0 \n send input[0] to 1 \n strand 1 \n copy input[0] into output[0]";
    let good = two("broadcast", 1, [root, "strand 0 \n recv output[0] from 0 \n strand 1"]);
    assert!(
        prove(&good.parse().expect("a plan")).is_ok(),
        "both only read the input"
    );
    let read = "scratch 0 \n strand 0 \n copy output[0] into scratch[0] \n strand 1 \n recv output[0] from 0";
    let text = two(
        "broadcast",
        1,
        [
            "strand 0 \n copy input[0] into output[0] \n strand 1 \n send input[0] to 1",
            read,
        ],
    );
    let shared = |strands| Fault::Shared {
        strands,
        block: 0,
        place: PlanMemory::Output,
    };
    assert_eq!(
        flaw(&text),
        Flaw {
            at: at(1, 0, 0),
            fault: shared((1, 0))
        }
    );
    // In place, one strand sends the blocks that the other writes.
    let both = |peer| {
        format!(
            "scratch 0 0\nstrand 0\nsend input[0] to {peer}\nrecv scratch[0] from {peer}\nreduce input[0] scratch[0] into output[0]\nstrand 1\nsend input[0] to {peer}\nrecv scratch[1] from {peer}"
        )
    };
    let good = two("allreduce", 1, [&both(1), &both(0)]);
    assert!(prove(&good.parse().expect("a plan")).is_ok());
    assert_eq!(
        flaw(&good.replace("allreduce", "allreduce in place")).fault,
        shared((0, 1))
    );
    let text = two(
        "sendrecv",
        1,
        [
            "strand 0 \n copy input[0] into output[0] \n strand 1 \n copy input[0] into output[0]",
            "strand 0 \n strand 1",
        ],
    );
    assert!(matches!(
        flaw(&text).fault,
        Fault::Shared {
            place: PlanMemory::Output,
            ..
        }
    ));
}

#[test]
fn spans_that_overlap() {
    let text = two(
        "sendrecv",
        3,
        [
            "scratch 0 1 2 \n strand 0 \n copy input[0..3] into scratch[0..3] \n copy scratch[0..2] into scratch[1..3]",
            "strand 0",
        ],
    );
    assert_eq!(
        flaw(&text),
        Flaw {
            at: at(0, 0, 1),
            fault: Fault::Overlap
        }
    );
}

#[test]
fn a_barrier_that_does_not_hold() {
    let text = two(
        "barrier",
        0,
        ["strand 0 \n send nothing to 1", "strand 0 \n recv nothing from 0"],
    );
    assert_eq!(
        flaw(&text),
        Flaw {
            at: At::End { rank: Rank(0) },
            fault: Fault::NotEntered(Rank(1))
        }
    );
}

#[test]
fn shapes_that_there_cannot_be() {
    let plan = |head: &str, ranks: u32| {
        let programs: String = (0..ranks).map(|rank| format!("rank {rank}\nstrand 0\n")).collect();
        format!("{head}\n{programs}")
    };
    for (head, ranks) in [
        ("allreduce\norder\nroot 0\nblocks 1", 0),
        ("allreduce\norder 0 0\nroot 0\nblocks 1", 2),
        ("allreduce\norder 0 2\nroot 0\nblocks 1", 2),
        ("allreduce\norder 0 1\nroot 2\nblocks 1", 2),
        ("allreduce\norder 0 1\nroot 0\nblocks 0", 2),
        ("alltoall\norder 0 1\nroot 0\nblocks 4294967295", 2),
    ] {
        let flaw = flaw(&plan(head, ranks));
        assert!(
            matches!(
                flaw,
                Flaw {
                    at: At::Plan,
                    fault: Fault::Shape(_)
                }
            ),
            "{head}: {flaw}"
        );
    }
    let text = two("barrier", 0, ["strand 0", "strand 0 \n strand 1"]);
    assert_eq!(
        flaw(&text),
        Flaw {
            at: At::Plan,
            fault: Fault::Programs
        }
    );
    let text = two("sendrecv", 1, ["scratch 2 \n strand 0", "strand 0"]);
    assert!(matches!(
        flaw(&text),
        Flaw {
            at: At::Plan,
            fault: Fault::Shape(_)
        }
    ));
}
