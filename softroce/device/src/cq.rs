//! Completion queues: fixed-size rings that the engine fills and application threads poll.
//!
//! The length is read without the lock; the model in `cq/model.rs` proves that no completion is
//! missed between arming, polling and sleeping. The lock orders the memory.

use std::collections::VecDeque;
use std::mem;
use std::sync::Arc;
use std::time::Duration;

use doorbell_roce_proto::work::{Completion, CqId, Status};
use doorbell_roce_proto::{Instant, Qpn};

use crate::clock::{Timestamp, TimestampClocks};
use crate::device::{Device, LimitError};
use crate::event::{Event, EventOwner, EventQueue, Token};
use crate::sync::{AtomicBool, AtomicUsize, Mutex, MutexGuard, Ordering};
use crate::{capacity, drive::Shared};

/// The completion channel of a completion queue, and its name in the channel's events.
#[derive(Clone, Debug)]
pub struct CqNotify {
    /// The channel.
    pub channel: Arc<EventQueue<Token>>,
    /// The event that the channel gets.
    pub token: Token,
}

/// What a completion queue is created with (ibv_create_cq_ex(3)).
#[derive(Clone, Debug)]
pub struct CqConfig {
    /// Its entries.
    pub entries: u32,
    /// Its channel, if any.
    pub notify: Option<CqNotify>,
    /// The clocks that time-stamp its completions.
    pub timestamps: TimestampClocks,
}

/// The queue overran: completions were lost (IBTA vol 1, 10.10.2.4).
#[derive(Clone, Copy, PartialEq, Eq, Debug, thiserror::Error)]
#[error("the completion queue overran: it was created with too few entries, and completions were lost")]
pub struct Overrun;

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Armed {
    No,
    /// A solicited one, or an error.
    Solicited,
    Any,
}

#[derive(Debug)]
struct Ring {
    entries: VecDeque<(Completion, Timestamp)>,
    capacity: usize,
    armed: Armed,
    moderation: Moderation,
    /// Completions that would have notified the channel without moderation.
    waiting: u32,
    notify_by: Option<Instant>,
    in_moderated_list: bool,
}

/// A count of at most 1, or no period, disables moderation.
#[derive(Clone, Copy, Debug, Default)]
struct Moderation {
    count: u16,
    period: Duration,
}

impl Moderation {
    fn delays(&self, waiting: u32) -> bool {
        waiting < u32::from(self.count) && self.period > Duration::ZERO
    }
}

/// The ring, shared with the device's state. Under its lock only event queues are locked.
#[derive(Debug)]
pub(crate) struct CqRing {
    ring: Mutex<Ring>,
    /// The number of entries, read without the lock.
    len: AtomicUsize,
    overrun: AtomicBool,
    notify: Option<CqNotify>,
    stamps: TimestampClocks,
    owner: EventOwner,
}

impl Ring {
    fn disarm(&mut self) {
        self.armed = Armed::No;
        self.waiting = 0;
        self.notify_by = None;
    }
}

impl CqRing {
    fn new(capacity: usize, notify: Option<CqNotify>, stamps: TimestampClocks, owner: EventOwner) -> Self {
        Self {
            ring: Mutex::new(Ring {
                entries: VecDeque::with_capacity(capacity),
                capacity,
                armed: Armed::No,
                moderation: Moderation::default(),
                waiting: 0,
                notify_by: None,
                in_moderated_list: false,
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

    /// Appends a completion; one too many is an overrun. Returns when to call
    /// [`notify_if_due`](Self::notify_if_due), unless an earlier call has: then its result does.
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
        let notifies = match ring.armed {
            Armed::No => false,
            Armed::Solicited => completion.solicited || completion.status != Status::Success,
            Armed::Any => true,
        };
        if !notifies {
            return None;
        }
        ring.waiting += 1;
        if !ring.moderation.delays(ring.waiting) {
            self.notify(ring);
            return None;
        }
        if ring.notify_by.is_none() {
            ring.notify_by = Some(now() + ring.moderation.period);
        }
        if mem::replace(&mut ring.in_moderated_list, true) {
            None
        } else {
            ring.notify_by
        }
    }

    fn notify(&self, mut ring: MutexGuard<'_, Ring>) {
        ring.disarm();
        drop(ring);
        if let Some(notify) = &self.notify {
            notify.channel.push(notify.token);
        }
    }

    /// Notifies the channel if moderation has delayed that long enough; otherwise returns when to
    /// call again, if completions are delayed.
    pub(crate) fn notify_if_due(&self, now: Instant) -> Option<Instant> {
        let mut ring = self.ring.lock();
        match ring.notify_by {
            Some(due) if due > now => return Some(due),
            Some(_) => {
                ring.in_moderated_list = false;
                self.notify(ring);
            }
            None => ring.in_moderated_list = false,
        }
        None
    }

    /// Removes the completions of a queue pair.
    fn remove_of(&self, qpn: Qpn) {
        let mut ring = self.ring.lock();
        ring.entries.retain(|(completion, _)| completion.qpn != qpn);
        self.len.store(ring.entries.len(), Ordering::Release);
    }

    fn take(&self, max: usize, mut take: impl FnMut(Completion, Timestamp)) -> Result<usize, Overrun> {
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

/// A completion queue (ibv_create_cq(3)); destroyed with its last clone and queue pair.
#[derive(Clone, Debug)]
pub struct Cq(Arc<CqHandle>);

#[derive(Debug)]
struct CqHandle {
    device: Arc<Device>,
    id: CqId,
    ring: Arc<CqRing>,
}

impl Device {
    /// A completion queue of exactly `config.entries` entries. Its overrun is reported to `owner`.
    ///
    /// # Errors
    /// When the number of entries is 0 or too large, or the device has no more queues.
    pub fn completion_queue(self: &Arc<Self>, config: CqConfig, owner: EventOwner) -> Result<Cq, LimitError> {
        let CqConfig {
            entries,
            notify,
            timestamps: stamps,
        } = config;
        if !(1..=capacity::CQ_ENTRIES).contains(&entries) {
            return Err(LimitError::Size);
        }
        let ring = Arc::new(CqRing::new(entries as usize, notify, stamps, owner));
        let id = self
            .shared()
            .core
            .lock()
            .objects
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
    /// Gives up to `max` completions to `take`, oldest first, and returns how many; an empty queue
    /// drives the device once. `take` runs under the queue's lock: it must not call the device.
    ///
    /// # Errors
    /// When the queue has overrun, and the completions in it have been taken.
    pub fn poll(&self, max: usize, mut take: impl FnMut(Completion)) -> Result<usize, Overrun> {
        self.take_or_drive(max, |completion, _| take(completion))
    }

    #[inline]
    fn take_or_drive(&self, max: usize, mut take: impl FnMut(Completion, Timestamp)) -> Result<usize, Overrun> {
        let found = self.0.ring.take(max, &mut take)?;
        if found > 0 || max == 0 {
            return Ok(found);
        }
        self.shared().drive_for_app();
        self.0.ring.take(max, take)
    }

    /// The oldest completion and its time stamp.
    ///
    /// # Errors
    /// As for [`poll`](Self::poll).
    pub fn take_next(&self) -> Result<Option<(Completion, Timestamp)>, Overrun> {
        let mut next = None;
        self.0
            .ring
            .take(1, |completion, stamp| next = Some((completion, stamp)))?;
        Ok(next)
    }

    /// As [`take_next`](Self::take_next), but an empty queue drives the device once.
    ///
    /// # Errors
    /// As for [`poll`](Self::poll).
    pub fn poll_next(&self) -> Result<Option<(Completion, Timestamp)>, Overrun> {
        let mut next = None;
        self.take_or_drive(1, |completion, stamp| next = Some((completion, stamp)))?;
        Ok(next)
    }

    /// Arms the channel for the next completion; only for a solicited one or an error when
    /// `solicited_only` (ibv_req_notify_cq(3)).
    pub fn arm(&self, solicited_only: bool) {
        self.0.ring.arm(solicited_only);
    }

    /// Sets completion moderation (ibv_modify_cq(3)): one event for `count` completions, or for
    /// those within `period` of the first, whichever is earlier. A count of 0 or 1, or a period of
    /// 0, disables it. Delayed completions are notified at once.
    pub fn moderate(&self, count: u16, period: Duration) {
        let mut ring = self.0.ring.ring.lock();
        ring.moderation = Moderation { count, period };
        if ring.waiting > 0 {
            self.0.ring.notify(ring);
        }
    }

    /// Cancels [`arm`](Self::arm): after it has returned the channel is not notified.
    pub fn disarm(&self) {
        // Notification happens under this lock.
        let _core = self.shared().core.lock();
        self.0.ring.ring.lock().disarm();
    }

    /// Resizes the queue.
    ///
    /// # Errors
    /// When `entries` is 0, too large, or less than the queue holds now.
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

    /// Removes the completions of a queue pair that was modified to RESET: as adapters do, and the
    /// next ones have the same number.
    pub(crate) fn remove_of(&self, qpn: Qpn) {
        self.0.ring.remove_of(qpn);
    }

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
        self.device.shared().core.lock().objects.remove_cq(self.id);
    }
}

#[cfg(all(test, doorbell_loom))]
mod model;
