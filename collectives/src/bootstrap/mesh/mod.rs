//! The control mesh: a TCP connection to every other process, driven by one sleeping I/O thread.
//!
//! The thread wakes on input, queued output and timers, and detects the end of a peer's process as
//! the kernel closes its connections. One mesh carries all groups derived from the first by split,
//! duplicate or shrink; a process accepts frames of a group until it leaves the group.

mod frame;
mod io_thread;
mod state;

use std::ops::Deref;
use std::sync::Arc;
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use doorbell_rendezvous::Connection;
pub use frame::MAX_MESSAGE;

pub(crate) use frame::{Frame, GroupId, Inbound};

use io_thread::IoThread;
use state::{Shared, State, Taken};

use super::error::{BootstrapError, in_words};
use super::peers::PeerStreams;
use super::split::{Choice, divide};
use super::{DEFAULT_TIMEOUT, Exchange, ExchangeError, Member};
use crate::failure::{
    AGREEMENT_TIMEOUT, Failure, FailureDetector, Outcome, ProgressMonitor, ShrinkError, Verdict, Wait,
};
use crate::types::Rank;

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
            // If it panicked, no thread is left to send goodbye.
            let _ = thread.join();
        }
    }
}

/// The control connections of a group's members, beside their queue pairs.
#[derive(Debug)]
pub struct ControlMesh {
    control: Arc<GroupControl>,
    number: u64,
    timeout: Duration,
}

/// The part of a control mesh that no exchange occupies: failure detection, abort and shrink.
#[derive(Debug)]
pub struct GroupControl {
    mesh: Arc<Mesh>,
    id: GroupId,
    rank: Rank,
    members: Arc<[Member]>,
    /// The members' ranks in the mesh, by rank.
    mesh_ranks: Arc<[u32]>,
    monitor: Arc<ProgressMonitor>,
}

impl Deref for ControlMesh {
    type Target = GroupControl;

    fn deref(&self) -> &GroupControl {
        &self.control
    }
}

impl ControlMesh {
    pub(super) fn start(links: PeerStreams, rank: Rank) -> Result<Self, BootstrapError> {
        let members: Arc<[Member]> = links.members.into();
        let split = |connection: Connection| {
            let (stream, send, receive) = connection.into_parts();
            ((stream, receive), send)
        };
        let (streams, macs) = links
            .connections
            .into_iter()
            .map(|connection| connection.map(split).unzip())
            .unzip();
        let shared = Shared::new(rank.0, macs).map_err(BootstrapError::system("make an eventfd"))?;
        let shared = Arc::new(shared);
        let id = GroupId::ALL;
        let mesh_ranks: Arc<[u32]> = (0..members.len() as u32).collect();
        shared.lock().open(id, rank, Arc::clone(&mesh_ranks));
        let io_thread = IoThread::new(Arc::clone(&shared), streams)
            .map_err(BootstrapError::system("set options of a connection"))?;
        let thread = doorbell_threads::spawn("control mesh", move || io_thread.run())
            .map_err(BootstrapError::system("start a thread"))?;
        let mesh = Arc::new(Mesh {
            shared,
            thread: Some(thread),
        });
        Ok(Self::of(mesh, id, rank, members, mesh_ranks))
    }

    fn of(mesh: Arc<Mesh>, id: GroupId, rank: Rank, members: Arc<[Member]>, mesh_ranks: Arc<[u32]>) -> Self {
        let monitor = mesh
            .shared
            .lock()
            .detector(id)
            .map(|detector| Arc::clone(detector.monitor()));
        let control = GroupControl {
            mesh,
            id,
            rank,
            members,
            mesh_ranks,
            monitor: monitor.unwrap_or_default(),
        };
        Self {
            control: Arc::new(control),
            number: 0,
            timeout: DEFAULT_TIMEOUT,
        }
    }

    /// What threads use while another one exchanges.
    pub(crate) fn shared(&self) -> Arc<GroupControl> {
        Arc::clone(&self.control)
    }

    /// Sets the timeout of later exchanges.
    pub fn set_timeout(&mut self, timeout: Duration) {
        self.timeout = timeout;
    }

    /// Splits the group: members of one `colour` form a group, ordered by `key` and then by rank. A
    /// member without a colour is in none.
    ///
    /// # Errors
    /// An [`ExchangeError`], on all members or on some; a new group that some members lack is
    /// unusable.
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
            let mut part = self.part(id, &ranks)?;
            part.timeout = self.timeout;
            Some(part)
        });
        // No member writes to a new group before all have opened it.
        self.barrier()?;
        Ok(part)
    }
}

impl GroupControl {
    /// A subset of the members as a group: the ranks are those of this group.
    fn part(&self, id: GroupId, ranks: &[Rank]) -> Option<ControlMesh> {
        let rank = ranks.iter().position(|rank| *rank == self.rank)?;
        let members = ranks.iter().map(|rank| self.members[rank.index()].clone()).collect();
        let mesh_ranks = ranks.iter().map(|rank| self.mesh_ranks[rank.index()]).collect();
        let mesh = Arc::clone(&self.mesh);
        Some(ControlMesh::of(mesh, id, Rank(rank as u32), members, mesh_ranks))
    }

    /// This process' rank.
    #[must_use]
    pub fn rank(&self) -> Rank {
        self.rank
    }

    /// The members, by rank.
    #[must_use]
    pub fn members(&self) -> &[Member] {
        &self.members
    }

    /// This rank's published status, and the flag raised for failures and report requests.
    #[must_use]
    pub fn monitor(&self) -> Arc<ProgressMonitor> {
        Arc::clone(&self.monitor)
    }

    /// Queries all members for their status because this one is stalled; returns at once. A member
    /// that has not replied after `window` counts as stopped: half a second allows a loaded machine
    /// to wake a thread. The result is the [`finding`](Self::finding).
    pub fn investigate(&self, window: Duration) {
        self.act(|state| {
            state.with_detector(self.id, |detector, now, out| {
                detector.investigate(window, false, now, out)
            })
        });
    }

    /// As [`investigate`](Self::investigate), after a link of this rank failed: all members also
    /// test their links, to find the end that is cut off.
    pub(crate) fn investigate_links(&self, window: Duration) {
        self.act(|state| {
            state.with_detector(self.id, |detector, now, out| {
                detector.investigate(window, true, now, out)
            })
        });
    }

    /// The result of the last investigation. It is tentative and ends nothing: a late member may
    /// still arrive.
    #[must_use]
    pub fn finding(&self) -> Option<Failure> {
        let state = self.mesh.shared.lock();
        let verdict = state.detector(self.id)?.finding()?.clone();
        Some(self.failure_of(verdict))
    }

    /// Fails the group on all ranks because an operation missed its deadline: with the last
    /// investigation's finding, or else with `reason`. Returns at once.
    pub fn give_up(&self, reason: &str) {
        self.act(|state| state.with_detector(self.id, |detector, now, out| detector.give_up(reason, now, out)));
    }

    /// Investigates, and fails the group with the finding or else with `reason`; `waits` is what
    /// this member waits for. Returns after about `window`.
    #[must_use]
    pub fn end(&self, waits: Vec<Wait>, window: Duration, reason: &str) -> Failure {
        self.investigate(window);
        self.monitor.report(waits);
        let shared = &self.mesh.shared;
        let mut state = shared.lock();
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

    /// The failure that the members agreed on: available at most
    /// [`AGREEMENT_TIMEOUT`](crate::failure::AGREEMENT_TIMEOUT) after [`ProgressMonitor::failed`]
    /// became true.
    #[must_use]
    pub fn failure(&self) -> Option<Failure> {
        let state = self.mesh.shared.lock();
        let verdict = state.detector(self.id)?.verdict()?.clone();
        Some(self.failure_of(verdict))
    }

    /// The members whose process has ended without leaving.
    #[cfg(feature = "gpu")]
    pub(crate) fn dead(&self) -> Vec<Rank> {
        let state = self.mesh.shared.lock();
        state
            .detector(self.id)
            .map_or_else(Vec::new, |detector| detector.dead().collect())
    }

    /// Forms a group without those of `excluded` and those that have failed; a member that does not
    /// call it within `timeout` is excluded. A group is shrunk once; one that has not failed goes
    /// on.
    ///
    /// # Errors
    /// [`ShrinkError`]: the others continue without this member, or there was no agreement in time.
    pub fn shrink(&self, excluded: &[Rank], timeout: Duration) -> Result<ControlMesh, ShrinkError> {
        self.act(|state| {
            let failed = state.detector(self.id).map(FailureDetector::excluded);
            let excluded = excluded.iter().copied().chain(failed.unwrap_or_default());
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
                None => state = shared.wait(state, timeout),
            }
        };
        drop(state);
        self.part(agreed.group, &agreed.members)
            .ok_or(ShrinkError::Excluded { rank: self.rank })
    }

    fn failure_of(&self, verdict: Verdict) -> Failure {
        Failure {
            verdict,
            members: Arc::clone(&self.members),
        }
    }

    fn act(&self, change: impl FnOnce(&mut State)) {
        change(&mut self.mesh.shared.lock());
        self.mesh.shared.changed.notify_all();
        self.mesh.shared.wake();
    }
}

impl Drop for GroupControl {
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
