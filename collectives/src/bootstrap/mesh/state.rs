//! What a mesh knows: its peers, the groups among them, and what has come for each.
//!
//! Threads change it under its lock, and ring the bell of the mesh's own thread when there is something to be sent; that thread alone touches the sockets.

use std::collections::{BTreeMap, VecDeque};
use std::io;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use nix::sys::eventfd::{EfdFlags, EventFd};

use super::frame::{Frame, GroupId};
use crate::failure::{Agreement, Outcome, Post, Proposal, Said, Trial, Verdict, Watch, Word};
use crate::types::Rank;

/// Messages of exchanges that may lie unread, by member and group. One is the most that a member can be ahead: it needs this rank's next message before it can send another.
const UNREAD: usize = 4;

/// Where a peer is.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(super) enum Condition {
    Here,
    /// It has said goodbye.
    Gone,
    /// It went without a word; how that showed.
    Dead(String),
}

#[derive(Debug)]
pub(super) struct Peer {
    pub(super) condition: Condition,
    /// What is to be sent.
    pub(super) out: Vec<u8>,
}

/// A group, as one of its members sees it.
#[derive(Debug)]
struct Circle {
    rank: Rank,
    /// The members' places in the mesh, by rank.
    members: Arc<[u32]>,
    inbox: Vec<VecDeque<(u64, Vec<u8>)>>,
    trial: Trial,
    agreement: Agreement,
    /// The group that comes after this one, as far as it has been proposed.
    heir: Option<GroupId>,
}

#[derive(Debug)]
pub(super) struct State {
    /// The mesh's, for engines that report.
    bell: Arc<EventFd>,
    /// This process.
    place: u32,
    pub(super) peers: Vec<Peer>,
    circles: BTreeMap<GroupId, Circle>,
    /// What became of groups that were shrunk, for members who have not heard of it.
    decided: BTreeMap<GroupId, Proposal>,
    /// How many groups this process has numbered.
    made: u32,
    pub(super) closing: bool,
}

/// The state, and how to wait for changes of it.
#[derive(Debug)]
pub(super) struct Shared {
    state: Mutex<State>,
    /// Something came, or somebody went.
    pub(super) changed: Condvar,
    /// Something is to be sent.
    pub(super) bell: Arc<EventFd>,
}

impl Shared {
    pub(super) fn new(place: u32, peers: usize) -> io::Result<Self> {
        let peer = |_| Peer {
            condition: Condition::Here,
            out: Vec::new(),
        };
        let bell = EventFd::from_value_and_flags(0, EfdFlags::EFD_CLOEXEC | EfdFlags::EFD_NONBLOCK)?;
        let bell = Arc::new(bell);
        Ok(Self {
            state: Mutex::new(State {
                bell: Arc::clone(&bell),
                place,
                peers: (0..peers).map(peer).collect(),
                circles: BTreeMap::new(),
                decided: BTreeMap::new(),
                made: 0,
                closing: false,
            }),
            changed: Condvar::new(),
            bell,
        })
    }

    /// Nothing that holds the lock can panic half-way; and if it did, what it left is still what there is.
    pub(super) fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Waits for a change, `patience` at most.
    pub(super) fn wait<'a>(&self, state: MutexGuard<'a, State>, patience: Duration) -> MutexGuard<'a, State> {
        let woken = self.changed.wait_timeout(state, patience);
        woken.unwrap_or_else(PoisonError::into_inner).0
    }

    /// Wakes the mesh's thread.
    pub(super) fn ring(&self) {
        // It fails only where the count is at its end, and then the thread is awake.
        let _ = self.bell.write(1);
    }
}

impl State {
    /// A number for a group that no other has.
    pub(super) fn number(&mut self) -> GroupId {
        self.made += 1;
        GroupId {
            maker: self.place,
            number: self.made,
        }
    }

    /// Begins to take what comes for a group.
    pub(super) fn open(&mut self, id: GroupId, rank: Rank, members: Arc<[u32]>) {
        let circle = Circle {
            rank,
            inbox: members.iter().map(|_| VecDeque::new()).collect(),
            trial: Trial::new(rank, members.len(), Watch::ringing(Some(Arc::clone(&self.bell)))),
            agreement: Agreement::new(rank, members.len() as u32),
            heir: None,
            members: Arc::clone(&members),
        };
        self.circles.insert(id, circle);
        // Some may be gone already.
        for place in members.iter() {
            match self.peers[*place as usize].condition.clone() {
                Condition::Here => {}
                Condition::Gone => self.leaves(id, *place),
                Condition::Dead(how) => self.dies(id, *place, &how),
            }
        }
    }

    /// Forgets a group, and tells its members.
    pub(super) fn close(&mut self, id: GroupId) {
        if let Some(circle) = self.circles.remove(&id) {
            if circle.agreement.outcome().is_none()
                && let Some(heir) = circle.heir
            {
                self.circles.remove(&heir);
            }
            self.tell(&circle.members, &Frame::Leave { group: id });
        }
    }

    /// Sends to all of these but this process.
    fn tell(&mut self, members: &[u32], frame: &Frame) {
        for place in members {
            if *place != self.place {
                self.send(*place, frame);
            }
        }
    }

    /// Sends to a peer, if it is there.
    pub(super) fn send(&mut self, to: u32, frame: &Frame) {
        let peer = &mut self.peers[to as usize];
        if peer.condition == Condition::Here {
            frame.encode(&mut peer.out);
        }
    }

    /// What a peer has sent.
    pub(super) fn receive(&mut self, from: u32, frame: Frame) -> Result<(), &'static str> {
        let group = match &frame {
            Frame::Message { group, .. }
            | Frame::Trial { group, .. }
            | Frame::Shrink { group, .. }
            | Frame::Leave { group } => *group,
            Frame::Goodbye => {
                self.peers[from as usize].condition = Condition::Gone;
                for id in self.groups_of(from) {
                    self.leaves(id, from);
                }
                return Ok(());
            }
        };
        let Some(circle) = self.circles.get_mut(&group) else {
            self.not_here(from, group, &frame);
            return Ok(());
        };
        let rank = circle.member(from).ok_or("it wrote to a group that it is not in")?;
        match frame {
            Frame::Message { number, bytes, .. } => {
                let inbox = &mut circle.inbox[rank.index()];
                if inbox.len() == UNREAD {
                    return Err("it sent more than an exchange can have");
                }
                inbox.push_back((number, bytes));
            }
            Frame::Trial { message, .. } => {
                self.with_trial(group, |trial, now, out| trial.receive(rank, message, now, out));
            }
            Frame::Shrink { word, .. } => {
                self.with_agreement(group, |agreement, now, next, out| {
                    agreement.receive(rank, word, now, next, out)
                });
            }
            Frame::Leave { .. } => self.leaves(group, from),
            Frame::Goodbye => {}
        }
        Ok(())
    }

    /// Answers what came for a group that this process is not in. Nobody writes to a group before all its members have it: so it has left that group, or the group was never agreed on.
    fn not_here(&mut self, from: u32, group: GroupId, frame: &Frame) {
        match (frame, self.decided.get(&group)) {
            (Frame::Shrink { word, .. }, Some(decided)) if !matches!(word, Word::Commit(_)) => {
                let word = Word::Commit(decided.clone());
                self.send(from, &Frame::Shrink { group, word });
            }
            (Frame::Message { .. }, _) => self.send(from, &Frame::Leave { group }),
            _ => {}
        }
    }

    /// A peer's connection has ended.
    pub(super) fn lost(&mut self, place: u32, how: &str) {
        let peer = &mut self.peers[place as usize];
        peer.out = Vec::new();
        if peer.condition == Condition::Here {
            peer.condition = Condition::Dead(how.to_owned());
            for id in self.groups_of(place) {
                self.dies(id, place, how);
            }
        }
    }

    fn groups_of(&self, place: u32) -> Vec<GroupId> {
        let groups = self
            .circles
            .iter()
            .filter(|(_, circle)| circle.members.contains(&place));
        groups.map(|(id, _)| *id).collect()
    }

    fn dies(&mut self, id: GroupId, place: u32, how: &str) {
        if let Some(rank) = self.circles.get(&id).and_then(|circle| circle.member(place)) {
            self.with_trial(id, |trial, now, out| trial.died(rank, how, now, out));
            self.with_agreement(id, |agreement, now, next, out| agreement.lost(rank, now, next, out));
        }
    }

    fn leaves(&mut self, id: GroupId, place: u32) {
        if let Some(rank) = self.circles.get(&id).and_then(|circle| circle.member(place)) {
            self.with_trial(id, |trial, now, out| trial.left(rank, now, out));
            self.with_agreement(id, |agreement, now, next, out| agreement.left(rank, now, next, out));
        }
    }

    /// What is known of a group's failure.
    pub(super) fn trial(&self, id: GroupId) -> Option<&Trial> {
        self.circles.get(&id).map(|circle| &circle.trial)
    }

    /// How the agreement on a group's heir ended, if it has.
    pub(super) fn outcome(&self, id: GroupId) -> Option<&Outcome> {
        self.circles.get(&id)?.agreement.outcome()
    }

    /// Does something about a group's failure, and sends what comes of it.
    pub(super) fn with_trial(&mut self, id: GroupId, act: impl FnOnce(&mut Trial, Instant, &mut Vec<Post>)) {
        let Some(circle) = self.circles.get_mut(&id) else {
            return;
        };
        let mut out = Vec::new();
        act(&mut circle.trial, Instant::now(), &mut out);
        let members = Arc::clone(&circle.members);
        for (to, message) in out {
            let frame = Frame::Trial { group: id, message };
            match to {
                Some(rank) => self.send(members[rank.index()], &frame),
                None => self.tell(&members, &frame),
            }
        }
    }

    /// Does something about a group's heir, and what comes of it: this process is ready for what it has said it is ready for.
    pub(super) fn with_agreement(
        &mut self,
        id: GroupId,
        act: impl FnOnce(&mut Agreement, Instant, &mut dyn FnMut() -> GroupId, &mut Vec<Said>),
    ) {
        let (place, mut made) = (self.place, self.made);
        let Some(circle) = self.circles.get_mut(&id) else {
            return;
        };
        let mut next = || {
            made += 1;
            GroupId {
                maker: place,
                number: made,
            }
        };
        let mut out = Vec::new();
        act(&mut circle.agreement, Instant::now(), &mut next, &mut out);
        let members = Arc::clone(&circle.members);
        let over = matches!(circle.agreement.outcome(), Some(Outcome::Excluded | Outcome::Late));
        let proposal = circle.agreement.proposal().filter(|_| !over).cloned();
        let before = circle.heir;
        circle.heir = proposal.as_ref().map(|proposal| proposal.group);
        let agreed = matches!(circle.agreement.outcome(), Some(Outcome::Agreed(_)));
        let me = circle.rank;
        self.made = made;
        if let Some(before) = before.filter(|before| proposal.as_ref().is_none_or(|proposal| proposal.group != *before))
        {
            self.circles.remove(&before);
        }
        if let Some(proposal) = proposal {
            if agreed {
                self.decided.insert(id, proposal.clone());
            }
            let place = |rank: &Rank| members[rank.index()];
            if before != Some(proposal.group)
                && let Some(rank) = proposal.members.iter().position(|rank| *rank == me)
            {
                self.open(
                    proposal.group,
                    Rank(rank as u32),
                    proposal.members.iter().map(place).collect(),
                );
            }
        }
        for (to, word) in out {
            self.send(members[to.index()], &Frame::Shrink { group: id, word });
        }
    }

    /// When something is due.
    pub(super) fn due(&self) -> Option<Instant> {
        let dues = self
            .circles
            .values()
            .map(|circle| circle.trial.due().into_iter().chain(circle.agreement.due()));
        dues.flatten().min()
    }

    /// Does what is due, or may be since an engine has reported.
    pub(super) fn tick(&mut self) {
        let pending = |circle: &Circle| circle.trial.due().is_some() || circle.agreement.due().is_some();
        let circles = self.circles.iter().filter(|(_, circle)| pending(circle));
        for id in circles.map(|(id, _)| *id).collect::<Vec<_>>() {
            self.with_trial(id, |trial, now, out| trial.tick(now, out));
            self.with_agreement(id, |agreement, now, next, out| agreement.tick(now, next, out));
        }
    }

    /// Takes the messages of an exchange, if all are there.
    pub(super) fn take(&mut self, id: GroupId, number: u64) -> Taken {
        let Some(circle) = self.circles.get_mut(&id) else {
            return Taken::Missing(Vec::new());
        };
        let mut missing = Vec::new();
        for (rank, inbox) in circle.inbox.iter_mut().enumerate() {
            // What an exchange that failed here left.
            while inbox.front().is_some_and(|(earlier, _)| *earlier < number) {
                inbox.pop_front();
            }
            if rank != circle.rank.index() && inbox.front().is_none_or(|(first, _)| *first != number) {
                missing.push(Rank(rank as u32));
            }
        }
        if missing.is_empty() {
            let taken = circle
                .inbox
                .iter_mut()
                .map(|inbox| inbox.pop_front().unwrap_or_default().1);
            return Taken::All(taken.collect());
        }
        if let Some(verdict) = circle.trial.verdict() {
            return Taken::Failed(verdict.clone());
        }
        let left = missing.iter().find(|rank| circle.trial.has_left(**rank));
        match left {
            Some(rank) if !circle.trial.failed() => Taken::Left(*rank),
            _ => Taken::Missing(missing),
        }
    }
}

/// What came of an attempt to take the messages of an exchange.
#[derive(Debug)]
pub(super) enum Taken {
    All(Vec<Vec<u8>>),
    /// These have not sent theirs.
    Missing(Vec<Rank>),
    /// This one has left, and will not.
    Left(Rank),
    /// The group has failed.
    Failed(Verdict),
}

impl Circle {
    /// The rank of a place in the mesh.
    fn member(&self, place: u32) -> Option<Rank> {
        let rank = self.members.iter().position(|member| *member == place)?;
        Some(Rank(rank as u32))
    }
}
