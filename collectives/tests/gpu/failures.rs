//! Ranks that exit, abort or never arrive: the others' streams complete, their GPUs remain usable,
//! and nothing leaks.

use std::time::Duration;

use doorbell_collectives::gpu::{Executor, GpuCommunicator, GpuOptions};
use doorbell_collectives::plan::Collective;
use doorbell_collectives::reference::Case;
use doorbell_collectives::{Options, Rank, ReduceOp};
use doorbell_cuda::Stream;
use doorbell_cuda_standin::{ExecutionMode, Standin};

use crate::gpus::{Buffers, call, gpu, once, small};
use crate::many::{ranks, ranks_with};
use crate::world;

const CASE: Case = Case {
    collective: Collective::AllReduce,
    ranks: 3,
    root: Rank(0),
    count: 100_000,
};

/// Enqueues operations that cannot complete by themselves, synchronizes the stream, and checks that
/// the GPU still works.
fn is_let_go(gpu: &GpuCommunicator) {
    let stream = Stream::new(gpu.context()).unwrap();
    let buffers = Buffers::new::<f32>(gpu.context(), &CASE, gpu.rank(), false);
    for _ in 0..3 {
        // The group may already have failed.
        if gpu
            .enqueue(&call::<f32, _>(&buffers, &CASE, ReduceOp::Sum, gpu.rank()), &stream)
            .is_err()
        {
            break;
        }
    }
    stream.synchronize().unwrap();
    let error = gpu.check().unwrap_err().to_string();
    assert!(!error.contains('\n'), "{error}");
    buffers.fill::<f32>(gpu.rank(), 7, &stream);
    assert_eq!(buffers.read::<f32>(&stream).len() as u64, CASE.count);
    gpu.enqueue(&call::<f32, _>(&buffers, &CASE, ReduceOp::Sum, gpu.rank()), &stream)
        .unwrap_err();
}

#[test]
fn abort_releases_all_streams() {
    for executor in [
        Executor::Small,
        Executor::Copies,
        Executor::Kernel,
        Executor::Split,
        Executor::Staged,
    ] {
        let standin = Standin::load(ExecutionMode::Prompt);
        let options = GpuOptions {
            executor: Some(executor),
            ..small()
        };
        ranks(standin.driver().unwrap(), 3, &options, |gpu| {
            if gpu.rank() == Rank(1) {
                std::thread::sleep(Duration::from_millis(100));
                gpu.abort("a test");
            } else {
                is_let_go(&gpu);
                let error = gpu.check().unwrap_err().to_string();
                assert!(error.contains("a test") && error.contains("rank 1"), "{error}");
            }
        });
        standin.assert_nothing_left("an abort");
    }
}

#[test]
fn late_rank_fails_the_operation_on_all_ranks() {
    let standin = Standin::load(ExecutionMode::Prompt);
    let host = Options {
        deadline: Duration::from_millis(800),
        ..world::options()
    };
    ranks_with(standin.driver().unwrap(), 3, &host, &small(), |gpu| {
        if gpu.rank() == Rank(2) {
            while gpu.check().is_ok() {
                std::thread::sleep(Duration::from_millis(5));
            }
        } else {
            is_let_go(&gpu);
        }
    });
    standin.assert_nothing_left("a deadline");
}

#[test]
fn invalid_calls_are_refused_before_enqueuing() {
    let standin = Standin::load(ExecutionMode::Prompt);
    ranks(standin.driver().unwrap(), 2, &small(), |gpu| {
        let stream = Stream::new(gpu.context()).unwrap();
        let case = Case { ranks: 2, ..CASE };
        let buffers = Buffers::new::<f32>(gpu.context(), &case, gpu.rank(), true);
        let good = call::<f32, _>(&buffers, &case, ReduceOp::Sum, gpu.rank());
        let refused = |bad: doorbell_collectives::gpu::GpuCall<'_>, why: &str| {
            let error = gpu.enqueue(&bad, &stream).unwrap_err().to_string();
            assert!(error.contains(why) && !error.contains('\n'), "{error}");
        };
        let more = case.count as usize + 1;
        refused(
            doorbell_collectives::gpu::GpuCall {
                count: more,
                ..good.clone()
            },
            "100001 elements",
        );
        refused(
            doorbell_collectives::gpu::GpuCall {
                output: None,
                ..good.clone()
            },
            "output has 0 bytes",
        );
        let half = buffers.output().map(|span| span.span(4..).unwrap());
        refused(
            doorbell_collectives::gpu::GpuCall {
                input: half,
                count: 1000,
                ..good.clone()
            },
            "not as they do in place",
        );
        refused(
            doorbell_collectives::gpu::GpuCall {
                reduction: ReduceOp::PreMulSum.into(),
                ..good.clone()
            },
            "scalar",
        );
        refused(
            doorbell_collectives::gpu::GpuCall {
                collective: Collective::Broadcast,
                root: Rank(2),
                ..good.clone()
            },
            "root",
        );
        once::<f32>(&gpu, &stream, &case, ReduceOp::Sum, true, false);
        gpu.destroy().unwrap();
    });
}

#[test]
fn without_peer_access_operations_are_staged_and_the_reason_is_reported() {
    let standin = Standin::load(ExecutionMode::Prompt);
    standin.set_peers(false);
    ranks(standin.driver().unwrap(), 2, &small(), |gpu| {
        let reason = gpu.staged_reason().unwrap();
        assert!(
            reason.contains("rank 0") && reason.contains("cannot map the memory of rank 1"),
            "{reason}"
        );
        let stream = Stream::new(gpu.context()).unwrap();
        once::<f32>(&gpu, &stream, &Case { ranks: 2, ..CASE }, ReduceOp::Sum, false, true);
        gpu.destroy().unwrap();
    });
    standin.assert_nothing_left("no peers");
}

#[test]
fn ranks_with_and_without_gpus_share_an_operation() {
    let standin = Standin::load(ExecutionMode::Prompt);
    let driver = standin.driver().unwrap();
    world::ranks(3, &world::options(), |comm| {
        let rank = comm.rank();
        if rank == Rank(1) {
            comm.without_gpu().unwrap();
            for seed in 0..2 {
                let given: Vec<f32> = (0..CASE.count)
                    .map(|index| doorbell_collectives::reference::input_element(seed, rank, index))
                    .collect();
                let mut got = vec![0.0; given.len()];
                comm.all_reduce_into(&given, &mut got, ReduceOp::Sum).wait().unwrap();
                assert_eq!(CASE.count_wrong(ReduceOp::Sum, rank, seed, &got), 0);
            }
            comm.destroy().unwrap();
            return;
        }
        let context = gpu(driver, rank);
        let gpu = GpuCommunicator::new(comm, &context, small()).unwrap();
        assert!(gpu.staged_reason().unwrap().contains("rank 1 has no GPU"));
        let stream = Stream::new(&context).unwrap();
        once::<f32>(&gpu, &stream, &CASE, ReduceOp::Sum, false, false);
        gpu.destroy().unwrap();
    });
    standin.assert_nothing_left("ranks with and without GPUs");
}
