//! Both executors concurrently on one operation: copy engines process the first elements on the
//! caller's stream, and kernels the others on a side stream (docs/LOG.md).
//!
//! They share only input and output, of which they access disjoint parts. The kernels are enqueued
//! first, and wait for kernels only: so operations complete even if a driver serializes the
//! streams' work in enqueue order.

use doorbell_cuda::{Context, Event, Span, Stream};

use super::copies::Operation;
use super::error::GpuError;
use crate::algorithm::Algorithm;

pub(super) struct SideStream {
    stream: Stream,
    began: Event,
    ended: Event,
}

impl SideStream {
    pub(super) fn new(context: &Context) -> Result<Self, GpuError> {
        Ok(Self {
            stream: Stream::new(context)?,
            began: Event::new(context)?,
            ended: Event::new(context)?,
        })
    }

    pub(super) fn stream(&self) -> &Stream {
        &self.stream
    }

    /// Enqueues `aside` on the side stream, behind the caller's current work, and then `work` on
    /// the caller's; later work of the caller's stream waits for both.
    pub(super) fn run(
        &self,
        caller: &Stream,
        aside: impl FnOnce(&Stream) -> Result<(), GpuError>,
        work: impl FnOnce() -> Result<(), GpuError>,
    ) -> Result<(), GpuError> {
        caller.record(&self.began)?;
        self.stream.wait(&self.began)?;
        let done = aside(&self.stream).and_then(|()| work());
        // Even after a failure, work that was enqueued must end before later work.
        self.stream.record(&self.ended)?;
        caller.wait(&self.ended)?;
        done
    }
}

/// The elements before `at`, and those from `at` on, which kernels process by `algorithm`.
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
