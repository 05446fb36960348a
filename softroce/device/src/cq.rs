//! Completion queues: fixed rings that the engine's completions are put into and threads of the application poll.

use std::collections::VecDeque;
use std::mem;
use std::sync::Arc;
use std::time::Duration;

use doorbell_roce_proto::Instant;
use doorbell_roce_proto::work::{Completion, CqId, Status};

use crate::clock::{Stamp, Stamps};
use crate::device::{Device, LimitError};
use crate::event::{Event, EventQueue, Owner, Token};
use crate::sync::{AtomicBool, AtomicUsize, Mutex, MutexGuard, Ordering};
use crate::{capacity, drive::Shared};

/// The completion channel of a completion queue, and its name in the channel's events.
#[derive(Clone, Debug)]
pub struct CqNotify {
    /// The channel.
    pub channel: Arc<EventQueue<Token>>,
    /// What the channel is told.
    pub token: Token,
}

/// What a completion queue is created with (ibv_create_cq_ex(3)).
#[derive(Clone, Debug)]
pub struct CqConfig {
    /// Its entries.
    pub entries: u32,
    /// Its channel, if any.
    pub notify: Option<CqNotify>,
    /// The clocks by which its completions are stamped.
    pub stamps: Stamps,
}

/// The queue overran earlier: completions were lost (IBTA vol 1, 10.10.2.4).
#[derive(Clone, Copy, PartialEq, Eq, Debug, thiserror::Error)]
#[error("the completion queue overran: it was created with too few entries, and completions were lost")]
pub struct Overrun;

/// Which completion the channel is told of next.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Armed {
    No,
    /// One that was solicited, or an error.
    Solicited,
    Any,
}

#[derive(Debug)]
struct Ring {
    entries: VecDeque<(Completion, Stamp)>,
    capacity: usize,
    armed: Armed,
    moderation: Moderation,
    /// Completions that the channel would have been told of, were it not for moderation.
    waiting: u32,
    /// When it is to be told of them at the latest.
    tell_by: Option<Instant>,
    /// The device has this queue in its list of those that wait for a time.
    listed: bool,
}

/// How completions are gathered into one event (ibv_modify_cq(3)): as many as this, or all that came within the period since the first. A count of 1 or less, or no
/// period, gathers nothing.
#[derive(Clone, Copy, Debug, Default)]
struct Moderation {
    count: u16,
    period: Duration,
}

impl Moderation {
    fn holds_back(&self, waiting: u32) -> bool {
        waiting < u32::from(self.count) && self.period > Duration::ZERO
    }
}

/// The ring itself, shared with the device's state. Its lock is a leaf but for the queues of events.
#[derive(Debug)]
pub(crate) struct CqRing {
    ring: Mutex<Ring>,
    /// The number of entries, to look at without the lock.
    len: AtomicUsize,
    /// Set while the ring is full, never cleared.
    overrun: AtomicBool,
    notify: Option<CqNotify>,
    stamps: Stamps,
    owner: Owner,
}

impl Ring {
    fn disarm(&mut self) {
        self.armed = Armed::No;
        self.waiting = 0;
        self.tell_by = None;
    }
}

impl CqRing {
    fn new(capacity: usize, notify: Option<CqNotify>, stamps: Stamps, owner: Owner) -> Self {
        Self {
            ring: Mutex::new(Ring {
                entries: VecDeque::with_capacity(capacity),
                capacity,
                armed: Armed::No,
                moderation: Moderation::default(),
                waiting: 0,
                tell_by: None,
                listed: false,
            }),
            len: AtomicUsize::new(0),
            overrun: AtomicBool::new(false),
            notify,
            stamps,
            owner,
        }
    }

    fn arm(&self, solicited_only: bool) {
        let mut ring = self.ring.lock();
        ring.armed = match (ring.armed, solicited_only) {
            (Armed::Any, _) | (_, false) => Armed::Any,
            _ => Armed::Solicited,
        };
    }

    /// Appends a completion; one too many breaks the queue, not the memory. Says when to call [`tell_if_due`](Self::tell_if_due), unless that has been said
    /// already: then its answer says it again.
    pub(crate) fn push(&self, completion: Completion, now: impl FnOnce() -> Instant) -> Option<Instant> {
        let mut ring = self.ring.lock();
        if ring.entries.len() >= ring.capacity {
            drop(ring);
            if !self.overrun.swap(true, Ordering::Relaxed) {
                tracing::error!("a completion queue overran: completions are lost");
                self.owner.queue.push(Event::CqOverrun(self.owner.token));
            }
            return None;
        }
        ring.entries.push_back((completion, self.stamps.now()));
        self.len.store(ring.entries.len(), Ordering::Release);
        let tell = match ring.armed {
            Armed::No => false,
            Armed::Solicited => completion.solicited || completion.status != Status::Success,
            Armed::Any => true,
        };
        if !tell {
            return None;
        }
        ring.waiting += 1;
        if !ring.moderation.holds_back(ring.waiting) {
            self.tell(ring);
            return None;
        }
        if ring.tell_by.is_none() {
            ring.tell_by = Some(now() + ring.moderation.period);
        }
        if mem::replace(&mut ring.listed, true) {
            None
        } else {
            ring.tell_by
        }
    }

    /// Tells the channel.
    fn tell(&self, mut ring: MutexGuard<'_, Ring>) {
        ring.disarm();
        drop(ring);
        if let Some(notify) = &self.notify {
            notify.channel.push(notify.token);
        }
    }

    /// Tells the channel of what has waited long enough; when to ask again, if there is anything to wait for.
    pub(crate) fn tell_if_due(&self, now: Instant) -> Option<Instant> {
        let mut ring = self.ring.lock();
        match ring.tell_by {
            Some(due) if due > now => return Some(due),
            Some(_) => {
                ring.listed = false;
                self.tell(ring);
            }
            None => ring.listed = false,
        }
        None
    }

    /// Hands up to `max` completions to `take`.
    fn take(&self, max: usize, mut take: impl FnMut(Completion, Stamp)) -> Result<usize, Overrun> {
        if self.len.load(Ordering::Acquire) == 0 {
            return if self.overrun.load(Ordering::Relaxed) {
                Err(Overrun)
            } else {
                Ok(0)
            };
        }
        let mut ring = self.ring.lock();
        let count = max.min(ring.entries.len());
        for (completion, stamp) in ring.entries.drain(..count) {
            take(completion, stamp);
        }
        self.len.store(ring.entries.len(), Ordering::Release);
        Ok(count)
    }
}

/// A completion queue (ibv_create_cq(3)). Clones name the same queue; it goes away with the last of them and the last queue pair on it.
#[derive(Clone, Debug)]
pub struct Cq(Arc<CqHandle>);

#[derive(Debug)]
struct CqHandle {
    device: Arc<Device>,
    id: CqId,
    ring: Arc<CqRing>,
}

impl Device {
    /// A completion queue of exactly as many entries as asked for, its overrun told to `owner`.
    ///
    /// # Errors
    /// When it has no entries or too many, or the device has no more queues.
    pub fn completion_queue(self: &Arc<Self>, config: CqConfig, owner: Owner) -> Result<Cq, LimitError> {
        let CqConfig {
            entries,
            notify,
            stamps,
        } = config;
        if !(1..=capacity::CQ_ENTRIES).contains(&entries) {
            return Err(LimitError::Size);
        }
        let ring = Arc::new(CqRing::new(entries as usize, notify, stamps, owner));
        let id = self
            .shared()
            .core
            .lock()
            .add_cq(Arc::clone(&ring))
            .ok_or(LimitError::Exhausted)?;
        Ok(Cq(Arc::new(CqHandle {
            device: Arc::clone(self),
            id,
            ring,
        })))
    }
}

impl Cq {
    /// Hands up to `max` completions to `take`, oldest first, and says how many. Finding none it moves the device on once, and looks again.
    ///
    /// `take` runs under the queue's lock: it must not call the device.
    ///
    /// # Errors
    /// When the queue has overrun, and what it still held has been taken.
    pub fn poll(&self, max: usize, mut take: impl FnMut(Completion)) -> Result<usize, Overrun> {
        let found = self.0.ring.take(max, |completion, _| take(completion))?;
        if found > 0 || max == 0 {
            return Ok(found);
        }
        self.shared().drive_for_application();
        self.0.ring.take(max, |completion, _| take(completion))
    }

    /// The oldest completion and when it was generated, `None` when there is none.
    ///
    /// # Errors
    /// As for [`poll`](Self::poll).
    pub fn take_next(&self) -> Result<Option<(Completion, Stamp)>, Overrun> {
        let mut next = None;
        self.0
            .ring
            .take(1, |completion, stamp| next = Some((completion, stamp)))?;
        Ok(next)
    }

    /// As [`take_next`](Self::take_next), but finding none it moves the device on once, and looks again.
    ///
    /// # Errors
    /// As for [`poll`](Self::poll).
    pub fn poll_next(&self) -> Result<Option<(Completion, Stamp)>, Overrun> {
        match self.take_next()? {
            None => {
                self.shared().drive_for_application();
                self.take_next()
            }
            found => Ok(found),
        }
    }

    /// Has the channel told of the next completion; only of the next solicited one or error when `solicited_only` (ibv_req_notify_cq(3)).
    pub fn arm(&self, solicited_only: bool) {
        self.0.ring.arm(solicited_only);
    }

    /// Has the channel told only of every `count` completions, or of those that came within `period` since the first, whichever is earlier (ibv_modify_cq(3)). A
    /// count of 0 or 1, or a period of 0, is no moderation. What waited by the rules before is told at once.
    pub fn moderate(&self, count: u16, period: Duration) {
        let mut ring = self.0.ring.ring.lock();
        ring.moderation = Moderation { count, period };
        if ring.waiting > 0 {
            self.0.ring.tell(ring);
        }
    }

    /// Takes back what [`arm`](Self::arm) asked for. Once this has returned the channel is told nothing until it is armed again.
    pub fn disarm(&self) {
        // The channel is told under this lock.
        let _core = self.shared().core.lock();
        self.0.ring.ring.lock().disarm();
    }

    /// Changes the number of entries.
    ///
    /// # Errors
    /// When it is 0, too large, or less than what the queue holds now.
    pub fn resize(&self, entries: u32) -> Result<(), LimitError> {
        let mut ring = self.0.ring.ring.lock();
        let wanted = entries as usize;
        if !(1..=capacity::CQ_ENTRIES).contains(&entries) || wanted < ring.entries.len() {
            return Err(LimitError::Size);
        }
        let more = wanted.saturating_sub(ring.entries.len());
        ring.entries.reserve_exact(more);
        ring.capacity = wanted;
        Ok(())
    }

    /// Whether a completion channel may be told of its completions.
    pub(crate) fn has_channel(&self) -> bool {
        self.0.ring.notify.is_some()
    }

    /// Whether anything else, such as a queue pair, holds this queue.
    pub fn is_shared(&self) -> bool {
        Arc::strong_count(&self.0) > 1
    }

    pub(crate) fn id(&self) -> CqId {
        self.0.id
    }

    pub(crate) fn is_of(&self, device: &Arc<Device>) -> bool {
        Arc::ptr_eq(&self.0.device, device)
    }

    fn shared(&self) -> &Shared {
        self.0.device.shared()
    }
}

impl Drop for CqHandle {
    fn drop(&mut self) {
        self.device.shared().core.lock().remove_cq(self.id);
    }
}

#[cfg(all(test, doorbell_loom))]
mod model;
