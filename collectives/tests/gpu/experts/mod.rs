//! Dispatch and combine between GPUs against the plain reference: random routings, both modes, both
//! payloads, ranks without tokens, skew, captured graphs, impossible routings and failures.

mod rig;

use std::time::Duration;

use doorbell_collectives::gpu::{GpuCommunicator, GpuExpertParallel, GpuOptions, GpuRouting, as_bytes};
use doorbell_collectives::moe::{Mode, MoeOptions, Payload, Shape, reference};
use doorbell_collectives::{DataType, Options, Rank};
use doorbell_cuda::{Memory as _, Stream};
use doorbell_cuda_standin::{ExecutionMode, Standin};

use self::rig::{ALL, Batch, OnGpu, Received, compute, once, options_of};
use crate::gpus::small;
use crate::many::{ranks, ranks_with};
use crate::world;

fn options() -> GpuOptions {
    GpuOptions {
        blocks: Some(3),
        ..small()
    }
}

#[test]
fn random_routings_give_what_the_reference_gives() {
    let standin = Standin::load(ExecutionMode::Prompt);
    // Nothing that waits for work of the device is called while a rank may wait for this one.
    standin.set_implicit_synchronization(true);
    // Ranks, experts, top-k, hidden, tokens: more experts than the blocks' columns, one of a rank,
    // and one rank alone.
    for (p, experts, top_k, hidden, tokens) in [
        (3, 54, 5, 384, 17),
        (2, 2, 1, 128, 40),
        (4, 8, 8, 256, 5),
        (1, 4, 2, 128, 9),
    ] {
        ranks(standin.driver().unwrap(), p, &options(), |gpu| {
            let shape = Shape::new(p, experts, top_k, hidden, tokens).unwrap();
            let stream = Stream::new(gpu.context()).unwrap();
            for (number, how) in ALL.into_iter().enumerate() {
                let index = if number % 2 == 0 { DataType::I64 } else { DataType::I32 };
                // Before the ranks meet: an allocation waits for kernels, which wait for this rank.
                let mut memory = OnGpu::new(&shape, gpu.context(), index);
                let mut layer = gpu.expert_parallel(options_of(shape, how)).unwrap();
                for seed in 0..4 {
                    once(&mut layer, &stream, &mut memory, how, seed, gpu.rank());
                }
            }
            gpu.destroy().unwrap();
        });
    }
    standin.assert_nothing_left("dispatch and combine");
}

#[test]
fn dispatch_without_combine_can_be_repeated() {
    let standin = Standin::load(ExecutionMode::Prompt);
    ranks(standin.driver().unwrap(), 3, &options(), |gpu| {
        let shape = Shape::new(3, 6, 3, 128, 8).unwrap();
        let stream = Stream::new(gpu.context()).unwrap();
        for how in ALL {
            let mut layer = gpu.expert_parallel(options_of(shape, how)).unwrap();
            let mut memory = OnGpu::new(&shape, gpu.context(), DataType::I64);
            for seed in 0..3 {
                let batches = Batch::all(&shape, seed);
                memory.set(&stream, &batches[gpu.rank().index()], &shape);
                let dispatch = layer
                    .dispatch_send(memory.input.all(), memory.tokens, memory.routing(), &stream)
                    .unwrap();
                let received = dispatch.receive(&stream).unwrap();
                let found = Received {
                    rows: received.received_rows(&stream).unwrap(),
                    bytes: memory.read(&stream, received.rows().unwrap()),
                };
                compute(&shape, how, gpu.rank(), &batches, &found);
            }
            once(&mut layer, &stream, &mut memory, how, 7, gpu.rank());
        }
        gpu.destroy().unwrap();
    });
}

/// The experts return the rows as they are, so that a graph has all of it.
#[test]
fn captured_layers_can_be_relaunched() {
    let standin = Standin::load(ExecutionMode::Prompt);
    ranks(standin.driver().unwrap(), 3, &options(), |gpu| {
        let shape = Shape::new(3, 6, 2, 136, 8).unwrap();
        let stream = Stream::new(gpu.context()).unwrap();
        for mode in [Mode::LowLatency, Mode::HighThroughput] {
            let mut layer = gpu.expert_parallel(options_of(shape, (mode, Payload::Bf16))).unwrap();
            let mut memory = OnGpu::new(&shape, gpu.context(), DataType::I64);
            let batches: Vec<_> = (0..4)
                .map(|seed| {
                    let mut batch = Batch::all(&shape, seed)[0].clone();
                    // A graph has one number of tokens: ranks without choices have masked ones.
                    if gpu.rank() == Rank(2) && seed % 2 == 0 {
                        batch.indices.fill(-1);
                    }
                    batch
                })
                .collect();
            memory.set(&stream, &batches[0], &shape);
            let graph = gpu
                .capture(&stream, || {
                    let dispatch = layer.dispatch_send(memory.input.all(), memory.tokens, memory.routing(), &stream)?;
                    let received = dispatch.receive(&stream)?;
                    let rows = received.rows()?;
                    let rows = rows.keep();
                    received
                        .combine_send(rows.all(), &stream)?
                        .receive(memory.output.all(), &stream)
                })
                .unwrap();
            let exec = graph.instantiate().unwrap();
            for batch in &batches {
                memory.set(&stream, batch, &shape);
                exec.launch(&stream).unwrap();
                exec.launch(&stream).unwrap();
                let hidden = shape.hidden() as usize;
                let wanted = reference::combine(&batch.routing(&shape), |_, pair| {
                    batch.tokens[pair as usize / shape.top_k() as usize * hidden..][..hidden].to_vec()
                });
                assert!(memory.read(&stream, memory.output.all()) == as_bytes(&wanted), "{mode}");
            }
        }
        gpu.destroy().unwrap();
    });
}

/// Enqueues a dispatch that cannot be completed, checks that the stream is released, and returns
/// the failure.
fn failure(gpu: &GpuCommunicator, layer: &mut GpuExpertParallel<'_>, batch: &Batch) -> String {
    let shape = layer.options().shape;
    let stream = Stream::new(gpu.context()).unwrap();
    let mut memory = OnGpu::new(&shape, gpu.context(), DataType::I64);
    memory.set(&stream, batch, &shape);
    // The other rank may have failed already.
    if let Ok(dispatch) = layer.dispatch_send(memory.input.all(), memory.tokens, memory.routing(), &stream) {
        drop(dispatch.receive(&stream));
    }
    stream.synchronize().unwrap();
    loop {
        match gpu.check() {
            Ok(()) => std::thread::sleep(Duration::from_millis(1)),
            Err(error) => return error.to_string(),
        }
    }
}

#[test]
fn abort_and_deadline_release_dispatch() {
    for how in [ALL[0], ALL[2]] {
        let standin = Standin::load(ExecutionMode::Prompt);
        let host = Options {
            deadline: Duration::from_millis(800),
            ..world::options()
        };
        ranks_with(standin.driver().unwrap(), 3, &host, &options(), |gpu| {
            let shape = Shape::new(3, 6, 2, 128, 8).unwrap();
            let mut layer = gpu.expert_parallel(options_of(shape, how)).unwrap();
            if gpu.rank() == Rank(1) {
                if how.0 == Mode::LowLatency {
                    gpu.abort("a test");
                }
                while gpu.check().is_ok() {
                    std::thread::sleep(Duration::from_millis(5));
                }
                return;
            }
            let error = failure(&gpu, &mut layer, &Batch::all(&shape, 3)[0]);
            let wanted = if how.0 == Mode::LowLatency { "a test" } else { "within" };
            assert!(error.contains(wanted) && !error.contains('\n'), "{error}");
        });
        standin.assert_nothing_left("a released dispatch");
    }
}

#[test]
fn impossible_routings_fail_the_communicator() {
    // Of too many pairs, the rank that gets them may be the first to report.
    let unknown = ["token 2 names an expert that does not exist"; 2];
    let repeated = ["a token chooses an expert twice", "counted more pairs than it can have"];
    for (how, reasons) in [
        (ALL[0], unknown),
        (ALL[3], unknown),
        (ALL[1], repeated),
        (ALL[2], repeated),
    ] {
        let standin = Standin::load(ExecutionMode::Prompt);
        ranks(standin.driver().unwrap(), 2, &options(), |gpu| {
            let shape = Shape::new(2, 2, 2, 128, 6).unwrap();
            let mut layer = gpu.expert_parallel(options_of(shape, how)).unwrap();
            let mut batch = Batch::all(&shape, 2)[0].clone();
            if gpu.rank() == Rank(0) {
                match reasons == unknown {
                    true => batch.indices[5] = 2 + i64::from(u32::MAX),
                    false => batch.indices.fill(1),
                }
            }
            let error = failure(&gpu, &mut layer, &batch);
            let is_known = reasons.iter().any(|reason| error.contains(reason));
            assert!(is_known && error.contains("rank 0"), "{error}");
        });
        standin.assert_nothing_left("an impossible routing");
    }
}

#[test]
fn invalid_calls_are_refused_before_enqueuing() {
    let standin = Standin::load(ExecutionMode::Prompt);
    ranks(standin.driver().unwrap(), 2, &options(), |gpu| {
        let refused = |shape: (u32, u32, u32), payload| {
            let shape = Shape::new(shape.0, shape.1, 1, shape.2, 4).unwrap();
            gpu.expert_parallel(options_of(shape, (Mode::LowLatency, payload)))
                .unwrap_err()
                .to_string()
        };
        assert!(refused((3, 3, 128), Payload::Bf16).contains("for 3 ranks, and the communicator has 2"));
        assert!(refused((2, 2048, 128), Payload::Bf16).contains("at most 1024 experts"));
        assert!(refused((2, 2, 136), Payload::Fp8).contains("multiple of 128"));
        let shape = Shape::new(2, 4, 2, 128, 4).unwrap();
        let stream = Stream::new(gpu.context()).unwrap();
        let mut layer = gpu
            .expert_parallel(options_of(shape, (Mode::LowLatency, Payload::Bf16)))
            .unwrap();
        let mut memory = OnGpu::new(&shape, gpu.context(), DataType::I32);
        memory.set(&stream, &Batch::all(&shape, 0)[0], &shape);
        let (input, good) = (memory.input.all(), memory.routing());
        let float = GpuRouting {
            index: DataType::F32,
            ..good
        };
        let short = GpuRouting {
            weights: good.weights.span(..4).unwrap(),
            ..good
        };
        for (input, tokens, routing, why) in [
            (input, 5, good, "at most 4"),
            (input, 4, float, "i32 or i64"),
            (input, 4, short, "the weights have 4 bytes, and 32 are required"),
            (input.span(..16).unwrap(), 4, good, "the tokens have 16 bytes"),
            (input.span(8..).unwrap(), 2, good, "not aligned to 16"),
        ] {
            let error = layer
                .dispatch_send(input, tokens, routing, &stream)
                .unwrap_err()
                .to_string();
            assert!(error.contains(why) && !error.contains('\n'), "{error}");
        }
        let dispatch = layer.dispatch_send(input, 4, good, &stream).unwrap();
        // Not received.
        drop(dispatch);
        let error = layer.dispatch_send(input, 4, good, &stream).unwrap_err().to_string();
        assert!(error.contains("not received"), "{error}");
        stream.synchronize().unwrap();
        gpu.check().unwrap();
        drop(layer);
        gpu.destroy().unwrap();
    });
}

#[test]
fn options_that_differ_are_refused_on_all_ranks() {
    let standin = Standin::load(ExecutionMode::Prompt);
    ranks(standin.driver().unwrap(), 2, &options(), |gpu| {
        let shape = Shape::new(2, 4, 2, 128, 4 + gpu.rank().0).unwrap();
        let error = gpu.expert_parallel(options_of(shape, ALL[0])).unwrap_err().to_string();
        assert!(error.contains("other dimensions"), "{error}");
        gpu.destroy().unwrap();
    });
}

/// Nothing is stored beyond the memory of the rank that has too little.
#[test]
fn too_many_rows_for_the_capacity_fail_the_communicator() {
    let standin = Standin::load(ExecutionMode::Prompt);
    ranks(standin.driver().unwrap(), 2, &options(), |gpu| {
        let shape = Shape::new(2, 2, 1, 128, 6).unwrap();
        let options = MoeOptions {
            capacity: Some(7),
            ..options_of(shape, ALL[2])
        };
        let mut layer = gpu.expert_parallel(options).unwrap();
        let mut batch = Batch::all(&shape, 2)[0].clone();
        batch.indices.fill(1);
        let error = failure(&gpu, &mut layer, &batch);
        assert!(error.contains("rank 1 would receive more rows"), "{error}");
    });
    standin.assert_nothing_left("too many rows");
}
