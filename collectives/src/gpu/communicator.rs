//! The communicator of ranks with GPUs: stream-ordered collectives.

mod end;
mod query;

use core::fmt;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Instant;

use doorbell_cuda::collective::CollectiveKernels;
use doorbell_cuda::{CaptureMode, Context, Event, Graph, Memory, OwnedSpan, Shareable, Stream, StreamOrder, Turn};

use super::agree::{Agreed, agree};
use super::call::{Checked, GpuCall};
use super::choice::{self, Choice};
use super::copies::{Copies, Operation};
use super::error::GpuError;
use super::group::{self, Group};
use super::kernels::Kernels;
use super::options::{Executor, GpuOptions};
use super::peers::{Mapped, Peers};
use super::sharing::Sharing;
use super::split::{self, SideStream};
use super::staged::Staged;
use super::types;
use super::watch::Watchdog;
use crate::communicator::{Communicator, StagedOperation};
use crate::executor::Direction;
use crate::plan::Collective;
use crate::reference::Case;
use crate::types::ReduceOp;

/// One rank of a group that performs collectives on GPU memory.
///
/// Operations are enqueued on any stream and return at once. All ranks call the same operations in
/// the same order, with the same counts, operators and settings, and with equivalent memory: in
/// place on all ranks or on none, and [registered](Self::register) on all or on none. A
/// [group](Self::group) of sends and receives is called by the ranks that have messages in it.
///
/// Operations can be captured into a graph, by [`capture`](Self::capture) or otherwise, on all
/// ranks. A launch counts as the captured operations: all ranks launch in the same order, also with
/// respect to operations that are enqueued directly.
///
/// Failures are reported by the next call, or [`check`](Self::check). When a rank is gone or has
/// aborted, stream waits are released on all other ranks: results are invalid, GPUs remain usable.
#[doc(alias = "ncclComm_t")]
pub struct GpuCommunicator {
    // Declared first: the watchdog runs until the other fields are dropped.
    watchdog: Watchdog,
    state: Mutex<State>,
    path: OperationPath,
    staged: Staged,
    comm: Arc<Communicator>,
    context: Context,
    options: GpuOptions,
    sharing: Sharing,
    /// Of a context that another communicator may have given, and so dropped when work is done.
    kernels: Option<Arc<CollectiveKernels>>,
}

enum OperationPath {
    Direct(Arc<Peers>),
    /// Through host memory, and why.
    Staged(String),
}

struct State {
    order: StreamOrder,
    copies: Option<Copies>,
    kernels: Option<Kernels>,
    side: Option<SideStream>,
    registered: Vec<Registered>,
}

impl State {
    fn new(context: &Context) -> Result<Self, GpuError> {
        Ok(Self {
            order: StreamOrder::new(context)?,
            copies: None,
            kernels: None,
            side: None,
            registered: Vec::new(),
        })
    }

    /// Memory shared by IPC handle, which other ranks may still have open. All else is released.
    fn ipc_shared(self) -> Vec<OwnedSpan> {
        let ipc_shared = self
            .registered
            .into_iter()
            .filter(|registered| registered.mapped.is_ipc_shared());
        ipc_shared.map(|registered| registered.own).collect()
    }
}

struct Registered {
    own: OwnedSpan,
    mapped: Mapped,
}

impl GpuCommunicator {
    /// Creates a rank with a GPU. Collective: all ranks call it at the same time; those without a
    /// GPU call [`Communicator::without_gpu`].
    ///
    /// # Errors
    /// If a rank does not arrive, or the driver refuses something. Missing peer access between GPUs
    /// is not an error: see [`staged_reason`](Self::staged_reason).
    #[doc(alias = "ncclCommInitRank")]
    pub fn new(comm: Communicator, context: &Context, options: GpuOptions) -> Result<Self, GpuError> {
        let agreed = agree(&comm, options, Some(context))?;
        let sizes = agreed.sizes;
        let met =
            comm.with_exchange(|group| Ok(Peers::connect(group.control_mut(), comm.rank(), Some(context), sizes)))??;
        let path = match met {
            Err(reason) => OperationPath::Staged(reason),
            Ok(_) if agreed.options.executor == Some(Executor::Staged) => {
                OperationPath::Staged("the options request it".to_owned())
            }
            Ok(peers) => OperationPath::Direct(Arc::new(peers)),
        };
        let comm = Arc::new(comm);
        Self::with(&comm, context, agreed, path)
            // The others have completed the exchange, and would wait until the deadline.
            .inspect_err(|error| comm.abort(&format!("it cannot make its communicator of GPUs: {error}")))
    }

    fn with(
        comm: &Arc<Communicator>,
        context: &Context,
        agreed: Agreed,
        path: OperationPath,
    ) -> Result<Self, GpuError> {
        let comm = Arc::clone(comm);
        let Agreed { options, sharing, .. } = agreed;
        let mut state = State::new(context)?;
        let (mut words, mut kernels) = (None, None);
        if let OperationPath::Direct(peers) = &path {
            let kernels = kernels.insert(CollectiveKernels::of(context));
            if choice::reduces_unregistered_by_copies(&options) || sharing.is_time_sliced {
                kernels.reducer().prepare_all()?;
            }
            state.copies = Some(Copies::new(kernels, Arc::clone(peers), options.copiers.unwrap_or(1))?);
            state.kernels = Some(Kernels::new(kernels, Arc::clone(peers), &options, &sharing)?);
            state.side = Some(SideStream::new(context)?);
            words = Some(Arc::clone(peers));
        }
        let staged = Staged::new(&comm, context)?;
        Ok(Self {
            watchdog: Watchdog::new(&comm, context, words)?,
            state: Mutex::new(state),
            path,
            staged,
            comm,
            context: context.clone(),
            options,
            sharing,
            kernels,
        })
    }

    /// The underlying communicator, for operations on host memory. These are unordered with stream
    /// operations, so all ranks must call both in one order, without overlap.
    #[must_use]
    pub fn host(&self) -> &Communicator {
        &self.comm
    }

    /// Whether the communicator has failed: the error that the next operation would return.
    ///
    /// # Errors
    /// If a rank is gone or has aborted, an operation has exceeded its deadline, or the host's part
    /// of one has failed.
    #[doc(alias = "ncclCommGetAsyncError")]
    pub fn check(&self) -> Result<(), GpuError> {
        if let Some(error) = self.staged.error() {
            return Err(error);
        }
        if self.comm.has_failed() {
            let error = self.comm.failure_error();
            // Not by the watchdog alone: the program may end as soon as it learns of the failure.
            if let OperationPath::Direct(peers) = &self.path {
                peers.pages().stop_gone(&self.comm.dead());
            }
            return Err(error.into());
        }
        Ok(())
    }

    /// Fails all operations on all ranks and releases stream waits. See [`Communicator::abort`].
    #[doc(alias = "ncclCommAbort")]
    pub fn abort(&self, reason: &str) {
        self.comm.abort(reason);
    }

    /// Registers memory with the other ranks, which then store results in it directly. Collective:
    /// each rank registers memory of the same length. (Gather, scatter and reduce do not use it.)
    ///
    /// The memory may be [`DeviceMemory`](doorbell_cuda::DeviceMemory), or allocated elsewhere such
    /// as PyTorch's ([`Foreign`](doorbell_cuda::Foreign)). Memory that cannot be shared by
    /// descriptor (from `cudaMalloc`) is kept until all ranks have called
    /// [`deregister`](Self::deregister) or [`destroy`](Self::destroy); after a drop without either,
    /// the caller must keep it until the others have done so too. It can be shared with other
    /// processes only.
    ///
    /// An output in registered memory is at the same offset of the same registration on all ranks.
    ///
    /// # Errors
    /// [`GpuError::NotRegistered`] on all ranks, if one of them cannot.
    #[doc(alias = "ncclCommRegister")]
    pub fn register(&self, memory: &impl Shareable) -> Result<(), GpuError> {
        let OperationPath::Direct(peers) = &self.path else {
            return Ok(());
        };
        if let Some(kernels) = self
            .kernels
            .as_ref()
            .filter(|_| choice::reduces_registered_by_copies(self.size()))
        {
            let loaded = kernels.reducer().prepare_all();
            // The others would wait for this rank until the deadline.
            loaded.inspect_err(|error| self.abort(&format!("it cannot load kernels: {error}")))?;
        }
        let mapped = self.map(peers, memory)?.map_err(GpuError::NotRegistered)?;
        if mapped.memories().iter().any(|other| other.len() != memory.len()) {
            return Err(GpuError::NotRegistered(
                "it is not equally long on all ranks".to_owned(),
            ));
        }
        self.state().registered.push(Registered {
            own: memory.all().keep(),
            mapped,
        });
        Ok(())
    }

    /// Maps the memory of each rank for all others. Collective; the inner `Err` is the reason why
    /// not, the same on all ranks.
    pub(super) fn map(&self, peers: &Peers, memory: &impl Shareable) -> Result<Result<Mapped, String>, GpuError> {
        self.comm
            .with_exchange(|group| Ok(peers.map(group.control_mut(), memory)))?
    }

    /// Whether registered memory is shared by IPC handle by any rank, so that the ranks have to
    /// deregister it together: the same on all.
    #[must_use]
    pub fn is_ipc_shared(&self, memory: &impl Memory) -> bool {
        let start = memory.all().device_ptr();
        let state = self.state();
        let mut registered = state.registered.iter();
        registered.any(|registered| registered.own.device_ptr() == start && registered.mapped.is_ipc_shared())
    }

    /// Deregisters memory. All ranks call it between the same operations; for memory
    /// [shared by IPC handle](Self::is_ipc_shared) they do it together, and it returns once earlier
    /// operations are done and all ranks have closed it, or the communicator has failed; graphs
    /// that use it must be dropped first.
    #[doc(alias = "ncclCommDeregister")]
    pub fn deregister(&self, memory: &impl Memory) {
        let start = memory.all().device_ptr();
        let mut state = self.state();
        let Some(at) = state
            .registered
            .iter()
            .position(|registered| registered.own.device_ptr() == start)
        else {
            return;
        };
        let Registered { own, mapped } = state.registered.remove(at);
        if !mapped.is_ipc_shared() {
            return;
        }
        if let Some(end) = state.order.last_end() {
            let _ = end.synchronize();
        }
        drop((state, mapped));
        self.context.reap();
        let _ = self.comm.exchange(&[]);
        drop(own);
    }

    /// Captures the operations that `work` enqueues on `stream` into a graph. Collective: all ranks
    /// capture the same operations. Unlike in another capture of the stream, the copy engines have
    /// their part, whose streams are captured with it.
    ///
    /// # Errors
    /// The error of `work`, the driver's error for the capture, or [`GpuError::Refused`] if
    /// operations are staged through the host.
    pub fn capture(&self, stream: &Stream, work: impl FnOnce() -> Result<(), GpuError>) -> Result<Graph, GpuError> {
        if let OperationPath::Staged(reason) = &self.path {
            return Err(not_capturable(reason));
        }
        let others: Vec<Stream> = {
            let state = self.state();
            let copies = state.copies.iter().flat_map(Copies::streams);
            let side = state.side.iter().map(SideStream::stream);
            copies.chain(side).cloned().collect()
        };
        let others: Vec<&Stream> = others.iter().collect();
        let mut failed = None;
        let graph = stream.capture(CaptureMode::Relaxed, &others, || {
            match work() {
                Err(GpuError::Driver(error)) => return Err(error),
                Err(error) => failed = Some(error),
                Ok(()) => {}
            }
            Ok(())
        });
        match failed {
            Some(error) => Err(error),
            None => Ok(graph?),
        }
    }

    fn state(&self) -> MutexGuard<'_, State> {
        // A panic while it is locked leaves it in the state before a step.
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Enqueues an operation on `stream`.
    ///
    /// # Errors
    /// Misuse, or an earlier failure. Later failures are reported by the next call. If the driver
    /// refuses this rank's part outside of a capture, the communicator fails on all ranks.
    pub fn enqueue(&self, call: &GpuCall<'_>, stream: &Stream) -> Result<(), GpuError> {
        self.check()?;
        let case = Case {
            collective: call.collective,
            ranks: self.size(),
            root: call.root,
            count: call.count as u64,
        };
        let checked = Checked::new(call, &case, self.rank(), self.allows_overlap())?;
        if call.count == 0 && call.collective != Collective::Barrier {
            return Ok(());
        }
        let staged = || StagedOperation::Collective {
            collective: call.collective,
            root: call.root,
            reduction: call.reduction.clone(),
            data: call.data,
            count: call.count as u64,
        };
        // Copy engines do not scale.
        let stages = self.stages_some() && checked.op == ReduceOp::PreMulSum;
        self.refuse_capture(stages, stream)?;
        self.enqueue_in_order(call.collective, stream, |state, turn| match &self.path {
            OperationPath::Direct(_) if !stages => self.enqueue_direct((state, turn), &checked, call, stream),
            OperationPath::Direct(_) | OperationPath::Staged(_) => {
                self.staged.run(staged(), checked.input, checked.output, stream)
            }
        })
    }

    pub(super) fn allows_overlap(&self) -> bool {
        self.options.allows_overlap
    }

    /// Enqueues a group on `stream`; `staged` is the host's part of it.
    pub(super) fn enqueue_group(
        &self,
        group: Group<'_>,
        staged: impl FnOnce() -> StagedOperation,
        stream: &Stream,
    ) -> Result<(), GpuError> {
        let stages = self.stages_groups();
        self.refuse_capture(stages, stream)?;
        self.enqueue_in_order(group.collective(), stream, |state, _| {
            match (&self.path, &state.kernels) {
                (OperationPath::Direct(_), Some(kernels)) if !stages => kernels.exchange(&group, stream),
                (OperationPath::Direct(_), None) => Ok(()),
                (OperationPath::Direct(_) | OperationPath::Staged(_), _) => {
                    let [given, got] = [Direction::Send, Direction::Receive].map(|direction| group.all(direction));
                    self.staged.run(staged(), given, got, stream)
                }
            }
        })
    }

    /// Has a partly enqueued operation waited for on drop, before the resources are freed.
    fn watch_partial_operation(&self, stream: &Stream) {
        let state = self.state();
        let copiers = state.copies.as_ref().map_or(&[][..], Copies::streams);
        let ends = copiers.iter().chain([stream]).filter_map(|stream| {
            let end = Event::new(&self.context).ok()?;
            stream.record_end(&end).ok().map(|()| end)
        });
        self.watchdog.watch(ends, Instant::now() + self.comm.options().deadline);
    }

    /// Enqueues kernels that are no collective of a plan; `what` is their name in errors.
    pub(super) fn enqueue_kernels(
        &self,
        what: &str,
        stream: &Stream,
        work: impl FnOnce() -> Result<(), GpuError>,
    ) -> Result<(), GpuError> {
        self.check()?;
        self.enqueue_in_order(what, stream, |_, _| work())
    }

    /// Enqueues the `work` of an operation. If the driver refuses it outside of a capture, the
    /// communicator fails: the others' parts would wait for this one until the deadline.
    fn enqueue_in_order(
        &self,
        what: impl fmt::Display,
        stream: &Stream,
        work: impl FnOnce(&mut State, &Turn) -> Result<(), GpuError>,
    ) -> Result<(), GpuError> {
        let done = self.enqueue_behind_last(stream, work);
        if let Err(error @ (GpuError::Driver(_) | GpuError::Reduce(_) | GpuError::Thread(_))) = &done
            && !stream.is_capturing().unwrap_or(false)
        {
            self.abort(&format!("it cannot do its part of an operation ({what}): {error}"));
            self.watch_partial_operation(stream);
        }
        done
    }

    /// Of an operation that goes through the host since contexts are time-sliced.
    fn refuse_capture(&self, stages: bool, stream: &Stream) -> Result<(), GpuError> {
        match stages && stream.is_capturing()? {
            true => Err(not_capturable(
                "the ranks of a GPU are time-sliced, as there is no MPS daemon",
            )),
            false => Ok(()),
        }
    }

    fn enqueue_behind_last(
        &self,
        stream: &Stream,
        work: impl FnOnce(&mut State, &Turn) -> Result<(), GpuError>,
    ) -> Result<(), GpuError> {
        if let OperationPath::Staged(reason) = &self.path
            && stream.is_capturing()?
        {
            return Err(not_capturable(reason));
        }
        let mut state = self.state();
        let turn = state.order.begin(stream)?;
        work(&mut state, &turn)?;
        if let Some(end) = state.order.end(turn, stream)? {
            self.watchdog
                .watch([end], Instant::now() + self.comm.options().deadline);
        }
        Ok(())
    }

    fn enqueue_direct(
        &self,
        (state, turn): (&mut State, &Turn),
        checked: &Checked<'_>,
        call: &GpuCall<'_>,
        stream: &Stream,
    ) -> Result<(), GpuError> {
        let State {
            copies: Some(copies),
            kernels: Some(kernels),
            side: Some(side),
            registered,
            ..
        } = state
        else {
            return Ok(());
        };
        // For gather and reduce the other ranks do not know the root's output address, and for
        // scatter the offsets differ.
        let is_alike = !matches!(
            call.collective,
            Collective::Gather | Collective::Reduce | Collective::Scatter
        );
        let registered = checked.output.filter(|_| is_alike).and_then(|output| {
            let start = output.device_ptr().0;
            registered.iter().find_map(|registered| {
                let from = start.checked_sub(registered.own.device_ptr().0)? as usize;
                (from + output.len() <= registered.own.len()).then_some((&registered.mapped, from))
            })
        });
        let is_registered = registered.is_some();
        // Not in a capture of the program: they would be in it until its end. And copy engines do
        // not scale.
        let has_streams = turn.can_span(side.stream()) && checked.op != ReduceOp::PreMulSum;
        let given = (call.data, call.count, is_registered);
        let ranks = (self.size(), &self.sharing);
        let choice = Choice::new(&self.options, ranks, call.collective, given, has_streams);
        let operation = |algorithm, slice| Operation {
            collective: call.collective,
            algorithm,
            root: call.root,
            data: call.data,
            count: call.count as u64,
            operator: types::operator(checked.op, self.size()),
            input: checked.input,
            output: checked.output,
            in_place: checked.in_place,
            registered,
            slice,
        };
        let reduction = (checked.op, checked.scalar);
        match choice {
            Choice::Small(cut) => kernels.run_short(call, (checked.input, checked.output), reduction, cut, stream),
            Choice::Kernel(algorithm, cut) => kernels.run(&operation(algorithm, 0), reduction, cut, stream),
            Choice::Messages => {
                let messages = group::messages(call, (self.rank(), self.size()), checked)?;
                kernels.exchange(&Group::of_collective(call.collective, self.rank(), &messages), stream)
            }
            Choice::Copies(algorithm, slice) => copies.run(&operation(algorithm, slice), stream, has_streams),
            Choice::Split(at, (algorithm, slice), (beside_it, cut)) => {
                let (first, rest) = split::parts(&operation(algorithm, slice), at, beside_it)?;
                // A refusal comes before all work that waits for other ranks.
                copies.prepare(&first)?;
                side.run(
                    stream,
                    |side| kernels.run(&rest, reduction, cut, side),
                    || copies.run(&first, stream, true),
                )
            }
        }
    }
}

fn not_capturable(reason: &str) -> GpuError {
    GpuError::Refused {
        what: "an operation in which the host has a part, in a graph",
        reason: format!("the host cannot be captured, and has a part because {reason}"),
    }
}

debug_fields!(
    GpuCommunicator,
    self,
    rank = self.rank(),
    ranks = self.size(),
    device = self.context.device(),
    staged_reason = self.staged_reason()
);
