//! Completions of receives of an SRQ: found by its key, attributed to the consuming queue pair.
//!
//! The `wr_id` names SRQ and slot, `qp_num` the queue pair. The queue pair's own receive ring has
//! no slots and only stands for its number and tag; the completion counts in it.

use std::sync::Arc;

use super::kind::PollBackend;
use super::ring_cursor::{Confirmed, RingCursor, report_unexpected};
use super::{CqInner, Poller};
use crate::qp::{QueueKind, Ring};
use crate::srq::{ReturnRing, SHARED_KEY};

#[derive(Default)]
pub(super) struct SharedTable {
    returns: Vec<Arc<ReturnRing>>,
    /// The rings of queue pairs that have had such completions, by queue pair number.
    members: Vec<(u32, Arc<Ring>)>,
    /// Detached ones, each with how many completions the poller has taken when none of theirs is
    /// left.
    detached_returns: Vec<(u64, Arc<ReturnRing>)>,
    detached_members: Vec<(u64, Arc<Ring>)>,
}

impl SharedTable {
    pub(super) fn insert(&mut self, returns: Arc<ReturnRing>) {
        self.returns.push(returns);
    }

    pub(super) fn detach(&mut self, returns: Arc<ReturnRing>, until: u64) {
        self.detached_returns.push((until, returns));
    }

    pub(super) fn detach_member(&mut self, ring: Arc<Ring>, until: u64) {
        self.members.retain(|(_, member)| !Arc::ptr_eq(member, &ring));
        self.detached_members.push((until, ring));
    }

    pub(super) fn has_detached(&self) -> bool {
        !(self.detached_returns.is_empty() && self.detached_members.is_empty())
    }

    /// `taken` completions have been yielded; every one, if `u64::MAX`.
    pub(super) fn drop_detached(&mut self, taken: u64) {
        for (_, detached) in self.detached_returns.extract_if(.., |(until, _)| *until <= taken) {
            self.returns.retain(|returns| !Arc::ptr_eq(returns, &detached));
        }
        self.detached_members.retain(|(until, _)| *until > taken);
    }

    fn returns(&self, key: u32) -> Option<&Arc<ReturnRing>> {
        self.returns.iter().find(|returns| returns.key() == key)
    }

    fn member(&self, qpn: u32) -> Option<&Arc<Ring>> {
        let at = self.members.binary_search_by_key(&qpn, |(number, _)| *number).ok()?;
        self.members.get(at).map(|(_, ring)| ring)
    }

    fn insert_member(&mut self, qpn: u32, ring: &Arc<Ring>) {
        if let Err(at) = self.members.binary_search_by_key(&qpn, |(number, _)| *number) {
            self.members.insert(at, (qpn, Arc::clone(ring)));
        }
    }

    fn detached_member(&self, qpn: u32) -> Option<&Arc<Ring>> {
        let mut rings = self.detached_members.iter().map(|(_, ring)| ring);
        rings.find(|ring| ring.qpn().get() == qpn)
    }
}

pub(super) fn is_member(ring: &Ring) -> bool {
    ring.queue() == QueueKind::Receive && ring.depth() == 0
}

#[inline(always)]
pub(super) fn is_shared(key: u64) -> bool {
    key & (u64::from(SHARED_KEY) << 32) != 0
}

/// As [`ring_cursor::confirm`](super::ring_cursor::confirm), but of its own request alone.
pub(super) fn confirm<Q: PollBackend>(poller: &mut Poller<Q>, wr_id: u64, qp_num: u32) -> Option<Confirmed> {
    let (key, slot) = ((wr_id >> 32) as u32, wr_id as u32);
    if poller.table.shared.returns(key).is_none() {
        poller.inner.registry().add_arrivals(&mut poller.table);
    }
    let returns = poller.table.shared.returns(key)?;
    // SAFETY: this is the poller of this queue, and this is the completion.
    let Some(buffers) = (unsafe { returns.retire(slot) }) else {
        report_unexpected(wr_id, returns.unknown_qp());
        return None;
    };
    let unknown = core::ptr::from_ref(returns.unknown_qp());
    let ring = member(poller, qp_num).unwrap_or(unknown);
    poller.unsignaled_left = 0;
    Some(Confirmed {
        buffers,
        // SAFETY: in the poller's table, or kept by an entry of it.
        next: RingCursor::for_shared_receive(unsafe { &*ring }),
        in_flight: 1,
    })
}

#[inline(always)]
fn member<Q: PollBackend>(poller: &mut Poller<Q>, qpn: u32) -> Option<*const Ring> {
    match poller.table.shared.member(qpn) {
        Some(ring) => Some(Arc::as_ptr(ring)),
        None => find_member(poller, qpn),
    }
}

/// Finds a queue pair by its first such completion, among arrivals, then the detached.
#[cold]
#[inline(never)]
fn find_member<Q: PollBackend>(poller: &mut Poller<Q>, qpn: u32) -> Option<*const Ring> {
    poller.inner.registry().add_arrivals(&mut poller.table);
    let table = &mut poller.table;
    let is_it = |ring: &&Arc<Ring>| is_member(ring) && ring.qpn().get() == qpn;
    if let Some(ring) = table.entries.iter().flatten().map(|(_, ring)| ring).find(is_it) {
        table.shared.insert_member(qpn, ring);
        return Some(Arc::as_ptr(ring));
    }
    table.shared.detached_member(qpn).map(Arc::as_ptr)
}

impl CqInner {
    /// Reserves `entries` for an SRQ. Err: the number of free entries.
    pub(crate) fn attach_srq(&self, entries: u32, returns: &Arc<ReturnRing>) -> Result<(), u32> {
        self.registry().attach_srq(entries, Arc::clone(returns))
    }

    /// After the last queue pair that shares both; up to `entries` completions may be left.
    pub(crate) fn detach_srq(&self, entries: u32, returns: Arc<ReturnRing>) {
        if self.registry().detach_srq(entries, returns) {
            self.registry.set_changed();
        }
    }
}
