//! The proxy: kernels submit puts, and a host thread (the proxy thread) posts them to queue pairs.
//!
//! A kernel writes 64-byte [`Descriptor`]s into a ring in pinned memory, and the proxy posts them
//! as WRITEs, READs and *signals* (words of the peer, changed behind earlier puts), with one
//! doorbell per rank and pass. The device side is `gpudirect/cuda/kernels/doorbell.cuh`:
//!
//! ```cuda
//! #include "doorbell.cuh"
//!
//! extern "C" __global__ void push(doorbell::Queue queue, uint64_t bytes, uint32_t peer) {
//!     fill(queue.heap);                                        // the data to put, in the local part of the symmetric heap
//!     doorbell::put_signal_block(queue, peer, /*to*/ 0, /*from*/ 0, bytes, /*signal*/ 32, doorbell::ADD, 1);
//!     if (!doorbell::quiet(queue)) return;                     // the memory may be reused; false: see the host's error
//!     doorbell::wait_until(queue, 33, 1);                      // the peer's put has arrived
//! }
//! ```
//!
//! Requests of one queue to one peer share a queue pair and take effect in submission order (IBTA
//! vol 1, 9.5), so a signal implies that the data put before it has arrived, without a fence.
//! Requests of different queues are unordered: call `quiet` first.
//!
//! Kernels that wait for other ranks must be loaded before any of them runs
//! ([`Kernel::load`](doorbell_cuda::Kernel::load)): a driver that loads a kernel at its first
//! launch waits for running kernels.
//!
//! Ring contents are untrusted and validated. An invalid request sets the queue's `failed` word and
//! [`Queue::failure`]; later requests continue. A failure, or the proxy's end, releases all waits.
//!
//! A [`SymmetricHeap`](crate::heap::SymmetricHeap) creates its own proxy; this module is for other
//! queue pairs.

mod descriptor;
mod failure;
mod queue;
mod ring;
mod thread;
mod wire;

use core::any::Any;
use core::sync::atomic::{AtomicBool, Ordering};
use std::sync::Arc;

pub use descriptor::{DESCRIPTOR_WORDS, Descriptor, Operation, SignalOp, SignalUpdate};
use doorbell_cuda::Context;
pub use failure::{FailureCause, ProxyError, RequestFailure};
use parking_lot::Mutex;
pub(crate) use queue::Backoff;
pub use queue::{DeviceQueue, KernelQueue, Queue, RankInfo, Ticket};
pub(crate) use ring::{COMPLETED, RELEASED, Ring};
use ring::{Consumer, Peeked};
pub(crate) use thread::run_until;
pub use thread::{IdlePolicy, ProxyThread};
pub use wire::{Connections, PeerMemory};
use wire::{Origin, Outcome, Staging};

/// Posts requests of kernels and threads: driven by calls of [`progress`](Self::progress), or by a
/// proxy thread ([`spawn`](Self::spawn)).
#[derive(Debug)]
pub struct Proxy {
    wire: Connections,
    rings: Vec<Option<Consumer>>,
    registry: Arc<RingRegistry>,
    outcomes: Vec<Outcome>,
}

#[derive(Debug, Default)]
pub(crate) struct RingRegistry {
    waiting: AtomicBool,
    rings: Mutex<Rings>,
    pub(crate) stop: AtomicBool,
}

#[derive(Debug, Default)]
struct Rings {
    new: Vec<Arc<Ring>>,
    stopped: bool,
}

impl RingRegistry {
    /// Registers a ring with the proxy. A stopped proxy abandons it at once.
    pub(crate) fn open(&self, ring: Arc<Ring>) {
        let mut rings = self.rings.lock();
        if rings.stopped {
            Consumer::new(ring).abandon();
        } else {
            rings.new.push(ring);
            self.waiting.store(true, Ordering::Release);
        }
    }
}

impl Proxy {
    /// A proxy that posts on these connections.
    #[must_use]
    pub fn new(wire: Connections) -> Self {
        Self {
            wire,
            rings: Vec::new(),
            registry: Arc::default(),
            outcomes: Vec::new(),
        }
    }

    pub(crate) fn registry(&self) -> &Arc<RingRegistry> {
        &self.registry
    }

    /// A queue for host threads, with `slots` slots, rounded up to a power of two.
    #[must_use]
    pub fn queue(&self, slots: u32) -> Queue {
        Queue::open(&self.registry, slots)
    }

    /// A queue for kernels of the context's device; without a context, for kernels run on the host.
    /// `keep` lives as long as the queue, such as the owner of the memory in `place`.
    pub fn kernel_queue(
        &self,
        context: Option<&Context>,
        slots: u32,
        place: RankInfo,
        keep: Arc<dyn Any + Send + Sync>,
    ) -> Result<KernelQueue, ProxyError> {
        KernelQueue::open(&self.registry, context, slots, place, keep)
    }

    /// One pass: posts ring entries, polls completions. Never blocks; `true` if it did anything.
    pub fn progress(&mut self) -> bool {
        if self.registry.waiting.load(Ordering::Acquire) {
            self.admit();
        }
        let mut any = false;
        for (number, place) in self.rings.iter_mut().enumerate() {
            let Some(consumer) = place else { continue };
            while let Peeked::Descriptor(decoded) = consumer.peek() {
                let index = consumer.ring_index();
                let staging = match &decoded {
                    Ok(descriptor) => self.wire.stage(descriptor, Origin { ring: number, index }),
                    Err(_) => Staging::Done(Err(RequestFailure::new(
                        FailureCause::Operation,
                        format_args!("put {index} of a queue"),
                    ))),
                };
                match staging {
                    Staging::Full => break,
                    Staging::Staged => {
                        consumer.take();
                    }
                    Staging::Done(result) => {
                        consumer.take();
                        complete(consumer, index, result);
                    }
                }
                any = true;
            }
        }
        self.wire.ring_doorbells(&mut self.outcomes);
        match self.wire.poll(&mut self.outcomes) {
            Ok(some) => any |= some,
            Err(error) => self.wire.fail_all(&error.to_string(), &mut self.outcomes),
        }
        for (origin, result) in self.outcomes.drain(..) {
            if let Some(Some(consumer)) = self.rings.get_mut(origin.ring) {
                complete(consumer, origin.index, result);
            }
        }
        for place in &mut self.rings {
            if let Some(consumer) = place {
                consumer.publish();
                if consumer.is_finished() {
                    // For kernels that outlive their queue.
                    consumer.abandon();
                    *place = None;
                }
            }
        }
        any
    }

    #[cold]
    fn admit(&mut self) {
        let mut rings = self.registry.rings.lock();
        self.registry.waiting.store(false, Ordering::Release);
        for ring in rings.new.drain(..) {
            let consumer = Some(Consumer::new(ring));
            match self.rings.iter_mut().find(|place| place.is_none()) {
                Some(place) => *place = consumer,
                None => self.rings.push(consumer),
            }
        }
    }
}

/// Completes a descriptor; a failure is recorded first.
fn complete(consumer: &mut Consumer, index: u64, result: Result<(), RequestFailure>) {
    if let Err(failed) = result {
        consumer.ring.fail(index, failed);
    }
    consumer.finish(index);
}

impl Drop for Proxy {
    fn drop(&mut self) {
        self.admit();
        self.registry.rings.lock().stopped = true;
        self.admit();
        self.rings.iter_mut().flatten().for_each(Consumer::abandon);
    }
}
