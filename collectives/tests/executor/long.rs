//! Messages longer than the memory for them on their way: what the checker says of a plan is what the executor does.

use std::time::Duration;

use doorbell_collectives::executor::{Config, Data, Failed, Operation, PlanId, Tuning};
use doorbell_collectives::kernel::Function;
use doorbell_collectives::plan::Plan;
use doorbell_collectives::plan::check::{Fault, prove};
use doorbell_collectives::{DataType, Protocol, Rank, ReduceOp};

use crate::world::{Device, World};

/// An all-reduce between two ranks, of which one sends both blocks together, and the other one after the other.
const UNLIKE: &str = "allreduce in place\norder 0 1\nroot 0\nblocks 2\n\
    rank 0\nstrand 0\nsend input[0..2] to 1\nrecv-reduce element from 1 with input[0] into output[0]\nrecv-reduce element from 1 with input[1] into output[1]\n\
    rank 1\nstrand 0\nsend input[0] to 0\nsend input[1] to 0\nrecv-reduce element from 0 with input[0..2] into output[0..2]\n";

/// The sum of `count` numbers of each of two ranks, in place or not. All failures, or none.
fn sum(world: &mut World, plan: PlanId, count: usize, in_place: bool, deadline: Duration) -> Vec<Failed> {
    let function = Function::new(DataType::I32, ReduceOp::Sum, 2).unwrap();
    let segments: Vec<_> = world
        .engines
        .iter()
        .map(|engine| engine.allocate(count * 8).unwrap())
        .collect();
    let output = if in_place { 0 } else { count * 4 };
    for segment in &segments {
        for index in 0..count {
            // SAFETY: in the segment, which nobody else has yet.
            unsafe { segment.start().cast::<i32>().add(index).write(index as i32) };
        }
    }
    // SAFETY: the segments are as long as that, and stay.
    let tickets = unsafe {
        world.submit(|rank| Operation {
            plan,
            function: function.clone(),
            count: count as u64,
            parts: None,
            input: Data::Registered(segments[rank.index()].clone(), 0),
            output: Data::Registered(segments[rank.index()].clone(), output),
            scale: None,
            tuning: Tuning {
                protocol: Protocol::Simple,
                channels: 1,
                slice: 1 << 20,
            },
            deadline: Some(deadline),
        })
    };
    let failed: Vec<_> = world.finish(&tickets).into_iter().filter_map(Result::err).collect();
    for segment in segments.iter().filter(|_| failed.is_empty()) {
        for index in 0..count {
            // SAFETY: in the segment, which nobody writes any more.
            let got = unsafe { segment.start().add(output).cast::<i32>().add(index).read() };
            assert_eq!(got, 2 * index as i32, "{index} of {count}");
        }
    }
    failed
}

#[test]
fn a_plan_that_the_checker_refuses_stands_still_with_long_messages_and_not_with_short_ones() {
    let plan: Plan = UNLIKE.parse().unwrap();
    let flaw = prove(&plan).unwrap_err();
    let Fault::LongCycle(waits) = &flaw.fault else {
        panic!("{flaw}");
    };
    let config = Config {
        fragment: 4096,
        ..Config::default()
    };
    let mut world = World::new(2, &[Device::Soft(0)], config);
    let ids: Vec<_> = world
        .engines
        .iter_mut()
        .map(|engine| engine.prepare(&plan).unwrap())
        .collect();
    let (long, patience) = (50_000, Duration::from_secs(60));
    assert_eq!(sum(&mut world, ids[0], 1000, true, patience), []);
    assert_eq!(sum(&mut world, ids[0], long, false, patience), []);
    let failed = sum(&mut world, ids[0], long, true, Duration::from_secs(1));
    assert_eq!(failed.len(), 2);
    for (failed, rank) in failed.iter().zip(0..) {
        let Failed::Deadline(waiting) = failed else {
            panic!("{failed}");
        };
        let wait = waits.iter().find(|wait| wait.rank == Rank(rank)).unwrap();
        // The executor tells of the message that is in the way, which is sent before the step that waits for it.
        assert!(waiting.peer == wait.peer && waiting.step < wait.step, "{failed}");
    }
}
