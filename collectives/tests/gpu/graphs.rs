//! Operations captured into a graph, which is launched repeatedly on changing data.

use doorbell_collectives::gpu::{Executor, GpuOptions};
use doorbell_collectives::plan::Collective;
use doorbell_collectives::reference::Case;
use doorbell_collectives::{Rank, ReduceOp};
use doorbell_cuda::Stream;
use doorbell_cuda_standin::{ExecutionMode, Standin};

use crate::gpus::{Buffers, call, once, small};
use crate::many::ranks;

#[test]
fn captured_operation_can_be_relaunched() {
    captured(&small());
}

#[test]
fn captured_split_operation_can_be_relaunched() {
    captured(&GpuOptions {
        executor: Some(Executor::Split),
        ..small()
    });
}

fn captured(options: &GpuOptions) {
    let standin = Standin::load(ExecutionMode::Prompt);
    for p in [2, 3] {
        ranks(standin.driver().unwrap(), p, options, |gpu| {
            let stream = Stream::new(gpu.context()).unwrap();
            let rank = gpu.rank();
            let of = |collective, count| Case {
                collective,
                ranks: p,
                root: Rank(p - 1),
                count,
            };
            let cases = [
                of(Collective::AllReduce, 40_000),
                of(Collective::Barrier, 0),
                of(Collective::AllGather, 5003),
                of(Collective::Broadcast, 70_001),
                of(Collective::ReduceScatter, 999),
            ];
            let buffers: Vec<_> = cases
                .iter()
                .map(|case| Buffers::new::<f32>(gpu.context(), case, rank, false))
                .collect();
            gpu.register(&buffers[0].memory).unwrap();
            let graph = gpu
                .capture(&stream, || {
                    let mut calls = cases.iter().zip(&buffers);
                    calls.try_for_each(|(case, buffers)| {
                        gpu.enqueue(&call::<f32, _>(buffers, case, ReduceOp::Max, rank), &stream)
                    })
                })
                .unwrap();
            let exec = graph.instantiate().unwrap();
            for seed in 0..4 {
                for buffers in &buffers {
                    buffers.fill::<f32>(rank, seed, &stream);
                }
                exec.launch(&stream).unwrap();
                exec.launch(&stream).unwrap();
                for (case, buffers) in cases.iter().zip(&buffers) {
                    let wrong = case.count_wrong(ReduceOp::Max, rank, seed, &buffers.read::<f32>(&stream));
                    assert_eq!(wrong, 0, "rank {rank} {case:?}, launch {seed}");
                }
            }
            // The graph does not interfere with direct calls.
            once::<i64>(&gpu, &stream, &cases[0], ReduceOp::Sum, true, false);
            drop((graph, exec, buffers));
            gpu.destroy().unwrap();
        });
    }
    standin.assert_nothing_left("graphs");
}

#[test]
fn operations_of_several_streams_keep_their_order() {
    let standin = Standin::load(ExecutionMode::Prompt);
    ranks(standin.driver().unwrap(), 3, &small(), |gpu| {
        let rank = gpu.rank();
        let streams: Vec<_> = (0..3).map(|_| Stream::new(gpu.context()).unwrap()).collect();
        let case = Case {
            collective: Collective::AllReduce,
            ranks: 3,
            root: Rank(0),
            count: 20_000,
        };
        let buffers: Vec<_> = (0..9)
            .map(|_| Buffers::new::<i32>(gpu.context(), &case, rank, true))
            .collect();
        for (turn, buffers) in buffers.iter().enumerate() {
            let stream = &streams[turn % 3];
            buffers.fill::<i32>(rank, turn as u64, stream);
            gpu.enqueue(&call::<i32, _>(buffers, &case, ReduceOp::Sum, rank), stream)
                .unwrap();
        }
        for (turn, buffers) in buffers.iter().enumerate() {
            let output = buffers.read::<i32>(&streams[turn % 3]);
            assert_eq!(
                case.count_wrong(ReduceOp::Sum, rank, turn as u64, &output),
                0,
                "operation {turn}"
            );
        }
        gpu.destroy().unwrap();
    });
}
