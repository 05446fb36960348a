//! The control mesh: a connection to every other process, and one thread that sleeps.
//!
//! The thread wakes when something comes or is to be sent. It notices at once when a peer's process ends: the kernel closes its connections. A mesh may carry several groups, which are told apart by their [`GroupId`].

mod frame;
mod postman;
mod state;

use std::sync::Arc;
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

pub use frame::MAX_MESSAGE;

use frame::{Frame, GroupId};
use postman::Postman;
use state::Shared;

use super::error::{BootstrapError, in_words};
use super::join::Links;
use super::{Exchange, ExchangeError, Member, PATIENCE};
use crate::failure::Watch;
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
        self.shared.ring();
        if let Some(thread) = self.thread.take() {
            // If it panicked, there is nobody left to say goodbye.
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
    /// Their places in the mesh, by rank.
    places: Arc<[u32]>,
    watch: Arc<Watch>,
    /// The number of the next exchange.
    number: u64,
    patience: Duration,
}

impl ControlMesh {
    /// A mesh over connections that exist, and the group of all who are in it.
    pub(super) fn start(links: Links, rank: Rank) -> Result<Self, BootstrapError> {
        let members: Arc<[Member]> = links.members.as_slice().into();
        let shared = Shared::new(links.members).map_err(BootstrapError::system("make an eventfd"))?;
        let shared = Arc::new(shared);
        let id = GroupId::ALL;
        let places: Arc<[u32]> = (0..members.len() as u32).collect();
        let watch = shared.lock().open(id, rank, Arc::clone(&places));
        let postman = Postman::new(Arc::clone(&shared), links.streams)
            .map_err(BootstrapError::system("set options of a connection"))?;
        let thread = thread::Builder::new()
            .name("control mesh".into())
            .spawn(move || postman.run())
            .map_err(BootstrapError::system("start a thread"))?;
        let mesh = Arc::new(Mesh {
            shared,
            thread: Some(thread),
        });
        Ok(Self {
            mesh,
            id,
            rank,
            members,
            places,
            watch,
            number: 0,
            patience: PATIENCE,
        })
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
    pub fn set_patience(&mut self, patience: Duration) {
        self.patience = patience;
    }

    /// What this rank's engine tells the others of itself, and the flag that is up when the group is in trouble.
    #[must_use]
    pub fn watch(&self) -> Arc<Watch> {
        Arc::clone(&self.watch)
    }
}

impl Drop for ControlMesh {
    fn drop(&mut self) {
        self.mesh.shared.lock().close(self.id);
        self.mesh.shared.ring();
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
        let deadline = Instant::now() + self.patience;
        let number = self.number;
        self.number += 1;
        let own = std::mem::take(&mut outgoing[self.rank.index()]);
        let shared = &self.mesh.shared;
        let mut state = shared.lock();
        for (rank, bytes) in outgoing.into_iter().enumerate() {
            if rank != self.rank.index() {
                let group = self.id;
                state.send(self.places[rank], &Frame::Message { group, number, bytes });
            }
        }
        shared.ring();
        loop {
            match state.take(self.id, number)? {
                Ok(mut all) => {
                    all[self.rank.index()] = own;
                    return Ok(all);
                }
                Err(missing) => {
                    let left = deadline.saturating_duration_since(Instant::now());
                    if left.is_zero() {
                        let missing = in_words(&missing);
                        let within = self.patience;
                        return Err(ExchangeError::Late { missing, within });
                    }
                    state = match shared.changed.wait_timeout(state, left) {
                        Ok((state, _)) => state,
                        Err(poisoned) => poisoned.into_inner().0,
                    };
                }
            }
        }
    }
}
