//! The first operation of each kind: it calls nothing that waits for work of the device, where two
//! communicators that are fed in opposite orders would wait for each other.

use std::marker::PhantomData;
use std::time::Duration;

use doorbell_collectives::gpu::{Executor, GpuCommunicator, GpuOptions};
use doorbell_collectives::kernel::{F8E4M3, F8E5M2, bf16, f16};
use doorbell_collectives::plan::Collective;
use doorbell_collectives::reference::{Case, Number};
use doorbell_collectives::{Options, Rank, ReduceOp};
use doorbell_cuda::Stream;
use doorbell_cuda_standin::{ExecutionMode, Standin};

use crate::gpus::{Buffers, enqueue, small};
use crate::many::ranks_with;
use crate::world;

/// For the LL protocol, and for slices.
const COUNTS: [u64; 2] = [3, 40_003];

/// Loads, allocations, frees, and what waits.
fn may_wait(call: &str) -> bool {
    let moves = call.starts_with("cuMemcpy") || call.starts_with("cuMemset");
    let kinds = [
        "cuModule",
        "cuFuncLoad",
        "cuMem",
        "cuIpc",
        "cuStreamCreate",
        "cuStreamDestroy",
    ];
    kinds.iter().any(|kind| call.starts_with(kind)) && !moves || call.contains("Synchronize")
}

struct Operation<T: Number> {
    case: Case,
    op: ReduceOp,
    buffers: Buffers,
    data: PhantomData<T>,
}

trait Enqueue {
    fn enqueue(&self, gpu: &GpuCommunicator, stream: &Stream);
}

impl<T: Number> Enqueue for Operation<T> {
    fn enqueue(&self, gpu: &GpuCommunicator, stream: &Stream) {
        enqueue::<T, _>(gpu, stream, &self.case, self.op, &self.buffers);
    }
}

/// Every operation of a type, with its memory.
fn every<T: Number>(gpu: &GpuCommunicator, registered: bool) -> Vec<Box<dyn Enqueue>> {
    let mut all: Vec<Box<dyn Enqueue>> = Vec::new();
    for &collective in Collective::ALL {
        // Kernels differ by operator only where they reduce for the copy engines.
        let operators = match collective {
            Collective::AllReduce => ReduceOp::ALL,
            _ => &[ReduceOp::Sum],
        };
        for &op in operators {
            for count in COUNTS {
                let case = Case {
                    collective,
                    ranks: gpu.size(),
                    root: Rank(1),
                    count: if collective == Collective::Barrier { 0 } else { count },
                };
                let buffers = Buffers::new::<T>(gpu.context(), &case, gpu.rank(), false);
                if registered {
                    gpu.register(&buffers.memory).unwrap();
                }
                all.push(Box::new(Operation::<T> {
                    case,
                    op,
                    buffers,
                    data: PhantomData,
                }));
            }
        }
    }
    all
}

fn every_type(gpu: &GpuCommunicator) -> Vec<Box<dyn Enqueue>> {
    let mut all = every::<f32>(gpu, gpu.staged_reason().is_none());
    all.extend(every::<i8>(gpu, false));
    all.extend(every::<u8>(gpu, false));
    all.extend(every::<i32>(gpu, false));
    all.extend(every::<u32>(gpu, false));
    all.extend(every::<i64>(gpu, false));
    all.extend(every::<u64>(gpu, false));
    all.extend(every::<f16>(gpu, false));
    all.extend(every::<bf16>(gpu, false));
    all.extend(every::<f64>(gpu, false));
    all.extend(every::<F8E4M3>(gpu, false));
    all.extend(every::<F8E5M2>(gpu, false));
    all
}

fn waits_for_nothing(executor: Option<Executor>) {
    let options = GpuOptions {
        executor,
        blocks: Some(4),
        ..small()
    };
    // The last operation is enqueued long before it begins.
    let host = Options {
        deadline: Duration::from_secs(600),
        ..world::options()
    };
    let standin = Standin::load(ExecutionMode::Prompt);
    let waiting = ranks_with(standin.driver().unwrap(), 2, &host, &options, |gpu| {
        let stream = Stream::new(gpu.context()).unwrap();
        let operations = every_type(&gpu);
        let meet = || gpu.host().barrier().wait().unwrap();
        meet();
        let before = standin.calls();
        meet();
        for operation in &operations {
            operation.enqueue(&gpu, &stream);
        }
        let captured = gpu.capture(&stream, || {
            operations[0].enqueue(&gpu, &stream);
            Ok(())
        });
        let calls = standin.calls();
        meet();
        drop(captured.unwrap());
        stream.synchronize().unwrap();
        gpu.destroy().unwrap();
        let count = |call: &str| before.get(call).copied().unwrap_or(0);
        calls
            .into_iter()
            .filter(|(call, times)| may_wait(call) && *times > count(call))
            .collect::<Vec<_>>()
    });
    assert!(waiting.iter().all(Vec::is_empty), "{executor:?}: {waiting:?}");
    standin.assert_nothing_left("first operations");
}

#[test]
fn first_operations_wait_for_nothing() {
    for executor in [None, Some(Executor::Kernel), Some(Executor::Copies)] {
        waits_for_nothing(executor);
    }
}
