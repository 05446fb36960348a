//! Results of all collectives, for all types and operators, in place and not, on registered and
//! unregistered memory, among GPUs and staged through the host.

use doorbell_collectives::gpu::{Executor, GpuCommunicator, GpuOptions, Sizes};
use doorbell_collectives::kernel::{F8E4M3, F8E5M2, bf16, f16};
use doorbell_collectives::plan::Collective;
use doorbell_collectives::reference::{Case, Number};
use doorbell_collectives::{Rank, ReduceOp};
use doorbell_cuda::Stream;
use doorbell_cuda_standin::{ExecutionMode, Standin};

use crate::gpus::{once, small};
use crate::many::ranks;

fn all() -> impl Iterator<Item = Collective> {
    Collective::ALL
        .iter()
        .copied()
        .filter(|collective| *collective != Collective::AllToAllV)
}

fn every_collective(options: &GpuOptions, counts: &[u64]) {
    let standin = Standin::load(ExecutionMode::Prompt);
    for p in [1, 2, 3, 4, 5] {
        ranks(standin.driver().unwrap(), p, options, |gpu| {
            let stream = Stream::new(gpu.context()).unwrap();
            for collective in all() {
                for &count in counts {
                    let case = Case {
                        collective,
                        ranks: p,
                        root: Rank(count as u32 % p),
                        count: if collective == Collective::Barrier { 0 } else { count },
                    };
                    for in_place in [false, true] {
                        for registered in [false, true] {
                            if (!in_place || collective.runs_in_place())
                                && (!registered || gpu.staged_reason().is_none())
                            {
                                once::<i32>(&gpu, &stream, &case, ReduceOp::Sum, in_place, registered);
                            }
                        }
                    }
                }
            }
            gpu.destroy().unwrap();
        });
    }
    standin.assert_nothing_left("communicators");
}

fn by(executor: Executor) -> GpuOptions {
    GpuOptions {
        executor: Some(executor),
        ..small()
    }
}

#[test]
fn every_collective_by_copies() {
    every_collective(&by(Executor::Copies), &[0, 1, 7, 3001, 50_000]);
}

/// Long enough that the messages next to the reduction are divided.
#[test]
fn a_long_all_reduce_by_copies() {
    let standin = Standin::load(ExecutionMode::Prompt);
    let options = GpuOptions {
        executor: Some(Executor::Copies),
        slice: Some(1 << 40),
        ..GpuOptions::default()
    };
    ranks(standin.driver().unwrap(), 2, &options, |gpu| {
        let case = Case {
            collective: Collective::AllReduce,
            ranks: 2,
            root: Rank(0),
            count: (8 << 20) + 1001,
        };
        once::<i64>(
            &gpu,
            &Stream::new(gpu.context()).unwrap(),
            &case,
            ReduceOp::Sum,
            true,
            true,
        );
        gpu.destroy().unwrap();
    });
    standin.assert_nothing_left("communicators");
}

#[test]
fn every_collective_by_kernels() {
    every_collective(&by(Executor::Kernel), &[0, 1, 3001, 50_000]);
}

/// Too long for the LL protocol, without memory for the kernel of short operations, and with slots
/// of which a part takes several: what moves parts unchanged is a group of sends and receives.
#[test]
fn every_collective_as_messages() {
    let sizes = Sizes {
        small: 0,
        exchange: 1 << 20,
        ..small().sizes.unwrap()
    };
    let options = GpuOptions {
        sizes: Some(sizes),
        ..small()
    };
    every_collective(&options, &[16_385, 70_001]);
}

#[test]
fn every_collective_split_between_executors() {
    every_collective(&by(Executor::Split), &[0, 1, 7, 3001, 50_000]);
}

#[test]
fn every_collective_by_the_short_kernel() {
    every_collective(&by(Executor::Small), &[0, 1, 3001, 50_000]);
}

#[test]
fn every_collective_staged_through_the_host() {
    every_collective(&by(Executor::Staged), &[0, 1, 3001]);
}

fn every_operator<T: Number>(gpu: &GpuCommunicator, stream: &Stream) {
    for &op in ReduceOp::ALL {
        for collective in [Collective::AllReduce, Collective::ReduceScatter, Collective::Reduce] {
            for count in [5, 6007] {
                let case = Case {
                    collective,
                    ranks: gpu.size(),
                    root: Rank(1),
                    count,
                };
                once::<T>(gpu, stream, &case, op, false, false);
                once::<T>(gpu, stream, &case, op, true, true);
            }
        }
    }
}

/// Among more than eight ranks reductions are rings, which pass on partial results of `f32`.
#[test]
fn types_of_wider_partial_results_among_nine_ranks() {
    let standin = Standin::load(ExecutionMode::Prompt);
    ranks(standin.driver().unwrap(), 9, &by(Executor::Kernel), |gpu| {
        let stream = Stream::new(gpu.context()).unwrap();
        every_operator::<f16>(&gpu, &stream);
        every_operator::<bf16>(&gpu, &stream);
        every_operator::<F8E4M3>(&gpu, &stream);
        gpu.destroy().unwrap();
    });
    standin.assert_nothing_left("communicators");
}

fn every_type_and_operator(executor: Executor) {
    let standin = Standin::load(ExecutionMode::Prompt);
    ranks(standin.driver().unwrap(), 3, &by(executor), |gpu| {
        let stream = Stream::new(gpu.context()).unwrap();
        every_operator::<i8>(&gpu, &stream);
        every_operator::<u8>(&gpu, &stream);
        every_operator::<i32>(&gpu, &stream);
        every_operator::<u32>(&gpu, &stream);
        every_operator::<i64>(&gpu, &stream);
        every_operator::<u64>(&gpu, &stream);
        every_operator::<f16>(&gpu, &stream);
        every_operator::<bf16>(&gpu, &stream);
        every_operator::<f32>(&gpu, &stream);
        every_operator::<f64>(&gpu, &stream);
        every_operator::<F8E4M3>(&gpu, &stream);
        every_operator::<F8E5M2>(&gpu, &stream);
        gpu.destroy().unwrap();
    });
    standin.assert_nothing_left("communicators");
}

#[test]
fn every_type_and_operator_by_copies() {
    every_type_and_operator(Executor::Copies);
}

#[test]
fn every_type_and_operator_split_between_executors() {
    every_type_and_operator(Executor::Split);
}

#[test]
fn every_type_and_operator_by_kernels() {
    every_type_and_operator(Executor::Kernel);
}

#[test]
fn every_type_and_operator_by_the_short_kernel() {
    every_type_and_operator(Executor::Small);
}
