//! Events: points in the work of streams, to be waited for and measured between.

use core::ffi::c_uint;
use core::fmt;
use core::time::Duration;
use std::ptr;
use std::sync::Arc;

use parking_lot::{Mutex, MutexGuard};

use crate::context::Context;
use crate::driver::Driver;
use crate::error::Error;
use crate::graph::CaptureId;
use crate::sys::{self, IpcBytes, RawEvent, status};

/// A point in the work of a stream: [`Stream::record`](crate::Stream::record) sets it. Handles are cloned freely.
#[derive(Clone)]
pub struct Event(Arc<Inner>);

struct Inner {
    // Before the context: an event is destroyed while that is held.
    raw: RawEventOwner,
    context: Context,
    timed: bool,
    /// Whether it is another process's.
    opened: bool,
    /// The capture that it was last recorded in, if in one. Held while it is recorded and while a stream is told to wait for it.
    captured: Mutex<Option<CaptureId>>,
}

/// What another process opens an event by: `CUipcEventHandle`.
#[derive(Clone, Copy, PartialEq, Eq)]
pub struct EventHandle(pub [u8; 64]);

impl Event {
    /// An event to wait for; the cheapest kind.
    ///
    /// # Errors
    /// What the driver says.
    pub fn new(context: &Context) -> Result<Self, Error> {
        Self::make(context, sys::EVENT_DISABLE_TIMING, false)
    }

    /// An event that knows when it came to pass.
    ///
    /// # Errors
    /// What the driver says.
    pub fn timed(context: &Context) -> Result<Self, Error> {
        Self::make(context, 0, true)
    }

    fn make(context: &Context, flags: c_uint, timed: bool) -> Result<Self, Error> {
        let _entered = context.enter()?;
        Ok(Self(Arc::new(Inner {
            raw: RawEventOwner::new(context.driver(), flags)?,
            context: context.clone(),
            timed,
            opened: false,
            captured: Mutex::default(),
        })))
    }

    /// An event that other processes can open: each of them waits for it, and may record it.
    ///
    /// # Errors
    /// What the driver says.
    pub fn interprocess(context: &Context) -> Result<Self, Error> {
        Self::make(context, sys::EVENT_DISABLE_TIMING | sys::EVENT_INTERPROCESS, false)
    }

    /// What another process opens it by, of an [`Event::interprocess`].
    ///
    /// # Errors
    /// What the driver says.
    pub fn handle(&self) -> Result<EventHandle, Error> {
        let _entered = self.0.context.enter()?;
        let mut bytes = IpcBytes([0; 64]);
        // SAFETY: the pointer is to the bytes of a handle; the event is live.
        let answer = unsafe { (self.driver().table().ipc_get_event_handle)(&raw mut bytes, self.raw()) };
        self.driver()
            .check(answer, "cuIpcGetEventHandle", format_args!("an event"))?;
        Ok(EventHandle(bytes.0))
    }

    /// Another process's event; never one of this process. The context is of the device that it was made on; only that device's streams wait for it ([`Error::Foreign`]).
    ///
    /// # Errors
    /// What the driver says.
    pub fn open(context: &Context, handle: &EventHandle) -> Result<Self, Error> {
        let _entered = context.enter()?;
        let driver = context.driver();
        let mut raw = ptr::null_mut();
        // SAFETY: the pointer is to a CUevent of ours; the driver looks through the handle for one that it knows.
        let answer = unsafe { (driver.table().ipc_open_event_handle)(&raw mut raw, IpcBytes(handle.0)) };
        driver.check(answer, "cuIpcOpenEventHandle", format_args!("an event"))?;
        Ok(Self(Arc::new(Inner {
            raw: RawEventOwner { driver, raw },
            context: context.clone(),
            timed: false,
            opened: true,
            captured: Mutex::default(),
        })))
    }

    /// Whether another process has made it.
    pub(crate) fn is_opened(&self) -> bool {
        self.0.opened
    }

    /// The context it is of.
    #[must_use]
    pub fn context(&self) -> &Context {
        &self.0.context
    }

    pub(crate) fn raw(&self) -> RawEvent {
        self.0.raw.raw()
    }

    pub(crate) fn captured(&self) -> MutexGuard<'_, Option<CaptureId>> {
        self.0.captured.lock()
    }

    /// Whether it has come to pass, or was never recorded.
    ///
    /// # Errors
    /// [`Error::Lost`] when work has failed, or what the driver says otherwise.
    pub fn is_done(&self) -> Result<bool, Error> {
        let _entered = self.0.context.enter()?;
        // SAFETY: the event is live.
        let answer = unsafe { (self.driver().table().event_query)(self.raw()) };
        if answer == status::NOT_READY {
            return Ok(false);
        }
        self.driver().check(answer, "cuEventQuery", format_args!("an event"))?;
        Ok(true)
    }

    /// Waits until it has come to pass; not at all where it was never recorded.
    ///
    /// # Errors
    /// [`Error::Lost`] when work has failed, or what the driver says otherwise.
    pub fn synchronize(&self) -> Result<(), Error> {
        let _entered = self.0.context.enter()?;
        // SAFETY: the event is live.
        let answer = unsafe { (self.driver().table().event_synchronize)(self.raw()) };
        self.driver()
            .check(answer, "cuEventSynchronize", format_args!("an event"))
    }

    /// The time from `start` to this, both timed and come to pass, to some half a microsecond; none where this came first.
    ///
    /// # Errors
    /// [`Error::Untimed`], or what the driver says: `CUDA_ERROR_NOT_READY` of events that have not come to pass.
    pub fn since(&self, start: &Self) -> Result<Duration, Error> {
        if !self.0.timed || !start.0.timed {
            return Err(Error::Untimed);
        }
        let _entered = self.0.context.enter()?;
        let mut milliseconds = 0.0;
        // SAFETY: the pointer is to a float of ours, and both events are live.
        let answer =
            unsafe { (self.driver().table().event_elapsed_time)(&raw mut milliseconds, start.raw(), self.raw()) };
        self.driver()
            .check(answer, "cuEventElapsedTime", format_args!("an event"))?;
        Ok(Duration::try_from_secs_f64(f64::from(milliseconds) / 1e3).unwrap_or_default())
    }

    fn driver(&self) -> Driver {
        self.0.context.driver()
    }
}

impl fmt::Debug for EventHandle {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("EventHandle(..)")
    }
}

impl fmt::Debug for Event {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Event")
            .field("device", &self.0.context.device())
            .field("timed", &self.0.timed)
            .finish_non_exhaustive()
    }
}

/// A `CUevent`, destroyed when dropped. Whoever has it answers for its context.
pub(crate) struct RawEventOwner {
    driver: Driver,
    raw: RawEvent,
}

// SAFETY: CUDA's events may be used by any thread, and the pointer is never followed here.
unsafe impl Send for RawEventOwner {}
// SAFETY: as above.
unsafe impl Sync for RawEventOwner {}

impl RawEventOwner {
    /// An event of the current context.
    pub(crate) fn new(driver: Driver, flags: c_uint) -> Result<Self, Error> {
        let mut raw = ptr::null_mut();
        // SAFETY: the pointer is to a CUevent of ours; the context is current.
        let answer = unsafe { (driver.table().event_create)(&raw mut raw, flags) };
        driver.check(answer, "cuEventCreate", format_args!("an event"))?;
        Ok(Self { driver, raw })
    }

    pub(crate) fn raw(&self) -> RawEvent {
        self.raw
    }

    /// Whether it has come to pass; an event that has failed has, as its stream does nothing more.
    pub(crate) fn is_over(&self) -> bool {
        let _relaxed = crate::stream::Relaxed::enter(self.driver);
        // SAFETY: the event is live.
        let answer = unsafe { (self.driver.table().event_query)(self.raw) };
        sys::is_over(answer)
    }
}

impl Drop for RawEventOwner {
    fn drop(&mut self) {
        // SAFETY: it is of ours and nobody has it any more; the driver lets waits for it end.
        let answer = unsafe { (self.driver.table().event_destroy)(self.raw) };
        if answer != status::SUCCESS && answer != status::DEINITIALIZED && answer != status::INVALID_CONTEXT {
            tracing::warn!("an event was not destroyed: CUDA error {answer}");
        }
    }
}
