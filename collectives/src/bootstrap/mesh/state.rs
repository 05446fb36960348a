//! What a mesh knows: its peers, the groups among them, and what has come for each.
//!
//! Threads change it under its lock, and ring the bell of the mesh's own thread when there is something to be sent; that thread alone touches the sockets.

use std::collections::{BTreeMap, VecDeque};
use std::io;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};

use nix::sys::eventfd::{EfdFlags, EventFd};

use super::frame::{Frame, GroupId};
use crate::bootstrap::{ExchangeError, Member};
use crate::failure::Watch;
use crate::types::Rank;

/// Messages of exchanges that may lie unread, by member and group. One is the most that a member can be ahead: it needs this rank's next message before it can send another.
const UNREAD: usize = 4;
/// Bytes that may wait to be sent to one peer. One that reads nothing for so long is as good as dead.
const UNSENT: usize = 256 << 20;

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
    pub(super) member: Member,
    pub(super) condition: Condition,
    /// What is to be sent.
    pub(super) out: Vec<u8>,
}

/// A group, as one of its members sees it.
#[derive(Debug)]
pub(super) struct Circle {
    pub(super) rank: Rank,
    /// The members' places in the mesh, by rank.
    pub(super) members: Arc<[u32]>,
    inbox: Vec<VecDeque<(u64, Vec<u8>)>>,
    left: Vec<bool>,
    pub(super) watch: Arc<Watch>,
}

#[derive(Debug)]
pub(super) struct State {
    pub(super) peers: Vec<Peer>,
    circles: BTreeMap<GroupId, Circle>,
    pub(super) closing: bool,
}

/// The state, and how to wait for changes of it.
#[derive(Debug)]
pub(super) struct Shared {
    state: Mutex<State>,
    /// Something came, or somebody went.
    pub(super) changed: Condvar,
    /// Something is to be sent.
    pub(super) bell: EventFd,
}

impl Shared {
    pub(super) fn new(members: Vec<Member>) -> io::Result<Self> {
        let peer = |member| Peer {
            member,
            condition: Condition::Here,
            out: Vec::new(),
        };
        Ok(Self {
            state: Mutex::new(State {
                peers: members.into_iter().map(peer).collect(),
                circles: BTreeMap::new(),
                closing: false,
            }),
            changed: Condvar::new(),
            bell: EventFd::from_value_and_flags(0, EfdFlags::EFD_CLOEXEC | EfdFlags::EFD_NONBLOCK)?,
        })
    }

    /// Nothing that holds the lock can panic half-way; and if it did, what it left is still what there is.
    pub(super) fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Wakes the mesh's thread.
    pub(super) fn ring(&self) {
        // It fails only where the count is at its end, and then the thread is awake.
        let _ = self.bell.write(1);
    }
}

impl State {
    pub(super) fn open(&mut self, id: GroupId, rank: Rank, members: Arc<[u32]>) -> Arc<Watch> {
        let watch = Arc::new(Watch::default());
        let lost = members
            .iter()
            .any(|peer| self.peers[*peer as usize].condition != Condition::Here);
        if lost {
            watch.fail();
        }
        let circle = Circle {
            rank,
            inbox: members.iter().map(|_| VecDeque::new()).collect(),
            left: members.iter().map(|_| false).collect(),
            members,
            watch: Arc::clone(&watch),
        };
        self.circles.insert(id, circle);
        watch
    }

    /// Forgets a group, and tells its members.
    pub(super) fn close(&mut self, id: GroupId) {
        if let Some(circle) = self.circles.remove(&id) {
            self.tell(&circle.members, circle.rank, &Frame::Leave { group: id });
        }
    }

    /// Sends to all members but one.
    pub(super) fn tell(&mut self, members: &[u32], but: Rank, frame: &Frame) {
        for (_, peer) in members.iter().enumerate().filter(|(rank, _)| *rank != but.index()) {
            self.send(*peer, frame);
        }
    }

    /// Sends to a peer, if it is there.
    pub(super) fn send(&mut self, to: u32, frame: &Frame) {
        let peer = &mut self.peers[to as usize];
        if peer.condition == Condition::Here {
            frame.encode(&mut peer.out);
            if peer.out.len() > UNSENT {
                self.lost(to, "it reads nothing");
            }
        }
    }

    /// What a peer has sent.
    pub(super) fn receive(&mut self, from: u32, frame: Frame) -> Result<(), &'static str> {
        match frame {
            Frame::Message { group, number, bytes } => {
                // A group that is not here is one that this process has left.
                if let Some(circle) = self.circles.get_mut(&group) {
                    let rank = circle.member(from).ok_or("it wrote to a group that it is not in")?;
                    let inbox = &mut circle.inbox[rank];
                    if inbox.len() == UNREAD {
                        return Err("it sent more than an exchange can have");
                    }
                    inbox.push_back((number, bytes));
                }
            }
            Frame::Leave { group } => {
                if let Some(circle) = self.circles.get_mut(&group) {
                    let rank = circle.member(from).ok_or("it left a group that it is not in")?;
                    circle.left[rank] = true;
                }
            }
            Frame::Goodbye => self.peers[from as usize].condition = Condition::Gone,
        }
        Ok(())
    }

    /// A peer's connection has ended.
    pub(super) fn lost(&mut self, peer: u32, how: &str) {
        let known = &mut self.peers[peer as usize];
        known.out = Vec::new();
        if known.condition == Condition::Here {
            known.condition = Condition::Dead(how.to_owned());
            self.circles
                .values()
                .filter(|circle| circle.members.contains(&peer))
                .for_each(|circle| circle.watch.fail());
        }
    }

    /// Takes the messages of an exchange, if all are there, or says which members they are missing from.
    pub(super) fn take(&mut self, id: GroupId, number: u64) -> Result<Result<Vec<Vec<u8>>, Vec<Rank>>, ExchangeError> {
        let Some(circle) = self.circles.get_mut(&id) else {
            return Ok(Err(Vec::new()));
        };
        let mut missing = Vec::new();
        for (rank, inbox) in circle.inbox.iter_mut().enumerate() {
            // What an exchange that failed here left.
            while inbox.front().is_some_and(|(earlier, _)| *earlier < number) {
                inbox.pop_front();
            }
            if rank == circle.rank.index() || inbox.front().is_some_and(|(n, _)| *n == number) {
                continue;
            }
            let peer = &self.peers[circle.members[rank] as usize];
            let (rank, member) = (Rank(rank as u32), peer.member.to_string());
            match &peer.condition {
                Condition::Dead(reason) => {
                    let reason = reason.clone();
                    return Err(ExchangeError::Died { rank, member, reason });
                }
                Condition::Gone => return Err(ExchangeError::Left { rank, member }),
                Condition::Here if circle.left[rank.index()] => return Err(ExchangeError::Left { rank, member }),
                Condition::Here => missing.push(rank),
            }
        }
        if !missing.is_empty() {
            return Ok(Err(missing));
        }
        let taken = circle
            .inbox
            .iter_mut()
            .map(|inbox| inbox.pop_front().unwrap_or_default().1);
        Ok(Ok(taken.collect()))
    }
}

impl Circle {
    /// The rank of a place in the mesh.
    fn member(&self, peer: u32) -> Option<usize> {
        self.members.iter().position(|member| *member == peer)
    }
}
