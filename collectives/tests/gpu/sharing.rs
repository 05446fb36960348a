//! Several ranks on one GPU: the thread blocks of all are resident together, and where contexts
//! are time-sliced, no kernel waits.

use std::sync::Barrier;
use std::time::Duration;

use doorbell_collectives::gpu::{Executor, GpuCommunicator, GpuMessage, GpuOptions, Sizes};
use doorbell_collectives::plan::Collective;
use doorbell_collectives::reference::Case;
use doorbell_collectives::{DataType, Options, Rank, ReduceOp};
use doorbell_cuda::{Attribute, CaptureMode, DeviceMemory, Memory as _, Stream, reduce};
use doorbell_cuda_standin::{ExecutionMode, Standin};

use crate::gpus::{Buffers, call, once};
use crate::many::{ranks, ranks_with};
use crate::world;

/// CUDA 13.0.
const VERSION: i32 = 13_000;

/// Little memory, as many ranks share it.
fn options() -> GpuOptions {
    GpuOptions {
        sizes: Some(Sizes {
            slots: 1 << 20,
            small: 4 << 20,
            exchange: 4 << 20,
            fifos: 4 << 20,
            staging: 1 << 20,
            ..Sizes::default()
        }),
        ..GpuOptions::default()
    }
}

/// A stand-in for one GPU.
fn one_gpu(multiprocessors: i32) -> Standin {
    let standin = Standin::load(ExecutionMode::Prompt);
    standin.set_start(1, VERSION);
    set_multiprocessors(&standin, multiprocessors);
    standin
}

fn set_multiprocessors(standin: &Standin, count: i32) {
    standin.set_attribute(Attribute::MultiprocessorCount as i32, count);
}

fn every_collective(gpu: &GpuCommunicator, stream: &Stream, counts: &[u64], op: ReduceOp) {
    for &collective in Collective::ALL {
        // Of all-to-all-v a rank without elements has no memory to call it with.
        let counts = counts
            .iter()
            .filter(|count| **count > 0 || collective != Collective::AllToAllV);
        for &count in counts {
            let case = Case {
                collective,
                ranks: gpu.size(),
                root: Rank(1),
                count: if collective == Collective::Barrier { 0 } else { count },
            };
            once::<i32>(gpu, stream, &case, op, false, false);
        }
    }
}

/// Each in a stream of its own, which the ranks feed in opposite orders.
fn both_at_once(gpus: [&GpuCommunicator; 2], case: &Case) {
    let rank = gpus[0].rank();
    let streams = gpus.map(|gpu| Stream::new(gpu.context()).unwrap());
    let buffers = gpus.map(|gpu| Buffers::new::<i32>(gpu.context(), case, rank, false));
    for (buffers, stream) in buffers.iter().zip(&streams) {
        buffers.fill::<i32>(rank, 7, stream);
    }
    for turn in 0..6 {
        let at = (turn + rank.index()) % 2;
        let call = call::<i32, _>(&buffers[at], case, ReduceOp::Sum, rank);
        gpus[at].enqueue(&call, &streams[at]).unwrap();
    }
    for (buffers, stream) in buffers.iter().zip(&streams) {
        assert_eq!(
            case.count_wrong(ReduceOp::Sum, rank, 7, &buffers.read::<i32>(stream)),
            0,
            "{case:?}"
        );
    }
}

fn all_are_resident(p: u32, counts: &[u64]) {
    let standin = one_gpu(64);
    ranks(standin.driver().unwrap(), p, &options(), |gpu| {
        assert!(gpu.ranks_per_gpu() == p && !gpu.is_time_sliced());
        every_collective(&gpu, &Stream::new(gpu.context()).unwrap(), counts, ReduceOp::Sum);
        let other = gpu.host().duplicate().unwrap();
        let other = GpuCommunicator::new(other, gpu.context(), options()).unwrap();
        // By kernels of as many thread blocks as there may be.
        let case = Case {
            collective: Collective::AllReduce,
            ranks: p,
            root: Rank(0),
            count: 300_000,
        };
        let (executor, _) = gpu.selection(case.collective, DataType::I32, case.count as usize, false);
        assert_eq!(executor, Executor::Kernel);
        both_at_once([&gpu, &other], &case);
        other.destroy().unwrap();
        gpu.destroy().unwrap();
    });
    standin.assert_nothing_left("ranks on one GPU");
}

#[test]
fn thread_blocks_of_two_ranks_are_resident_together() {
    all_are_resident(2, &[5, 3001, 300_000]);
}

#[test]
fn thread_blocks_of_four_ranks_are_resident_together() {
    all_are_resident(4, &[5, 3001, 150_000]);
}

#[test]
fn thread_blocks_of_eight_ranks_are_resident_together() {
    all_are_resident(8, &[5, 20_000]);
}

#[test]
fn thread_blocks_of_sixteen_ranks_are_resident_together() {
    all_are_resident(16, &[20_000]);
}

/// Before the operation it executes kernels of the program, while the blocks of the others wait.
#[test]
fn a_late_rank_finds_room_for_kernels_of_the_program() {
    const RANKS: u32 = 8;
    let standin = one_gpu(132);
    let others = Barrier::new(RANKS as usize);
    let mut options = options();
    options.sizes.as_mut().unwrap().small = Sizes::default().small;
    ranks(standin.driver().unwrap(), RANKS, &options, |gpu| {
        let stream = Stream::new(gpu.context()).unwrap();
        let case = Case {
            collective: Collective::AllReduce,
            ranks: RANKS,
            root: Rank(0),
            count: 4800,
        };
        let (executor, _) = gpu.selection(case.collective, DataType::I32, case.count as usize, false);
        assert_eq!(executor, Executor::Small);
        let is_late = gpu.rank() == Rank(RANKS - 1);
        let buffers = Buffers::new::<i32>(gpu.context(), &case, gpu.rank(), false);
        buffers.fill::<i32>(gpu.rank(), 7, &stream);
        let reducer = reduce::Reducer::new(gpu.context());
        let own = DeviceMemory::alloc(gpu.context(), 64).unwrap();
        let run = || {
            let (data, operator) = (reduce::DataType::I32, reduce::Operator::Sum);
            let into = (reduce::OperandKind::Element, own.all());
            let sources = [reduce::Source::elements(own.all())];
            reducer.reduce(&stream, data, operator, &sources, into).unwrap();
            stream.synchronize().unwrap();
        };
        run();
        let call = call::<i32, _>(&buffers, &case, ReduceOp::Sum, gpu.rank());
        if !is_late {
            gpu.enqueue(&call, &stream).unwrap();
        }
        others.wait();
        if is_late {
            for _ in 0..50 {
                run();
                std::thread::sleep(Duration::from_millis(1));
            }
            gpu.enqueue(&call, &stream).unwrap();
        }
        let wrong = case.count_wrong(ReduceOp::Sum, gpu.rank(), 7, &buffers.read::<i32>(&stream));
        assert_eq!(wrong, 0);
        gpu.destroy().unwrap();
    });
    standin.assert_nothing_left("a late rank");
}

/// As many as would be resident on a larger GPU: none of the ranks has room for its first one
/// together with the others'.
#[test]
fn thread_blocks_that_have_no_room_wait_until_the_deadline() {
    const RANKS: u32 = 4;
    let standin = one_gpu(64);
    let ready = Barrier::new(RANKS as usize);
    let host = Options {
        deadline: Duration::from_secs(2),
        ..world::options()
    };
    ranks_with(standin.driver().unwrap(), RANKS, &host, &options(), |gpu| {
        ready.wait();
        set_multiprocessors(&standin, RANKS as i32 - 1);
        ready.wait();
        let stream = Stream::new(gpu.context()).unwrap();
        let case = Case {
            collective: Collective::AllReduce,
            ranks: RANKS,
            root: Rank(0),
            count: 300_000,
        };
        let buffers = Buffers::new::<i32>(gpu.context(), &case, gpu.rank(), false);
        let call = call::<i32, _>(&buffers, &case, ReduceOp::Sum, gpu.rank());
        gpu.enqueue(&call, &stream).unwrap();
        stream.synchronize().unwrap();
        let error = gpu.check().unwrap_err().to_string();
        assert!(error.contains("has not finished within 2s"), "{error}");
    });
}

/// As ranks in different processes without an MPS daemon: each has a context of its own. Once no
/// multiprocessor has room for it, a kernel that may wait would not begin.
#[test]
fn no_kernel_waits_where_contexts_are_time_sliced() {
    for p in [2, 5] {
        let standin = one_gpu(132);
        let driver = standin.driver().unwrap();
        let ready = Barrier::new(p as usize);
        world::ranks(p, &world::options(), |comm| {
            let context = driver.device(0).unwrap().separate_context().unwrap();
            let gpu = GpuCommunicator::new(comm, &context, options()).unwrap();
            assert!(gpu.ranks_per_gpu() == p && gpu.is_time_sliced());
            ready.wait();
            set_multiprocessors(&standin, 0);
            ready.wait();
            let stream = Stream::new(&context).unwrap();
            for op in [ReduceOp::Sum, ReduceOp::PreMulSum] {
                every_collective(&gpu, &stream, &[0, 5, 3001, 300_000], op);
            }
            captured(&gpu, &stream);
            gpu.destroy().unwrap();
        });
        standin.assert_nothing_left("time-sliced ranks");
    }
}

/// In a capture of the program, which has no streams but its own. Groups, in which the host has a
/// part, are refused.
fn captured(gpu: &GpuCommunicator, stream: &Stream) {
    let rank = gpu.rank();
    let case = Case {
        collective: Collective::AllReduce,
        ranks: gpu.size(),
        root: Rank(0),
        count: 70_000,
    };
    let buffers = Buffers::new::<i32>(gpu.context(), &case, rank, false);
    let graph = stream.capture(CaptureMode::Relaxed, &[], || {
        gpu.enqueue(&call::<i32, _>(&buffers, &case, ReduceOp::Max, rank), stream)
            .unwrap();
        let [send, receive] = [0..8, 8..16].map(|bytes| buffers.memory.span(bytes).unwrap());
        let messages = [GpuMessage::send(send, rank), GpuMessage::receive(receive, rank)];
        let refused = gpu.group(&messages, stream).unwrap_err().to_string();
        assert!(refused.contains("MPS"), "{refused}");
        Ok(())
    });
    let exec = graph.unwrap().instantiate().unwrap();
    for seed in 0..3 {
        buffers.fill::<i32>(rank, seed, stream);
        exec.launch(stream).unwrap();
        let output = buffers.read::<i32>(stream);
        assert_eq!(case.count_wrong(ReduceOp::Max, rank, seed, &output), 0);
    }
}
