//! Operations split between copy engines and kernels: at any point, and when a rank exits.

use std::time::Duration;

use doorbell_collectives::gpu::{Executor, GpuOptions};
use doorbell_collectives::plan::Collective;
use doorbell_collectives::reference::{Case, Number};
use doorbell_collectives::{DataType, Rank, ReduceOp};
use doorbell_cuda::Stream;
use doorbell_cuda_standin::{ExecutionMode, Standin};

use crate::gpus::{Buffers, call, once, small};
use crate::many::ranks;

const RANGES: [Collective; 3] = [Collective::AllReduce, Collective::Broadcast, Collective::Reduce];

fn split(share: u8) -> GpuOptions {
    GpuOptions {
        executor: Some(Executor::Split),
        share: Some(share),
        ..small()
    }
}

/// Counts are around split points; the `bool` is whether the operation is split.
fn around<T: Number>(share: u8, counts: &[(u64, bool)]) {
    let standin = Standin::load(ExecutionMode::Prompt);
    for p in [2, 3, 5] {
        ranks(standin.driver().unwrap(), p, &split(share), |gpu| {
            let stream = Stream::new(gpu.context()).unwrap();
            for collective in RANGES {
                for (turn, &(count, is_cut)) in counts.iter().enumerate() {
                    let case = Case {
                        collective,
                        ranks: p,
                        root: Rank(turn as u32 % p),
                        count,
                    };
                    let (executor, _) = gpu.selection(collective, T::TYPE, count as usize, true);
                    assert_eq!(executor == Executor::Split, is_cut, "{case:?} of {}", T::TYPE);
                    once::<T>(&gpu, &stream, &case, ReduceOp::Sum, turn % 2 == 0, true);
                    once::<T>(&gpu, &stream, &case, ReduceOp::Sum, turn % 2 == 1, false);
                }
            }
            gpu.destroy().unwrap();
        });
    }
    standin.assert_nothing_left("operations that were cut");
}

#[test]
fn one_byte_elements_are_split_anywhere() {
    around::<u8>(
        50,
        &[
            (15, false),
            (31, false),
            (32, true),
            (33, true),
            (2047, true),
            (2049, true),
            (70_001, true),
        ],
    );
}

#[test]
fn eight_byte_elements_are_split_on_boundaries() {
    around::<i64>(
        50,
        &[(3, false), (4, true), (5, true), (511, true), (513, true), (9001, true)],
    );
}

#[test]
fn extreme_shares_split_only_long_operations() {
    around::<f32>(1, &[(399, false), (400, true), (20_011, true)]);
    around::<f32>(99, &[(4, false), (5, true), (401, true), (20_011, true)]);
}

#[test]
fn operations_of_several_streams_keep_their_order() {
    let standin = Standin::load(ExecutionMode::Prompt);
    ranks(standin.driver().unwrap(), 3, &split(50), |gpu| {
        let rank = gpu.rank();
        let streams: Vec<_> = (0..2).map(|_| Stream::new(gpu.context()).unwrap()).collect();
        let of = |collective| Case {
            collective,
            ranks: 3,
            root: Rank(0),
            count: 20_000,
        };
        // The output of the first operation is the input of the next.
        let (sum, same) = (of(Collective::AllReduce), of(Collective::Broadcast));
        let buffers: Vec<_> = (0..6)
            .map(|_| Buffers::new::<i32>(gpu.context(), &sum, rank, true))
            .collect();
        for (turn, buffers) in buffers.iter().enumerate() {
            buffers.fill::<i32>(rank, turn as u64, &streams[turn % 2]);
            for (step, case) in [&sum, &same].into_iter().enumerate() {
                let mut call = call::<i32, _>(buffers, case, ReduceOp::Sum, rank);
                call.input = call.input.filter(|_| step == 0 || rank == case.root);
                gpu.enqueue(&call, &streams[(turn + step) % 2]).unwrap();
            }
        }
        for (turn, buffers) in buffers.iter().enumerate() {
            let output = buffers.read::<i32>(&streams[(turn + 1) % 2]);
            assert_eq!(
                sum.count_wrong(ReduceOp::Sum, rank, turn as u64, &output),
                0,
                "operation {turn}"
            );
        }
        gpu.destroy().unwrap();
    });
}

/// Some operations are done on all ranks, in some both executors wait.
#[test]
fn abort_in_the_middle_releases_all_waits() {
    let standin = Standin::load(ExecutionMode::Prompt);
    for collective in RANGES {
        ranks(standin.driver().unwrap(), 3, &split(50), |gpu| {
            let rank = gpu.rank();
            let case = Case {
                collective,
                ranks: 3,
                root: Rank(0),
                count: 100_000,
            };
            assert_eq!(
                gpu.selection(collective, DataType::F32, 100_000, false).0,
                Executor::Split
            );
            let stream = Stream::new(gpu.context()).unwrap();
            let buffers = Buffers::new::<f32>(gpu.context(), &case, rank, false);
            buffers.fill::<f32>(rank, 1, &stream);
            for turn in 0..6 {
                if rank == Rank(2) && turn == 3 {
                    stream.synchronize().unwrap();
                    std::thread::sleep(Duration::from_millis(50));
                    gpu.abort("a test");
                    return;
                }
                if gpu
                    .enqueue(&call::<f32, _>(&buffers, &case, ReduceOp::Sum, rank), &stream)
                    .is_err()
                {
                    break;
                }
            }
            stream.synchronize().unwrap();
            while gpu.check().is_ok() {
                std::thread::sleep(Duration::from_millis(2));
            }
            let error = gpu.check().unwrap_err().to_string();
            assert!(error.contains("a test") && error.contains("rank 2"), "{error}");
            // The GPU still works.
            buffers.fill::<f32>(rank, 2, &stream);
            buffers.read::<f32>(&stream);
        });
    }
    standin.assert_nothing_left("an abort");
}
