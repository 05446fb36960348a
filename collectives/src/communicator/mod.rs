//! The communicator: collectives and point-to-point messages as methods.
//!
//! A [`Communicator`] is one rank of a [group](crate::bootstrap::Group), with an
//! [engine](crate::executor) on its devices. Its methods return a [`Call`], whose settings can be
//! changed, and which is then waited for, started or added to a group:
//!
//! ```no_run
//! # use std::time::Duration;
//! # use doorbell_collectives::{Communicator, CollectiveError, ReduceOp::Sum};
//! # fn example(device: &doorbell_verbs::Context, gradients: &mut Vec<f32>) -> Result<(), CollectiveError> {
//! let comm = Communicator::from_env(device)?; // mpirun, Slurm, torchrun, or `doorbell … --ranks`
//! comm.all_reduce(gradients, Sum).deadline(Duration::from_secs(3)).wait()?;
//! # Ok(())
//! # }
//! ```
//!
//! All ranks make the same calls in the same order, with the same counts, operators and settings.
//! Algorithm and protocol are chosen once per collective, root, type and size class.
//!
//! Failures are values: an operation ends within its deadline, on all ranks, and the error names
//! the culprit and this rank's wait. [`shrink`](Communicator::shrink) then creates a communicator
//! of the survivors.

mod calibrate;
mod call;
mod collectives;
mod create;
mod data;
mod drive;
mod error;
mod options;
mod p2p;
mod ragged;
mod repeated_put;
#[cfg(feature = "gpu")]
mod staged;
mod state;
mod windows;

use std::sync::Arc;
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

pub use call::{Batch, Call, PreMulSum, Reduction, Request};
#[cfg(feature = "gpu")]
pub(crate) use collectives::displacements;
pub use data::{CommBuffer, Owned, Source, Target};
pub use error::{CollectiveError, GroupFailed};
pub use options::Options;
pub use repeated_put::RepeatedPut;
#[cfg(feature = "gpu")]
pub(crate) use staged::{StagedMessage, StagedOperation};
pub(crate) use windows::PutRequest;

use call::CallSettings;
use doorbell_verbs::Context;
use drive::Shared;

use crate::bootstrap::{Exchange, Member};
use crate::kernel::Element;
use crate::plan::Collective;
use crate::topology;
use crate::tune::{Decision, Overrides, Tuner};
use crate::types::{DataType, Rank};

/// Maximum wait for the other ranks when a communicator is dropped.
const GOODBYE: Duration = Duration::from_secs(5);

/// An upper bound of timeouts that clocks can represent.
const FOREVER: Duration = Duration::from_secs(365 * 24 * 3600);

/// One rank of a communicator. It may be shared between threads; operations run in the order of the
/// calls, which has to be the same on all ranks.
#[doc(alias("ncclComm_t", "MPI_Comm"))]
pub struct Communicator {
    shared: Arc<Shared>,
    progress: Option<JoinHandle<()>>,
    rank: Rank,
    ranks: u32,
    members: Box<[Member]>,
    devices: Box<[Context]>,
    options: Options,
}

impl Communicator {
    /// The rank of this process.
    #[doc(alias("ncclCommUserRank", "MPI_Comm_rank"))]
    #[must_use]
    pub fn rank(&self) -> Rank {
        self.rank
    }

    /// The number of ranks.
    #[doc(alias("ncclCommCount", "MPI_Comm_size"))]
    #[must_use]
    pub fn size(&self) -> u32 {
        self.ranks
    }

    /// The members, by rank.
    #[must_use]
    pub fn members(&self) -> &[Member] {
        &self.members
    }

    /// The devices.
    #[must_use]
    pub fn devices(&self) -> &[Context] {
        &self.devices
    }

    /// The options it was created with.
    #[must_use]
    pub fn options(&self) -> &Options {
        &self.options
    }

    /// The cost model and overrides by which choices are made: the same on all ranks.
    #[must_use]
    pub fn tuner(&self) -> Tuner {
        self.shared.with(|state| state.tuner.clone())
    }

    /// The order of the ranks in rings and trees.
    #[must_use]
    pub fn order(&self) -> Vec<Rank> {
        self.shared.with(|state| state.order.clone())
    }

    /// By rank: the index of its host.
    #[must_use]
    pub fn hosts(&self) -> Vec<u32> {
        self.shared.with(|state| state.hosts.clone())
    }

    /// By rank: its location ([`Options::location`]);
    /// [`least_nvlink`](crate::topology::least_nvlink) returns whether all GPUs are connected.
    #[must_use]
    pub fn locations(&self) -> Vec<topology::Member> {
        self.shared.with(|state| state.locations.clone())
    }

    /// The default algorithm and protocol for an operation of so many bytes, and why. Bytes are
    /// counted as in [`Question::bytes`](crate::tune::TuningRequest::bytes).
    ///
    /// # Errors
    /// When no algorithm fits.
    pub fn explain(
        &self,
        collective: Collective,
        root: Rank,
        data: DataType,
        bytes: u64,
    ) -> Result<Decision, CollectiveError> {
        let settings = self.settings();
        self.shared
            .with(|state| state.explain(collective, root, data, bytes, &settings))
    }

    fn settings(&self) -> CallSettings {
        CallSettings {
            deadline: self.options.deadline,
            deterministic: self.options.deterministic,
            forced: Overrides::default(),
        }
    }

    /// `len` elements of registered memory, initially zero, for zero-copy operations on it and on
    /// slices of it.
    ///
    /// # Errors
    /// When there is no memory, or a device refuses it.
    #[doc(alias("ncclMemAlloc", "ncclCommRegister", "MPI_Alloc_mem"))]
    pub fn alloc<T: Element>(&self, len: usize) -> Result<CommBuffer<T>, CollectiveError> {
        let Some(bytes) = len
            .checked_mul(size_of::<T>())
            .filter(|bytes| isize::try_from(*bytes).is_ok())
        else {
            return Err(CollectiveError::Misuse {
                collective: Collective::Barrier,
                what: format!("{len} elements are more than there can be in memory"),
            });
        };
        let segment = self.shared.with(|state| state.engine.allocate(bytes.max(1)))?;
        Ok(CommBuffer::new(segment, len))
    }

    /// Runs operations as a group: `build` adds them, and they are waited for when it returns. They
    /// run concurrently, as far as they use different channels.
    ///
    /// # Errors
    /// The error of `build`, or else the first error of an operation. All operations have ended in
    /// either case.
    #[doc(alias("ncclGroupStart", "ncclGroupEnd"))]
    pub fn group<'g>(
        &'g self,
        build: impl FnOnce(&mut Batch<'g>) -> Result<(), CollectiveError>,
    ) -> Result<(), CollectiveError> {
        let mut batch = Batch::new(self);
        let built = build(&mut batch);
        let done = batch.wait();
        built.and(done)
    }

    /// Fails all operations in flight on any rank, and all later ones, with this rank and reason.
    /// Returns at once; may be called while another thread waits.
    #[doc(alias("ncclCommAbort", "ncclCommRevoke", "MPI_Abort"))]
    pub fn abort(&self, reason: &str) {
        self.shared.control.give_up(reason);
    }

    /// Breaks this rank's queue pairs to `peer` (fault injection), for tests.
    ///
    /// # Errors
    /// When there is no such rank, or a device refuses.
    pub fn break_links(&self, peer: Rank) -> Result<(), CollectiveError> {
        Ok(self.shared.with(|state| state.engine.cut(peer))?)
    }

    /// Whether it has failed: a member died, it was aborted, or an operation missed its deadline.
    #[doc(alias = "ncclCommGetAsyncError")]
    #[must_use]
    pub fn has_failed(&self) -> bool {
        self.shared.monitor.failed()
    }

    /// Why it has failed; `None` if it has not. Waits for the members' agreement on the cause.
    #[doc(alias = "ncclCommGetLastError")]
    #[must_use]
    pub fn failure(&self) -> Option<CollectiveError> {
        self.has_failed().then(|| self.shared.why())
    }

    /// Finalises the communicator collectively: completes everything in flight, and returns when
    /// all ranks have called it. Dropping does the same, ignoring errors.
    ///
    /// # Errors
    /// When a rank is missing at the deadline, or the communicator has failed. It is gone all the
    /// same.
    #[doc(alias("ncclCommFinalize", "ncclCommDestroy", "MPI_Comm_free", "MPI_Finalize"))]
    pub fn destroy(mut self) -> Result<(), CollectiveError> {
        let left = self.leave(self.options.deadline);
        self.failure().map_or(left, Err)
    }

    /// Leaves without waiting for the other ranks. Only for a communicator whose queue pairs have
    /// carried nothing that another rank may still wait for.
    #[cfg(feature = "gpu")]
    pub(crate) fn leave_at_once(mut self) -> Result<(), CollectiveError> {
        self.options.deadline = Duration::ZERO;
        match self.has_failed() {
            true => Err(self.shared.why()),
            false => Ok(()),
        }
    }

    fn leave(&mut self, timeout: Duration) -> Result<(), CollectiveError> {
        self.shared.drain(Instant::now() + timeout);
        let goodbye = if self.has_failed() {
            Ok(())
        } else {
            let mut group = self.shared.group();
            let control = group.control_mut();
            control.set_timeout(timeout);
            control.barrier().map_err(CollectiveError::from)
        };
        if let Some(thread) = self.progress.take() {
            self.shared.end();
            // If it panicked, the engine has failed, and there is nothing to drive.
            let _ = thread.join();
        }
        goodbye
    }
}

impl Drop for Communicator {
    fn drop(&mut self) {
        let timeout = match std::thread::panicking() {
            true => Duration::ZERO,
            false => GOODBYE.min(self.options.deadline),
        };
        let _ = self.leave(timeout);
    }
}

debug_fields!(
    Communicator,
    self,
    rank = self.rank,
    ranks = self.ranks,
    options = self.options
);
