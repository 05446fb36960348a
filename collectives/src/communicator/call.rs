//! An operation that is about to be done: how it is to be done is said by methods in a row, and then it is waited for, started, or put together with others.

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

/// The sum of what each rank's scalar makes of its contribution. The scalar is of the type that the elements accumulate in: `f32` for floats of 16 and 8 bits.
#[derive(Clone, Copy, PartialEq, Debug)]
pub struct PreMulSum<A: Accumulator>(pub A);

/// What reduces: a [`ReduceOp`], a [`PreMulSum`] with its scalar, or a [`UserOperator`].
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

/// How an operation is to be done.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) struct CallSettings {
    pub(super) deadline: Duration,
    pub(super) deterministic: bool,
    pub(super) forced: Overrides,
}

/// What is to be done.
#[derive(Debug)]
pub(super) struct OperationSpec {
    pub(super) collective: Collective,
    pub(super) root: Rank,
    pub(super) reduction: Reduction,
    pub(super) data: DataType,
    /// Elements of the whole of all-reduce, broadcast and reduce; of each rank's part of the others.
    pub(super) count: u64,
    /// Bytes, as choices count them.
    pub(super) bytes: u64,
    pub(super) parts: Option<Parts>,
    /// Of a message between two ranks: who the other is, and which end of it this is.
    pub(super) message: Option<(Rank, Direction)>,
    pub(super) input: BufferRef,
    pub(super) output: BufferRef,
}

impl OperationSpec {
    /// Whether no rank has an element, so that nobody has to wait for anybody: all say the same count.
    #[inline]
    pub(super) fn is_empty(&self) -> bool {
        self.count == 0 && self.parts.is_none() && self.message.is_none() && self.collective != Collective::Barrier
    }
}

/// What two operations are alike in that are done in the same way, and differ at most in where their data region.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) struct CacheKey {
    collective: Collective,
    root: Rank,
    op: ReduceOp,
    data: DataType,
    count: u64,
    /// Bytes from the input to the output; none where only one is there.
    input_to_output: Option<usize>,
    has_input: bool,
    has_output: bool,
    settings: CallSettings,
}

impl CacheKey {
    /// Of operations that have one: none whose parts have lengths of their own, whose input is changed before or whose operator is the user's, and no messages between two ranks.
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

/// An operation that is about to be done. Nothing happens before [`wait`](Self::wait), [`start`](Self::start), or that it is [added](super::Batch::add) to others.
///
/// Whatever decides how it is done is the same on all ranks: all that is said here but the deadline.
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

    /// How long it may take, on all ranks: if it does not end in that time, it fails on all of them, and says why. Else it is the communicator's [deadline](super::Options::deadline).
    ///
    /// Of a deadline of a second or more, the last part is for the members to agree on why; a shorter one may be exceeded by [`AGREEMENT_TIMEOUT`](crate::failure::AGREEMENT_TIMEOUT) where a member does not answer.
    pub fn deadline(mut self, deadline: Duration) -> Self {
        self.settings.deadline = deadline;
        self
    }

    /// By this algorithm; one that does not do it is an error.
    pub fn algorithm(mut self, algorithm: Algorithm) -> Self {
        self.settings.forced.algorithm = Some(algorithm);
        self
    }

    /// By this protocol.
    pub fn protocol(mut self, protocol: Protocol) -> Self {
        self.settings.forced.protocol = Some(protocol);
        self
    }

    /// On so many channels, as far as there are so many.
    pub fn channels(mut self, channels: u32) -> Self {
        self.settings.forced.channels = Some(channels.max(1));
        self
    }

    /// Cut into slices of so many bytes of a block.
    pub fn slice(mut self, bytes: u64) -> Self {
        self.settings.forced.slice_bytes = Some(bytes.max(1));
        self
    }

    /// In an order of reduction that does not depend on how the data is cut: the same bits whatever the slices, channels and protocol are. The algorithm, if
    /// none is named, is chosen by the number of ranks and the size class alone: the same in every run, though not always the quickest.
    pub fn deterministic(mut self) -> Self {
        self.settings.deterministic = true;
        self
    }

    /// Does it, and returns when it is done here: what this rank has_output is there, and what it has_input may be changed.
    ///
    /// # Errors
    /// [`CollectiveError::Failed`] within the deadline if it cannot be done; others if what was asked for makes no sense, and then nothing was begun.
    ///
    /// # Panics
    /// Where an operator of the user's does. The communicator has failed then.
    pub fn wait(self) -> Result<(), CollectiveError> {
        let Self {
            comm,
            spec,
            settings,
            buffers,
        } = self;
        let result = comm.shared.run(spec?, &settings);
        // Until here the operation has had them.
        drop(buffers);
        result
    }
}

impl<'c, B: Owned> Call<'c, B> {
    /// Begins it, and returns at once. The buffers come back from the [`Request`]. It has_output on while somebody waits for it, tests it or does something else with this communicator; with
    /// [`progress_thread`](super::Options::progress_thread), always.
    ///
    /// # Errors
    /// As [`wait`](Self::wait); operations begun before have failed too, if the communicator has.
    pub fn start(self) -> Result<Request<'c, B>, CollectiveError> {
        let ticket = self.comm.shared.begin(self.spec?, &self.settings)?;
        self.comm.shared.wake();
        Ok(Request {
            comm: self.comm,
            ticket,
            buffers: Some(self.buffers),
            done: false,
        })
    }
}

/// An operation under way, which has its buffers. One that is dropped goes on nevertheless: the other ranks count on it.
#[must_use = "what a request has is given back by `wait`"]
pub struct Request<'c, B: Owned> {
    comm: &'c Communicator,
    ticket: Ticket,
    buffers: Option<B>,
    done: bool,
}

impl<B: Owned> Request<'_, B> {
    /// Whether it is done: then [`wait`](Self::wait) returns at once. Drives the communicator a little. It waits only where the group has failed, until the members have agreed on why.
    ///
    /// # Errors
    /// [`CollectiveError::Failed`] if it cannot be done any more.
    pub fn test(&mut self) -> Result<bool, CollectiveError> {
        if !self.done {
            self.done = self.comm.shared.test(self.ticket)?;
        }
        Ok(self.done)
    }

    /// Waits until it is done, and has_input its buffers back.
    ///
    /// # Errors
    /// As [`Call::wait`]. The buffers are gone then: what is in them is of no use, and neither is the communicator.
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

/// What is only held.
trait Erased {}

impl<B> Erased for B {}

/// Operations that are done together: see [`Communicator::group`]. What they borrow is borrowed for `'g`, which is longer than the group lasts.
pub struct Batch<'g> {
    comm: &'g Communicator,
    tickets: Vec<Ticket>,
    /// What the operations have, which may be theirs.
    buffers: Vec<Box<dyn Erased + 'g>>,
    /// Neither longer nor shorter.
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

    /// Adds an operation of the same communicator. Operations are begun in the order in which they are added, which is the same on all ranks, and get on beside each other.
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

    /// Waits for all, also where one has failed.
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
            // Somebody panics, and what the operations borrow goes.
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
