//! Captures of streams into graphs: those that this crate begins, and those of the program.
//!
//! What captured work uses is kept as long as the graph and its instances. A graph of this crate
//! keeps it itself. A graph of the program keeps it by a user object, whose destructor the driver
//! calls in a thread of its own, where CUDA may not be called: so it only hands it on to the next
//! call that frees what was dropped.

use core::ffi::c_void;
use core::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::ptr;
use std::sync::{Arc, Weak};

use parking_lot::Mutex;

use crate::driver::Driver;
use crate::error::Error;
use crate::order::Place;
use crate::resource::Resource;
use crate::stream::Stream;
use crate::sys::{self, RawGraph, RawNode, status};

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct CaptureId(u64);

/// What work captured into one graph uses, and how far its [orders](crate::StreamOrder) are.
pub(crate) struct Captured {
    id: CaptureId,
    driver: Driver,
    /// The driver's number of a capture that the program has begun.
    number: Option<u64>,
    kept: Mutex<Vec<Arc<Resource>>>,
    pub(crate) places: Mutex<Vec<Place>>,
}

impl Captured {
    pub(crate) fn new(driver: Driver, number: Option<u64>) -> Arc<Self> {
        static NEXT: AtomicU64 = AtomicU64::new(0);
        Arc::new(Self {
            id: CaptureId(NEXT.fetch_add(1, Ordering::Relaxed)),
            driver,
            number,
            kept: Mutex::default(),
            places: Mutex::default(),
        })
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

    /// Keeps it as long as `graph` and its instances, and their launches.
    fn retain_by(self: &Arc<Self>, graph: RawGraph) -> Result<(), Error> {
        let table = self.driver.table();
        let pointer = Arc::into_raw(Arc::clone(self)).cast_mut().cast();
        let mut object = ptr::null_mut();
        // SAFETY: the pointer is to a local CUuserObject; the destructor takes what is given here.
        let status =
            unsafe { (table.user_object_create)(&raw mut object, pointer, released, 1, sys::USER_OBJECT_NO_SYNC) };
        if status != status::SUCCESS {
            // SAFETY: made above; there is no user object that would release it.
            drop(unsafe { Arc::from_raw(pointer.cast_const().cast::<Self>()) });
        }
        self.driver
            .check(status, "cuUserObjectCreate", format_args!("a graph"))?;
        // SAFETY: the graph is live, as it is being captured; it takes over the only reference.
        let status = unsafe { (table.graph_retain_user_object)(graph, object, 1, sys::USER_OBJECT_MOVE) };
        if status != status::SUCCESS {
            // SAFETY: the reference is still this call's.
            unsafe { (table.user_object_release)(object, 1) };
        }
        self.driver
            .check(status, "cuGraphRetainUserObject", format_args!("a graph"))
    }
}

/// The destructor of the user object of a graph.
unsafe extern "C" fn released(pointer: *mut c_void) {
    // SAFETY: from `Arc::into_raw` for the one user object with this pointer, whose destructor is
    // called once.
    let captured = unsafe { Arc::from_raw(pointer.cast_const().cast::<Captured>()) };
    let captures = captured.driver.captures();
    captures.ended.lock().push(captured);
    captures.has_ended.store(true, Ordering::Release);
}

/// The captures of a driver that the program has begun.
#[derive(Default)]
pub(crate) struct Captures {
    going_on: Mutex<Vec<Weak<Captured>>>,
    /// Those whose graph and instances are gone.
    ended: Mutex<Vec<Arc<Captured>>>,
    has_ended: AtomicBool,
}

// A panic while a list is locked leaves it whole: `Driver` stays usable across an unwinding.
impl std::panic::RefUnwindSafe for Captures {}

impl Captures {
    fn of(&self, driver: Driver, info: &CaptureInfo) -> Result<Arc<Captured>, Error> {
        let mut going_on = self.going_on.lock();
        going_on.retain(|known| known.strong_count() > 0);
        let mut known = going_on.iter().filter_map(Weak::upgrade);
        if let Some(known) = known.find(|known| known.number == Some(info.number)) {
            return Ok(known);
        }
        let captured = Captured::new(driver, Some(info.number));
        captured.retain_by(info.graph)?;
        going_on.push(Arc::downgrade(&captured));
        Ok(captured)
    }

    /// Drops what graphs used that are gone.
    pub(crate) fn release_ended(&self) {
        if self.has_ended.load(Ordering::Relaxed) && self.has_ended.swap(false, Ordering::Acquire) {
            let ended = std::mem::take(&mut *self.ended.lock());
            drop(ended);
        }
    }
}

/// A capture that a stream is in.
pub(crate) struct CaptureInfo {
    number: u64,
    pub(crate) graph: RawGraph,
    /// What the stream's next node depends on.
    pub(crate) dependencies: Vec<RawNode>,
}

impl Stream {
    /// The capture that it is in, also one of the program. To be called under no lock of the
    /// stream.
    pub(crate) fn captured(&self) -> Result<Option<Arc<Captured>>, Error> {
        let known = self.inner().state().capture.clone();
        // A borrowed one has it from the beginning.
        if known.is_some() || self.follower().is_some() {
            return Ok(known);
        }
        self.captured_elsewhere()
    }

    pub(crate) fn captured_elsewhere(&self) -> Result<Option<Arc<Captured>>, Error> {
        let Some(info) = self.capture_info()? else {
            return Ok(None);
        };
        let driver = self.driver();
        driver.captures().of(driver, &info).map(Some)
    }

    pub(crate) fn capture_info(&self) -> Result<Option<CaptureInfo>, Error> {
        let (mut state, mut number, mut graph) = (sys::CAPTURE_NONE, 0, ptr::null_mut());
        let (mut nodes, mut count) = (ptr::null(), 0);
        let _entered = self.context().enter()?;
        // SAFETY: the pointers are to local values; the stream is live.
        let status = unsafe {
            (self.driver().table().stream_get_capture_info)(
                self.inner().raw(),
                &raw mut state,
                &raw mut number,
                &raw mut graph,
                &raw mut nodes,
                &raw mut count,
            )
        };
        self.check(status, "cuStreamGetCaptureInfo")?;
        match state {
            sys::CAPTURE_NONE => Ok(None),
            sys::CAPTURE_ACTIVE => Ok(Some(CaptureInfo {
                number,
                graph,
                dependencies: match count {
                    0 => Vec::new(),
                    // SAFETY: the driver's array of so many nodes, valid until the next call on the
                    // stream.
                    _ => unsafe { std::slice::from_raw_parts(nodes, count) }.to_vec(),
                },
            })),
            _ => {
                self.check(status::STREAM_CAPTURE_INVALIDATED, "cuStreamGetCaptureInfo")?;
                Ok(None)
            }
        }
    }
}
