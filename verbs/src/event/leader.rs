//! Many threads that wait for what comes from one source, of which one at a time, the *leader*, reads it for all.
//!
//! What is read is put into a record, and each waiter looks for its own there: nothing is lost to the wrong reader. The leader sleeps on the source, and records all that is
//! there before it gives up the lead; the others sleep until it does. While there is a leader nobody else reads from the source: it would go on sleeping for what is gone
//! again.

use std::time::{Duration, Instant};

use super::left_until;
use crate::sync::{self, Condvar, Mutex, MutexGuard};

/// What events are read from, into an `R`.
pub(super) trait EventSource<R> {
    type Error;

    /// Reads all the events that are there, without blocking. Says whether there were any, even if it failed then.
    fn read(&self, record: &mut R) -> (bool, Result<(), Self::Error>);

    /// Sleeps until there are events, or reading them would fail; until the deadline at most.
    fn sleep(&self, deadline: Option<Instant>) -> Result<(), Self::Error>;
}

/// The record, and who waits for it to grow.
#[derive(Default)]
pub(super) struct LeaderFollowers<R> {
    state: Mutex<State<R>>,
    /// The record has grown, or the lead is free.
    changed: Condvar,
    /// The same, for tasks.
    #[cfg(feature = "tokio")]
    task_notify: ::tokio::sync::Notify,
}

#[derive(Default)]
struct State<R> {
    record: R,
    /// Whether a thread sleeps on the source.
    has_leader: bool,
}

impl<R> LeaderFollowers<R> {
    /// Does something with the record, which others don't see meanwhile.
    pub(super) fn with<T>(&self, change: impl FnOnce(&mut R) -> T) -> T {
        change(&mut sync::lock(&self.state).record)
    }

    /// What tells tasks that the record has grown, or that the lead is free.
    #[cfg(feature = "tokio")]
    pub(super) fn task_notify(&self) -> &::tokio::sync::Notify {
        &self.task_notify
    }

    fn read<S: EventSource<R>>(&self, source: &S, state: &mut State<R>) -> Result<(), S::Error> {
        let (any, result) = source.read(&mut state.record);
        if any {
            self.notify_waiters();
        }
        result
    }

    fn notify_waiters(&self) {
        self.changed.notify_all();
        #[cfg(feature = "tokio")]
        self.task_notify.notify_waiters();
    }

    /// What `find` makes of the record, without blocking.
    pub(super) fn try_find<S: EventSource<R>, T>(
        &self,
        source: &S,
        find: &mut impl FnMut(&mut R) -> Option<T>,
    ) -> Result<Option<T>, S::Error> {
        let mut state = sync::lock(&self.state);
        let found = find(&mut state.record);
        if found.is_some() || state.has_leader {
            return Ok(found);
        }
        self.read(source, &mut state)?;
        Ok(find(&mut state.record))
    }

    /// Sleeps until `find` finds something in the record. `None` when the deadline came first.
    pub(super) fn wait<S: EventSource<R>, T>(
        &self,
        source: &S,
        deadline: Option<Instant>,
        mut find: impl FnMut(&mut R) -> Option<T>,
    ) -> Result<Option<T>, S::Error> {
        let mut state = sync::lock(&self.state);
        loop {
            if let Some(found) = find(&mut state.record) {
                return Ok(Some(found));
            }
            if !state.has_leader {
                self.read(source, &mut state)?;
                if let Some(found) = find(&mut state.record) {
                    return Ok(Some(found));
                }
            }
            let left = left_until(deadline);
            if left == Some(Duration::ZERO) {
                return Ok(None);
            }
            state = if state.has_leader {
                // Until the leader has read events or given up the lead.
                sync::wait(&self.changed, state, left)
            } else {
                self.lead(source, state, deadline)?
            };
        }
    }

    /// Sleeps until there are events, and reads them.
    fn lead<'a, S: EventSource<R>>(
        &'a self,
        source: &S,
        mut state: MutexGuard<'a, State<R>>,
        deadline: Option<Instant>,
    ) -> Result<MutexGuard<'a, State<R>>, S::Error> {
        state.has_leader = true;
        drop(state);
        let slept = source.sleep(deadline);
        let mut state = sync::lock(&self.state);
        state.has_leader = false;
        let read = self.read(source, &mut state);
        // Whatever came of it, another must take the lead.
        self.notify_waiters();
        slept?;
        read.map(|()| state)
    }
}

#[cfg(all(test, doorbell_loom))]
mod model;
