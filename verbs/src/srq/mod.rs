//! Shared receive queues (SRQ): one for many queue pairs (IBTA vol 1, 10.2.9; ibv_create_srq(3)).
//!
//! # Why nothing safe frees, moves or aliases memory that the device may touch
//!
//! As in `qp`, slots own the buffers until a completion or a rejection names them. The rest is
//! dropped only after ibv_destroy_srq(3) succeeded, which takes that all queue pairs are destroyed.
//!
//! # Why a completion queue cannot overflow
//!
//! A receive has at most one unpolled completion: its slot is posted again only after that. As any
//! queue pair may consume all receives, each completion queue has an entry per slot reserved.
//!
//! No model: changed under a lock; otherwise only a reason to take that lock.

mod attachment;
mod builder;
mod error;
#[cfg(all(test, doorbell_loom))]
mod model;
mod post;
mod slots;

use core::ffi::{c_int, c_void};
use core::mem::ManuallyDrop;
use core::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::io;
use std::sync::{Arc, Weak};

use doorbell_verbs_sys as sys;

pub(crate) use attachment::{Membership, SrqAttachment};
pub use builder::{SharedReceiveQueueBuilder, SrqQueuePairBuilder};
pub use error::SharedReceiveQueueError;
use post::Poster;
pub use post::SharedReceiveBatch;
pub(crate) use slots::ReturnRing;
use slots::Slots;

use crate::context::ContextInner;
use crate::cq::CqInner;
use crate::error::check;
use crate::memory::Sink;
use crate::pd::PdInner;
use crate::qp::PostError;
use crate::sync::{self, Mutex, MutexGuard};

/// Set in the keys (the upper half of `wr_id`) of SRQs, clear in those of queue pairs.
pub(crate) const SHARED_KEY: u32 = 1 << 31;

/// Identifies a shared receive queue in events: unique in the process, and never reused.
#[doc(alias = "srq_context")]
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct SrqId(u32);

impl SrqId {
    /// `None` when all have been used.
    fn next() -> Option<Self> {
        static NEXT: AtomicU32 = AtomicU32::new(0);
        let next = |number: u32| (number < SHARED_KEY).then_some(number + 1);
        let taken = NEXT.fetch_update(Ordering::Relaxed, Ordering::Relaxed, next);
        taken.ok().map(|number| Self(number | SHARED_KEY))
    }

    fn exhausted() -> io::Error {
        io::Error::other("2^31 have been made in this process")
    }

    fn to_context(self) -> *mut c_void {
        core::ptr::without_provenance_mut(self.0 as usize)
    }

    /// The queue with this `srq_context`; `None` for one that this crate did not create.
    pub(crate) fn from_context(context: *mut c_void) -> Option<Self> {
        let number = u32::try_from(context.addr()).ok()?;
        (number & SHARED_KEY != 0).then_some(Self(number))
    }
}

impl core::fmt::Display for SrqId {
    fn fmt(&self, f: &mut core::fmt::Formatter<'_>) -> core::fmt::Result {
        (self.0 & !SHARED_KEY).fmt(f)
    }
}

/// The verbs of a library that has shared receive queues.
#[derive(Clone, Copy)]
struct Verbs {
    create: unsafe extern "C" fn(*mut sys::ibv_pd, *mut sys::ibv_srq_init_attr) -> *mut sys::ibv_srq,
    modify: unsafe extern "C" fn(*mut sys::ibv_srq, *mut sys::ibv_srq_attr, c_int) -> c_int,
    query: unsafe extern "C" fn(*mut sys::ibv_srq, *mut sys::ibv_srq_attr) -> c_int,
    destroy: unsafe extern "C" fn(*mut sys::ibv_srq) -> c_int,
}

impl Verbs {
    fn from_api(api: &sys::Api) -> Option<Self> {
        Some(Self {
            create: api.create_srq?,
            modify: api.modify_srq?,
            query: api.query_srq?,
            destroy: api.destroy_srq?,
        })
    }
}

pub(crate) struct SrqInner {
    raw: *mut sys::ibv_srq,
    verbs: Verbs,
    /// Its id's number: the upper half of its requests' `wr_id`.
    key: u32,
    depth: u32,
    max_sge: u32,
    pd: ManuallyDrop<Arc<PdInner>>,
    slots: ManuallyDrop<Arc<Slots>>,
    attachments: Mutex<Attachments>,
    /// Whether there are `arrivals`: written under the lock, read without.
    has_arrivals: AtomicBool,
}

#[derive(Default)]
struct Attachments {
    attachments: Vec<Weak<SrqAttachment>>,
    arrivals: Vec<Arc<ReturnRing>>,
}

// SAFETY: `raw` is only passed to verbs, which any thread may call; the rest is Send and Sync.
unsafe impl Send for SrqInner {}
// SAFETY: as above.
unsafe impl Sync for SrqInner {}

impl SrqInner {
    fn attachments(&self) -> MutexGuard<'_, Attachments> {
        sync::lock(&self.attachments)
    }

    /// The attachment to `cq`: the existing one, or a new one. Err: the number of free entries.
    fn attachment(&self, cq: &Arc<CqInner>) -> Result<Arc<SrqAttachment>, u32> {
        let mut attachments = self.attachments();
        attachments
            .attachments
            .retain(|attachment| attachment.strong_count() > 0);
        let existing = attachments
            .attachments
            .iter()
            .filter_map(Weak::upgrade)
            .find(|attachment| attachment.is_on(cq));
        if let Some(attachment) = existing {
            return Ok(attachment);
        }
        let returns = Arc::new(ReturnRing::new(self.key, Arc::clone(&self.slots)));
        let attachment = Arc::new(SrqAttachment::new(cq, self.depth, Arc::clone(&returns))?);
        attachments.attachments.push(Arc::downgrade(&attachment));
        attachments.arrivals.push(returns);
        self.has_arrivals.store(true, Ordering::Relaxed);
        Ok(attachment)
    }

    /// Appends the new return rings to `known`. Returns whether there were any.
    fn take_new_returns(&self, known: &mut Vec<Arc<ReturnRing>>) -> bool {
        if !self.has_arrivals.load(Ordering::Relaxed) {
            return false;
        }
        let mut attachments = self.attachments();
        self.has_arrivals.store(false, Ordering::Relaxed);
        known.append(&mut attachments.arrivals);
        true
    }

    pub(crate) fn raw(&self) -> *mut sys::ibv_srq {
        self.raw
    }

    pub(crate) fn depth(&self) -> u32 {
        self.depth
    }

    pub(crate) fn context(&self) -> &ContextInner {
        &self.pd.context
    }

    fn id(&self) -> SrqId {
        SrqId(self.key)
    }

    fn name(&self) -> String {
        format!("{} shared receive queue {}", self.pd.context.name, self.id())
    }
}

/// A shared receive queue, from which queue pairs on it consume their receives. Created by
/// [`ProtectionDomain::shared_receive_queue`](crate::ProtectionDomain::shared_receive_queue); queue
/// pairs by
/// [`QueuePairBuilder::shared_receive_queue`](crate::QueuePairBuilder::shared_receive_queue).
///
/// It has one poster; other threads create queue pairs on it by its [`handle`](Self::handle).
///
/// ```no_run
/// # use doorbell_verbs::{CompletionQueue, Endpoint, Local, ProtectionDomain};
/// # fn serve(pd: &ProtectionDomain, cq: &mut CompletionQueue, peers: &[Endpoint]) -> Result<(), Box<dyn std::error::Error>> {
/// let mut srq = pd.shared_receive_queue(256).create()?;
/// let mut qps = Vec::new();
/// for peer in peers {
///     qps.push(pd.queue_pair(cq).shared_receive_queue(&srq).rc()?.connect(peer)?);
/// }
/// let inbox = pd.register(vec![0_u8; 256 << 10], Local)?;
/// srq.post_receives(|batch| inbox.chunks(1 << 10).for_each(|buffer| batch.receive(buffer)))?;
/// loop {
///     for mut done in cq.poll()? {
///         println!("{:?} of queue pair {}", done.result()?, done.qpn());
///         if let Some(buffer) = done.take::<Local>() {
///             srq.receive(buffer)?;
///         }
///     }
/// }
/// # }
/// ```
///
/// A completion arrives at the completion queue of the queue pair that consumes the receive, in any
/// order; its [`sequence`](crate::Completion::sequence) counts that queue pair's receives.
///
/// In ERR a queue pair flushes only a receive that it has consumed. Dropping one may lose unpolled
/// completions, as some devices remove them: these buffers stay until the shared receive queue is
/// dropped. To lose none, move the queue pair to ERR ([`flush`](crate::QueuePair::flush)), wait for
/// the event [`LastRequestReached`](crate::QueuePairEvent::LastRequestReached), poll until the
/// completion queue is empty, and then drop it (IBTA vol 1, 10.3.1.5 and 11.6.3).
///
/// It is destroyed, and its buffers then dropped, after its handles and all queue pairs on it.
#[doc(alias("ibv_srq", "ibv_create_srq", "ibv_destroy_srq", "SRQ"))]
pub struct SharedReceiveQueue {
    poster: Poster,
    handle: SharedReceiveQueueHandle,
}

/// Creates queue pairs on a shared receive queue (IBTA vol 1, 10.2.9). Cloning is cheap.
#[doc(alias = "ibv_srq")]
#[derive(Clone)]
pub struct SharedReceiveQueueHandle(Arc<SrqInner>);

/// The attributes of a shared receive queue (ibv_query_srq(3)).
#[doc(alias = "ibv_srq_attr")]
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub struct SharedReceiveQueueAttr {
    /// How many receives the device holds: as many as requested, or more.
    #[doc(alias = "max_wr")]
    pub depth: u32,
    /// Maximum number of buffers (SGEs) of a receive.
    pub max_sge: u32,
    /// The armed limit, 0 if none is.
    #[doc(alias = "srq_limit")]
    pub limit: u32,
}

impl SharedReceiveQueue {
    fn new(pd: &Arc<PdInner>, depth: u32, max_sge: u32) -> Result<Self, SharedReceiveQueueError> {
        let device = || pd.context.name.clone();
        let Some(verbs) = Verbs::from_api(pd.context.api) else {
            return Err(SharedReceiveQueueError::Unsupported { device: device() });
        };
        let failed = |error| SharedReceiveQueueError::Create {
            device: device(),
            error,
        };
        let id = SrqId::next().ok_or_else(|| failed(SrqId::exhausted()))?;
        let mut init = sys::ibv_srq_init_attr {
            srq_context: id.to_context(),
            attr: sys::ibv_srq_attr {
                max_wr: depth,
                max_sge,
                srq_limit: 0,
            },
        };
        // SAFETY: the domain is live, and stays so as long as the queue, which holds it.
        let raw = unsafe { (verbs.create)(pd.raw, &mut init) };
        if raw.is_null() {
            let error = io::Error::last_os_error();
            return Err(match error.kind() {
                io::ErrorKind::Unsupported => SharedReceiveQueueError::Unsupported { device: device() },
                _ => failed(error),
            });
        }
        // SAFETY: just created in this domain, with this size.
        Ok(unsafe { Self::adopt(pd, raw, (verbs, id), (depth, max_sge)) })
    }

    /// # Safety
    /// `raw` is a live queue of the domain, of that many receives of that many buffers and with
    /// none posted, which nothing else destroys or posts to.
    unsafe fn adopt(
        pd: &Arc<PdInner>,
        raw: *mut sys::ibv_srq,
        (verbs, id): (Verbs, SrqId),
        (depth, max_sge): (u32, u32),
    ) -> Self {
        let inner = Arc::new(SrqInner {
            raw,
            verbs,
            key: id.0,
            depth,
            max_sge,
            pd: ManuallyDrop::new(Arc::clone(pd)),
            slots: ManuallyDrop::new(Arc::new(Slots::new(depth))),
            attachments: Mutex::default(),
            has_arrivals: AtomicBool::new(false),
        });
        Self {
            handle: SharedReceiveQueueHandle(Arc::clone(&inner)),
            // SAFETY: nothing else posts to it, by contract.
            poster: unsafe { Poster::new(inner) },
        }
    }

    /// # Safety
    /// As for `adopt`.
    pub(crate) unsafe fn adopt_raw(
        pd: &Arc<PdInner>,
        raw: *mut sys::ibv_srq,
        size: (u32, u32),
    ) -> Result<Self, SharedReceiveQueueError> {
        let device = || pd.context.name.clone();
        let Some(verbs) = Verbs::from_api(pd.context.api) else {
            return Err(SharedReceiveQueueError::Unsupported { device: device() });
        };
        let id = SrqId::next().ok_or_else(|| SharedReceiveQueueError::Create {
            device: device(),
            error: SrqId::exhausted(),
        })?;
        // SAFETY: live by contract, not shared; only the reader of the queue's events gets this.
        unsafe { (*raw).srq_context = id.to_context() };
        // SAFETY: by contract.
        Ok(unsafe { Self::adopt(pd, raw, (verbs, id), size) })
    }

    /// Posts one receive, for the first of its queue pairs that needs one (ibv_post_srq_recv(3)). A
    /// datagram takes [`GRH_BYTES`](crate::GRH_BYTES) bytes more.
    ///
    /// # Errors
    /// When it is refused, here or by the device. The error returns the buffer.
    #[doc(alias = "ibv_post_srq_recv")]
    #[inline]
    pub fn receive(&mut self, buffer: impl Sink) -> Result<(), PostError> {
        self.poster.post_one(buffer)
    }

    /// Posts all the receives that `build` adds, by one call of the device (one doorbell).
    ///
    /// # Errors
    /// When a receive is refused, here (then none is posted) or by the device (then those before it
    /// are). The error returns the buffers.
    #[doc(alias = "ibv_post_srq_recv")]
    #[inline]
    pub fn post_receives(&mut self, build: impl for<'q> FnOnce(&mut SharedReceiveBatch<'q>)) -> Result<(), PostError> {
        SharedReceiveBatch::post(&mut self.poster, build)
    }

    /// How many more receives can be posted now.
    #[must_use]
    pub fn free_slots(&mut self) -> u32 {
        self.poster.room()
    }

    /// How many receives may be outstanding.
    #[must_use]
    pub fn depth(&self) -> u32 {
        self.handle.0.depth
    }

    /// Its identifier in events.
    #[must_use]
    pub fn id(&self) -> SrqId {
        self.handle.id()
    }

    /// A handle that creates queue pairs on it, in other threads too.
    #[must_use]
    pub fn handle(&self) -> SharedReceiveQueueHandle {
        self.handle.clone()
    }

    /// Raises [`LimitReached`](crate::SharedReceiveQueueEvent::LimitReached) once when fewer than
    /// `limit` receives are left (ibv_modify_srq(3), IBTA vol 1, 10.2.9.5); 0 disarms. With fewer
    /// left already, some devices raise it at once, others with the next receive that is consumed.
    ///
    /// # Errors
    /// When it is more than the queue holds, or the device refuses.
    #[doc(alias("ibv_modify_srq", "IBV_SRQ_LIMIT", "srq_limit"))]
    pub fn arm_limit(&self, limit: u32) -> Result<(), SharedReceiveQueueError> {
        let inner = &*self.handle.0;
        let mut attr = sys::ibv_srq_attr {
            max_wr: 0,
            max_sge: 0,
            srq_limit: limit,
        };
        // SAFETY: the queue is live, and so is `attr`.
        let result = unsafe { (inner.verbs.modify)(inner.raw, &mut attr, sys::IBV_SRQ_LIMIT.cast_signed()) };
        check(result).map_err(|error| SharedReceiveQueueError::Arm {
            queue: inner.name(),
            limit,
            depth: inner.depth,
            error,
        })
    }

    /// The queue's attributes (ibv_query_srq(3)).
    ///
    /// # Errors
    /// When the query fails.
    #[doc(alias = "ibv_query_srq")]
    pub fn query(&self) -> Result<SharedReceiveQueueAttr, SharedReceiveQueueError> {
        let inner = &*self.handle.0;
        let mut attr = sys::ibv_srq_attr {
            max_wr: 0,
            max_sge: 0,
            srq_limit: 0,
        };
        // SAFETY: the queue is live, and `attr` may be written.
        let result = unsafe { (inner.verbs.query)(inner.raw, &mut attr) };
        check(result).map_err(|error| SharedReceiveQueueError::Query {
            queue: inner.name(),
            error,
        })?;
        Ok(SharedReceiveQueueAttr {
            depth: attr.max_wr,
            max_sge: attr.max_sge,
            limit: attr.srq_limit,
        })
    }
}

impl SharedReceiveQueueHandle {
    /// Its identifier in events.
    #[must_use]
    pub fn id(&self) -> SrqId {
        self.0.id()
    }

    pub(crate) fn inner(&self) -> &Arc<SrqInner> {
        &self.0
    }
}

impl AsRef<SharedReceiveQueueHandle> for SharedReceiveQueue {
    fn as_ref(&self) -> &SharedReceiveQueueHandle {
        &self.handle
    }
}

impl AsRef<Self> for SharedReceiveQueueHandle {
    fn as_ref(&self) -> &Self {
        self
    }
}

impl core::fmt::Debug for SharedReceiveQueue {
    fn fmt(&self, f: &mut core::fmt::Formatter<'_>) -> core::fmt::Result {
        f.debug_struct("SharedReceiveQueue")
            .field("id", &self.id())
            .field("depth", &self.depth())
            .finish_non_exhaustive()
    }
}

impl core::fmt::Debug for SharedReceiveQueueHandle {
    fn fmt(&self, f: &mut core::fmt::Formatter<'_>) -> core::fmt::Result {
        f.debug_struct("SharedReceiveQueueHandle")
            .field("id", &self.id())
            .finish_non_exhaustive()
    }
}

impl Drop for SrqInner {
    fn drop(&mut self) {
        // SAFETY: the last reference: every queue pair on it has been destroyed, and nothing posts.
        let result = unsafe { (self.verbs.destroy)(self.raw) };
        match check(result) {
            // SAFETY: dropped once, here. The device is done with the contents of its slots.
            Ok(()) => unsafe {
                ManuallyDrop::drop(&mut self.slots);
                ManuallyDrop::drop(&mut self.pd);
            },
            Err(error) => {
                tracing::error!(queue = %self.name(), %error, "ibv_destroy_srq failed; it is leaked with all it has in flight");
            }
        }
    }
}
