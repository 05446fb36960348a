//! Maps completions to rings, and accounts for the reserved entries of the queue.
//!
//! Each ring attached has a *key*, the upper half of its requests' `wr_id`: an index into the table
//! and its generation, so that no completion of a destroyed queue pair is taken for its
//! successor's. The highest bit marks shared receive queues (see `shared`).

use std::sync::Arc;

use super::CqInner;
use super::shared::{self, SharedTable};
use crate::qp::{QpObject, QueueKind, Ring};
use crate::srq::{Membership, ReturnRing, SHARED_KEY, SrqInner};

const INDEX_BITS: u32 = 16;

#[inline(always)]
fn index_of(key: u32) -> usize {
    (key & ((1 << INDEX_BITS) - 1)) as usize
}

/// The rings that the poller knows, by the index in their key.
#[derive(Default)]
pub(super) struct Table {
    pub(super) entries: Vec<Option<(u32, Arc<Ring>)>>,
    pub(super) shared: SharedTable,
}

impl Table {
    #[inline(always)]
    pub(super) fn get(&self, key: u32) -> Option<&Arc<Ring>> {
        match self.entries.get(index_of(key)) {
            Some(Some((there, ring))) if *there == key => Some(ring),
            _ => None,
        }
    }

    fn insert(&mut self, key: u32, ring: Arc<Ring>) {
        let index = index_of(key);
        if self.entries.len() <= index {
            self.entries.resize_with(index + 1, || None);
        }
        self.entries[index] = Some((key, ring));
    }

    fn remove(&mut self, key: u32) -> Option<Arc<Ring>> {
        let entry = self.entries.get_mut(index_of(key))?;
        entry.take_if(|(there, _)| *there == key).map(|(_, ring)| ring)
    }
}

type Arrivals = Vec<(u32, Arc<Ring>)>;

/// What queue pairs and poller exchange, behind the queue's lock.
pub(super) struct Registry {
    capacity: u32,
    free: u32,
    /// The next key of each index that was used and is free again.
    vacant: Vec<u32>,
    indices: u32,
    /// Rings that the poller has not put in its table yet.
    arrivals: Arrivals,
    /// Keys of destroyed queue pairs' rings, and how many completions each may have left.
    departures: Vec<(u32, u32)>,
    /// Queue pairs dropped by the thread that polls, to be destroyed when its poll is closed.
    deferred: Vec<QpObject>,
    shared_arrivals: Vec<Arc<ReturnRing>>,
    shared_departures: Vec<(Arc<ReturnRing>, u32)>,
    closed: bool,
}

impl Registry {
    pub(super) fn new(capacity: u32) -> Self {
        Self {
            capacity,
            free: capacity,
            vacant: Vec::new(),
            indices: 0,
            arrivals: Vec::new(),
            departures: Vec::new(),
            deferred: Vec::new(),
            shared_arrivals: Vec::new(),
            shared_departures: Vec::new(),
            closed: false,
        }
    }

    pub(super) fn free(&self) -> u32 {
        self.free
    }

    pub(super) fn capacity(&self) -> u32 {
        self.capacity
    }

    pub(super) fn reserved(&self) -> u32 {
        self.capacity - self.free
    }

    pub(super) fn resized(&mut self, capacity: u32) {
        let reserved = self.reserved();
        (self.capacity, self.free) = (capacity, capacity.saturating_sub(reserved));
    }

    fn take_key(&mut self) -> Option<u32> {
        if let Some(key) = self.vacant.pop() {
            return Some(key);
        }
        if self.indices >> INDEX_BITS != 0 {
            return None;
        }
        self.indices += 1;
        Some(self.indices - 1)
    }

    /// Frees the index of `key`, unless its generations are used up.
    fn free_key(&mut self, key: u32) {
        let next = key + (1 << INDEX_BITS);
        if next < SHARED_KEY {
            self.vacant.push(next);
        }
    }

    /// Reserves the entries that `ring` needs and assigns a key. Err: the number of free entries.
    pub(super) fn attach(&mut self, ring: &Arc<Ring>) -> Result<u32, u32> {
        if self.free < ring.depth() {
            return Err(self.free);
        }
        let Some(key) = self.take_key() else { return Err(0) };
        self.free -= ring.depth();
        self.arrivals.push((key, Arc::clone(ring)));
        Ok(key)
    }

    /// The queue pair has been destroyed. Returns whether the poller is to be notified.
    pub(super) fn detach(&mut self, key: u32, ring: &Ring) -> bool {
        // Only the requests in flight may have a completion in the queue.
        let outstanding = ring.in_flight();
        self.free += ring.depth() - outstanding;
        if self.closed {
            return false;
        }
        self.departures.push((key, outstanding));
        true
    }

    pub(super) fn add_arrivals(&mut self, table: &mut Table) {
        for (key, ring) in self.arrivals.drain(..) {
            table.insert(key, ring);
        }
        for returns in self.shared_arrivals.drain(..) {
            table.shared.insert(returns);
        }
    }

    /// Returns the rings of destroyed queue pairs, and how many completions they may have left:
    /// none once the poller has taken `until`.
    pub(super) fn apply_changes(&mut self, table: &mut Table, until: u64) -> (Vec<Arc<Ring>>, u32) {
        self.add_arrivals(table);
        let mut rings = Vec::with_capacity(self.departures.len());
        let mut left = 0;
        for (key, outstanding) in core::mem::take(&mut self.departures) {
            match table.remove(key) {
                // Completions of its SRQ receives may still be in the queue.
                Some(ring) if shared::is_member(&ring) => table.shared.detach_member(ring, until),
                ring => rings.extend(ring),
            }
            left += outstanding;
            self.free_key(key);
        }
        for (returns, outstanding) in self.shared_departures.drain(..) {
            table.shared.detach(returns, until);
            left += outstanding;
        }
        (rings, left)
    }

    pub(super) fn release(&mut self, entries: u32) {
        self.free += entries;
    }

    pub(super) fn defer_destroy(&mut self, object: QpObject) {
        self.deferred.push(object);
    }

    /// Queue pairs to destroy now: dropped by the caller, outside the lock.
    pub(super) fn take_deferred(&mut self) -> Vec<QpObject> {
        core::mem::take(&mut self.deferred)
    }

    pub(super) fn attach_srq(&mut self, entries: u32, returns: Arc<ReturnRing>) -> Result<(), u32> {
        if self.free < entries {
            return Err(self.free);
        }
        self.free -= entries;
        if !self.closed {
            self.shared_arrivals.push(returns);
        }
        Ok(())
    }

    /// As [`detach`](Self::detach); `entries` are released by the poller's `drain`.
    pub(super) fn detach_srq(&mut self, entries: u32, returns: Arc<ReturnRing>) -> bool {
        if self.closed {
            self.free += entries;
            return false;
        }
        self.shared_departures.push((returns, entries));
        true
    }

    /// The poller is dropped. Returns the arrivals that it did not know, to be dropped.
    pub(super) fn close(&mut self) -> (Arrivals, Vec<Arc<ReturnRing>>) {
        self.closed = true;
        let mut shared = core::mem::take(&mut self.shared_arrivals);
        shared.extend(self.shared_departures.drain(..).map(|(returns, _)| returns));
        (core::mem::take(&mut self.arrivals), shared)
    }
}

/// A ring's reserved entries and key in a completion queue; dropped after the queue pair.
pub(crate) struct Attachment {
    cq: Arc<CqInner>,
    key: u32,
    ring: Arc<Ring>,
    /// The membership of the SRQ that the receives come from, if any. Dropped after the rest.
    membership: Option<Membership>,
}

impl Attachment {
    /// Reserves `depth` entries for a new ring. Err: the number of free entries.
    pub(crate) fn new(cq: &Arc<CqInner>, depth: u32, queue: QueueKind, tag: u64) -> Result<Self, u32> {
        let ring = Arc::new(Ring::new(depth, queue, tag));
        let key = cq.registry.attach(&ring)?;
        Ok(Self {
            cq: Arc::clone(cq),
            key,
            ring,
            membership: None,
        })
    }

    /// Receives come from `srq`; the own ring has no slots. Err: the number of free entries.
    pub(crate) fn share(&mut self, srq: &Arc<SrqInner>) -> Result<(), u32> {
        self.membership = Some(Membership::new(srq, &self.cq)?);
        Ok(())
    }

    pub(crate) fn cq(&self) -> &Arc<CqInner> {
        &self.cq
    }

    pub(crate) fn key(&self) -> u32 {
        self.key
    }

    pub(crate) fn ring(&self) -> &Arc<Ring> {
        &self.ring
    }
}

impl Drop for Attachment {
    fn drop(&mut self) {
        self.cq.registry.detach(self.key, &self.ring);
    }
}
