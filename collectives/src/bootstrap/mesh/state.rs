//! State of the control mesh: peers, groups, and received messages. Only the I/O thread uses the
//! sockets; other threads wake it when output is queued.

use std::collections::{BTreeMap, VecDeque};
use std::io;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use doorbell_rendezvous::FrameMac;
use nix::sys::eventfd::{EfdFlags, EventFd};

use super::frame::{Frame, GroupId};
use crate::failure::{
    AddressedMessage, Agreement, FailureDetector, Outcome, Outgoing, ProgressMonitor, Proposal, ShrinkMessage, Verdict,
};
use crate::types::Rank;

/// Unread exchange messages per member and group. A member can be one exchange ahead: it needs this
/// rank's next message before it can send another.
const MAX_UNREAD: usize = 4;

#[derive(Clone, PartialEq, Eq, Debug)]
pub(super) enum PeerState {
    Connected,
    Left,
    /// Its connection ended without goodbye; how.
    Dead(String),
}

#[derive(Debug)]
pub(super) struct Peer {
    pub(super) state: PeerState,
    /// Of frames to it; `None` for this process.
    mac: Option<FrameMac>,
    pub(super) out: Vec<u8>,
}

#[derive(Debug)]
struct GroupState {
    rank: Rank,
    /// The members' mesh ranks, by rank.
    members: Arc<[u32]>,
    inbox: Vec<VecDeque<(u64, Vec<u8>)>>,
    detector: FailureDetector,
    agreement: Agreement,
    successor: Option<GroupId>,
}

#[derive(Debug)]
pub(super) struct State {
    /// The mesh's eventfd, for engines that report.
    wakeup: Arc<EventFd>,
    mesh_rank: u32,
    pub(super) peers: Vec<Peer>,
    groups: BTreeMap<GroupId, GroupState>,
    /// Committed shrink agreements, for members that missed the commit.
    committed: BTreeMap<GroupId, Proposal>,
    groups_created: u32,
    pub(super) closing: bool,
}

#[derive(Debug)]
pub(super) struct Shared {
    state: Mutex<State>,
    pub(super) changed: Condvar,
    pub(super) wakeup: Arc<EventFd>,
}

impl Shared {
    pub(super) fn new(mesh_rank: u32, peers: Vec<Option<FrameMac>>) -> io::Result<Self> {
        let peer = |mac| Peer {
            state: PeerState::Connected,
            mac,
            out: Vec::new(),
        };
        let wakeup = EventFd::from_value_and_flags(0, EfdFlags::EFD_CLOEXEC | EfdFlags::EFD_NONBLOCK)?;
        let wakeup = Arc::new(wakeup);
        Ok(Self {
            state: Mutex::new(State {
                wakeup: Arc::clone(&wakeup),
                mesh_rank,
                peers: peers.into_iter().map(peer).collect(),
                groups: BTreeMap::new(),
                committed: BTreeMap::new(),
                groups_created: 0,
                closing: false,
            }),
            changed: Condvar::new(),
            wakeup,
        })
    }

    /// No holder of the lock can panic half-way through a change.
    pub(super) fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(super) fn wait<'a>(&self, state: MutexGuard<'a, State>, timeout: Duration) -> MutexGuard<'a, State> {
        let woken = self.changed.wait_timeout(state, timeout);
        woken.unwrap_or_else(PoisonError::into_inner).0
    }

    pub(super) fn wake(&self) {
        // Fails only if the counter is full, and then the thread is awake.
        let _ = self.wakeup.write(1);
    }
}

impl State {
    pub(super) fn number(&mut self) -> GroupId {
        self.groups_created += 1;
        GroupId {
            creator: self.mesh_rank,
            number: self.groups_created,
        }
    }

    /// Opens a group: its frames are accepted from now on.
    pub(super) fn open(&mut self, id: GroupId, rank: Rank, members: Arc<[u32]>) {
        let group = GroupState {
            rank,
            inbox: members.iter().map(|_| VecDeque::new()).collect(),
            detector: FailureDetector::new(
                rank,
                members.len(),
                ProgressMonitor::with_wakeup(Some(Arc::clone(&self.wakeup))),
            ),
            agreement: Agreement::new(rank, members.len() as u32),
            successor: None,
            members: Arc::clone(&members),
        };
        self.groups.insert(id, group);
        // Some members may be gone already.
        for mesh_rank in members.iter() {
            match self.peers[*mesh_rank as usize].state.clone() {
                PeerState::Connected => {}
                PeerState::Left => self.member_left(id, *mesh_rank),
                PeerState::Dead(how) => self.member_died(id, *mesh_rank, &how),
            }
        }
    }

    pub(super) fn close(&mut self, id: GroupId) {
        if let Some(group) = self.groups.remove(&id) {
            if group.agreement.outcome().is_none()
                && let Some(successor) = group.successor
            {
                self.groups.remove(&successor);
            }
            self.broadcast(&group.members, &Frame::Leave { group: id });
        }
    }

    /// Queues a frame for all of these but this process.
    fn broadcast(&mut self, members: &[u32], frame: &Frame) {
        for mesh_rank in members {
            if *mesh_rank != self.mesh_rank {
                self.send(*mesh_rank, frame);
            }
        }
    }

    pub(super) fn send(&mut self, to: u32, frame: &Frame) {
        let peer = &mut self.peers[to as usize];
        if let (PeerState::Connected, Some(mac)) = (&peer.state, &mut peer.mac) {
            frame.seal(mac, &mut peer.out);
        }
    }

    pub(super) fn receive(&mut self, from: u32, frame: Frame) -> Result<(), &'static str> {
        let id = match &frame {
            Frame::Message { group, .. }
            | Frame::Failure { group, .. }
            | Frame::Shrink { group, .. }
            | Frame::Leave { group } => *group,
            Frame::Goodbye => {
                self.peers[from as usize].state = PeerState::Left;
                for id in self.groups_of(from) {
                    self.member_left(id, from);
                }
                return Ok(());
            }
        };
        let Some(group) = self.groups.get_mut(&id) else {
            self.answer_unknown_group(from, id, &frame);
            return Ok(());
        };
        let rank = group.member(from).ok_or("it wrote to a group that it is not in")?;
        match frame {
            Frame::Message { number, bytes, .. } => {
                let inbox = &mut group.inbox[rank.index()];
                if inbox.len() == MAX_UNREAD {
                    return Err("it sent more than an exchange can have");
                }
                inbox.push_back((number, bytes));
            }
            Frame::Failure { message, .. } => {
                self.with_detector(id, |detector, now, out| detector.receive(rank, message, now, out));
            }
            Frame::Shrink { message, .. } => {
                self.with_agreement(id, |agreement, now, next, out| {
                    agreement.receive(rank, message, now, next, out)
                });
            }
            Frame::Leave { .. } => self.member_left(id, from),
            Frame::Goodbye => {}
        }
        Ok(())
    }

    /// Replies to a frame of a group that this process is not in. No member writes to a group
    /// before all have it, so this process has left it, or it was never agreed on.
    fn answer_unknown_group(&mut self, from: u32, group: GroupId, frame: &Frame) {
        match (frame, self.committed.get(&group)) {
            (Frame::Shrink { message, .. }, Some(committed)) if !matches!(message, ShrinkMessage::Commit(_)) => {
                let message = ShrinkMessage::Commit(committed.clone());
                self.send(from, &Frame::Shrink { group, message });
            }
            (Frame::Message { .. }, _) => self.send(from, &Frame::Leave { group }),
            _ => {}
        }
    }

    pub(super) fn connection_lost(&mut self, mesh_rank: u32, how: &str) {
        let peer = &mut self.peers[mesh_rank as usize];
        peer.out = Vec::new();
        if peer.state == PeerState::Connected {
            peer.state = PeerState::Dead(how.to_owned());
            for id in self.groups_of(mesh_rank) {
                self.member_died(id, mesh_rank, how);
            }
        }
    }

    fn groups_of(&self, mesh_rank: u32) -> Vec<GroupId> {
        let groups = self
            .groups
            .iter()
            .filter(|(_, group)| group.members.contains(&mesh_rank));
        groups.map(|(id, _)| *id).collect()
    }

    fn member_died(&mut self, id: GroupId, mesh_rank: u32, how: &str) {
        if let Some(rank) = self.groups.get(&id).and_then(|group| group.member(mesh_rank)) {
            self.with_detector(id, |detector, now, out| detector.died(rank, how, now, out));
            self.with_agreement(id, |agreement, now, next, out| {
                agreement.member_lost(rank, now, next, out)
            });
        }
    }

    fn member_left(&mut self, id: GroupId, mesh_rank: u32) {
        if let Some(rank) = self.groups.get(&id).and_then(|group| group.member(mesh_rank)) {
            self.with_detector(id, |detector, now, out| detector.left(rank, now, out));
            self.with_agreement(id, |agreement, now, next, out| {
                agreement.member_left(rank, now, next, out)
            });
        }
    }

    pub(super) fn detector(&self, id: GroupId) -> Option<&FailureDetector> {
        self.groups.get(&id).map(|group| &group.detector)
    }

    pub(super) fn outcome(&self, id: GroupId) -> Option<&Outcome> {
        self.groups.get(&id)?.agreement.outcome()
    }

    pub(super) fn with_detector(
        &mut self,
        id: GroupId,
        act: impl FnOnce(&mut FailureDetector, Instant, &mut Vec<Outgoing>),
    ) {
        let Some(group) = self.groups.get_mut(&id) else {
            return;
        };
        let mut out = Vec::new();
        act(&mut group.detector, Instant::now(), &mut out);
        let members = Arc::clone(&group.members);
        for (to, message) in out {
            let frame = Frame::Failure { group: id, message };
            match to {
                Some(rank) => self.send(members[rank.index()], &frame),
                None => self.broadcast(&members, &frame),
            }
        }
    }

    /// A group that this process has acknowledged is opened before the messages are sent.
    pub(super) fn with_agreement(
        &mut self,
        id: GroupId,
        act: impl FnOnce(&mut Agreement, Instant, &mut dyn FnMut() -> GroupId, &mut Vec<AddressedMessage>),
    ) {
        let (mesh_rank, mut groups_created) = (self.mesh_rank, self.groups_created);
        let Some(group) = self.groups.get_mut(&id) else {
            return;
        };
        let mut next = || {
            groups_created += 1;
            GroupId {
                creator: mesh_rank,
                number: groups_created,
            }
        };
        let mut out = Vec::new();
        act(&mut group.agreement, Instant::now(), &mut next, &mut out);
        let members = Arc::clone(&group.members);
        let over = matches!(group.agreement.outcome(), Some(Outcome::Excluded | Outcome::TimedOut));
        let proposal = group.agreement.proposal().filter(|_| !over).cloned();
        let before = group.successor;
        group.successor = proposal.as_ref().map(|proposal| proposal.group);
        let agreed = matches!(group.agreement.outcome(), Some(Outcome::Agreed(_)));
        let me = group.rank;
        self.groups_created = groups_created;
        if let Some(before) = before.filter(|before| proposal.as_ref().is_none_or(|proposal| proposal.group != *before))
        {
            self.groups.remove(&before);
        }
        if let Some(proposal) = proposal {
            if agreed {
                self.committed.insert(id, proposal.clone());
            }
            let mesh_rank = |rank: &Rank| members[rank.index()];
            if before != Some(proposal.group)
                && let Some(rank) = proposal.members.iter().position(|rank| *rank == me)
            {
                self.open(
                    proposal.group,
                    Rank(rank as u32),
                    proposal.members.iter().map(mesh_rank).collect(),
                );
            }
        }
        for (to, message) in out {
            self.send(members[to.index()], &Frame::Shrink { group: id, message });
        }
    }

    pub(super) fn due(&self) -> Option<Instant> {
        let dues = self
            .groups
            .values()
            .map(|group| group.detector.due().into_iter().chain(group.agreement.due()));
        dues.flatten().min()
    }

    pub(super) fn tick(&mut self) {
        let pending = |group: &GroupState| group.detector.due().is_some() || group.agreement.due().is_some();
        let groups = self.groups.iter().filter(|(_, group)| pending(group));
        for id in groups.map(|(id, _)| *id).collect::<Vec<_>>() {
            self.with_detector(id, |detector, now, out| detector.tick(now, out));
            self.with_agreement(id, |agreement, now, next, out| agreement.tick(now, next, out));
        }
    }

    pub(super) fn take(&mut self, id: GroupId, number: u64) -> Taken {
        let Some(group) = self.groups.get_mut(&id) else {
            return Taken::Missing(Vec::new());
        };
        let mut missing = Vec::new();
        for (rank, inbox) in group.inbox.iter_mut().enumerate() {
            // Leftovers of an exchange that failed here.
            while inbox.front().is_some_and(|(earlier, _)| *earlier < number) {
                inbox.pop_front();
            }
            if rank != group.rank.index() && inbox.front().is_none_or(|(first, _)| *first != number) {
                missing.push(Rank(rank as u32));
            }
        }
        if missing.is_empty() {
            let taken = group
                .inbox
                .iter_mut()
                .map(|inbox| inbox.pop_front().unwrap_or_default().1);
            return Taken::All(taken.collect());
        }
        if let Some(verdict) = group.detector.verdict() {
            return Taken::Failed(verdict.clone());
        }
        let left = missing.iter().find(|rank| group.detector.has_left(**rank));
        match left {
            Some(rank) if !group.detector.failed() => Taken::Left(*rank),
            _ => Taken::Missing(missing),
        }
    }
}

#[derive(Debug)]
pub(super) enum Taken {
    All(Vec<Vec<u8>>),
    Missing(Vec<Rank>),
    /// This member has left and will not send.
    Left(Rank),
    Failed(Verdict),
}

impl GroupState {
    fn member(&self, mesh_rank: u32) -> Option<Rank> {
        let rank = self.members.iter().position(|member| *member == mesh_rank)?;
        Some(Rank(rank as u32))
    }
}
