//! A symmetric heap (as in NVSHMEM and OpenSHMEM): every rank has a part of the same size and
//! layout, so an offset is valid on all ranks, and any rank puts to and gets from any other's part.
//!
//! Each rank's part is in GPU or host memory, independently of the others'. *Signals* are words
//! beside it, always in host memory, where the host, streams and kernels wait for them.
//!
//! Puts are submitted by the host ([`SymmetricHeap::put`]), in stream order ([`HeapStream`]), or by
//! kernels ([`SymmetricHeap::kernel_queue`]), and posted by the heap's [`proxy`](crate::proxy).
//!
//! ```no_run
//! use core::time::Duration;
//! use doorbell_gpudirect::heap::{Exchange, SignalOp, SymmetricHeap};
//!
//! # fn example(device: &doorbell_verbs::Context, exchange: &mut dyn Exchange) -> Result<(), Box<dyn std::error::Error>> {
//! let mut heap = SymmetricHeap::builder(device).bytes(64 << 20).connect(exchange)?; // .gpu(&context) for GPU memory
//! let inbox = heap.alloc(1 << 20)?; // the same on each rank
//! let outbox = heap.alloc(1 << 20)?;
//! let arrived = heap.alloc_signal()?;
//!
//! let next = (heap.rank() + 1) % heap.ranks();
//! heap.write_at(outbox, 0, b"hello")?;
//! heap.put_signal(outbox.slice(0, 5)?, inbox.slice(0, 5)?, next, arrived, SignalOp::Add(1))?;
//! heap.wait_signal(arrived, 1, Duration::from_secs(10))?;
//! let mut text = [0; 5];
//! heap.read_at(inbox, 0, &mut text)?;
//! heap.barrier(Duration::from_secs(10))?; // all puts have arrived, on all ranks
//! # Ok(())
//! # }
//! ```
//!
//! In stream order, between kernels that produce and consume the data:
//!
//! ```no_run
//! # use doorbell_gpudirect::heap::{HeapStream, Signal, SignalOp, SymmetricRange};
//! # fn example(puts: &mut HeapStream, inbox: SymmetricRange, outbox: SymmetricRange, arrived: Signal, next: u32, round: u64) -> Result<(), Box<dyn std::error::Error>> {
//! // ... a kernel that fills the outbox is launched on the stream ...
//! puts.put_signal(outbox, inbox, next, arrived, SignalOp::Set(round))?; // when it is done
//! puts.wait_signal(arrived, round)?;
//! // ... a kernel that uses the inbox ...
//! puts.quiet()?; // later work may overwrite the outbox
//! # Ok(())
//! # }
//! ```
//!
//! # Ordering
//!
//! Requests of one queue (host, stream or kernel queue) to one peer take effect there in order, so
//! a signal implies that the data put before it has arrived. Different queues are unordered: call
//! `quiet` first. A GPU that does not order adapters' writes
//! (`CU_DEVICE_ATTRIBUTE_GPU_DIRECT_RDMA_WRITES_ORDERING`) is refused a part in its memory, unless
//! a software device copies.
//!
//! # Failures
//!
//! Ranges are checked here and by the proxy, keys by the peer's device. The first failure of a
//! queue is returned by all its later calls, and releases waiting streams and kernels. A stream
//! that waits for a signal of an exited rank is released by [`SymmetricHeap::set_signal`].

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
pub use doorbell_rendezvous::{Secret, SecretError};
use doorbell_verbs::Context;
pub use error::HeapError;
pub use exchange::{Exchange, TcpExchange, ThreadExchange};
use region::Region;
pub use stream::HeapStream;

pub use crate::proxy::SignalOp;
use crate::proxy::{Backoff, Descriptor, KernelQueue, Operation, ProxyThread, Queue, RankInfo, SignalUpdate};
use crate::words::{SharedWords, WORD};

/// Signals reserved for the heap's barriers: one per dissemination round; 2^32 ranks need 32.
const BARRIER_SIGNALS: u64 = 32;

/// A range of the heap, at the same offset on every rank.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct SymmetricRange {
    at: u64,
    len: u64,
}

impl SymmetricRange {
    /// Its offset in the heap.
    #[must_use]
    pub fn offset(self) -> u64 {
        self.at
    }

    /// Its length in bytes.
    #[must_use]
    #[expect(clippy::len_without_is_empty, reason = "empty ranges are not useful")]
    pub fn len(self) -> u64 {
        self.len
    }

    /// The `len` bytes at `offset` within it.
    ///
    /// # Errors
    /// [`HeapError::Range`] if they exceed it.
    pub fn slice(self, offset: u64, len: u64) -> Result<Self, HeapError> {
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

/// A 64-bit word on every rank, initially 0, that peers set or add to and this rank waits for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Signal(u64);

impl Signal {
    /// Its index, for kernels.
    #[must_use]
    pub fn number(self) -> u64 {
        self.0
    }
}

#[derive(Debug)]
struct HeapState {
    // Declared first: the proxy thread ends before its memory is freed.
    proxy: ProxyThread,
    data: Region,
    signals: SharedWords,
    rank: u32,
    ranks: u32,
}

/// This rank's part of a symmetric heap and its connections to the others: see the [module](self).
///
/// Dropping it aborts outstanding requests: call [`barrier`](Self::barrier) first.
#[derive(Debug)]
pub struct SymmetricHeap {
    queue: Queue,
    shared: Arc<HeapState>,
    allocator: Allocator,
    next_signal: u64,
    epoch: u64,
}

impl SymmetricHeap {
    /// Options of a heap; every rank uses the same, except for the placement of its part.
    pub fn builder(device: &Context) -> HeapBuilder<'_> {
        HeapBuilder::new(device)
    }

    /// This rank.
    #[must_use]
    pub fn rank(&self) -> u32 {
        self.shared.rank
    }

    /// The number of ranks.
    #[must_use]
    pub fn ranks(&self) -> u32 {
        self.shared.ranks
    }

    /// Allocates `len` bytes, aligned to 256. Collective: same order and length on all ranks.
    ///
    /// # Errors
    /// [`HeapError::Full`], the same on each.
    #[doc(alias("nvshmem_malloc", "shmem_malloc"))]
    pub fn alloc(&mut self, len: u64) -> Result<SymmetricRange, HeapError> {
        let at = self.allocator.alloc(len).ok_or_else(|| HeapError::Full {
            len,
            longest: self.allocator.longest_free(),
        })?;
        Ok(SymmetricRange { at, len })
    }

    /// Frees an allocation that no rank puts to any more. Collective: same order on all ranks.
    ///
    /// # Errors
    /// [`HeapError::NotAllocated`] for any range not returned by [`alloc`](Self::alloc).
    #[doc(alias = "nvshmem_free")]
    pub fn free(&mut self, range: SymmetricRange) -> Result<(), HeapError> {
        self.allocator
            .free(range.at)
            .then_some(())
            .ok_or(HeapError::NotAllocated { offset: range.at })
    }

    /// Allocates a signal, initially 0, never freed. Collective: same order on all ranks.
    ///
    /// # Errors
    /// [`HeapError::NoSignal`] beyond the number the heap was built with.
    pub fn alloc_signal(&mut self) -> Result<Signal, HeapError> {
        self.alloc_signals(1).map(Signal)
    }

    fn alloc_signals(&mut self, count: u64) -> Result<u64, HeapError> {
        let first = self.next_signal;
        let all = (self.shared.signals.len() / WORD) as u64;
        if count > all - first {
            return Err(HeapError::NoSignal {
                all: all - BARRIER_SIGNALS,
            });
        }
        self.next_signal += count;
        Ok(first)
    }

    /// Submits a put of the local range `from` to `to` on rank `peer`. Nonblocking:
    /// [`quiet`](Self::quiet) waits until `from` may be changed and `to` has the data.
    ///
    /// # Errors
    /// [`HeapError::Lengths`], [`HeapError::Peer`], or an earlier failure.
    #[doc(alias = "nvshmem_putmem_nbi")]
    pub fn put(&self, from: SymmetricRange, to: SymmetricRange, peer: u32) -> Result<(), HeapError> {
        self.submit(self.shared.transfer(Operation::Put(None), from, to, peer)?)
    }

    /// As [`put`](Self::put), followed by an update of the signal on `peer`.
    #[doc(alias = "nvshmem_putmem_signal_nbi")]
    pub fn put_signal(
        &self,
        from: SymmetricRange,
        to: SymmetricRange,
        peer: u32,
        signal: Signal,
        update: SignalOp,
    ) -> Result<(), HeapError> {
        let signal_update = SignalUpdate {
            signal: signal.0,
            update,
        };
        self.submit(
            self.shared
                .transfer(Operation::Put(Some(signal_update)), from, to, peer)?,
        )
    }

    /// Submits a get of `from` on rank `peer` into `into`, complete after [`quiet`](Self::quiet).
    #[doc(alias = "nvshmem_getmem_nbi")]
    pub fn get(&self, into: SymmetricRange, from: SymmetricRange, peer: u32) -> Result<(), HeapError> {
        self.submit(self.shared.transfer(Operation::Get, into, from, peer)?)
    }

    /// Submits a signal update on rank `peer`, ordered behind earlier puts there.
    ///
    /// # Errors
    /// [`HeapError::Peer`], or an earlier failure.
    #[doc(alias = "nvshmemx_signal_op")]
    pub fn signal(&self, peer: u32, signal: Signal, update: SignalOp) -> Result<(), HeapError> {
        self.submit(self.shared.signal_update(peer, signal.0, update)?)
    }

    fn submit(&self, descriptor: Descriptor) -> Result<(), HeapError> {
        self.queue.put(&descriptor)?;
        Ok(())
    }

    /// The current value of a local signal. Data put before the update that produced it is visible.
    #[must_use]
    pub fn signal_value(&self, signal: Signal) -> u64 {
        self.shared.signals.at(signal.0 as usize).load(Ordering::Acquire)
    }

    /// Sets a local signal: to reset it, or to release waits that would never end.
    pub fn set_signal(&self, signal: Signal, value: u64) {
        self.shared
            .signals
            .at(signal.0 as usize)
            .store(value, Ordering::Release);
    }

    /// Waits until a local signal is at least `value`, by the signed difference; returns its value.
    ///
    /// # Errors
    /// [`HeapError::Timeout`]; an earlier failure.
    #[doc(alias = "nvshmem_signal_wait_until")]
    pub fn wait_signal(
        &self,
        signal: Signal,
        value: u64,
        timeout: impl Into<Option<Duration>>,
    ) -> Result<u64, HeapError> {
        let timeout = timeout.into();
        let mut backoff = Backoff::new(timeout);
        loop {
            let now = self.signal_value(signal);
            if now.wrapping_sub(value) as i64 >= 0 {
                return Ok(now);
            }
            if let Some(failed) = self.queue.failure() {
                return Err(failed.into());
            }
            if !backoff.wait() {
                let what = format!("signal {} to be {value}, and it is {now}", signal.0);
                return Err(HeapError::Timeout {
                    what,
                    after: timeout.unwrap_or_default(),
                });
            }
        }
    }

    /// Waits until the host's requests are complete: sources may change, targets have the data.
    ///
    /// # Errors
    /// [`HeapError::Timeout`], or a failure.
    #[doc(alias = "nvshmem_quiet")]
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

    /// A barrier of all ranks' hosts; earlier requests of all of them are complete.
    ///
    /// # Errors
    /// [`HeapError::Timeout`], after a small multiple of the time in total, or a failure.
    #[doc(alias = "nvshmem_barrier_all")]
    pub fn barrier(&mut self, timeout: impl Into<Option<Duration>>) -> Result<(), HeapError> {
        let timeout = timeout.into();
        self.quiet(timeout)?;
        self.epoch += 1;
        for (round, peer) in self.shared.barrier_rounds() {
            self.signal(peer, Signal(round), SignalOp::Set(self.epoch))?;
            self.wait_signal(Signal(round), self.epoch, timeout)?;
        }
        // A rank may drop its queue pairs after this: its notifications must have been delivered.
        // A failure of a peer that has already left is reported by later requests.
        match self.quiet(timeout) {
            Err(HeapError::Failed(_)) => Ok(()),
            done => done,
        }
    }

    /// Copies `bytes` into this rank's part; concurrent puts from there may send old or new bytes.
    ///
    /// # Errors
    /// [`HeapError::Range`]; [`HeapError::OnGpu`] for a part in GPU memory.
    pub fn write_at(&mut self, into: SymmetricRange, offset: u64, bytes: &[u8]) -> Result<(), HeapError> {
        let at = into.slice(offset, bytes.len() as u64)?.at;
        self.shared
            .data
            .host()?
            .copy_in(self.shared.check_range(at, bytes.len())?, bytes);
        Ok(())
    }

    /// Copies bytes out of this rank's part. Concurrent puts by peers may be seen in part.
    pub fn read_at(&self, from: SymmetricRange, offset: u64, into: &mut [u8]) -> Result<(), HeapError> {
        let at = from.slice(offset, into.len() as u64)?.at;
        self.shared
            .data
            .host()?
            .copy_out(self.shared.check_range(at, into.len())?, into);
        Ok(())
    }

    /// This rank's part of a range; `None` if no CUDA device can access it.
    #[must_use]
    pub fn span(&self, range: SymmetricRange) -> Option<Span<'_>> {
        let start = usize::try_from(range.at).ok()?;
        let end = start.checked_add(usize::try_from(range.len).ok()?)?;
        self.shared.data.span()?.span(start..end).ok()
    }

    /// The device pointer of this rank's part; the host address if no CUDA device can access it.
    #[must_use]
    #[doc(alias = "nvshmem_ptr")]
    pub fn device_ptr(&self, range: SymmetricRange) -> DevicePtr {
        DevicePtr(self.shared.data.device_ptr().0 + range.at)
    }

    /// All of this rank's part and its signals, as launch resources.
    pub fn uses(&self) -> impl Iterator<Item = Span<'_>> {
        self.shared.data.span().into_iter().chain(self.shared.signals.all())
    }

    /// A queue of `slots` slots (rounded up to a power of two) through which kernels of the device
    /// submit puts. Without a context, for kernels run on the host.
    pub fn kernel_queue(&self, context: Option<&CudaContext>, slots: u32) -> Result<KernelQueue, HeapError> {
        let rank_info = RankInfo {
            heap: self.shared.data.device_ptr(),
            signals: self.shared.signals.device_ptr(),
            rank: self.shared.rank,
            ranks: self.shared.ranks,
        };
        let keep = Arc::clone(&self.shared);
        Ok(KernelQueue::open(
            self.shared.proxy.registry(),
            context,
            slots,
            rank_info,
            keep,
        )?)
    }

    /// Stream-ordered puts. Collective: all ranks call it in the same order, each with any stream.
    ///
    /// # Errors
    /// [`HeapError::NoSignal`]; [`HeapError::NoGpu`] without a GPU; the CUDA driver's error.
    pub fn on_stream(&mut self, stream: &Stream) -> Result<HeapStream, HeapError> {
        let barrier_rounds = self.shared.barrier_rounds().count() as u64;
        let first = self.alloc_signals(barrier_rounds)?;
        HeapStream::new(Arc::clone(&self.shared), stream, first)
    }

    /// The first failed request of the host.
    #[must_use]
    pub fn failure(&self) -> Option<crate::proxy::RequestFailure> {
        self.queue.failure()
    }
}

impl HeapState {
    /// The rounds of a dissemination barrier: each round's index and the rank to notify in it.
    fn barrier_rounds(&self) -> impl Iterator<Item = (u64, u32)> + use<> {
        let (rank, ranks) = (u64::from(self.rank), u64::from(self.ranks));
        (0..BARRIER_SIGNALS)
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

    fn transfer(
        &self,
        operation: Operation,
        here: SymmetricRange,
        there: SymmetricRange,
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

    fn signal_update(&self, peer: u32, signal: u64, update: SignalOp) -> Result<Descriptor, HeapError> {
        self.check_peer(peer)?;
        Ok(Descriptor {
            operation: Operation::Signal(SignalUpdate { signal, update }),
            peer,
            len: 0,
            local: 0,
            remote: 0,
            id: 0,
        })
    }

    /// The offset, if the bytes are within the part: a range may belong to another heap.
    fn check_range(&self, at: u64, len: usize) -> Result<usize, HeapError> {
        let whole = self.data.len();
        let end = at.checked_add(len as u64).filter(|end| *end <= whole);
        end.map(|_| at as usize).ok_or(HeapError::Range {
            offset: at,
            len: len as u64,
            whole,
        })
    }
}
