//! The receiving ends of the lanes.

use std::collections::VecDeque;
use std::os::fd::OwnedFd;

use doorbell_roce_proto::Qpn;
use doorbell_roce_proto::qp::LaneId;

use super::lane_of;
use crate::host::MemberId;
use crate::local::segment::SegmentId;
use crate::local::{After, Broken, Received, Receiver};

/// Records of one lane that are handled at most before the next lane has its turn.
const STRIDE: usize = 32;

/// Fewer than this are no burst: a message and the acknowledgement behind it.
const FEW: usize = 4;

/// The lanes from the members of the group to this process.
#[derive(Debug, Default)]
pub(crate) struct Incoming {
    lanes: Vec<Lane>,
    /// Memory of GPUs was registered in this process, so that it can copy from that of others.
    devices: bool,
}

#[derive(Debug)]
struct Lane {
    from: MemberId,
    id: LaneId,
    receiver: Receiver,
    /// Those that were taken and are not done with, the oldest first: each with its ticket and queue pair, if it waits for copies itself.
    kept: VecDeque<Option<(u64, Qpn)>>,
    /// How many records are handled at once: one while they come one by one, so that the application sees each as soon as may be, and more while there always are more.
    stretch: usize,
}

/// What became of a record.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Verdict {
    /// It is done with.
    Done,
    /// Copies from what it refers to are under way.
    Kept {
        /// Of those copies.
        ticket: u64,
        /// Whose they are.
        qpn: Qpn,
        /// More of the same message is to come: what is there of it is taken at once, so that it is one copy.
        goes_on: bool,
    },
    /// It cannot be taken yet.
    Left,
}

/// What receiving from all lanes came to.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub(crate) struct Taken {
    /// Something came.
    pub(crate) some: bool,
    /// More may wait.
    pub(crate) more: bool,
}

impl Incoming {
    /// A lane from a member, in the place of one that it may have given before.
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

    /// The member is gone: hands out what it sent before, and forgets the lane.
    pub(crate) fn remove(&mut self, from: MemberId, mut take: impl FnMut(LaneId, Received<'_>) -> Verdict) {
        while let Some(place) = self.lanes.iter().position(|lane| lane.from == from) {
            let mut lane = self.lanes.swap_remove(place);
            // What cannot be taken now is lost, as all is that it would have sent later.
            while let Ok(Some(_)) = lane.receiver.pop(|record| take(lane.id, record)) {}
        }
    }

    fn of(&mut self, from: MemberId) -> Option<&mut Receiver> {
        let lane = self.lanes.iter_mut().find(|lane| lane.from == from);
        lane.map(|lane| &mut lane.receiver)
    }

    /// From now on members may tell of memory of GPUs.
    pub(crate) fn take_devices(&mut self) {
        if !self.devices {
            self.devices = true;
            self.lanes.iter_mut().for_each(|lane| lane.receiver.take_devices());
        }
    }

    /// A member told of memory of a GPU, which was imported or not.
    pub(crate) fn add_device(&mut self, from: MemberId, imported: bool) {
        if let Some(receiver) = self.of(from) {
            receiver.add_device(imported);
        }
    }

    /// Copies are done up to a ticket: gives back the records that waited for them, and says of which queue pairs some had been taken back. Gives the members to be told of room.
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

    /// A member sent a segment of its memory.
    pub(crate) fn add_segment(&mut self, from: MemberId, id: SegmentId, fd: OwnedFd) {
        if let Some(receiver) = self.of(from)
            && let Err(error) = receiver.add_segment(id, fd)
        {
            tracing::debug!("{error}");
        }
    }

    /// A member gave a segment up.
    pub(crate) fn remove_segment(&mut self, from: MemberId, id: SegmentId) {
        if let Some(receiver) = self.of(from) {
            receiver.remove_segment(id);
        }
    }

    /// Takes what has come, a stretch of each lane at a time: `take` gets the records of one, then `end` is called with the member if that is to be told of room. A lane that holds nonsense is closed.
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

    /// Before sleeping until rung: `false` when something is there, and it must not sleep.
    pub(crate) fn sleep(&mut self) -> bool {
        self.lanes.iter_mut().all(|lane| lane.receiver.sleep())
    }

    /// Awake again: need not be rung.
    pub(crate) fn awake(&mut self) {
        self.lanes.iter_mut().for_each(|lane| lane.receiver.awake());
    }
}

impl Lane {
    /// Takes a stretch. Whether more may wait.
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
        // What is told by a few bytes behind a payload is as good as there with it, and would cost the application another look.
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

    /// A lane of this process, and its receiving end.
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

    /// The lengths of what is taken at a time.
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
