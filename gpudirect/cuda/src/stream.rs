//! CUDA streams: in-order queues of device work.

use core::any::Any;
use core::ffi::{c_uint, c_void};
use core::marker::PhantomData;
use std::ptr;
use std::sync::Arc;

use parking_lot::{Mutex, MutexGuard};

use crate::capture::Captured;
use crate::context::Context;
use crate::driver::Driver;
use crate::error::Error;
use crate::event::{Event, EventInner};
use crate::follower::Follower;
use crate::resource::Resource;
use crate::sys::{self, RawStream, Status, status};

/// A reference-counted stream: its work runs in order, concurrently with other streams'.
///
/// It does not synchronize with the legacy default stream (`CU_STREAM_NON_BLOCKING`).
#[derive(Clone)]
#[doc(alias("CUstream", "cudaStream_t"))]
pub struct Stream(Arc<StreamInner>);

pub(crate) struct StreamInner {
    context: Context,
    raw: RawStream,
    origin: Origin,
    /// Locked while work is enqueued, so that each operation's capture is known.
    state: Mutex<State>,
}

/// Who keeps a stream; this crate destroys only its own.
enum Origin {
    Own,
    Kept {
        _owner: Owner,
    },
    /// No owner promises to: what is used in it is in use until the followed work is done.
    Borrowed {
        follower: Follower,
    },
}

/// Keeps an object created elsewhere: any value whose drop releases it.
pub type Owner = Arc<dyn Any + Send + Sync>;

#[derive(Default)]
pub(crate) struct State {
    /// The capture that it is in, or may join by an event wait.
    pub(crate) capture: Option<Arc<Captured>>,
}

// SAFETY: any thread may use a CUDA stream, and this crate never dereferences the pointer.
unsafe impl Send for StreamInner {}
// SAFETY: as above.
unsafe impl Sync for StreamInner {}

impl Stream {
    /// Creates a stream of `context`.
    #[doc(alias("cuStreamCreate", "cudaStreamCreate"))]
    pub fn new(context: &Context) -> Result<Self, Error> {
        Self::with_priority(context, 0)
    }

    /// Creates a stream with a priority, clamped to the device's range; lower ones take precedence.
    #[doc(alias("cuStreamCreateWithPriority", "cudaStreamCreateWithPriority"))]
    pub fn with_priority(context: &Context, priority: i32) -> Result<Self, Error> {
        let _entered = context.enter()?;
        let driver = context.driver();
        let mut raw = ptr::null_mut();
        // SAFETY: the pointer is to a local CUstream, and the context is current.
        let status =
            unsafe { (driver.table().stream_create_with_priority)(&raw mut raw, sys::STREAM_NON_BLOCKING, priority) };
        driver.check(
            status,
            "cuStreamCreateWithPriority",
            format_args!("{}", context.device()),
        )?;
        Ok(Self(Arc::new(StreamInner {
            context: context.clone(),
            raw,
            origin: Origin::Own,
            state: Mutex::default(),
        })))
    }

    /// Wraps a stream created elsewhere, such as PyTorch's current one, kept by `owner`.
    ///
    /// # Safety
    /// It must be a `CUstream` of `context`, valid until `owner` is dropped. If it is captured
    /// elsewhere, all memory used in it meanwhile must be kept as long as that graph.
    #[must_use]
    pub unsafe fn from_raw(context: &Context, raw: *mut c_void, owner: Owner) -> Self {
        Self(Arc::new(StreamInner {
            context: context.clone(),
            raw,
            origin: Origin::Kept { _owner: owner },
            state: Mutex::default(),
        }))
    }

    /// Wraps a stream created elsewhere that its owner may destroy once the handle is dropped, even
    /// with work in it. The caller that enqueues work [records its end](Self::record_end)
    /// afterwards: what the work uses is kept until then. If its owner captures it, that is kept as
    /// long as the graph and its instances.
    ///
    /// # Safety
    /// It must be a `CUstream` of `follower`'s context, valid until the handle is dropped. Until
    /// then no capture of it begins or ends.
    ///
    /// # Errors
    /// The driver's error: also if its capture has been invalidated.
    pub unsafe fn borrow_raw(raw: *mut c_void, follower: &Follower) -> Result<Self, Error> {
        let stream = Self(Arc::new(StreamInner {
            context: follower.context().clone(),
            raw,
            origin: Origin::Borrowed {
                follower: follower.clone(),
            },
            state: Mutex::default(),
        }));
        let capture = stream.captured_elsewhere()?;
        stream.0.state().capture = capture;
        Ok(stream)
    }

    /// A number that no other stream of the program has or will have, if the driver has such.
    pub(crate) fn id(&self) -> Result<Option<u64>, Error> {
        let Some(get_id) = self.driver().table().stream_get_id else {
            return Ok(None);
        };
        let _entered = self.0.context.enter()?;
        let mut id = 0;
        // SAFETY: the pointer is to a local number; the stream is live.
        let status = unsafe { get_id(self.0.raw, &raw mut id) };
        self.check(status, "cuStreamGetId")?;
        Ok(Some(id))
    }

    /// What follows its work, if it is [borrowed](Self::borrow_raw).
    pub(crate) fn follower(&self) -> Option<&Follower> {
        match &self.0.origin {
            Origin::Borrowed { follower } => Some(follower),
            Origin::Own | Origin::Kept { .. } => None,
        }
    }

    /// Its context.
    #[must_use]
    pub fn context(&self) -> &Context {
        &self.0.context
    }

    /// The `CUstream`, valid as long as a handle exists.
    #[must_use]
    pub fn as_raw(&self) -> *mut c_void {
        self.0.raw
    }

    /// Waits for all its work, and frees resources whose release was deferred until then.
    ///
    /// # Errors
    /// [`Error::Lost`] if work has failed, or another driver error.
    #[doc(alias("cuStreamSynchronize", "cudaStreamSynchronize"))]
    pub fn synchronize(&self) -> Result<(), Error> {
        self.0.synchronize()?;
        self.0.context.reap();
        Ok(())
    }

    /// Whether all its work is done.
    ///
    /// # Errors
    /// [`Error::Lost`] if work has failed, or another driver error.
    #[doc(alias("cuStreamQuery", "cudaStreamQuery"))]
    pub fn is_idle(&self) -> Result<bool, Error> {
        let _entered = self.0.context.enter()?;
        // SAFETY: the stream is live.
        let status = unsafe { (self.driver().table().stream_query)(self.0.raw) };
        if status == status::NOT_READY {
            return Ok(false);
        }
        self.check(status, "cuStreamQuery")?;
        Ok(true)
    }

    /// Whether any code captures it: operations are then recorded, and run by launches.
    #[doc(alias("cuStreamIsCapturing", "cudaStreamIsCapturing"))]
    pub fn is_capturing(&self) -> Result<bool, Error> {
        if self.follower().is_some() {
            return Ok(self.0.state().capture.is_some());
        }
        let _entered = self.0.context.enter()?;
        let mut capturing = sys::CAPTURE_NONE;
        // SAFETY: the pointer is to a local status; the stream is live.
        let status = unsafe { (self.driver().table().stream_is_capturing)(self.0.raw, &raw mut capturing) };
        self.check(status, "cuStreamIsCapturing")?;
        Ok(capturing != sys::CAPTURE_NONE)
    }

    /// Makes later work wait for `event`. An event that was never recorded does not block.
    ///
    /// # Errors
    /// [`Error::Captured`] for an event of another capture, [`Error::ForeignEvent`] for another
    /// process's event of another device, or the driver's error.
    #[doc(alias("cuStreamWaitEvent", "cudaStreamWaitEvent"))]
    pub fn wait(&self, event: &Event) -> Result<(), Error> {
        if event.is_opened() && event.context() != &self.0.context {
            return Err(Error::ForeignEvent {
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
        self.enqueue_wait(event, 0)
    }

    /// Makes later work of the graph that it is captured into wait, at each launch, for the last
    /// record of `event` before, which must outlive the graph.
    pub(crate) fn wait_external(&self, event: &Event) -> Result<(), Error> {
        let _entered = self.0.context.enter()?;
        self.enqueue_wait(event, sys::EVENT_WAIT_EXTERNAL)
    }

    fn enqueue_wait(&self, event: &Event, flags: c_uint) -> Result<(), Error> {
        // SAFETY: both are live; the driver keeps what it needs of the event.
        let status = unsafe { (self.driver().table().stream_wait_event)(self.0.raw, event.raw(), flags) };
        self.check(status, "cuStreamWaitEvent")
    }

    /// Records `event`: it completes when all earlier work of the stream is done.
    ///
    /// # Errors
    /// The driver's error: `CUDA_ERROR_INVALID_HANDLE` for an event of another context.
    #[doc(alias("cuEventRecord", "cudaEventRecord"))]
    pub fn record(&self, event: &Event) -> Result<(), Error> {
        let _entered = self.0.context.enter()?;
        let state = self.0.state.lock();
        let mut captured = event.captured();
        // SAFETY: both are live.
        let status = unsafe { (self.driver().table().event_record)(event.raw(), self.0.raw) };
        self.check(status, "cuEventRecord")?;
        *captured = state.capture.as_ref().map(|capture| capture.id());
        Ok(())
    }

    /// Records the end of work that is not captured; the follower of a
    /// [borrowed](Self::borrow_raw) stream takes it for the end of all work that it follows.
    pub fn record_end(&self, end: &Event) -> Result<(), Error> {
        self.record(end)?;
        if let Some(follower) = self.follower() {
            follower.follow(end);
        }
        Ok(())
    }

    #[inline]
    pub(crate) fn enqueue(
        &self,
        call: &'static str,
        uses: &[&Arc<Resource>],
        function: impl FnOnce(Driver, RawStream) -> Status,
    ) -> Result<(), Error> {
        let _entered = self.0.context.enter()?;
        let state = self.0.state.lock();
        let status = function(self.driver(), self.0.raw);
        // Recorded even on failure: some calls do part of their work before they fail.
        match &state.capture {
            Some(capture) => capture.keep(uses),
            None => uses.iter().for_each(|resource| resource.record_use(self)),
        }
        self.check(status, call)
    }

    /// Not while it is captured, and not on the default streams, whose handles are small numbers.
    pub(crate) fn supports_batches(&self) -> bool {
        const PER_THREAD_DEFAULT: usize = 2;
        self.0.raw.addr() > PER_THREAD_DEFAULT && self.0.lock_uncaptured().is_some()
    }

    pub(crate) fn inner(&self) -> &Arc<StreamInner> {
        &self.0
    }

    pub(crate) fn driver(&self) -> Driver {
        self.0.context.driver()
    }

    pub(crate) fn check(&self, status: Status, call: &'static str) -> Result<(), Error> {
        self.driver()
            .check(status, call, format_args!("a stream of {}", self.0.context.device()))
    }
}

impl StreamInner {
    pub(crate) fn synchronize(&self) -> Result<(), Error> {
        let _entered = self.context.enter()?;
        let driver = self.context.driver();
        // SAFETY: the stream is live.
        let status = unsafe { (driver.table().stream_synchronize)(self.raw) };
        driver.check(
            status,
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

    /// `None` during an enqueue or a capture: querying a captured stream invalidates the capture.
    fn lock_uncaptured(&self) -> Option<MutexGuard<'_, State>> {
        let state = self.state.try_lock().filter(|state| state.capture.is_none())?;
        if !matches!(self.origin, Origin::Own) {
            let mut capturing = sys::CAPTURE_NONE;
            let _entered = self.context.enter().ok()?;
            // SAFETY: the pointer is to a local status; the stream is live.
            let status = unsafe { (self.context.driver().table().stream_is_capturing)(self.raw, &raw mut capturing) };
            if !sys::is_complete(status) || capturing != sys::CAPTURE_NONE {
                return None;
            }
        }
        Some(state)
    }

    /// Whether its work is known to be over; a failed stream is idle, as it does no more.
    pub(crate) fn is_idle(&self) -> bool {
        let Some(_state) = self.lock_uncaptured() else {
            return false;
        };
        let Ok(_entered) = self.context.enter() else {
            return false;
        };
        let driver = self.context.driver();
        let _relaxed = RelaxedCapture::enter(driver);
        // SAFETY: the stream is live.
        let status = unsafe { (driver.table().stream_query)(self.raw) };
        sys::is_complete(status)
    }

    /// An event recorded behind all current work, if one can be recorded.
    pub(crate) fn record_event(&self) -> Option<Arc<EventInner>> {
        let _state = self.lock_uncaptured()?;
        let _entered = self.context.enter().ok()?;
        let driver = self.context.driver();
        let _relaxed = RelaxedCapture::enter(driver);
        let event = Event::new(&self.context).ok()?;
        // SAFETY: both are live.
        let status = unsafe { (driver.table().event_record)(event.raw(), self.raw) };
        (status == status::SUCCESS).then(|| Arc::clone(event.inner()))
    }
}

impl Drop for StreamInner {
    fn drop(&mut self) {
        if !matches!(self.origin, Origin::Own) {
            return;
        }
        let Ok(_entered) = self.context.enter() else { return };
        let driver = self.context.driver();
        // SAFETY: created by this value, which is its last owner; the driver finishes the work
        // enqueued on it.
        let status = unsafe { (driver.table().stream_destroy)(self.raw) };
        if status != status::SUCCESS && status != status::DEINITIALIZED {
            tracing::warn!(
                "a stream of {} was not destroyed: CUDA error {status}",
                self.context.device()
            );
        }
    }
}

/// While it exists, its thread may make calls that a capture of this thread or of others forbids,
/// for what the capture has no part in: loads, allocations, queries of other streams' work.
#[derive(Debug)]
#[must_use = "calls are forbidden again when it is dropped"]
#[doc(alias("cuThreadExchangeStreamCaptureMode", "cudaThreadExchangeStreamCaptureMode"))]
pub struct RelaxedCapture {
    driver: Driver,
    before: c_uint,
    thread: PhantomData<*const ()>,
}

impl RelaxedCapture {
    /// Begins; guards nest.
    pub fn enter(driver: Driver) -> Self {
        let mut relaxed = Self {
            driver,
            before: sys::CAPTURE_RELAXED,
            thread: PhantomData,
        };
        relaxed.exchange();
        relaxed
    }

    fn exchange(&mut self) {
        // SAFETY: the pointer is to a local mode, and every number the driver returns is a valid
        // mode. It fails only for an invalid mode.
        unsafe { (self.driver.table().thread_exchange_capture_mode)(&raw mut self.before) };
    }
}

impl Drop for RelaxedCapture {
    fn drop(&mut self) {
        self.exchange();
    }
}

debug_fields!(Stream, self, device = self.0.context.device());
