//! The communicator: collectives as methods, over everything else.
//!
//! A [`Communicator`] is one rank of a [group](crate::bootstrap::Group), with an [engine](crate::executor) on its devices. Its methods give a [`Call`], which says how the operation is to be done, and is then waited for, started or
//! put together with others:
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
//! All ranks call the same in the same order, with the same counts, operators and settings. How an operation is done is chosen once for each kind, root, type and size class, by costs that all ranks share, and kept.
//!
//! Failure is a value: an operation ends within its deadline, on all ranks, and the error names who is to blame and where this rank was. Afterwards [`shrink`](Communicator::shrink) has_input a communicator of those who are left.
//!
//! - `call`: operations before and while they are under way; `data`: the memory that they work on; `collectives`: which there are; `messages`: between two ranks.
//! - `state`: what is under the lock, and ways that were chosen; `drive`: turns, waits, and what is done where nothing moves.
//! - `make`: coming to be: what ranks tell each other; `calibrate`: measuring what messages cost.

mod calibrate;
mod call;
mod collectives;
mod create;
mod data;
mod drive;
mod error;
mod options;
mod p2p;
mod state;

use std::fmt;
use std::sync::Arc;
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

pub use call::{Batch, Call, PreMulSum, Reduction, Request};
pub use data::{CommBuffer, Owned, Source, Target};
pub use error::{CollectiveError, GroupFailed};
pub use options::Options;

use call::CallSettings;
use doorbell_verbs::Context;
use drive::Shared;

use crate::bootstrap::{Exchange, Member};
use crate::kernel::Element;
use crate::memory::Segment;
use crate::plan::Collective;
use crate::topology;
use crate::tune::{Decision, Overrides, Tuner};
use crate::types::{DataType, Rank};

/// The longest that a communicator waits for the others when it is dropped.
const GOODBYE: Duration = Duration::from_secs(5);

/// As good as for ever, and no more than clocks can count.
const FOREVER: Duration = Duration::from_secs(365 * 24 * 3600);

/// One rank of those that make collectives together. Made of a group by [`new`](Self::new), or of another communicator.
///
/// It may be shared between threads; operations are done in the order in which they are called, which has to be the same on all ranks.
pub struct Communicator {
    shared: Arc<Shared>,
    progress: Option<JoinHandle<()>>,
    rank: Rank,
    ranks: u32,
    members: Box<[Member]>,
    devices: Box<[Context]>,
    options: Options,
    /// Unlike that of any other in this process.
    number: u64,
}

impl Communicator {
    /// Which rank this is.
    #[must_use]
    pub fn rank(&self) -> Rank {
        self.rank
    }

    /// How many ranks there are.
    #[must_use]
    pub fn size(&self) -> u32 {
        self.ranks
    }

    /// Who they are, by rank.
    #[must_use]
    pub fn members(&self) -> &[Member] {
        &self.members
    }

    /// The devices that it runs on.
    #[must_use]
    pub fn devices(&self) -> &[Context] {
        &self.devices
    }

    /// How it was made.
    #[must_use]
    pub fn options(&self) -> &Options {
        &self.options
    }

    /// The costs that choices are made by, and what is forced: the same on all ranks.
    #[must_use]
    pub fn tuner(&self) -> Tuner {
        self.shared.with(|state| state.tuner.clone())
    }

    /// The order in which rings and trees go through the ranks.
    #[must_use]
    pub fn order(&self) -> Vec<Rank> {
        self.shared.with(|state| state.order.clone())
    }

    /// By rank: which of the hosts it is on, counted from 0.
    #[must_use]
    pub fn hosts(&self) -> Vec<u32> {
        self.shared.with(|state| state.hosts.clone())
    }

    /// By rank: where it is, as it said itself ([`Options::place`]); [`least_nvlink`](crate::topology::least_nvlink) says whether all GPUs are joined.
    #[must_use]
    pub fn places(&self) -> Vec<topology::Member> {
        self.shared.with(|state| state.places.clone())
    }

    /// To how many ranks short messages are stored into their mailboxes, which are mapped ([`Config::mapped`](crate::executor::Config::mapped)): not by a device.
    #[must_use]
    pub fn mapped(&self) -> usize {
        self.shared.with(|state| state.engine.mapped())
    }

    /// How an operation of so many bytes would be done if nothing was said about it, and why. Bytes are counted as [`Question::bytes`](crate::tune::Question::bytes).
    ///
    /// # Errors
    /// When there is no way of doing it.
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

    /// `len` elements of memory that is registered on all devices, zeros at first: operations on it copy nothing.
    ///
    /// # Errors
    /// When there is no memory, or a device refuses it.
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
        Ok(CommBuffer::new(segment, len, self.number))
    }

    /// Memory that is registered on all devices, for [`run_staged`](Self::run_staged).
    pub(crate) fn segment(&self, bytes: usize) -> Result<Arc<Segment>, CollectiveError> {
        Ok(self.shared.with(|state| state.engine.allocate(bytes.max(1)))?)
    }

    /// Does operations together: `build` adds them, and when it returns they are waited for. They get on beside each other, as far as they have channels of their own.
    ///
    /// # Errors
    /// What `build` returned, or else the first error of an operation. All operations have ended in either case.
    pub fn group<'g>(
        &'g self,
        build: impl FnOnce(&mut Batch<'g>) -> Result<(), CollectiveError>,
    ) -> Result<(), CollectiveError> {
        let mut batch = Batch::new(self);
        let built = build(&mut batch);
        let done = batch.wait();
        built.and(done)
    }

    /// Fails all operations that are under way on any rank, and all that come: they say that this rank aborted, and why. Returns at once; may be called from another thread while one waits.
    pub fn abort(&self, reason: &str) {
        self.shared.group().control().give_up(reason);
    }

    /// Breaks this rank's queue pairs to `peer`, as a link that is cut does: for tests of what comes after.
    ///
    /// # Errors
    /// When there is no such rank, or a device refuses.
    pub fn cut(&self, peer: Rank) -> Result<(), CollectiveError> {
        Ok(self.shared.with(|state| state.engine.cut(peer))?)
    }

    /// Whether it has failed: a member died, somebody aborted it, or an operation has not finished in its time.
    #[must_use]
    pub fn has_failed(&self) -> bool {
        self.shared.monitor.failed()
    }

    /// Why it has failed, which it has.
    pub(crate) fn why(&self) -> CollectiveError {
        self.shared.why()
    }

    /// Says goodbye: finishes what is under way, and returns when all ranks have come here; then nobody is left with something unsent. Dropping does the same, and tells nobody if it fails.
    ///
    /// # Errors
    /// When not all have come within the deadline, or the communicator has failed. It is gone all the same.
    pub fn destroy(mut self) -> Result<(), CollectiveError> {
        let left = self.leave(self.options.deadline);
        if self.has_failed() {
            return Err(self.shared.why());
        }
        left
    }

    /// Waits for the others to leave too.
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
        // Who has not come by then is on its own.
        let _ = self.leave(timeout);
    }
}

impl fmt::Debug for Communicator {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Communicator")
            .field("rank", &self.rank)
            .field("ranks", &self.ranks)
            .field("options", &self.options)
            .finish_non_exhaustive()
    }
}
