//! One operation by both executors, beside each other: copy engines do the first elements in the caller's stream, and kernels the others in a stream of their own.
//!
//! Each fills the pauses that the other leaves the links (docs/PERFORMANCE.md). They have nothing in common but input and output, of which neither touches what is the other's: copy engines use the words and the staging memory of
//! [arenas](super::peers::Areas), kernels the flags, the slots and the FIFOs. The kernels are put into their stream first, and wait for kernels alone: so operations end even where a driver has streams' work done in the order in which it was put into them.

use doorbell_cuda::{Context, Event, Span, Stream};

use super::copies::Operation;
use super::error::GpuError;
use crate::algorithm::Algorithm;

/// What is done beside the caller's stream.
pub(super) struct Beside {
    stream: Stream,
    began: Event,
    ended: Event,
}

impl Beside {
    pub(super) fn new(context: &Context) -> Result<Self, GpuError> {
        Ok(Self {
            stream: Stream::new(context)?,
            began: Event::new(context)?,
            ended: Event::new(context)?,
        })
    }

    /// Its stream.
    pub(super) fn stream(&self) -> &Stream {
        &self.stream
    }

    /// Has `aside` put work into this stream, behind what the caller's has by now, and then `work` into the caller's; what comes there next comes behind both.
    pub(super) fn run(
        &self,
        caller: &Stream,
        aside: impl FnOnce(&Stream) -> Result<(), GpuError>,
        work: impl FnOnce() -> Result<(), GpuError>,
    ) -> Result<(), GpuError> {
        caller.record(&self.began)?;
        self.stream.wait(&self.began)?;
        let done = aside(&self.stream).and_then(|()| work());
        // Whatever has failed, what was begun is to end before what comes next.
        self.stream.record(&self.ended)?;
        caller.wait(&self.ended)?;
        done
    }
}

/// The elements before `at`, and those from there on, which kernels do by `algorithm`.
pub(super) fn parts<'a>(
    operation: &Operation<'a>,
    at: u64,
    algorithm: Algorithm,
) -> Result<(Operation<'a>, Operation<'a>), GpuError> {
    let bytes = at as usize * operation.data.bytes();
    let first = |span: Option<Span<'a>>| span.map(|span| span.span(..bytes)).transpose();
    let rest = |span: Option<Span<'a>>| span.map(|span| span.span(bytes..)).transpose();
    Ok((
        Operation {
            count: at,
            input: first(operation.input)?,
            output: first(operation.output)?,
            ..*operation
        },
        Operation {
            algorithm,
            count: operation.count - at,
            input: rest(operation.input)?,
            output: rest(operation.output)?,
            registered: operation.registered.map(|(mapped, start)| (mapped, start + bytes)),
            ..*operation
        },
    ))
}
