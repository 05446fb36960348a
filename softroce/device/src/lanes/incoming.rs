//! The incoming rings of the shm links.

use std::collections::VecDeque;
use std::os::fd::OwnedFd;

use doorbell_roce_proto::Qpn;
use doorbell_roce_proto::qp::LaneId;

use super::lane_of;
use crate::host::MemberId;
use crate::local::segment::SegmentId;
use crate::local::{After, Broken, Received, Receiver};

/// Records of one ring handled at most before the next ring's.
const STRIDE: usize = 32;

/// Fewer records are no burst: a message and the ACK behind it.
const FEW: usize = 4;

/// The rings from the members of the group to this process.
#[derive(Debug, Default)]
pub(crate) struct Incoming {
    lanes: Vec<Lane>,
    /// GPU memory is registered in this process, so that it can copy from peers' GPU memory.
    devices: bool,
}

#[derive(Debug)]
struct Lane {
    from: MemberId,
    id: LaneId,
    receiver: Receiver,
    /// Retained records and those consumed behind them, the oldest first: each with the ticket of
    /// its copies and its queue pair, if it has any.
    kept: VecDeque<Option<(u64, Qpn)>>,
    /// How many records are handled at once: one while they arrive singly, so that the application
    /// sees each early, and more in bursts.
    stretch: usize,
}

/// What became of a record.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Verdict {
    Done,
    /// Copies from the memory that it refers to are in flight.
    Kept {
        /// The ticket of those copies.
        ticket: u64,
        /// Their queue pair.
        qpn: Qpn,
        /// More of the same message follows: what is queued of it is handled at once, as one copy.
        goes_on: bool,
    },
    /// It must be handled again later.
    Left,
}

/// Result of receiving from all rings.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub(crate) struct Taken {
    /// Records were handled.
    pub(crate) some: bool,
    /// More may be queued.
    pub(crate) more: bool,
}

impl Incoming {
    /// Adds the ring from a member, in place of an earlier one.
    pub(crate) fn add(&mut self, from: MemberId, mut receiver: Receiver) {
        let id = lane_of(from);
        if self.devices {
            receiver.take_devices();
        }
        self.lanes.retain(|lane| lane.from != from);
        self.lanes.push(Lane {
            from,
            id,
            receiver,
            kept: VecDeque::new(),
            stretch: 1,
        });
    }

    /// A member is gone: hands out its queued records and removes the ring.
    pub(crate) fn remove(&mut self, from: MemberId, mut take: impl FnMut(LaneId, Received<'_>) -> Verdict) {
        while let Some(place) = self.lanes.iter().position(|lane| lane.from == from) {
            let mut lane = self.lanes.swap_remove(place);
            // A deferred record is lost, like everything that the member would have sent later.
            while let Ok(Some(_)) = lane.receiver.pop(|record| take(lane.id, record)) {}
        }
    }

    fn of(&mut self, from: MemberId) -> Option<&mut Receiver> {
        let lane = self.lanes.iter_mut().find(|lane| lane.from == from);
        lane.map(|lane| &mut lane.receiver)
    }

    /// From now on members may share GPU memory.
    pub(crate) fn take_devices(&mut self) {
        if !self.devices {
            self.devices = true;
            self.lanes.iter_mut().for_each(|lane| lane.receiver.take_devices());
        }
    }

    /// A member shared GPU memory, which was imported or not.
    pub(crate) fn add_device(&mut self, from: MemberId, imported: bool) {
        if let Some(receiver) = self.of(from) {
            receiver.add_device(imported);
        }
    }

    /// Copies are done up to a ticket: releases the records that waited for them, reports the queue
    /// pairs of revoked ones, and returns the members that wait for the credits.
    pub(crate) fn release(&mut self, done: u64, mut revoked: impl FnMut(Qpn)) -> Vec<MemberId> {
        let mut waiting = Vec::new();
        for lane in self.lanes.iter_mut().filter(|lane| !lane.kept.is_empty()) {
            while let Some(kept) = lane.kept.front() {
                match *kept {
                    Some((ticket, _)) if ticket > done => break,
                    Some((_, qpn)) if lane.receiver.was_revoked() => revoked(qpn),
                    _ => {}
                }
                lane.kept.pop_front();
                lane.receiver.release();
            }
            if lane.receiver.owes_call() {
                waiting.push(lane.from);
            }
        }
        waiting
    }

    /// A member shared a memory segment.
    pub(crate) fn add_segment(&mut self, from: MemberId, id: SegmentId, fd: OwnedFd) {
        if let Some(receiver) = self.of(from)
            && let Err(error) = receiver.add_segment(id, fd)
        {
            tracing::debug!("{error}");
        }
    }

    /// A member withdrew a segment.
    pub(crate) fn remove_segment(&mut self, from: MemberId, id: SegmentId) {
        if let Some(receiver) = self.of(from) {
            receiver.remove_segment(id);
        }
    }

    /// Handles queued records, a batch of each ring at a time: `take` gets each record, then `end`
    /// the member if it waits for credits. A corrupt ring is closed.
    pub(crate) fn take<T>(
        &mut self,
        mut begin: impl FnMut() -> T,
        mut take: impl FnMut(&mut T, LaneId, Received<'_>) -> Verdict,
        mut end: impl FnMut(T, Option<MemberId>),
    ) -> Taken {
        let mut taken = Taken::default();
        let mut index = 0;
        while let Some(lane) = self.lanes.get_mut(index) {
            let mut state = None;
            let result = lane.take(&mut |id, record| take(state.get_or_insert_with(&mut begin), id, record));
            if let Some(state) = state {
                taken.some = true;
                let waiting = lane.receiver.owes_call().then_some(lane.from);
                end(state, waiting);
            }
            match result {
                Ok(more) => taken.more |= more,
                Err(broken) => {
                    tracing::warn!("{broken}");
                    self.lanes.swap_remove(index);
                    continue;
                }
            }
            index += 1;
        }
        taken
    }

    /// Before sleeping until woken: `false` when records are queued, so that the caller must not
    /// sleep.
    pub(crate) fn sleep(&mut self) -> bool {
        self.lanes.iter_mut().all(|lane| lane.receiver.sleep())
    }

    /// Awake again: needs no wake-up.
    pub(crate) fn awake(&mut self) {
        self.lanes.iter_mut().for_each(|lane| lane.receiver.awake());
    }
}

impl Lane {
    /// Handles a batch. Whether more may be queued.
    fn take(&mut self, take: &mut impl FnMut(LaneId, Received<'_>) -> Verdict) -> Result<bool, Broken> {
        let mut referred = false;
        let (mut taken, mut stretch) = (0, self.stretch);
        while taken < stretch {
            let verdict = self.take_one(&mut |id, record| {
                referred = record.body.is_revocable();
                take(id, record)
            })?;
            match verdict {
                None => {
                    if taken > 0 {
                        self.stretch = if taken < FEW { 1 } else { taken };
                    }
                    return Ok(false);
                }
                Some(Verdict::Left) => return Ok(true),
                Some(Verdict::Kept { goes_on: true, .. }) if stretch < STRIDE => stretch += 1,
                Some(_) => {}
            }
            taken += 1;
        }
        // A few bytes behind a payload usually announce it: handling them now saves the application
        // a poll.
        if referred && self.receiver.short_is_next() {
            self.take_one(take)?;
        }
        self.stretch = (2 * self.stretch).min(STRIDE);
        Ok(true)
    }

    fn take_one(&mut self, take: &mut impl FnMut(LaneId, Received<'_>) -> Verdict) -> Result<Option<Verdict>, Broken> {
        let verdict = self.receiver.pop_for(|record| {
            let verdict = take(self.id, record);
            let after = match verdict {
                Verdict::Done => After::Consumed,
                Verdict::Kept { .. } => After::Kept,
                Verdict::Left => After::Left,
            };
            (after, verdict)
        })?;
        match verdict {
            Some(Verdict::Kept { ticket, qpn, .. }) => self.kept.push_back(Some((ticket, qpn))),
            Some(Verdict::Done) if !self.kept.is_empty() => self.kept.push_back(None),
            _ => {}
        }
        Ok(verdict)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::local::{Kind, Payload, Record, Reference, Referrer, Sender};

    /// A ring of this process, and its receiving end.
    fn lane() -> (Sender, Incoming) {
        let (sender, fd) = Sender::create().unwrap();
        let own = i32::try_from(std::process::id()).unwrap();
        let mut incoming = Incoming::default();
        incoming.add(MemberId::new(1, 1), Receiver::attach(fd, Some(own)).unwrap());
        (sender, incoming)
    }

    fn push(sender: &mut Sender, payload: Payload<'_>) {
        let record = Record {
            kind: Kind::Packet,
            header: b"header",
            payload,
        };
        sender.push(&record, Referrer { qpn: 1, keys: &[1] }).unwrap();
    }

    /// The payload lengths of one batch.
    fn take(incoming: &mut Incoming) -> Vec<usize> {
        let mut lengths = Vec::new();
        let mut note = |len| {
            lengths.push(len);
            Verdict::Done
        };
        incoming.take(|| (), |(), _, record| note(record.body.len()), |(), _| ());
        lengths
    }

    #[test]
    fn what_tells_of_a_payload_is_taken_with_it() {
        let (mut sender, mut incoming) = lane();
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
    fn what_is_short_is_taken_by_itself() {
        let (mut sender, mut incoming) = lane();
        push(&mut sender, Payload::Inline(&[1; 8]));
        push(&mut sender, Payload::Inline(&[2; 8]));
        assert_eq!(take(&mut incoming), [8]);
        assert_eq!(take(&mut incoming), [8]);
    }
}
