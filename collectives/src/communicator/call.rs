//! A call: an operation whose settings are chained, and which is then waited for, started, or added
//! to a group.

use core::marker::PhantomData;
use core::mem;
use std::fmt;
use std::time::Duration;

use super::data::{BufferRef, KeepAlive, Owned};
use super::{CollectiveError, Communicator};
use crate::algorithm::Algorithm;
use crate::executor::{Direction, Parts, Ticket};
use crate::kernel::{Accumulator, Op, Scalar, UserOperator};
use crate::plan::Collective;
use crate::tune::Overrides;
use crate::types::{DataType, Protocol, Rank, ReduceOp};

/// The sum of the contributions, each multiplied by its rank's scalar. The scalar has the
/// accumulator type: `f32` for floats of 16 and 8 bits.
#[doc(alias = "ncclRedOpCreatePreMulSum")]
#[derive(Clone, Copy, PartialEq, Debug)]
pub struct PreMulSum<A: Accumulator>(pub A);

/// A reduction: a [`ReduceOp`], a [`PreMulSum`] with its scalar, or a [`UserOperator`].
#[derive(Clone, Debug)]
pub struct Reduction {
    pub(crate) op: Op,
    pub(crate) scale: Option<Scalar>,
}

impl From<ReduceOp> for Reduction {
    fn from(op: ReduceOp) -> Self {
        Self {
            op: op.into(),
            scale: None,
        }
    }
}

impl From<UserOperator> for Reduction {
    fn from(op: UserOperator) -> Self {
        Self {
            op: op.into(),
            scale: None,
        }
    }
}

impl From<&UserOperator> for Reduction {
    fn from(op: &UserOperator) -> Self {
        op.clone().into()
    }
}

impl<A: Accumulator> From<PreMulSum<A>> for Reduction {
    fn from(PreMulSum(scalar): PreMulSum<A>) -> Self {
        Self {
            op: ReduceOp::PreMulSum.into(),
            scale: Some(Scalar::of(scalar)),
        }
    }
}

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) struct CallSettings {
    pub(super) deadline: Duration,
    pub(super) deterministic: bool,
    pub(super) forced: Overrides,
}

#[derive(Debug)]
pub(super) struct OperationSpec {
    pub(super) collective: Collective,
    pub(super) root: Rank,
    pub(super) reduction: Reduction,
    pub(super) data: DataType,
    /// Elements of the whole of all-reduce, broadcast and reduce; else of each rank's part.
    pub(super) count: u64,
    /// Bytes, as the cost model counts them.
    pub(super) bytes: u64,
    pub(super) parts: Option<Parts>,
    pub(super) message: Option<(Rank, Direction)>,
    pub(super) input: BufferRef,
    pub(super) output: BufferRef,
}

impl OperationSpec {
    /// Whether no rank has an element: all have the same count, so none has to wait.
    #[inline]
    pub(super) fn is_empty(&self) -> bool {
        self.count == 0 && self.parts.is_none() && self.message.is_none() && self.collective != Collective::Barrier
    }
}

/// Operations with equal keys share a cached program.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) struct CacheKey {
    collective: Collective,
    root: Rank,
    op: ReduceOp,
    data: DataType,
    count: u64,
    /// Bytes from the input to the output; `None` where only one exists.
    input_to_output: Option<usize>,
    has_input: bool,
    has_output: bool,
    settings: CallSettings,
}

impl CacheKey {
    /// The key of a cacheable operation: not of parts with different lengths, inputs that are
    /// scaled, user-defined operators, or point-to-point messages.
    #[inline]
    pub(super) fn of(spec: &OperationSpec, settings: &CallSettings) -> Option<Self> {
        let Op::Builtin(op) = spec.reduction.op else {
            return None;
        };
        if spec.reduction.scale.is_some() || spec.parts.is_some() || spec.message.is_some() {
            return None;
        }
        let (input, output) = (spec.input.start().addr(), spec.output.start().addr());
        let (has_input, has_output) = (spec.input.is_some(), spec.output.is_some());
        Some(Self {
            collective: spec.collective,
            root: spec.root,
            op,
            data: spec.data,
            count: spec.count,
            input_to_output: (has_input && has_output).then(|| output.wrapping_sub(input)),
            has_input,
            has_output,
            settings: *settings,
        })
    }
}

/// An operation that has not begun. It begins with [`wait`](Self::wait), [`start`](Self::start), or
/// when it is [added](super::Batch::add) to a group.
///
/// All settings but the deadline have to be the same on all ranks.
#[must_use = "nothing is done before `wait`, `start`, or that it is added to a group"]
pub struct Call<'c, B> {
    comm: &'c Communicator,
    spec: Result<OperationSpec, CollectiveError>,
    settings: CallSettings,
    buffers: B,
}

impl<B> fmt::Debug for Call<'_, B> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Call")
            .field("spec", &self.spec)
            .field("settings", &self.settings)
            .finish_non_exhaustive()
    }
}

impl<'c, B> Call<'c, B> {
    pub(super) fn new(comm: &'c Communicator, spec: Result<OperationSpec, CollectiveError>, buffers: B) -> Self {
        Self {
            comm,
            spec,
            settings: comm.settings(),
            buffers,
        }
    }

    /// Sets the timeout on all ranks: an operation that misses it fails on all of them with the
    /// cause. The default is the communicator's [deadline](super::Options::deadline).
    ///
    /// The last part of a deadline of a second or more is reserved for the agreement on the cause;
    /// a shorter one may be exceeded by [`AGREEMENT_TIMEOUT`](crate::failure::AGREEMENT_TIMEOUT)
    /// where a member does not reply.
    pub fn deadline(mut self, deadline: Duration) -> Self {
        self.settings.deadline = deadline;
        self
    }

    /// Selects the algorithm; one that does not support the collective is an error.
    pub fn algorithm(mut self, algorithm: Algorithm) -> Self {
        self.settings.forced.algorithm = Some(algorithm);
        self
    }

    /// Selects the protocol.
    pub fn protocol(mut self, protocol: Protocol) -> Self {
        self.settings.forced.protocol = Some(protocol);
        self
    }

    /// Sets the number of channels, up to the configured number.
    pub fn channels(mut self, channels: u32) -> Self {
        self.settings.forced.channels = Some(channels.max(1));
        self
    }

    /// Sets the slice length, in bytes per block.
    pub fn slice(mut self, bytes: u64) -> Self {
        self.settings.forced.slice_bytes = Some(bytes.max(1));
        self
    }

    /// Requires a reduction order that does not depend on how the data is cut: the same bits for
    /// any slices, channels and protocol. The algorithm, unless selected, then depends only on the
    /// number of ranks and the size class: the same in every run, but not always the fastest.
    pub fn deterministic(mut self) -> Self {
        self.settings.deterministic = true;
        self
    }

    /// Runs the operation and returns when it is complete on this rank: the output is valid, and
    /// the input may be changed.
    ///
    /// # Errors
    /// [`CollectiveError::Failed`] within the deadline if it fails; others if the call is invalid,
    /// and then nothing was begun.
    ///
    /// # Panics
    /// When a user-defined operator panics. The communicator has failed then.
    pub fn wait(self) -> Result<(), CollectiveError> {
        let result = self.comm.shared.run(self.spec?, &self.settings, || ());
        drop(self.buffers);
        result
    }

    /// As [`wait`](Self::wait), for callers that hold the lock of an interpreter: only a short
    /// operation that repeats an earlier one runs here, for some tens of microseconds and without
    /// waiting for another thread. If it takes longer, `detached` is called with the rest: it
    /// releases the lock, calls the rest, and takes the lock again.
    ///
    /// The rest calls `between` whenever this thread would yield the CPU or sleep: after about a
    /// millisecond without progress, then at least every 200 µs. It may
    /// [abort](Communicator::abort) the communicator, so that a signal can end the wait.
    ///
    /// # Errors
    /// As [`wait`](Self::wait).
    ///
    /// # Panics
    /// As [`wait`](Self::wait), and when `detached` or `between` panics; the communicator has
    /// failed then, too.
    pub fn wait_detached(
        self,
        detached: impl FnOnce(&mut (dyn FnMut() + Send)),
        between: impl FnMut() + Send,
    ) -> Result<(), CollectiveError> {
        let result = self
            .comm
            .shared
            .run_detached(self.spec?, &self.settings, detached, between);
        drop(self.buffers);
        result
    }
}

impl<'c, B: Owned> Call<'c, B> {
    /// Begins the operation and returns at once. The [`Request`] returns the buffers. It progresses
    /// while a thread waits for it, tests it or calls this communicator otherwise; with
    /// [`progress_thread`](super::Options::progress_thread), always.
    ///
    /// # Errors
    /// As [`wait`](Self::wait); if the communicator has failed, earlier operations have failed too.
    #[doc(alias = "MPI_Iallreduce")]
    pub fn start(self) -> Result<Request<'c, B>, CollectiveError> {
        let ticket = self.comm.shared.begin(self.spec?, &self.settings)?;
        self.comm.shared.wake();
        Ok(Request::of(self.comm, ticket, self.buffers))
    }
}

/// An operation in flight, which owns its buffers. If dropped, it continues nevertheless: other
/// ranks depend on it.
#[doc(alias = "MPI_Request")]
#[must_use = "what a request has is given back by `wait`"]
pub struct Request<'c, B: Owned> {
    comm: &'c Communicator,
    ticket: Ticket,
    buffers: Option<B>,
    done: bool,
}

impl<'c, B: Owned> Request<'c, B> {
    pub(super) fn of(comm: &'c Communicator, ticket: Ticket, buffers: B) -> Self {
        Self {
            comm,
            ticket,
            buffers: Some(buffers),
            done: false,
        }
    }
}

impl<B: Owned> Request<'_, B> {
    /// Whether it is complete: then [`wait`](Self::wait) returns at once. Drives the communicator a
    /// little. Blocks only after a failure, until the members have agreed on the cause.
    ///
    /// # Errors
    /// [`CollectiveError::Failed`] if it has failed.
    #[doc(alias = "MPI_Test")]
    pub fn test(&mut self) -> Result<bool, CollectiveError> {
        if !self.done {
            self.done = self.comm.shared.test(self.ticket)?;
        }
        Ok(self.done)
    }

    /// Waits until it is complete, and returns its buffers.
    ///
    /// # Errors
    /// As [`Call::wait`]. The buffers are then dropped, as their contents are undefined.
    #[doc(alias = "MPI_Wait")]
    pub fn wait(mut self) -> Result<B, CollectiveError> {
        if !mem::replace(&mut self.done, true) {
            self.comm.shared.wait(self.ticket)?;
        }
        match self.buffers.take() {
            Some(buffers) => Ok(buffers),
            None => unreachable!("only this takes them, and it takes the request with it"),
        }
    }
}

impl<B: Owned> Drop for Request<'_, B> {
    fn drop(&mut self) {
        if let Some(buffers) = self.buffers.as_ref().filter(|_| !self.done) {
            self.comm.shared.abandon(self.ticket, KeepAlive::segments(buffers));
        }
    }
}

impl<B: Owned> fmt::Debug for Request<'_, B> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Request")
            .field("operation", &self.ticket.number())
            .field("done", &self.done)
            .finish_non_exhaustive()
    }
}

trait Erased {}

impl<B> Erased for B {}

/// Operations that run together: see [`Communicator::group`]. Their borrows last for `'g`, which
/// outlives the group.
pub struct Batch<'g> {
    comm: &'g Communicator,
    tickets: Vec<Ticket>,
    buffers: Vec<Box<dyn Erased + 'g>>,
    /// Invariant in `'g`.
    borrowed: PhantomData<&'g mut &'g ()>,
}

impl<'g> Batch<'g> {
    pub(super) fn new(comm: &'g Communicator) -> Self {
        Self {
            comm,
            tickets: Vec::new(),
            buffers: Vec::new(),
            borrowed: PhantomData,
        }
    }

    /// Adds an operation of the same communicator. Operations begin in the order in which they are
    /// added, which is the same on all ranks, and run concurrently.
    ///
    /// # Errors
    /// As [`Call::wait`].
    pub fn add<B: 'g>(&mut self, call: Call<'_, B>) -> Result<(), CollectiveError> {
        if !core::ptr::eq(call.comm, self.comm) {
            return Err(CollectiveError::Misuse {
                collective: Collective::Barrier,
                what: "a group is of one communicator, and this operation is another's".to_owned(),
            });
        }
        self.tickets.push(self.comm.shared.begin(call.spec?, &call.settings)?);
        self.buffers.push(Box::new(call.buffers));
        Ok(())
    }

    pub(super) fn wait(&mut self) -> Result<(), CollectiveError> {
        let mut result = Ok(());
        for ticket in self.tickets.drain(..) {
            let one = self.comm.shared.wait(ticket);
            result = result.and(one);
        }
        result
    }
}

impl Drop for Batch<'_> {
    fn drop(&mut self) {
        if !self.tickets.is_empty() {
            self.comm
                .shared
                .abort_local("a thread panicked while operations of its own were under way");
        }
    }
}

impl fmt::Debug for Batch<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Batch")
            .field("operations", &self.tickets.len())
            .finish_non_exhaustive()
    }
}
