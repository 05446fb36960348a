//! From its second run on, an operation allocates nothing: neither the engine nor, below it, verbs
//! and the soft device.

use std::alloc::{GlobalAlloc, Layout, System};
use std::cell::Cell;

use doorbell_collectives::executor::{Config, Data, Operation, Tuning};
use doorbell_collectives::kernel::Function;
use doorbell_collectives::plan::Collective;
use doorbell_collectives::{Algorithm, DataType, Protocol, Rank, ReduceOp};

use crate::world::{Device, World};

thread_local! {
    /// Allocations of this thread, while it counts.
    static COUNT: Cell<Option<u64>> = const { Cell::new(None) };
}

struct Counting;

// SAFETY: the system's allocator, and a counter that allocates nothing.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        // An exiting thread has no counter.
        let _ = COUNT.try_with(|count| count.set(count.get().map(|count| count + 1)));
        // SAFETY: by contract.
        unsafe { System.alloc(layout) }
    }

    unsafe fn dealloc(&self, start: *mut u8, layout: Layout) {
        // SAFETY: by contract.
        unsafe { System.dealloc(start, layout) }
    }
}

#[global_allocator]
static ALLOCATOR: Counting = Counting;

#[test]
fn an_operation_allocates_nothing() {
    const COUNT_OF: u64 = 20_000;
    let mut world = World::new(2, &[Device::Soft(0)], Config::default());
    let function = Function::new(DataType::F32, ReduceOp::Sum, 2).unwrap();
    let bytes = COUNT_OF as usize * 4;
    let segments: Vec<_> = world
        .engines
        .iter_mut()
        .map(|engine| engine.allocate(2 * bytes).unwrap())
        .collect();
    for algorithm in Algorithm::of(Collective::AllReduce) {
        for &protocol in Protocol::ALL {
            let plan = world.prepare(algorithm, Collective::AllReduce, Rank(0));
            let operation = |rank: Rank| Operation {
                plan,
                function: function.clone(),
                count: COUNT_OF,
                parts: None,
                input: Data::Registered(segments[rank.index()].clone(), 0),
                output: Data::Registered(segments[rank.index()].clone(), bytes),
                scale: None,
                tuning: Tuning {
                    protocol,
                    channels: 2,
                    slice: 24 << 10,
                },
                deadline: None,
            };
            // The soft device's rings allocate when each slot is first used: skip the first rounds.
            let mut quiet = 0;
            for _ in 0..5000 {
                let mut tickets = [None; 2];
                COUNT.set(Some(0));
                for (engine, ticket) in world.engines.iter_mut().zip(&mut tickets) {
                    // SAFETY: the segments are long enough.
                    *ticket = unsafe { engine.submit(operation(engine.rank())) }.ok();
                }
                while tickets.iter().any(Option::is_some) {
                    for (engine, ticket) in world.engines.iter_mut().zip(&mut tickets) {
                        engine.progress();
                        if let Some(Ok(())) = ticket.and_then(|ticket| engine.take(ticket)) {
                            *ticket = None;
                        }
                    }
                }
                quiet = if COUNT.take() == Some(0) { quiet + 1 } else { 0 };
                if quiet == 20 {
                    break;
                }
            }
            assert_eq!(quiet, 20, "{algorithm} {protocol} allocates again and again");
        }
    }
}
