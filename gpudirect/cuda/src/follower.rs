//! Work in streams of others, which may be gone before it is done.

use std::sync::Arc;

use parking_lot::Mutex;

use crate::context::Context;
use crate::error::Error;
use crate::event::{Event, EventInner};

/// Knows how far the work in [borrowed](crate::Stream::borrow_raw) streams is, by the event of its
/// last [end](crate::Stream::record_end): of work that runs in order, whatever the streams. It has
/// no stream of its own, as a wait in one would hold up other streams of its hardware queue.
#[derive(Clone)]
pub struct Follower(Arc<FollowerInner>);

pub(crate) struct FollowerInner {
    context: Context,
    last: Mutex<Option<Event>>,
}

impl Follower {
    /// One that has followed nothing yet.
    #[must_use]
    pub fn new(context: &Context) -> Self {
        Self(Arc::new(FollowerInner {
            context: context.clone(),
            last: Mutex::default(),
        }))
    }

    /// The context of the streams.
    #[must_use]
    pub fn context(&self) -> &Context {
        &self.0.context
    }

    /// Whether all work is done.
    ///
    /// # Errors
    /// [`Error::Lost`] if work has failed, or another driver error.
    pub fn is_idle(&self) -> Result<bool, Error> {
        self.0.last.lock().as_ref().map_or(Ok(true), Event::is_done)
    }

    /// Waits for all work, and frees resources whose release was deferred until then.
    ///
    /// # Errors
    /// [`Error::Lost`] if work has failed, or another driver error.
    pub fn synchronize(&self) -> Result<(), Error> {
        self.0.synchronize()?;
        self.0.context.reap();
        Ok(())
    }

    pub(crate) fn follow(&self, end: &Event) {
        *self.0.last.lock() = Some(end.clone());
    }

    pub(crate) fn inner(&self) -> &Arc<FollowerInner> {
        &self.0
    }
}

impl FollowerInner {
    pub(crate) fn synchronize(&self) -> Result<(), Error> {
        let last = self.last.lock().clone();
        last.map_or(Ok(()), |last| last.synchronize())
    }

    /// Whether its work is known to be over; failed work is.
    pub(crate) fn is_idle(&self) -> bool {
        self.pending().is_none()
    }

    /// The event of the last work, unless it is over.
    pub(crate) fn pending(&self) -> Option<Arc<EventInner>> {
        let last = self.last.lock().as_ref().map(|last| Arc::clone(last.inner()))?;
        let Ok(_entered) = self.context.enter() else {
            return Some(last);
        };
        (!last.is_complete()).then_some(last)
    }
}

debug_fields!(Follower, self, device = self.0.context.device());
