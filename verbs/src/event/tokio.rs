//! Waiting in tasks of a tokio runtime, whose I/O driver must be enabled.

use core::future::{Future, poll_fn};
use core::pin::pin;
use core::task::{Context, Poll, ready};
use std::io;

use ::tokio::io::Interest;
use ::tokio::io::unix::AsyncFd;

use super::channel::{CompletionChannel, CqId, Record};
use super::reader::{AsyncEvent, Events};
use crate::cq::{CompletionQueue, Completions, CqKind, Notify};
use crate::error::EventError;

/// A [`CompletionChannel`] for tasks, any number at once, each for its own queue, beside threads.
///
/// Every wait is cancel-safe: dropping it loses no event.
#[doc(alias = "ibv_comp_channel")]
#[derive(Debug)]
pub struct TokioChannel {
    fd: AsyncFd<CompletionChannel>,
}

impl TokioChannel {
    /// Registers `channel` with the current task's runtime.
    ///
    /// # Errors
    /// When the runtime refuses the descriptor: of a channel that is registered already, say.
    ///
    /// # Panics
    /// Outside a runtime, or in one whose I/O is not enabled.
    pub fn new(channel: CompletionChannel) -> io::Result<Self> {
        // SAFETY: the descriptor stays as long as the channel handle, which the AsyncFd owns.
        let fd = unsafe { AsyncFd::register_with_interest(channel, Interest::READABLE) }?;
        Ok(Self { fd })
    }

    /// The channel itself, to create completion queues on.
    pub fn channel(&self) -> &CompletionChannel {
        self.fd.get_ref()
    }

    /// The next queue that has an event: see [`CompletionChannel::wait`].
    ///
    /// # Errors
    /// When the channel cannot be read: the device is gone.
    #[doc(alias = "ibv_get_cq_event")]
    pub async fn wait(&self) -> Result<CqId, EventError> {
        self.find(Record::next).await
    }

    /// The completions of `cq`, once there are any: the async form of [`CompletionQueue::wait`].
    ///
    /// # Errors
    /// When `cq` is not on this channel, cannot be armed or polled, or the channel cannot be read.
    #[doc(alias("ibv_req_notify_cq", "ibv_get_cq_event"))]
    pub async fn completions<'q, Q: CqKind>(
        &self,
        cq: &'q mut CompletionQueue<Q>,
        notify: Notify,
    ) -> Result<Completions<'q, Q>, EventError> {
        let channel = self.channel();
        if !cq.is_on(channel) {
            return Err(EventError::ForeignChannel);
        }
        while !cq.poll_ready()? {
            let seen = channel.inner().event_count(cq.id());
            cq.arm(notify)?;
            if cq.poll_ready()? {
                break;
            }
            let id = cq.id();
            self.find(|record| record.take_event_since(id, seen)).await?;
        }
        Ok(cq.poll()?)
    }

    /// Takes all events of the channel, for a future written by hand: ready if there were any.
    ///
    /// For a channel that one task waits on: the last caller's waker replaces the others'. As with
    /// [`CompletionQueue::arm`], poll the queues after arming and before waiting.
    ///
    /// # Errors
    /// When the channel cannot be read: the device is gone.
    pub fn poll_events(&self, cx: &mut Context<'_>) -> Poll<Result<(), EventError>> {
        let inner = self.channel().inner();
        loop {
            if inner.try_find(&mut Record::next)?.is_some() {
                while inner.try_find(&mut Record::next)?.is_some() {}
                return Poll::Ready(Ok(()));
            }
            let mut guard = ready!(self.fd.poll_read_ready(cx)).map_err(|error| inner.failed(error))?;
            guard.clear_ready();
            // An event before that is read now, a later one sets it again.
        }
    }

    async fn find<T>(&self, mut find: impl FnMut(&mut Record) -> Option<T>) -> Result<T, EventError> {
        let inner = self.channel().inner();
        loop {
            // Before the record is read: a notification after that wakes the task.
            let mut notified = pin!(inner.waiters.task_notify().notified());
            notified.as_mut().enable();
            if let Some(found) = inner.try_find(&mut find)? {
                return Ok(found);
            }
            let mut readable = pin!(self.fd.readable());
            let woken = poll_fn(|cx| {
                if notified.as_mut().poll(cx).is_ready() {
                    return Poll::Ready(Ok(()));
                }
                // Cleared before the descriptor is drained: a later event sets it again.
                readable.as_mut().poll(cx).map_ok(|mut guard| guard.clear_ready())
            });
            woken.await.map_err(|error| inner.failed(error))?;
        }
    }
}

/// [`Events`] that a task waits for.
#[doc(alias = "ibv_async_event")]
#[derive(Debug)]
pub struct TokioEvents {
    fd: AsyncFd<Events>,
}

impl TokioEvents {
    /// Registers `events` with the current task's runtime.
    ///
    /// # Errors
    /// When the runtime refuses the descriptor.
    ///
    /// # Panics
    /// Outside a runtime, or in one whose I/O is not enabled.
    pub fn new(events: Events) -> io::Result<Self> {
        // SAFETY: the AsyncFd owns the reader, which holds the context, which keeps the descriptor.
        let fd = unsafe { AsyncFd::register_with_interest(events, Interest::READABLE) }?;
        Ok(Self { fd })
    }

    /// The next event, once there is one. Cancel-safe: dropping it loses no event.
    ///
    /// # Errors
    /// When events cannot be read: the device is gone.
    #[doc(alias = "ibv_get_async_event")]
    pub async fn next(&mut self) -> Result<AsyncEvent, EventError> {
        loop {
            if let Some(event) = self.fd.get_mut().try_next()? {
                return Ok(event);
            }
            let ready = self.fd.readable().await.map(|mut guard| guard.clear_ready());
            ready.map_err(|error| self.fd.get_ref().failed(error))?;
            // An event before the readiness was cleared is read now, a later one sets it again.
        }
    }
}
