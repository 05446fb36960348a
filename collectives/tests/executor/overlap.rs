//! Several operations in flight at once.

use doorbell_collectives::executor::{Config, Data, Operation, Tuning};
use doorbell_collectives::kernel::Function;
use doorbell_collectives::plan::Collective;
use doorbell_collectives::{Algorithm, DataType, Protocol, Rank, ReduceOp};

use crate::world::{Device, World};

/// They have different lengths, algorithms and protocols.
#[test]
fn operations_overlap_and_are_taken_in_any_order() {
    const RANKS: u32 = 3;
    let mut world = World::new(RANKS, &[Device::Soft(0), Device::Soft(1)], Config::default());
    let algorithms: Vec<_> = Algorithm::of(Collective::AllReduce).collect();
    let plans: Vec<_> = algorithms
        .iter()
        .map(|algorithm| world.prepare(*algorithm, Collective::AllReduce, Rank(0)))
        .collect();
    let counts: Vec<u64> = (0..40)
        .map(|index| [1, 70_000, 33, 5_000][index % 4] + index as u64)
        .collect();
    let function = Function::new(DataType::U32, ReduceOp::Sum, RANKS).unwrap();
    let mut segments = Vec::new();
    let mut tickets = Vec::new();
    for (index, &count) in counts.iter().enumerate() {
        let bytes = count as usize * 4;
        let of: Vec<_> = world
            .engines
            .iter_mut()
            .map(|engine| engine.allocate(2 * bytes).unwrap())
            .collect();
        for (rank, segment) in of.iter().enumerate() {
            for element in 0..count as usize {
                // SAFETY: in the segment, which is not shared yet.
                unsafe { *segment.start().cast::<u32>().add(element) = (element + rank + index) as u32 };
            }
        }
        // SAFETY: the segments are long enough, and outlive the operations.
        tickets.push(unsafe {
            world.submit(|rank| Operation {
                plan: plans[index % plans.len()],
                function: function.clone(),
                count,
                parts: None,
                input: Data::Registered(of[rank.index()].clone(), 0),
                output: Data::Registered(of[rank.index()].clone(), bytes),
                scale: None,
                tuning: Tuning {
                    protocol: Protocol::ALL[index % 3],
                    channels: 1 + index as u32 % 4,
                    slice: 8192,
                },
                deadline: None,
            })
        });
        segments.push(of);
    }
    assert_eq!(world.engines[0].outstanding(), counts.len());
    for (index, tickets) in tickets.iter().enumerate().rev() {
        assert!(world.finish(tickets).iter().all(Result::is_ok), "operation {index}");
    }
    for (index, of) in segments.iter().enumerate() {
        let count = counts[index] as usize;
        for segment in of {
            for element in 0..count {
                // SAFETY: in the segment, which is not written any more.
                let got = unsafe { *segment.start().cast::<u32>().add(count + element) };
                assert_eq!(
                    got as usize,
                    3 * (element + index) + 3,
                    "operation {index}, element {element}"
                );
            }
        }
    }
    assert!(world.engines.iter().all(|engine| engine.outstanding() == 0));
}
