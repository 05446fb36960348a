//! Puts in the order of a stream.
//!
//! What is asked for is written into a ring at once, and taken by the proxy when the stream has come so far: a *gated* ring, whose count of what may be taken the stream writes (`cuStreamWriteValue64`). What is done the proxy counts in a word that the stream
//! waits for (`cuStreamWaitValue64`). So neither blocks the host, and no kernel is launched for either.

use core::fmt;
use std::sync::Arc;

use doorbell_cuda::{Stream, Until};

use super::{HeapError, Shared, Signal, Symmetric, Update};
use crate::proxy::{COMPLETED, Descriptor, Failed, Operation, Patience, RELEASED, Ring, Signalling};

/// How many puts a stream may have in front of it.
const SLOTS: u32 = 1024;

/// A [`SymmetricHeap`](super::SymmetricHeap) in the order of a stream: everything here is put into the stream and returns at once, but where 1024 puts wait in front of it.
///
/// It must be the only one that puts anything for the heap into the stream while it is used; other work may go into the stream between.
pub struct HeapStream {
    shared: Arc<Shared>,
    stream: Stream,
    ring: Arc<Ring>,
    /// Puts asked for.
    asked: u64,
    /// Words of its barriers, and how many there were.
    words: u64,
    epoch: u64,
    broken: bool,
}

impl HeapStream {
    pub(super) fn new(shared: Arc<Shared>, stream: &Stream, words: u64) -> Result<Self, HeapError> {
        if shared.signals.span(0).is_none() {
            return Err(HeapError::NotPinned);
        }
        let ring = Ring::pinned(stream.context(), SLOTS, true)?;
        shared.proxy.door().open(Arc::clone(&ring));
        Ok(Self {
            shared,
            stream: stream.clone(),
            ring,
            asked: 0,
            words,
            epoch: 0,
            broken: false,
        })
    }

    /// The stream.
    #[must_use]
    pub fn stream(&self) -> &Stream {
        &self.stream
    }

    /// As [`SymmetricHeap::put`](super::SymmetricHeap::put), when all that is in the stream now is done.
    ///
    /// # Errors
    /// As there; [`HeapError::Capturing`]; the CUDA driver's error.
    pub fn put(&mut self, from: Symmetric, to: Symmetric, peer: u32) -> Result<(), HeapError> {
        let descriptor = self.shared.moving(Operation::Put(None), from, to, peer)?;
        self.ask(&descriptor)
    }

    /// As [`SymmetricHeap::put_signal`](super::SymmetricHeap::put_signal), when all that is in the stream now is done.
    ///
    /// # Errors
    /// As of [`put`](Self::put).
    pub fn put_signal(
        &mut self,
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
        let descriptor = self.shared.moving(Operation::Put(Some(signalling)), from, to, peer)?;
        self.ask(&descriptor)
    }

    /// As [`SymmetricHeap::get`](super::SymmetricHeap::get), when all that is in the stream now is done; what comes after [`quiet`](Self::quiet) finds the bytes.
    ///
    /// # Errors
    /// As of [`put`](Self::put).
    pub fn get(&mut self, into: Symmetric, from: Symmetric, peer: u32) -> Result<(), HeapError> {
        let descriptor = self.shared.moving(Operation::Get, into, from, peer)?;
        self.ask(&descriptor)
    }

    /// As [`SymmetricHeap::signal`](super::SymmetricHeap::signal), when all that is in the stream now is done.
    ///
    /// # Errors
    /// As of [`put`](Self::put).
    pub fn signal(&mut self, peer: u32, signal: Signal, update: Update) -> Result<(), HeapError> {
        let descriptor = self.shared.signalling(peer, signal.0, update)?;
        self.ask(&descriptor)
    }

    /// What comes into the stream from now on waits until the signal of this rank is `value` or beyond it, by the difference as a signed number. A stream waits as long as that takes: see [`SymmetricHeap::set_signal`](super::SymmetricHeap::set_signal).
    ///
    /// # Errors
    /// The CUDA driver's error.
    pub fn wait_signal(&mut self, signal: Signal, value: u64) -> Result<(), HeapError> {
        let word = self
            .shared
            .signals
            .span(signal.0 as usize)
            .ok_or(HeapError::NotPinned)?;
        Ok(self.stream.wait_value64(word, Until::AtLeast(value))?)
    }

    /// What comes into the stream from now on waits until all that was asked for here is done, or has failed: [`failure`](Self::failure) says so afterwards.
    ///
    /// # Errors
    /// [`HeapError::Capturing`]; the CUDA driver's error.
    pub fn quiet(&mut self) -> Result<(), HeapError> {
        self.check()?;
        let word = self.ring.words.span(COMPLETED).ok_or(HeapError::NotPinned)?;
        Ok(self.stream.wait_value64(word, Until::AtLeast(self.asked))?)
    }

    /// What comes into the stream from now on waits until the stream of every rank is here, and all that was asked for in them before is done.
    ///
    /// # Errors
    /// As of [`put`](Self::put).
    pub fn barrier(&mut self) -> Result<(), HeapError> {
        self.quiet()?;
        self.epoch += 1;
        let shared = Arc::clone(&self.shared);
        for (round, peer) in shared.rounds() {
            let word = Signal(self.words + round);
            self.signal(peer, word, Update::Set(self.epoch))?;
            self.wait_signal(word, self.epoch)?;
        }
        Ok(())
    }

    /// The first thing that was asked for here and has failed.
    #[must_use]
    pub fn failure(&self) -> Option<Failed> {
        self.ring.failure()
    }

    fn check(&self) -> Result<(), HeapError> {
        if self.broken {
            return Err(HeapError::Broken);
        }
        if self.stream.is_capturing()? {
            return Err(HeapError::Capturing);
        }
        self.failure().map_or(Ok(()), |failed| Err(failed.into()))
    }

    fn ask(&mut self, descriptor: &Descriptor) -> Result<(), HeapError> {
        self.check()?;
        let word = self.ring.words.span(RELEASED).ok_or(HeapError::NotPinned)?;
        let mut patience = Patience::new(None);
        // The ring is this one's alone, so it is full only of what the stream has not come to.
        while self.ring.try_write(descriptor).is_none() {
            if let Some(failed) = self.failure() {
                return Err(failed.into());
            }
            patience.wait();
        }
        self.asked += 1;
        // What was written and is not released would go with the next.
        Ok(self
            .stream
            .write_value64(word, self.asked)
            .inspect_err(|_| self.broken = true)?)
    }
}

impl Drop for HeapStream {
    fn drop(&mut self) {
        self.ring.close();
    }
}

impl fmt::Debug for HeapStream {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("HeapStream")
            .field("stream", &self.stream)
            .field("asked", &self.asked)
            .finish_non_exhaustive()
    }
}
