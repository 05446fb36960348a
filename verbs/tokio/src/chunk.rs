//! Registered buffers lent to the program: received bytes, and bytes to be sent.

use std::ops::{Deref, DerefMut};
use std::sync::Arc;

use bytes::Bytes;
use crossbeam_queue::ArrayQueue;
use doorbell_verbs::Buffer;

/// Bytes as they came from the peer, in the buffer that its device has filled.
///
/// When it is dropped, the stream posts the buffer as a receive again: a program that keeps all of
/// them stops the peer. After the stream it may live on.
#[derive(Debug)]
pub struct ReceivedChunk {
    /// Present until it is dropped.
    buffer: Option<Buffer>,
    len: usize,
    home: Arc<Returned>,
}

/// A buffer to be filled in place, for [`RdmaStream::send`](crate::RdmaStream::send).
#[derive(Debug)]
pub struct SendChunk {
    pub(crate) buffer: Buffer,
    pub(crate) len: usize,
}

/// Receive buffers that programs are done with; as many as there are fit.
pub(crate) type Returned = ArrayQueue<Buffer>;

impl ReceivedChunk {
    pub(crate) fn new(buffer: Buffer, len: usize, home: Arc<Returned>) -> Self {
        Self {
            buffer: Some(buffer),
            len,
            home,
        }
    }
}

impl Drop for ReceivedChunk {
    fn drop(&mut self) {
        if let Some(buffer) = self.buffer.take() {
            // It has room for all buffers of the stream.
            let _ = self.home.push(buffer);
        }
    }
}

impl Deref for ReceivedChunk {
    type Target = [u8];

    fn deref(&self) -> &[u8] {
        self.buffer.as_deref().map_or(&[], |bytes| &bytes[..self.len])
    }
}

impl AsRef<[u8]> for ReceivedChunk {
    fn as_ref(&self) -> &[u8] {
        self
    }
}

impl From<ReceivedChunk> for Bytes {
    /// Without a copy.
    fn from(chunk: ReceivedChunk) -> Self {
        Bytes::from_owner(chunk)
    }
}

impl Deref for SendChunk {
    type Target = [u8];

    fn deref(&self) -> &[u8] {
        &self.buffer[..self.len]
    }
}

impl DerefMut for SendChunk {
    fn deref_mut(&mut self) -> &mut [u8] {
        &mut self.buffer[..self.len]
    }
}
