//! Graphs: work that is captured once and launched many times, at one launch's cost.

use core::ffi::c_uint;
use core::fmt;
use core::sync::atomic::{AtomicU64, Ordering};
use std::ptr;
use std::sync::Arc;

use parking_lot::Mutex;

use crate::context::Context;
use crate::driver::Driver;
use crate::error::Error;
use crate::resource::{Body, Region, Resource};
use crate::stream::Stream;
use crate::sys::{self, RawGraph, RawGraphExec, status};

/// What a thread may call of CUDA while it captures: `CUstreamCaptureMode`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum CaptureMode {
    /// The capturing thread may call nothing that could disturb the capture, such as an allocation; other threads may.
    ThreadLocal,
    /// Every thread may call anything.
    Relaxed,
}

/// One capture among all of this process.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct CaptureId(u64);

/// What the work of a capture uses: kept as long as the graph and whatever is made of it.
pub(crate) struct Captured {
    id: CaptureId,
    kept: Mutex<Vec<Arc<Resource>>>,
}

impl Captured {
    fn new() -> Self {
        static NEXT: AtomicU64 = AtomicU64::new(0);
        Self {
            id: CaptureId(NEXT.fetch_add(1, Ordering::Relaxed)),
            kept: Mutex::default(),
        }
    }

    pub(crate) fn id(&self) -> CaptureId {
        self.id
    }

    pub(crate) fn keep(&self, uses: &[&Arc<Resource>]) {
        let mut kept = self.kept.lock();
        for resource in uses {
            if !kept.iter().any(|known| Arc::ptr_eq(known, resource)) {
                kept.push(Arc::clone(resource));
            }
        }
    }
}

/// Captured work. It keeps what the work uses.
pub struct Graph {
    context: Context,
    raw: RawGraph,
    captured: Arc<Captured>,
}

// SAFETY: a CUgraph may go to another thread, and the pointer is never followed here. The driver does not lock it, so it is not Sync.
unsafe impl Send for Graph {}

impl Stream {
    /// Captures what `work` puts into this stream, and into those of `others` that come to wait for an event of it and that it waits for in the end. None of it is done: launches of the graph do it.
    ///
    /// # Errors
    /// [`Error::Capturing`] where one of the streams is captured already, the error of `work`, or what the driver says: of work that cannot be captured, of streams that were not joined.
    pub fn capture(
        &self,
        mode: CaptureMode,
        others: &[&Self],
        work: impl FnOnce() -> Result<(), Error>,
    ) -> Result<Graph, Error> {
        let capturing = Capturing::begin(self, mode, others)?;
        work()?;
        capturing.end()
    }
}

/// Streams that are being captured, until this is dropped.
struct Capturing<'a> {
    origin: &'a Stream,
    /// All of the streams that know of the capture so far, for the origin last.
    told: Vec<&'a Stream>,
    captured: Arc<Captured>,
    has_begun: bool,
}

impl<'a> Capturing<'a> {
    fn begin(origin: &'a Stream, mode: CaptureMode, others: &[&'a Stream]) -> Result<Self, Error> {
        let mut capturing = Self {
            origin,
            told: Vec::with_capacity(others.len() + 1),
            captured: Arc::new(Captured::new()),
            has_begun: false,
        };
        for stream in others
            .iter()
            .filter(|stream| !Arc::ptr_eq(stream.inner(), origin.inner()))
        {
            capturing.tell(stream)?;
        }
        capturing.tell(origin)?;
        let mode: c_uint = match mode {
            CaptureMode::ThreadLocal => sys::CAPTURE_THREAD_LOCAL,
            CaptureMode::Relaxed => sys::CAPTURE_RELAXED,
        };
        let driver = origin.driver();
        let _entered = origin.context().enter()?;
        // SAFETY: the stream is live, and all that goes into it is kept for the graph from now on.
        let answer = unsafe { (driver.table().stream_begin_capture)(origin.inner().raw(), mode) };
        origin.check(answer, "cuStreamBeginCapture")?;
        capturing.has_begun = true;
        Ok(capturing)
    }

    /// From now on what goes into `stream` is kept for the graph.
    fn tell(&mut self, stream: &'a Stream) -> Result<(), Error> {
        let mut state = stream.inner().state();
        match &state.capture {
            Some(known) if Arc::ptr_eq(known, &self.captured) => {}
            Some(_) => return Err(Error::Capturing),
            None => {
                state.capture = Some(Arc::clone(&self.captured));
                self.told.push(stream);
            }
        }
        Ok(())
    }

    fn end(mut self) -> Result<Graph, Error> {
        let raw = self.stop()?;
        Ok(Graph {
            context: self.origin.context().clone(),
            raw,
            captured: Arc::clone(&self.captured),
        })
    }

    /// Ends the driver's capture. The streams still know of it: whatever goes into them until they are told otherwise is kept, too.
    fn stop(&mut self) -> Result<RawGraph, Error> {
        self.has_begun = false;
        let driver = self.origin.driver();
        let _entered = self.origin.context().enter()?;
        let mut graph = ptr::null_mut();
        // SAFETY: the capture was begun by this, on this thread; the pointer is to a CUgraph of ours.
        let answer = unsafe { (driver.table().stream_end_capture)(self.origin.inner().raw(), &raw mut graph) };
        self.origin.check(answer, "cuStreamEndCapture")?;
        Ok(graph)
    }
}

impl Drop for Capturing<'_> {
    fn drop(&mut self) {
        if self.has_begun
            && let Ok(graph) = self.stop()
        {
            destroy(self.origin.driver(), graph);
        }
        for stream in &self.told {
            stream.inner().state().capture = None;
        }
    }
}

impl Graph {
    /// How many pieces of work it has.
    ///
    /// # Errors
    /// What the driver says.
    pub fn node_count(&self) -> Result<usize, Error> {
        let mut count = 0;
        let driver = self.context.driver();
        // SAFETY: with no room for nodes the driver gives their number; the graph is live.
        let answer = unsafe { (driver.table().graph_get_nodes)(self.raw, ptr::null_mut(), &raw mut count) };
        driver.check(answer, "cuGraphGetNodes", format_args!("a graph"))?;
        Ok(count)
    }

    /// Makes of it what can be launched.
    ///
    /// # Errors
    /// What the driver says.
    pub fn instantiate(&self) -> Result<GraphExec, Error> {
        let driver = self.context.driver();
        let _entered = self.context.enter()?;
        let mut raw = ptr::null_mut();
        // SAFETY: the graph is live, and the pointer is to a CUgraphExec of ours.
        let answer = unsafe { (driver.table().graph_instantiate)(&raw mut raw, self.raw, 0) };
        driver.check(
            answer,
            "cuGraphInstantiate",
            format_args!("a graph of {}", self.context.device()),
        )?;
        let raw = raw.expose_provenance();
        let body = Instance {
            raw,
            _captured: Arc::clone(&self.captured),
        };
        Ok(GraphExec {
            resource: Resource::new(&self.context, Region::NONE, body),
            raw: Arc::new(Mutex::new(raw)),
        })
    }
}

impl Drop for Graph {
    fn drop(&mut self) {
        destroy(self.context.driver(), self.raw);
    }
}

fn destroy(driver: Driver, graph: RawGraph) {
    if graph.is_null() {
        return;
    }
    // SAFETY: the graph is of ours, and nobody has it any more; what was made of it is apart from it.
    let answer = unsafe { (driver.table().graph_destroy)(graph) };
    if answer != status::SUCCESS && answer != status::DEINITIALIZED {
        tracing::warn!("a graph was not destroyed: CUDA error {answer}");
    }
}

/// A graph that can be launched, again and again. Handles are cloned freely.
#[derive(Clone)]
pub struct GraphExec {
    resource: Arc<Resource>,
    /// The `CUgraphExec`, whose pointer is exposed. The driver does not lock it: this does.
    raw: Arc<Mutex<usize>>,
}

impl GraphExec {
    /// Puts all its work into `stream`, as one piece. A launch waits for the one before, wherever that was.
    ///
    /// # Errors
    /// What the driver says.
    pub fn launch(&self, stream: &Stream) -> Result<(), Error> {
        let raw = self.raw.lock();
        stream.enqueue("cuGraphLaunch", &[&self.resource], |driver, stream| {
            // SAFETY: both are live; what the work uses is kept by the body of the resource until the work is done.
            unsafe { (driver.table().graph_launch)(exec(*raw), stream) }
        })
    }

    /// Brings it to the device, so that the first launch is as quick as the later ones.
    ///
    /// # Errors
    /// What the driver says.
    pub fn upload(&self, stream: &Stream) -> Result<(), Error> {
        let raw = self.raw.lock();
        stream.enqueue("cuGraphUpload", &[&self.resource], |driver, stream| {
            // SAFETY: both are live.
            unsafe { (driver.table().graph_upload)(exec(*raw), stream) }
        })
    }
}

fn exec(raw: usize) -> RawGraphExec {
    ptr::with_exposed_provenance_mut(raw)
}

/// A `CUgraphExec`, and what its work uses.
struct Instance {
    raw: usize,
    _captured: Arc<Captured>,
}

impl Body for Instance {
    fn release(&mut self, driver: Driver) -> Result<(), Error> {
        // SAFETY: made by this; nobody has it any more, and its launches are done.
        let answer = unsafe { (driver.table().graph_exec_destroy)(exec(self.raw)) };
        driver.check(answer, "cuGraphExecDestroy", format_args!("a graph"))
    }
}

impl fmt::Debug for Graph {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Graph")
            .field("device", &self.context.device())
            .finish_non_exhaustive()
    }
}

impl fmt::Debug for GraphExec {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("GraphExec")
            .field("device", &self.resource.context().device())
            .finish_non_exhaustive()
    }
}
