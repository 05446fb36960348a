//! How tasks wait for the events of a connection.

use std::io;
use std::sync::{Arc, Mutex, PoisonError};
use std::task::{Context, Poll, Wake, Waker, ready};

use doorbell_verbs::{CompletionQueue, EventError, Notify, TokioChannel};

use crate::peer::Peer;

/// Tasks that wait for the same connection, all woken at once: a descriptor keeps one waker.
#[derive(Debug, Default)]
pub(crate) struct Waiters {
    wakers: Mutex<Vec<Waker>>,
}

impl Waiters {
    pub(crate) fn add(&self, waker: &Waker) {
        let mut wakers = self.lock();
        if !wakers.iter().any(|known| known.will_wake(waker)) {
            wakers.push(waker.clone());
        }
    }

    pub(crate) fn wake_all(&self) {
        let wakers = std::mem::take(&mut *self.lock());
        for waker in wakers {
            waker.wake();
        }
    }

    fn lock(&self) -> std::sync::MutexGuard<'_, Vec<Waker>> {
        // A waker's clone that panics leaves the list as it was.
        self.wakers.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Wake for Waiters {
    fn wake(self: Arc<Self>) {
        self.wake_all();
    }

    fn wake_by_ref(self: &Arc<Self>) {
        self.wake_all();
    }
}

/// The descriptors of a connection: of its completion queue, and of the TCP connection by which it
/// was made, whose end means that the peer is gone.
#[derive(Debug)]
pub(crate) struct EventSource {
    channel: TokioChannel,
    peer: Peer,
    waiters: Arc<Waiters>,
    /// Of `waiters`, for the descriptors.
    all: Waker,
    /// An event comes as soon as there is a completion.
    armed: bool,
    /// Which has been returned: what its device still retries waits for completions alone.
    peer_is_gone: bool,
}

/// What ends a sleep.
#[derive(Debug)]
pub(crate) enum Event {
    /// There may be completions.
    Completions,
    /// The peer has said so over TCP.
    Byte(u8),
    /// It has closed the TCP connection, or its host is gone.
    PeerGone(io::Error),
    /// The device is gone.
    Device(EventError),
}

impl EventSource {
    pub(crate) fn new(channel: TokioChannel, peer: Peer, waiters: Arc<Waiters>) -> Self {
        Self {
            channel,
            peer,
            all: Waker::from(Arc::clone(&waiters)),
            waiters,
            armed: false,
            peer_is_gone: false,
        }
    }

    pub(crate) fn waiters(&self) -> &Waiters {
        &self.waiters
    }

    /// Waits for an event, which wakes the registered tasks. `cq` has just been polled, and was
    /// empty; when this arms it, it must be polled again: the event is
    /// [`Completions`](Event::Completions) at once.
    pub(crate) fn poll(&mut self, cq: &mut CompletionQueue) -> Poll<Event> {
        if !self.armed {
            self.armed = true;
            return Poll::Ready(match cq.arm(Notify::Any) {
                // What came before raises no event.
                Ok(()) => Event::Completions,
                Err(error) => Event::Device(error),
            });
        }
        let mut all = Context::from_waker(&self.all);
        if let Poll::Ready(events) = self.channel.poll_events(&mut all) {
            self.armed = false;
            // One of those that still wait arms again.
            self.waiters.wake_all();
            return Poll::Ready(events.map_or_else(Event::Device, |()| Event::Completions));
        }
        if self.peer_is_gone {
            return Poll::Pending;
        }
        let event = ready!(self.peer.poll(&mut all));
        self.peer_is_gone = matches!(event, Event::PeerGone(_));
        Poll::Ready(event)
    }

    pub(crate) fn peer(&self) -> &Peer {
        &self.peer
    }
}
