//! Plans that deadlock with long messages only; and all algorithms with any memory for messages.

use super::{Rules, Run};
use crate::algorithm::Algorithm;
use crate::plan::check::{Fault, Flaw, Why, prove};
use crate::plan::{Collective, Plan};
use crate::types::Rank;

fn plans(ranks: u32) -> impl Iterator<Item = (String, Plan)> {
    let order: Vec<_> = (0..ranks).map(Rank).collect();
    let pairs = Collective::ALL
        .iter()
        .flat_map(|&collective| Algorithm::of(collective).map(move |algorithm| (algorithm, collective)));
    pairs.map(move |(algorithm, collective)| {
        let schedule = algorithm
            .schedule(collective, &order, Rank(ranks / 2))
            .expect("a schedule");
        (format!("{algorithm} {collective} of {ranks}"), Plan::of(&*schedule))
    })
}

fn run(plan: &Plan, in_place: bool, rules: Rules) -> Result<(), Flaw> {
    Run::new(plan, in_place, rules).run()
}

/// An executor that compares spans by name: in place it takes input and output for different
/// memory, and so waits for a whole message that it is sending.
const BY_NAME: Rules = Rules {
    by_parts: |sent, written| sent == written,
    ..Rules::LEAST
};

#[test]
fn the_exchange_in_place_that_deadlocks() {
    let order = [Rank(0), Rank(1)];
    let schedule = Algorithm::RecursiveDoubling.schedule(Collective::AllReduce, &order, Rank(0));
    let plan = Plan::of(&*schedule.expect("a schedule"));
    let Fault::LongCycle(waits) = run(&plan, true, BY_NAME).expect_err("it stands still").fault else {
        panic!("another flaw")
    };
    assert!(
        waits.len() == 2 && waits.iter().all(|wait| wait.why == Why::Overwrite && wait.step == 1),
        "{waits:?}"
    );
    run(&plan, true, Rules { ahead: 1, ..BY_NAME }).expect("short messages");
    run(&plan, false, BY_NAME).expect("two memories");
    run(&plan, true, Rules::LEAST).expect("freed part by part");
}

/// These reduce a received message onto what they send.
#[test]
fn other_plans_that_would_deadlock() {
    let still = |ranks| {
        let stuck = plans(ranks).filter(|(_, plan)| plan.in_place && run(plan, true, BY_NAME).is_err());
        stuck.map(|(name, _)| name).collect::<Vec<_>>()
    };
    assert_eq!(still(2), ["recursive-doubling allreduce of 2"]);
    assert!(plans(5).all(|(_, plan)| run(&plan, false, BY_NAME).is_ok()));
}

/// One rank sends both blocks together, and the other one after the other.
const UNLIKE: &str = "allreduce in place\norder 0 1\nroot 0\nblocks 2\n\
    rank 0\nstrand 0\nsend input[0..2] to 1\nrecv-reduce element from 1 with input[0] into output[0]\nrecv-reduce element from 1 with input[1] into output[1]\n\
    rank 1\nstrand 0\nsend input[0] to 0\nsend input[1] to 0\nrecv-reduce element from 0 with input[0..2] into output[0..2]\n";

#[test]
fn the_source_is_written_while_it_is_still_being_sent() {
    let plan: Plan = UNLIKE.parse().expect("a plan");
    let flaw = prove(&plan).expect_err("it stands still");
    assert_eq!(
        flaw.to_string(),
        "rank 0, strand 0, step 1: waits in a cycle where messages are long: rank 0, strand 0, step 1 waits for rank 1 to receive what this step overwrites; \
         rank 1, strand 0, step 2 waits for rank 0 to receive what this step overwrites"
    );
    let out_of_place: Plan = UNLIKE.replace(" in place", "").parse().expect("a plan");
    prove(&out_of_place).expect("a plan that is right");
    run(
        &plan,
        true,
        Rules {
            ahead: 1,
            ..Rules::LEAST
        },
    )
    .expect("short messages");
}

/// Not even part by part is it possible: no rank has a copy of a part elsewhere.
#[test]
fn an_exchange_straight_into_what_is_sent() {
    let plan = |first: &str| {
        let rank = |rank: u32, peer: u32| {
            format!("rank {rank}\nscratch 0\nstrand 0\nsend scratch[0] to {peer}\n{first} from {peer}\n")
        };
        let text = format!("broadcast\norder 0 1\nroot 0\nblocks 1\n{}{}", rank(0, 1), rank(1, 0));
        text.parse::<Plan>().expect("a plan")
    };
    let flaw = run(&plan("recv scratch[0]"), false, Rules::LEAST).expect_err("it stands still");
    assert!(
        matches!(&flaw.fault, Fault::LongCycle(waits) if waits.len() == 2),
        "{flaw}"
    );
    run(&plan("recv output[0]"), false, Rules::LEAST).expect("another memory");
    // In a ring of three, one rank with separate memory suffices.
    let ring = |last: &str| {
        let rank = |rank: u32, into: &str| {
            let (next, before) = ((rank + 1) % 3, (rank + 2) % 3);
            format!("rank {rank}\nscratch 0\nstrand 0\nsend scratch[0] to {next}\nrecv {into} from {before}\n")
        };
        let ranks = [rank(0, "scratch[0]"), rank(1, "scratch[0]"), rank(2, last)].concat();
        let text = format!("broadcast\norder 0 1 2\nroot 0\nblocks 1\n{ranks}");
        text.parse::<Plan>().expect("a plan")
    };
    assert!(run(&ring("scratch[0]"), false, Rules::LEAST).is_err());
    run(&ring("output[0]"), false, Rules::LEAST).expect("somebody begins");
}

/// A local step waits too until its target has left.
#[test]
fn a_reduction_onto_what_is_sent() {
    // Rank 2 receives from rank 0 after that has reduced, and rank 1 from rank 2.
    let plan = |first: &str, second: &str| {
        let text = format!(
            "allreduce\norder 0 1 2\nroot 0\nblocks 1\n\
             rank 0\npartial 0\nstrand 0\nsend partial[0] to 1\nreduce input[0] into partial[0]\nsend nothing to 2\n\
             rank 1\npartial 0\nstrand 0\n{first}\n{second}\n\
             rank 2\nstrand 0\nrecv nothing from 0\nsend nothing to 1\n"
        );
        text.parse::<Plan>().expect("a plan")
    };
    let (partial, nothing) = ("recv partial[0] from 0", "recv nothing from 2");
    run(&plan(partial, nothing), false, Rules::LEAST).expect("it leaves first");
    let flaw = run(&plan(nothing, partial), false, Rules::LEAST).expect_err("it stands still");
    assert!(
        matches!(&flaw.fault, Fault::LongCycle(waits) if waits.len() == 3),
        "{flaw}"
    );
}

/// None, some, as many as are staged, as many as are granted.
#[test]
fn every_algorithm_with_any_memory_for_messages() {
    for ranks in (1..=17).chain([31, 32, 33, 63, 64]) {
        for (name, plan) in plans(ranks) {
            for ahead in [0, 1, 4, 16] {
                let rules = Rules { ahead, ..Rules::LEAST };
                for in_place in [false, plan.in_place] {
                    run(&plan, in_place, rules).unwrap_or_else(|flaw| panic!("{name}, {ahead} ahead: {flaw}"));
                }
            }
        }
    }
}
