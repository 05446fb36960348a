//! What work on a device uses and must not lose: memory, modules, graphs.
//!
//! Work is asynchronous: a copy goes on after the call that began it has returned. So each thing that work uses knows the streams it was used on, and when its last handle is dropped it
//! is freed at once only if those streams have nothing more to do. Otherwise it goes to the context's [`Graves`] with an event of each such stream, and is freed when these have come to
//! pass. Dropping therefore does not wait for them, as a stream may wait for what never comes, and no safe code can free memory that a copy touches.

use std::collections::VecDeque;
use std::sync::Arc;

use parking_lot::Mutex;

use crate::context::{Context, Entered};
use crate::driver::Driver;
use crate::error::Error;
use crate::event::RawEventOwner;
use crate::stream::StreamInner;
use crate::sys::{Address, status};

/// How many streams are remembered before those that are idle are forgotten.
const REMEMBERED: usize = 8;

/// The bytes of a resource, where it has any.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Region {
    pub(crate) address: Address,
    pub(crate) len: usize,
    pub(crate) place: Place,
}

/// Where bytes lie.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Place {
    Device,
    /// On the host, from `at` on: an address that has been exposed.
    Host {
        at: usize,
    },
}

impl Region {
    /// Of what has no bytes.
    pub(crate) const NONE: Self = Self {
        address: 0,
        len: 0,
        place: Place::Device,
    };
}

/// What is freed when a resource goes.
pub(crate) trait Body: Send + Sync {
    /// Frees it; its context is current, and no work uses it.
    fn release(&mut self, driver: Driver) -> Result<(), Error>;
}

pub(crate) struct Resource {
    context: Context,
    region: Region,
    streams: Mutex<Vec<Arc<StreamInner>>>,
    body: Option<Box<dyn Body>>,
}

impl Resource {
    pub(crate) fn new(context: &Context, region: Region, body: impl Body + 'static) -> Arc<Self> {
        context.graves().reap_a_few(context);
        Arc::new(Self {
            context: context.clone(),
            region,
            streams: Mutex::default(),
            body: Some(Box::new(body)),
        })
    }

    pub(crate) fn context(&self) -> &Context {
        &self.context
    }

    pub(crate) fn region(&self) -> Region {
        self.region
    }

    /// Remembers that work on `stream` uses it. Called when the work has been enqueued, while a handle is held.
    pub(crate) fn used_on(&self, stream: &Arc<StreamInner>) {
        let mut streams = self.streams.lock();
        if streams.iter().any(|known| Arc::ptr_eq(known, stream)) {
            return;
        }
        if streams.len() >= REMEMBERED {
            streams.retain(|known| !known.is_idle());
        }
        streams.push(Arc::clone(stream));
    }

    /// Frees it when all work that uses it is done, and waits for that.
    pub(crate) fn free(mut self) -> Result<(), Error> {
        self.settle()?;
        let entered = self.context.enter()?;
        let driver = self.context.driver();
        let _relaxed = crate::stream::Relaxed::enter(driver);
        let freed = self.body.take().map_or(Ok(()), |mut body| body.release(driver));
        drop(entered);
        freed
    }

    /// Waits for all work that uses it.
    pub(crate) fn settle(&self) -> Result<(), Error> {
        let streams = std::mem::take(&mut *self.streams.lock());
        for (at, stream) in streams.iter().enumerate() {
            if let Err(error) = stream.synchronize() {
                // It is not known what the work still does: what was not waited for stays remembered.
                self.streams.lock().extend_from_slice(&streams[at..]);
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
        self.context.graves().bury(Grave { waits, body });
        self.context.graves().reap_a_few(&self.context);
    }
}

/// What has been dropped and waits for the work that uses it.
#[derive(Default)]
pub(crate) struct Graves(Mutex<VecDeque<Grave>>);

/// How many of what waits are looked at by the way: each costs a question to the driver.
const A_FEW: usize = 16;

struct Grave {
    waits: Vec<Wait>,
    body: Box<dyn Body>,
}

/// Work that is to be waited for.
enum Wait {
    /// All that was on the stream when the event was recorded. Holds no context, which holds the graves.
    Event(RawEventOwner),
    /// All that is on a stream on which no event can be recorded as yet, as it is being captured.
    Stream(Arc<StreamInner>),
}

impl Wait {
    /// Begins to wait for what is on `stream`; `None` where that is done.
    fn begin(stream: Arc<StreamInner>) -> Option<Self> {
        if stream.is_idle() {
            return None;
        }
        match stream.mark() {
            Some(event) => Some(Self::Event(event)),
            None => Some(Self::Stream(stream)),
        }
    }

    fn is_over(&self) -> bool {
        match self {
            Self::Event(event) => event.is_over(),
            Self::Stream(stream) => stream.is_idle(),
        }
    }
}

impl Grave {
    /// Whether its work is done.
    fn is_over(&mut self) -> bool {
        self.waits.retain(|wait| !wait.is_over());
        self.waits.is_empty()
    }

    /// Frees it; the context is current.
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

impl Graves {
    fn bury(&self, grave: Grave) {
        self.0.lock().push_back(grave);
    }

    /// Frees a few of what can be freed, at no great cost; the next few when it is called again.
    pub(crate) fn reap_a_few(&self, context: &Context) {
        self.reap(context, A_FEW);
    }

    /// Frees what can be; how many are left.
    pub(crate) fn reap_all(&self, context: &Context) -> usize {
        self.reap(context, usize::MAX)
    }

    fn reap(&self, context: &Context, at_most: usize) -> usize {
        if self.0.lock().is_empty() {
            return 0;
        }
        let Ok(entered) = context.enter() else {
            return self.0.lock().len();
        };
        // Taken out first: to free is to call the driver, and what is freed may drop the last handle of something else.
        let (over, left) = {
            let mut graves = self.0.lock();
            let mut over = Vec::new();
            for _ in 0..graves.len().min(at_most) {
                let Some(mut grave) = graves.pop_front() else { break };
                if grave.is_over() {
                    over.push(grave);
                } else {
                    graves.push_back(grave);
                }
            }
            (over, graves.len())
        };
        let driver = context.driver();
        // A thread that captures a graph may free what the graph knows nothing of.
        let _relaxed = crate::stream::Relaxed::enter(driver);
        for grave in over {
            grave.release(driver, &entered);
        }
        left
    }

    /// The context goes: frees what can be and leaves the rest, as it cannot be known when its work ends. The driver frees that with the context.
    pub(crate) fn close(&self, driver: Driver) {
        let graves = std::mem::take(&mut *self.0.lock());
        for mut grave in graves {
            if grave.is_over() {
                if let Err(error) = grave.body.release(driver) {
                    tracing::warn!("what was dropped could not be freed: {error}");
                }
            } else {
                tracing::warn!(
                    "a context was dropped while work in it went on: what that work uses is left to the driver"
                );
                std::mem::forget(grave);
            }
        }
    }
}
