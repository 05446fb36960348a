//! Contexts, streams and events of the crate `cudarc`: both crates call the same driver.
//!
//! Events need no `unsafe`: [`Event::after_cudarc`] is for streams of this crate to wait for
//! cudarc's work, and [`Event::make_cudarc_wait`] has cudarc's streams wait for this crate's.
//!
//! cudarc takes a stream of this crate by its `CudaContext::wrap_borrowed_stream`, of
//! [`Stream::as_raw`].

use std::sync::Arc;

use cudarc::driver::{CudaContext, CudaStream};

use crate::context::Context;
use crate::driver::Driver;
use crate::error::Error;
use crate::event::Event;
use crate::stream::{RelaxedCapture, Stream};

impl Context {
    /// The context that cudarc's `CudaContext::new` has: its device's primary one. Each keeps it.
    ///
    /// # Errors
    /// [`Error::OtherContext`] for a context that is not the primary one, or of another library
    /// than `driver`'s; or the driver's error.
    pub fn from_cudarc(driver: Driver, theirs: &CudaContext) -> Result<Self, Error> {
        let context = driver.device(theirs.ordinal())?.context()?;
        same(&context, theirs)?;
        Ok(context)
    }
}

impl Event {
    /// An event that is done when all work is that is now in cudarc's stream.
    ///
    /// # Errors
    /// [`Error::OtherContext`]; [`Error::Captured`] while the stream is captured; or the driver's.
    pub fn after_cudarc(context: &Context, theirs: &CudaStream) -> Result<Self, Error> {
        let stream = for_one_call(context, theirs)?;
        if stream.is_capturing()? {
            return Err(Error::Captured);
        }
        let event = Self::new(context)?;
        stream.record(&event)?;
        // Fails for an event of a capture, which another thread may have begun in between: a stream
        // that waited for it would join the capture.
        let _relaxed = RelaxedCapture::enter(context.driver());
        event.is_done()?;
        Ok(event)
    }

    /// Makes later work of cudarc's stream, of the same context, wait for the event.
    ///
    /// # Errors
    /// [`Error::OtherContext`]; [`Error::Captured`] if it was recorded in a capture; or the
    /// driver's: also while the stream is captured.
    pub fn make_cudarc_wait(&self, theirs: &CudaStream) -> Result<(), Error> {
        for_one_call(self.context(), theirs)?.wait(self)
    }
}

impl Stream {
    /// cudarc's stream as one of this crate, which keeps it.
    ///
    /// # Safety
    /// If it is captured (`CudaStream::begin_capture`), all memory used in it meanwhile must be
    /// kept as long as that graph.
    ///
    /// # Errors
    /// [`Error::OtherContext`].
    pub unsafe fn from_cudarc(context: &Context, theirs: Arc<CudaStream>) -> Result<Self, Error> {
        same(context, theirs.context())?;
        let raw = theirs.cu_stream().cast();
        // SAFETY: a stream of `context`, which its owner destroys when it is dropped; of captures
        // the caller's promise.
        Ok(unsafe { Self::from_raw(context, raw, theirs) })
    }
}

/// A handle for records and waits, which use no memory; it does not outlive `theirs`.
fn for_one_call(context: &Context, theirs: &CudaStream) -> Result<Stream, Error> {
    same(context, theirs.context())?;
    // SAFETY: a stream of `context`, valid as long as `theirs` is borrowed, which the callers
    // return before. No memory is used in it.
    Ok(unsafe { Stream::from_raw(context, theirs.cu_stream().cast(), Arc::new(())) })
}

/// Two libraries, or two contexts, never have one at the same address.
fn same(context: &Context, theirs: &CudaContext) -> Result<(), Error> {
    if context.raw() == theirs.cu_ctx().cast() {
        return Ok(());
    }
    Err(Error::OtherContext {
        ordinal: context.device().ordinal(),
    })
}
