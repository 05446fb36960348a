//! Streams: work of a device in order.

use core::any::Any;
use core::ffi::{c_uint, c_void};
use core::fmt;
use std::ptr;
use std::sync::Arc;

use parking_lot::{Mutex, MutexGuard};

use crate::context::Context;
use crate::driver::Driver;
use crate::error::Error;
use crate::event::{Event, RawEventOwner};
use crate::graph::Captured;
use crate::resource::Resource;
use crate::sys::{self, RawStream, Status, status};

/// A queue of work for one device: what is put into it is done in order, beside what is in other streams. Handles are cloned freely.
///
/// It does not wait for the legacy default stream, nor that for it (`CU_STREAM_NON_BLOCKING`).
#[derive(Clone)]
pub struct Stream(Arc<StreamInner>);

pub(crate) struct StreamInner {
    context: Context,
    raw: RawStream,
    /// Whoever answers for a stream that is not of ours; then it is not destroyed.
    owner: Option<Owner>,
    /// Held while something is put into the stream, so that what captures the stream, if anything, is known for each.
    state: Mutex<State>,
}

/// What keeps a thing that somebody else has made: any value whose drop lets it go.
pub type Owner = Arc<dyn Any + Send + Sync>;

#[derive(Default)]
pub(crate) struct State {
    /// The capture that it is in, or may come to be in by an event.
    pub(crate) capture: Option<Arc<Captured>>,
}

// SAFETY: CUDA's streams may be used by any thread, and the pointer is never followed here.
unsafe impl Send for StreamInner {}
// SAFETY: as above.
unsafe impl Sync for StreamInner {}

impl Stream {
    /// A stream of `context`.
    ///
    /// # Errors
    /// What the driver says.
    pub fn new(context: &Context) -> Result<Self, Error> {
        Self::with_priority(context, 0)
    }

    /// A stream of `context` whose work goes before that of streams of greater numbers: 0 is the usual one, −1 and below go before it. The driver
    /// takes the nearest priority that the device has.
    ///
    /// # Errors
    /// What the driver says.
    pub fn with_priority(context: &Context, priority: i32) -> Result<Self, Error> {
        let _entered = context.enter()?;
        let driver = context.driver();
        let mut raw = ptr::null_mut();
        // SAFETY: the pointer is to a CUstream of ours, and the context is current.
        let answer =
            unsafe { (driver.table().stream_create_with_priority)(&raw mut raw, sys::STREAM_NON_BLOCKING, priority) };
        driver.check(
            answer,
            "cuStreamCreateWithPriority",
            format_args!("{}", context.device()),
        )?;
        Ok(Self(Arc::new(StreamInner {
            context: context.clone(),
            raw,
            owner: None,
            state: Mutex::default(),
        })))
    }

    /// A stream that somebody else has made (PyTorch's current one), kept by `owner`.
    ///
    /// # Safety
    /// It must be a `CUstream` of `context`, valid until `owner` is dropped. Where somebody else captures it, all memory that is used in it meanwhile must be kept as long as their graph.
    #[must_use]
    pub unsafe fn from_raw(context: &Context, raw: *mut c_void, owner: Owner) -> Self {
        Self(Arc::new(StreamInner {
            context: context.clone(),
            raw,
            owner: Some(owner),
            state: Mutex::default(),
        }))
    }

    /// The context it is in.
    #[must_use]
    pub fn context(&self) -> &Context {
        &self.0.context
    }

    /// The `CUstream`, valid as long as a handle.
    #[must_use]
    pub fn as_raw(&self) -> *mut c_void {
        self.0.raw
    }

    /// Waits until all that was put into it is done, and frees what only waited for that.
    ///
    /// # Errors
    /// [`Error::Lost`] when work has failed, or what the driver says otherwise.
    pub fn synchronize(&self) -> Result<(), Error> {
        self.0.synchronize()?;
        self.0.context.reap();
        Ok(())
    }

    /// Whether all that was put into it is done.
    ///
    /// # Errors
    /// [`Error::Lost`] when work has failed, or what the driver says otherwise.
    pub fn is_idle(&self) -> Result<bool, Error> {
        let _entered = self.0.context.enter()?;
        // SAFETY: the stream is live.
        let answer = unsafe { (self.driver().table().stream_query)(self.0.raw) };
        if answer == status::NOT_READY {
            return Ok(false);
        }
        self.check(answer, "cuStreamQuery")?;
        Ok(true)
    }

    /// Whether it is being captured, by whomever: what is put into it then is done by launches of the graph, as often as there are.
    ///
    /// # Errors
    /// What the driver says.
    pub fn is_capturing(&self) -> Result<bool, Error> {
        let _entered = self.0.context.enter()?;
        let mut capturing = sys::CAPTURE_NONE;
        // SAFETY: the pointer is to a status of ours; the stream is live.
        let answer = unsafe { (self.driver().table().stream_is_capturing)(self.0.raw, &raw mut capturing) };
        self.check(answer, "cuStreamIsCapturing")?;
        Ok(capturing != sys::CAPTURE_NONE)
    }

    /// Work put into it from now on waits until what `event` was recorded after is done. An event that was never recorded is waited for by nobody.
    ///
    /// # Errors
    /// [`Error::Captured`] of an event of a capture that the stream is not in, [`Error::Foreign`] of another process's of another device, or what the driver says.
    pub fn wait(&self, event: &Event) -> Result<(), Error> {
        if event.is_opened() && event.context() != &self.0.context {
            return Err(Error::Foreign {
                event: event.context().device().ordinal(),
                stream: self.0.context.device().ordinal(),
            });
        }
        let _entered = self.0.context.enter()?;
        let state = self.0.state.lock();
        let captured = event.captured();
        if captured.is_some() && *captured != state.capture.as_ref().map(|capture| capture.id()) {
            return Err(Error::Captured);
        }
        // SAFETY: both are live; the driver keeps what it needs of the event.
        let answer = unsafe { (self.driver().table().stream_wait_event)(self.0.raw, event.raw(), 0) };
        self.check(answer, "cuStreamWaitEvent")
    }

    /// Records `event`: it comes to pass when all that was put into the stream before is done.
    ///
    /// # Errors
    /// What the driver says: `CUDA_ERROR_INVALID_HANDLE` of an event of another context.
    pub fn record(&self, event: &Event) -> Result<(), Error> {
        let _entered = self.0.context.enter()?;
        let state = self.0.state.lock();
        let mut captured = event.captured();
        // SAFETY: both are live.
        let answer = unsafe { (self.driver().table().event_record)(event.raw(), self.0.raw) };
        self.check(answer, "cuEventRecord")?;
        *captured = state.capture.as_ref().map(|capture| capture.id());
        Ok(())
    }

    /// Puts work into the stream by one call of the driver, and remembers it with all that it uses.
    #[inline]
    pub(crate) fn enqueue(
        &self,
        call: &'static str,
        uses: &[&Arc<Resource>],
        function: impl FnOnce(Driver, RawStream) -> Status,
    ) -> Result<(), Error> {
        let _entered = self.0.context.enter()?;
        let state = self.0.state.lock();
        let answer = function(self.driver(), self.0.raw);
        // Whatever the answer is: some calls do a part of their work before they fail.
        for resource in uses {
            resource.used_on(&self.0);
        }
        if let Some(capture) = &state.capture {
            capture.keep(uses);
        }
        self.check(answer, call)
    }

    /// Whether batches of copies can be put into it: not while it is captured, and not into the default streams, whose handles are small numbers.
    pub(crate) fn takes_batches(&self) -> bool {
        const PER_THREAD_DEFAULT: usize = 2;
        self.0.raw.addr() > PER_THREAD_DEFAULT && self.0.at_rest().is_some()
    }

    pub(crate) fn inner(&self) -> &Arc<StreamInner> {
        &self.0
    }

    pub(crate) fn driver(&self) -> Driver {
        self.0.context.driver()
    }

    pub(crate) fn check(&self, answer: Status, call: &'static str) -> Result<(), Error> {
        self.driver()
            .check(answer, call, format_args!("a stream of {}", self.0.context.device()))
    }
}

impl StreamInner {
    pub(crate) fn synchronize(&self) -> Result<(), Error> {
        let _entered = self.context.enter()?;
        let driver = self.context.driver();
        // SAFETY: the stream is live.
        let answer = unsafe { (driver.table().stream_synchronize)(self.raw) };
        driver.check(
            answer,
            "cuStreamSynchronize",
            format_args!("a stream of {}", self.context.device()),
        )
    }

    pub(crate) fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock()
    }

    pub(crate) fn raw(&self) -> RawStream {
        self.raw
    }

    /// The state, where nothing is being put into the stream and nobody captures it: to look at a stream that is captured would end the capture.
    fn at_rest(&self) -> Option<MutexGuard<'_, State>> {
        let state = self.state.try_lock().filter(|state| state.capture.is_none())?;
        if self.owner.is_some() {
            let mut capturing = sys::CAPTURE_NONE;
            let _entered = self.context.enter().ok()?;
            // SAFETY: the pointer is to a status of ours; the stream is live.
            let answer = unsafe { (self.context.driver().table().stream_is_capturing)(self.raw, &raw mut capturing) };
            if !sys::is_over(answer) || capturing != sys::CAPTURE_NONE {
                return None;
            }
        }
        Some(state)
    }

    /// Whether all that was put into it is done, as far as can be told without waiting. A stream that has failed is idle: it does nothing more.
    pub(crate) fn is_idle(&self) -> bool {
        let Some(_state) = self.at_rest() else { return false };
        let Ok(_entered) = self.context.enter() else {
            return false;
        };
        let driver = self.context.driver();
        let _relaxed = Relaxed::enter(driver);
        // SAFETY: the stream is live.
        let answer = unsafe { (driver.table().stream_query)(self.raw) };
        sys::is_over(answer)
    }

    /// An event after all that is in the stream now, where one can be recorded.
    pub(crate) fn mark(&self) -> Option<RawEventOwner> {
        let _state = self.at_rest()?;
        let _entered = self.context.enter().ok()?;
        let driver = self.context.driver();
        let _relaxed = Relaxed::enter(driver);
        let event = RawEventOwner::new(driver, sys::EVENT_DISABLE_TIMING).ok()?;
        // SAFETY: both are live.
        let answer = unsafe { (driver.table().event_record)(event.raw(), self.raw) };
        (answer == status::SUCCESS).then_some(event)
    }
}

impl Drop for StreamInner {
    fn drop(&mut self) {
        if self.owner.is_some() {
            return;
        }
        let Ok(_entered) = self.context.enter() else { return };
        let driver = self.context.driver();
        // SAFETY: the stream is of ours and nobody has it any more; the driver lets it finish what is in it.
        let answer = unsafe { (driver.table().stream_destroy)(self.raw) };
        if answer != status::SUCCESS && answer != status::DEINITIALIZED {
            tracing::warn!(
                "a stream of {} was not destroyed: CUDA error {answer}",
                self.context.device()
            );
        }
    }
}

/// While this lives, the thread may call what a capture of a graph forbids by default: used for what concerns no capture.
pub(crate) struct Relaxed {
    driver: Driver,
    before: c_uint,
}

impl Relaxed {
    pub(crate) fn enter(driver: Driver) -> Self {
        let mut relaxed = Self {
            driver,
            before: sys::CAPTURE_RELAXED,
        };
        relaxed.exchange();
        relaxed
    }

    fn exchange(&mut self) {
        // SAFETY: the pointer is to a mode of ours, and every number that the driver gives back is one. It answers an error only of a mode that is none.
        unsafe { (self.driver.table().thread_exchange_capture_mode)(&raw mut self.before) };
    }
}

impl Drop for Relaxed {
    fn drop(&mut self) {
        self.exchange();
    }
}

impl fmt::Debug for Stream {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Stream")
            .field("device", &self.0.context.device())
            .finish_non_exhaustive()
    }
}
