//! The producers of rings: host threads through a [`Queue`], kernels through a [`KernelQueue`].

use core::any::Any;
use core::sync::atomic::Ordering;
use core::time::Duration;
use std::sync::Arc;
use std::thread;
use std::time::Instant;

use doorbell_cuda::{Context, DeviceMemory, DevicePtr, Memory as _, Span};

use super::failure::{FailureCause, ProxyError, RequestFailure};
use super::ring::{COMPLETED, CONSUMED, FAILED, HEAD, Ring, SLOTS};
use super::{Descriptor, RingRegistry};
use crate::words::WORD;

/// A queue of requests from host threads (multi-producer).
#[derive(Debug)]
pub struct Queue {
    pub(crate) ring: Arc<Ring>,
}

impl Queue {
    pub(crate) fn open(registry: &RingRegistry, slots: u32) -> Self {
        let ring = Ring::plain(slots);
        registry.open(Arc::clone(&ring));
        Self { ring }
    }

    /// Submits a request. Returns its ticket, or `None` if the queue is full.
    pub fn try_put(&self, descriptor: &Descriptor) -> Option<Ticket> {
        self.ring.try_write(descriptor).map(Ticket)
    }

    /// Submits a request; waits while the queue is full.
    ///
    /// # Errors
    /// If the queue has failed.
    pub fn put(&self, descriptor: &Descriptor) -> Result<Ticket, RequestFailure> {
        let mut backoff = Backoff::new(None);
        loop {
            self.check()?;
            if let Some(ticket) = self.try_put(descriptor) {
                return Ok(ticket);
            }
            backoff.wait();
        }
    }

    /// The number of its completed descriptors, counted without gaps.
    #[must_use]
    pub fn completed(&self) -> u64 {
        self.ring.completed()
    }

    /// Waits until all earlier requests are complete; `false` after the timeout.
    ///
    /// # Errors
    /// If any of them has failed.
    pub fn quiet(&self, timeout: Option<Duration>) -> Result<bool, RequestFailure> {
        let until = self.ring.words.at(HEAD).load(Ordering::Relaxed);
        let mut backoff = Backoff::new(timeout);
        loop {
            let done = self.ring.completed() >= until;
            self.check()?;
            if done || !backoff.wait() {
                return Ok(done);
            }
        }
    }

    /// The first failure.
    #[must_use]
    pub fn failure(&self) -> Option<RequestFailure> {
        self.ring.failure()
    }

    fn check(&self) -> Result<(), RequestFailure> {
        self.failure().map_or(Ok(()), Err)
    }
}

impl Drop for Queue {
    fn drop(&mut self) {
        self.ring.close();
    }
}

/// The index of a descriptor in its queue, from 0.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub struct Ticket(pub u64);

doorbell_cuda::kernel_arguments! {
    constants {}
    /// A kernel's parameter for a queue of puts, passed by value.
    // fields: the layout of the kernel's parameter.
    #[derive(Debug, Clone, Copy)]
    pub struct DeviceQueue as Queue in "queue" {
        /// In host memory: descriptors; counts of consumed and completed ones; the first failure,
        /// followed by whether the proxy has stopped.
        slots: DevicePtr,
        consumed: DevicePtr,
        completed: DevicePtr,
        failed: DevicePtr,
        /// In device memory: the number of requests, and the last value read of `consumed`.
        head: DevicePtr,
        seen: DevicePtr,
        /// The local part of the heap, and the local signals.
        heap: DevicePtr,
        signals: DevicePtr,
        mask: u32,
        shift: u32,
        rank: u32,
        ranks: u32,
    }
}

/// A queue of requests from kernels: any number of them, their blocks and threads, concurrently.
///
/// Keep it as long as kernels use it, and list [`uses`](Self::uses) in their launches.
pub struct KernelQueue {
    ring: Arc<Ring>,
    /// The kernels' counters, in memory of their device.
    counters: Option<DeviceMemory>,
    device: DeviceQueue,
    /// The owner of the proxy.
    _keep: Arc<dyn Any + Send + Sync>,
}

/// The rank information passed to kernels.
#[derive(Debug, Clone, Copy)]
pub struct RankInfo {
    /// The start of the local memory of puts.
    pub heap: DevicePtr,
    /// The start of the local signals.
    pub signals: DevicePtr,
    /// The rank.
    pub rank: u32,
    /// The number of ranks.
    pub ranks: u32,
}

impl KernelQueue {
    /// Without a context, for kernels run on the host.
    pub(crate) fn open(
        registry: &RingRegistry,
        context: Option<&Context>,
        slots: u32,
        place: RankInfo,
        keep: Arc<dyn Any + Send + Sync>,
    ) -> Result<Self, ProxyError> {
        let ring = match context {
            Some(context) => Ring::pinned(context, slots, false)?,
            None => Ring::plain(slots),
        };
        let counters = context.map(zeroed).transpose()?;
        let base = ring.words.device_ptr().0;
        let word = |index: usize| DevicePtr(base + (index * WORD) as u64);
        let (head, seen) = match &counters {
            Some(counters) => (counters.device_ptr(), DevicePtr(counters.device_ptr().0 + WORD as u64)),
            None => (word(HEAD), word(HEAD + 1)),
        };
        let device = DeviceQueue {
            slots: word(SLOTS),
            consumed: word(CONSUMED),
            completed: word(COMPLETED),
            failed: word(FAILED),
            head,
            seen,
            heap: place.heap,
            signals: place.signals,
            mask: (ring.slots - 1) as u32,
            shift: ring.slots.trailing_zeros(),
            rank: place.rank,
            ranks: place.ranks,
        };
        registry.open(Arc::clone(&ring));
        Ok(Self {
            ring,
            counters,
            device,
            _keep: keep,
        })
    }

    /// The kernel parameter.
    #[must_use]
    pub fn device(&self) -> DeviceQueue {
        self.device
    }

    /// Its resources for launches.
    pub fn uses(&self) -> impl Iterator<Item = Span<'_>> {
        let counters = self.counters.as_ref().map(|counters| counters.all());
        counters.into_iter().chain(self.ring.words.all())
    }

    /// The number of its completed descriptors, counted without gaps.
    #[must_use]
    pub fn completed(&self) -> u64 {
        self.ring.completed()
    }

    /// The first failure.
    #[must_use]
    pub fn failure(&self) -> Option<RequestFailure> {
        self.ring.failure()
    }
}

fn zeroed(context: &Context) -> Result<DeviceMemory, ProxyError> {
    let counters = DeviceMemory::alloc(context, 2 * WORD)?;
    let stream = doorbell_cuda::Stream::new(context)?;
    stream.fill(counters.all(), 0)?;
    stream.synchronize()?;
    Ok(counters)
}

impl KernelQueue {
    /// Releases kernels that wait on the queue: they see a failure. Earlier requests still execute.
    pub fn stop(&self) {
        self.ring.fail(
            self.ring.completed(),
            RequestFailure::new(FailureCause::Stopped, "a queue of puts, by its host"),
        );
        self.ring.stop();
    }
}

debug_fields!(
    KernelQueue,
    self,
    completed = self.completed(),
    failure = self.failure()
);

impl Drop for KernelQueue {
    fn drop(&mut self) {
        self.ring.close();
    }
}

/// Spins, then yields, then sleeps 50 µs at a time, up to a deadline.
pub(crate) struct Backoff {
    deadline: Option<Instant>,
    polls: u32,
}

impl Backoff {
    pub(crate) fn new(timeout: Option<Duration>) -> Self {
        Self {
            deadline: timeout.and_then(|timeout| Instant::now().checked_add(timeout)),
            polls: 0,
        }
    }

    /// `false` after the deadline.
    pub(crate) fn wait(&mut self) -> bool {
        const SPINS: u32 = 256;
        const YIELDS: u32 = 4096;
        self.polls = self.polls.saturating_add(1);
        if self.polls < SPINS {
            core::hint::spin_loop();
            return true;
        }
        if self.polls < YIELDS {
            thread::yield_now();
        } else {
            thread::sleep(Duration::from_micros(50));
        }
        self.deadline.is_none_or(|deadline| Instant::now() < deadline)
    }
}

#[cfg(test)]
mod tests {
    use doorbell_cuda::arguments::Arguments as _;

    #[test]
    fn the_kernels_header_is_committed() {
        super::DeviceQueue::header().check(env!("CARGO_MANIFEST_DIR"));
    }
}
