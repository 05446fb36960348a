//! Registered buffers lent to the program: received bytes, and bytes to be sent.

use std::ops::{Deref, DerefMut};
use std::sync::Arc;

use bytes::Bytes;
use crossbeam_queue::ArrayQueue;
use doorbell_verbs::Buffer;

use crate::events::Waiters;

/// Bytes as they came from the peer, in the buffer that its device has filled.
///
/// When it is dropped, the stream posts the buffer as a receive again: a program that keeps all of
/// them stops the peer. It may outlive the stream.
#[derive(Debug)]
pub(crate) struct ReceivedChunk(Lent);

/// A buffer to be filled in place, for [`RdmaStream::send`](crate::RdmaStream::send).
#[derive(Debug)]
pub struct SendChunk(Lent);

/// The first bytes of a buffer that returns to its queue when it is dropped.
#[derive(Debug)]
struct Lent {
    /// Present until it is dropped or sent.
    buffer: Option<Buffer>,
    len: usize,
    queue: Arc<ReturnQueue>,
}

/// Lent buffers of one kind that have been dropped.
#[derive(Debug)]
pub(crate) struct ReturnQueue {
    buffers: ArrayQueue<Buffer>,
    /// Tasks of the stream: what they sleep for may be a buffer.
    waiters: Arc<Waiters>,
}

impl ReturnQueue {
    /// With room for all of `buffers` buffers.
    pub(crate) fn new(buffers: usize, waiters: Arc<Waiters>) -> Arc<Self> {
        Arc::new(Self {
            buffers: ArrayQueue::new(buffers),
            waiters,
        })
    }

    pub(crate) fn take(&self) -> Option<Buffer> {
        self.buffers.pop()
    }

    pub(crate) fn put(&self, buffer: Buffer) {
        // There is room for all.
        let _ = self.buffers.push(buffer);
    }
}

impl Lent {
    fn bytes(&self) -> &[u8] {
        self.buffer.as_deref().map_or(&[], |bytes| &bytes[..self.len])
    }
}

impl Drop for Lent {
    fn drop(&mut self) {
        if let Some(buffer) = self.buffer.take() {
            self.queue.put(buffer);
            self.queue.waiters.wake_all();
        }
    }
}

impl ReceivedChunk {
    pub(crate) fn new(buffer: Buffer, len: usize, queue: Arc<ReturnQueue>) -> Self {
        Self(Lent {
            buffer: Some(buffer),
            len,
            queue,
        })
    }
}

impl AsRef<[u8]> for ReceivedChunk {
    fn as_ref(&self) -> &[u8] {
        self.0.bytes()
    }
}

impl From<ReceivedChunk> for Bytes {
    /// Without a copy.
    fn from(chunk: ReceivedChunk) -> Self {
        Bytes::from_owner(chunk)
    }
}

impl SendChunk {
    pub(crate) fn new(buffer: Buffer, len: usize, queue: Arc<ReturnQueue>) -> Self {
        Self(Lent {
            buffer: Some(buffer),
            len,
            queue,
        })
    }

    /// The buffer, to be sent.
    pub(crate) fn take(&mut self) -> Option<Buffer> {
        self.0.buffer.take()
    }

    pub(crate) fn is_of(&self, queue: &Arc<ReturnQueue>) -> bool {
        Arc::ptr_eq(&self.0.queue, queue)
    }
}

impl Deref for SendChunk {
    type Target = [u8];

    fn deref(&self) -> &[u8] {
        self.0.bytes()
    }
}

impl DerefMut for SendChunk {
    fn deref_mut(&mut self) -> &mut [u8] {
        let len = self.0.len;
        self.0.buffer.as_deref_mut().map_or(&mut [], |bytes| &mut bytes[..len])
    }
}
