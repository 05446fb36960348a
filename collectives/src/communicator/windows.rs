//! Windows of a communicator, and puts into those of the other ranks.

use std::sync::Arc;
use std::time::Duration;

use super::call::Request;
use super::data::{KeepAlive, Owned};
use super::{CollectiveError, Communicator};
use crate::executor::{Puts, Window};
use crate::memory::Segment;
use crate::plan::Collective;

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
