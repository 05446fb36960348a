//! One of the threads that wait for a source, the *leader*, reads it for all (leader/followers).
//!
//! Events go into a record, from which each waiter takes its own. The leader sleeps on the source,
//! and records all events before it releases the lead; the followers sleep until then. No other
//! thread reads the source: the leader would sleep for events that are already consumed.
//!
//! Proved by the models in `event/leader/model.rs`; for tasks by `verbs/tests/events.rs`.

use crate::sync::{self, Condvar, Mutex, MutexGuard};
use crate::wait::Deadline;

pub(super) trait EventSource<R> {
    type Error;

    /// Reads all available events without blocking. Whether there were any, even if it then failed.
    fn read(&self, record: &mut R) -> (bool, Result<(), Self::Error>);

    /// Sleeps until there are events, reading them would fail, or the deadline passes.
    fn sleep(&self, deadline: Deadline) -> Result<(), Self::Error>;
}

/// The record, and the threads and tasks that wait for it to grow.
#[derive(Default)]
pub(super) struct LeaderFollowers<R> {
    state: Mutex<State<R>>,
    /// Notified when the record has grown, or the lead is free.
    changed: Condvar,
    /// The same, for tasks.
    #[cfg(feature = "tokio")]
    task_notify: ::tokio::sync::Notify,
}

#[derive(Default)]
struct State<R> {
    record: R,
    has_leader: bool,
}

impl<R> LeaderFollowers<R> {
    pub(super) fn with<T>(&self, change: impl FnOnce(&mut R) -> T) -> T {
        change(&mut sync::lock(&self.state).record)
    }

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

    /// Applies `find` to the record, after reading available events, without blocking.
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

    /// Sleeps until `find` finds something in the record. `None` when the deadline passed first.
    pub(super) fn wait<S: EventSource<R>, T>(
        &self,
        source: &S,
        deadline: Deadline,
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
            let left = deadline.remaining();
            if left.is_zero() {
                return Ok(None);
            }
            state = if state.has_leader {
                sync::wait(&self.changed, state, left)
            } else {
                self.lead(source, state, deadline)?
            };
        }
    }

    fn lead<'a, S: EventSource<R>>(
        &'a self,
        source: &S,
        mut state: MutexGuard<'a, State<R>>,
        deadline: Deadline,
    ) -> Result<MutexGuard<'a, State<R>>, S::Error> {
        state.has_leader = true;
        drop(state);
        let slept = source.sleep(deadline);
        let mut state = sync::lock(&self.state);
        state.has_leader = false;
        let read = self.read(source, &mut state);
        // Whatever the result, another thread must take the lead.
        self.notify_waiters();
        slept?;
        read.map(|()| state)
    }
}

#[cfg(all(test, doorbell_loom))]
mod model;
