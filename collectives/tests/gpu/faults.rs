//! Failure injection into every driver function that a communicator calls: a rank reports the
//! function and the driver's code, or the operation succeeds. No rank hangs, and nothing leaks.

use std::time::{Duration, Instant};

use doorbell_collectives::gpu::{Executor, GpuCommunicator, GpuError, GpuOptions};
use doorbell_collectives::plan::Collective;
use doorbell_collectives::reference::Case;
use doorbell_collectives::{Communicator, Options, Rank, ReduceOp};
use doorbell_cuda::{Context, DeviceMemory, Driver, Memory as _, Stream};
use doorbell_cuda_standin::{ExecutionMode, Standin};

use crate::gpus::{Buffers, bytes, call, small};
use crate::world;

const RANKS: u32 = 2;
/// The deadline of an operation. A rank that reaches it was not informed of another rank's failure.
const DEADLINE: Duration = Duration::from_secs(30);
/// The injected code: `CUDA_ERROR_OPERATING_SYSTEM`, after which other calls succeed.
const CODE: i32 = 304;
const CASE: Case = Case {
    collective: Collective::AllReduce,
    ranks: RANKS,
    root: Rank(0),
    count: 20_000,
};
/// Functions that release something: if they fail it stays, and the dropping code cannot report it.
const RELEASES: [&str; 11] = [
    "cuCtxPopCurrent_v2",
    "cuDevicePrimaryCtxRelease_v2",
    "cuEventDestroy_v2",
    "cuMemAddressFree",
    "cuMemFreeHost",
    "cuMemHostUnregister",
    "cuMemRelease",
    "cuMemUnmap",
    "cuModuleUnload",
    "cuStreamDestroy_v2",
    "cuThreadExchangeStreamCaptureMode",
];
/// Opportunistic queries, of completion or of hints: their failure is no error.
const QUERIES: [&str; 6] = [
    "cuDeviceGet",
    "cuDeviceGetAttribute",
    "cuEventQuery",
    "cuFuncGetAttribute",
    "cuStreamIsCapturing",
    "cuStreamQuery",
];

/// Returns why it is staged, or memory is not registered, if so.
fn life(driver: Driver, comm: Communicator, executor: Executor) -> Result<String, GpuError> {
    let rank = comm.rank();
    let context = driver.device(rank.index() % driver.device_count())?.context()?;
    let done = in_context(&context, comm, executor);
    // A context dropped first leaves resources in use to the driver.
    let idle = context.synchronize();
    let why = done?;
    idle?;
    Ok(why)
}

fn in_context(context: &Context, comm: Communicator, executor: Executor) -> Result<String, GpuError> {
    let options = GpuOptions {
        executor: Some(executor),
        ..small()
    };
    let gpu = GpuCommunicator::new(comm, context, options)?;
    let mut why = gpu.staged_reason().unwrap_or_default().to_owned();
    let stream = Stream::new(context).inspect_err(|error| gpu.abort(&error.to_string()))?;
    if let Err(error) = operations(&gpu, &stream, &mut why) {
        // Failures within an operation have already been reported to the others.
        gpu.abort(&error.to_string());
        // All enqueued work completes.
        stream.synchronize()?;
        return Err(error);
    }
    drop(stream);
    gpu.destroy()?;
    Ok(why)
}

fn operations(gpu: &GpuCommunicator, stream: &Stream, why: &mut String) -> Result<(), GpuError> {
    let memory = DeviceMemory::alloc(gpu.context(), bytes::<f32>(&CASE))?;
    if let Err(error) = gpu.register(&memory) {
        // Registration is optional.
        *why = error.to_string();
    }
    let buffers = Buffers::of::<f32>(memory, &CASE, gpu.rank(), false);
    stream.fill(buffers.memory.all(), 0)?;
    for _ in 0..2 {
        gpu.enqueue(&call::<f32, _>(&buffers, &CASE, ReduceOp::Sum, gpu.rank()), stream)?;
    }
    stream.synchronize()?;
    gpu.check()?;
    gpu.deregister(&buffers.memory);
    Ok(())
}

fn lives(driver: Driver, executor: Executor) -> Vec<Result<String, String>> {
    let options = Options {
        deadline: DEADLINE,
        ..world::options()
    };
    world::ranks(RANKS, &options, |comm| {
        life(driver, comm, executor).map_err(|error| error.to_string())
    })
}

fn every_call_fails_in_turn(executor: Executor) {
    let standin = Standin::load(ExecutionMode::Prompt);
    let driver = standin.driver().unwrap();
    let before = standin.calls();
    let done = lives(driver, executor);
    assert!(done.iter().all(Result::is_ok), "{done:?}");
    standin.assert_nothing_left("no failure");
    let (mut failures, mut wrong) = (0, Vec::new());
    for (name, calls) in standin.calls() {
        let calls = calls - before.get(&name).unwrap_or(&0);
        if RELEASES.contains(&&*name) || calls == 0 {
            continue;
        }
        let mut turns = vec![1, calls / 2 + 1];
        turns.dedup();
        for nth in turns {
            let begun = Instant::now();
            standin.fail_nth(&name, nth, CODE);
            let done = lives(driver, executor);
            let has_failed = !standin.is_failing();
            standin.fail_nth("", 1, 0);
            let what = format!("call {nth} of {name}: {done:?}");
            if begun.elapsed() >= DEADLINE {
                wrong.push(format!("the others got no error: {what}"));
            }
            // The function may be called less often this time.
            let is_done = done.iter().all(Result::is_ok);
            if has_failed && !(is_done && QUERIES.contains(&&*name)) {
                let plain = name.trim_end_matches("_v2").trim_end_matches("_v3");
                let is_reported =
                    |message: &String| message.contains(plain) && message.contains("CUDA_ERROR_OPERATING_SYSTEM");
                let mut message = done.iter().map(|done| done.as_ref().unwrap_or_else(|error| error));
                if !message.any(is_reported) {
                    wrong.push(what.clone());
                }
                failures += 1;
            } else if !is_done {
                wrong.push(what.clone());
            }
            if done
                .iter()
                .flat_map(|done| done.as_ref().err())
                .any(|error| error.contains('\n'))
            {
                wrong.push(what.clone());
            }
            standin.assert_nothing_left(&what);
        }
    }
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
    assert!(failures > 20, "{failures} calls have failed");
}

#[test]
fn every_call_of_copies_fails_in_turn() {
    every_call_fails_in_turn(Executor::Copies);
}

#[test]
fn every_call_of_kernels_fails_in_turn() {
    every_call_fails_in_turn(Executor::Kernel);
}

#[test]
fn every_call_of_staging_fails_in_turn() {
    every_call_fails_in_turn(Executor::Staged);
}
