//! The control mesh: a connection to every other process, and one thread that sleeps.
//!
//! The thread wakes when something comes or is to be sent. It notices at once when a peer's process ends: the kernel closes its connections. A mesh carries all groups that were made of the first one, by splitting, duplicating or
//! shrinking; frames send_message which they are for. A process takes what comes for a group from before anybody can know that all members have it, until it leaves it.

mod frame;
mod io_thread;
mod state;

use std::sync::Arc;
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

pub use frame::MAX_MESSAGE;

pub(crate) use frame::GroupId;

use frame::Frame;
use io_thread::IoThread;
use state::{Shared, State, Taken};

use super::error::{BootstrapError, in_words};
use super::join::PeerStreams;
use super::split::{Choice, divide};
use super::{Exchange, ExchangeError, Member, PATIENCE};
use crate::failure::{
    AGREEMENT_TIMEOUT, Failure, FailureDetector, Outcome, ProgressMonitor, ShrinkError, Verdict, Wait,
};
use crate::types::Rank;

/// The connections and their thread, which ends with it.
#[derive(Debug)]
struct Mesh {
    shared: Arc<Shared>,
    thread: Option<JoinHandle<()>>,
}

impl Drop for Mesh {
    fn drop(&mut self) {
        self.shared.lock().closing = true;
        self.shared.wake();
        if let Some(thread) = self.thread.take() {
            // If it panicked, there is nobody left to send_message goodbye.
            let _ = thread.join();
        }
    }
}

/// The connections of a group's members beside their queue pairs.
#[derive(Debug)]
pub struct ControlMesh {
    mesh: Arc<Mesh>,
    id: GroupId,
    rank: Rank,
    members: Arc<[Member]>,
    /// Their mesh_ranks in the mesh, by rank.
    mesh_ranks: Arc<[u32]>,
    monitor: Arc<ProgressMonitor>,
    /// The number of the next exchange.
    number: u64,
    timeout: Duration,
}

impl ControlMesh {
    /// A mesh over connections that exist, and the group of all who are in it.
    pub(super) fn start(links: PeerStreams, rank: Rank) -> Result<Self, BootstrapError> {
        let members: Arc<[Member]> = links.members.into();
        let shared = Shared::new(rank.0, members.len()).map_err(BootstrapError::system("make an eventfd"))?;
        let shared = Arc::new(shared);
        let id = GroupId::ALL;
        let mesh_ranks: Arc<[u32]> = (0..members.len() as u32).collect();
        shared.lock().open(id, rank, Arc::clone(&mesh_ranks));
        let io_thread = IoThread::new(Arc::clone(&shared), links.streams)
            .map_err(BootstrapError::system("set options of a connection"))?;
        let thread = thread::Builder::new()
            .name("control mesh".into())
            .spawn(move || io_thread.run())
            .map_err(BootstrapError::system("start a thread"))?;
        let mesh = Arc::new(Mesh {
            shared,
            thread: Some(thread),
        });
        Ok(Self::of(mesh, id, rank, members, mesh_ranks))
    }

    /// A group that is open.
    fn of(mesh: Arc<Mesh>, id: GroupId, rank: Rank, members: Arc<[Member]>, mesh_ranks: Arc<[u32]>) -> Self {
        let monitor = mesh
            .shared
            .lock()
            .detector(id)
            .map(|detector| Arc::clone(detector.monitor()));
        Self {
            mesh,
            id,
            rank,
            members,
            mesh_ranks,
            monitor: monitor.unwrap_or_default(),
            number: 0,
            timeout: PATIENCE,
        }
    }

    /// Some of the members, as a group of their own: by rank, their ranks in this one.
    fn part(&self, id: GroupId, ranks: &[Rank]) -> Option<Self> {
        let rank = ranks.iter().position(|rank| *rank == self.rank)?;
        let members = ranks.iter().map(|rank| self.members[rank.index()].clone()).collect();
        let mesh_ranks = ranks.iter().map(|rank| self.mesh_ranks[rank.index()]).collect();
        let mut part = Self::of(Arc::clone(&self.mesh), id, Rank(rank as u32), members, mesh_ranks);
        part.timeout = self.timeout;
        Some(part)
    }

    /// This process.
    #[must_use]
    pub fn rank(&self) -> Rank {
        self.rank
    }

    /// Who is in the group, by rank.
    #[must_use]
    pub fn members(&self) -> &[Member] {
        &self.members
    }

    /// How long an exchange may take, from now on.
    pub fn set_timeout(&mut self, timeout: Duration) {
        self.timeout = timeout;
    }

    /// What this rank's engine tells the others of itself, and the flag that is up when the group is in trouble.
    #[must_use]
    pub fn monitor(&self) -> Arc<ProgressMonitor> {
        Arc::clone(&self.monitor)
    }

    /// Asks all members what they are doing, because this one is stuck; returns at once. Who has not answered after `window` is taken to be stopped, so give them half a second, or what a loaded machine needs to wake a thread.
    /// What comes of it is the [`finding`](Self::finding).
    pub fn investigate(&self, window: Duration) {
        self.act(|state| {
            state.with_detector(self.id, |detector, now, out| {
                detector.investigate(window, false, now, out)
            })
        });
    }

    /// The same because a link of this one has failed: all try theirs, so that it is known which end of it is cut off.
    pub(crate) fn investigate_links(&self, window: Duration) {
        self.act(|state| {
            state.with_detector(self.id, |detector, now, out| {
                detector.investigate(window, true, now, out)
            })
        });
    }

    /// What the last investigation found, when it is over. It is an opinion, and ends nothing: who is late may still come.
    #[must_use]
    pub fn finding(&self) -> Option<Failure> {
        let state = self.mesh.shared.lock();
        let verdict = state.detector(self.id)?.finding()?.clone();
        Some(self.failure_of(verdict))
    }

    /// Ends the group on all ranks, because an operation has not finished in its time: with what the last investigation found, or if there was none, with `reason`. Returns at once.
    pub fn give_up(&self, reason: &str) {
        self.act(|state| state.with_detector(self.id, |detector, now, out| detector.give_up(reason, now, out)));
    }

    /// Asks all members what they are doing, and ends the group with what comes of it, or if that is nothing, with `reason`; `waits` is what this member waits for. Returns on this one after `window` and a moment at most.
    #[must_use]
    pub fn end(&self, waits: Vec<Wait>, window: Duration, reason: &str) -> Failure {
        self.investigate(window);
        self.monitor.report(waits);
        let shared = &self.mesh.shared;
        let mut state = shared.lock();
        // The mesh's thread keeps the time.
        while state
            .detector(self.id)
            .is_some_and(|detector| detector.is_investigating() && !detector.failed())
        {
            state = shared.wait(state, window);
        }
        drop(state);
        self.give_up(reason);
        let mut state = shared.lock();
        loop {
            if let Some(verdict) = state.detector(self.id).and_then(FailureDetector::verdict) {
                return self.failure_of(verdict.clone());
            }
            state = shared.wait(state, AGREEMENT_TIMEOUT);
        }
    }

    /// Why the group has failed, when its members have agreed on it: at most [`AGREEMENT_TIMEOUT`](crate::failure::AGREEMENT_TIMEOUT) after [`ProgressMonitor::failed`] has become true.
    #[must_use]
    pub fn failure(&self) -> Option<Failure> {
        let state = self.mesh.shared.lock();
        let verdict = state.detector(self.id)?.verdict()?.clone();
        Some(self.failure_of(verdict))
    }

    /// The members who can and want to go on, as a group of its own; whoever does not call it too within `timeout` is not in it. The old group is of no use but for being dropped.
    ///
    /// # Errors
    /// [`ShrinkError`]: the others go on without this one, or there was no agreement in time.
    pub fn shrink(&self, timeout: Duration) -> Result<Self, ShrinkError> {
        self.act(|state| {
            let excluded = state
                .detector(self.id)
                .map(FailureDetector::excluded)
                .unwrap_or_default();
            state.with_agreement(self.id, |agreement, now, next, out| {
                agreement.join(excluded, timeout, now, next, out)
            });
        });
        let shared = &self.mesh.shared;
        let mut state = shared.lock();
        let agreed = loop {
            match state.outcome(self.id) {
                Some(Outcome::Agreed(proposal)) => break proposal.clone(),
                Some(Outcome::Excluded) => return Err(ShrinkError::Excluded { rank: self.rank }),
                Some(Outcome::TimedOut) => {
                    return Err(ShrinkError::Late {
                        rank: self.rank,
                        within: timeout,
                    });
                }
                // The mesh's thread keeps the time.
                None => state = shared.wait(state, timeout),
            }
        };
        drop(state);
        self.part(agreed.group, &agreed.members)
            .ok_or(ShrinkError::Excluded { rank: self.rank })
    }

    /// Divides the group: members of one `colour` are together, in the order of their `key`s, and of their ranks where keys are alike. Without a colour one is in none.
    ///
    /// # Errors
    /// An [`ExchangeError`], on all members or on some: those who have a new group then cannot use it.
    pub fn split(&mut self, colour: Option<u32>, key: i32) -> Result<Option<Self>, ExchangeError> {
        let id = self.mesh.shared.lock().number();
        let choice = Choice { colour, key, id };
        let replies = self.all_gather(&choice.encode())?;
        let chosen: Option<Vec<_>> = replies.iter().map(|bytes| Choice::decode(bytes)).collect();
        let chosen = chosen.ok_or_else(|| ExchangeError::Misuse {
            rank: self.rank,
            reason: "another rank is in another exchange than split: all must make the same calls in the same order"
                .to_owned(),
        })?;
        let part = divide(&chosen, self.rank).and_then(|(id, ranks)| {
            let rank = ranks.iter().position(|rank| *rank == self.rank)?;
            let mesh_ranks = ranks.iter().map(|rank| self.mesh_ranks[rank.index()]).collect();
            self.act(|state| state.open(id, Rank(rank as u32), mesh_ranks));
            self.part(id, &ranks)
        });
        // Nobody writes to the new groups before all have them.
        self.barrier()?;
        Ok(part)
    }

    fn failure_of(&self, verdict: Verdict) -> Failure {
        Failure {
            verdict,
            members: Arc::clone(&self.members),
        }
    }

    /// Changes the state, and has the mesh's thread see to what comes of it.
    fn act(&self, change: impl FnOnce(&mut State)) {
        change(&mut self.mesh.shared.lock());
        self.mesh.shared.changed.notify_all();
        self.mesh.shared.wake();
    }
}

impl Drop for ControlMesh {
    fn drop(&mut self) {
        self.act(|state| state.close(self.id));
    }
}

impl Exchange for ControlMesh {
    fn ranks(&self) -> u32 {
        self.members.len() as u32
    }

    /// Messages may be up to [`MAX_MESSAGE`] bytes long.
    fn all_to_all(&mut self, mut outgoing: Vec<Vec<u8>>) -> Result<Vec<Vec<u8>>, ExchangeError> {
        let misuse = |reason| {
            let rank = self.rank;
            Err(ExchangeError::Misuse { rank, reason })
        };
        if outgoing.len() != self.members.len() {
            return misuse(format!("{} messages for {} ranks", outgoing.len(), self.members.len()));
        }
        if let Some(long) = outgoing.iter().find(|bytes| bytes.len() > MAX_MESSAGE) {
            return misuse(format!(
                "a message of {} bytes, where {MAX_MESSAGE} are the most",
                long.len()
            ));
        }
        let deadline = Instant::now() + self.timeout;
        let number = self.number;
        self.number += 1;
        let own = std::mem::take(&mut outgoing[self.rank.index()]);
        self.act(|state| {
            let others = outgoing.into_iter().zip(self.mesh_ranks.iter()).enumerate();
            for (_, (bytes, mesh_rank)) in others.filter(|(rank, _)| *rank != self.rank.index()) {
                let group = self.id;
                state.send(*mesh_rank, &Frame::Message { group, number, bytes });
            }
        });
        let shared = &self.mesh.shared;
        let mut state = shared.lock();
        loop {
            let missing = match state.take(self.id, number) {
                Taken::All(mut all) => {
                    all[self.rank.index()] = own;
                    return Ok(all);
                }
                Taken::Failed(verdict) => return Err(ExchangeError::Failed(self.failure_of(verdict))),
                Taken::Left(rank) => {
                    let member = self.members[rank.index()].to_string();
                    return Err(ExchangeError::Left { rank, member });
                }
                Taken::Missing(missing) => missing,
            };
            let left = deadline.saturating_duration_since(Instant::now());
            if left.is_zero() {
                let missing = in_words(&missing);
                let within = self.timeout;
                return Err(ExchangeError::Late { missing, within });
            }
            state = shared.wait(state, left);
        }
    }
}
