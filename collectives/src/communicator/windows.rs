//! Windows of a communicator, and puts into those of the other ranks.

use std::sync::Arc;
use std::time::Duration;

use super::call::Request;
use super::data::{KeepAlive, Owned};
use super::drive::Shared;
use super::{CollectiveError, Communicator};
use crate::algorithm::Algorithm;
use crate::executor::{EngineError, Operation, Puts, Ticket, Tuning, Window};
use crate::kernel::Function;
use crate::memory::Segment;
use crate::plan::Collective;
use crate::types::{DataType, Protocol, Rank, ReduceOp};

/// A put exchange in flight.
pub(crate) type PutRequest<'c> = Request<'c, Nothing>;

/// The operation itself keeps what it uses.
#[derive(Debug)]
pub(crate) struct Nothing;

impl KeepAlive for Nothing {
    fn segments(&self) -> [Option<Arc<Segment>>; 2] {
        [None, None]
    }
}

impl Owned for Nothing {}

impl Communicator {
    /// A window of `len` bytes on every rank. All ranks call it, with the same length.
    pub(crate) fn window(&self, len: usize) -> Result<Arc<Window>, CollectiveError> {
        let memory = self.shared.with(|state| state.engine.allocate_window(len))?;
        let addresses = self.exchange(&Window::address(&memory))?;
        let window = Window::new(memory, len, &addresses).map_err(|rank| CollectiveError::Misuse {
            collective: Collective::AllToAll,
            what: format!("rank {rank} has a window of another length than {len} bytes"),
        })?;
        Ok(Arc::new(window))
    }

    /// Registered memory to put from.
    pub(crate) fn segment(&self, bytes: usize) -> Result<Arc<Segment>, CollectiveError> {
        Ok(self.shared.with(|state| state.engine.allocate(bytes.max(1)))?)
    }

    /// Begins a put exchange: all ranks do, with the same number and credit needed.
    pub(crate) fn put(&self, puts: Puts, deadline: Duration) -> Result<PutRequest<'_>, CollectiveError> {
        let ticket = self.shared.put(puts, deadline)?;
        self.shared.wake();
        Ok(Request::of(self, ticket, Nothing))
    }
}

impl Shared {
    /// Submits a put exchange, and drives it until it would block.
    fn put(&self, puts: Puts, deadline: Duration) -> Result<Ticket, CollectiveError> {
        const COLLECTIVE: Collective = Collective::AllToAll;
        let mut lock = self.lock();
        let state = &mut *lock.state;
        if self.monitor.failed() || state.failed.is_some() {
            return Err(self.record_failure(state));
        }
        let plan = state.plan(Algorithm::FullMesh, COLLECTIVE, Rank(0))?;
        let (input, output) = puts.blocks();
        let operation = Operation {
            plan,
            function: Function::new(DataType::U8, ReduceOp::Sum, state.engine.ranks())?,
            count: 1,
            parts: None,
            input,
            output,
            scale: None,
            tuning: Tuning {
                protocol: Protocol::Simple,
                channels: 1,
                slice: usize::MAX,
            },
            deadline: Some(deadline),
        };
        // SAFETY: the blocks are of the window, which the operation keeps, and which nothing else
        // uses.
        let ticket = match unsafe { state.engine.submit_puts(operation, Arc::new(puts)) } {
            Ok(ticket) => ticket,
            Err(EngineError::Failed(_)) => return Err(self.record_failure(state)),
            Err(error) => return Err(error.into()),
        };
        self.monitor.begin(ticket.number(), COLLECTIVE);
        let mut idle = 0;
        while self.poll_once(state, &mut idle) && state.failed.is_none() {}
        Ok(ticket)
    }
}
