//! Requests, groups, derived communicators, and agreement between ranks.

use std::time::{Duration, Instant};

use doorbell_collectives::kernel::UserOperator;
use doorbell_collectives::plan::Collective;
use doorbell_collectives::{DataType, Options, Rank, ReduceOp};

use crate::world::{options, ranks};

const TIMEOUT: Duration = Duration::from_secs(60);

#[test]
fn requests_give_their_buffers_back_in_any_order() {
    for progress_thread in [false, true] {
        let options = Options {
            progress_thread,
            ..options()
        };
        ranks(3, &options, |comm| {
            let mut requests: Vec<_> = (0..8u32)
                .map(|number| {
                    let mut x = comm.alloc::<u32>(1 + 3000 * number as usize).unwrap();
                    x.fill(number + comm.rank().0);
                    comm.all_reduce(x, ReduceOp::Sum).start().unwrap()
                })
                .collect();
            let began = Instant::now();
            while !requests[7].test().unwrap() {
                assert!(began.elapsed() < TIMEOUT);
            }
            // A dropped request completes nevertheless.
            drop(requests.remove(3));
            for request in requests.into_iter().rev() {
                let x = request.wait().unwrap();
                let number = (x.len() as u32 - 1) / 3000;
                assert!(x.iter().all(|x| *x == 3 * number + 3));
            }
            let input = comm.alloc::<u8>(10).unwrap();
            let output = comm.alloc::<u8>(30).unwrap();
            let (_, output) = comm.all_gather_into(input, output).start().unwrap().wait().unwrap();
            assert_eq!(*output, [0; 30]);
        });
    }
}

#[test]
fn the_progress_thread_drives_started_operations() {
    let options = Options {
        progress_thread: true,
        ..options()
    };
    ranks(2, &options, |comm| {
        let mut x = comm.alloc::<f64>(200_000).unwrap();
        x.fill(1.0);
        let request = comm.all_reduce(x, ReduceOp::Sum).start().unwrap();
        if comm.rank() == Rank(0) {
            // It completes only if rank 1 progresses, which only sleeps.
            assert_eq!(request.wait().unwrap()[199_999], 2.0);
        } else {
            std::thread::sleep(Duration::from_millis(300));
            assert_eq!(request.wait().unwrap()[0], 2.0);
        }
    });
}

#[test]
fn a_group_completes_with_its_last_operation() {
    ranks(4, &options(), |comm| {
        let me = comm.rank().0;
        let (mut a, mut b, mine, mut c) = (vec![me; 5000], vec![me; 3], [me], vec![0; 4]);
        let owned = comm.alloc::<u32>(100).unwrap();
        comm.group(|group| {
            group.add(comm.all_reduce(&mut a, ReduceOp::Sum))?;
            group.add(comm.broadcast(&mut b, Rank(2)))?;
            group.add(comm.all_gather_into(&mine, &mut c))?;
            group.add(comm.all_reduce(owned, ReduceOp::Max))
        })
        .unwrap();
        assert_eq!((a, b, c), (vec![6; 5000], vec![2; 3], vec![0, 1, 2, 3]));
        let other = comm.duplicate().unwrap();
        let refused = comm.group(|group| group.add(other.barrier())).unwrap_err();
        assert!(refused.to_string().contains("another's"), "{refused}");
        comm.barrier().wait().unwrap();
    });
}

#[test]
fn parts_and_copies_of_a_communicator_work_beside_it() {
    ranks(5, &options(), |comm| {
        let me = comm.rank().0;
        let half = comm.split((me != 4).then_some(me % 2), -(me as i32)).unwrap();
        assert_eq!(half.is_some(), me != 4);
        // Memory of one communicator works with another, by copies.
        let mut x = comm.alloc::<u32>(1000).unwrap();
        x.fill(me);
        if let Some(half) = &half {
            // Ordered by descending ranks.
            assert_eq!((half.size(), half.rank().0), (2, 1 - me / 2));
            half.all_reduce(&mut x, ReduceOp::Sum).wait().unwrap();
            assert!(x.iter().all(|x| *x == 2 + 2 * (me % 2)));
            let y = half.all_reduce(x, ReduceOp::Sum).start().unwrap().wait().unwrap();
            assert!(y.iter().all(|x| *x == 4 + 4 * (me % 2)));
        }
        let copy = comm.duplicate().unwrap();
        comm.destroy().unwrap();
        let mut x = [me; 3];
        copy.all_reduce(&mut x, ReduceOp::Max).wait().unwrap();
        assert_eq!(x, [4; 3]);
    });
}

#[test]
fn measured_costs_are_agreed_on() {
    let measured = Options {
        calibrate: true,
        ..options()
    };
    let tuners = ranks(3, &measured, |comm| {
        let decision = comm
            .explain(Collective::AllReduce, Rank(0), DataType::F32, 1 << 20)
            .unwrap();
        assert!(decision.explain().contains(decision.choice.algorithm.name()));
        (comm.tuner(), decision.choice)
    });
    assert!(tuners.iter().all(|one| *one == tuners[0]));
    let (tuner, _) = &tuners[0];
    assert_ne!(
        *tuner,
        ranks(1, &measured, |comm| comm.tuner())[0],
        "it was not measured"
    );
    for cost in [tuner.local.simple, tuner.local.ll, tuner.local.ll128] {
        assert!(cost.alpha_ns > 0.0 && cost.alpha_ns < 1e9, "{cost:?}");
    }
}

#[test]
fn the_same_bits_however_an_operation_is_cut() {
    ranks(4, &options(), |comm| {
        let me = comm.rank().0;
        let data: Vec<f32> = (0..10_000).map(|at| 1.0 / (at * 4 + me + 1) as f32).collect();
        let mut results = Vec::new();
        for (channels, slice) in [(1, 1 << 20), (1, 4096), (3, 4096), (4, 12_000)] {
            let mut x = data.clone();
            let call = comm.all_reduce(&mut x, ReduceOp::Sum).deterministic();
            call.channels(channels).slice(slice).wait().unwrap();
            results.push(x.iter().map(|x| x.to_bits()).collect::<Vec<_>>());
        }
        assert!(results.iter().all(|bits| *bits == results[0]));
        let mut x = [0f32; 4];
        let refused = comm
            .all_reduce(&mut x, ReduceOp::Sum)
            .algorithm(doorbell_collectives::Algorithm::Ring)
            .deterministic();
        assert!(refused.wait().unwrap_err().to_string().contains("one order"));
    });
}

#[test]
fn an_operator_that_panics_fails_the_communicator_and_nothing_else() {
    let done = ranks(2, &options(), |comm| {
        let picky = UserOperator::new("picky", |_: &mut [f32], _: &[f32]| panic!("not these"));
        let mut x = [1.0f32; 100];
        let panicked =
            std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| comm.all_reduce(&mut x, &picky).wait()));
        // Either this rank's own operator panicked, or the other one's did first.
        assert!(!matches!(panicked, Ok(Ok(()))));
        comm.barrier().wait().is_err()
    });
    assert_eq!(done, [true, true]);
}
