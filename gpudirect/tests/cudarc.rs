//! Slices, streams and events of the crate `cudarc`, on the stand-in for the driver; on that of a
//! machine with `DOORBELL_CUDA_LIBRARY=libcuda.so.1`.

mod common;

use std::error::Error;
use std::os::unix::fs::symlink;
use std::path::PathBuf;
use std::process::{self, Command, ExitCode};
use std::sync::Arc;
use std::{env, fs};

use common::{Case, Outcome};
use cudarc::driver::sys::{CUgraphInstantiate_flags, CUstreamCaptureMode};
use cudarc::driver::{CudaContext, CudaSlice, CudaStream};
use doorbell_cuda::{Context, DeviceMemory, Driver, Error as CudaError, Event, Memory, Stream};
use doorbell_cuda_standin::{ExecutionMode, environment};
use doorbell_gpudirect::{GpuMemory, SliceLoan, register};
use doorbell_softroce_ibverbs::api;
use doorbell_verbs::{Library, Opaque, PeerReadWrite};

const CASES: [Case; 5] = [
    ("a_slice_is_lent_while_in_flight_and_given_back", slice_in_flight),
    ("work_of_a_stream_keeps_the_loan", work_keeps_the_loan),
    ("streams_wait_for_each_other_by_events", events_both_ways),
    ("streams_are_taken_both_ways", streams_both_ways),
    ("what_cannot_be_shared_is_refused", refusals),
];

/// cudarc takes the library of the name `libcuda.so` that the dynamic loader finds first, so this
/// runs itself again with its path, once for each manner of execution.
fn main() -> ExitCode {
    if env::var_os("DOORBELL_CUDA_LIBRARY").is_some() {
        return common::run(&CASES);
    }
    for manner in [ExecutionMode::Lazy, ExecutionMode::Prompt] {
        let variables = environment(manner, 2);
        let folder = folder_with(variables[0].1.clone().into());
        let again = Command::new(env::current_exe().expect("the path of this program"))
            .envs(variables)
            .env("LD_LIBRARY_PATH", folder)
            .status();
        if !again.expect("this program runs").success() {
            println!("with {manner:?} execution");
            return ExitCode::FAILURE;
        }
    }
    ExitCode::SUCCESS
}

/// A folder in which `libcuda.so` is this library.
fn folder_with(library: PathBuf) -> PathBuf {
    let folder = PathBuf::from(env!("CARGO_TARGET_TMPDIR")).join("cudarc");
    fs::create_dir_all(&folder).expect("a folder of the build");
    let link = folder.join(process::id().to_string());
    symlink(library, &link).expect("a link in the folder");
    // As a whole: another run may be using it.
    fs::rename(link, folder.join("libcuda.so")).expect("the link has another name");
    folder
}

struct Both {
    theirs: Arc<CudaContext>,
    their_stream: Arc<CudaStream>,
    ours: Context,
    our_stream: Stream,
}

impl Both {
    fn new() -> Result<Self, Box<dyn Error>> {
        let theirs = CudaContext::new(0)?;
        let ours = Context::from_cudarc(Driver::load()?, &theirs)?;
        Ok(Self {
            their_stream: theirs.new_stream()?,
            our_stream: Stream::new(&ours)?,
            theirs,
            ours,
        })
    }

    fn slice(&self, seed: u32) -> Result<CudaSlice<u32>, Box<dyn Error>> {
        Ok(self.their_stream.clone_htod(&numbers(seed))?)
    }

    fn lend(&self, slice: CudaSlice<u32>) -> Result<(SliceLoan<u32>, GpuMemory), CudaError> {
        SliceLoan::new(slice, &self.our_stream)
    }
}

const NUMBERS: usize = 20_000;

fn numbers(seed: u32) -> Vec<u32> {
    (0..NUMBERS as u32)
        .map(|at: u32| at.wrapping_mul(2_654_435_761) ^ seed)
        .collect()
}

fn slice_in_flight() -> Outcome {
    let both = Both::new()?;
    let pd = Library::new(api()).open("soft0")?.protection_domain()?;
    let mut cq = pd.context().completion_queue(16)?;
    let prepared = pd
        .queue_pair(&cq)
        .max_send_wr(4)
        .max_recv_wr(4)
        .allow_remote_write()
        .rc()?;
    let here = prepared.endpoint();
    let mut qp = prepared.connect(&here)?;

    let (from, source) = both.lend(both.slice(1)?)?;
    let (into, memory) = both.lend(both.slice(2)?)?;
    let (buffer, region) = register(&pd, &source, PeerReadWrite)?.into_parts();
    let target = register(&pd, &memory, PeerReadWrite)?;
    region.push(.., &both.our_stream)?.wait()?;
    drop((source, region, memory));
    qp.post(|batch| {
        batch.write(buffer, target.remote()).signaled();
    })?;
    let from = from.end().expect_err("it is in flight");
    let buffer = loop {
        if let Some(mut done) = cq.poll()?.next() {
            done.check()?;
            break done.take::<Opaque<PeerReadWrite>>().ok_or("no buffer")?;
        }
    };
    let from = from.end().expect_err("the buffer has it");
    drop(buffer);
    drop(target);
    let (from, into) = (from.end(), into.end());
    let (from, into) = (from.map_err(|_| "kept")?, into.map_err(|_| "kept")?);
    assert!(both.their_stream.clone_dtoh(&from)? == numbers(1));
    assert!(both.their_stream.clone_dtoh(&into)? == numbers(1));
    Ok(both.theirs.check_err()?)
}

fn work_keeps_the_loan() -> Outcome {
    let both = Both::new()?;
    let (loan, memory) = both.lend(both.slice(3)?)?;
    let copy = DeviceMemory::alloc(&both.ours, memory.len())?;
    both.our_stream.copy(copy.all(), memory.all())?;
    drop(memory);
    both.our_stream.synchronize()?;
    let slice = loan.end().map_err(|_| "kept after the work")?;
    assert!(both.their_stream.clone_dtoh(&slice)? == numbers(3));
    Ok(())
}

fn events_both_ways() -> Outcome {
    let both = Both::new()?;
    let mut slice = both.slice(4)?;
    let other = both.theirs.new_stream()?;
    let (theirs, ours) = (&both.their_stream, &both.our_stream);
    // Another stream of cudarc fills it: the loan comes after that.
    other.memset_zeros(&mut slice)?;
    let (loan, memory) = both.lend(slice)?;
    let copy = DeviceMemory::alloc(&both.ours, memory.len())?;
    ours.copy(copy.all(), memory.all())?;
    // This crate's copy is what cudarc reads, without a wait of the host in between.
    let done = Event::new(&both.ours)?;
    ours.record(&done)?;
    done.make_cudarc_wait(theirs)?;
    // SAFETY: memory of so many numbers, which `copy` keeps until after the last use.
    let view = unsafe { theirs.upgrade_device_ptr::<u32>(copy.device_ptr().0, memory.len() / 4) };
    assert!(theirs.clone_dtoh(&view)? == [0; NUMBERS]);
    let _ = view.leak();
    drop(memory);
    assert!(loan.end().is_ok());
    // An event that was recorded by cudarc, for this crate's stream by one of theirs.
    let recorded = other.record_event(None)?;
    theirs.wait(&recorded)?;
    ours.wait(&Event::after_cudarc(&both.ours, theirs)?)?;
    Ok(ours.synchronize()?)
}

fn streams_both_ways() -> Outcome {
    let both = Both::new()?;
    // SAFETY: no stream is captured here.
    let theirs = unsafe { Stream::from_cudarc(&both.ours, both.their_stream.clone())? };
    let (loan, memory) = SliceLoan::new(both.slice(6)?, &theirs)?;
    let copy = DeviceMemory::alloc(&both.ours, memory.len())?;
    theirs.copy(copy.all(), memory.all())?;
    drop(memory);
    // SAFETY: a stream of this context, which is kept until its last use below.
    let ours = unsafe { both.theirs.wrap_borrowed_stream(both.our_stream.as_raw().cast()) };
    ours.join(&both.their_stream)?;
    // SAFETY: memory of so many numbers, which `copy` keeps until after the last use.
    let view = unsafe { ours.upgrade_device_ptr::<u32>(copy.device_ptr().0, copy.len() / 4) };
    assert!(ours.clone_dtoh(&view)? == numbers(6));
    let _ = view.leak();
    assert!(loan.end().is_ok());
    Ok(())
}

fn refusals() -> Outcome {
    let both = Both::new()?;
    if Driver::load()?.device_count() > 1 {
        let second = Driver::load()?.device(1)?.context()?;
        let refused = Event::after_cudarc(&second, &both.their_stream);
        assert!(
            matches!(refused, Err(CudaError::OtherContext { ordinal: 1 })),
            "{refused:?}"
        );
        let refused = SliceLoan::new(both.slice(7)?, &Stream::new(&second)?);
        assert!(matches!(refused, Err(CudaError::OtherContext { .. })), "{refused:?}");
    }

    both.their_stream
        .begin_capture(CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_RELAXED)?;
    let refused = Event::after_cudarc(&both.ours, &both.their_stream);
    assert!(matches!(refused, Err(CudaError::Captured)), "{refused:?}");
    both.their_stream.end_capture(CUgraphInstantiate_flags(0))?;
    Ok(())
}
