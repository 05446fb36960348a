//! A symmetric heap: memory of which every rank has a part of the same size and division, so that an offset names the same thing on all of them, and any rank puts to any other's part and gets from it.
//!
//! The parts lie in the memory of GPUs or in the host's, whichever each rank likes; a machine without a GPU has a heap of host memory with the same API. *Signals* are words beside the heap, in the host's memory, where the processor, streams and kernels
//! wait for them alike.
//!
//! Who asks for puts: the host ([`SymmetricHeap::put`] and its like), the host in a stream's order ([`HeapStream`]), and kernels ([`SymmetricHeap::kernel_queue`], see [`proxy`](crate::proxy)). A thread of the heap's own posts all of them.
//!
//! ```no_run
//! use core::time::Duration;
//! use doorbell_gpudirect::heap::{Exchange, SymmetricHeap, Update};
//!
//! # fn example(device: &doorbell_verbs::Context, exchange: &mut dyn Exchange) -> Result<(), Box<dyn std::error::Error>> {
//! let mut heap = SymmetricHeap::builder(device).bytes(64 << 20).connect(exchange)?; // .gpu(&context) for a part in a GPU's memory
//! let inbox = heap.alloc(1 << 20)?; // the same on each rank
//! let outbox = heap.alloc(1 << 20)?;
//! let arrived = heap.alloc_signal()?;
//!
//! let next = (heap.rank() + 1) % heap.ranks();
//! heap.write_at(outbox, 0, b"hello")?;
//! heap.put_signal(outbox.part(0, 5)?, inbox.part(0, 5)?, next, arrived, Update::Add(1))?;
//! heap.wait_signal(arrived, 1, Duration::from_secs(10))?;
//! let mut text = [0; 5];
//! heap.read_at(inbox, 0, &mut text)?;
//! heap.barrier(Duration::from_secs(10))?; // all that was put has arrived, everywhere
//! # Ok(())
//! # }
//! ```
//!
//! In a stream's order, between kernels that make what is put and use what has come:
//!
//! ```no_run
//! # use doorbell_gpudirect::heap::{HeapStream, Signal, Symmetric, Update};
//! # fn example(puts: &mut HeapStream, inbox: Symmetric, outbox: Symmetric, arrived: Signal, next: u32, round: u64) -> Result<(), Box<dyn std::error::Error>> {
//! // ... a kernel that fills the outbox is launched into the stream ...
//! puts.put_signal(outbox, inbox, next, arrived, Update::Set(round))?; // when it is done
//! puts.wait_signal(arrived, round)?;
//! // ... a kernel that uses the inbox ...
//! puts.quiet()?; // the outbox may be filled again by what comes after
//! # Ok(())
//! # }
//! ```
//!
//! # Order
//!
//! What one asks of one peer by one of these ways takes effect there in this order, so that a signal says that what was put before it is there (see [`proxy`](crate::proxy)). Between two ways there is no order: `quiet` first.
//! A signal is found in the host's memory and what was put perhaps in a GPU's: a GPU that does not keep the order of adapters' writes (`CU_DEVICE_ATTRIBUTE_GPU_DIRECT_RDMA_WRITES_ORDERING`) is refused a part in its memory, unless a device in software copies.
//!
//! # What fails
//!
//! Ranges are checked here and by the proxy, keys by the peer's device. The first failure of each way is kept, and all later calls of it give it; streams and kernels that wait are let go. What nobody signals is waited for as long as the caller says; a stream that
//! waits for a signal of a rank that has gone is let go by [`SymmetricHeap::set_signal`].

mod allocator;
mod connect;
mod error;
mod exchange;
mod region;
mod stream;

use core::sync::atomic::Ordering;
use core::time::Duration;
use std::sync::Arc;

use allocator::Allocator;
pub use connect::HeapBuilder;
use doorbell_cuda::{Context as CudaContext, DevicePtr, Span, Stream};
use doorbell_verbs::Context;
pub use error::HeapError;
pub use exchange::{Exchange, Star, Threads};
use region::Region;
pub use stream::HeapStream;

pub use crate::proxy::Update;
use crate::proxy::{Descriptor, KernelQueue, Operation, Patience, Place, Queue, Running, Signalling};
use crate::words::{WORD, Words};

/// Words of signals that every heap has for its own barriers: one for each round, of which 2^32 ranks need 32.
const BARRIER: u64 = 32;

/// A range of the heap, the same on every rank.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Symmetric {
    at: u64,
    len: u64,
}

impl Symmetric {
    /// Where it begins in the heap.
    #[must_use]
    pub fn offset(self) -> u64 {
        self.at
    }

    /// Its bytes.
    #[must_use]
    #[expect(clippy::len_without_is_empty, reason = "nobody asks of a range of none")]
    pub fn len(self) -> u64 {
        self.len
    }

    /// The `len` bytes at `offset` of it.
    ///
    /// # Errors
    /// [`HeapError::Range`] where they do not lie in it.
    pub fn part(self, offset: u64, len: u64) -> Result<Self, HeapError> {
        if offset > self.len || len > self.len - offset {
            return Err(HeapError::Range {
                offset,
                len,
                whole: self.len,
            });
        }
        Ok(Self {
            at: self.at + offset,
            len,
        })
    }
}

/// A word of 64 bits on every rank, 0 at first, to be set and added to by others and waited for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Signal(u64);

impl Signal {
    /// Its number, for kernels.
    #[must_use]
    pub fn number(self) -> u64 {
        self.0
    }
}

/// What the ways of asking for puts share.
#[derive(Debug)]
struct Shared {
    // The thread ends before its memory goes.
    proxy: Running,
    data: Region,
    signals: Words,
    rank: u32,
    ranks: u32,
}

/// This rank's part of a symmetric heap, and the way to the others': see the [module](self).
///
/// Dropping it ends what is under way: [`barrier`](Self::barrier) first.
#[derive(Debug)]
pub struct SymmetricHeap {
    queue: Queue,
    shared: Arc<Shared>,
    allocator: Allocator,
    next_signal: u64,
    epoch: u64,
}

impl SymmetricHeap {
    /// To be made on every rank alike, with the part's place as each likes.
    pub fn builder(device: &Context) -> HeapBuilder<'_> {
        HeapBuilder::new(device)
    }

    /// This rank.
    #[must_use]
    pub fn rank(&self) -> u32 {
        self.shared.rank
    }

    /// How many ranks there are.
    #[must_use]
    pub fn ranks(&self) -> u32 {
        self.shared.ranks
    }

    /// So many bytes of each part, beginning at a multiple of 256: to be called by all ranks in the same order, with the same length.
    ///
    /// # Errors
    /// [`HeapError::Full`], the same on each.
    pub fn alloc(&mut self, len: u64) -> Result<Symmetric, HeapError> {
        let at = self.allocator.take(len).ok_or_else(|| HeapError::Full {
            len,
            longest: self.allocator.longest(),
        })?;
        Ok(Symmetric { at, len })
    }

    /// Gives back what was allocated: all ranks do, in the same order as they allocate, when nobody puts to it any more.
    ///
    /// # Errors
    /// [`HeapError::NotAllocated`] of anything but what [`alloc`](Self::alloc) gave.
    pub fn free(&mut self, range: Symmetric) -> Result<(), HeapError> {
        self.allocator
            .give_back(range.at)
            .then_some(())
            .ok_or(HeapError::NotAllocated { offset: range.at })
    }

    /// A signal, 0 at first: to be called by all ranks in the same order. Signals are not given back.
    ///
    /// # Errors
    /// [`HeapError::NoSignal`]: a heap has as many as it was made with.
    pub fn alloc_signal(&mut self) -> Result<Signal, HeapError> {
        self.take_signals(1).map(Signal)
    }

    fn take_signals(&mut self, count: u64) -> Result<u64, HeapError> {
        let first = self.next_signal;
        let all = (self.shared.signals.len() / WORD) as u64;
        if count > all - first {
            return Err(HeapError::NoSignal { all: all - BARRIER });
        }
        self.next_signal += count;
        Ok(first)
    }

    /// Puts the bytes of `from` here to `to` on rank `peer`. When it returns that is asked for, no more: [`quiet`](Self::quiet) waits until `from` may be changed and `to` has it.
    ///
    /// # Errors
    /// [`HeapError::Lengths`], [`HeapError::Peer`], or what has failed before.
    pub fn put(&self, from: Symmetric, to: Symmetric, peer: u32) -> Result<(), HeapError> {
        self.ask(self.shared.moving(Operation::Put(None), from, to, peer)?)
    }

    /// As [`put`](Self::put); then the signal on `peer` is updated.
    ///
    /// # Errors
    /// As [`put`](Self::put).
    pub fn put_signal(
        &self,
        from: Symmetric,
        to: Symmetric,
        peer: u32,
        signal: Signal,
        update: Update,
    ) -> Result<(), HeapError> {
        let signalling = Signalling {
            signal: signal.0,
            update,
        };
        self.ask(self.shared.moving(Operation::Put(Some(signalling)), from, to, peer)?)
    }

    /// Gets the bytes of `from` on rank `peer` into `into` here. They are there after [`quiet`](Self::quiet).
    ///
    /// # Errors
    /// As [`put`](Self::put).
    pub fn get(&self, into: Symmetric, from: Symmetric, peer: u32) -> Result<(), HeapError> {
        self.ask(self.shared.moving(Operation::Get, into, from, peer)?)
    }

    /// Updates a signal on rank `peer`, behind what was put there before.
    ///
    /// # Errors
    /// [`HeapError::Peer`], or what has failed before.
    pub fn signal(&self, peer: u32, signal: Signal, update: Update) -> Result<(), HeapError> {
        self.ask(self.shared.signalling(peer, signal.0, update)?)
    }

    fn ask(&self, descriptor: Descriptor) -> Result<(), HeapError> {
        self.queue.put(&descriptor)?;
        Ok(())
    }

    /// A signal of this rank, now. What was put before an update that this shows is there.
    #[must_use]
    pub fn signal_value(&self, signal: Signal) -> u64 {
        self.shared.signals.at(signal.0 as usize).load(Ordering::Acquire)
    }

    /// Sets a signal of this rank: to begin anew, or to let go who waits for what will not come.
    pub fn set_signal(&self, signal: Signal, value: u64) {
        self.shared
            .signals
            .at(signal.0 as usize)
            .store(value, Ordering::Release);
    }

    /// Waits until a signal of this rank is `value` or beyond it, by the difference as a signed number; gives what it is.
    ///
    /// # Errors
    /// [`HeapError::Timeout`]; what has failed before.
    pub fn wait_signal(
        &self,
        signal: Signal,
        value: u64,
        timeout: impl Into<Option<Duration>>,
    ) -> Result<u64, HeapError> {
        let timeout = timeout.into();
        let mut patience = Patience::new(timeout);
        loop {
            let now = self.signal_value(signal);
            if now.wrapping_sub(value) as i64 >= 0 {
                return Ok(now);
            }
            if let Some(failed) = self.queue.failure() {
                return Err(failed.into());
            }
            if !patience.wait() {
                let what = format!("signal {} to be {value}, and it is {now}", signal.0);
                return Err(HeapError::Timeout {
                    what,
                    after: timeout.unwrap_or_default(),
                });
            }
        }
    }

    /// Waits until all that this rank's host has asked for is done: what was put is there, and may be changed here; what was got is here.
    ///
    /// # Errors
    /// [`HeapError::Timeout`], or what has failed.
    pub fn quiet(&self, timeout: impl Into<Option<Duration>>) -> Result<(), HeapError> {
        let timeout = timeout.into();
        if self.queue.quiet(timeout)? {
            return Ok(());
        }
        let what = "puts to be done".to_owned();
        Err(HeapError::Timeout {
            what,
            after: timeout.unwrap_or_default(),
        })
    }

    /// Waits until every rank's host is here, and all that they have asked for before is done.
    ///
    /// # Errors
    /// [`HeapError::Timeout`], of all in all some multiples of the time, or what has failed.
    pub fn barrier(&mut self, timeout: impl Into<Option<Duration>>) -> Result<(), HeapError> {
        let timeout = timeout.into();
        self.quiet(timeout)?;
        self.epoch += 1;
        for (round, peer) in self.shared.rounds() {
            self.signal(peer, Signal(round), Update::Set(self.epoch))?;
            self.wait_signal(Signal(round), self.epoch, timeout)?;
        }
        // Whoever goes now takes its queue pairs along: what it has told the others has to be there before. A peer that has gone already has heard of it, or says so by itself: that is no failure of this barrier, but of what is asked for later.
        match self.quiet(timeout) {
            Err(HeapError::Failed(_)) => Ok(()),
            done => done,
        }
    }

    /// Copies `bytes` into this rank's part. What is being put from there meanwhile may go as it was or as it is.
    ///
    /// # Errors
    /// [`HeapError::Range`]; [`HeapError::OnGpu`] of a part in a GPU's memory.
    pub fn write_at(&mut self, into: Symmetric, offset: u64, bytes: &[u8]) -> Result<(), HeapError> {
        let at = into.part(offset, bytes.len() as u64)?.at;
        self.shared
            .data
            .host()?
            .copy_in(self.shared.inside(at, bytes.len())?, bytes);
        Ok(())
    }

    /// Copies bytes out of this rank's part. Of what others put there meanwhile any part may be seen.
    ///
    /// # Errors
    /// As [`write_at`](Self::write_at).
    pub fn read_at(&self, from: Symmetric, offset: u64, into: &mut [u8]) -> Result<(), HeapError> {
        let at = from.part(offset, into.len() as u64)?.at;
        self.shared
            .data
            .host()?
            .copy_out(self.shared.inside(at, into.len())?, into);
        Ok(())
    }

    /// This rank's part of a range, for copies and launches; `None` where no device of CUDA reaches it.
    #[must_use]
    pub fn span(&self, range: Symmetric) -> Option<Span<'_>> {
        let start = usize::try_from(range.at).ok()?;
        let end = start.checked_add(usize::try_from(range.len).ok()?)?;
        self.shared.data.span()?.span(start..end).ok()
    }

    /// Where kernels find this rank's part of a range; where no device of CUDA reaches it, the processor's own address.
    #[must_use]
    pub fn device_ptr(&self, range: Symmetric) -> DevicePtr {
        DevicePtr(self.shared.data.device_ptr().0 + range.at)
    }

    /// All of this rank's part and its signals, for launches that use them.
    pub fn uses(&self) -> impl Iterator<Item = Span<'_>> {
        self.shared.data.span().into_iter().chain(self.shared.signals.all())
    }

    /// A queue of so many slots (rounded up to a power of two) by which kernels of the device ask for puts. Without a context, for kernels that the processor runs.
    ///
    /// # Errors
    /// The CUDA driver's error.
    pub fn kernel_queue(&self, context: Option<&CudaContext>, slots: u32) -> Result<KernelQueue, HeapError> {
        let place = Place {
            heap: self.shared.data.device_ptr(),
            signals: self.shared.signals.device_ptr(),
            rank: self.shared.rank,
            ranks: self.shared.ranks,
        };
        let keep = Arc::clone(&self.shared);
        Ok(KernelQueue::open(
            self.shared.proxy.door(),
            context,
            slots,
            place,
            keep,
        )?)
    }

    /// Puts in the order of a stream: to be called by all ranks in the same order, with whatever stream each likes.
    ///
    /// # Errors
    /// [`HeapError::NoSignal`]; [`HeapError::NotPinned`] of a heap that was made without a GPU; the CUDA driver's error.
    pub fn on(&mut self, stream: &Stream) -> Result<HeapStream, HeapError> {
        let rounds = self.shared.rounds().count() as u64;
        let first = self.take_signals(rounds)?;
        HeapStream::new(Arc::clone(&self.shared), stream, first)
    }

    /// The first thing of what the host has asked for that has failed.
    #[must_use]
    pub fn failure(&self) -> Option<crate::proxy::Failed> {
        self.queue.failure()
    }
}

impl Shared {
    /// The rounds of a barrier, and whom this rank tells in each: after the last, everybody has heard of everybody (dissemination).
    fn rounds(&self) -> impl Iterator<Item = (u64, u32)> + use<> {
        let (rank, ranks) = (u64::from(self.rank), u64::from(self.ranks));
        (0..BARRIER)
            .take_while(move |round| 1 << round < ranks)
            .map(move |round| (round, ((rank + (1 << round)) % ranks) as u32))
    }

    fn check_peer(&self, peer: u32) -> Result<(), HeapError> {
        if peer >= self.ranks {
            return Err(HeapError::Peer {
                peer,
                ranks: self.ranks,
            });
        }
        Ok(())
    }

    fn moving(
        &self,
        operation: Operation,
        here: Symmetric,
        there: Symmetric,
        peer: u32,
    ) -> Result<Descriptor, HeapError> {
        self.check_peer(peer)?;
        if here.len != there.len {
            return Err(HeapError::Lengths {
                here: here.len,
                there: there.len,
            });
        }
        Ok(Descriptor {
            operation,
            peer,
            len: here.len,
            local: here.at,
            remote: there.at,
            id: 0,
        })
    }

    fn signalling(&self, peer: u32, signal: u64, update: Update) -> Result<Descriptor, HeapError> {
        self.check_peer(peer)?;
        Ok(Descriptor {
            operation: Operation::Signal(Signalling { signal, update }),
            peer,
            len: 0,
            local: 0,
            remote: 0,
            id: 0,
        })
    }

    /// The offset, if so many bytes are there: a range may be of another heap.
    fn inside(&self, at: u64, len: usize) -> Result<usize, HeapError> {
        let whole = self.data.len();
        let end = at.checked_add(len as u64).filter(|end| *end <= whole);
        end.map(|_| at as usize).ok_or(HeapError::Range {
            offset: at,
            len: len as u64,
            whole,
        })
    }
}
