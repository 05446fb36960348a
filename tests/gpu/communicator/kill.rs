//! A rank is killed: the others get an error in time, and their streams and GPUs remain usable.

use std::fmt;
use std::io::{BufRead as _, BufReader, Write as _};
use std::process::Stdio;
use std::str::FromStr;
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, bail, ensure};
use doorbell_collectives::gpu::{Executor, GpuCommunicator, GpuError, GpuOptions};
use doorbell_collectives::plan::Collective;
use doorbell_collectives::reference::Case;
use doorbell_collectives::{Communicator, Rank, ReduceOp};
use doorbell_cuda::reduce::{DataType, OperandKind, Operator, Reducer, Source};
use doorbell_cuda::{Context, DeviceMemory, HostMemory, Memory as _, Stream};

use crate::gpus::{Buffers, call, once};
use crate::{Options, exit_statuses, gpu_options, start};

pub(crate) const DEADLINE: Duration = Duration::from_secs(10);
/// How long the ranks run before one is killed.
const BEFORE: Duration = Duration::from_millis(300);
/// The line by which the rank to be killed reports that it is ready.
const READY: &str = "ready";
/// Elements of the operations (f32): normal, and quick.
const COUNT: [u64; 2] = [4 << 20, 64 << 10];

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct KillMode {
    executor: Executor,
    /// While the others wait for it, rather than at any time.
    waiting: bool,
}

impl fmt::Display for KillMode {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(
            f,
            "{}-{}",
            self.executor.name(),
            if self.waiting { "waiting" } else { "load" }
        )
    }
}

impl FromStr for KillMode {
    type Err = anyhow::Error;

    fn from_str(text: &str) -> Result<Self> {
        let (executor, moment) = text.split_once('-').context("an executor and a moment")?;
        Ok(Self {
            executor: executor.parse()?,
            waiting: match moment {
                "waiting" => true,
                "load" => false,
                _ => bail!("there is no moment {moment}"),
            },
        })
    }
}

/// All variants; whether the other ranks behaved correctly each time.
pub(crate) fn run(options: &Options) -> Result<bool> {
    let mut right = true;
    for executor in [Executor::Kernel, Executor::Copies] {
        for waiting in [true, false] {
            let mode = KillMode { executor, waiting };
            match one(options, mode) {
                Ok(()) => println!("PASS kill: {mode}"),
                Err(error) => {
                    println!("FAIL kill: {mode}: {error:#}");
                    right = false;
                }
            }
        }
    }
    Ok(right)
}

fn one(options: &Options, mode: KillMode) -> Result<()> {
    let victim = options.ranks - 1;
    let (mut ranks, _serving) = start(options, "kill", |rank, command| {
        command.args(["--fate", &mode.to_string()]);
        if rank == victim {
            command.stdout(Stdio::piped());
        }
    })?;
    let child = ranks.child(victim)?;
    let mut line = String::new();
    BufReader::new(child.stdout.take().context("a pipe")?).read_line(&mut line)?;
    ensure!(line.trim() == READY, "rank {victim} says {line:?}");
    thread::sleep(BEFORE);
    child.kill()?;
    let ended = ranks.wait(options.limit)?;
    let survived = |(rank, status): (usize, &Option<std::process::ExitStatus>)| {
        rank == victim as usize || status.is_some_and(|status| status.success())
    };
    ensure!(ended.iter().enumerate().all(survived), "{}", exit_statuses(&ended));
    Ok(())
}

/// Runs a rank; the last one reports to the parent when it may be killed.
pub(crate) fn rank(options: &Options, comm: Communicator, context: &Context, mode: KillMode) -> Result<()> {
    let how = GpuOptions {
        executor: Some(mode.executor),
        ..gpu_options(options)
    };
    let gpu = GpuCommunicator::new(comm, context, how)?;
    ensure!(gpu.staged_reason().is_none(), "{:?}", gpu.staged_reason());
    let rank = gpu.rank();
    let case = Case {
        collective: Collective::AllReduce,
        ranks: gpu.size(),
        root: Rank(0),
        count: COUNT[usize::from(options.quick)],
    };
    let stream = Stream::new(context)?;
    once::<f32>(&gpu, &stream, &case, ReduceOp::Sum, false, true);
    let buffers = Buffers::new::<f32>(context, &case, rank, false);
    gpu.register(&buffers.memory)?;
    buffers.fill::<f32>(rank, 0, &stream);
    stream.synchronize()?;
    gpu.host().barrier().wait()?;
    let is_victim = rank.0 + 1 == gpu.size();
    if is_victim {
        println!("{READY}");
        std::io::stdout().flush()?;
        if mode.waiting {
            loop {
                thread::sleep(DEADLINE);
            }
        }
    }
    let (mut operations, mut last) = (0, Instant::now());
    let error = loop {
        // A few at a time, some of which queue behind one that waits for the dead rank.
        let call = call::<f32, _>(&buffers, &case, ReduceOp::Sum, rank);
        if let Err(error) = (0..3).try_for_each(|_| gpu.enqueue(&call, &stream)) {
            break error;
        }
        stream.synchronize().context("the stream, when a rank was killed")?;
        if let Err(error) = gpu.check() {
            break error;
        }
        operations += 3;
        last = Instant::now();
    };
    ensure!(
        matches!(error, GpuError::Collective(_)),
        "the reported error is {error}"
    );
    stream.synchronize().context("the stream, when a rank was killed")?;
    let took = last.elapsed();
    still_works(context).context("the GPU, when a rank was killed")?;
    println!(
        "kill: {mode}: rank {rank} did {operations} operations, got the error after {took:.1?}, and its GPU works: {error}"
    );
    ensure!(took < 2 * DEADLINE, "rank {rank} got the error after {took:?}");
    drop((buffers, gpu));
    still_works(context).context("the GPU, when its communicator was gone")
}

fn still_works(context: &Context) -> Result<()> {
    const BYTES: usize = 1 << 20;
    let stream = Stream::new(context)?;
    let memory = DeviceMemory::alloc(context, 3 * BYTES)?;
    let host = HostMemory::alloc(context, BYTES)?;
    let [first, second, sum] = [
        memory.span(..BYTES)?,
        memory.span(BYTES..2 * BYTES)?,
        memory.span(2 * BYTES..)?,
    ];
    stream.fill(first, 20)?;
    stream.fill(second, 3)?;
    Reducer::new(context).reduce(
        &stream,
        DataType::U8,
        Operator::Sum,
        &[Source::elements(first), Source::elements(second)],
        (OperandKind::Element, sum),
    )?;
    stream.copy(host.all(), sum)?;
    stream.synchronize()?;
    let mut bytes = vec![0; BYTES];
    host.copy_out(0, &mut bytes)?;
    ensure!(bytes.iter().all(|byte| *byte == 23), "a kernel's result is wrong");
    Ok(())
}
