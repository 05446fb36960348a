//! Lifetimes of resources used by asynchronous device work: memory, modules, graphs.
//!
//! Each resource tracks the streams it was used on. When its last handle is dropped it is freed: at
//! once, or when events recorded on the busy streams have completed ([`DeferredFrees`]). So
//! dropping never waits, as a stream may wait indefinitely.
//!
//! The driver itself may let a free wait for running kernels. A thread that kernels wait for
//! therefore frees nothing ([`FreesDeferred`]).

use std::cell::Cell;
use std::collections::VecDeque;
use std::marker::PhantomData;
use std::sync::Arc;

use parking_lot::Mutex;

use crate::context::{Context, Entered};
use crate::driver::Driver;
use crate::error::Error;
use crate::event::EventInner;
use crate::follower::FollowerInner;
use crate::stream::{Stream, StreamInner};
use crate::sys::{Address, status};

/// The number of tracked streams beyond which idle ones are pruned.
const MAX_TRACKED_STREAMS: usize = 8;

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Region {
    pub(crate) address: Address,
    pub(crate) len: usize,
    pub(crate) space: MemorySpace,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum MemorySpace {
    Device,
    /// On the host, at the exposed address `at`.
    Host {
        at: usize,
    },
}

impl Region {
    pub(crate) const NONE: Self = Self {
        address: 0,
        len: 0,
        space: MemorySpace::Device,
    };
}

/// What is released when a resource is freed.
pub(crate) trait Body: Send + Sync {
    /// Releases it; its context is current, and no work uses it.
    fn release(&mut self, driver: Driver) -> Result<(), Error>;
}

/// Where work runs that uses resources.
pub(crate) enum Queue {
    Stream(Arc<StreamInner>),
    /// Streams that may be gone before their work is done.
    Followed(Arc<FollowerInner>),
}

impl Queue {
    fn of(stream: &Stream) -> Self {
        match stream.follower() {
            Some(follower) => Self::Followed(Arc::clone(follower.inner())),
            None => Self::Stream(Arc::clone(stream.inner())),
        }
    }

    fn is_of(&self, stream: &Stream) -> bool {
        match (self, stream.follower()) {
            (Self::Stream(one), None) => Arc::ptr_eq(one, stream.inner()),
            (Self::Followed(one), Some(follower)) => Arc::ptr_eq(one, follower.inner()),
            _ => false,
        }
    }

    fn is_idle(&self) -> bool {
        match self {
            Self::Stream(stream) => stream.is_idle(),
            Self::Followed(follower) => follower.is_idle(),
        }
    }

    fn synchronize(&self) -> Result<(), Error> {
        match self {
            Self::Stream(stream) => stream.synchronize(),
            Self::Followed(follower) => follower.synchronize(),
        }
    }
}

pub(crate) struct Resource {
    context: Context,
    region: Region,
    streams: Mutex<Vec<Queue>>,
    body: Option<Box<dyn Body>>,
}

impl Resource {
    pub(crate) fn new(context: &Context, region: Region, body: impl Body + 'static) -> Arc<Self> {
        context.deferred_frees().reap_some(context);
        Arc::new(Self {
            context: context.clone(),
            region,
            streams: Mutex::default(),
            body: Some(Box::new(body)),
        })
    }

    /// One that is released elsewhere.
    pub(crate) fn unkept(context: &Context, region: Region) -> Arc<Self> {
        Arc::new(Self {
            context: context.clone(),
            region,
            streams: Mutex::default(),
            body: None,
        })
    }

    pub(crate) fn context(&self) -> &Context {
        &self.context
    }

    pub(crate) fn region(&self) -> Region {
        self.region
    }

    /// Called after work that uses it was enqueued on `stream`, while a handle is held. What is
    /// released elsewhere has no release that would wait for the work.
    pub(crate) fn record_use(&self, stream: &Stream) {
        if self.body.is_none() {
            return;
        }
        let mut streams = self.streams.lock();
        if streams.iter().any(|known| known.is_of(stream)) {
            return;
        }
        if streams.len() >= MAX_TRACKED_STREAMS {
            streams.retain(|known| !known.is_idle());
        }
        streams.push(Queue::of(stream));
    }

    pub(crate) fn free(mut self) -> Result<(), Error> {
        self.wait_for_work()?;
        let entered = self.context.enter()?;
        let driver = self.context.driver();
        let _relaxed = crate::stream::RelaxedCapture::enter(driver);
        let freed = self.body.take().map_or(Ok(()), |mut body| body.release(driver));
        drop(entered);
        freed
    }

    pub(crate) fn wait_for_work(&self) -> Result<(), Error> {
        let mut streams = std::mem::take(&mut *self.streams.lock());
        for at in 0..streams.len() {
            if let Err(error) = streams[at].synchronize() {
                // The state of the work is unknown: streams not synchronized stay tracked.
                self.streams.lock().extend(streams.drain(at..));
                return Err(error);
            }
        }
        Ok(())
    }
}

impl Drop for Resource {
    fn drop(&mut self) {
        let Some(body) = self.body.take() else { return };
        let streams = std::mem::take(self.streams.get_mut());
        let waits: Vec<_> = streams.into_iter().filter_map(Wait::begin).collect();
        self.context.deferred_frees().push(DeferredFree { waits, body });
        self.context.deferred_frees().reap_some(&self.context);
    }
}

thread_local! {
    static DEFERRING: Cell<usize> = const { Cell::new(0) };
}

/// While it exists, its thread frees nothing: what it drops is freed by another thread's next
/// creation, drop or synchronization, or by this one's afterwards. For threads that running kernels
/// wait for, as the driver may let a free wait for those kernels.
#[derive(Debug)]
#[must_use = "the thread frees again when it is dropped"]
pub struct FreesDeferred(PhantomData<*const ()>);

impl FreesDeferred {
    /// Begins; guards nest.
    pub fn on_this_thread() -> Self {
        DEFERRING.set(DEFERRING.get() + 1);
        Self(PhantomData)
    }
}

impl Drop for FreesDeferred {
    fn drop(&mut self) {
        DEFERRING.set(DEFERRING.get() - 1);
    }
}

#[derive(Default)]
pub(crate) struct DeferredFrees(Mutex<VecDeque<DeferredFree>>);

/// The number of pending frees checked per implicit reap: each costs a driver query.
const REAP_BATCH: usize = 16;

struct DeferredFree {
    waits: Vec<Wait>,
    body: Box<dyn Body>,
}

enum Wait {
    /// The work before the event. Holds no context, as the context holds this.
    Event(Arc<EventInner>),
    /// The work on a stream that is being captured, so that no event can be recorded yet.
    Stream(Arc<StreamInner>),
}

impl Wait {
    /// Starts waiting for the work in `queue`; `None` if it is idle.
    fn begin(queue: Queue) -> Option<Self> {
        match queue {
            Queue::Followed(follower) => follower.pending().map(Self::Event),
            Queue::Stream(stream) if stream.is_idle() => None,
            Queue::Stream(stream) => Some(match stream.record_event() {
                Some(event) => Self::Event(event),
                None => Self::Stream(stream),
            }),
        }
    }

    fn is_complete(&self) -> bool {
        match self {
            Self::Event(event) => event.is_complete(),
            Self::Stream(stream) => stream.is_idle(),
        }
    }
}

impl DeferredFree {
    fn is_complete(&mut self) -> bool {
        self.waits.retain(|wait| !wait.is_complete());
        self.waits.is_empty()
    }

    fn release(mut self, driver: Driver, _: &Entered<'_>) {
        if let Err(error) = self.body.release(driver) {
            let gone = error
                .failure()
                .is_some_and(|failure| failure.code == status::DEINITIALIZED);
            if !gone {
                tracing::warn!("what was dropped could not be freed: {error}");
            }
        }
    }
}

impl DeferredFrees {
    fn push(&self, pending: DeferredFree) {
        self.0.lock().push_back(pending);
    }

    /// Frees a bounded number of resources whose work is done; later calls check the next ones.
    pub(crate) fn reap_some(&self, context: &Context) {
        self.reap(context, REAP_BATCH);
    }

    /// Frees all resources whose work is done; returns how many are left.
    pub(crate) fn reap_all(&self, context: &Context) -> usize {
        self.reap(context, usize::MAX)
    }

    fn reap(&self, context: &Context, at_most: usize) -> usize {
        if DEFERRING.get() == 0 {
            context.driver().captures().release_ended();
        }
        let pending = self.0.lock().len();
        if pending == 0 || DEFERRING.get() > 0 {
            return pending;
        }
        let Ok(entered) = context.enter() else {
            return self.0.lock().len();
        };
        // Removed first: releasing may drop the last handle of another resource.
        let (over, left) = {
            let mut deferred_frees = self.0.lock();
            let mut over = Vec::new();
            for _ in 0..deferred_frees.len().min(at_most) {
                let Some(mut pending) = deferred_frees.pop_front() else {
                    break;
                };
                if pending.is_complete() {
                    over.push(pending);
                } else {
                    deferred_frees.push_back(pending);
                }
            }
            (over, deferred_frees.len())
        };
        let driver = context.driver();
        // A thread that is capturing may still free resources that the graph does not use.
        let _relaxed = crate::stream::RelaxedCapture::enter(driver);
        for pending in over {
            pending.release(driver, &entered);
        }
        left
    }

    /// On drop of the context: leaks resources whose work has no known end; the driver frees them.
    pub(crate) fn close(&self, driver: Driver) {
        let deferred_frees = std::mem::take(&mut *self.0.lock());
        for mut pending in deferred_frees {
            if pending.is_complete() {
                if let Err(error) = pending.body.release(driver) {
                    tracing::warn!("what was dropped could not be freed: {error}");
                }
            } else {
                tracing::warn!(
                    "a context was dropped while work in it went on: what that work uses is left to the driver"
                );
                std::mem::forget(pending);
            }
        }
    }
}
