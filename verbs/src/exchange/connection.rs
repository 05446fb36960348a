//! A connected queue pair with all that it needs.

use core::ops::{Deref, DerefMut};
use core::time::Duration;
use std::os::fd::AsFd as _;

use nix::errno::Errno;
use nix::poll::{PollFd, PollFlags, poll};

use super::{Exchange, ExchangeError};
use crate::cq::CompletionQueue;
use crate::event::CompletionChannel;
use crate::memory::Buffer;
use crate::pd::ProtectionDomain;
use crate::qp::{QueuePair, QueuePairBuilder};
use crate::wait::Deadline;
use crate::wr::completion::{Completion, Success};
use crate::wr::status::CompletionError;

/// The depth of its queues, which are the builder's default.
const DEPTH: u32 = 128;

/// How long it polls before it sleeps: about what waking up takes.
const BUSY_POLL: Duration = Duration::from_micros(50);

/// An RC [`QueuePair`], to which it dereferences, that an [`Exchange`] has connected, with a
/// completion queue of its own: what a program has one of for each peer.
///
/// ```no_run
/// # use std::time::Duration;
/// # use doorbell_verbs::exchange::Listener;
/// # use doorbell_verbs::{Local, ProtectionDomain};
/// # const TIMEOUT: Duration = Duration::from_secs(10);
/// # fn example(pd: &ProtectionDomain) -> Result<(), Box<dyn std::error::Error>> {
/// // The peer: Exchange::connect("server:18516", TIMEOUT)?.connection(…)
/// let exchange = Listener::bind("0.0.0.0:18516")?.accept(TIMEOUT)?;
/// let inbox = pd.register(vec![0; 4096], Local)?;
/// let mut peer = exchange.connection(pd, |qp| qp.max_inline_data(64), [inbox], b"")?;
/// while let Some((_, message)) = peer.next_completion()? {
///     peer.receive(message)?;
///     peer.send_inline(b"received")?;
/// }
/// # Ok(())
/// # }
/// ```
#[derive(Debug)]
pub struct Connection {
    qp: QueuePair,
    cq: CompletionQueue,
    channel: CompletionChannel,
    exchange: Exchange,
    peer_data: Vec<u8>,
    send_depth: u32,
}

impl Exchange {
    /// Makes a queue pair with these options, whose queues have 128 entries each and whose requests
    /// are all signaled, posts `receives`, and connects it as [`pair`](Self::pair) does.
    ///
    /// # Errors
    /// When an object cannot be made or a receive not posted; as of [`pair`](Self::pair).
    pub fn connection(
        mut self,
        pd: &ProtectionDomain,
        options: impl FnOnce(QueuePairBuilder<'_>) -> QueuePairBuilder<'_>,
        receives: impl IntoIterator<Item = Buffer>,
        data: &[u8],
    ) -> Result<Connection, ExchangeError> {
        let channel = pd.context().completion_channel()?;
        let cq = pd.context().completion_queue_on(&channel, 2 * DEPTH)?;
        let mut qp = options(pd.queue_pair(&cq).signal_all()).rc()?;
        for buffer in receives {
            qp.receive(buffer)?;
        }
        let (qp, peer_data) = self.pair(qp, data)?;
        Ok(Connection {
            send_depth: qp.free_send_slots(),
            qp,
            cq,
            channel,
            exchange: self,
            peer_data,
        })
    }
}

impl Deref for Connection {
    type Target = QueuePair;

    fn deref(&self) -> &QueuePair {
        &self.qp
    }
}

impl DerefMut for Connection {
    fn deref_mut(&mut self) -> &mut QueuePair {
        &mut self.qp
    }
}

impl Connection {
    /// The data that the peer gave with its endpoint.
    #[must_use]
    pub fn peer_data(&self) -> &[u8] {
        &self.peer_data
    }

    /// The next completed request that had a `Buffer<Local>`; others are only checked. Polls for
    /// 50 µs, then sleeps. `None` once the peer has [left](Exchange::peer_has_left), and all that
    /// it had sent has been returned.
    ///
    /// # Errors
    /// When a request has failed, or the device is gone.
    pub fn next_completion(&mut self) -> Result<Option<(Success, Buffer)>, ExchangeError> {
        self.next_with(None, with_buffer)
    }

    /// As [`next_completion`](Self::next_completion), for what must come, in this time.
    ///
    /// # Errors
    /// As of that, and when the peer has left or nothing is complete in time.
    pub fn wait(&mut self, timeout: impl Into<Option<Duration>>) -> Result<(Success, Buffer), ExchangeError> {
        let next = self.next_with(timeout, with_buffer)?;
        let peer = self.exchange.peer;
        next.ok_or(ExchangeError::Left { peer })
    }

    /// As [`next_completion`](Self::next_completion), for requests of any memory: the first that
    /// `accept` returns of a completion. It gets each one, in order.
    ///
    /// # Errors
    /// As of that, those of `accept`, and when it has accepted nothing in this time.
    pub fn next_with<R>(
        &mut self,
        timeout: impl Into<Option<Duration>>,
        mut accept: impl FnMut(Completion<'_>) -> Result<Option<R>, CompletionError>,
    ) -> Result<Option<R>, ExchangeError> {
        let deadline = Deadline::after(timeout);
        self.busy_poll(deadline)?;
        loop {
            if let Some(found) = self.take(&mut accept)? {
                return Ok(Some(found));
            }
            // It has left, and what it had sent before has arrived: see `finish`.
            if self.exchange.has_input() {
                return self.take(&mut accept);
            }
            self.sleep(deadline)?;
        }
    }

    /// Waits until the peer has acknowledged all requests. `accept` gets each completion on the
    /// way, also those of receives.
    ///
    /// # Errors
    /// As of [`next_with`](Self::next_with).
    pub fn flush(
        &mut self,
        timeout: impl Into<Option<Duration>>,
        mut accept: impl FnMut(Completion<'_>) -> Result<(), CompletionError>,
    ) -> Result<(), ExchangeError> {
        let deadline = Deadline::after(timeout);
        // Whether the peer has left says nothing of its acknowledgements: in `finish` it
        // acknowledges until both ends are there.
        while self.qp.free_send_slots() < self.send_depth {
            self.busy_poll(deadline)?;
            for done in self.cq.wait(deadline.remaining())? {
                accept(done)?;
            }
            if deadline.has_passed() && self.qp.free_send_slots() < self.send_depth {
                return Err(self.timed_out());
            }
        }
        Ok(())
    }

    fn busy_poll(&mut self, deadline: Deadline) -> Result<(), ExchangeError> {
        let busy = deadline.min(Deadline::after(BUSY_POLL));
        while !self.cq.poll_ready()? && !busy.has_passed() {}
        Ok(())
    }

    /// Of one that is complete already; without one the queue is empty, and armed.
    fn take<R>(
        &mut self,
        accept: &mut impl FnMut(Completion<'_>) -> Result<Option<R>, CompletionError>,
    ) -> Result<Option<R>, ExchangeError> {
        while let Some(done) = self.cq.wait(Duration::ZERO)?.next() {
            if let Some(accepted) = accept(done)? {
                return Ok(Some(accepted));
            }
        }
        Ok(None)
    }

    /// Until the armed queue has an event or the peer leaves.
    fn sleep(&self, deadline: Deadline) -> Result<(), ExchangeError> {
        let readable = |fd| PollFd::new(fd, PollFlags::POLLIN);
        let mut fds = [self.channel.as_fd(), self.exchange.stream.as_fd()].map(readable);
        match poll(&mut fds, deadline.poll_timeout()) {
            Ok(0) if deadline.has_passed() => Err(self.timed_out()),
            Ok(_) | Err(Errno::EINTR) => Ok(()),
            Err(errno) => Err(self.exchange.io_error(errno.into())),
        }
    }

    fn timed_out(&self) -> ExchangeError {
        let peer = self.exchange.peer.to_string();
        ExchangeError::TimedOut { peer }
    }

    /// Waits until the peer has acknowledged all requests, and then until it is done, too: see
    /// [`Exchange::finish`]. Each may take the exchange's `timeout`. Dropping waits for nothing.
    ///
    /// # Errors
    /// As of that, and when a request has failed.
    pub fn finish(mut self) -> Result<(), ExchangeError> {
        // Before the peer is notified: it may leave then, and polls no more.
        self.flush(self.exchange.timeout, |done| done.check())?;
        self.exchange.finish()
    }
}

fn with_buffer(mut done: Completion<'_>) -> Result<Option<(Success, Buffer)>, CompletionError> {
    let success = done.result()?;
    Ok(done.take().map(|buffer| (success, buffer)))
}
