//! Operations staged through the host, so that ranks with and without GPUs take part in one
//! operation. In stream order, the stream copies the input to host memory, writes a word and waits
//! for another; a thread performs the host's part in between, in call order.

use std::sync::atomic::Ordering;
use std::sync::mpsc::{self, Receiver, Sender};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::{self, JoinHandle};
use std::time::Duration;

use doorbell_cuda::{Context, HostMemory, Memory, Span, Stream, WaitCondition};

use super::error::GpuError;
use crate::communicator::{CollectiveError, Communicator, StagedOperation};
use crate::memory::Segment;

/// Offset of the word that counts operations reached by streams.
const REACHED: usize = 0;
/// Offset of the word that counts operations done.
const DONE: usize = 64;
const WORDS: usize = 128;
const SPIN_POLLS: u32 = 4096;
const POLL_INTERVAL: Duration = Duration::from_micros(20);

/// Host memory accessible to both the communicator's RDMA devices and the GPU.
#[derive(Clone)]
struct Buffer {
    segment: Arc<Segment>,
    pinned: HostMemory,
}

impl Buffer {
    fn new(comm: &Communicator, context: &Context, bytes: usize) -> Result<Self, GpuError> {
        let segment = comm.segment(bytes)?;
        let Some(start) = core::ptr::NonNull::new(segment.start()) else {
            return Err(doorbell_cuda::Error::Empty.into());
        };
        let owner: Arc<Segment> = Arc::clone(&segment);
        // SAFETY: a segment stays valid as long as it is kept, and gives out no references to its
        // bytes.
        let pinned = unsafe { HostMemory::register_raw(context, start, segment.len(), owner)? };
        Ok(Self { segment, pinned })
    }
}

struct Job {
    /// Counted from 1; it wraps.
    number: u32,
    operation: StagedOperation,
    input: Option<Arc<Segment>>,
    output: Option<Arc<Segment>>,
}

struct StagedState {
    words: HostMemory,
    error: Mutex<Option<CollectiveError>>,
}

pub(super) struct Staged {
    comm: Arc<Communicator>,
    context: Context,
    shared: Arc<StagedState>,
    inner: Mutex<Inner>,
}

#[derive(Default)]
struct Inner {
    thread: Option<(Sender<Job>, JoinHandle<()>)>,
    number: u32,
    input: Option<Buffer>,
    output: Option<Buffer>,
}

impl Staged {
    pub(super) fn new(comm: &Arc<Communicator>, context: &Context) -> Result<Self, GpuError> {
        Ok(Self {
            comm: Arc::clone(comm),
            context: context.clone(),
            shared: Arc::new(StagedState {
                words: HostMemory::alloc(context, WORDS)?,
                error: Mutex::default(),
            }),
            inner: Mutex::default(),
        })
    }

    pub(super) fn error(&self) -> Option<GpuError> {
        self.shared
            .error
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
            .take()
            .map(GpuError::from)
    }

    /// `given` and `got` are this rank's memory that the operation reads and writes: on the host
    /// it is consecutive.
    pub(super) fn run<'a>(
        &self,
        operation: StagedOperation,
        given: impl IntoIterator<Item = Span<'a>>,
        got: impl IntoIterator<Item = Span<'a>>,
        stream: &Stream,
    ) -> Result<(), GpuError> {
        let mut inner = self.inner.lock().unwrap_or_else(PoisonError::into_inner);
        let memories = |spans: &mut dyn Iterator<Item = Span<'a>>| -> (Vec<Span<'a>>, usize) {
            let spans: Vec<_> = spans.filter(|span| !span.is_empty()).collect();
            let bytes = spans.iter().map(|span| span.len()).sum();
            (spans, bytes)
        };
        let (given, gives) = memories(&mut given.into_iter());
        let (got, gets) = memories(&mut got.into_iter());
        let buffer = |of: &mut Option<Buffer>, bytes: usize| {
            if bytes == 0 {
                return Ok(None);
            }
            // The previous buffer is kept until earlier operations are done.
            if of.as_ref().is_none_or(|buffer| buffer.pinned.len() < bytes) {
                *of = Some(Buffer::new(&self.comm, &self.context, bytes.next_power_of_two())?);
            }
            Ok::<_, GpuError>(of.clone())
        };
        let input = buffer(&mut inner.input, gives)?;
        let output = buffer(&mut inner.output, gets)?;
        let number = inner.number.wrapping_add(1);
        let jobs = self.thread(&mut inner)?;
        if let Some(buffer) = &input {
            for_each_part(buffer, &given, |pinned, span| stream.copy(pinned, span))?;
        }
        stream.write_value32(self.shared.words.span(REACHED..REACHED + 4)?, number)?;
        inner.number = number;
        let job = Job {
            number,
            operation,
            input: input.map(|buffer| buffer.segment),
            output: output.as_ref().map(|buffer| Arc::clone(&buffer.segment)),
        };
        let _ = jobs.send(job);
        stream.wait_value32(self.shared.words.span(DONE..DONE + 4)?, WaitCondition::AtLeast(number))?;
        if let Some(buffer) = &output {
            for_each_part(buffer, &got, |pinned, span| stream.copy(span, pinned))?;
        }
        Ok(())
    }

    fn thread(&self, inner: &mut Inner) -> Result<Sender<Job>, GpuError> {
        if let Some((jobs, _)) = &inner.thread {
            return Ok(jobs.clone());
        }
        let (sender, jobs) = mpsc::channel();
        let (comm, shared) = (Arc::clone(&self.comm), Arc::clone(&self.shared));
        let thread = doorbell_threads::spawn("gpu staging", move || serve(&comm, &shared, &jobs));
        let thread = thread.map_err(GpuError::Thread)?;
        inner.thread = Some((sender.clone(), thread));
        Ok(sender)
    }
}

/// Calls `copy` for each of `spans` and its part of the buffer, which are consecutive.
fn for_each_part(
    buffer: &Buffer,
    spans: &[Span<'_>],
    copy: impl Fn(Span<'_>, Span<'_>) -> Result<(), doorbell_cuda::Error>,
) -> Result<(), doorbell_cuda::Error> {
    let mut start = 0;
    for span in spans {
        let end = start + span.len();
        copy(buffer.pinned.span(start..end)?, *span)?;
        start = end;
    }
    Ok(())
}

impl Drop for Staged {
    fn drop(&mut self) {
        let inner = self.inner.get_mut().unwrap_or_else(PoisonError::into_inner);
        if let Some((jobs, thread)) = inner.thread.take() {
            drop(jobs);
            let _ = thread.join();
        }
    }
}

/// Performs the host's part in order; after a failure, jobs complete without waiting.
fn serve(comm: &Communicator, shared: &StagedState, jobs: &Receiver<Job>) {
    let (Ok(here), Ok(done)) = (shared.words.atomic_u32(REACHED), shared.words.atomic_u32(DONE)) else {
        return;
    };
    for job in jobs {
        let mut polls = 0;
        let has_come = || here.load(Ordering::Acquire).wrapping_sub(job.number).cast_signed() >= 0;
        while !has_come() && !comm.has_failed() {
            polls += 1;
            if polls > SPIN_POLLS {
                thread::sleep(POLL_INTERVAL);
            } else {
                core::hint::spin_loop();
            }
        }
        let (input, output) = (job.input.as_ref(), job.output.as_ref());
        let result = comm.run_staged(job.operation, input, output);
        if let Err(error) = result {
            shared
                .error
                .lock()
                .unwrap_or_else(PoisonError::into_inner)
                .get_or_insert(error);
        }
        // Release: publishes the operation's results to readers of the word.
        done.store(job.number, Ordering::Release);
    }
}
