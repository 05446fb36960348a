//! Puts that a kernel asks for and a thread of the host posts.
//!
//! A kernel cannot ring an adapter's doorbell here; it writes what it wants into a ring of 64-byte descriptors in pinned memory (`ring`, [`Descriptor`]), and the proxy posts it: WRITEs, READs, and *signals*, words of
//! the peer's that are set or added to behind what was put before. All descriptors that are found at once go by one doorbell for each rank. The device's side is `gpudirect/cuda/kernels/doorbell.cuh`:
//!
//! ```cuda
//! #include "doorbell.cuh"
//!
//! extern "C" __global__ void push(doorbell::Queue queue, uint64_t bytes, uint32_t peer) {
//!     fill(queue.heap);                                        // what is to be put, in the own part of the symmetric heap
//!     doorbell::put_signal_block(queue, peer, /*to*/ 0, /*from*/ 0, bytes, /*signal*/ 32, doorbell::ADD, 1);
//!     if (!doorbell::quiet(queue)) return;                     // the memory may be used again; false: see the host's error
//!     doorbell::wait_until(queue, 33, 1);                      // what the peer put is here
//! }
//! ```
//!
//! What one queue asks of one peer takes effect there in the order in which it was asked, as all goes by one queue pair (IBTA vol 1, 9.5): so a signal says that what was put before it is there, and there is no fence to call. What several queues ask for
//! is in no order: `quiet` first.
//!
//! Kernels that wait for other ranks must be on the device before any of them runs ([`Kernel::load`](doorbell_cuda::Kernel::load)): a driver that loads one at its first launch waits for those that run, which may wait for it.
//!
//! Nothing in a ring is believed: ranks, ranges and signals are checked, and what is wrong is told by the queue's word of failure and by [`Queue::failure`], while what comes after it goes on. Whoever waits in a kernel is let go when something has failed, or
//! the proxy goes.
//!
//! A [`SymmetricHeap`](crate::heap::SymmetricHeap) makes a proxy of its own; this is for those who connect queue pairs by themselves.

mod descriptor;
mod failure;
mod queue;
mod ring;
mod thread;
mod wire;

use core::any::Any;
use core::sync::atomic::{AtomicBool, Ordering};
use std::sync::Arc;

pub use descriptor::{DESCRIPTOR_WORDS, Descriptor, Operation, Signalling, Update};
use doorbell_cuda::Context;
pub use failure::{Cause, Failed, ProxyError};
use parking_lot::Mutex;
pub(crate) use queue::Patience;
pub use queue::{DeviceQueue, KernelQueue, Place, Queue, Ticket};
pub(crate) use ring::{COMPLETED, RELEASED, Ring};
use ring::{Consumer, Next};
pub(crate) use thread::drive;
pub use thread::{Idle, Running};
use wire::{Origin, Outcome, Staging};
pub use wire::{PeerMemory, Wire};

/// What posts for kernels and threads: driven by the caller's calls of [`progress`](Self::progress), or by a thread ([`spawn`](Self::spawn)).
#[derive(Debug)]
pub struct Proxy {
    wire: Wire,
    rings: Vec<Option<Consumer>>,
    door: Arc<Door>,
    outcomes: Vec<Outcome>,
}

/// Where rings come in.
#[derive(Debug, Default)]
pub(crate) struct Door {
    waiting: AtomicBool,
    rings: Mutex<Rings>,
    /// Whether the thread is to end.
    pub(crate) stop: AtomicBool,
}

#[derive(Debug, Default)]
struct Rings {
    new: Vec<Arc<Ring>>,
    /// Whether the proxy is gone.
    gone: bool,
}

impl Door {
    /// Has the proxy take from a ring. One that is gone abandons it at once.
    pub(crate) fn open(&self, ring: Arc<Ring>) {
        let mut rings = self.rings.lock();
        if rings.gone {
            Consumer::new(ring).abandon();
        } else {
            rings.new.push(ring);
            self.waiting.store(true, Ordering::Release);
        }
    }
}

impl Proxy {
    /// One that posts by these connections.
    #[must_use]
    pub fn new(wire: Wire) -> Self {
        Self {
            wire,
            rings: Vec::new(),
            door: Arc::default(),
            outcomes: Vec::new(),
        }
    }

    pub(crate) fn door(&self) -> &Arc<Door> {
        &self.door
    }

    /// A queue for threads, of so many slots, rounded up to a power of two.
    #[must_use]
    pub fn queue(&self, slots: u32) -> Queue {
        Queue::open(&self.door, slots)
    }

    /// A queue for kernels of the context's device; without one, for kernels that the processor runs. `keep` is kept as long as the queue: what the memory of `place` lies in, for one.
    ///
    /// # Errors
    /// The CUDA driver's error.
    pub fn kernel_queue(
        &self,
        context: Option<&Context>,
        slots: u32,
        place: Place,
        keep: Arc<dyn Any + Send + Sync>,
    ) -> Result<KernelQueue, ProxyError> {
        KernelQueue::open(&self.door, context, slots, place, keep)
    }

    /// Takes what is in the rings, posts it, takes completions, and tells the writers. Gives whether there was anything to do. Never waits.
    pub fn progress(&mut self) -> bool {
        if self.door.waiting.load(Ordering::Acquire) {
            self.admit();
        }
        let mut any = false;
        for (number, place) in self.rings.iter_mut().enumerate() {
            let Some(consumer) = place else { continue };
            while let Next::Descriptor(said) = consumer.peek() {
                let index = consumer.ring_index();
                let staging = match &said {
                    Ok(descriptor) => self.wire.stage(descriptor, Origin { ring: number, index }),
                    Err(_) => Staging::Over(Err(Failed::new(
                        Cause::Operation,
                        format_args!("put {index} of a queue"),
                    ))),
                };
                match staging {
                    Staging::Full => break,
                    Staging::Taken => {
                        consumer.take();
                    }
                    Staging::Over(result) => {
                        consumer.take();
                        settle(consumer, index, result);
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
                settle(consumer, origin.index, result);
            }
        }
        for place in &mut self.rings {
            if let Some(consumer) = place {
                consumer.publish();
                if consumer.is_over() {
                    // For kernels that go on without their queue.
                    consumer.abandon();
                    *place = None;
                }
            }
        }
        any
    }

    #[cold]
    fn admit(&mut self) {
        let mut rings = self.door.rings.lock();
        self.door.waiting.store(false, Ordering::Release);
        for ring in rings.new.drain(..) {
            let consumer = Some(Consumer::new(ring));
            match self.rings.iter_mut().find(|place| place.is_none()) {
                Some(place) => *place = consumer,
                None => self.rings.push(consumer),
            }
        }
    }
}

/// A descriptor has come to an end: the failure is told before that.
fn settle(consumer: &mut Consumer, index: u64, result: Result<(), Failed>) {
    if let Err(failed) = result {
        consumer.ring.fail(index, failed);
    }
    consumer.finish(index);
}

impl Drop for Proxy {
    fn drop(&mut self) {
        self.admit();
        self.door.rings.lock().gone = true;
        self.admit();
        self.rings.iter_mut().flatten().for_each(Consumer::abandon);
    }
}
