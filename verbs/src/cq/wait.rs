//! Sleeping until the queue has completions.

use std::time::Duration;

use doorbell_verbs_sys::inline;

use super::{CompletionQueue, Completions, CqKind};
use crate::error::{CompletionQueueError, EventError, check};
use crate::event::channel::{ChannelInner, CqId};
use crate::wait::Deadline;

/// Which completions raise an event on the channel (ibv_req_notify_cq(3); IBTA vol 1, 11.4.2.2).
#[doc(alias("ibv_req_notify_cq", "solicited_only"))]
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Notify {
    /// Every completion.
    #[default]
    Any,
    /// Solicited ones only: a receive whose message the peer sent as
    /// [`solicited`](crate::WorkRequest::solicited), and every failed completion (`solicited_only`).
    #[doc(alias = "solicited_only")]
    Solicited,
}

impl<Q: CqKind> CompletionQueue<Q> {
    /// Its identifier in events.
    #[must_use]
    pub fn id(&self) -> CqId {
        self.inner().id
    }

    /// Requests one event for the next completion (ibv_req_notify_cq(3), IBTA vol 1, 11.4.2.2).
    ///
    /// A completion that is already in the queue raises no event: poll after arming, and sleep only
    /// when that found nothing. [`wait`](Self::wait) does so. Arming for any completion includes
    /// solicited ones, and is not undone by arming for those.
    ///
    /// # Errors
    /// When it was created without a channel, or the device refuses.
    #[doc(alias = "ibv_req_notify_cq")]
    pub fn arm(&mut self, notify: Notify) -> Result<(), EventError> {
        self.channel()?;
        // SAFETY: the queue is live.
        let result = unsafe { inline::req_notify_cq(self.inner().raw, i32::from(notify == Notify::Solicited)) };
        check(result).map_err(|error| EventError::Arm {
            device: self.inner().context.name.clone(),
            error,
        })
    }

    /// Sleeps until there are completions, for [`poll`](Self::poll); returns none at `timeout`.
    ///
    /// No completion is missed: the queue is armed, then polled again, and only then waited for.
    /// Completions of a dropped queue pair also end the sleep: check the clock for deadlines.
    ///
    /// # Errors
    /// When it has [no channel](crate::Context::completion_queue_on), the device cannot be polled
    /// or the channel cannot be read any more.
    #[doc(alias("ibv_req_notify_cq", "ibv_get_cq_event", "ibv_ack_cq_events"))]
    pub fn wait(&mut self, timeout: impl Into<Option<Duration>>) -> Result<Completions<'_, Q>, EventError> {
        self.wait_for(Notify::Any, timeout)
    }

    /// As [`wait`](Self::wait), but only completions of the kind `notify` end the sleep. Those
    /// already in the queue are returned at once, of either kind.
    ///
    /// # Errors
    /// As for [`wait`](Self::wait).
    pub fn wait_for(
        &mut self,
        notify: Notify,
        timeout: impl Into<Option<Duration>>,
    ) -> Result<Completions<'_, Q>, EventError> {
        let deadline = Deadline::after(timeout);
        let id = self.id();
        while !self.poll_ready()? {
            // Before arming: an event from here on counts.
            let seen = self.channel()?.event_count(id);
            self.arm(notify)?;
            // A completion that came before arming raises no event.
            if self.poll_ready()? {
                break;
            }
            let event = self
                .channel()?
                .wait(deadline, |record| record.take_event_since(id, seen))?;
            if event.is_none() {
                break;
            }
            // An event of an earlier arming may be of completions polled since: repeat.
        }
        Ok(self.poll()?)
    }

    /// Polls until there are completions, and returns none at `timeout`: the lowest latency, at the
    /// cost of a processor. It needs no channel.
    ///
    /// # Errors
    /// When the device cannot be polled.
    pub fn busy_poll(
        &mut self,
        timeout: impl Into<Option<Duration>>,
    ) -> Result<Completions<'_, Q>, CompletionQueueError> {
        let deadline = Deadline::after(timeout);
        while !self.poll_ready()? && !deadline.has_passed() {}
        self.poll()
    }

    /// Whether the next poll has completions to yield without a call of the device.
    pub(crate) fn poll_ready(&mut self) -> Result<bool, CompletionQueueError> {
        Q::refill(&mut self.poller)?;
        Ok(Q::has_completions(&self.poller))
    }

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
