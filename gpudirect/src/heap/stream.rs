//! Stream-ordered puts.
//!
//! Requests are written to a *gated* ring at once. The stream releases them by writing the ring's
//! `released` count (`cuStreamWriteValue64`) and waits for its `completed` count
//! (`cuStreamWaitValue64`): the host does not block, and no kernel is launched.

use std::sync::Arc;

use doorbell_cuda::{Stream, WaitCondition};

use super::{HeapError, HeapState, Signal, SignalOp, SymmetricRange};
use crate::proxy::{Backoff, COMPLETED, Descriptor, Operation, RELEASED, RequestFailure, Ring, SignalUpdate};

/// Slots of the ring: the maximum number of puts that the stream has not reached.
const SLOTS: u32 = 1024;

/// A [`SymmetricHeap`](super::SymmetricHeap) in stream order: operations return at once, unless
/// 1024 puts are pending in the stream.
///
/// Meanwhile no other `HeapStream` may use the stream for this heap.
pub struct HeapStream {
    shared: Arc<HeapState>,
    stream: Stream,
    ring: Arc<Ring>,
    submitted: u64,
    /// The first signal of its barriers, and the number of barriers so far.
    words: u64,
    epoch: u64,
    error_text: bool,
}

impl HeapStream {
    pub(super) fn new(shared: Arc<HeapState>, stream: &Stream, words: u64) -> Result<Self, HeapError> {
        if shared.signals.span(0).is_none() {
            return Err(HeapError::NoGpu);
        }
        let ring = Ring::pinned(stream.context(), SLOTS, true)?;
        shared.proxy.registry().open(Arc::clone(&ring));
        Ok(Self {
            shared,
            stream: stream.clone(),
            ring,
            submitted: 0,
            words,
            epoch: 0,
            error_text: false,
        })
    }

    /// Its stream.
    #[must_use]
    pub fn stream(&self) -> &Stream {
        &self.stream
    }

    /// As [`SymmetricHeap::put`](super::SymmetricHeap::put), in stream order.
    ///
    /// # Errors
    /// As there; [`HeapError::Capturing`]; the CUDA driver's error.
    pub fn put(&mut self, from: SymmetricRange, to: SymmetricRange, peer: u32) -> Result<(), HeapError> {
        let descriptor = self.shared.transfer(Operation::Put(None), from, to, peer)?;
        self.submit(&descriptor)
    }

    /// As [`SymmetricHeap::put_signal`](super::SymmetricHeap::put_signal), in stream order.
    pub fn put_signal(
        &mut self,
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
        let descriptor = self
            .shared
            .transfer(Operation::Put(Some(signal_update)), from, to, peer)?;
        self.submit(&descriptor)
    }

    /// As [`SymmetricHeap::get`](super::SymmetricHeap::get), in stream order; work after
    /// [`quiet`](Self::quiet) sees the bytes.
    pub fn get(&mut self, into: SymmetricRange, from: SymmetricRange, peer: u32) -> Result<(), HeapError> {
        let descriptor = self.shared.transfer(Operation::Get, into, from, peer)?;
        self.submit(&descriptor)
    }

    /// As [`SymmetricHeap::signal`](super::SymmetricHeap::signal), in stream order.
    pub fn signal(&mut self, peer: u32, signal: Signal, update: SignalOp) -> Result<(), HeapError> {
        let descriptor = self.shared.signal_update(peer, signal.0, update)?;
        self.submit(&descriptor)
    }

    /// Makes later work wait until the local signal is at least `value`, by the signed difference;
    /// without timeout, see [`SymmetricHeap::set_signal`](super::SymmetricHeap::set_signal).
    pub fn wait_signal(&mut self, signal: Signal, value: u64) -> Result<(), HeapError> {
        let word = self.shared.signals.span(signal.0 as usize).ok_or(HeapError::NoGpu)?;
        Ok(self.stream.wait_value64(word, WaitCondition::AtLeast(value))?)
    }

    /// Makes later work wait until all requests submitted here are complete or failed.
    ///
    /// # Errors
    /// [`HeapError::Capturing`]; the CUDA driver's error.
    pub fn quiet(&mut self) -> Result<(), HeapError> {
        self.check()?;
        let word = self.ring.words.span(COMPLETED).ok_or(HeapError::NoGpu)?;
        Ok(self.stream.wait_value64(word, WaitCondition::AtLeast(self.submitted))?)
    }

    /// A barrier of all ranks' streams, behind which earlier requests in them are complete.
    pub fn barrier(&mut self) -> Result<(), HeapError> {
        self.quiet()?;
        self.epoch += 1;
        let shared = Arc::clone(&self.shared);
        for (round, peer) in shared.barrier_rounds() {
            let word = Signal(self.words + round);
            self.signal(peer, word, SignalOp::Set(self.epoch))?;
            self.wait_signal(word, self.epoch)?;
        }
        Ok(())
    }

    /// The first failed request.
    #[must_use]
    pub fn failure(&self) -> Option<RequestFailure> {
        self.ring.failure()
    }

    fn check(&self) -> Result<(), HeapError> {
        if self.error_text {
            return Err(HeapError::Broken);
        }
        if self.stream.is_capturing()? {
            return Err(HeapError::Capturing);
        }
        self.failure().map_or(Ok(()), |failed| Err(failed.into()))
    }

    fn submit(&mut self, descriptor: &Descriptor) -> Result<(), HeapError> {
        self.check()?;
        let word = self.ring.words.span(RELEASED).ok_or(HeapError::NoGpu)?;
        let mut backoff = Backoff::new(None);
        // The only writer: the ring is full only of requests that the stream has not reached.
        while self.ring.try_write(descriptor).is_none() {
            if let Some(failed) = self.failure() {
                return Err(failed.into());
            }
            backoff.wait();
        }
        self.submitted += 1;
        // A request written but not released would be released with the next one.
        Ok(self
            .stream
            .write_value64(word, self.submitted)
            .inspect_err(|_| self.error_text = true)?)
    }
}

impl Drop for HeapStream {
    fn drop(&mut self) {
        self.ring.close();
    }
}

debug_fields!(HeapStream, self, stream = self.stream, submitted = self.submitted);
