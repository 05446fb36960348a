//! Words that streams write and wait for, without a kernel: how a stream and a processor, or two streams of two processes, tell each other how far they are.

use core::ffi::c_uint;

use crate::error::Error;
use crate::memory::Span;
use crate::stream::Stream;
use crate::sys;

/// When a wait for a word is over: `CUstreamWaitValue_flags`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Until<T> {
    /// It is the value or beyond, by its difference as a signed number: so counters may wrap.
    AtLeast(T),
    /// It is the value.
    Equal(T),
    /// It has one of the value's bits.
    AnyBit(T),
}

impl<T: Copy> Until<T> {
    fn parts(self) -> (T, c_uint) {
        match self {
            Self::AtLeast(value) => (value, sys::WAIT_AT_LEAST),
            Self::Equal(value) => (value, sys::WAIT_EQUAL),
            Self::AnyBit(value) => (value, sys::WAIT_ANY_BIT),
        }
    }
}

impl Stream {
    /// Writes `value` to the first 4 bytes of `word` when all that was put into the stream before is done, and can be seen.
    ///
    /// # Errors
    /// [`Error::OutOfBounds`], [`Error::Misaligned`], [`Error::Missing`] before CUDA 11.7, or what the driver says.
    pub fn write_value32(&self, word: Span<'_>, value: u32) -> Result<(), Error> {
        let word = first(word, 4)?;
        let Some(write) = self.driver().table().stream_write_value32 else {
            return Err(self.driver().missing("cuStreamWriteValue32_v2"));
        };
        self.enqueue("cuStreamWriteValue32", &[word.resource()], |_, stream| {
            // SAFETY: the word lies in memory that is kept until this is done, on its boundary; on the host nobody has a reference to it that is not atomic.
            unsafe { write(stream, word.address(), value, 0) }
        })
    }

    /// As [`Stream::write_value32`], 8 bytes.
    ///
    /// # Errors
    /// As [`Stream::write_value32`]; [`Error::NotSupported`] where the device has only the other.
    pub fn write_value64(&self, word: Span<'_>, value: u64) -> Result<(), Error> {
        let word = first(word, 8)?;
        let Some(write) = self.driver().table().stream_write_value64 else {
            return Err(self.driver().missing("cuStreamWriteValue64_v2"));
        };
        self.enqueue("cuStreamWriteValue64", &[word.resource()], |_, stream| {
            // SAFETY: as above.
            unsafe { write(stream, word.address(), value, 0) }
        })
    }

    /// What is put into the stream from now on waits until the first 4 bytes of `word` are so. Whoever is to write them must be able to: a stream that waits for
    /// ever cannot be drained, nor the device synchronised.
    ///
    /// # Errors
    /// [`Error::OutOfBounds`], [`Error::Misaligned`], [`Error::Missing`] before CUDA 11.7, or what the driver says.
    pub fn wait_value32(&self, word: Span<'_>, until: Until<u32>) -> Result<(), Error> {
        let word = first(word, 4)?;
        let Some(wait) = self.driver().table().stream_wait_value32 else {
            return Err(self.driver().missing("cuStreamWaitValue32_v2"));
        };
        let (value, flags) = until.parts();
        self.enqueue("cuStreamWaitValue32", &[word.resource()], |_, stream| {
            // SAFETY: as above.
            unsafe { wait(stream, word.address(), value, flags) }
        })
    }

    /// As [`Stream::wait_value32`], 8 bytes.
    ///
    /// # Errors
    /// As [`Stream::wait_value32`]; [`Error::NotSupported`] where the device has only the other.
    pub fn wait_value64(&self, word: Span<'_>, until: Until<u64>) -> Result<(), Error> {
        let word = first(word, 8)?;
        let Some(wait) = self.driver().table().stream_wait_value64 else {
            return Err(self.driver().missing("cuStreamWaitValue64_v2"));
        };
        let (value, flags) = until.parts();
        self.enqueue("cuStreamWaitValue64", &[word.resource()], |_, stream| {
            // SAFETY: as above.
            unsafe { wait(stream, word.address(), value, flags) }
        })
    }
}

/// The word that a span begins with.
fn first(span: Span<'_>, word: usize) -> Result<Span<'_>, Error> {
    let span = span.span(..word)?;
    if !span.address().is_multiple_of(word as u64) {
        return Err(Error::Misaligned {
            offset: span.offset(),
            word,
        });
    }
    Ok(span)
}
