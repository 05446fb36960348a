//! CUDA graphs: work captured once and launched many times, at the cost of one launch.

use core::ffi::c_uint;
use std::ptr;
use std::sync::Arc;

use parking_lot::Mutex;

use crate::capture::Captured;
use crate::context::Context;
use crate::driver::Driver;
use crate::error::Error;
use crate::resource::{Body, Region, Resource};
use crate::stream::Stream;
use crate::sys::{self, RawGraph, RawGraphExec, status};

/// What threads may call during a capture: `CUstreamCaptureMode`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[doc(alias = "CUstreamCaptureMode")]
pub enum CaptureMode {
    /// The capturing thread alone may not disturb the capture, such as by allocations.
    ThreadLocal,
    /// Every thread may make any call.
    Relaxed,
}

/// A captured graph. It keeps the resources that its work uses.
#[doc(alias("CUgraph", "cudaGraph_t"))]
pub struct Graph {
    context: Context,
    raw: RawGraph,
    captured: Arc<Captured>,
}

// SAFETY: a CUgraph may be sent to another thread, and this crate never dereferences the pointer.
// The driver does not lock it, so it is not Sync.
unsafe impl Send for Graph {}

impl Stream {
    /// Captures what `work` enqueues on this stream, and on those of `others` that wait for an
    /// event of it (fork) and are joined again by the end. Nothing runs before a launch.
    ///
    /// # Errors
    /// [`Error::Capturing`] if one of the streams is already being captured, the error of `work`,
    /// or the driver's: work that cannot be captured, or streams that were not joined.
    #[doc(alias("cuStreamBeginCapture", "cuStreamEndCapture", "cudaStreamBeginCapture"))]
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

struct Capturing<'a> {
    origin: &'a Stream,
    /// The streams marked as part of the capture, the origin last.
    streams: Vec<&'a Stream>,
    captured: Arc<Captured>,
    has_begun: bool,
}

impl<'a> Capturing<'a> {
    fn begin(origin: &'a Stream, mode: CaptureMode, others: &[&'a Stream]) -> Result<Self, Error> {
        let mut capturing = Self {
            origin,
            streams: Vec::with_capacity(others.len() + 1),
            captured: Captured::new(origin.driver(), None),
            has_begun: false,
        };
        for stream in others
            .iter()
            .filter(|stream| !Arc::ptr_eq(stream.inner(), origin.inner()))
        {
            capturing.add_stream(stream)?;
        }
        capturing.add_stream(origin)?;
        let mode: c_uint = match mode {
            CaptureMode::ThreadLocal => sys::CAPTURE_THREAD_LOCAL,
            CaptureMode::Relaxed => sys::CAPTURE_RELAXED,
        };
        let driver = origin.driver();
        let _entered = origin.context().enter()?;
        // SAFETY: the stream is live, and resources of all work enqueued from now on are kept for
        // the graph.
        let status = unsafe { (driver.table().stream_begin_capture)(origin.inner().raw(), mode) };
        origin.check(status, "cuStreamBeginCapture")?;
        capturing.has_begun = true;
        Ok(capturing)
    }

    /// Marks `stream`: the resources of work enqueued on it are now kept for the graph.
    fn add_stream(&mut self, stream: &'a Stream) -> Result<(), Error> {
        let mut state = stream.inner().state();
        match &state.capture {
            Some(known) if Arc::ptr_eq(known, &self.captured) => {}
            Some(_) => return Err(Error::Capturing),
            None => {
                state.capture = Some(Arc::clone(&self.captured));
                self.streams.push(stream);
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

    /// Ends the driver's capture. Streams stay marked until drop: work until then is kept too.
    fn stop(&mut self) -> Result<RawGraph, Error> {
        self.has_begun = false;
        let driver = self.origin.driver();
        let _entered = self.origin.context().enter()?;
        let mut graph = ptr::null_mut();
        // SAFETY: the capture was begun by this value, on this thread; the pointer is to a local
        // CUgraph.
        let status = unsafe { (driver.table().stream_end_capture)(self.origin.inner().raw(), &raw mut graph) };
        self.origin.check(status, "cuStreamEndCapture")?;
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
        for stream in &self.streams {
            stream.inner().state().capture = None;
        }
    }
}

impl Graph {
    /// The number of its nodes.
    #[doc(alias = "cuGraphGetNodes")]
    pub fn node_count(&self) -> Result<usize, Error> {
        let mut count = 0;
        let driver = self.context.driver();
        // SAFETY: with a null node array the driver returns only their number; the graph is live.
        let status = unsafe { (driver.table().graph_get_nodes)(self.raw, ptr::null_mut(), &raw mut count) };
        driver.check(status, "cuGraphGetNodes", format_args!("a graph"))?;
        Ok(count)
    }

    /// Instantiates it for launching.
    #[doc(alias("cuGraphInstantiate", "cudaGraphInstantiate"))]
    pub fn instantiate(&self) -> Result<GraphExec, Error> {
        let driver = self.context.driver();
        let _entered = self.context.enter()?;
        let mut raw = ptr::null_mut();
        // SAFETY: the graph is live, and the pointer is to a local CUgraphExec.
        let status = unsafe { (driver.table().graph_instantiate)(&raw mut raw, self.raw, 0) };
        driver.check(
            status,
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
    // SAFETY: this is the graph's last owner; instances do not depend on it.
    let status = unsafe { (driver.table().graph_destroy)(graph) };
    if status != status::SUCCESS && status != status::DEINITIALIZED {
        tracing::warn!("a graph was not destroyed: CUDA error {status}");
    }
}

/// An executable graph, launchable repeatedly. Handles are reference-counted.
#[derive(Clone)]
#[doc(alias("CUgraphExec", "cudaGraphExec_t"))]
pub struct GraphExec {
    resource: Arc<Resource>,
    /// The `CUgraphExec` as an exposed pointer. The driver does not lock it, so this mutex does.
    raw: Arc<Mutex<usize>>,
}

impl GraphExec {
    /// Enqueues all its work as one operation, after its previous launch on whatever stream.
    #[doc(alias("cuGraphLaunch", "cudaGraphLaunch"))]
    pub fn launch(&self, stream: &Stream) -> Result<(), Error> {
        let raw = self.raw.lock();
        stream.enqueue("cuGraphLaunch", &[&self.resource], |driver, stream| {
            // SAFETY: both are live; the resource's backing keeps what the work uses until the work
            // is done.
            unsafe { (driver.table().graph_launch)(exec(*raw), stream) }
        })
    }

    /// Uploads it to the device, so that the first launch is as fast as later ones.
    #[doc(alias("cuGraphUpload", "cudaGraphUpload"))]
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

struct Instance {
    raw: usize,
    _captured: Arc<Captured>,
}

impl Body for Instance {
    fn release(&mut self, driver: Driver) -> Result<(), Error> {
        // SAFETY: created by this value, which is its last owner, and its launches are done.
        let status = unsafe { (driver.table().graph_exec_destroy)(exec(self.raw)) };
        driver.check(status, "cuGraphExecDestroy", format_args!("a graph"))
    }
}

debug_fields!(Graph, self, device = self.context.device());

debug_fields!(GraphExec, self, device = self.resource.context().device());
