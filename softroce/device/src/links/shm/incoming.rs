//! The incoming rings of the shm links.

use std::collections::VecDeque;
use std::os::fd::OwnedFd;

use doorbell_roce_proto::Qpn;
use doorbell_roce_proto::qp::LinkId;

use super::link_to;
use crate::direct::Access;
use crate::host::MemberId;
use crate::links::shm_ring::segment::SegmentId;
use crate::links::shm_ring::{CorruptRing, Disposition, Received, Receiver};

/// Records of one ring handled at most before the next ring's.
const BATCH: usize = 32;

/// Fewer records are no burst: a message and the ACK behind it.
const MIN_BURST: usize = 4;

#[derive(Debug, Default)]
pub(crate) struct IncomingRings {
    rings: Vec<IncomingRing>,
    /// GPU memory is registered in this process, so that it can copy from peers' GPU memory.
    device_memory: bool,
}

#[derive(Debug)]
struct IncomingRing {
    from: MemberId,
    id: LinkId,
    receiver: Receiver,
    /// Retained records and those consumed behind them, the oldest first: each with the ticket of
    /// its copies and its queue pair, if it has any.
    retained: VecDeque<Option<(u64, Qpn)>>,
    /// Records handled at once: one while they arrive singly, which the application sees early.
    batch: usize,
}

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum RecordOutcome {
    Consumed,
    /// Copies from the memory that it refers to are in flight.
    Retained {
        ticket: u64,
        qpn: Qpn,
        /// More of the same message follows: what is queued of it is handled at once, as one copy.
        more_follows: bool,
    },
    Deferred,
}

#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub(crate) struct Polled {
    pub(crate) any: bool,
    /// More may be queued.
    pub(crate) more: bool,
}

impl IncomingRings {
    pub(crate) fn add(&mut self, from: MemberId, mut receiver: Receiver) {
        let id = link_to(from);
        if self.device_memory {
            receiver.enable_device_memory();
        }
        self.rings.retain(|ring| ring.from != from);
        self.rings.push(IncomingRing {
            from,
            id,
            receiver,
            retained: VecDeque::new(),
            batch: 1,
        });
        if let Some(ring) = self.rings.last_mut() {
            ring.receiver.enable_direct();
        }
    }

    /// A member is gone: hands out its queued records and removes the ring.
    pub(crate) fn remove(&mut self, from: MemberId, mut take: impl FnMut(LinkId, Received<'_>) -> RecordOutcome) {
        while let Some(index) = self.rings.iter().position(|ring| ring.from == from) {
            let mut ring = self.rings.swap_remove(index);
            // A deferred record is lost, like everything that the member would have sent later.
            while let Ok(Some(_)) = ring.receiver.pop(|record| take(ring.id, record)) {}
        }
    }

    fn receiver_of(&mut self, from: MemberId) -> Option<&mut Receiver> {
        let ring = self.rings.iter_mut().find(|ring| ring.from == from);
        ring.map(|ring| &mut ring.receiver)
    }

    /// From now on members may share GPU memory.
    pub(crate) fn enable_device_memory(&mut self) {
        if !self.device_memory {
            self.device_memory = true;
            self.rings
                .iter_mut()
                .for_each(|ring| ring.receiver.enable_device_memory());
        }
    }

    pub(crate) fn add_device_memory(&mut self, from: MemberId, imported: bool) {
        if let Some(receiver) = self.receiver_of(from) {
            receiver.add_device_memory(imported);
        }
    }

    /// Copies are done up to a ticket: releases the records that waited for them, reports the queue
    /// pairs of revoked ones, and returns the members that wait for the credits.
    pub(crate) fn release(&mut self, done: u64, mut revoked: impl FnMut(Qpn)) -> Vec<MemberId> {
        let mut waiting = Vec::new();
        for ring in self.rings.iter_mut().filter(|ring| !ring.retained.is_empty()) {
            while let Some(retained) = ring.retained.front() {
                match *retained {
                    Some((ticket, _)) if ticket > done => break,
                    Some((_, qpn)) if ring.receiver.was_revoked() => revoked(qpn),
                    _ => {}
                }
                ring.retained.pop_front();
                ring.receiver.release();
            }
            if ring.receiver.credit_wakeup_pending() {
                waiting.push(ring.from);
            }
        }
        waiting
    }

    pub(crate) fn add_segment(&mut self, from: MemberId, id: SegmentId, fd: OwnedFd) {
        if let Some(receiver) = self.receiver_of(from)
            && let Err(error) = receiver.add_segment(id, fd)
        {
            tracing::debug!("{error}");
        }
    }

    pub(crate) fn remove_segment(&mut self, from: MemberId, id: SegmentId) {
        if let Some(receiver) = self.receiver_of(from) {
            receiver.remove_segment(id);
        }
    }

    /// Handles queued records, a batch of each ring at a time: `take` gets each record, then `end`
    /// the member if it waits for credits. A corrupt ring is closed.
    pub(crate) fn receive<T>(
        &mut self,
        mut begin: impl FnMut() -> T,
        mut take: impl FnMut(&mut T, LinkId, Received<'_>) -> RecordOutcome,
        mut end: impl FnMut(T, Option<MemberId>),
    ) -> Polled {
        let mut polled = Polled::default();
        let mut index = 0;
        while let Some(ring) = self.rings.get_mut(index) {
            let mut state = None;
            let result = ring.receive(&mut |id, record| take(state.get_or_insert_with(&mut begin), id, record));
            if let Some(state) = state {
                polled.any = true;
                let waiting = ring.receiver.credit_wakeup_pending().then_some(ring.from);
                end(state, waiting);
            }
            match result {
                Ok(more) => polled.more |= more,
                Err(error) => {
                    tracing::warn!("{error}");
                    self.rings.swap_remove(index);
                    continue;
                }
            }
            index += 1;
        }
        polled
    }

    /// Whether the direct access of some member to this process's memory is one of those.
    pub(crate) fn is_accessed(&self, names: impl Fn(Access) -> bool) -> bool {
        let mut accesses = self
            .rings
            .iter()
            .filter_map(|ring| Access::of(ring.receiver.access_word()));
        accesses.any(names)
    }

    /// `false` when records are queued, so that the caller must not sleep until woken.
    pub(crate) fn sleep(&mut self) -> bool {
        self.rings.iter_mut().all(|ring| ring.receiver.sleep())
    }

    pub(crate) fn awake(&mut self) {
        self.rings.iter_mut().for_each(|ring| ring.receiver.awake());
    }
}

impl IncomingRing {
    /// Handles a batch. Whether more may be queued.
    fn receive(&mut self, take: &mut impl FnMut(LinkId, Received<'_>) -> RecordOutcome) -> Result<bool, CorruptRing> {
        let mut referred = false;
        let (mut taken, mut batch) = (0, self.batch);
        while taken < batch {
            let outcome = self.receive_one(&mut |id, record| {
                referred = record.body.is_revocable();
                take(id, record)
            })?;
            match outcome {
                None => {
                    if taken > 0 {
                        self.batch = if taken < MIN_BURST { 1 } else { taken };
                    }
                    return Ok(false);
                }
                Some(RecordOutcome::Deferred) => return Ok(true),
                Some(RecordOutcome::Retained { more_follows: true, .. }) if batch < BATCH => batch += 1,
                Some(_) => {}
            }
            taken += 1;
        }
        // A few bytes behind a payload usually announce it: handling them now saves the application
        // a poll.
        if referred && self.receiver.next_is_inline() {
            self.receive_one(take)?;
        }
        self.batch = (2 * self.batch).min(BATCH);
        Ok(true)
    }

    fn receive_one(
        &mut self,
        take: &mut impl FnMut(LinkId, Received<'_>) -> RecordOutcome,
    ) -> Result<Option<RecordOutcome>, CorruptRing> {
        let outcome = self.receiver.pop_with(|record| {
            let outcome = take(self.id, record);
            let disposition = match outcome {
                RecordOutcome::Consumed => Disposition::Consumed,
                RecordOutcome::Retained { .. } => Disposition::Retained,
                RecordOutcome::Deferred => Disposition::Deferred,
            };
            (disposition, outcome)
        })?;
        match outcome {
            Some(RecordOutcome::Retained { ticket, qpn, .. }) => self.retained.push_back(Some((ticket, qpn))),
            Some(RecordOutcome::Consumed) if !self.retained.is_empty() => self.retained.push_back(None),
            _ => {}
        }
        Ok(outcome)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::links::shm_ring::{Payload, Record, RecordKind, Reference, Referrer, Sender};

    fn ring() -> (Sender, IncomingRings) {
        let (sender, fd) = Sender::create().unwrap();
        let mut incoming = IncomingRings::default();
        incoming.add(MemberId::new(1, 1), Receiver::attach(fd).unwrap());
        (sender, incoming)
    }

    fn push(sender: &mut Sender, payload: Payload<'_>) {
        let record = Record {
            kind: RecordKind::Packet,
            header: b"header",
            payload,
        };
        sender.push(&record, Referrer { qpn: 1, keys: &[1] }).unwrap();
    }

    fn take(incoming: &mut IncomingRings) -> Vec<usize> {
        let mut lengths = Vec::new();
        let mut record_len = |len| {
            lengths.push(len);
            RecordOutcome::Consumed
        };
        incoming.receive(|| (), |(), _, record| record_len(record.body.len()), |(), _| ());
        lengths
    }

    #[test]
    fn a_short_record_behind_a_payload_is_handled_with_it() {
        let (mut sender, mut incoming) = ring();
        let payload = [5; 4096];
        let reference = Reference::Process {
            addr: payload.as_ptr().expose_provenance() as u64,
            len: 4096,
        };
        push(&mut sender, Payload::Referred(&[reference]));
        push(&mut sender, Payload::Inline(&[1; 8]));
        push(&mut sender, Payload::Inline(&[2; 8]));
        assert_eq!(take(&mut incoming), [4096, 8]);
        assert_eq!(take(&mut incoming), [8]);
    }

    #[test]
    fn short_records_are_handled_singly() {
        let (mut sender, mut incoming) = ring();
        push(&mut sender, Payload::Inline(&[1; 8]));
        push(&mut sender, Payload::Inline(&[2; 8]));
        assert_eq!(take(&mut incoming), [8]);
        assert_eq!(take(&mut incoming), [8]);
    }
}
