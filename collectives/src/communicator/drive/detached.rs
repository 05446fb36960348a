//! Operations of callers that hold the lock of an interpreter: an attempt with it, and the rest
//! without. The attempt waits for no other thread, as that may wait for the interpreter.

use super::{AbortWaitOnPanic, Shared};
use crate::communicator::CollectiveError;
use crate::communicator::call::{CacheKey, CallSettings, OperationSpec};
use crate::executor::Ticket;

enum Attempt {
    NotBegun,
    Begun(Ticket),
    Done,
}

impl Shared {
    /// As `run`; all but the attempt is called by `detached`.
    #[inline]
    pub(in crate::communicator) fn run_detached(
        &self,
        spec: OperationSpec,
        settings: &CallSettings,
        detached: impl FnOnce(&mut (dyn FnMut() + Send)),
        mut between: impl FnMut() + Send,
    ) -> Result<(), CollectiveError> {
        let begun = match self.attempt(&spec, settings) {
            Attempt::Done => return Ok(()),
            Attempt::Begun(ticket) => Some(ticket),
            Attempt::NotBegun => None,
        };
        let (mut spec, mut result) = (Some(spec), None);
        let mut rest = || {
            if let Some(spec) = spec.take() {
                result = Some(match begun {
                    Some(ticket) => self.finish(self.lock(), ticket, &mut between),
                    None => self.run(spec, settings, &mut between),
                });
            }
        };
        let waiting = AbortWaitOnPanic(self);
        detached(&mut rest);
        // If `detached` has not: the operation may have begun.
        rest();
        drop(waiting);
        match result {
            Some(result) => result,
            None => unreachable!("the rest has run"),
        }
    }

    /// Runs an operation whose program is cached, if the lock is free.
    #[inline]
    fn attempt(&self, spec: &OperationSpec, settings: &CallSettings) -> Attempt {
        if self.background || spec.is_empty() {
            return Attempt::NotBegun;
        }
        let Some((cache_key, mut state)) = CacheKey::of(spec, settings).zip(self.state.try_lock().ok()) else {
            return Attempt::NotBegun;
        };
        match state.cached(&cache_key).filter(|_| !self.monitor.needs_attention()) {
            None => Attempt::NotBegun,
            Some(cached) => self
                .run_cached(&mut state, cached, spec)
                .map_or(Attempt::Done, Attempt::Begun),
        }
    }
}
