//! Events: points in a stream's work that can be waited for and timed.

use core::ffi::c_uint;
use core::fmt;
use core::time::Duration;
use std::ptr;
use std::sync::Arc;

use parking_lot::{Mutex, MutexGuard};

use crate::capture::CaptureId;
use crate::context::Context;
use crate::driver::Driver;
use crate::error::Error;
use crate::sys::{self, IpcBytes, RawEvent, status};

/// A reference-counted point in a stream's work, set by [`Stream::record`](crate::Stream::record).
#[derive(Clone)]
#[doc(alias("CUevent", "cudaEvent_t"))]
pub struct Event {
    // Declared before the context: the event is destroyed while the context is still retained.
    inner: Arc<EventInner>,
    context: Context,
}

/// What a context may hold of an event.
pub(crate) struct EventInner {
    raw: RawEventOwner,
    timed: bool,
    /// Whether another process created it.
    opened: bool,
    /// The capture of its last record; locked by records, and by waits while they are enqueued.
    captured: Mutex<Option<CaptureId>>,
}

/// The IPC handle of an event: `CUipcEventHandle`.
#[derive(Clone, Copy, PartialEq, Eq)]
#[doc(alias("CUipcEventHandle", "cudaIpcEventHandle_t"))]
pub struct EventHandle(pub [u8; 64]);

impl Event {
    /// An event without timing; the cheapest kind.
    #[doc(alias("cuEventCreate", "cudaEventCreate"))]
    pub fn new(context: &Context) -> Result<Self, Error> {
        Self::make(context, sys::EVENT_DISABLE_TIMING, false)
    }

    /// An event with timing.
    pub fn timed(context: &Context) -> Result<Self, Error> {
        Self::make(context, 0, true)
    }

    fn make(context: &Context, flags: c_uint, timed: bool) -> Result<Self, Error> {
        let _entered = context.enter()?;
        let raw = RawEventOwner::new(context.driver(), flags)?;
        Ok(Self::of(context, raw, timed, false))
    }

    /// An interprocess event: other processes can open, wait for and record it.
    pub fn interprocess(context: &Context) -> Result<Self, Error> {
        Self::make(context, sys::EVENT_DISABLE_TIMING | sys::EVENT_INTERPROCESS, false)
    }

    /// The IPC handle of an [`Event::interprocess`].
    #[doc(alias("cuIpcGetEventHandle", "cudaIpcGetEventHandle"))]
    pub fn handle(&self) -> Result<EventHandle, Error> {
        let _entered = self.context.enter()?;
        let mut bytes = IpcBytes([0; 64]);
        // SAFETY: the pointer is to the bytes of a handle; the event is live.
        let status = unsafe { (self.driver().table().ipc_get_event_handle)(&raw mut bytes, self.raw()) };
        self.driver()
            .check(status, "cuIpcGetEventHandle", format_args!("an event"))?;
        Ok(EventHandle(bytes.0))
    }

    /// Opens another process's event; never one of this process. `context` must be of the device it
    /// was created on; only that device's streams can wait for it ([`Error::ForeignEvent`]).
    #[doc(alias("cuIpcOpenEventHandle", "cudaIpcOpenEventHandle"))]
    pub fn open(context: &Context, handle: &EventHandle) -> Result<Self, Error> {
        let _entered = context.enter()?;
        let driver = context.driver();
        let mut raw = ptr::null_mut();
        // SAFETY: the pointer is to a local CUevent; the driver validates the handle.
        let status = unsafe { (driver.table().ipc_open_event_handle)(&raw mut raw, IpcBytes(handle.0)) };
        driver.check(status, "cuIpcOpenEventHandle", format_args!("an event"))?;
        Ok(Self::of(context, RawEventOwner { driver, raw }, false, true))
    }

    fn of(context: &Context, raw: RawEventOwner, timed: bool, opened: bool) -> Self {
        Self {
            inner: Arc::new(EventInner {
                raw,
                timed,
                opened,
                captured: Mutex::default(),
            }),
            context: context.clone(),
        }
    }

    pub(crate) fn inner(&self) -> &Arc<EventInner> {
        &self.inner
    }

    /// Whether this is the only handle, also of those that contexts have.
    pub(crate) fn is_held_once(&mut self) -> bool {
        Arc::get_mut(&mut self.inner).is_some()
    }

    pub(crate) fn is_opened(&self) -> bool {
        self.inner.opened
    }

    /// Its context.
    #[must_use]
    pub fn context(&self) -> &Context {
        &self.context
    }

    pub(crate) fn raw(&self) -> RawEvent {
        self.inner.raw.raw()
    }

    pub(crate) fn captured(&self) -> MutexGuard<'_, Option<CaptureId>> {
        self.inner.captured.lock()
    }

    /// Whether it has completed, or was never recorded.
    ///
    /// # Errors
    /// [`Error::Lost`] if work has failed, or another driver error.
    #[doc(alias("cuEventQuery", "cudaEventQuery"))]
    pub fn is_done(&self) -> Result<bool, Error> {
        let _entered = self.context.enter()?;
        // SAFETY: the event is live.
        let status = unsafe { (self.driver().table().event_query)(self.raw()) };
        if status == status::NOT_READY {
            return Ok(false);
        }
        self.driver().check(status, "cuEventQuery", format_args!("an event"))?;
        Ok(true)
    }

    /// Waits until it has completed; returns at once if it was never recorded.
    ///
    /// # Errors
    /// [`Error::Lost`] if work has failed, or another driver error.
    #[doc(alias("cuEventSynchronize", "cudaEventSynchronize"))]
    pub fn synchronize(&self) -> Result<(), Error> {
        let _entered = self.context.enter()?;
        // SAFETY: the event is live.
        let status = unsafe { (self.driver().table().event_synchronize)(self.raw()) };
        self.driver()
            .check(status, "cuEventSynchronize", format_args!("an event"))
    }

    /// The time since `start`, to about half a microsecond; zero if this event came first.
    ///
    /// # Errors
    /// [`Error::Untimed`], or the driver's: `CUDA_ERROR_NOT_READY` before both have completed.
    #[doc(alias("cuEventElapsedTime", "cudaEventElapsedTime"))]
    pub fn since(&self, start: &Self) -> Result<Duration, Error> {
        if !self.inner.timed || !start.inner.timed {
            return Err(Error::Untimed);
        }
        let _entered = self.context.enter()?;
        let mut milliseconds = 0.0;
        // SAFETY: the pointer is to a local float, and both events are live.
        let status =
            unsafe { (self.driver().table().event_elapsed_time)(&raw mut milliseconds, start.raw(), self.raw()) };
        self.driver()
            .check(status, "cuEventElapsedTime", format_args!("an event"))?;
        Ok(Duration::try_from_secs_f64(f64::from(milliseconds) / 1e3).unwrap_or_default())
    }

    fn driver(&self) -> Driver {
        self.context.driver()
    }
}

impl fmt::Debug for EventHandle {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("EventHandle(..)")
    }
}

debug_fields!(Event, self, device = self.context.device(), timed = self.inner.timed);

impl EventInner {
    /// Whether it has completed or failed: a failed stream does no more work.
    pub(crate) fn is_complete(&self) -> bool {
        self.raw.is_complete()
    }
}

/// A `CUevent`, destroyed on drop. The owner keeps its context retained.
pub(crate) struct RawEventOwner {
    driver: Driver,
    raw: RawEvent,
}

// SAFETY: any thread may use a CUDA event, and this crate never dereferences the pointer.
unsafe impl Send for RawEventOwner {}
// SAFETY: as above.
unsafe impl Sync for RawEventOwner {}

impl RawEventOwner {
    /// An event of the current context.
    pub(crate) fn new(driver: Driver, flags: c_uint) -> Result<Self, Error> {
        let mut raw = ptr::null_mut();
        // SAFETY: the pointer is to a local CUevent; the context is current.
        let status = unsafe { (driver.table().event_create)(&raw mut raw, flags) };
        driver.check(status, "cuEventCreate", format_args!("an event"))?;
        Ok(Self { driver, raw })
    }

    pub(crate) fn raw(&self) -> RawEvent {
        self.raw
    }

    pub(crate) fn is_complete(&self) -> bool {
        let _relaxed = crate::stream::RelaxedCapture::enter(self.driver);
        // SAFETY: the event is live.
        let status = unsafe { (self.driver.table().event_query)(self.raw) };
        sys::is_complete(status)
    }
}

impl Drop for RawEventOwner {
    fn drop(&mut self) {
        // SAFETY: created by this value, which is its last owner; the driver completes pending
        // waits for it.
        let status = unsafe { (self.driver.table().event_destroy)(self.raw) };
        if status != status::SUCCESS && status != status::DEINITIALIZED && status != status::INVALID_CONTEXT {
            tracing::warn!("an event was not destroyed: CUDA error {status}");
        }
    }
}
