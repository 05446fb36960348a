//! Sleeping until the queue has something to poll.

use std::time::Duration;

use doorbell_verbs_sys::inline;

use super::{CompletionQueue, Completions, CqKind};
use crate::error::{CompletionQueueError, EventError, check};
use crate::event::channel::{ChannelInner, CqId};
use crate::event::deadline_of;

/// Which completions a channel is to tell of (ibv_req_notify_cq(3); IBTA vol 1, 11.4.2.2).
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Notify {
    /// Every one.
    #[default]
    Any,
    /// That of a receive whose message the peer sent as [`solicited`](crate::Request::solicited), and every failed one.
    Solicited,
}

impl<Q: CqKind> CompletionQueue<Q> {
    /// What names it in events.
    #[must_use]
    pub fn id(&self) -> CqId {
        self.inner().id
    }

    /// Has its channel told of the next completion, once (ibv_req_notify_cq(3), IBTA vol 1, 11.4.2.2).
    ///
    /// One that is in the queue already is not told of: poll after arming, and sleep only when that found nothing. [`wait`](Self::wait) does so.
    /// Arming for any completion includes solicited ones, and is not undone by arming for those.
    ///
    /// # Errors
    /// When it was made without a channel, or the device refuses.
    pub fn arm(&mut self, notify: Notify) -> Result<(), EventError> {
        self.channel()?;
        // SAFETY: the queue is live.
        let result = unsafe { inline::req_notify_cq(self.inner().raw, i32::from(notify == Notify::Solicited)) };
        check(result).map_err(|error| EventError::Arm {
            device: self.inner().context.name.clone(),
            error,
        })
    }

    /// The requests that have completed, as [`poll`](Self::poll) gives them; sleeps until there are any, or until `timeout`: then there are none. A `timeout` of
    /// `None` never comes.
    ///
    /// No completion is slept through: the queue is armed, then polled again, and only then waited for. Completions that belong to a queue pair dropped since
    /// end the sleep too, and are not among those given; so whoever waits until a time looks at the clock.
    ///
    /// # Errors
    /// When it was made without a channel ([`Context::completion_queue_on`](crate::Context::completion_queue_on) makes one with), the device cannot be polled or
    /// the channel not be read any more.
    pub fn wait(&mut self, timeout: impl Into<Option<Duration>>) -> Result<Completions<'_, Q>, EventError> {
        self.wait_for(Notify::Any, timeout)
    }

    /// As [`wait`](Self::wait), but completions of the kind `notify` alone end the sleep. Those that are there already are given at once, of whatever kind.
    ///
    /// # Errors
    /// As for [`wait`](Self::wait).
    pub fn wait_for(
        &mut self,
        notify: Notify,
        timeout: impl Into<Option<Duration>>,
    ) -> Result<Completions<'_, Q>, EventError> {
        let deadline = deadline_of(timeout.into());
        let id = self.id();
        while !self.found()? {
            // Before arming: an event from here on counts.
            let seen = self.channel()?.seen(id);
            self.arm(notify)?;
            // One that came before the queue was armed makes no event.
            if self.found()? {
                break;
            }
            let told = self.channel()?.wait(deadline, |record| record.told_since(id, seen))?;
            if told.is_none() {
                break;
            }
            // An event of an earlier arming may have found the queue polled since: once more.
        }
        Ok(self.poll()?)
    }

    /// Polls, and says whether the next poll has completions to yield without asking the device.
    pub(crate) fn found(&mut self) -> Result<bool, CompletionQueueError> {
        Q::look(&mut self.poller)?;
        Ok(Q::has_found(&self.poller))
    }

    /// Whether it was made on `channel`.
    #[cfg(feature = "tokio")]
    pub(crate) fn is_on(&self, channel: &crate::event::CompletionChannel) -> bool {
        let own = self.inner().channel.as_ref();
        own.is_some_and(|own| std::sync::Arc::ptr_eq(own, channel.inner()))
    }

    fn channel(&self) -> Result<&ChannelInner, EventError> {
        self.inner().channel.as_deref().ok_or_else(|| EventError::NoChannel {
            device: self.inner().context.name.clone(),
        })
    }
}
