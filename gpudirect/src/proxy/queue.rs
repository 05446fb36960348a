//! Who writes into rings: threads by a [`Queue`], kernels by a [`KernelQueue`].

use core::any::Any;
use core::fmt;
use core::sync::atomic::Ordering;
use core::time::Duration;
use std::sync::Arc;
use std::thread;
use std::time::Instant;

use doorbell_cuda::{Context, DeviceMemory, DevicePtr, Memory as _, Span};

use super::failure::{Cause, Failed, ProxyError};
use super::ring::{COMPLETED, CONSUMED, FAILED, HEAD, Ring, SLOTS};
use super::{Descriptor, Door};
use crate::words::WORD;

/// Where threads ask for puts. Any number of them may at once.
#[derive(Debug)]
pub struct Queue {
    pub(crate) ring: Arc<Ring>,
}

impl Queue {
    /// One of so many slots, which the proxy behind the door takes from.
    pub(crate) fn open(door: &Door, slots: u32) -> Self {
        let ring = Ring::plain(slots);
        door.open(Arc::clone(&ring));
        Self { ring }
    }

    /// Asks for what `descriptor` says. Gives its ticket, or `None` while the queue is full.
    pub fn try_put(&self, descriptor: &Descriptor) -> Option<Ticket> {
        self.ring.try_write(descriptor).map(Ticket)
    }

    /// Asks for what `descriptor` says; waits while the queue is full.
    ///
    /// # Errors
    /// When the queue has failed: what it was asked for is not done as it was meant.
    pub fn put(&self, descriptor: &Descriptor) -> Result<Ticket, Failed> {
        let mut patience = Patience::new(None);
        loop {
            self.check()?;
            if let Some(ticket) = self.try_put(descriptor) {
                return Ok(ticket);
            }
            patience.wait();
        }
    }

    /// How many of its descriptors are done, without a gap.
    #[must_use]
    pub fn completed(&self) -> u64 {
        self.ring.completed()
    }

    /// Waits until all that was asked for before is done. `false` when it is not, after so long.
    ///
    /// # Errors
    /// When anything of it has failed.
    pub fn quiet(&self, timeout: Option<Duration>) -> Result<bool, Failed> {
        let until = self.ring.words.at(HEAD).load(Ordering::Relaxed);
        let mut patience = Patience::new(timeout);
        loop {
            let done = self.ring.completed() >= until;
            self.check()?;
            if done || !patience.wait() {
                return Ok(done);
            }
        }
    }

    /// The first thing that has failed.
    #[must_use]
    pub fn failure(&self) -> Option<Failed> {
        self.ring.failure()
    }

    fn check(&self) -> Result<(), Failed> {
        self.failure().map_or(Ok(()), Err)
    }
}

impl Drop for Queue {
    fn drop(&mut self) {
        self.ring.close();
    }
}

/// Which of a queue's descriptors, from 0 on.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub struct Ticket(pub u64);

/// What kernels are given of a queue, by value: `doorbell::Queue` of `doorbell.cuh`.
#[derive(Debug, Clone, Copy)]
#[repr(C)]
pub struct DeviceQueue {
    slots: DevicePtr,
    consumed: DevicePtr,
    completed: DevicePtr,
    failed: DevicePtr,
    /// Counters of the kernels' own: of descriptors, and of what was last seen of `consumed`.
    head: DevicePtr,
    seen: DevicePtr,
    /// The own memory, and the own signals.
    heap: DevicePtr,
    signals: DevicePtr,
    mask: u32,
    shift: u32,
    rank: u32,
    ranks: u32,
}

/// Where kernels ask for puts: any number of blocks and threads, of one kernel or of several, at once.
///
/// To be kept as long as kernels use it; launches name [`uses`](Self::uses), which keeps the memory until they are done.
pub struct KernelQueue {
    ring: Arc<Ring>,
    /// Where kernels count: in the memory of their device.
    counters: Option<DeviceMemory>,
    device: DeviceQueue,
    /// What the proxy lives in.
    _keep: Arc<dyn Any + Send + Sync>,
}

/// What a kernel is told besides of the rank that it runs for.
#[derive(Debug, Clone, Copy)]
pub struct Place {
    /// Where the memory begins that it puts from.
    pub heap: DevicePtr,
    /// Where the signals begin that others update.
    pub signals: DevicePtr,
    /// The rank.
    pub rank: u32,
    /// How many there are.
    pub ranks: u32,
}

impl KernelQueue {
    /// One of so many slots for kernels of a device; without one, for kernels that the processor runs.
    pub(crate) fn open(
        door: &Door,
        context: Option<&Context>,
        slots: u32,
        place: Place,
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
        door.open(Arc::clone(&ring));
        Ok(Self {
            ring,
            counters,
            device,
            _keep: keep,
        })
    }

    /// The argument of kernels.
    #[must_use]
    pub fn device(&self) -> DeviceQueue {
        self.device
    }

    /// What a launch uses of it.
    pub fn uses(&self) -> impl Iterator<Item = Span<'_>> {
        let counters = self.counters.as_ref().map(|counters| counters.all());
        counters.into_iter().chain(self.ring.words.all())
    }

    /// How many of its descriptors are done, without a gap.
    #[must_use]
    pub fn completed(&self) -> u64 {
        self.ring.completed()
    }

    /// The first thing that has failed.
    #[must_use]
    pub fn failure(&self) -> Option<Failed> {
        self.ring.failure()
    }
}

/// Two counters in the memory of a device.
fn zeroed(context: &Context) -> Result<DeviceMemory, ProxyError> {
    let counters = DeviceMemory::alloc(context, 2 * WORD)?;
    let stream = doorbell_cuda::Stream::new(context)?;
    stream.fill(counters.all(), 0)?;
    stream.synchronize()?;
    Ok(counters)
}

impl KernelQueue {
    /// Lets go all kernels that wait for anything of the queue, such as for a signal of a rank that has gone: they are told that it has failed. What was asked for before is done nevertheless.
    pub fn stop(&self) {
        self.ring.fail(
            self.ring.completed(),
            Failed::new(Cause::Stopped, "a queue of puts, by its host"),
        );
        self.ring.stop();
    }
}

impl fmt::Debug for KernelQueue {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("KernelQueue")
            .field("completed", &self.completed())
            .field("failure", &self.failure())
            .finish_non_exhaustive()
    }
}

impl Drop for KernelQueue {
    fn drop(&mut self) {
        self.ring.close();
    }
}

/// Waits a little longer each time, up to a deadline.
pub(crate) struct Patience {
    deadline: Option<Instant>,
    looks: u32,
}

impl Patience {
    pub(crate) fn new(timeout: Option<Duration>) -> Self {
        Self {
            deadline: timeout.and_then(|timeout| Instant::now().checked_add(timeout)),
            looks: 0,
        }
    }

    /// `false` when the time is over.
    pub(crate) fn wait(&mut self) -> bool {
        const SPINS: u32 = 256;
        const YIELDS: u32 = 4096;
        self.looks = self.looks.saturating_add(1);
        if self.looks < SPINS {
            core::hint::spin_loop();
            return true;
        }
        if self.looks < YIELDS {
            thread::yield_now();
        } else {
            thread::sleep(Duration::from_micros(50));
        }
        self.deadline.is_none_or(|deadline| Instant::now() < deadline)
    }
}
